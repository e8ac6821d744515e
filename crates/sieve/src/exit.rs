//! How the program ends, as a number for scripts and job queues; docs/command-line.md lists them.
use std::process::ExitCode;

/// What an exit code says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// What was asked for is done.
    Done = 0,
    /// An error, which was printed.
    Failed = 1,
    /// A command line that cannot be read; clap's own.
    Usage = 2,
    /// A signal ended a run before its last step, with a checkpoint: `--resume` continues it.
    StoppedEarly = 75,
    /// In a process of `sieve launch` alone, which makes 75 of it: another rank of the run was lost.
    OtherLost = 76,
    /// A signal ended the process before it could keep anything, or a second one came; as shells report SIGINT.
    Interrupted = 130,
}

impl Exit {
    /// The number.
    pub(crate) const fn code(self) -> i32 {
        self as i32
    }

    /// Ends the process here.
    pub(crate) fn now(self) -> ! {
        std::process::exit(self.code())
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
