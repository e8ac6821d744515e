//! Launches on Burn's stream, in the order of Burn's ops.
//!
//! A launch is a closure for CubeCL's device thread: it runs there between the ops before and after it, resolves the
//! addresses of all its buffers and calls the driver on Burn's own stream, so no synchronisation is needed and a buffer
//! that is freed afterwards may be reused at once.
//!
//! Two events around each launch are the fallback where Burn's stream is not found (`lane.rs`); `train` and `sieve
//! info` report it. A buffer of another thread's stream is kept until an event behind the launch has passed. The
//! first launch of a kernel is waited for, so that its error is raised by that call; a later error is raised by the
//! next call and names its kernel.
use crate::burn_memory::{binding_of, device_of, kernel_tensor};
use crate::device_thread::{DEVICE_THREAD_GONE, Server, late_error, report_late};
use crate::lane::{self, device_queue, on_lane_with};
use crate::step_tape::StepWork;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;
use sieve_gpu::{Cubins, DeviceLaunch, KernelError, LaunchRequest, LoadedKernel, MapLayout};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of kernel launches of this process.
static LAUNCHES: AtomicUsize = AtomicUsize::new(0);

/// Numbers of kernel launches of this process so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchCounts {
    /// Launches of Sieve's own kernels.
    pub launches: usize,
    /// Number of their buffers that were allocated on another stream; each was kept until its launch had run.
    pub foreign_buffers: usize,
    /// False if Burn's stream was not found: launches then go to another stream between two events, which is correct
    /// and about 20 µs slower each. `None` before the first launch.
    pub is_inline: Option<bool>,
}

impl LaunchCounts {
    /// Whether launches of the caller's thread go to Burn's own stream on this GPU. Launches nothing.
    ///
    /// # Errors
    /// The GPU cannot be used.
    pub fn probe(device: usize) -> Result<bool, KernelError> {
        let device = burn_cuda::CudaDevice::new(device);
        let scratch = burn::tensor::Tensor::<sieve_cuda::Cuda, 1>::empty([32], &device);
        lane::open(&kernel_tensor(scratch.into_primitive().tensor()))?;
        Ok(lane::is_inline() == Some(true))
    }

    /// The counts of this process at this moment.
    pub fn so_far() -> Self {
        Self {
            launches: LAUNCHES.load(Ordering::Relaxed),
            foreign_buffers: lane::num_foreign_buffers(),
            is_inline: lane::is_inline(),
        }
    }
}

/// One launch, sent to the device thread. Its bindings keep the buffers alive until it is queued; unlike handles they
/// do not keep the next op from writing in place.
#[derive(Clone)]
pub(crate) struct QueuedLaunch {
    name: &'static str,
    kernel: Arc<LoadedKernel>,
    grid: [u32; 3],
    threads: u32,
    shared_bytes: usize,
    maps: Vec<MapLayout>,
    /// The tensor maps' buffers, then the pointer arguments' buffers.
    bindings: Vec<Binding>,
    /// The kernel's params struct, as 64-bit words.
    words: Vec<u64>,
    /// Whether it may start before the previous launch has ended (programmatic dependent launch).
    starts_early: bool,
}

/// Adds `launches` to this process's count.
pub(crate) fn count(launches: usize) {
    LAUNCHES.fetch_add(launches, Ordering::Relaxed);
}

/// Queues a launch on the caller's stream, and returns it so that a captured step can repeat it. The first launch of a
/// kernel waits until the driver has accepted it, so that this call returns its error.
///
/// # Errors
/// The errors of loading the kernel; [`KernelError::Launch`] of an earlier launch, or of the first of this kernel.
///
/// # Safety
/// With these params, grid and block the kernel must access only the request's tensors, and must terminate.
pub(crate) unsafe fn queue(request: &LaunchRequest<'_>) -> Result<QueuedLaunch, KernelError> {
    late_error()?;
    let &LaunchRequest { kernel, grid, maps, tensors, words } = request;
    let (first, key) = (tensors[0], kernel.code_key()?);
    let device_index = device_of(first).index;
    let known = LoadedKernel::find(device_index, key);
    let is_known = known.is_some();
    let loaded = match known {
        Some(loaded) => loaded,
        None => LoadedKernel::load(kernel, device_index, &first.hardware().arch(), Cubins::in_use())?,
    };
    let stream = lane::open(first)?;
    let of_maps = maps.iter().map(|map| {
        let bytes = map.offset * map.tensor.dtype().size();
        let mut binding = binding_of(map.tensor);
        binding.offset_start = Some(binding.offset_start.unwrap_or(0) + bytes as u64);
        binding
    });
    let of_tensors = tensors.iter().map(|tensor| binding_of(tensor));
    let call = QueuedLaunch {
        name: kernel.name(),
        kernel: loaded,
        grid: grid.map(|n| n as u32),
        threads: kernel.block_threads() as u32,
        shared_bytes: kernel.dynamic_shared_bytes(),
        maps: maps.iter().map(|map| map.layout).collect(),
        bindings: of_maps.chain(of_tensors).collect(),
        words: words.to_vec(),
        starts_early: false,
    };
    count(1);
    // A repetition in a captured step may start early, this launch may not: what a kernel reads before its predecessor
    // has ended are weights, and only in a captured step is it certain that no kernel before it writes them.
    let queued = QueuedLaunch {
        starts_early: kernel.may_start_early() && first.hardware().compute_capability >= (9, 0),
        ..call.clone()
    };
    let queue = device_queue(first);
    if is_known {
        queue.submit(move |server| {
            // SAFETY: the caller keeps the contract of this function.
            if let Err(error) = unsafe { call.run(server, stream) } {
                report_late(error);
            }
        });
        return Ok(queued);
    }
    // SAFETY: the caller keeps the contract of this function.
    let outcome = queue.submit_blocking(move |server| unsafe { call.run(server, stream) });
    let outcome = outcome
        .unwrap_or_else(|_| Err(KernelError::Launch { kernel: kernel.name(), reason: DEVICE_THREAD_GONE.to_owned() }));
    outcome.map(|()| queued)
}

impl QueuedLaunch {
    /// Resolves the buffers' addresses and passes the launch to the driver. Runs on the device thread.
    ///
    /// # Safety
    /// The conditions of [`queue`].
    unsafe fn run(self, server: &mut Server, stream: StreamId) -> Result<(), KernelError> {
        let queued = on_lane_with(server, stream, self.bindings, |lane, pointers| {
            let launch = DeviceLaunch {
                grid: self.grid,
                threads: self.threads,
                shared_bytes: self.shared_bytes,
                maps: &self.maps,
                pointers,
                words: &self.words,
                starts_early: self.starts_early,
            };
            // SAFETY: the caller's promise; the buffers stay until the launch is queued, buffers of other streams until
            // it has run.
            unsafe { self.kernel.launch(lane, &launch) }
        });
        let kernel = self.name;
        queued.map_err(|reason| KernelError::Launch { kernel, reason })
    }
}

impl StepWork for QueuedLaunch {
    fn bindings(&self) -> &[Binding] {
        &self.bindings
    }

    fn queue_again(&self, server: &mut Server, stream: StreamId) -> Result<(), String> {
        // SAFETY: the launch was sound when it was recorded, and its bindings keep its buffers.
        unsafe { self.clone().run(server, stream) }.map_err(|error| error.to_string())
    }
}
