//! A decoding step as one CUDA graph.
//!
//! A step of one token is hundreds of launches of a few microseconds each, and queueing a launch from Rust takes longer
//! than running it. So the first step runs on tensors of a [`StepTape`], which records every launch and every GEMM with
//! its buffers; [`StepTape::graph`] captures them, and [`StepGraph::replay`] queues all of them with one call. Kernels
//! read the token ids and their position, which change from step to step, from device memory.
//!
//! A graph keeps the memory of its buffers. The owner of the KV caches drops the graph before anything else writes to
//! the caches.
use crate::burn_memory::{BurnMemory, binding_of, burn_memory};
use crate::device_thread::{Server, late_error, report_late};
use crate::lane::{self, check, device_queue, on_lane, on_lane_with, run_blocking};
use crate::launch;
use crate::step_tape::{Notes, StepTape, StepWork};
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;
use cudarc::driver::result::graph as driver_graph;
use cudarc::driver::sys::{self as cuda, CUgraphExec, CUstream};
use sieve_gpu::{CudaTensor, DType, KernelError};
use std::fmt;
use std::sync::Arc;

const NAME: &str = "step_graph";

/// The tokens of a step, on the device.
#[derive(Debug)]
pub struct StepInputs {
    /// Token id of each row, i32 `[batch, 1]`.
    pub ids: CudaTensor,
    /// Position of the token in its row, which is the number of tokens before it. i32 `[batch, 1]`.
    pub position: CudaTensor,
    /// `-position`: the first token of the row's document, relative to this token. i32 `[batch, 1]`.
    pub start: CudaTensor,
}

/// The positions of a step's tokens.
#[derive(Debug)]
pub enum StepPositions {
    /// All rows have this position.
    Same(usize),
    /// i32 `[2 * batch]`: the position of each row's token, then minus each position.
    Each(CudaTensor),
}

/// A decoding step, captured as a CUDA graph.
pub struct StepGraph {
    exec: Arc<Exec>,
    inputs: StepInputs,
    /// The tensor that the captured step writes.
    output: CudaTensor,
    num_launches: usize,
    stream: StreamId,
}

/// An executable graph of the device's primary context.
struct Exec {
    graph: CUgraphExec,
    /// Keeps the memory of the graph's buffers. A queued replay holds the `Exec` until the device thread has launched
    /// it: the owner of the [`StepGraph`] may be many replays ahead when it drops it.
    _work: Vec<Box<dyn StepWork>>,
}

// SAFETY: the driver allows graph calls from any thread; only the device thread launches the graph.
unsafe impl Send for Exec {}
// SAFETY: as above.
unsafe impl Sync for Exec {}

impl Drop for Exec {
    fn drop(&mut self) {
        // SAFETY: created by the driver, destroyed once.
        let _ = unsafe { driver_graph::exec_destroy(self.graph) };
    }
}

impl fmt::Debug for StepGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepGraph").field("num_launches", &self.num_launches).finish_non_exhaustive()
    }
}

impl StepTape {
    /// The same tensor on a buffer whose launches the tape records. It counts as an owner of the buffer, so that Burn's
    /// in-place ops write to a copy while it lives; the graph does not.
    pub fn noted(&self, tensor: &CudaTensor) -> CudaTensor {
        let memory = Arc::new(BurnMemory { tape: Some(self.clone()), ..burn_memory(tensor).clone() });
        let layout = [tensor.shape(), tensor.strides()];
        CudaTensor::new(memory, tensor.offset_bytes(), layout, tensor.dtype()).under(tensor.policy())
    }

    /// Captures the recorded work. `inputs` and `output` are the tensors that the step read and wrote.
    ///
    /// # Errors
    /// [`KernelError::Refused`] if the step did something that a graph cannot hold, or if launches do not go to Burn's
    /// own stream; [`KernelError::Launch`] if the driver refuses the graph.
    pub fn graph(self, inputs: StepInputs, output: CudaTensor) -> Result<StepGraph, KernelError> {
        late_error()?;
        let Notes { work, refused } = self.take();
        let stream = StreamId::current();
        // Buffers of other streams are kept until an event has passed, but a captured event cannot be queried.
        let mut bindings = work.iter().flat_map(|work| work.bindings());
        let has_foreign = bindings.any(|binding| binding.stream != stream);
        let refused = match lane::is_inline() {
            Some(true) => refused.or_else(|| has_foreign.then_some("buffers of another thread")),
            _ => Some("launches beside Burn's stream"),
        };
        if let Some(what) = refused {
            return Err(KernelError::unsupported(NAME, "work", what, "launches and GEMMs on Burn's stream"));
        }
        let num_launches = work.len();
        let exec = run_blocking(&output, NAME, move |server| capture(server, stream, work))?;
        Ok(StepGraph { exec: Arc::new(exec), inputs, output, num_launches, stream })
    }
}

impl StepInputs {
    /// New inputs with these tokens: ids i32 `[batch, 1]`.
    ///
    /// # Errors
    /// [`KernelError::Launch`] if Burn's stream cannot be used; positions of another batch size.
    pub fn new(tape: &StepTape, ids: &CudaTensor, positions: &StepPositions) -> Result<Self, KernelError> {
        let new_input = || tape.noted(&ids.empty_contiguous(ids.shape(), DType::I32));
        let inputs = Self { ids: new_input(), position: new_input(), start: new_input() };
        let (rows, stream) = (ids.num_elements(), lane::open(ids)?);
        let (bindings, same) = inputs.bindings(ids, positions)?;
        submit(ids, stream, bindings, move |lane, pointers| set_inputs(lane, pointers, rows, same));
        Ok(inputs)
    }

    /// The buffers that [`set_inputs`] takes, and the position that all rows have, if they have one. It copies from the
    /// first two buffers; of one position it reads no buffer, and the ids stand in for it.
    fn bindings(
        &self,
        ids: &CudaTensor,
        positions: &StepPositions,
    ) -> Result<(Vec<Binding>, Option<usize>), KernelError> {
        let (positions, same) = match positions {
            StepPositions::Same(position) => (ids, Some(*position)),
            StepPositions::Each(positions) => {
                positions.require_dtype(NAME, "positions", DType::I32)?;
                positions.require_shape(NAME, "positions", &[2 * ids.num_elements()])?;
                positions.require_contiguous(NAME, "positions")?;
                (positions, None)
            }
        };
        let buffers = [ids, positions, &self.ids, &self.position, &self.start];
        Ok((buffers.map(binding_of).to_vec(), same))
    }
}

impl StepGraph {
    /// Whether the caller's thread captured it. What another thread queues next would not wait for its output.
    pub fn is_of_this_thread(&self) -> bool {
        self.stream == StreamId::current()
    }

    /// Queues the step, on the thread that captured it, for other tokens: ids i32 `[batch, 1]`. Returns a copy of the
    /// step's output.
    ///
    /// # Errors
    /// [`KernelError::Launch`] if work queued earlier has failed; ids or positions of another batch size.
    pub fn replay(&self, ids: &CudaTensor, positions: &StepPositions) -> Result<CudaTensor, KernelError> {
        late_error()?;
        ids.require_shape(NAME, "ids", self.inputs.ids.shape())?;
        ids.require_contiguous(NAME, "ids")?;
        let copy = ids.empty_contiguous(self.output.shape(), self.output.dtype());
        let (rows, bytes) = (ids.num_elements(), copy.num_elements() * copy.dtype().size());
        let (mut bindings, same) = self.inputs.bindings(ids, positions)?;
        bindings.extend([&self.output, &copy].map(binding_of));
        let exec = self.exec.clone();
        submit(ids, self.stream, bindings, move |lane, pointers| {
            // The five buffers of the inputs come first, then the output and its copy.
            set_inputs(lane, &pointers[..5], rows, same)?;
            // SAFETY: the graph is of this context and its buffers are kept; output and copy have `bytes` bytes.
            unsafe {
                let launched = driver_graph::launch(exec.graph, lane);
                launched.map_err(|error| format!("cuGraphLaunch: {error:?}"))?;
                let copied = cuda::cuMemcpyDtoDAsync_v2(pointers[6], pointers[5], bytes, lane);
                check("cuMemcpyDtoDAsync", copied)
            }
        });
        launch::count(self.num_launches);
        Ok(copy)
    }
}

/// Queues `work` with the addresses of its buffers on the device thread; a later call returns its error.
fn submit(
    like: &CudaTensor,
    stream: StreamId,
    bindings: Vec<Binding>,
    work: impl FnOnce(CUstream, &[u64]) -> Result<(), String> + Send + 'static,
) {
    device_queue(like).submit(move |server| {
        if let Err(reason) = on_lane_with(server, stream, bindings, work) {
            report_late(KernelError::Launch { kernel: NAME, reason });
        }
    });
}

/// Copies the ids of `rows` rows and sets their positions, to `same` or to each row's own; addresses in the order of
/// [`StepInputs::bindings`].
fn set_inputs(stream: CUstream, pointers: &[u64], rows: usize, same: Option<usize>) -> Result<(), String> {
    let &[new_ids, new_positions, ids, positions, starts] = pointers else {
        return Err(format!("five buffers, not {}", pointers.len()));
    };
    let bytes = 4 * rows;
    // SAFETY: each of the buffers has `rows` words of 32 bits; `new_positions` has twice as many where it is read.
    unsafe {
        let copy = |to, from| check("cuMemcpyDtoDAsync", cuda::cuMemcpyDtoDAsync_v2(to, from, bytes, stream));
        let set = |to, value: i32| check("cuMemsetD32Async", cuda::cuMemsetD32Async(to, value as u32, rows, stream));
        copy(ids, new_ids)?;
        match same.map(|position| position as i32) {
            Some(position) => {
                set(positions, position)?;
                set(starts, position.wrapping_neg())
            }
            None => {
                copy(positions, new_positions)?;
                copy(starts, new_positions + bytes as u64)
            }
        }
    }
}

/// Captures the work as a graph, without running it. Runs on the device thread.
fn capture(server: &mut Server, stream: StreamId, work: Vec<Box<dyn StepWork>>) -> Result<Exec, String> {
    let lane = on_lane(stream, Ok)?;
    let mode = cuda::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: only this thread queues work on Burn's stream, and the capture is ended below in every case.
    check("cuStreamBeginCapture", unsafe { cuda::cuStreamBeginCapture_v2(lane, mode) })?;
    let queued = work.iter().try_for_each(|work| work.queue_again(server, stream));
    let mut graph = std::ptr::null_mut();
    // SAFETY: ends the capture begun above; the graph is ours, and the executable does not need it.
    unsafe {
        let ended = check("cuStreamEndCapture", cuda::cuStreamEndCapture(lane, &mut graph));
        let exec = queued.and(ended).and_then(|()| {
            let exec = driver_graph::instantiate(graph, cuda::CUgraphInstantiate_flags(0));
            let graph = exec.map_err(|error| format!("cuGraphInstantiate: {error:?}"))?;
            Ok(Exec { graph, _work: work })
        });
        if !graph.is_null() {
            let _ = driver_graph::destroy(graph);
        }
        exec
    }
}
