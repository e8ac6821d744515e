//! The error of a failed file operation.

use sieve_core::ShownPath;
use std::io;
use std::path::{Path, PathBuf};

/// An error of the file system, such as a missing folder, no permission or a full disk.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.shown())]
pub struct FileError {
    /// The operation that failed: "create", "write", "rename".
    pub action: &'static str,
    /// Path of the file or folder.
    pub path: PathBuf,
    /// Error of the operating system.
    pub source: io::Error,
}

impl FileError {
    /// A function for `map_err` that adds the action and the path.
    pub(crate) fn on(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self { action, path, source }
    }
}
