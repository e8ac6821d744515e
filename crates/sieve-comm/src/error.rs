//! The errors of communication between processes.
use std::fmt;

/// Why the processes of a group cannot work together.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CommError {
    /// Some of the environment variables that describe a group are set, others are not.
    #[error(
        "{set} is set and {missing} is not: the variables of a group of processes are set in part\n  \
         hint: sieve launch and torchrun set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; unset them to \
         train in one process"
    )]
    HalfSet {
        /// Name of a variable that is set, although others are missing.
        set: &'static str,
        /// Name of a variable that is needed too and is not set.
        missing: &'static str,
    },
    /// An environment variable has an invalid value.
    #[error("{name}={value} {problem}")]
    BadVariable {
        /// Name of the environment variable.
        name: &'static str,
        /// Value of the environment variable.
        value: String,
        /// What is wrong with the value.
        problem: String,
    },
    /// Rank 0 cannot listen on its port.
    #[error(
        "rank 0 cannot listen on {address} (MASTER_ADDR:MASTER_PORT): {problem}\n  \
         hint: another program may be using the port; set MASTER_PORT to a free one"
    )]
    Listen {
        /// Host and port that rank 0 listens on.
        address: String,
        /// Error text of the operating system.
        problem: String,
    },
    /// This host cannot resolve the name of rank 0's host.
    #[error(
        "rank {rank} does not know the host {host} (MASTER_ADDR): {problem}\n  \
         hint: give rank 0's host by a name or an address that all hosts know, with sieve launch --master HOST:PORT or \
         MASTER_ADDR"
    )]
    UnknownHost {
        /// Number of this rank.
        rank: usize,
        /// Name of the host of rank 0.
        host: String,
        /// Error text of the operating system.
        problem: String,
    },
    /// Rank 0 did not answer before the timeout.
    #[error(
        "rank {rank} found no rank 0 at {address} (MASTER_ADDR:MASTER_PORT) within {seconds} s: {problem}\n  \
         hint: is rank 0 running, and does a firewall let the port through?"
    )]
    NoFirstRank {
        /// Number of this rank.
        rank: usize,
        /// Host and port of rank 0.
        address: String,
        /// Seconds that this rank has tried to connect.
        seconds: u64,
        /// Error text of the last attempt.
        problem: String,
    },
    /// Some ranks did not connect to rank 0 before the timeout.
    #[error("{present} of {size} ranks joined at {address} within {seconds} s; missing: {missing}")]
    Missing {
        /// Number of ranks that have joined, rank 0 included.
        present: usize,
        /// Number of ranks in the group.
        size: usize,
        /// Host and port of rank 0.
        address: String,
        /// Seconds that rank 0 has waited.
        seconds: u64,
        /// The ranks that did not connect, separated by commas.
        missing: String,
    },
    /// A process cannot be part of this group, for the reason given.
    #[error("{0}")]
    Refused(String),
    /// A rank is lost, so the group cannot continue.
    #[error("{0}")]
    Lost(Failure),
    /// Ranks call different collectives at the same time, which is a bug.
    #[error("rank {rank} asks for \"{theirs}\" where this rank asks for \"{ours}\": the ranks do different work")]
    OutOfStep {
        /// Number of the other rank.
        rank: usize,
        /// The collective that the other rank calls.
        theirs: String,
        /// The collective that this rank calls.
        ours: String,
    },
    /// The receiver would refuse a message of this length; no part of it was sent.
    #[error("{0}")]
    TooLong(String),
}

/// The rank that was lost, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// Number of the lost rank.
    pub rank: usize,
    /// The rank's host and process id; empty if unknown.
    pub place: String,
    /// What happened to the rank.
    pub loss: Loss,
}

/// How a rank was lost.
#[derive(Clone, Debug, PartialEq)]
pub enum Loss {
    /// Its connection closed without a goodbye message: the process or its host ended.
    Ended,
    /// The rank sent no heartbeat for this many seconds.
    Silent(u64),
    /// It sends heartbeats, but has made no progress for this many seconds while other ranks wait for it.
    Still(u64),
    /// No rank has made progress, though none waits for another.
    AllStill {
        /// How long no rank has made progress.
        seconds: u64,
        /// A phrase that names the rank whose device is behind; empty if that is not known.
        behind: String,
    },
    /// The rank reported an error with this text.
    Error(String),
}

/// A rank's place in parentheses, to follow its number in a message; empty if the place is unknown.
pub(crate) fn in_parentheses(place: &str) -> String {
    match place {
        "" => String::new(),
        _ => format!(" ({place})"),
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, place) = (self.rank, in_parentheses(&self.place));
        match &self.loss {
            Loss::Ended => write!(f, "rank {rank}{place} ended; all ranks stop"),
            Loss::Silent(seconds) => write!(f, "no heartbeat from rank {rank}{place} for {seconds} s; all ranks stop"),
            Loss::Still(seconds) => write!(
                f,
                "rank {rank}{place} has made no progress for {seconds} s while others wait for it: look at the files \
                 and the devices of its host; all ranks stop"
            ),
            Loss::AllStill { seconds, behind } => {
                let behind = match behind.as_str() {
                    "" => String::new(),
                    behind => format!("; {behind}: look there first"),
                };
                write!(
                    f,
                    "no rank has made progress for {seconds} s, and none waits for another: a GPU hangs, the link \
                     between GPUs or the files that all read (nvidia-smi, Xid in dmesg){behind}; all ranks stop"
                )
            }
            Loss::Error(text) => write!(f, "rank {rank}{place}: {text}"),
        }
    }
}
