//! One process at a time prepares in a folder.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::PathBuf;

use super::Progress;
use crate::error::DataError;

/// The folder's lock. The system gives it back when the file is closed, also when the process is killed.
pub(super) struct Lock {
    file: File,
    path: PathBuf,
}

/// Written into the lock file before the first rename.
const MARK: &[u8] = b"The files train.* and validation.* beside this one were written by sieve.\n";

impl Lock {
    /// Waits for it if need be.
    pub(super) fn take(path: PathBuf, progress: &dyn Fn(Progress)) -> Result<Self, DataError> {
        let open = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path);
        let file = open.map_err(DataError::io("create", &path))?;
        let result = match file.try_lock() {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => {
                progress(Progress::Waiting);
                file.lock()
            }
            // Some network file systems have no locks; two processes at once are then the user's to avoid.
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => Ok(()),
            Err(TryLockError::Error(error)) => Err(error),
        };
        result.map_err(DataError::io("lock", &path))?;
        Ok(Self { file, path })
    }

    /// Says durably that files with our names are ours, also when only some of them have been renamed.
    pub(super) fn mark(&self) -> Result<(), DataError> {
        let mut file = &self.file;
        let written = file
            .seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(MARK))
            .and_then(|()| file.sync_all());
        written.map_err(DataError::io("write", &self.path))
    }

    pub(super) fn has_mark(&self) -> Result<bool, DataError> {
        Ok(fs::read(&self.path).map_err(DataError::io("read", &self.path))? == MARK)
    }
}
