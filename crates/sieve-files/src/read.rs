//! Opens and reads the regular files of a checkpoint, of an export and of a run's folder.
//!
//! A named pipe in the place of one would be waited for without an end, and a device may have no end.
use std::fs::{self, File, FileType};
use std::io::{self, Read};
use std::path::Path;

/// Opens a file. A pipe without a name of its own, as in `--tokenizer <(command)`, is opened, too. A folder is opened,
/// which the system then refuses to read.
///
/// # Errors
/// What [`special_file`] finds; an error of the file system.
pub fn open_file(path: &Path) -> io::Result<File> {
    match special_file(path) {
        Some(what) => Err(io::Error::other(format!("it is {what}, not a file"))),
        None => File::open(path),
    }
}

/// The named pipe, device or socket at a path, in words; `None` for all else.
pub fn special_file(path: &Path) -> Option<&'static str> {
    let kind = fs::metadata(path).ok()?.file_type();
    // A pipe without a name has no path behind its links.
    no_file(kind).filter(|_| !kind.is_dir() && path.canonicalize().is_ok())
}

/// The bytes of a file.
///
/// # Errors
/// As [`open_file`].
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_file(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text of a file.
///
/// # Errors
/// As [`open_file`]; a file that is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    io::read_to_string(open_file(path)?)
}

/// What is no file, by its type; `None` for a file.
pub fn no_file(kind: FileType) -> Option<&'static str> {
    if kind.is_file() {
        return None;
    }
    if kind.is_dir() {
        return Some("a folder");
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return Some("a pipe (FIFO)");
        }
        if kind.is_socket() {
            return Some("a socket");
        }
    }
    Some("a device")
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixListener;

    #[test]
    fn what_is_no_file_is_refused_and_not_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let [file, pipe, link, socket, none] =
            ["file", "pipe", "link", "socket", "none"].map(|name| folder.path().join(name));
        fs::write(&file, "text").expect("written");
        nix::unistd::mkfifo(&pipe, Mode::S_IRWXU).expect("a pipe");
        std::os::unix::fs::symlink(&pipe, &link).expect("a link");
        let _listener = UnixListener::bind(&socket).expect("a socket");
        let refusal = |path: &Path| read_file(path).expect_err("it is no file").to_string();
        assert_eq!(read_text(&file).expect("a file"), "text");
        assert_eq!(refusal(&pipe), "it is a pipe (FIFO), not a file");
        assert_eq!(refusal(&link), refusal(&pipe));
        assert_eq!(refusal(&socket), "it is a socket, not a file");
        assert_eq!(refusal(Path::new("/dev/zero")), "it is a device, not a file");
        assert_eq!(read_file(&none).expect_err("nothing").kind(), io::ErrorKind::NotFound);
        assert_eq!(read_file(folder.path()).expect_err("a folder").kind(), io::ErrorKind::IsADirectory);
    }

    #[test]
    fn a_pipe_of_another_program_is_read() {
        use io::Write;
        let (reader, mut writer) = io::pipe().expect("a pipe");
        writer.write_all(b"text").expect("there is room");
        drop(writer);
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        assert_eq!(read_text(Path::new(&path)).expect("a pipe without a name"), "text");
    }
}
