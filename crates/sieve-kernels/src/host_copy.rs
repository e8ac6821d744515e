//! Reading tensors on the host from another thread, while training continues.
//!
//! CubeCL reads on the stream it computes on, into freshly allocated host memory: 1.6 GB/s, and no kernel runs
//! meanwhile. Here any thread copies through one page-locked buffer on a stream of its own.
//!
//! A checkpoint holds the optimizer's tensors. Updates in the meantime write to copies, while the writer's thread
//! reads the held tensors.
use crate::burn_memory::{binding_of, device_of};
use crate::device_thread::late_error;
use crate::lane::{address_of, run_blocking};
use cubecl::stream_id::StreamId;
use cudarc::driver::result as driver;
use cudarc::driver::sys::{CUdevice, CUstream};
use sieve_gpu::{CudaTensor, KernelError};
use std::ffi::c_void;

const NAME: &str = "host_copy";

/// Bytes of the page-locked buffer that a copy goes through.
const STAGING_BYTES: usize = 64 << 20;

/// A tensor whose values will be read by [`HostReader::read`], on any thread.
///
/// It is one more owner of the tensor, so ops that write in place only to a tensor without other owners (Burn's, the
/// optimizer's) write to a copy. `read` then returns the values of the moment when the `HostCopy` was made; `sync` the
/// device first, so that the ops queued before that moment have run. `MatmulOutput::Into` and `AddTo` and
/// `NcclPiece::whole` overwrite a tensor *whoever owns it*: make a `HostCopy` of such a tensor after its last write.
#[derive(Debug)]
pub struct HostCopy {
    tensor: CudaTensor,
    address: u64,
}

impl HostCopy {
    /// Holds a tensor; one that is not contiguous is copied first.
    ///
    /// # Errors
    /// The device thread is gone, or an operation queued before has failed.
    pub fn new(tensor: &CudaTensor) -> Result<Self, KernelError> {
        let tensor = tensor.contiguous();
        let binding = binding_of(&tensor);
        let stream = StreamId::current();
        let address = run_blocking(&tensor, NAME, move |server| {
            address_of(server, stream, binding).map(|address| address.pointer)
        })?;
        late_error()?;
        Ok(Self { tensor, address })
    }

    /// Size of the values in bytes.
    pub fn num_bytes(&self) -> usize {
        self.tensor.num_elements() * self.tensor.dtype().size()
    }

    /// Sizes of the dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        self.tensor.shape()
    }

    /// Type of the elements.
    pub fn dtype(&self) -> sieve_gpu::DType {
        self.tensor.dtype()
    }

    /// Index of the GPU that holds the tensor.
    pub fn device_index(&self) -> usize {
        device_of(&self.tensor).index
    }
}

/// A stream and a page-locked buffer, used by the thread that opened it.
#[derive(Debug)]
pub struct HostReader {
    device: CUdevice,
    stream: CUstream,
    staging: *mut c_void,
}

impl HostReader {
    /// Opens a stream on the primary context of a GPU.
    ///
    /// # Errors
    /// The driver refuses, for example because page-locked memory is exhausted.
    pub fn open(device_index: usize) -> Result<Self, KernelError> {
        let device = driver::device::get(device_index as i32).map_err(|e| refused("cuDeviceGet", e))?;
        // SAFETY: the primary context is retained once here and released when this is dropped; the buffer and the
        // stream are this value's own.
        unsafe {
            let context = driver::primary_ctx::retain(device).map_err(|e| refused("cuDevicePrimaryCtxRetain", e))?;
            driver::ctx::set_current(context).map_err(|e| refused("cuCtxSetCurrent", e))?;
            let stream = driver::stream::create(driver::stream::StreamKind::NonBlocking)
                .map_err(|e| refused("cuStreamCreate", e))?;
            let staging = driver::malloc_host(STAGING_BYTES, 0).map_err(|e| refused("cuMemHostAlloc", e))?;
            Ok(Self { device, stream, staging })
        }
    }

    /// The values of a tensor, as bytes.
    ///
    /// # Errors
    /// An error of the driver; the cause may be a kernel queued earlier.
    pub fn read(&mut self, copy: &HostCopy) -> Result<Vec<u8>, KernelError> {
        let num_bytes = copy.num_bytes();
        let mut bytes = Vec::with_capacity(num_bytes);
        while bytes.len() < num_bytes {
            let len = STAGING_BYTES.min(num_bytes - bytes.len());
            // SAFETY: the buffer has STAGING_BYTES and is used here only; the tensor holds num_bytes from its address
            // on, and lives as long as `copy`.
            let chunk = unsafe {
                let chunk = std::slice::from_raw_parts_mut(self.staging.cast::<u8>(), len);
                let from = copy.address + bytes.len() as u64;
                driver::memcpy_dtoh_async(chunk, from, self.stream).map_err(|e| refused("cuMemcpyDtoHAsync", e))?;
                driver::stream::synchronize(self.stream).map_err(|e| refused("cuStreamSynchronize", e))?;
                chunk
            };
            bytes.extend_from_slice(chunk);
        }
        Ok(bytes)
    }
}

impl Drop for HostReader {
    fn drop(&mut self) {
        // SAFETY: created in `open`, released once; an error here could not be handled.
        unsafe {
            let _ = driver::free_host(self.staging);
            let _ = driver::stream::destroy(self.stream);
            let _ = driver::primary_ctx::release(self.device);
        }
    }
}

fn refused(call: &str, error: cudarc::driver::DriverError) -> KernelError {
    let reason = format!("{call}: {error:?}");
    KernelError::Launch { kernel: NAME, reason }
}
