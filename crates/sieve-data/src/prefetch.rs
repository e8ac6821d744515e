//! Prepares batches ahead on a background thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use crate::error::DataError;
use crate::loader::{Batch, Loader};

/// Which batches to make: `first_sample`, `first_sample + stride`, and so on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefetchPlan {
    /// Index of the first batch's first row.
    pub first_sample: u64,
    /// Rows of each batch.
    pub batch: usize,
    /// Distance between the first samples of two consecutive batches.
    pub stride: u64,
    /// Number of batches; `None` for no end.
    pub num_batches: Option<u64>,
    /// Number of batches prepared ahead, at least 1.
    pub depth: usize,
}

impl PrefetchPlan {
    /// The micro-batches of rank `rank` of `size`, without end: the batches rank, rank + size, … counted from
    /// `first_sample`. Together the ranks read the rows that one process would.
    pub fn of_rank(first_sample: u64, batch: usize, [rank, size]: [usize; 2], depth: usize) -> Self {
        Self {
            first_sample: first_sample + (rank * batch) as u64,
            batch,
            stride: (size * batch) as u64,
            num_batches: None,
            depth,
        }
    }
}

/// An iterator over batches that a thread prepares. Dropping it ends the thread.
#[derive(Debug)]
pub struct Prefetch {
    /// Prepared batches; `None` once dropped, so that the thread's next send fails.
    receiver: Option<Receiver<Result<Batch, DataError>>>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetch {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn new(loader: Arc<Loader>, plan: PrefetchPlan) -> Result<Self, DataError> {
        let (sender, receiver) = sync_channel(plan.depth.max(1));
        let work = move || {
            for number in 0..plan.num_batches.unwrap_or(u64::MAX) {
                let batch = loader.batch(plan.first_sample + number * plan.stride, plan.batch);
                let failed = batch.is_err();
                if sender.send(batch).is_err() || failed {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("sieve-loader".into()).spawn(work);
        let thread = thread.map_err(|error| stopped(&error.to_string()))?;
        Ok(Self { receiver: Some(receiver), thread: Some(thread) })
    }
}

fn stopped(reason: &str) -> DataError {
    DataError::Failed(format!("the loader's background thread ended early: {reason}"))
}

impl Iterator for Prefetch {
    type Item = Result<Batch, DataError>;

    /// The next batch; `None` after the last, or after an error was returned.
    fn next(&mut self) -> Option<Self::Item> {
        match self.receiver.as_ref()?.recv() {
            Ok(batch) => Some(batch),
            // The thread has ended: after the last batch, after an error, or by a panic.
            Err(_) => {
                let panicked = self.thread.take()?.join().is_err();
                panicked.then(|| Err(stopped("it panicked")))
            }
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.receiver = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported by `next`, or concerns batches that will not be read.
            let _ = thread.join();
        }
    }
}
