//! The lock that lets one process at a time prepare data in a folder.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::PathBuf;

use sieve_files::lock_or_wait;

use super::call::Progress;
use crate::error::DataError;

/// The locked file `prepare.lock`. The system releases the lock when the file is closed or the process is killed.
pub(super) struct Lock {
    file: File,
    path: PathBuf,
}

/// Content of the lock file once a preparation has made files durable. An empty one says nothing about other files.
const MARK: &[u8] = b"The files train.* and validation.* next to this one were written by sieve.\n";

impl Lock {
    /// Takes a folder's lock. If another process holds it, reports [`Progress::Waiting`] and waits.
    pub(super) fn take(path: PathBuf, progress: &dyn Fn(Progress)) -> Result<Self, DataError> {
        let file = lock_or_wait(&path, || progress(Progress::Waiting)).map_err(DataError::io("lock", &path))?;
        Ok(Self { file, path })
    }

    /// Writes the mark durably: files of a preparation's names are Sieve's, even if some of them are missing.
    pub(super) fn mark(&self) -> Result<(), DataError> {
        let mut file = &self.file;
        let written = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(MARK)).and_then(|()| file.sync_all());
        written.map_err(DataError::io("write", &self.path))
    }

    pub(super) fn has_mark(&self) -> Result<bool, DataError> {
        Ok(is_mark(&sieve_files::read_file(&self.path).map_err(DataError::io("read", &self.path))?))
    }
}

/// Whether the text of a lock file says that files of a preparation's names are Sieve's.
pub(super) fn is_mark(text: &[u8]) -> bool {
    text == MARK
}
