//! How long a rank waits for others, in each kind of work.
use std::time::Duration;

/// How long a rank waits for others.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Time until all ranks must have joined.
    pub join: Duration,
    /// Time without a heartbeat, or without progress of a rank in a step for which others wait.
    pub silence: Duration,
    /// Time without progress of any rank in a step, while none waits for another.
    pub still: Duration,
    /// Time without progress of a rank in a checkpoint, a validation or other long work.
    pub long: Duration,
    /// Time in which a process must end after another rank is lost.
    pub goodbye: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            join: Duration::from_secs(300),
            silence: Duration::from_secs(30),
            still: Duration::from_secs(100),
            long: Duration::from_secs(600),
            goodbye: Duration::from_secs(10),
        }
    }
}

/// The work of a rank, by which its progress timeout is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// An ordinary step, which must make progress within [`Timeouts::silence`].
    Step,
    /// A first step, a validation or a checkpoint, which must make progress within [`Timeouts::long`].
    Long,
    /// Work without a timeout, such as reading and preparing data.
    Any,
}
