//! Checks that a crate that is not compiled for tests has none: cargo would pass over them in silence.
use crate::workspace;
use anyhow::{Context, Result};
use serde_json::Value;
use std::path::Path;

/// Checks the library of each crate of the workspace.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    let files = workspace::files()?;
    for package in workspace::packages("cargo metadata --format-version 1 --no-deps")? {
        let name = package["name"].as_str().unwrap_or_default();
        let is_library = |target: &&Value| target["kind"].as_array().is_some_and(|kinds| kinds.contains(&"lib".into()));
        let targets = package["targets"].as_array().into_iter().flatten();
        for target in targets.filter(is_library) {
            let root = Path::new(target["src_path"].as_str().unwrap_or_default()).parent();
            let root =
                root.with_context(|| format!("{name}: lib.rs is in a folder"))?.strip_prefix(workspace::root())?;
            for file in files.iter().filter(|file| file.ends_with(".rs") && Path::new(file).starts_with(root)) {
                let text = workspace::read(file)?;
                let is_off = |key: &str| target[key].as_bool() == Some(false);
                problems.extend(passed_over(&text, is_off("test"), is_off("doctest")).map(|what| {
                    format!("{file} has {what}, which do not run: take the key out of [lib] in {name}'s Cargo.toml")
                }));
            }
        }
    }
    Ok(())
}

/// What a source file has that its crate's manifest switches off.
fn passed_over(text: &str, no_tests: bool, no_doctests: bool) -> Option<&'static str> {
    let lines = || text.lines().map(str::trim_start);
    let is_test = |line: &str| line.starts_with("#[test]") || line.starts_with("proptest!");
    // A fence of another language than Rust names it; one that ends a block is bare, too, so the first one counts.
    let fence = |line: &str| {
        let said = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?;
        said.trim_start().strip_prefix("```").map(|language| language.trim().to_owned())
    };
    let opens_code = lines().filter_map(fence).next().is_some_and(|language| {
        language.is_empty() || ["rust", "no_run", "should_panic", "compile_fail"].contains(&language.as_str())
    });
    match (no_tests && lines().any(is_test), no_doctests && opens_code) {
        (true, _) => Some("tests"),
        (_, true) => Some("examples in its documentation"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cargo_would_pass_over_is_found() {
        let test = "fn a() {}\n    #[test]\n    fn b() {}\n";
        let example = concat!("/// Adds.\n/// `", "``\n/// a();\n/// `", "``\nfn a() {}\n");
        let text = concat!("//! `", "``text\n//! a\n//! `", "``\n");
        assert_eq!(passed_over(test, true, true), Some("tests"));
        assert_eq!(passed_over(example, true, true), Some("examples in its documentation"));
        for (text, no_tests, no_doctests) in [(test, false, true), (example, true, false), (text, true, true)] {
            assert_eq!(passed_over(text, no_tests, no_doctests), None, "{text}");
        }
    }
}
