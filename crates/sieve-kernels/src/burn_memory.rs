//! Conversion between Burn's CUDA tensors and the launch wrappers' tensors.
use crate::launch;
use crate::memory_watch::note_allocation;
use crate::probe::compute_capability;
use crate::step_graph::below_tape;
use burn::tensor::Shape;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, full_device_dtype};
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::{ComputeClient, InputScalar};
use cubecl::server::{Binding, Handle};
use cubecl::zspace::metadata::Metadata;
use sieve_cuda::contiguous_copy;
use sieve_gpu::{CudaTensor, DType, Fill, Hardware, KernelError, LaunchRequest, Memory};
use std::fmt;
use std::sync::Arc;

/// Number of multiprocessors assumed if the driver does not report it.
const DEFAULT_MULTIPROCESSORS: usize = 132;

/// A tensor primitive of `burn_cuda::Cuda<f32, i32>`.
pub type CudaPrimitive = CubeTensor<CudaRuntime>;

/// A tensor's buffer in CubeCL's allocator.
#[derive(Clone)]
pub(crate) struct BurnMemory {
    /// Its `offset_start` is `None`: each tensor has the offset of its first element.
    handle: Handle,
    pub(crate) client: ComputeClient<CudaRuntime>,
    pub(crate) device: CudaDevice,
}

/// Converts a Burn tensor to the launch wrappers' type, without a copy. Both share the buffer: while the result lives,
/// Burn's in-place ops write to a copy.
pub fn kernel_tensor(primitive: CudaPrimitive) -> CudaTensor {
    let (shape, strides) = (primitive.meta.shape().to_vec(), primitive.meta.strides().to_vec());
    let dtype = kernel_dtype(primitive.dtype);
    let mut handle = primitive.handle;
    let offset = handle.offset_start.take().unwrap_or(0) as usize;
    let memory = BurnMemory { handle, client: primitive.client, device: primitive.device };
    CudaTensor::new(Arc::new(memory), offset, [&shape, &strides], dtype)
}

/// Converts a tensor of the launch wrappers to Burn's type.
pub trait ToBurn {
    /// The Burn tensor with the same buffer, shape, strides and element type.
    ///
    /// # Panics
    /// For a tensor of a [`Recorder`](crate::Recorder), which has no memory.
    fn burn(self) -> CudaPrimitive;
}

impl ToBurn for CudaTensor {
    fn burn(self) -> CudaPrimitive {
        let metadata = Metadata::new(self.shape().to_vec(), self.strides().to_vec());
        let memory = burn_memory(&self);
        let (client, device) = (memory.client.clone(), memory.device.clone());
        CubeTensor::new(client, handle_of(&self), metadata, device, burn_dtype(self.dtype()))
    }
}

/// Burn's name of an element type.
///
/// # Panics
/// For [`DType::Other`], which no kernel takes.
pub fn burn_dtype(dtype: DType) -> burn::tensor::DType {
    match dtype {
        DType::F32 => burn::tensor::DType::F32,
        DType::BF16 => burn::tensor::DType::BF16,
        DType::I32 => burn::tensor::DType::I32,
        DType::I64 => burn::tensor::DType::I64,
        DType::U8 => burn::tensor::DType::U8,
        DType::Other(name, _) => panic!("no kernel makes tensors of {name}"),
    }
}

/// The launch wrappers' name of one of Burn's element types.
pub fn kernel_dtype(dtype: burn::tensor::DType) -> DType {
    match dtype {
        burn::tensor::DType::F32 => DType::F32,
        burn::tensor::DType::BF16 => DType::BF16,
        burn::tensor::DType::I32 => DType::I32,
        burn::tensor::DType::I64 => DType::I64,
        burn::tensor::DType::U8 => DType::U8,
        other => DType::Other(other.name(), other.size()),
    }
}

/// The GPU of a tensor.
///
/// # Panics
/// For a tensor of a [`Recorder`](crate::Recorder), which has no memory.
pub fn device_of(tensor: &CudaTensor) -> &CudaDevice {
    &burn_memory(tensor).device
}

/// The client whose stream a tensor lives on.
///
/// # Panics
/// For a tensor of a [`Recorder`](crate::Recorder), which has no memory.
pub fn client_of(tensor: &CudaTensor) -> &ComputeClient<CudaRuntime> {
    &burn_memory(tensor).client
}

/// The buffer of a tensor on a GPU, also of one whose launches a step's tape records.
///
/// # Panics
/// For a tensor of a [`Recorder`](crate::Recorder), which must not reach Burn.
pub(crate) fn burn_memory(tensor: &CudaTensor) -> &BurnMemory {
    let memory = tensor.memory().or_else(|| below_tape(tensor));
    memory.expect("a recorded tensor has no memory on a GPU")
}

/// The tensor's buffer from its first element on, in the form that CubeCL's server takes. A binding keeps the memory
/// alive, but does not count as an owner as a handle does: the next op may still write to the buffer in place.
pub(crate) fn binding_of(tensor: &CudaTensor) -> Binding {
    handle_of(tensor).binding()
}

/// Whether the tensor is the only owner of its buffer, so that Burn's next op may write to it in place.
pub(crate) fn can_mut(tensor: &CudaTensor) -> bool {
    tensor.is_only_holder() && burn_memory(tensor).handle.can_mut()
}

fn handle_of(tensor: &CudaTensor) -> Handle {
    let handle = burn_memory(tensor).handle.clone();
    match tensor.offset_bytes() {
        0 => handle,
        bytes => handle.offset_start(bytes as u64),
    }
}

impl fmt::Debug for BurnMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BurnMemory").field("handle", &self.handle).finish_non_exhaustive()
    }
}

impl BurnMemory {
    /// New memory on the same GPU for a contiguous tensor, contents undefined.
    pub(crate) fn new_buffer(&self, shape: &[usize], dtype: DType) -> Self {
        let (client, device) = (self.client.clone(), self.device.clone());
        let shape = Shape::from(shape.to_vec());
        let tensor = empty_device_contiguous_dtype(client, device, shape, burn_dtype(dtype));
        note_allocation(&self.client);
        self.with_handle(tensor.handle)
    }

    fn with_handle(&self, handle: Handle) -> Self {
        let (client, device) = (self.client.clone(), self.device.clone());
        Self { handle, client, device }
    }
}

impl Memory for BurnMemory {
    fn hardware(&self) -> Hardware {
        let hardware = &self.client.properties().hardware;
        let (x, y, z) = hardware.max_cube_count;
        Hardware {
            compute_capability: compute_capability(self.device.index).unwrap_or_default(),
            num_multiprocessors: hardware.num_streaming_multiprocessors.map_or(DEFAULT_MULTIPROCESSORS, |n| n as usize),
            max_shared_bytes: hardware.max_shared_memory_size,
            max_threads: hardware.max_units_per_cube as usize,
            max_grid: [x, y, z].map(|n| n as usize),
        }
    }

    fn num_bytes(&self) -> usize {
        self.handle.size_in_used() as usize
    }

    fn allocate(&self, shape: &[usize], dtype: DType) -> Arc<dyn Memory> {
        Arc::new(self.new_buffer(shape, dtype))
    }

    fn filled(&self, shape: &[usize], dtype: DType, fill: Fill) -> Arc<dyn Memory> {
        // The shape is flat, because Burn pads the rows of a tensor of two or more dimensions.
        let flat = Shape::from(vec![shape.iter().product::<usize>()]);
        let (client, device, dtype) = (self.client.clone(), self.device.clone(), burn_dtype(dtype));
        let value = match fill {
            Fill::Zero => InputScalar::new(0u32, dtype),
            Fill::Nan => InputScalar::new(f32::NAN, dtype),
        };
        Arc::new(self.with_handle(full_device_dtype(client, flat, device, value, dtype).handle))
    }

    fn gathered(&self, tensor: &CudaTensor) -> Arc<dyn Memory> {
        Arc::new(self.with_handle(contiguous_copy(&tensor.clone().burn())))
    }

    unsafe fn launch(&self, launch: &LaunchRequest<'_>) -> Result<(), KernelError> {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { launch::queue(launch) }.map(drop)
    }
}
