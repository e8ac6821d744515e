//! What can go wrong between processes.
use std::fmt;

/// An error between processes.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CommError {
    /// Variables that name a group, but not all of it.
    #[error(
        "{set} is set and {missing} is not: the variables of a group of processes are set in part\n  \
         hint: sieve launch and torchrun set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; unset them to \
         train in one process"
    )]
    HalfSet {
        /// A variable that is set.
        set: &'static str,
        /// One that is needed with it.
        missing: &'static str,
    },
    /// A variable with a value that makes no sense.
    #[error("{name}={value} {problem}")]
    BadVariable {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong.
        problem: String,
    },
    /// Rank 0 cannot listen.
    #[error(
        "rank 0 cannot listen on {address} (MASTER_ADDR:MASTER_PORT): {problem}\n  \
         hint: another program may have the port; set MASTER_PORT to a free one"
    )]
    Listen {
        /// The address.
        address: String,
        /// Why not.
        problem: String,
    },
    /// The name of rank 0's host says nothing to this one.
    #[error(
        "rank {rank} does not know the host {host} (MASTER_ADDR): {problem}\n  \
         hint: give rank 0's host by a name or an address that all hosts know, with sieve launch --master HOST:PORT or \
         MASTER_ADDR"
    )]
    UnknownHost {
        /// Who asked.
        rank: usize,
        /// For what.
        host: String,
        /// The system's answer.
        problem: String,
    },
    /// Rank 0 does not answer.
    #[error(
        "rank {rank} found no rank 0 at {address} (MASTER_ADDR:MASTER_PORT) within {seconds} s: {problem}\n  \
         hint: is rank 0 running, and does a firewall let the port through?"
    )]
    NoFirstRank {
        /// Who asked.
        rank: usize,
        /// Where.
        address: String,
        /// How long.
        seconds: u64,
        /// The last try's error.
        problem: String,
    },
    /// Some ranks never came.
    #[error("{present} of {size} ranks came to {address} within {seconds} s; missing: {missing}")]
    Missing {
        /// Ranks that came, rank 0 among them.
        present: usize,
        /// Ranks in all.
        size: usize,
        /// Where.
        address: String,
        /// How long.
        seconds: u64,
        /// The others, with commas.
        missing: String,
    },
    /// A process that is no part of this group.
    #[error("{0}")]
    Refused(String),
    /// A rank is lost; the work cannot continue.
    #[error("{0}")]
    Lost(Failure),
    /// Ranks call different collectives at the same time: a bug.
    #[error("rank {rank} asks for \"{theirs}\" where this rank asks for \"{ours}\": the ranks do different work")]
    OutOfStep {
        /// The other rank.
        rank: usize,
        /// The collective it calls.
        theirs: String,
        /// What this one does.
        ours: String,
    },
    /// A message that the receiver would refuse; nothing of it was sent.
    #[error("{0}")]
    TooLong(String),
}

/// Which rank was lost, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// The rank.
    pub rank: usize,
    /// Its host and process id; empty where unknown.
    pub place: String,
    /// What happened to it.
    pub loss: Loss,
}

/// What happened to a rank.
#[derive(Clone, Debug, PartialEq)]
pub enum Loss {
    /// It ended, or its host did, without a word.
    Ended,
    /// It gave no sign for this many seconds.
    Silent(u64),
    /// It lives, and has not gone on with a step for this many seconds while the others wait.
    Still(u64),
    /// Neither it nor any other has gone on, though none waits for another.
    AllStill {
        /// For how long.
        seconds: u64,
        /// Which rank's device is behind, in words; empty where that is not known.
        behind: String,
    },
    /// It reported an error.
    Error(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.place.as_str() {
            "" => String::new(),
            place => format!(" ({place})"),
        };
        let rank = self.rank;
        match &self.loss {
            Loss::Ended => write!(f, "rank {rank}{place} ended; all ranks stop"),
            Loss::Silent(seconds) => {
                write!(f, "no sign of rank {rank}{place} for {seconds} s; all ranks stop")
            }
            Loss::Still(seconds) => {
                write!(
                    f,
                    "rank {rank}{place} has stood still for {seconds} s while others wait for it: look at \
                     the files \
                     and the devices of its host; all ranks stop"
                )
            }
            Loss::AllStill { seconds, behind } => {
                let behind = match behind.as_str() {
                    "" => String::new(),
                    behind => format!("; {behind}: look there first"),
                };
                write!(
                    f,
                    "no rank has gone on for {seconds} s, and none waits for another: a GPU hangs, the link \
                     between GPUs or the files that all read (nvidia-smi, Xid in dmesg){behind}; all ranks stop"
                )
            }
            Loss::Error(text) => write!(f, "rank {rank}{place}: {text}"),
        }
    }
}
