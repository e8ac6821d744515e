//! A decoding step as one CUDA graph.
//!
//! A step of one token is hundreds of launches of a few microseconds each, and queueing one from Rust takes longer than
//! running it. So a step runs once on tensors of a [`StepTape`], which records every launch and every GEMM with its
//! buffers; [`StepTape::graph`] captures them, and [`StepGraph::replay`] queues all of them with one call. What changes
//! from token to token is read on the device: the token ids and their position.
//!
//! A graph is valid as long as its buffers are: it keeps their memory, and the owner of the caches drops it before
//! anything else writes to them.
use crate::burn_memory::{BurnMemory, binding_of, burn_memory};
use crate::cublaslt::Call;
use crate::lane::{self, Server, late_error, lock, on_lane, on_lane_with, report_late};
use crate::launch::{self, QueuedLaunch};
use cubecl::device::Device;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;
use cudarc::driver::result::graph as driver_graph;
use cudarc::driver::sys::{self as cuda, CUgraphExec, CUresult, CUstream};
use sieve_gpu::{CudaTensor, DType, Fill, Hardware, KernelError, LaunchRequest, Memory};
use std::fmt;
use std::sync::{Arc, Mutex};

const NAME: &str = "step_graph";

/// One piece of a step. Its bindings keep the buffers.
#[derive(Clone)]
pub(crate) enum Work {
    Launch(QueuedLaunch),
    Product(Call),
}

impl Work {
    fn bindings(&self) -> &[Binding] {
        match self {
            Self::Launch(launch) => &launch.bindings,
            Self::Product(call) => &call.bindings,
        }
    }
}

/// What a step does, noted while it runs: everything on tensors of [`StepTape::noted`], and on tensors made of those.
#[derive(Clone, Default)]
pub struct StepTape {
    notes: Arc<Mutex<Notes>>,
}

#[derive(Default)]
struct Notes {
    work: Vec<Work>,
    /// Work that no graph can hold.
    refused: Option<&'static str>,
}

/// A buffer whose launches a tape notes.
struct TapedMemory {
    memory: BurnMemory,
    tape: StepTape,
}

/// The tokens of a step, on the device.
#[derive(Debug)]
pub struct StepInputs {
    /// Token ids, i32 `[batch, 1]`.
    pub ids: CudaTensor,
    /// Their position, the same in every row, which is also the number of tokens before: i32 `[batch, 1]`.
    pub position: CudaTensor,
    /// Its negative: where the row's text began, counted from the token.
    pub start: CudaTensor,
}

/// A captured step.
pub struct StepGraph {
    exec: Arc<Exec>,
    inputs: StepInputs,
    /// What the step returns.
    output: CudaTensor,
    num_launches: usize,
    stream: StreamId,
    /// Keeps every buffer of the graph.
    _work: Vec<Work>,
}

/// An executable graph of the device's primary context.
struct Exec(CUgraphExec);

// SAFETY: the driver's graph calls may come from any thread; it is launched by the device thread alone.
unsafe impl Send for Exec {}
// SAFETY: as above.
unsafe impl Sync for Exec {}

impl Drop for Exec {
    fn drop(&mut self) {
        // SAFETY: made by the driver, destroyed once.
        let _ = unsafe { driver_graph::exec_destroy(self.0) };
    }
}

impl fmt::Debug for StepGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepGraph")
            .field("num_launches", &self.num_launches)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for TapedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}

impl StepTape {
    /// The same tensor with its launches noted. Unlike the graph, it hinders Burn from writing in place.
    pub fn noted(&self, tensor: &CudaTensor) -> CudaTensor {
        let memory = self.taped(burn_memory(tensor).clone());
        let layout = [tensor.shape(), tensor.strides()];
        CudaTensor::new(memory, tensor.offset_bytes(), layout, tensor.dtype()).under(tensor.policy())
    }

    /// Notes work that was queued on tensors of this tape.
    pub(crate) fn note(&self, work: Work) {
        lock(&self.notes).work.push(work);
    }

    fn taped(&self, memory: BurnMemory) -> Arc<dyn Memory> {
        let tape = self.clone();
        Arc::new(TapedMemory { memory, tape })
    }

    fn refuse(&self, what: &'static str) {
        lock(&self.notes).refused.get_or_insert(what);
    }

    /// Captures the recorded launches. `inputs` and `output` are the tensors that the step read and wrote.
    ///
    /// # Errors
    /// [`KernelError::Refused`] where the step did something that a graph cannot hold, or where launches do not go
    /// straight to Burn's stream; [`KernelError::Launch`] of the driver.
    pub fn graph(self, inputs: StepInputs, output: CudaTensor) -> Result<StepGraph, KernelError> {
        late_error()?;
        let Notes { work, refused } = std::mem::take(&mut *lock(&self.notes));
        let stream = StreamId::current();
        // The lane keeps such buffers behind an event, which cannot be asked once it was captured.
        let is_foreign = |work: &Work| work.bindings().iter().any(|binding| binding.stream != stream);
        let refused = match lane::is_inline() {
            Some(true) => refused.or_else(|| work.iter().any(is_foreign).then_some("buffers of another thread")),
            _ => Some("launches beside Burn's stream"),
        };
        if let Some(what) = refused {
            return Err(KernelError::unsupported(
                NAME,
                "work",
                what,
                "launches and GEMMs on Burn's stream",
            ));
        }
        let queue: DeviceHandle<Server> = DeviceHandle::new(burn_memory(&output).device.to_id());
        let of_step = work.clone();
        let captured = queue.submit_blocking(move |server| capture(server, stream, of_step));
        let failed = |reason: String| KernelError::Launch { kernel: NAME, reason };
        let exec = captured
            .map_err(|_| failed("the device thread is gone".to_owned()))?
            .map_err(failed)?;
        Ok(StepGraph {
            exec: Arc::new(exec),
            inputs,
            output,
            num_launches: work.len(),
            stream,
            _work: work,
        })
    }
}

/// The tape of a tensor's launches, if there is one.
pub(crate) fn tape_of(tensor: &CudaTensor) -> Option<&StepTape> {
    tensor.memory::<TapedMemory>().map(|memory| &memory.tape)
}

/// The buffer below a tape.
pub(crate) fn below_tape(tensor: &CudaTensor) -> Option<&BurnMemory> {
    tensor.memory::<TapedMemory>().map(|memory| &memory.memory)
}

impl Memory for TapedMemory {
    fn hardware(&self) -> Hardware {
        self.memory.hardware()
    }

    fn num_bytes(&self) -> usize {
        self.memory.num_bytes()
    }

    fn allocate(&self, shape: &[usize], dtype: DType) -> Arc<dyn Memory> {
        self.tape.taped(self.memory.new_buffer(shape, dtype))
    }

    fn filled(&self, shape: &[usize], dtype: DType, fill: Fill) -> Arc<dyn Memory> {
        self.tape.refuse("a fill by Burn");
        self.memory.filled(shape, dtype, fill)
    }

    fn gathered(&self, tensor: &CudaTensor) -> Arc<dyn Memory> {
        self.tape.refuse("a copy by Burn");
        self.memory.gathered(tensor)
    }

    unsafe fn launch(&self, launch: &LaunchRequest<'_>) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        let queued = unsafe { launch::queue(launch) }?;
        self.tape.note(Work::Launch(queued));
        Ok(())
    }
}

impl StepInputs {
    /// Inputs of a step that hold these tokens: ids i32 `[batch, 1]`, all at `position`.
    ///
    /// # Errors
    /// Those of the stream.
    pub fn new(tape: &StepTape, ids: &CudaTensor, position: usize) -> Result<Self, KernelError> {
        let new = || tape.noted(&ids.empty_contiguous(ids.shape(), DType::I32));
        let inputs = Self {
            ids: new(),
            position: new(),
            start: new(),
        };
        let (rows, stream) = (ids.num_elements(), lane::open(ids)?);
        submit(ids, stream, inputs.bindings(ids), move |lane, pointers| {
            set_inputs(lane, pointers, rows, position)
        });
        Ok(inputs)
    }

    fn bindings(&self, ids: &CudaTensor) -> Vec<Binding> {
        [ids, &self.ids, &self.position, &self.start].map(binding_of).to_vec()
    }
}

impl StepGraph {
    /// Whether the caller's thread captured it. What another thread queues next would not wait for its output.
    pub fn is_of_this_thread(&self) -> bool {
        self.stream == StreamId::current()
    }

    /// Queues the step, on the thread that captured it, for other tokens: ids i32 `[batch, 1]`, all at `position`.
    /// Returns a copy of its output.
    ///
    /// # Errors
    /// [`KernelError::Launch`] of work queued earlier; another number of rows.
    pub fn replay(&self, ids: &CudaTensor, position: usize) -> Result<CudaTensor, KernelError> {
        late_error()?;
        ids.require_shape(NAME, "ids", self.inputs.ids.shape())?;
        ids.require_contiguous(NAME, "ids")?;
        let made = ids.empty_contiguous(self.output.shape(), self.output.dtype());
        let (rows, bytes) = (ids.num_elements(), made.num_elements() * made.dtype().size());
        let mut bindings = self.inputs.bindings(ids);
        bindings.extend([&self.output, &made].map(binding_of));
        let exec = self.exec.clone();
        submit(ids, self.stream, bindings, move |lane, pointers| {
            set_inputs(lane, &pointers[..4], rows, position)?;
            // SAFETY: a graph of this context whose buffers are kept, and two buffers of `num_bytes` bytes.
            unsafe {
                let launched = driver_graph::launch(exec.0, lane);
                launched.map_err(|error| format!("cuGraphLaunch: {error:?}"))?;
                let copied = cuda::cuMemcpyDtoDAsync_v2(pointers[5], pointers[4], bytes, lane);
                check("cuMemcpyDtoDAsync", copied)
            }
        });
        launch::count(self.num_launches);
        Ok(made)
    }
}

/// Queues `work` with the addresses of its buffers on the device thread; its error is a later call's.
fn submit(
    like: &CudaTensor,
    stream: StreamId,
    bindings: Vec<Binding>,
    work: impl FnOnce(CUstream, &[u64]) -> Result<(), String> + Send + 'static,
) {
    let queue: DeviceHandle<Server> = DeviceHandle::new(burn_memory(like).device.to_id());
    queue.submit(move |server| {
        if let Err(reason) = on_lane_with(server, stream, bindings, work) {
            report_late(KernelError::Launch { kernel: NAME, reason });
        }
    });
}

/// Copies the ids and sets the positions of so many rows; addresses as [`StepInputs::bindings`] orders them.
fn set_inputs(stream: CUstream, pointers: &[u64], rows: usize, position: usize) -> Result<(), String> {
    let &[from, ids, at, start] = pointers else {
        return Err(format!("four buffers, not {}", pointers.len()));
    };
    let position = position as i32;
    // SAFETY: four buffers of `rows` words.
    unsafe {
        check(
            "cuMemcpyDtoDAsync",
            cuda::cuMemcpyDtoDAsync_v2(ids, from, 4 * rows, stream),
        )?;
        check(
            "cuMemsetD32Async",
            cuda::cuMemsetD32Async(at, position as u32, rows, stream),
        )?;
        check(
            "cuMemsetD32Async",
            cuda::cuMemsetD32Async(start, position.wrapping_neg() as u32, rows, stream),
        )
    }
}

/// Queues the work into a capture of its stream, which runs nothing; on the device thread.
fn capture(server: &mut Server, stream: StreamId, work: Vec<Work>) -> Result<Exec, String> {
    let lane = on_lane(stream, Ok)?;
    let mode = cuda::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: Burn's stream, on the thread that alone queues work on it; whatever happens, the capture ends below.
    check("cuStreamBeginCapture", unsafe {
        cuda::cuStreamBeginCapture_v2(lane, mode)
    })?;
    let queued = work.into_iter().try_for_each(|work| match work {
        // SAFETY: as when it was noted.
        Work::Launch(call) => unsafe { call.run(server, stream) }.map_err(|error| error.to_string()),
        Work::Product(call) => call.run(server).map_err(|refusal| refusal.to_string()),
    });
    let mut graph = std::ptr::null_mut();
    // SAFETY: ends the capture begun above; the graph is ours, and the executable does not need it.
    unsafe {
        let ended = check("cuStreamEndCapture", cuda::cuStreamEndCapture(lane, &mut graph));
        queued?;
        ended?;
        let exec = driver_graph::instantiate(graph, cuda::CUgraphInstantiate_flags(0));
        let _ = driver_graph::destroy(graph);
        exec.map(Exec).map_err(|error| format!("cuGraphInstantiate: {error:?}"))
    }
}

fn check(what: &str, result: CUresult) -> Result<(), String> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(format!("{what}: {error:?}")),
    }
}
