//! cuBLASLt on CubeCL's device thread: the library's handle, a workspace for each stream, and the stream itself.
//!
//! **Which stream.** CubeCL keeps its streams private. A stream of our own would need two events for each product, so
//! that it waits for what Burn queued before and Burn waits for it. That is correct, costs about 10 µs of the GPU's
//! time each way, and is the fallback. Instead we read the addresses of CubeCL's streams off the server's `Debug` text,
//! once, and *prove* which is ours: one is put into capture, a tiny kernel is launched through the server, and if the
//! captured graph holds it, that is where the server queues our work. A captured launch does not run, and one that went
//! elsewhere clears a scratch buffer. A later CubeCL whose text says nothing simply takes the fallback.
use super::plan::{Operands, Plan, WORKSPACE_BYTES};
use super::problem::{Cut, Problem};
use super::{NAME, lock};
use crate::error::KernelError;
use crate::runtime::cuda_tensor::CudaTensor;
use crate::runtime::source_kernel::PreparedKernel;
use crate::step::fill_zero::{FILL_ZERO, empty_zero};
use cubecl::cuda::CudaRuntime;
use cubecl::device::Device;
use cubecl::device_handle::DeviceHandle;
use cubecl::prelude::CubeCount;
use cubecl::server::{Binding, Handle};
use cubecl::stream_id::StreamId;
use cubecl_runtime::server::{ComputeServer, ExecutionMode, KernelArguments, MetadataBindingInfo};
use cudarc::cublaslt::{result as lt, sys::cublasLtHandle_t};
use cudarc::driver::result as driver;
use cudarc::driver::sys::{self as cuda, CUcontext, CUevent, CUevent_flags, CUevent_wait_flags, CUresult, CUstream};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{LazyLock, Mutex};

/// CubeCL's server, which lives on the device thread.
pub(super) type Server = <CudaRuntime as cubecl::Runtime>::Server;

/// Why a product did not run.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Refusal {
    /// cuBLASLt has no algorithm for it: another path may take it.
    NoAlgorithm(String),
    /// The library, the driver or the server failed.
    Failed(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::NoAlgorithm(reason) | Self::Failed(reason)) = self;
        f.write_str(reason)
    }
}

/// One product on its way to the device thread. Its bindings keep the buffers alive until it is queued; unlike handles
/// they do not hinder the next op from writing in place.
pub(super) struct Call {
    pub(super) problem: Problem,
    /// The cuts to take where they are offered, the best first.
    pub(super) cuts: &'static [Cut],
    /// x, w, C and D; then, where x and w are eight-bit floats, their scales.
    pub(super) bindings: Vec<Binding>,
    pub(super) beta: f32,
    pub(super) stream: StreamId,
}

/// What the device thread keeps for the life of the process.
pub(super) struct Library {
    handle: cublasLtHandle_t,
    lanes: HashMap<u64, Lane>,
    plans: HashMap<(Problem, [u32; 4]), Plan>,
}

/// Where the products of one of CubeCL's streams go.
struct Lane {
    stream: CUstream,
    order: Order,
    workspace: u64,
}

/// What keeps a product in order with CubeCL's launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// It is on their stream.
    Inline,
    /// Events of the whole context, before and after.
    Events {
        context: CUcontext,
        before: CUevent,
        after: CUevent,
    },
}

thread_local! {
    // On the device thread only; CubeCL runs one for each device.
    static LIBRARY: RefCell<Option<Library>> = const { RefCell::new(None) };
}

/// Streams with a lane, and whether products go straight to them.
static LANES: LazyLock<Mutex<HashMap<(usize, u64), bool>>> = LazyLock::new(Mutex::default);

/// See [`Cublaslt::is_inline`].
pub(super) fn inline_products() -> Option<bool> {
    let lanes = lock(&LANES);
    (!lanes.is_empty()).then(|| lanes.values().all(|inline| *inline))
}

/// Queues `work` in order with Burn's launches on `stream`, whose lane is open; on the device thread.
pub(crate) fn on_lane(stream: StreamId, work: impl FnOnce(CUstream) -> Result<(), String>) -> Result<(), String> {
    let queued = Library::with(|library| {
        let lane = library.lanes.get(&stream.value);
        let lane = lane.ok_or_else(|| Refusal::Failed("no lane for this stream".to_owned()))?;
        lane.enter()?;
        work(lane.stream).map_err(Refusal::Failed)?;
        lane.leave()
    });
    queued.map_err(|refusal| refusal.to_string())
}

/// Opens the library and the lane of the caller's stream, if they are not open yet.
pub(crate) fn open(like: &CudaTensor) -> Result<(), KernelError> {
    let stream = StreamId::current();
    let key = (like.device().index, stream.value);
    if lock(&LANES).contains_key(&key) {
        return Ok(());
    }
    // Compiled and launched here once, so that the launch under capture has nothing left to load.
    let scratch = empty_zero(like, &[32])?;
    let probe = Probe {
        task: FILL_ZERO.prepare()?,
        scratch: scratch.primitive().handle.clone(),
        stream,
    };
    let queue: DeviceHandle<Server> = DeviceHandle::new(like.device().to_id());
    let opened = queue.submit_blocking(move |server| Library::open_lane(server, probe));
    let failed = |reason: String| KernelError::Launch { kernel: NAME, reason };
    let inline = opened
        .map_err(|_| failed("the device thread is gone".to_owned()))?
        .map_err(|refusal| failed(refusal.to_string()))?;
    lock(&LANES).insert(key, inline);
    Ok(())
}

impl Library {
    /// Queues one product; on the device thread.
    pub(super) fn run(server: &mut Server, call: Call) -> Result<(), Refusal> {
        let mut resources = Vec::with_capacity(call.bindings.len());
        for binding in &call.bindings {
            let resource = server
                .get_resource(binding.clone(), call.stream)
                .map_err(|e| Refusal::Failed(format!("get_resource: {e}")))?;
            resources.push(resource);
        }
        let pointers = std::array::from_fn(|i| resources[i].resource().ptr);
        let scale = |i: usize| resources.get(i).map_or(0, |scale| scale.resource().ptr);
        let scales = [4, 5].map(scale);
        Self::with(|library| library.queue(&call, pointers, scales))
    }

    fn open_lane(server: &mut Server, probe: Probe) -> Result<bool, Refusal> {
        // Pending errors and copies would otherwise turn up under capture.
        server
            .flush(probe.stream)
            .map_err(|e| Refusal::Failed(format!("an operation queued before: {e}")))?;
        let stream = stream_addresses(&format!("{server:?}"))
            .into_iter()
            .map(|address| address as CUstream)
            .find(|&stream| probe.lands_on(server, stream));
        Self::with(|library| {
            let lane = match stream {
                Some(stream) => Lane::new(stream, Order::Inline)?,
                None => Lane::with_events()?,
            };
            let inline = lane.order == Order::Inline;
            library.lanes.insert(probe.stream.value, lane);
            Ok(inline)
        })
    }

    fn with<T>(action: impl FnOnce(&mut Library) -> Result<T, Refusal>) -> Result<T, Refusal> {
        LIBRARY.with_borrow_mut(|slot| {
            let library = match slot {
                Some(library) => library,
                None => slot.insert(Self {
                    handle: lt::create_handle().map_err(|e| Refusal::Failed(format!("cublasLtCreate: {e}")))?,
                    lanes: HashMap::new(),
                    plans: HashMap::new(),
                }),
            };
            action(library)
        })
    }

    fn queue(&mut self, call: &Call, pointers: [u64; 4], scales: [u64; 2]) -> Result<(), Refusal> {
        let lane = self
            .lanes
            .get(&call.stream.value)
            .ok_or_else(|| Refusal::Failed("no lane for this stream".to_owned()))?;
        let operands = Operands {
            pointers,
            scales,
            beta: call.beta,
            workspace: lane.workspace,
            stream: lane.stream,
        };
        lane.enter()?;
        let key = (call.problem, pointers.map(alignment));
        if !self.plans.contains_key(&key) {
            let plan = Plan::find(self.handle, &call.problem, key.1, call.cuts)?;
            self.plans.insert(key, plan);
        }
        let plan = self.plans.get(&key).expect("inserted above");
        // SAFETY: the wrapper checked the sizes against the tensors, whose addresses these are; get_resource made their
        // context current.
        unsafe { plan.launch(self.handle, &operands) }?;
        lane.leave()
    }
}

impl Lane {
    fn new(stream: CUstream, order: Order) -> Result<Self, Refusal> {
        // SAFETY: an allocation on the current context, kept for the life of the process.
        let workspace = unsafe { driver::malloc_sync(WORKSPACE_BYTES) }
            .map_err(|e| Refusal::Failed(format!("a workspace of 64 MiB: {e:?}")))?;
        Ok(Self {
            stream,
            order,
            workspace,
        })
    }

    /// A stream of our own, ordered against the whole context.
    fn with_events() -> Result<Self, Refusal> {
        let failed = |what: &str, e: cudarc::driver::DriverError| Refusal::Failed(format!("{what}: {e:?}"));
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        check("cuCtxGetCurrent", unsafe { cuda::cuCtxGetCurrent(&mut context) })?;
        let event =
            || driver::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(|e| failed("cuEventCreate", e));
        let (before, after) = (event()?, event()?);
        let stream =
            driver::stream::create(driver::stream::StreamKind::NonBlocking).map_err(|e| failed("cuStreamCreate", e))?;
        Self::new(stream, Order::Events { context, before, after })
    }

    /// Everything queued so far comes before what follows.
    fn enter(&self) -> Result<(), Refusal> {
        let Order::Events { context, before, .. } = self.order else {
            return Ok(());
        };
        // SAFETY: context, event and stream live as long as the process.
        unsafe {
            check("cuCtxRecordEvent", cuda::cuCtxRecordEvent(context, before))?;
            let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
            check("cuStreamWaitEvent", cuda::cuStreamWaitEvent(self.stream, before, flags))
        }
    }

    /// What follows comes after everything on this lane.
    fn leave(&self) -> Result<(), Refusal> {
        let Order::Events { context, after, .. } = self.order else {
            return Ok(());
        };
        // SAFETY: as in `enter`.
        unsafe {
            check("cuEventRecord", cuda::cuEventRecord(after, self.stream))?;
            check("cuCtxWaitEvent", cuda::cuCtxWaitEvent(context, after))
        }
    }
}

/// A tiny launch through the server, to see where it lands.
struct Probe {
    task: PreparedKernel,
    scratch: Handle,
    stream: StreamId,
}

impl Probe {
    /// Does the server queue this thread's launches on `stream`?
    fn lands_on(&self, server: &mut Server, stream: CUstream) -> bool {
        let task = self.task.clone();
        let arguments = KernelArguments {
            buffers: vec![self.scratch.clone().binding()],
            info: MetadataBindingInfo {
                data: vec![32],
                dynamic_metadata_offset: 1,
            },
            tensor_maps: vec![],
        };
        let mode = cuda::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the address is one that the server printed of a stream it owns.
        if unsafe { cuda::cuStreamBeginCapture_v2(stream, mode) } != CUresult::CUDA_SUCCESS {
            return false;
        }
        let (count, checks) = (CubeCount::Static(1, 1, 1), ExecutionMode::Unchecked);
        // SAFETY: fill_zero of 32 elements on a buffer of 32.
        unsafe { server.launch(Box::new(task), count, arguments, checks, self.stream) };
        let (mut graph, mut nodes) = (std::ptr::null_mut(), 0);
        // SAFETY: ends the capture begun above; the graph is ours to count and destroy.
        unsafe {
            let ended = cuda::cuStreamEndCapture(stream, &mut graph) == CUresult::CUDA_SUCCESS;
            if !ended || graph.is_null() {
                return false;
            }
            let counted = cuda::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes);
            let _ = cuda::cuGraphDestroy(graph);
            counted == CUresult::CUDA_SUCCESS && nodes == 1
        }
    }
}

/// The distinct addresses after `sys: 0x` in a text, in order.
fn stream_addresses(text: &str) -> Vec<u64> {
    let mut seen = HashSet::new();
    text.split("sys: 0x")
        .skip(1)
        .filter_map(|rest| {
            let end = rest.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(rest.len());
            u64::from_str_radix(&rest[..end], 16).ok()
        })
        .filter(|&address| address != 0 && seen.insert(address))
        .collect()
}

/// What a pointer is a multiple of: a power of two, at most 256 (the most that algorithms ask for).
fn alignment(pointer: u64) -> u32 {
    1 << pointer.trailing_zeros().min(8)
}

fn check(what: &str, result: CUresult) -> Result<(), Refusal> {
    if result == CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(Refusal::Failed(format!("{what}: {result:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_addresses_are_read_off_the_debug_text() {
        let text = "streams: [None, Some(StreamWrapper { stream: Stream { sys: 0x7f3a00c0ffee, memory: .. } }), \
                    Some(StreamWrapper { stream: Stream { sys: 0x55d0, .. } }), Stream { sys: 0x55d0 }, sys: 0x0, \
                    sys: 0x]";
        assert_eq!(stream_addresses(text), [0x7f3a_00c0_ffee, 0x55d0]);
        assert_eq!(stream_addresses("nothing of the kind"), Vec::<u64>::new());
    }

    #[test]
    fn the_stream_of_cubecl_still_prints_its_address() {
        // The text that `stream_addresses` reads is CubeCL's: its version is pinned, and this is the form it has there.
        #[derive(Debug)]
        struct Stream {
            #[allow(dead_code)]
            sys: CUstream,
        }
        let stream = Stream {
            sys: 0x1234_5678_u64 as CUstream,
        };
        assert_eq!(stream_addresses(&format!("{stream:?}")), [0x1234_5678]);
    }

    #[test]
    fn alignment_is_the_largest_power_of_two_up_to_256() {
        assert_eq!(alignment(0x7f00_0000_0200), 256);
        assert_eq!(alignment(0x7f00_0000_0210), 16);
        assert_eq!(alignment(0x7f00_0000_0202), 2);
        assert_eq!(alignment(0), 256);
    }
}
