//! Batches made ahead on a background thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use crate::error::DataError;
use crate::loader::{Batch, Loader};

/// Which batches to make: `first_sample`, `first_sample + stride`, and so on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefetchPlan {
    /// First sample of the first batch.
    pub first_sample: u64,
    /// Rows of a batch.
    pub batch: usize,
    /// Samples from the first of one batch to the first of the next.
    pub stride: u64,
    /// Number of batches; `None`: endless.
    pub num_batches: Option<u64>,
    /// Batches made ahead, at least 1.
    pub depth: usize,
}

impl PrefetchPlan {
    /// The micro-batches of rank `rank` of `size`, without end. All ranks together read the same rows from
    /// `first_sample` on as one process would: each round of micro-batches is divided among the ranks in order.
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

/// An iterator over batches that are made on a thread of their own. Dropping it ends the thread.
#[derive(Debug)]
pub struct Prefetch {
    /// Taken by drop, so that the thread's next send fails.
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
        Ok(Self {
            receiver: Some(receiver),
            thread: Some(thread),
        })
    }
}

fn stopped(reason: &str) -> DataError {
    DataError::Failed(format!("the loader's background thread ended early: {reason}"))
}

impl Iterator for Prefetch {
    type Item = Result<Batch, DataError>;

    /// The next batch; `None` after the last, or after an error was given.
    fn next(&mut self) -> Option<Self::Item> {
        match self.receiver.as_ref()?.recv() {
            Ok(batch) => Some(batch),
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
            // `next` has reported the thread's panic, or the loader is gone and its batches are unused.
            let _ = thread.join();
        }
    }
}
