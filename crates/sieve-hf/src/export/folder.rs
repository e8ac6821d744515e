//! The folder of an export: claimed, filled under a temporary name, published file by file.
use super::config::to_text;
use crate::CheckpointError;

use serde_json::{Value, json};
use sieve_files::{sync_folder, write_synced};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Lists the files of an export, so that a later one knows what it may replace.
const MARKER: &str = "sieve_export.json";
/// Holds files until all are whole.
const PARTIAL: &str = ".sieve_export.partial";

/// A folder that an export may write to.
#[derive(Debug)]
pub(super) struct OutFolder {
    path: PathBuf,
    /// Files of the existing export.
    earlier: BTreeSet<String>,
}

impl OutFolder {
    /// Makes the folder, or takes an empty one or one that an export wrote.
    pub(super) fn claim(path: &Path) -> Result<Self, CheckpointError> {
        fs::create_dir_all(path).map_err(CheckpointError::io("creating", path))?;
        let earlier = listed_files(&path.join(MARKER));
        let folder = Self {
            path: path.to_owned(),
            earlier: earlier.unwrap_or_default(),
        };
        if folder.earlier.is_empty() {
            let entries = fs::read_dir(path).map_err(CheckpointError::io("reading", path))?;
            for entry in entries {
                let entry = entry.map_err(CheckpointError::io("reading", path))?;
                if entry.file_name() != PARTIAL {
                    return Err(folder.in_use(&entry.file_name().to_string_lossy()));
                }
            }
        }
        let partial = path.join(PARTIAL);
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(CheckpointError::io("clearing", &partial))?;
        }
        fs::create_dir(&partial).map_err(CheckpointError::io("creating", &partial))?;
        Ok(folder)
    }

    /// Where to write the file `name` until it is published.
    pub(super) fn partial(&self, name: &str) -> PathBuf {
        self.path.join(PARTIAL).join(name)
    }

    /// Gives all `files` their final names and removes files of an earlier export that this one does not have.
    pub(super) fn publish(self, files: &[String]) -> Result<(), CheckpointError> {
        let now: BTreeSet<String> = files.iter().cloned().collect();
        for name in now.difference(&self.earlier) {
            if self.path.join(name).exists() {
                return Err(self.in_use(name));
            }
        }
        // First a list of the old and the new, so that a kill below leaves a folder that is still known as an export.
        self.write_marker(&now.union(&self.earlier).cloned().collect())?;
        for name in &now {
            let path = self.path.join(name);
            fs::rename(self.partial(name), &path).map_err(CheckpointError::io("renaming", path))?;
        }
        for name in self.earlier.difference(&now) {
            let path = self.path.join(name);
            if path.exists() {
                fs::remove_file(&path).map_err(CheckpointError::io("removing", path))?;
            }
        }
        self.write_marker(&now)?;
        let partial = self.path.join(PARTIAL);
        fs::remove_dir_all(&partial).map_err(CheckpointError::io("clearing", partial))?;
        Ok(sync_folder(&self.path)?)
    }

    fn write_marker(&self, files: &BTreeSet<String>) -> Result<(), CheckpointError> {
        let text = to_text(&json!({ "files": files }));
        write_synced(&self.partial(MARKER), text.as_bytes())?;
        let path = self.path.join(MARKER);
        fs::rename(self.partial(MARKER), &path).map_err(CheckpointError::io("renaming", path))
    }

    fn in_use(&self, found: &str) -> CheckpointError {
        let what = format!("{} holds {found}, which no export wrote", self.path.display());
        CheckpointError::refused(what, "name a new or empty folder")
    }
}

impl Drop for OutFolder {
    fn drop(&mut self) {
        // Best effort: free the space that a failed export holds.
        let _ = fs::remove_dir_all(self.path.join(PARTIAL));
    }
}

/// The files that a marker lists; `None` without a valid marker.
fn listed_files(marker: &Path) -> Option<BTreeSet<String>> {
    let marker: Value = serde_json::from_str(&fs::read_to_string(marker).ok()?).ok()?;
    let files = marker["files"].as_array()?;
    // A name with a path in it is not ours to touch.
    let plain = |name: &&str| Path::new(name).file_name().is_some_and(|file| file == *name);
    Some(
        files
            .iter()
            .filter_map(Value::as_str)
            .filter(plain)
            .map(str::to_owned)
            .collect(),
    )
}
