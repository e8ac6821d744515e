//! The one error type of the crate.

use sieve_core::{Refusal, ShownPath};
use sieve_files::FileError;
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// Any error of this crate. Every message says what is wrong, where, and how to fix it. Variants distinguish what a
/// caller can react to; the message is written where the error occurs.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The operating system refused: missing file, no permission, full disk.
    #[error(transparent)]
    File(#[from] FileError),
    /// A path or glob matches no file.
    #[error(
        "{pattern:?} matches no file{searched}\n  hint: {}", if pattern.ends_with("**") {
            format!("** at the end matches only folders: write {pattern}/*")
        } else {
            "check the path; in folders only files with a known ending are taken, a glob takes any".to_owned()
        }
    )]
    NoFiles {
        /// The path or glob as it was given.
        pattern: String,
        /// The rest of the sentence: the file endings that were looked for, if the path is a folder; that a link has no
        /// target; else nothing.
        searched: String,
    },
    /// One document cannot be used; the others of its file can still be read (`skip_invalid`).
    #[error("{}: {what}\n  hint: {hint}", path.shown())]
    InvalidDocument {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong, with the line, row or byte.
        what: String,
        /// How to fix the document.
        hint: Cow<'static, str>,
    },
    /// A file of any kind cannot be used: text, tokenizer, shard or side file.
    #[error("{}: {what}\n  hint: {hint}", path.shown())]
    BadFile {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with the file.
        what: String,
        /// How to fix the file.
        hint: Cow<'static, str>,
    },
    /// The folder holds other data than the data to prepare.
    #[error("{}: {what}\n  hint: choose another folder, or ask for the data to be replaced", dir.shown())]
    OtherPreparation {
        /// Folder of the prepared data.
        dir: PathBuf,
        /// What the folder holds, and what differs.
        what: String,
    },
    /// A setting is out of its range.
    #[error("{name}: {reason}")]
    BadSetting {
        /// Name of the setting.
        name: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A problem of no single file or setting: a data set of the hub, or a corpus or split without documents.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A library or a thread failed, and no setting would help.
    #[error("{0}")]
    Failed(String),
}

impl DataError {
    /// For `map_err`: adds operation and path to an I/O error.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| {
            let error = FileError { action, path, source };
            error.into()
        }
    }

    pub(crate) fn document(path: &Path, what: String, hint: impl Into<Cow<'static, str>>) -> Self {
        let (path, hint) = (path.to_path_buf(), hint.into());
        Self::InvalidDocument { path, what, hint }
    }

    /// Removes the last alternative, `skip_invalid`, from the hint of a document's error: every row of a table is read.
    pub(crate) fn of_table(mut self) -> Self {
        if let Self::InvalidDocument { hint, .. } = &mut self
            && let Some((first, _)) = hint.rsplit_once(", or ")
        {
            *hint = first.to_owned().into();
        }
        self
    }

    /// Adds the line or row to the error of an invalid document.
    pub(crate) fn in_row(mut self, row: &str) -> Self {
        if let Self::InvalidDocument { what, .. } = &mut self {
            *what = format!("{row}: {what}");
        }
        self
    }

    pub(crate) fn file(path: &Path, what: impl Into<String>, hint: &'static str) -> Self {
        let (path, what, hint) = (path.to_path_buf(), what.into(), hint.into());
        Self::BadFile { path, what, hint }
    }

    /// The error of a plain text file where the setting `key` names a column.
    pub(crate) fn no_column(path: &Path, column: &str, key: &str) -> Self {
        let hint = format!("{key} is for JSONL and Parquet: leave it out, or name only JSONL and Parquet files").into();
        Self::BadFile { path: path.to_path_buf(), what: format!("plain text has no column {column:?}"), hint }
    }

    /// The error of a malformed shard file.
    pub(crate) fn shard(path: &Path, what: impl Into<String>) -> Self {
        let hint = "the file is damaged or not a Megatron-LM shard; a damaged one is prepared again by \
                    sieve data prepare --recipe RECIPE --data-dir DIR --replace, after which a run that has begun \
                    continues with --resume";
        Self::file(path, what, hint)
    }

    /// The error of a side file of a preparation (such as `meta.json`) that cannot be understood.
    pub(crate) fn meta(path: &Path, what: impl Into<String>) -> Self {
        Self::file(path, what, "prepare the data again")
    }

    pub(crate) fn setting(name: &'static str, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self::BadSetting { name, reason }
    }

    pub(crate) fn refused(what: impl Into<String>, hint: impl Into<Cow<'static, str>>) -> Self {
        Refusal::new(what, hint).into()
    }

    /// The error for an invalid glob pattern.
    pub(crate) fn glob(pattern: &str, error: &glob::PatternError) -> Self {
        let what = format!("{pattern:?} is not a valid glob: {error}");
        Self::refused(what, "write [[] for a bracket")
    }

    /// The error of a corpus that names a data set of the hub but was opened without access to the hub.
    pub(crate) fn not_connected(path: &str) -> Self {
        let what = format!("{path:?} is on the Hugging Face hub, which is not read here");
        Self::refused(what, "prepare the data first, or name local files")
    }

    /// Whether one document is invalid, so that the others can still be read.
    pub(crate) fn is_invalid_document(&self) -> bool {
        matches!(self, Self::InvalidDocument { .. })
    }
}
