//! A file that appears whole or not at all: it is written under a temporary name, fsynced, then renamed.

use std::fs::{self, File};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::error::FileError;

/// A file being written under `<path>.tmp`. If it is dropped before [`publish`](FinishedFile::publish), the temporary
/// file is removed.
pub struct AtomicFile {
    writer: BufWriter<File>,
    names: Names,
}

/// A complete, fsynced temporary file that is ready to be renamed.
pub struct FinishedFile {
    names: Names,
}

struct Names {
    temporary: PathBuf,
    path: PathBuf,
    remove_on_drop: bool,
}

impl Drop for Names {
    fn drop(&mut self) {
        if self.remove_on_drop {
            // A failure is ignored: an earlier error led here and is reported, and the next attempt replaces the file.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

impl AtomicFile {
    /// Creates the file under its temporary name.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn create(path: &Path) -> Result<Self, FileError> {
        let temporary = temporary_name(path);
        let file = File::create(&temporary).map_err(FileError::on("create", &temporary))?;
        let names = Names { temporary, path: path.to_path_buf(), remove_on_drop: true };
        Ok(Self { writer: BufWriter::with_capacity(1 << 20, file), names })
    }

    /// Reopens a temporary file that [`keep`](Self::keep) left, truncated to its first `num_bytes`. Dropping
    /// the result keeps the file too.
    ///
    /// # Errors
    /// An error of the file system; a file shorter than `num_bytes`.
    pub fn resume(path: &Path, num_bytes: u64) -> Result<Self, FileError> {
        let temporary = temporary_name(path);
        let mut file = File::options().write(true).open(&temporary).map_err(FileError::on("open", &temporary))?;
        let cut = file.metadata().and_then(|metadata| {
            if metadata.len() < num_bytes {
                return Err(std::io::Error::other("the file is shorter than it was"));
            }
            file.set_len(num_bytes)?;
            file.seek(SeekFrom::End(0))
        });
        cut.map_err(FileError::on("continue", &temporary))?;
        let names = Names { temporary, path: path.to_path_buf(), remove_on_drop: false };
        Ok(Self { writer: BufWriter::with_capacity(1 << 20, file), names })
    }

    /// Syncs the data written so far. From now on, dropping `self` keeps the temporary file.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn keep(&mut self) -> Result<(), FileError> {
        self.names.remove_on_drop = false;
        let synced = self.writer.flush().and_then(|()| self.writer.get_ref().sync_data());
        synced.map_err(FileError::on("write", &self.names.temporary))
    }

    /// Appends `bytes`.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.writer.write_all(bytes).map_err(FileError::on("write", &self.names.temporary))
    }

    /// Flushes and fsyncs.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn finish(self) -> Result<FinishedFile, FileError> {
        let Self { writer, names } = self;
        let file = writer.into_inner().map_err(|error| FileError::on("write", &names.temporary)(error.into_error()))?;
        file.sync_all().map_err(FileError::on("sync", &names.temporary))?;
        Ok(FinishedFile { names })
    }
}

impl FinishedFile {
    /// Renames to the final name. The folder is not fsynced: see [`sync_folder`](crate::sync_folder).
    ///
    /// # Errors
    /// An error of the file system.
    pub fn publish(mut self) -> Result<(), FileError> {
        fs::rename(&self.names.temporary, &self.names.path).map_err(FileError::on("rename", &self.names.temporary))?;
        self.names.remove_on_drop = false;
        Ok(())
    }
}

/// `<path>.tmp`, in the same folder, so that the rename is atomic.
pub fn temporary_name(path: &Path) -> PathBuf {
    path.with_added_extension("tmp")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_file_leaves_nothing_and_the_old_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bin");
        crate::write_atomically(&path, b"old").unwrap();
        let mut file = AtomicFile::create(&path).unwrap();
        file.write(b"half").unwrap();
        drop(file);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
