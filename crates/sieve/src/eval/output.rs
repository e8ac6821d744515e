//! Files that a measure writes when it is done.
use anyhow::{Result, bail};
use std::path::Path;

/// Refuses a file that could not be written before the work is done for it.
pub(super) fn check(path: Option<&Path>) -> Result<()> {
    let Some(path) = path else {
        return Ok(());
    };
    if path.is_dir() {
        bail!(
            "cannot write {}: it is a folder\n  hint: name a file in it",
            path.display()
        );
    }
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => bail!(
            "cannot write {}: there is no folder {}\n  hint: make it first",
            path.display(),
            parent.display()
        ),
        _ => Ok(()),
    }
}
