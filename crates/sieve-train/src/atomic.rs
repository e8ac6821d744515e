//! Small files that appear whole or not at all.
use crate::TrainError;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

/// Writes `text` under a temporary name, syncs it, and renames it to `path`.
pub(crate) fn write_atomically(path: &Path, text: &str) -> Result<(), TrainError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".tmp");
    let partial = Path::new(&partial);
    let written = File::create(partial).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let renamed = written.and_then(|()| fs::rename(partial, path));
    renamed.map_err(|error| {
        // Best effort: the error above is the one worth telling.
        let _ = fs::remove_file(partial);
        TrainError::io("writing", path)(error)
    })
}
