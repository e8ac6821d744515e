//! The CUDA stream of Burn's ops, for work that does not go through CubeCL: our kernels, cuBLASLt's and NCCL's.
//!
//! **Which stream.** CubeCL keeps its streams private. A stream of our own would need two events for each launch, so
//! that it waits for what Burn queued before and Burn waits for it. That is correct, costs about 10 µs of the GPU's
//! time each way, and is the fallback, reported once. Instead we read the addresses of CubeCL's streams off the
//! server's `Debug` text, once, and *prove* which is ours: one is put into capture, the server is given a small copy to
//! a scratch buffer, and if the captured graph holds it, that is where the server queues our work. A captured copy does
//! not run. With a later CubeCL whose text lacks the addresses the fallback is taken.
use crate::burn_memory::{binding_of, burn_memory};
use cubecl::cuda::CudaRuntime;
use cubecl::device::Device;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::{Binding, CopyDescriptor};
use cubecl::stream_id::StreamId;
use cubecl_common::bytes::Bytes;
use cubecl_runtime::server::ComputeServer;
use cudarc::driver::result as driver;
use cudarc::driver::sys::{self as cuda, CUcontext, CUevent, CUevent_flags, CUevent_wait_flags, CUresult, CUstream};
use sieve_gpu::{CudaTensor, DType, KernelError};
use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

const NAME: &str = "stream";

/// Bytes of the copy that proves a stream.
const PROBE_BYTES: usize = 128;

/// CubeCL's server, which lives on the device thread.
pub(crate) type Server = <CudaRuntime as cubecl::Runtime>::Server;

/// The stream behind one of CubeCL's stream ids.
struct Lane {
    stream: CUstream,
    order: Order,
    /// Buffers of other streams that a launch uses, until the event behind that launch has passed.
    foreign: VecDeque<(CUevent, Vec<Box<dyn Any>>)>,
}

/// What keeps our work in order with CubeCL's launches.
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
    static LANES: RefCell<HashMap<u64, Lane>> = RefCell::default();
}

/// Streams with a lane, by device and stream id, and whether work goes straight to them.
static OPEN: LazyLock<Mutex<HashMap<(usize, u64), bool>>> = LazyLock::new(Mutex::default);

/// The first error of work whose call had returned. Process-wide, because Burn's backend methods have no place for it.
static LATE_ERROR: Mutex<Option<KernelError>> = Mutex::new(None);

/// The address of a buffer, and what keeps its memory.
pub(crate) struct Address {
    pub(crate) pointer: u64,
    /// Set for a buffer that was allocated on another stream: the allocator may reuse it there before a launch here
    /// has run.
    foreign: Option<Box<dyn Any>>,
}

/// True when our launches go straight to Burn's streams, false when some use a stream of their own between two events;
/// `None` before the first launch.
pub(crate) fn is_inline() -> Option<bool> {
    let open = lock(&OPEN);
    (!open.is_empty()).then(|| open.values().all(|inline| *inline))
}

/// Keeps the first error of queued work for [`late_error`].
pub(crate) fn report_late(error: KernelError) {
    lock(&LATE_ERROR).get_or_insert(error);
}

/// The error of work that was queued earlier; returned once.
///
/// # Errors
/// That error; it names its kernel.
pub(crate) fn late_error() -> Result<(), KernelError> {
    lock(&LATE_ERROR).take().map_or(Ok(()), Err)
}

/// Opens the lane of the caller's stream, if it is not open yet, and returns that stream's id.
///
/// # Errors
/// The device thread is gone, or an operation queued before has failed.
pub(crate) fn open(like: &CudaTensor) -> Result<StreamId, KernelError> {
    let stream = StreamId::current();
    let key = (burn_memory(like).device.index, stream.value);
    if lock(&OPEN).contains_key(&key) {
        return Ok(stream);
    }
    let scratch = like.empty_contiguous(&[PROBE_BYTES / 4], DType::F32);
    let binding = binding_of(&scratch);
    let queue: DeviceHandle<Server> = DeviceHandle::new(burn_memory(like).device.to_id());
    let opened = queue.submit_blocking(move |server| open_lane(server, stream, &binding));
    let failed = |reason: String| KernelError::Launch { kernel: NAME, reason };
    let inline = opened
        .map_err(|_| failed("the device thread is gone".to_owned()))?
        .map_err(failed)?;
    lock(&OPEN).insert(key, inline);
    Ok(stream)
}

/// Queues `work` in order with Burn's launches on `stream`, whose lane is open; on the device thread.
pub(crate) fn on_lane<T>(stream: StreamId, work: impl FnOnce(CUstream) -> Result<T, String>) -> Result<T, String> {
    with_lane(stream, |lane| {
        lane.enter()?;
        let done = work(lane.stream)?;
        lane.leave()?;
        Ok(done)
    })
}

/// As [`on_lane`], with the addresses of the buffers that the work uses, which stay until it has run.
pub(crate) fn on_lane_with(
    server: &mut Server,
    stream: StreamId,
    bindings: Vec<Binding>,
    work: impl FnOnce(CUstream, &[u64]) -> Result<(), String>,
) -> Result<(), String> {
    let addresses: Vec<Address> = bindings
        .into_iter()
        .map(|binding| address_of(server, stream, binding))
        .collect::<Result<_, _>>()?;
    let pointers: Vec<u64> = addresses.iter().map(|address| address.pointer).collect();
    on_lane(stream, |lane| work(lane, &pointers))?;
    let foreign: Vec<_> = addresses.into_iter().filter_map(|address| address.foreign).collect();
    with_lane(stream, |lane| lane.keep(foreign))
}

/// The address of a buffer, once `stream` waits for what other streams have queued for it; on the device thread, whose
/// context this makes current.
pub(crate) fn address_of(server: &mut Server, stream: StreamId, binding: Binding) -> Result<Address, String> {
    let is_foreign = binding.stream != stream;
    let resource = server.get_resource(binding, stream);
    let resource = resource.map_err(|error| format!("get_resource: {error}"))?;
    Ok(Address {
        pointer: resource.resource().ptr,
        foreign: is_foreign.then(|| Box::new(resource) as Box<dyn Any>),
    })
}

fn with_lane<T>(stream: StreamId, action: impl FnOnce(&mut Lane) -> Result<T, String>) -> Result<T, String> {
    LANES.with_borrow_mut(|lanes| {
        let lane = lanes.get_mut(&stream.value);
        action(lane.ok_or_else(|| "no lane for this stream".to_owned())?)
    })
}

fn open_lane(server: &mut Server, stream: StreamId, scratch: &Binding) -> Result<bool, String> {
    // Pending errors and copies would otherwise turn up under capture.
    server
        .flush(stream)
        .map_err(|e| format!("an operation queued before: {e}"))?;
    let found = stream_addresses(&format!("{server:?}"))
        .into_iter()
        .map(|address| address as CUstream)
        .find(|&candidate| copy_lands_on(server, candidate, stream, scratch));
    let lane = match found {
        Some(stream) => Lane {
            stream,
            order: Order::Inline,
            foreign: VecDeque::new(),
        },
        None => Lane::with_events()?,
    };
    let inline = lane.order == Order::Inline;
    LANES.with_borrow_mut(|lanes| lanes.insert(stream.value, lane));
    Ok(inline)
}

/// Does the server queue the work of `stream` on `candidate`?
fn copy_lands_on(server: &mut Server, candidate: CUstream, stream: StreamId, scratch: &Binding) -> bool {
    let copy = CopyDescriptor {
        handle: scratch.clone(),
        shape: [PROBE_BYTES].into(),
        strides: [1].into(),
        elem_size: 1,
    };
    let mode = cuda::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the address is one that the server printed of a stream it owns.
    if unsafe { cuda::cuStreamBeginCapture_v2(candidate, mode) } != CUresult::CUDA_SUCCESS {
        return false;
    }
    server.write(vec![(copy, Bytes::from_bytes_vec(vec![0; PROBE_BYTES]))], stream);
    let (mut graph, mut nodes) = (std::ptr::null_mut(), 0);
    // SAFETY: ends the capture begun above; the graph is ours to count and destroy.
    unsafe {
        let ended = cuda::cuStreamEndCapture(candidate, &mut graph) == CUresult::CUDA_SUCCESS;
        if !ended || graph.is_null() {
            return false;
        }
        let counted = cuda::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes);
        let _ = cuda::cuGraphDestroy(graph);
        counted == CUresult::CUDA_SUCCESS && nodes == 1
    }
}

impl Lane {
    /// A stream of our own, ordered against the whole context.
    fn with_events() -> Result<Self, String> {
        let failed = |what: &str, e: cudarc::driver::DriverError| format!("{what}: {e:?}");
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        check("cuCtxGetCurrent", unsafe { cuda::cuCtxGetCurrent(&mut context) })?;
        let event =
            || driver::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(|e| failed("cuEventCreate", e));
        let (before, after) = (event()?, event()?);
        let stream =
            driver::stream::create(driver::stream::StreamKind::NonBlocking).map_err(|e| failed("cuStreamCreate", e))?;
        let order = Order::Events { context, before, after };
        Ok(Self {
            stream,
            order,
            foreign: VecDeque::new(),
        })
    }

    /// Everything queued so far comes before what follows.
    fn enter(&self) -> Result<(), String> {
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
    fn leave(&self) -> Result<(), String> {
        let Order::Events { context, after, .. } = self.order else {
            return Ok(());
        };
        // SAFETY: as in `enter`.
        unsafe {
            check("cuEventRecord", cuda::cuEventRecord(after, self.stream))?;
            check("cuCtxWaitEvent", cuda::cuCtxWaitEvent(context, after))
        }
    }

    /// Keeps buffers of other streams until what this lane has queued has run, and lets go of those whose work has.
    fn keep(&mut self, foreign: Vec<Box<dyn Any>>) -> Result<(), String> {
        while let Some((event, _)) = self.foreign.front() {
            // SAFETY: recorded below.
            let passed = unsafe { cuda::cuEventQuery(*event) };
            if passed == CUresult::CUDA_ERROR_NOT_READY {
                break;
            }
            // SAFETY: destroyed once, as it leaves the queue here; an event with an error must not stay in front.
            let _ = unsafe { driver::event::destroy(*event) };
            self.foreign.pop_front();
            check("cuEventQuery", passed)?;
        }
        if foreign.is_empty() {
            return Ok(());
        }
        crate::launch::FOREIGN.fetch_add(foreign.len(), std::sync::atomic::Ordering::Relaxed);
        let event = driver::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|e| format!("cuEventCreate: {e:?}"))?;
        self.foreign.push_back((event, foreign));
        // SAFETY: event and stream are alive, in the current context.
        check("cuEventRecord", unsafe { cuda::cuEventRecord(event, self.stream) })
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

fn check(what: &str, result: CUresult) -> Result<(), String> {
    if result == CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(format!("{what}: {result:?}"))
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn an_error_of_queued_work_is_the_next_calls_error_once() {
        let error = |kernel| KernelError::Launch {
            kernel,
            reason: "refused".to_owned(),
        };
        report_late(error("first"));
        report_late(error("second"));
        assert_eq!(late_error(), Err(error("first")));
        assert_eq!(late_error(), Ok(()));
    }
}
