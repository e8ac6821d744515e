//! Errors of sieve-report.
use sieve_core::ShownPath;
use std::path::{Path, PathBuf};

/// An error of reading runs or of writing their page.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A folder that `sieve train` did not write.
    #[error(
        "{} holds no run: there is {there_is}\n  \
         hint: name the folder given to `sieve train --out`, of a run or of a sweep",
        path.shown()
    )]
    NoRun {
        /// Path of the folder.
        path: PathBuf,
        /// What there is: no file that every run has, nothing, or a file.
        there_is: String,
    },
    /// A run that has not logged a step.
    #[error("{}: no step has been logged yet\n  hint: leave this run out, or wait for its first step", path.shown())]
    NoSteps {
        /// Path of the run's metrics.jsonl.
        path: PathBuf,
    },
    /// A file with invalid content.
    #[error("{}: {what}", path.shown())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong, with the line number if known.
        what: String,
    },
    /// A file that cannot be read.
    #[error("reading {}: {source}", path.shown())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// Two runs with the same name.
    #[error("two runs are called {name}\n  hint: name them apart: NAME=FOLDER")]
    SameName {
        /// The name that both runs have.
        name: String,
    },
    /// A run to compare with that is not among the runs.
    #[error("no run is called {name}\n  hint: name one of {}", names.join(", "))]
    NoSuchRun {
        /// The name that no run has.
        name: String,
        /// Names of the runs.
        names: Vec<String>,
    },
    /// The report was given no run.
    #[error("no run to compare\n  hint: name at least one run folder")]
    Nothing,
}

impl ReportError {
    /// A function for `map_err` that adds the file's path.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn content(path: &Path, what: impl Into<String>) -> Self {
        Self::Content { path: path.to_owned(), what: what.into() }
    }
}
