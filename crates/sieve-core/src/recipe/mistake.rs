//! One mistake in a recipe: where, what, and how to fix it.

use std::fmt;

use thiserror::Error;

/// One mistake in a recipe.
#[derive(Clone, Debug, PartialEq)]
pub struct Mistake {
    /// Where the value was written; `None` when it is written nowhere (a missing key, or a recipe built in code).
    pub location: Option<Location>,
    /// The key as `section.key`, or the section.
    pub key: String,
    /// What is wrong with it.
    pub problem: Problem,
}

impl Mistake {
    pub(super) fn new(key: impl Into<String>, problem: Problem) -> Self {
        Self {
            location: None,
            key: key.into(),
            problem,
        }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            Some(location) => write!(out, "{location}: {}: {}", self.key, self.problem)?,
            None => write!(out, "{}: {}", self.key, self.problem)?,
        }
        match self.problem.hint() {
            Some(hint) => write!(out, "\n    hint: {hint}"),
            None => Ok(()),
        }
    }
}

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Location {
    /// A line of the recipe's text, counted from 1.
    Line(usize),
    /// An override, as given.
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

/// What can be wrong with one key.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Problem {
    /// An override without a section, a key or a value.
    #[error("an override is written section.key=value")]
    OverrideForm,
    /// A section that does not exist.
    #[error("there is no section [{name}]{}", did_you_mean(*.nearest))]
    UnknownSection {
        /// The name as written.
        name: String,
        /// The section most like it.
        nearest: Option<&'static str>,
        /// All sections.
        known: Vec<&'static str>,
    },
    /// A key that stands before the first section.
    #[error("a key must be in a section")]
    OutsideSection {
        /// The section that has a key of this name.
        home: Option<&'static str>,
    },
    /// A key the section does not have.
    #[error("[{section}] has no key {name}{}", did_you_mean(*.nearest))]
    UnknownKey {
        /// The section, or `section.key` for a table inside one.
        section: String,
        /// The name as written.
        name: String,
        /// The key most like it.
        nearest: Option<&'static str>,
        /// Another section that has a key of this name.
        home: Option<&'static str>,
        /// All keys of the section.
        known: Vec<&'static str>,
    },
    /// A section or key the format reserves for something that does not exist yet.
    #[error("is not built yet")]
    NotBuilt {
        /// What to do instead.
        hint: String,
    },
    /// A section that must be there.
    #[error("section [{section}] is missing")]
    MissingSection {
        /// The section.
        section: &'static str,
        /// Keys it must have.
        required: Vec<&'static str>,
    },
    /// A key that must be there.
    #[error("is missing; it must be {wanted}")]
    MissingKey {
        /// What its value would be.
        wanted: String,
    },
    /// A value of another type.
    #[error("wanted {wanted}, got {got}")]
    WrongType {
        /// The type the key has.
        wanted: String,
        /// The value as written.
        got: String,
    },
    /// A name that is not among those the key takes.
    #[error("there is no {got:?}{}", did_you_mean(*.nearest))]
    UnknownChoice {
        /// The value as written.
        got: String,
        /// The name most like it.
        nearest: Option<&'static str>,
        /// All names.
        known: &'static [&'static str],
    },
    /// A key of another attention kind.
    #[error("does not go with kind = {kind:?}")]
    OtherKind {
        /// The kind the recipe asks for.
        kind: String,
        /// The kinds that have this key.
        kinds: Vec<&'static str>,
        /// The keys of the recipe's kind.
        keys: Vec<&'static str>,
    },
    /// Not exactly one of `path`, `train` and `numbers`.
    #[error("needs exactly one of path, train and numbers, got {got}")]
    TokenizerSource {
        /// `none`, `two` or `all`.
        got: &'static str,
    },
    /// A value, or two values together, that cannot work.
    #[error("{what}")]
    Rule {
        /// The rule and the values that break it.
        what: String,
        /// How to fix it.
        hint: String,
    },
}

impl Problem {
    /// How to fix it, where there is more to say than the message does.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::OverrideForm => Some("for example --set optimizer.lr=1e-3".to_owned()),
            Self::UnknownSection { known, .. } => Some(format!("the sections are {}", known.join(", "))),
            Self::OutsideSection { home: Some(home) } => Some(format!("move it below [{home}]")),
            Self::OutsideSection { home: None } => Some("move it below the section it belongs to".to_owned()),
            Self::UnknownKey {
                name, home: Some(home), ..
            } => Some(format!("{name} belongs to [{home}]")),
            Self::UnknownKey { section, known, .. } if known.is_empty() => {
                Some(format!("{section} is a value, not a table"))
            }
            Self::UnknownKey { section, known, .. } => Some(format!(
                "the keys of [{section}] \
                are {}",
                known.join(", ")
            )),
            Self::MissingSection { section, required } if !required.is_empty() => {
                Some(format!("[{section}] must give {}", required.join(", ")))
            }
            Self::UnknownChoice { known, .. } => Some(format!("it can be {}", quoted(known))),
            Self::OtherKind { kind, kinds, keys } => {
                let own = if keys.is_empty() {
                    "none".to_owned()
                } else {
                    keys.join(", ")
                };
                Some(format!(
                    "it belongs to kind = {}; besides kind, {kind:?} takes {own}",
                    quoted(kinds)
                ))
            }
            Self::TokenizerSource { .. } => Some(
                "path = \"…/tokenizer.json\" to read one, train = { vocab_size = 4096 } to make one, or numbers = \
                     8192 for a synthetic task"
                    .to_owned(),
            ),
            Self::NotBuilt { hint } | Self::Rule { hint, .. } => Some(hint.clone()).filter(|hint| !hint.is_empty()),
            Self::MissingSection { .. } | Self::MissingKey { .. } | Self::WrongType { .. } => None,
        }
    }
}

/// `"a", "b"`.
pub(super) fn quoted(names: &[&str]) -> String {
    names
        .iter()
        .map(|name| format!("{name:?}"))
        .collect::<Vec<_>>()
        .join(", ")
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest
        .map(|name| format!(", did you mean {name}?"))
        .unwrap_or_default()
}
