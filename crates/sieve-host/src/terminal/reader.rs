//! The reader of a pipe that standard output goes to, such as `head`.
use super::OUTPUT;
use crate::environment::{LAUNCHED, variable};

/// From now on the process ends once its standard output is a pipe that nobody reads any more. For commands whose only
/// result is what they print; the file of `--log-file` is another result.
///
/// A process of `sieve launch` goes on, because others compute with it.
pub fn end_with_reader() {
    let has_log = OUTPUT.get().is_some_and(|output| output.log.is_some());
    if !has_log && variable(LAUNCHED).is_none() {
        #[cfg(unix)]
        watch_pipe();
    }
}

/// Starts a thread that waits for the end of standard output's reader.
#[cfg(unix)]
fn watch_pipe() {
    use crate::exit::Exit;
    use nix::errno::Errno;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileTypeExt;

    // Without this thread the command runs to its end.
    let Ok(out) = std::io::stdout().as_fd().try_clone_to_owned().map(File::from) else {
        return;
    };
    if !out.metadata().is_ok_and(|found| found.file_type().is_fifo()) {
        return;
    }
    let wait = move || {
        loop {
            // No event is asked for, so that only an error ends the wait: of a pipe, that no reader is left.
            match poll(&mut [PollFd::new(out.as_fd(), PollFlags::empty())], PollTimeout::NONE) {
                Err(Errno::EINTR) => {}
                Err(_) => return,
                // The reader has read enough, which is no failure.
                Ok(_) => Exit::Done.at_once(),
            }
        }
    };
    let _ = std::thread::Builder::new().name("reader".to_owned()).spawn(wait);
}
