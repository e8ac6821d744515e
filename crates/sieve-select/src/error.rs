//! Errors of selectors, with hints to fix them.

use std::borrow::Cow;
use std::path::Path;

use serde::de::DeserializeOwned;
use sieve_core::{MaskError, Refusal, ShownPath};
use thiserror::Error;

/// Every error of a selector.
#[derive(Debug, Error)]
pub enum SelectError {
    /// A setting outside its range, settings that exclude each other, or a use that the method does not have.
    #[error("{selector}: {problem}\n  hint: {hint}")]
    Value {
        /// Name of the selector.
        selector: &'static str,
        /// What is wrong, with the settings' values.
        problem: String,
        /// How to fix the setting.
        hint: String,
    },
    /// An unknown selector, a text or key that cannot be read, layers without exactly one selector, or impossible
    /// sizes.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A mask whose arrays break the rules of its form.
    #[error(transparent)]
    Mask(#[from] MaskError),
    /// A file that could not be read or written.
    #[error("{path}: {problem}\n  hint: {hint}")]
    File {
        /// Path of the file.
        path: String,
        /// Why reading or writing failed.
        problem: String,
        /// How to fix the file.
        hint: &'static str,
    },
}

impl SelectError {
    /// The error about a part of a selector's text, which is not `NAME:key=value,…`.
    pub(crate) fn form(selector: &str, item: &str, problem: &str) -> Self {
        let hint = "write NAME:key=value,key=value, for example pbs:select=xattention,tau=0.9";
        Self::refused(format!("{selector}: cannot read {item:?}: {problem}"), hint)
    }

    pub(crate) fn refused(problem: impl Into<String>, hint: impl Into<Cow<'static, str>>) -> Self {
        Refusal::new(problem, hint).into()
    }

    /// The error about a file that a setting names.
    pub(crate) fn file(path: &Path, hint: &'static str, problem: impl ToString) -> Self {
        Self::File { path: path.shown().to_string(), problem: problem.to_string(), hint }
    }
}

/// Reads a JSON file that a setting names.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path, hint: &'static str) -> Result<T, SelectError> {
    let text = sieve_files::read_text(path).map_err(|error| SelectError::file(path, hint, error))?;
    serde_json::from_str(&text).map_err(|error| SelectError::file(path, hint, error))
}
