//! Progress of the GPU's collectives and NCCL's errors, polled from a thread of its own.
use super::Link;
use crate::locked::lock;
use cudarc::driver::result as driver;
use cudarc::driver::sys::CUevent;
use sieve_gpu::KernelError;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// NCCL's result code `ncclInProgress`, which is not an error.
const IN_PROGRESS: i32 = 7;

/// State of a group that the device thread and the group's watch share.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// A mark for each group of collectives that was queued and has not ended, the oldest first. Collectives on Burn's
    /// stream have no marks.
    queued: Mutex<VecDeque<Mark>>,
    /// Whether the communicator was aborted. Locked while NCCL queues work, because an abort frees the communicator.
    is_aborted: Mutex<bool>,
}

/// Events recorded on NCCL's stream before a group of collectives and after it.
#[derive(Clone, Copy, Debug)]
struct Mark {
    reached: CUevent,
    ended: CUevent,
}

// SAFETY: any thread may use the driver's event handles; the thread that removes a mark destroys its events, once.
unsafe impl Send for Mark {}

impl Marks {
    pub(super) fn push(&self, reached: CUevent, ended: CUevent) {
        lock(&self.queued).push_back(Mark { reached, ended });
    }

    /// Keeps the communicator from being aborted while the guard lives.
    ///
    /// # Errors
    /// The communicator was aborted before.
    pub(super) fn hold(&self) -> Result<MutexGuard<'_, bool>, String> {
        let is_aborted = lock(&self.is_aborted);
        if *is_aborted {
            Err("NCCL's communicator was aborted, because a rank is lost".to_owned())
        } else {
            Ok(is_aborted)
        }
    }
}

/// Polls the progress and the errors of a group's collectives.
#[derive(Debug)]
pub struct NcclWatch {
    link: Link,
    marks: Arc<Marks>,
    num_ended: u64,
}

impl NcclWatch {
    pub(super) fn new(link: Link, marks: Arc<Marks>) -> Self {
        Self { link, marks, num_ended: 0 }
    }

    /// Numbers of collectives that have ended and that have started on this GPU. One that has started and not ended may
    /// be waiting for other ranks. Call it from one thread only.
    ///
    /// # Errors
    /// NCCL has detected an error, such as a broken link: the collectives will never end.
    pub fn look(&mut self) -> Result<[u64; 2], KernelError> {
        let Link { nccl, communicator, context, .. } = self.link;
        let mut async_error = 0;
        // SAFETY: only `abort`, which consumes the watch, frees the communicator; NCCL allows the call from any thread.
        let result = unsafe { (nccl.get_async_error)(communicator, &mut async_error) };
        nccl.require("ncclCommGetAsyncError", result)?;
        if async_error != IN_PROGRESS {
            nccl.require("NCCL has met an error", async_error)?;
        }
        // Without the context no event can be queried, so nothing counts as started or ended.
        // SAFETY: the primary context, which is retained until the process ends.
        if unsafe { driver::ctx::set_current(context) }.is_err() {
            return Ok([0; 2]);
        }
        let mut marks = lock(&self.marks.queued);
        while let Some(&Mark { reached, ended }) = marks.front() {
            if !has_happened(ended) {
                break;
            }
            marks.pop_front();
            self.num_ended += 1;
            for event in [reached, ended] {
                // SAFETY: the mark was removed, so nothing else uses its events. An error only leaks a few bytes.
                let _ = unsafe { driver::event::destroy(event) };
            }
        }
        let num_reached = marks.iter().take_while(|mark| has_happened(mark.reached)).count() as u64;
        Ok([self.num_ended, self.num_ended + num_reached])
    }

    /// Aborts the group's collectives, also collectives that wait for a lost rank. The GPU then runs what was queued
    /// after them, on invalid inputs. Does nothing while the device thread queues collectives, since it may be blocked
    /// there.
    pub fn abort(self) {
        let mut is_aborted = match self.marks.is_aborted.try_lock() {
            Ok(is_aborted) => is_aborted,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if !std::mem::replace(&mut is_aborted, true) {
            let Link { nccl, communicator, .. } = self.link;
            // SAFETY: the device thread cannot use the communicator now because of the lock, nor later because of the
            // flag; the watch, which polls it, ends here.
            let _ = unsafe { (nccl.comm_abort)(communicator) };
        }
    }
}

/// Whether the GPU has reached an event. False after an error of the GPU, which whoever reads the results reports.
fn has_happened(event: CUevent) -> bool {
    // SAFETY: the event was recorded and is not destroyed yet.
    unsafe { driver::event::query(event) }.is_ok()
}
