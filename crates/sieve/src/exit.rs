//! Exit codes, for scripts and job queues. docs/command-line.md lists them.
use std::process::ExitCode;

/// How the program ended. Each value is an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The command succeeded.
    Done = 0,
    /// The command failed and printed its error.
    Failed = 1,
    /// clap refused the command line.
    Usage = 2,
    /// A signal ended a run before its last step, with a checkpoint: `--resume` continues it.
    StoppedEarly = 75,
    /// Another rank of the run was lost. Only processes of `sieve launch` end so; the launcher itself then ends with
    /// 75.
    OtherLost = 76,
    /// A signal came before there was a state to save, or a second signal came. Shells report SIGINT by this number.
    Interrupted = 130,
}

impl Exit {
    /// The exit code as a number.
    pub(crate) const fn code(self) -> i32 {
        self as i32
    }

    /// Ends the process with this exit code.
    pub(crate) fn now(self) -> ! {
        std::process::exit(self.code())
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}
