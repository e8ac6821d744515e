//! Expands environment variables in the paths of a recipe.

use crate::recipe::RecipeError;

/// Expands `~`, `$NAME`, `${NAME}`, `${NAME:-default}` and `$$` (a dollar sign) in one path or glob.
///
/// `variable` looks an environment variable up; this crate does not read the environment itself. `~` stands for `HOME`
/// at the start of the path or of a default, if `/` or nothing follows it. If a default is given, an empty variable
/// counts as not set. Variables in a default are expanded too, but it must not contain braces.
///
/// # Errors
/// [`RecipeError::UndefinedVariable`] and [`RecipeError::BadVariable`].
pub fn expand(path: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<String, RecipeError> {
    let undefined = |name: &str| RecipeError::UndefinedVariable { path: path.to_owned(), variable: name.to_owned() };
    let mut expanded = String::with_capacity(path.len());
    let mut rest = path;
    if let Some(after) = rest.strip_prefix('~')
        && (after.is_empty() || after.starts_with('/'))
    {
        expanded.push_str(&variable("HOME").ok_or_else(|| undefined("HOME"))?);
        rest = after;
    }
    while let Some(dollar) = rest.find('$') {
        expanded.push_str(&rest[..dollar]);
        let position = path[..path.len() - rest.len() + dollar].chars().count() + 1;
        let bad = || RecipeError::BadVariable { path: path.to_owned(), position };
        rest = &rest[dollar + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            expanded.push('$');
            rest = after;
        } else if let Some(after) = rest.strip_prefix('{') {
            let (inside, after) = after.split_once('}').ok_or_else(bad)?;
            let (name, default) = match inside.split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (inside, None),
            };
            if name.is_empty() || name_len(name) != name.len() {
                return Err(bad());
            }
            match (variable(name), default) {
                (Some(value), None) => expanded.push_str(&value),
                (Some(value), Some(_)) if !value.is_empty() => expanded.push_str(&value),
                (_, Some(default)) => expanded.push_str(&expand(default, variable)?),
                (None, None) => return Err(undefined(name)),
            }
            rest = after;
        } else {
            let (name, after) = rest.split_at(name_len(rest));
            if name.is_empty() {
                return Err(bad());
            }
            expanded.push_str(&variable(name).ok_or_else(|| undefined(name))?);
            rest = after;
        }
    }
    expanded.push_str(rest);
    Ok(expanded)
}

/// Length in bytes of the variable name at the start of `text`; 0 if there is none.
fn name_len(text: &str) -> usize {
    if text.starts_with(|first: char| first.is_ascii_digit()) {
        return 0;
    }
    text.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::refusal;

    fn lookup(name: &str) -> Option<String> {
        match name {
            "HOME" => Some("/home/ada".to_owned()),
            "CARGO_HOME" => Some("/opt/cargo".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        }
    }

    #[test]
    fn expands_every_form() {
        for (path, expected) in [
            ("plain/**/*.rs", "plain/**/*.rs"),
            ("~", "/home/ada"),
            ("~/text", "/home/ada/text"),
            ("~ada/text", "~ada/text"),
            ("a/~/b", "a/~/b"),
            ("$CARGO_HOME/registry", "/opt/cargo/registry"),
            ("${CARGO_HOME}registry", "/opt/cargoregistry"),
            ("x$HOME$CARGO_HOME", "x/home/ada/opt/cargo"),
            ("${MISSING:-~/.cargo}/registry", "/home/ada/.cargo/registry"),
            ("${CARGO_HOME:-~/.cargo}/registry", "/opt/cargo/registry"),
            ("${EMPTY:-$HOME}", "/home/ada"),
            ("${MISSING:-}x", "x"),
            ("$EMPTY", ""),
            ("price in $$", "price in $"),
            ("ü/$HOME/ü", "ü//home/ada/ü"),
        ] {
            assert_eq!(expand(path, &lookup).as_deref(), Ok(expected), "{path}");
        }
    }

    #[test]
    fn names_what_is_missing_or_malformed() {
        for path in ["$MISSING/x", "${MISSING}/x", "a${MISSING_2:-$MISSING}"] {
            refusal(expand(path, &lookup), "MISSING is not set");
        }
        for (path, position) in [("a$/b", 2), ("ü${HOME", 2), ("${}", 1), ("${HO ME}", 1), ("$1", 1), ("x$", 2)] {
            let error = expand(path, &lookup).expect_err(path);
            assert_eq!(error, RecipeError::BadVariable { path: path.to_owned(), position });
        }
        assert!(expand("~/x", &|_| None).is_err());
    }
}
