//! CUDA graphs of a plan's runs. A plan of several launches that runs at the same addresses again and again queues one
//! graph launch instead.
#![allow(unsafe_code, reason = "the driver's graphs")]
use crate::request::PlanError;
use cudarc::driver::result::{self as driver, DriverError};
use cudarc::driver::sys::{self, CUgraphExec, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// The fewest launches that a graph replaces: a graph launch costs the host a little more than one launch.
const FEWEST_LAUNCHES: usize = 3;

/// Which run at the same addresses, counted from 1, records a graph. Recording costs about as much as twenty launches,
/// and an allocator returns to an address by chance too.
const RECORDED_RUN: u32 = 4;

/// Sets of addresses remembered in the process. Each graph takes some tens of KiB of the host's and the GPU's memory.
const MOST_SETS: usize = 512;

/// Runs at other addresses, counted from when the table was full, after which it is emptied: a program that has moved
/// on to other tensors gets graphs for these, and addresses that never come again cost little.
const MOST_MISSES: usize = 16 * MOST_SETS;

static RUNS: LazyLock<Mutex<Runs<Graph>>> = LazyLock::new(Mutex::default);

/// The graph for a run; `None` where the launches are to be queued one by one: fewer than three, addresses of fewer
/// than three earlier runs, a stream that is being captured, no memory for a graph.
///
/// `run` is the number of the plan, then its pointers. `queue` queues the launches on the stream that it is given.
///
/// # Safety
/// The stream is one of the current context's. `queue` queues the same launches in every call for this `run`.
pub(crate) unsafe fn graph_of(
    run: &[u64],
    num_launches: usize,
    stream: CUstream,
    queue: impl FnOnce(CUstream) -> Result<(), PlanError>,
) -> Option<Arc<Graph>> {
    if num_launches < FEWEST_LAUNCHES {
        return None;
    }
    // SAFETY: the caller keeps the contract of this function.
    let status = unsafe { driver::stream::is_capturing(stream) };
    if !matches!(status, Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)) {
        return None;
    }
    let runs = || RUNS.lock().unwrap_or_else(PoisonError::into_inner);
    let next = runs().next(run);
    match next {
        Next::Launches => None,
        Next::Graph(graph) => Some(graph),
        Next::Record => {
            let graph = Arc::new(Graph::record(queue).ok()?);
            runs().recorded(run, graph.clone());
            Some(graph)
        }
    }
}

/// Whether a run launches its kernels, is also recorded as a graph, or replays one.
#[derive(Debug, PartialEq)]
enum Next<G> {
    Launches,
    Record,
    Graph(Arc<G>),
}

/// Earlier runs of plans, by the addresses they used.
#[derive(Debug)]
struct Runs<G> {
    known: HashMap<Box<[u64]>, Known<G>>,
    misses: usize,
}

/// Runs at the same addresses: how many there were, and the graph if one was recorded.
#[derive(Debug)]
struct Known<G> {
    count: u32,
    graph: Option<Arc<G>>,
}

impl<G> Default for Runs<G> {
    fn default() -> Self {
        Self { known: HashMap::new(), misses: 0 }
    }
}

impl<G> Runs<G> {
    /// Counts a run of these words and says how it is queued. A run is recorded once: where the recording fails, later
    /// runs queue launch by launch.
    fn next(&mut self, run: &[u64]) -> Next<G> {
        if let Some(known) = self.known.get_mut(run) {
            known.count = known.count.saturating_add(1);
            return match &known.graph {
                Some(graph) => Next::Graph(graph.clone()),
                None if known.count == RECORDED_RUN => Next::Record,
                None => Next::Launches,
            };
        }
        if self.known.len() >= MOST_SETS {
            self.misses += 1;
            if self.misses < MOST_MISSES {
                return Next::Launches;
            }
            *self = Self::default();
        }
        self.known.insert(run.into(), Known { count: 1, graph: None });
        Next::Launches
    }

    fn recorded(&mut self, run: &[u64], graph: Arc<G>) {
        // Another thread may have emptied the table.
        if let Some(known) = self.known.get_mut(run) {
            known.graph = Some(graph);
        }
    }
}

/// An executable CUDA graph, behind a lock because the driver has none.
#[derive(Debug)]
pub(crate) struct Graph(Mutex<CUgraphExec>);

// SAFETY: any thread may use the handle, one at a time.
unsafe impl Send for Graph {}
// SAFETY: behind a lock.
unsafe impl Sync for Graph {}

impl Graph {
    /// Records what `queue` queues, on a stream of its own in the current context.
    fn record(queue: impl FnOnce(CUstream) -> Result<(), PlanError>) -> Result<Self, PlanError> {
        // Without this, a capture of another thread in the global mode would be invalidated by these calls.
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: sets the calling thread's mode, and the earlier one again below.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result().map_err(failed)?;
        let recorded = Self::record_relaxed(queue);
        // SAFETY: as above.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }.result().map_err(failed)?;
        recorded
    }

    /// Captures what `queue` queues on a new stream. The calling thread's capture mode must be relaxed.
    fn record_relaxed(queue: impl FnOnce(CUstream) -> Result<(), PlanError>) -> Result<Self, PlanError> {
        // Not a blocking stream: while it is captured, the default stream would refuse all work.
        let stream = driver::stream::create(driver::stream::StreamKind::NonBlocking).map_err(failed)?;
        // SAFETY: the stream was created here; nothing else knows it, and nothing of it runs.
        let graph = unsafe {
            let begun = driver::stream::begin_capture(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
            let graph = begun.map_err(failed).and_then(|()| {
                let queued = queue(stream);
                let graph = driver::stream::end_capture(stream).map_err(failed);
                queued.and(graph)
            });
            driver::stream::destroy(stream).map_err(failed)?;
            graph?
        };
        // SAFETY: the graph comes from the capture, is instantiated once and then not used.
        let exec = unsafe {
            let no_flags = sys::CUgraphInstantiate_flags(0);
            let exec = driver::graph::instantiate(graph, no_flags);
            driver::graph::destroy(graph).map_err(failed)?;
            exec.map_err(failed)?
        };
        Ok(Self(Mutex::new(exec)))
    }

    /// Queues the graph.
    ///
    /// # Safety
    /// The stream is one of the context's in which the graph was recorded; the memory at the recorded addresses stays
    /// until the graph has run.
    pub(crate) unsafe fn launch(&self, stream: CUstream) -> Result<(), PlanError> {
        let exec = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller keeps the contract of this function.
        unsafe { driver::graph::launch(*exec, stream) }.map_err(failed)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let exec = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: nothing else has the handle; the driver lets a graph that runs end first.
        let _ = unsafe { driver::graph::exec_destroy(*exec) };
    }
}

fn failed(error: DriverError) -> PlanError {
    PlanError::Call(format!("the CUDA graph of a plan: {:?}", error.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_addresses_get_a_graph_that_other_addresses_do_not_evict() {
        let mut runs = Runs::default();
        let mut call = |run: u64| match runs.next(&[0, run]) {
            Next::Launches => "launches",
            Next::Graph(_) => "graph",
            Next::Record => {
                runs.recorded(&[0, run], Arc::new(()));
                "record"
            }
        };
        let got = [1, 1, 1, 2, 1, 1].map(&mut call);
        assert_eq!(got, ["launches", "launches", "launches", "launches", "record", "graph"]);
        // The table has room for 510 more addresses. The last miss empties it: it then holds that run and run 1.
        let last = 3 + (MOST_SETS - 2 + MOST_MISSES) as u64 - 1;
        for run in 3..=last {
            assert_eq!(call(run), "launches", "{run}");
            assert_eq!(call(1), if run < last { "graph" } else { "launches" }, "{run}");
        }
        assert_eq!(runs.known.len(), 2);
    }

    #[test]
    fn a_run_whose_recording_failed_is_not_recorded_again() {
        let mut runs = Runs::<()>::default();
        let got: Vec<_> = (0..7).map(|_| runs.next(&[7])).collect();
        let records = got.iter().filter(|next| **next == Next::Record).count();
        assert_eq!((records, &got[3]), (1, &Next::Record));
        assert!(got[4..].iter().all(|next| *next == Next::Launches));
    }
}
