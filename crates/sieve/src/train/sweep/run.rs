//! One training run of a sweep.
use sieve_core::Recipe;
use sieve_train::RunRequest;

/// One training run of the sweep.
pub(super) struct Run {
    /// `section.key=value` for every key that the sweep varies.
    pub(super) overrides: Vec<String>,
    pub(super) recipe: Recipe,
    /// The line about the text that `data.fallback` chose, if any.
    pub(super) text: Option<String>,
    pub(super) request: RunRequest,
}
