//! Sums over the GPUs of several processes, by NCCL on Burn's own stream.
//!
//! One call takes all tensors of a step: NCCL groups them, and the host goes on at once. The sums are in order with Burn's
//! launches because they are on the same stream; where that stream cannot be found, on a stream between two events, as
//! cuBLASLt's products. A rank that dies is no error to NCCL: its sums never end, and who watches the processes must end
//! this one.
use crate::cublaslt::{on_lane, open_lane, require_cublaslt};
use crate::error::KernelError;
use crate::runtime::cuda_tensor::CudaTensor;
use burn::tensor::DType;
use cubecl::cuda::CudaRuntime;
use cubecl::device::Device;
use cubecl::device_handle::DeviceHandle;
use cubecl::stream_id::StreamId;
use cubecl_runtime::server::ComputeServer;
use cudarc::driver::result as driver;
use cudarc::nccl::{result as nccl, sys};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

const NAME: &str = "nccl";

/// Bytes of what rank 0 gives to the others, so that they find each other.
pub const NCCL_ID_BYTES: usize = 128;

type Server = <CudaRuntime as cubecl::Runtime>::Server;

/// This process's part in a group of GPUs. It lasts as long as the process.
#[derive(Debug)]
pub struct NcclGroup {
    communicator: Communicator,
    /// An error that came after its call had returned.
    late_error: Arc<Mutex<Option<String>>>,
}

#[derive(Clone, Copy, Debug)]
struct Communicator(sys::ncclComm_t);

// SAFETY: after `join` the handle is used on the device thread alone.
unsafe impl Send for Communicator {}

/// Is the library there? Asked once.
///
/// # Errors
/// [`KernelError::NoNccl`].
pub fn require_nccl() -> Result<(), KernelError> {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: only tries to open the library.
    match *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() }) {
        true => Ok(()),
        false => Err(KernelError::NoNccl),
    }
}

/// What all ranks of a new group must be given, made by one of them.
///
/// # Errors
/// No library, or one that finds no network.
pub fn nccl_id() -> Result<[u8; NCCL_ID_BYTES], KernelError> {
    require_nccl()?;
    let id = nccl::get_uniqueid().map_err(|error| refused("ncclGetUniqueId", &error))?;
    Ok(id.internal.map(|byte| byte as u8))
}

impl NcclGroup {
    /// Joins the group of `id` as `rank` of `size`, with a GPU on which tensors were made before. Waits for all ranks.
    ///
    /// # Errors
    /// No library; an id of another length; GPUs that cannot reach each other, or one GPU for two ranks.
    pub fn join(
        device_index: usize,
        id: &[u8],
        [rank, size]: [usize; 2],
    ) -> Result<Self, KernelError> {
        require_nccl()?;
        let id: [u8; NCCL_ID_BYTES] = id
            .try_into()
            .map_err(|_| failed(format!("an id of {} bytes", id.len())))?;
        let id = sys::ncclUniqueId {
            internal: id.map(|byte| byte as _),
        };
        let device = driver::device::get(device_index as i32)
            .map_err(|error| failed(format!("cuDeviceGet: {error:?}")))?;
        let mut communicator = std::ptr::null_mut();
        // SAFETY: Burn's primary context is retained for the life of the process; NCCL takes the device of the current
        // context, and writes one handle.
        let joined = unsafe {
            driver::primary_ctx::retain(device)
                .and_then(|context| driver::ctx::set_current(context))
                .map_err(|error| failed(format!("the primary context: {error:?}")))?;
            nccl::comm_init_rank(&mut communicator, size as i32, id, rank as i32)
        };
        joined.map_err(|error| refused("ncclCommInitRank", &error))?;
        Ok(Self {
            communicator: Communicator(communicator),
            late_error: Arc::default(),
        })
    }

    /// The sums of f32 tensors over all ranks, which give the same shapes in the same order. A tensor that nobody else holds
    /// is replaced in place. The host does not wait.
    ///
    /// # Errors
    /// Tensors that are not f32; an error of an earlier call.
    pub fn all_reduce(&self, tensors: Vec<CudaTensor>) -> Result<Vec<CudaTensor>, KernelError> {
        if let Some(reason) = lock(&self.late_error).take() {
            return Err(failed(reason));
        }
        let Some(first) = tensors.first() else {
            return Ok(tensors);
        };
        // The lane of its products is the way to Burn's stream.
        require_cublaslt()?;
        open_lane(first)?;
        let queue: DeviceHandle<Server> = DeviceHandle::new(first.device().to_id());
        let mut jobs = Vec::with_capacity(tensors.len());
        let mut sums = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            tensor.require_dtype(NAME, "a tensor", DType::F32)?;
            let count = tensor.num_elements();
            let is_own = tensor.is_contiguous() && tensor.primitive().can_mut();
            let (from, to) = if is_own {
                let binding = tensor.primitive().handle.clone().binding();
                (binding, tensor)
            } else {
                let from = tensor.contiguous();
                let to = from.empty_contiguous(from.shape(), DType::F32);
                (from.primitive().handle.clone().binding(), to)
            };
            // Bindings keep the memory until the sum is queued, and do not hinder the next op from writing in place.
            jobs.push((from, to.primitive().handle.clone().binding(), count));
            sums.push(to);
        }
        let (communicator, stream) = (self.communicator, StreamId::current());
        let late_error = self.late_error.clone();
        queue.submit(move |server| {
            let addresses = jobs.into_iter().map(|(from, to, count)| {
                let mut address = |binding| {
                    let resource = server.get_resource(binding, stream);
                    let resource = resource.map_err(|error| format!("get_resource: {error}"))?;
                    Ok::<_, String>(resource.resource().ptr)
                };
                Ok((address(from)?, address(to)?, count))
            });
            let addresses = addresses.collect::<Result<Vec<_>, String>>();
            let queued = addresses.and_then(|addresses| {
                on_lane(stream, |stream| {
                    // SAFETY: the bindings held the tensors, of `count` f32 values each, until here; what frees or writes
                    // them later comes after on this stream.
                    unsafe { queue_sums(&addresses, communicator, stream as _) }
                })
            });
            if let Err(reason) = queued {
                lock(&late_error).get_or_insert(reason);
            }
        });
        // Other ranks wait for this one: the closure must not wait for ops that come later.
        queue.flush_queue();
        Ok(sums)
    }
}

/// Queues the sums of all tensors as one group.
///
/// # Safety
/// Each pair of addresses holds `count` f32 values on the communicator's GPU.
unsafe fn queue_sums(
    tensors: &[(u64, u64, usize)],
    communicator: Communicator,
    stream: sys::cudaStream_t,
) -> Result<(), String> {
    let told = |call: &'static str| move |error: nccl::NcclError| format!("{call}: {:?}", error.0);
    nccl::group_start().map_err(told("ncclGroupStart"))?;
    let mut queued = Ok(());
    for &(from, to, count) in tensors {
        let (kind, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        // SAFETY: see above.
        let call = unsafe {
            nccl::all_reduce(from as _, to as _, count, kind, sum, communicator.0, stream)
        };
        queued = queued.and(call.map(drop).map_err(told("ncclAllReduce")));
    }
    // Also after an error: a group left open would swallow the next one.
    let ended = nccl::group_end().map(drop).map_err(told("ncclGroupEnd"));
    queued.and(ended)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(reason: String) -> KernelError {
    KernelError::Launch {
        kernel: NAME,
        reason,
    }
}

fn refused(call: &str, error: &nccl::NcclError) -> KernelError {
    failed(format!(
        "{call}: {:?}\n  hint: NCCL_DEBUG=INFO says more; NCCL_SOCKET_IFNAME names the network between hosts",
        error.0
    ))
}
