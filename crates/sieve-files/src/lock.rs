//! Advisory locks on files, which end with the process that holds them.
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::Path;

/// Whose a lock is.
pub enum Taken {
    /// Ours, until the file is dropped.
    Yes(File),
    /// Another process's; locking the file waits for it.
    ByAnother(File),
}

/// Opens `path`, making it where it is missing, and takes its lock if nobody has it.
///
/// # Errors
/// What the system refuses.
pub fn try_lock(path: &Path) -> io::Result<Taken> {
    let file = File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Taken::Yes(file)),
        Err(TryLockError::WouldBlock) => Ok(Taken::ByAnother(file)),
        // Some network file systems have no locks; two processes at once are then the user's to avoid.
        Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => Ok(Taken::Yes(file)),
        Err(TryLockError::Error(error)) => Err(error),
    }
}
