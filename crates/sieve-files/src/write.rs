//! Writes whole files in one call, and renames finished files and folders to their final names.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::atomic_file::AtomicFile;
use crate::error::FileError;

/// Writes a file in one of Sieve's own folders, whole or not at all, and syncs its name.
///
/// # Errors
/// An error of the file system.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let mut file = AtomicFile::create(path)?;
    file.write(bytes)?;
    file.finish()?.publish()?;
    sync_folder(folder_of(path))
}

/// Replaces the file at a path that the user named. `write` writes and syncs the new file under the temporary name that
/// it gets. A pipe or a device is written in place.
///
/// # Errors
/// A folder or a socket at the path; errors of `write`, and errors of the file system.
pub fn replace<T, E: From<FileError>>(path: &Path, write: impl FnOnce(&Path) -> Result<T, E>) -> Result<T, E> {
    if is_pipe_or_device(path) {
        return write(path);
    }
    let (target, temporary) = target_and_temporary(path)?;
    let renamed = write(&temporary).and_then(|written| {
        fs::rename(&temporary, &target).map_err(FileError::on("rename", &temporary))?;
        sync_folder(folder_of(&target))?;
        Ok(written)
    });
    renamed.inspect_err(|_| {
        // A failure to remove it is ignored: the first error is the one to report.
        let _ = fs::remove_file(&temporary);
    })
}

/// Whether a pipe or a device is at `path`, whose bytes come from or go to another program: neither a file, a folder
/// nor a socket, which no path opens.
pub fn is_pipe_or_device(path: &Path) -> bool {
    #[cfg(unix)]
    let is_socket = std::os::unix::fs::FileTypeExt::is_socket;
    #[cfg(not(unix))]
    let is_socket = |_: &fs::FileType| false;
    let kind = fs::metadata(path).map(|found| found.file_type());
    kind.is_ok_and(|kind| !kind.is_file() && !kind.is_dir() && !is_socket(&kind))
}

/// Checks that [`replace`] can create its temporary file, by creating and removing it. A pipe or a device is not
/// opened.
///
/// # Errors
/// As [`replace`].
pub fn check_replaceable(path: &Path) -> Result<(), FileError> {
    if is_pipe_or_device(path) {
        return Ok(());
    }
    let (_, temporary) = target_and_temporary(path)?;
    write_synced(&temporary, b"")?;
    fs::remove_file(&temporary).map_err(FileError::on("remove", &temporary))
}

/// The file that `path` points to, and this process's temporary name for it.
///
/// # Errors
/// Something else than a file is there. A rename would put a file in the place of a device, for every program.
fn target_and_temporary(path: &Path) -> Result<(PathBuf, PathBuf), FileError> {
    if path.exists() && !path.is_file() {
        return Err(FileError::on("replace", path)(io::Error::other("it is not a file")));
    }
    let target = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let temporary = target.with_added_extension(format!("{}.tmp", std::process::id()));
    Ok((target, temporary))
}

/// Writes and syncs a file directly under its name.
///
/// # Errors
/// An error of the file system.
pub fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    write_pieces_synced(path, |write| write(bytes))
}

/// As [`write_synced`], piece by piece: `pieces` calls the given function with each piece. A pipe or a device is not
/// synced.
///
/// # Errors
/// Errors of `pieces`, and errors of the file system.
pub fn write_pieces_synced<E: From<FileError>>(
    path: &Path,
    pieces: impl FnOnce(&mut dyn FnMut(&[u8]) -> Result<(), FileError>) -> Result<(), E>,
) -> Result<(), E> {
    let mut file = File::create(path).map_err(FileError::on("create", path))?;
    pieces(&mut |piece| file.write_all(piece).map_err(FileError::on("write", path)))?;
    let is_file = file.metadata().map_err(FileError::on("read", path))?.is_file();
    if is_file { Ok(file.sync_all().map_err(FileError::on("sync", path))?) } else { Ok(()) }
}

/// Makes renames inside `folder` durable. The empty path is the current folder.
///
/// # Errors
/// An error of the file system.
pub fn sync_folder(folder: &Path) -> Result<(), FileError> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder).and_then(|file| file.sync_all()).map_err(FileError::on("sync", folder))
}

/// Renames the folder `partial` to `path` and makes the rename durable. An existing folder is kept as `<path>.old`
/// until the new one is in place.
///
/// # Errors
/// An error of the file system.
pub fn publish_folder(partial: &Path, path: &Path) -> Result<(), FileError> {
    let replaced = path.with_added_extension("old");
    match fs::rename(path, &replaced) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(FileError::on("replace", path)(error));
        }
        // The existing folder was moved aside, or there was none.
        _ => fs::rename(partial, path).map_err(FileError::on("rename", partial))?,
    }
    sync_folder(folder_of(path))?;
    if replaced.exists() {
        fs::remove_dir_all(&replaced).map_err(FileError::on("remove", &replaced))?;
    }
    Ok(())
}

/// The parent folder of `path`.
fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name();
        let mut names: Vec<String> = entries.map(|entry| name(entry).to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_missing_folder_is_named() {
        let error = write_atomically(Path::new("/nonexistent/x"), b"").unwrap_err().to_string();
        assert!(error.contains("/nonexistent/x"), "{error}");
    }

    #[test]
    fn a_failed_replacement_leaves_the_old_file_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        replace(&path, |partial| write_synced(partial, b"old")).unwrap();
        let failed = replace(&path, |partial| {
            write_synced(partial, b"half")?;
            Err::<(), _>(FileError::on("write", partial)(io::Error::other("full")))
        });
        failed.unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["a"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_and_what_it_leads_to_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let [path, link] = ["a", "link"].map(|name| folder.path().join(name));
        fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        replace(&link, |partial| write_synced(partial, b"new")).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["a", "link"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_device_is_written_in_place() {
        assert!(is_pipe_or_device(Path::new("/dev/null")));
        // A device cannot be synced.
        replace(Path::new("/dev/null"), |path| write_synced(path, b"new")).unwrap();
        check_replaceable(Path::new("/dev/null")).unwrap();
        assert!(!Path::new("/dev/null").is_file());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        for text in ["one", "two"] {
            replace(&path, |partial| write_synced(partial, text.as_bytes())).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(names(folder.path()), ["a"]);
        let none = folder.path().join("none");
        assert!([folder.path(), &path, &none].iter().all(|path| !is_pipe_or_device(path)));
    }

    #[cfg(unix)]
    #[test]
    fn only_a_file_is_replaced() {
        use std::os::unix::fs::FileTypeExt;
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [socket.as_path(), folder.path()] {
            let error = replace(path, |partial| write_synced(partial, b"new")).unwrap_err();
            assert!(error.to_string().contains("it is not a file"), "{error}");
            check_replaceable(path).unwrap_err();
        }
        assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
        assert_eq!(names(folder.path()), ["socket"]);
    }

    #[test]
    fn a_folder_takes_the_place_of_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let [path, partial] = ["step-2", "step-2.tmp"].map(|name| folder.path().join(name));
        for text in ["one", "two"] {
            fs::create_dir(&partial).unwrap();
            fs::write(partial.join("state"), text).unwrap();
            publish_folder(&partial, &path).unwrap();
            assert_eq!(fs::read_to_string(path.join("state")).unwrap(), text);
            assert_eq!(names(folder.path()), ["step-2"]);
        }
    }
}
