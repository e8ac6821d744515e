//! What a step of one token queues, written down while it runs, so that a CUDA graph can repeat it.
//!
//! The tape notes launches and GEMMs with their buffers while the step runs once on its tensors.
use crate::device_thread::Server;
use crate::locked::lock;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;
use std::sync::{Arc, Mutex};

/// A launch or a GEMM of a step.
pub(crate) trait StepWork: Send {
    /// Its buffers, whose memory they keep.
    fn bindings(&self) -> &[Binding];

    /// Queues it once more, on this stream. Runs on the device thread.
    fn queue_again(&self, server: &mut Server, stream: StreamId) -> Result<(), String>;
}

/// Records the launches and GEMMs of a step while it runs: those on tensors of [`StepTape::noted`] and on tensors that
/// were allocated from them.
#[derive(Clone, Default)]
pub struct StepTape {
    notes: Arc<Mutex<Notes>>,
}

/// What a tape has recorded so far.
#[derive(Default)]
pub(crate) struct Notes {
    pub(crate) work: Vec<Box<dyn StepWork>>,
    /// The first work that a graph cannot hold; `None` while it can hold all.
    pub(crate) refused: Option<&'static str>,
}

impl StepTape {
    /// Records work that was queued on tensors of this tape.
    pub(crate) fn note(&self, work: Box<dyn StepWork>) {
        lock(&self.notes).work.push(work);
    }

    /// Keeps the name of the first work that a graph cannot hold.
    pub(crate) fn refuse(&self, what: &'static str) {
        lock(&self.notes).refused.get_or_insert(what);
    }

    /// Removes and returns what was recorded.
    pub(crate) fn take(&self) -> Notes {
        std::mem::take(&mut *lock(&self.notes))
    }
}
