//! Progress of the GPU's collectives and NCCL's errors, polled from a thread of its own.
use super::{Link, lock};
use cudarc::driver::result as driver;
use cudarc::driver::sys::CUevent;
use sieve_gpu::KernelError;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// `ncclInProgress`: no error.
const IN_PROGRESS: i32 = 7;

/// What the device thread and a group's watch share.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Collectives that were queued and have not ended yet, first queued first. Those on Burn's stream have none.
    queued: Mutex<VecDeque<Mark>>,
    /// Whether the communicator was aborted. Locked while NCCL queues work, since an abort would free what it uses.
    is_aborted: Mutex<bool>,
}

/// Recorded on NCCL's stream before a collective and behind it.
#[derive(Clone, Copy, Debug)]
struct Mark {
    reached: CUevent,
    ended: CUevent,
}

// SAFETY: the driver's handles of events may be used by any thread; each is destroyed once, by the thread that removes
// it.
unsafe impl Send for Mark {}

impl Marks {
    pub(super) fn push(&self, reached: CUevent, ended: CUevent) {
        lock(&self.queued).push_back(Mark { reached, ended });
    }

    /// Locks the communicator for the life of the guard.
    ///
    /// # Errors
    /// It was aborted.
    pub(super) fn hold(&self) -> Result<MutexGuard<'_, bool>, String> {
        let is_aborted = lock(&self.is_aborted);
        match *is_aborted {
            true => Err("NCCL's communicator was aborted, because a rank is lost".to_owned()),
            false => Ok(is_aborted),
        }
    }
}

/// Asks after a group's work.
#[derive(Debug)]
pub struct NcclWatch {
    link: Link,
    marks: Arc<Marks>,
    num_ended: u64,
}

impl NcclWatch {
    pub(super) fn new(link: Link, marks: Arc<Marks>) -> Self {
        Self {
            link,
            marks,
            num_ended: 0,
        }
    }

    /// How many collectives have ended on this GPU, and how many have started: if one more has started, it is waiting
    /// for other ranks. Always called by the same thread.
    ///
    /// # Errors
    /// NCCL has met an error, a link that broke, say: collectives will never end.
    pub fn look(&mut self) -> Result<[u64; 2], KernelError> {
        let Link {
            nccl,
            communicator,
            context,
            ..
        } = self.link;
        let mut met = 0;
        // SAFETY: the communicator lasts as long as the process, and NCCL lets any thread ask; writes one number.
        let asked = unsafe { (nccl.get_async_error)(communicator, &mut met) };
        nccl.require("ncclCommGetAsyncError", asked)?;
        if met != IN_PROGRESS {
            nccl.require("NCCL has met an error", met)?;
        }
        // SAFETY: the primary context, which is retained for the life of the process.
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
                // SAFETY: no other owner is left. A leaked event costs a few bytes.
                let _ = unsafe { driver::event::destroy(event) };
            }
        }
        let num_reached = marks.iter().take_while(|mark| has_happened(mark.reached)).count() as u64;
        Ok([self.num_ended, self.num_ended + num_reached])
    }

    /// Aborts the group's collectives, also those that wait for a lost rank, so that the GPU runs what was queued after
    /// them, on invalid inputs. Does nothing while NCCL is queuing work, which may block.
    pub fn abort(self) {
        let mut is_aborted = match self.marks.is_aborted.try_lock() {
            Ok(is_aborted) => is_aborted,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if !std::mem::replace(&mut is_aborted, true) {
            let Link { nccl, communicator, .. } = self.link;
            // SAFETY: the lock keeps the device thread from using the communicator now, and the flag later; the watch,
            // which asks it for errors, ends here.
            let _ = unsafe { (nccl.comm_abort)(communicator) };
        }
    }
}

/// Also false for an event with an error, which the reader of the results reports.
fn has_happened(event: CUevent) -> bool {
    // SAFETY: it was recorded, and is not destroyed yet.
    unsafe { driver::event::query(event) }.is_ok()
}
