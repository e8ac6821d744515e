//! Exit codes, for scripts and job queues. docs/command-line.md lists them.
use std::io::{self, ErrorKind};
use std::process::ExitCode;

/// How the program ended. Each value is an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The command succeeded.
    Done = 0,
    /// The command failed and printed its error.
    Failed = 1,
    /// clap refused the command line.
    Usage = 2,
    /// A signal or the file system ended a run before its last step: `--resume=auto` continues or begins it.
    StoppedEarly = 75,
    /// Another rank of the run was lost. Only processes of `sieve launch` end so; the launcher itself then ends with
    /// 75.
    OtherLost = 76,
    /// A signal came before there was a state to save, or a second signal came. Shells report SIGINT by this number.
    Interrupted = 130,
}

impl Exit {
    /// The exit code as a number.
    pub const fn code(self) -> i32 {
        self as i32
    }

    /// Ends the process with this exit code; for the thread that runs the command.
    pub fn now(self) -> ! {
        std::process::exit(self.code())
    }

    /// Ends the process with this exit code and cleans nothing up; for every other thread, a signal handler's among
    /// them. A usual exit would run the C library's exit handlers, CUDA's too, and free what other threads still use
    /// ("corrupted double-linked list"), or wait for a GPU that waits for a lost rank. What is printed is flushed line
    /// by line.
    pub fn at_once(self) -> ! {
        #[cfg(unix)]
        {
            unsafe extern "C" {
                // SAFETY: `_exit` is in every C library, takes any code and does not return.
                safe fn _exit(code: std::ffi::c_int) -> !;
            }
            _exit(self.code())
        }
        #[cfg(not(unix))]
        {
            std::process::abort()
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Whether an error is a failure of the file system that may pass by itself or by making room: a full disk, a quota, a
/// limit, an I/O error, a stale handle of a network's file system. Nothing is wrong with the command then.
pub fn is_of_the_disk(error: &io::Error) -> bool {
    /// `EIO`, which has no kind of its own.
    const IO_ERROR: i32 = 5;
    let kinds =
        [ErrorKind::StorageFull, ErrorKind::QuotaExceeded, ErrorKind::FileTooLarge, ErrorKind::StaleNetworkFileHandle];
    kinds.contains(&error.kind()) || error.raw_os_error() == Some(IO_ERROR)
}
