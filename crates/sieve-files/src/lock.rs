//! Advisory locks on files. A lock ends with the process that holds it.
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::Path;

/// Whether [`try_lock`] took the lock.
pub enum Taken {
    /// This process holds the lock until the file is dropped.
    Yes(File),
    /// Another process holds the lock; `File::lock` waits for it.
    ByAnother(File),
}

/// Opens `path`, creating it if missing, and takes its lock if no other process has it.
///
/// # Errors
/// An error of the file system.
pub fn try_lock(path: &Path) -> io::Result<Taken> {
    let file = File::options().create(true).truncate(false).read(true).write(true).open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Taken::Yes(file)),
        Err(TryLockError::WouldBlock) => Ok(Taken::ByAnother(file)),
        // On a file system without locks, the user has to take care not to start two processes.
        Err(TryLockError::Error(error)) if has_no_locks(&error) => Ok(Taken::Yes(file)),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// As [`try_lock`], and waits for the process that holds the lock, after a call of `waiting`.
///
/// # Errors
/// An error of the file system.
pub fn lock_or_wait(path: &Path, waiting: impl FnOnce()) -> io::Result<File> {
    match try_lock(path)? {
        Taken::Yes(file) => Ok(file),
        Taken::ByAnother(file) => {
            waiting();
            file.lock().map(|()| file)
        }
    }
}

/// Whether an error means that the file system has no locks, like some network file systems and NFS without a lock
/// daemon.
fn has_no_locks(error: &io::Error) -> bool {
    #[cfg(unix)]
    if error.raw_os_error() == Some(nix::errno::Errno::ENOLCK as i32) {
        return true;
    }
    error.kind() == ErrorKind::Unsupported
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use nix::errno::Errno;

    #[test]
    fn a_file_system_without_locks_is_no_error() {
        let is_let_through = |errno: Errno| has_no_locks(&io::Error::from_raw_os_error(errno as i32));
        assert!(is_let_through(Errno::ENOLCK) && is_let_through(Errno::EOPNOTSUPP));
        assert!(!is_let_through(Errno::EIO) && !is_let_through(Errno::EBADF));
    }
}
