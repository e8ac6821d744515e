//! The folder of an export: files are written under a temporary name, then renamed.
use super::json_text::to_text;
use crate::CheckpointError;

use serde_json::{Value, json};
use sieve_core::ShownPath;
use sieve_files::{read_text, sync_folder, write_synced};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A file that lists the files of an export, so that a later export knows which it may replace, and says how long the
/// rows of its training were.
pub(super) const MARKER: &str = "sieve_export.json";
/// Key of the marker: the tokens of a row in training.
const ROW_TOKENS: &str = "row_tokens";
/// A folder that holds the files until all are complete.
const PARTIAL: &str = ".sieve_export.partial";
/// The file without which nothing reads a folder as a model.
pub(super) const CONFIG: &str = "config.json";

/// A folder that an export may write to.
#[derive(Debug)]
pub(super) struct OutFolder {
    path: PathBuf,
    /// Names of the files of an earlier export.
    earlier: BTreeSet<String>,
}

impl OutFolder {
    /// Creates the folder; an existing one must be empty or hold an earlier export.
    pub(super) fn claim(path: &Path) -> Result<Self, CheckpointError> {
        fs::create_dir_all(path).map_err(CheckpointError::io("creating", path))?;
        let earlier = listed_files(&path.join(MARKER));
        let folder = Self { path: path.to_owned(), earlier: earlier.unwrap_or_default() };
        if folder.earlier.is_empty() {
            let entries = fs::read_dir(path).map_err(CheckpointError::io("reading", path))?;
            for entry in entries {
                let entry = entry.map_err(CheckpointError::io("reading", path))?;
                if entry.file_name() != PARTIAL {
                    return Err(folder.in_use(&Path::new(&entry.file_name()).shown().to_string()));
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

    /// Path for writing the file `name` until it is published.
    pub(super) fn partial(&self, name: &str) -> PathBuf {
        self.path.join(PARTIAL).join(name)
    }

    /// Gives all `files` their final names and removes files of an earlier export that this one does not have.
    ///
    /// [`CONFIG`] goes first and comes last: an export that is stopped in between leaves no model, rather than one of
    /// old and new weights.
    ///
    /// `row_tokens`: the tokens of a row in training, which the marker says.
    pub(super) fn publish(self, files: &[String], row_tokens: usize) -> Result<(), CheckpointError> {
        let now: BTreeSet<String> = files.iter().cloned().collect();
        for name in now.difference(&self.earlier) {
            if self.path.join(name).exists() {
                return Err(self.in_use(name));
            }
        }
        // The marker first lists both the old and the new files, so that a kill during the renames leaves a folder that
        // a later export recognises.
        self.write_marker(&now.union(&self.earlier).cloned().collect(), row_tokens)?;
        if self.earlier.contains(CONFIG) {
            self.remove(CONFIG)?;
            sync_folder(&self.path)?;
        }
        for name in now.iter().filter(|name| *name != CONFIG) {
            self.rename(name)?;
        }
        for name in self.earlier.difference(&now) {
            self.remove(name)?;
        }
        sync_folder(&self.path)?;
        if now.contains(CONFIG) {
            self.rename(CONFIG)?;
        }
        self.write_marker(&now, row_tokens)?;
        let partial = self.path.join(PARTIAL);
        fs::remove_dir_all(&partial).map_err(CheckpointError::io("clearing", partial))?;
        Ok(sync_folder(&self.path)?)
    }

    fn rename(&self, name: &str) -> Result<(), CheckpointError> {
        let path = self.path.join(name);
        fs::rename(self.partial(name), &path).map_err(CheckpointError::io("renaming", path))
    }

    fn remove(&self, name: &str) -> Result<(), CheckpointError> {
        let path = self.path.join(name);
        if path.exists() { fs::remove_file(&path).map_err(CheckpointError::io("removing", path)) } else { Ok(()) }
    }

    fn write_marker(&self, files: &BTreeSet<String>, row_tokens: usize) -> Result<(), CheckpointError> {
        let text = to_text(&json!({ "files": files, ROW_TOKENS: row_tokens }));
        write_synced(&self.partial(MARKER), text.as_bytes())?;
        self.rename(MARKER)
    }

    fn in_use(&self, found: &str) -> CheckpointError {
        let what = format!("{} holds {found}, which no export wrote", self.path.shown());
        CheckpointError::refused(what, "name a new or empty folder")
    }
}

impl Drop for OutFolder {
    fn drop(&mut self) {
        // Cleans up after a failed export; an error here only costs disk space.
        let _ = fs::remove_dir_all(self.path.join(PARTIAL));
    }
}

/// The tokens of a row in training of the model in an export's folder; `None` in other folders of `transformers`, and
/// in exports of earlier versions.
pub(crate) fn row_tokens(folder: &Path) -> Option<usize> {
    let tokens = read_marker(&folder.join(MARKER))?[ROW_TOKENS].as_u64()?;
    usize::try_from(tokens).ok().filter(|tokens| *tokens > 0)
}

fn read_marker(marker: &Path) -> Option<Value> {
    serde_json::from_str(&read_text(marker).ok()?).ok()
}

/// The files that a marker lists; `None` without a valid marker.
fn listed_files(marker: &Path) -> Option<BTreeSet<String>> {
    let marker = read_marker(marker)?;
    let files = marker["files"].as_array()?;
    // A name with a folder in it would lead to files outside of the export.
    let plain = |name: &&str| Path::new(name).file_name().is_some_and(|file| file == *name);
    Some(files.iter().filter_map(Value::as_str).filter(plain).map(str::to_owned).collect())
}
