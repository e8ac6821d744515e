//! Rules of lists of paths.

use super::broken::Rules;

/// Breaks a rule of `key`, the recipe's key with these paths, where there is no path, and for each path that is empty.
pub(super) fn check_paths(key: &str, paths: &[String], rules: &mut Rules<'_>) {
    rules.require(!paths.is_empty(), key, "is an empty list", "name at least one file or glob");
    for (index, path) in paths.iter().enumerate() {
        rules.require(
            !path.trim().is_empty(),
            key,
            format!("item {} is empty", index + 1),
            "name a file or a glob, or remove the item",
        );
    }
}
