//! What the system refused.

use std::io;
use std::path::{Path, PathBuf};

/// The operating system refused: missing folder, no permission, full disk.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct FileError {
    /// The verb: "create", "write", "rename".
    pub action: &'static str,
    /// Which file or folder.
    pub path: PathBuf,
    /// The system's reason.
    pub source: io::Error,
}

impl FileError {
    /// For `map_err`: what was tried on which path.
    pub(crate) fn on(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self { action, path, source }
    }
}
