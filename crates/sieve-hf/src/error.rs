//! Errors of reading and writing weights.
use sieve_core::{Refusal, ShownPath};
use sieve_files::{in_place_of, python_number};
use std::borrow::Cow;
use std::fmt::Display;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// An error of reading or writing weights.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file or folder could not be written as a whole.
    #[error(transparent)]
    File(#[from] sieve_files::FileError),
    /// A file system operation failed.
    #[error("{action} {}: {source}{}", path.shown(), match source.kind() {
        ErrorKind::PermissionDenied => "\n  hint: this user may not; see ls -l and chmod",
        _ => "",
    })]
    Io {
        /// What was tried, as a present participle.
        action: &'static str,
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The contents of a file do not match its checksum.
    #[error(
        "{} is damaged: {problem}\n  hint: {}",
        path.shown(), previous.as_ref().map_or_else(|| "there is no checkpoint before it".to_owned(), |path| format!(
            "name the checkpoint before it, {}: sieve train by --resume-from, other commands by --checkpoint",
            path.shown()
        ))
    )]
    Damaged {
        /// Path of the damaged file.
        path: PathBuf,
        /// What is wrong with the file.
        problem: String,
        /// The previous checkpoint of the run, if there is one.
        previous: Option<PathBuf>,
    },
    /// The recipe beside the weights cannot be used.
    #[error("{}: {source}", path.shown())]
    BadRecipe {
        /// Path of the recipe.
        path: PathBuf,
        /// What is wrong with the recipe.
        source: Box<sieve_core::RecipeError>,
    },
    /// Files, folders or models that cannot be read, exported or imported.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A path holds no checkpoint.
    #[error("{} holds no checkpoint{}\n  hint: {}", path.shown(), match runs.as_slice() {
        [] if !path.exists() => ", because there is nothing of that name".to_owned(),
        [] => String::new(),
        _ => " of its own, and runs that do".to_owned(),
    }, match (runs.as_slice(), beside.as_slice()) {
        ([], []) => "name a folder step-N, or a run folder with checkpoint/step-N inside; a model of the Hugging Face \
                     hub is named hf://OWNER/NAME"
            .to_owned(),
        ([], names) => format!("the latest checkpoints next to it are {}", names.join(", ")),
        ([first, ..], _) => format!(
            "name one of them, as --checkpoint {}: {}",
            sieve_core::quoted(&path.join(first)),
            runs.join(", ")
        ),
    })]
    NotFound {
        /// The path that was given.
        path: PathBuf,
        /// The names of the latest checkpoints in the folder of `path`.
        beside: Vec<String>,
        /// The names of the runs in the folder `path` that have checkpoints, as a sweep's.
        runs: Vec<String>,
    },
}

impl CheckpointError {
    pub(crate) fn refused(what: impl Into<String>, hint: impl Into<Cow<'static, str>>) -> Self {
        Refusal::new(what, hint).into()
    }

    /// The error of a file or folder of `transformers` that no recipe can describe.
    pub(crate) fn not_importable(path: &Path, problem: impl Display, hint: impl Into<Cow<'static, str>>) -> Self {
        Self::refused(format!("{} cannot be imported: {problem}", path.shown()), hint)
    }

    /// The error for a file with invalid content.
    pub(crate) fn malformed(path: &Path, problem: impl Display) -> Self {
        Self::refused(format!("{}: {problem}", path.shown()), "fetch or copy the file again")
    }

    /// The error of a file that `error` says is not JSON.
    pub(crate) fn not_json(path: &Path, text: &str, error: &serde_json::Error) -> Self {
        if let Some((what, hint)) = in_place_of(text.as_bytes()) {
            return Self::refused(format!("{}: {what}", path.shown()), hint);
        }
        let (line, column) = (error.line(), error.column());
        match python_number(text, line, column) {
            Some(word) => Self::refused(
                format!("{}: line {line} column {column} has {word}, which is not JSON", path.shown()),
                "the file is as it was written: Python's json writes such words; put a number or null there",
            ),
            None => Self::malformed(path, format!("it is not JSON ({error})")),
        }
    }

    /// The error of tensors that do not fit the model.
    pub(crate) fn other_model(path: &Path, problem: impl Display) -> Self {
        Self::refused(
            format!("{} does not hold this model's weights: {problem}", path.shown()),
            "the checkpoint belongs to a recipe with a different [model] or [attention]",
        )
    }

    /// For `map_err`: adds the path to an error of a recipe.
    pub(crate) fn bad_recipe(path: &Path) -> impl Fn(sieve_core::RecipeError) -> Self {
        move |source| Self::BadRecipe { path: path.to_owned(), source: Box::new(source) }
    }

    /// For `map_err`: adds operation and path to an I/O error.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
