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

/// Opens `path`, creating it if missing, and takes its lock if no other process has it.
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
        // Without file locks the user must not start two processes at once.
        Err(TryLockError::Error(error)) if has_no_locks(&error) => Ok(Taken::Yes(file)),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Whether a file system has no locks: some network file systems, and NFS without a lock daemon (ENOLCK).
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
