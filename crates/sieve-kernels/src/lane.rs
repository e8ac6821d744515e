//! The CUDA stream of Burn's ops, for work that does not go through CubeCL: our kernels, cuBLASLt's and NCCL's.
//!
//! **Which stream.** CubeCL keeps its streams private. A stream of our own would need two events for each launch: it
//! would wait for what Burn queued before, and Burn would wait for it. This is the fallback, correct but slower by
//! about 10 µs of GPU time each way, and reported once. Instead we read the addresses of CubeCL's streams from the
//! `Debug` text of its server, once, and *prove* which of them is the caller's: a candidate is put into capture, and
//! the server queues a small copy to a scratch buffer. If the captured graph contains the copy, the candidate is the
//! stream to which the server queues the caller's work. A captured copy does not run. If a later CubeCL's text has no
//! addresses, the fallback is taken.
use crate::burn_memory::{binding_of, device_of};
use crate::device_thread::{DEVICE_THREAD_GONE, Server};
use crate::locked::lock;
use cubecl::device::Device;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::{Binding, CopyDescriptor};
use cubecl::stream_id::StreamId;
use cubecl_common::bytes::Bytes;
use cubecl_runtime::server::ComputeServer;
use cudarc::driver::DriverError;
use cudarc::driver::result as driver;
use cudarc::driver::sys::{self as cuda, CUcontext, CUevent, CUevent_flags, CUevent_wait_flags, CUresult, CUstream};
use sieve_gpu::{CudaTensor, DType, KernelError};
use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

const NAME: &str = "stream";

/// Bytes of the copy by which a stream is recognised.
const PROBE_BYTES: usize = 128;

/// The CUDA stream behind one of CubeCL's stream ids.
struct Lane {
    stream: CUstream,
    order: Order,
    /// Buffers that were allocated on other streams, kept until the event recorded after their launch has passed.
    foreign: VecDeque<(CUevent, Vec<Box<dyn Any>>)>,
}

/// What keeps our work in order with CubeCL's launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Our work is queued on CubeCL's own stream.
    Inline,
    /// Our work is queued on another stream: it waits for `before`, recorded over the whole context, and the context
    /// waits for `after`.
    Events { context: CUcontext, before: CUevent, after: CUevent },
}

thread_local! {
    // The lanes by stream id. Used by device threads only; CubeCL runs one for each device.
    static LANES: RefCell<HashMap<u64, Lane>> = RefCell::default();
}

/// For each device index and stream id with an open lane: whether its order is [`Order::Inline`].
static OPEN: LazyLock<Mutex<HashMap<(usize, u64), bool>>> = LazyLock::new(Mutex::default);

/// Number of buffers of launches, GEMMs and collectives that were allocated on another stream than the work ran on.
static FOREIGN: AtomicUsize = AtomicUsize::new(0);

/// Where a buffer lies on the GPU.
pub(crate) struct Address {
    pub(crate) pointer: u64,
    /// Keeps the memory of a buffer that was allocated on another stream: without it the allocator may reuse the memory
    /// on that stream before a launch on this one has run.
    foreign: Option<Box<dyn Any>>,
}

/// True if all our launches go to Burn's own streams, false if some go to another stream between two events; `None`
/// before the first launch.
pub(crate) fn is_inline() -> Option<bool> {
    let open = lock(&OPEN);
    (!open.is_empty()).then(|| open.values().all(|inline| *inline))
}

/// How many buffers were allocated on another stream so far; see [`FOREIGN`].
pub(crate) fn num_foreign_buffers() -> usize {
    FOREIGN.load(Ordering::Relaxed)
}

/// The queue of the device thread of a tensor's GPU.
pub(crate) fn device_queue(tensor: &CudaTensor) -> DeviceHandle<Server> {
    DeviceHandle::new(device_of(tensor).to_id())
}

/// Runs `work` on the device thread of a tensor's GPU and waits for it; its error becomes a [`KernelError::Launch`] of
/// `kernel`.
pub(crate) fn run_blocking<T: Send + 'static>(
    tensor: &CudaTensor,
    kernel: &'static str,
    work: impl FnOnce(&mut Server) -> Result<T, String> + Send + 'static,
) -> Result<T, KernelError> {
    let outcome = device_queue(tensor).submit_blocking(work);
    outcome
        .unwrap_or_else(|_| Err(DEVICE_THREAD_GONE.to_owned()))
        .map_err(|reason| KernelError::Launch { kernel, reason })
}

/// Opens the lane of the caller's stream, if it is not open yet, and returns the stream's id.
///
/// # Errors
/// The device thread is gone, or an operation queued before has failed.
pub(crate) fn open(like: &CudaTensor) -> Result<StreamId, KernelError> {
    let stream = StreamId::current();
    let key = (device_of(like).index, stream.value);
    if lock(&OPEN).contains_key(&key) {
        return Ok(stream);
    }
    let scratch = like.empty_contiguous(&[PROBE_BYTES / 4], DType::F32);
    let binding = binding_of(&scratch);
    let is_inline = run_blocking(like, NAME, move |server| open_lane(server, stream, &binding))?;
    lock(&OPEN).insert(key, is_inline);
    Ok(stream)
}

/// Queues `work` in order with Burn's launches on `stream`. Runs on the device thread, after [`open`] of the stream.
pub(crate) fn on_lane<T>(stream: StreamId, work: impl FnOnce(CUstream) -> Result<T, String>) -> Result<T, String> {
    with_lane(stream, |lane| {
        lane.enter()?;
        let result = work(lane.stream)?;
        lane.leave()?;
        Ok(result)
    })
}

/// Queues `work` on the buffers of `bindings`, in order with Burn's launches on `stream`: it is given their addresses,
/// and their memory is kept until it has run on the GPU. Runs on the device thread, after [`open`] of the stream.
pub(crate) fn on_lane_with(
    server: &mut Server,
    stream: StreamId,
    bindings: Vec<Binding>,
    work: impl FnOnce(CUstream, &[u64]) -> Result<(), String>,
) -> Result<(), String> {
    let addresses: Vec<Address> =
        bindings.into_iter().map(|binding| address_of(server, stream, binding)).collect::<Result<_, _>>()?;
    let pointers: Vec<u64> = addresses.iter().map(|address| address.pointer).collect();
    on_lane(stream, |lane| work(lane, &pointers))?;
    let foreign: Vec<_> = addresses.into_iter().filter_map(|address| address.foreign).collect();
    with_lane(stream, |lane| lane.keep(foreign))
}

/// The address of a buffer. Makes `stream` wait for what other streams have queued on the buffer, and the device's
/// context current. Runs on the device thread.
pub(crate) fn address_of(server: &mut Server, stream: StreamId, binding: Binding) -> Result<Address, String> {
    let is_foreign = binding.stream != stream;
    let resource = server.get_resource(binding, stream);
    let resource = resource.map_err(|error| format!("get_resource: {error}"))?;
    Ok(Address { pointer: resource.resource().ptr, foreign: is_foreign.then(|| Box::new(resource) as Box<dyn Any>) })
}

/// Runs `action` on the open lane of a stream. Runs on the device thread.
fn with_lane<T>(stream: StreamId, action: impl FnOnce(&mut Lane) -> Result<T, String>) -> Result<T, String> {
    LANES.with_borrow_mut(|lanes| {
        let lane = lanes.get_mut(&stream.value);
        action(lane.ok_or_else(|| "no lane for this stream".to_owned())?)
    })
}

/// Finds the CUDA stream of `stream`, or makes another that events keep in order, and keeps it as a lane. Returns
/// whether its order is [`Order::Inline`].
fn open_lane(server: &mut Server, stream: StreamId, scratch: &Binding) -> Result<bool, String> {
    // Without the flush, errors and copies that are pending would appear during the capture below.
    server.flush(stream).map_err(|e| format!("an operation queued before: {e}"))?;
    let found = stream_addresses(&format!("{server:?}"))
        .into_iter()
        .map(|address| address as CUstream)
        .find(|&candidate| copy_lands_on(server, candidate, stream, scratch));
    let lane = match found {
        Some(stream) => Lane { stream, order: Order::Inline, foreign: VecDeque::new() },
        None => Lane::with_events()?,
    };
    let is_inline = lane.order == Order::Inline;
    LANES.with_borrow_mut(|lanes| lanes.insert(stream.value, lane));
    Ok(is_inline)
}

/// Whether the server queues the work of `stream` on the CUDA stream `candidate`: captures a copy to `scratch`.
fn copy_lands_on(server: &mut Server, candidate: CUstream, stream: StreamId, scratch: &Binding) -> bool {
    let copy =
        CopyDescriptor { handle: scratch.clone(), shape: [PROBE_BYTES].into(), strides: [1].into(), elem_size: 1 };
    let mode = cuda::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the server printed this address as the address of a stream it owns.
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
    /// A new stream, ordered by events with everything else in the context.
    fn with_events() -> Result<Self, String> {
        let failed = |what: &str, e: DriverError| format!("{what}: {e:?}");
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        check("cuCtxGetCurrent", unsafe { cuda::cuCtxGetCurrent(&mut context) })?;
        let event =
            || driver::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(|e| failed("cuEventCreate", e));
        let (before, after) = (event()?, event()?);
        let stream =
            driver::stream::create(driver::stream::StreamKind::NonBlocking).map_err(|e| failed("cuStreamCreate", e))?;
        let order = Order::Events { context, before, after };
        Ok(Self { stream, order, foreign: VecDeque::new() })
    }

    /// Makes the lane's next work wait for everything that is queued in the context.
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

    /// Makes everything that is queued in the context from now on wait for the lane's work.
    fn leave(&self) -> Result<(), String> {
        let Order::Events { context, after, .. } = self.order else {
            return Ok(());
        };
        // SAFETY: context, event and stream live as long as the process.
        unsafe {
            check("cuEventRecord", cuda::cuEventRecord(after, self.stream))?;
            check("cuCtxWaitEvent", cuda::cuCtxWaitEvent(context, after))
        }
    }

    /// Keeps buffers of other streams until the work queued on this lane has run, and frees earlier ones whose work has
    /// run.
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
        FOREIGN.fetch_add(foreign.len(), Ordering::Relaxed);
        self.foreign.push_back((record_event(self.stream)?, foreign));
        Ok(())
    }
}

/// A new event, recorded after everything that a stream of the current context has queued.
pub(crate) fn record_event(stream: CUstream) -> Result<CUevent, String> {
    let failed = |error: DriverError| format!("recording an event: {error:?}");
    let event = driver::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(failed)?;
    // SAFETY: event and stream are alive, in the current context.
    unsafe { driver::event::record(event, stream) }.map_err(failed)?;
    Ok(event)
}

/// The distinct addresses after `sys: 0x` in a text, by first occurrence.
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

/// The result of the driver's function `call`, whose name begins the error.
pub(crate) fn check(call: &str, result: CUresult) -> Result<(), String> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(format!("{call}: {error:?}")),
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
        let stream = Stream { sys: 0x1234_5678_u64 as CUstream };
        assert_eq!(stream_addresses(&format!("{stream:?}")), [0x1234_5678]);
    }
}
