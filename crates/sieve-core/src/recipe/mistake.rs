//! One mistake in a recipe: where, what, and how to fix it.

use std::fmt;

/// One mistake in a recipe.
#[derive(Clone, Debug, PartialEq)]
pub struct Mistake {
    /// Where the value was written; `None` for a missing key or a recipe built in code.
    pub location: Option<Location>,
    /// The key as `section.key`, or a section's name.
    pub key: String,
    /// What is wrong with the value.
    pub what: String,
    /// How to fix the mistake; may be empty.
    pub hint: String,
}

impl Mistake {
    pub(super) fn new(key: impl Into<String>, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { location: None, key: key.into(), what: what.into(), hint: hint.into() }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(location) = &self.location {
            write!(out, "{location}: ")?;
        }
        write!(out, "{}: {}", self.key, self.what)?;
        match self.hint.as_str() {
            "" => Ok(()),
            hint => write!(out, "\n    hint: {hint}"),
        }
    }
}

/// Where a mistaken value was written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Location {
    /// A line of the recipe's text, counted from 1.
    Line(usize),
    /// In an override with this text.
    Override(String),
}

impl fmt::Display for Location {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(out, "line {line}"),
            Self::Override(item) => write!(out, "--set {item}"),
        }
    }
}

/// The names in quotation marks, separated by commas: `"a", "b"`.
pub(super) fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
}
