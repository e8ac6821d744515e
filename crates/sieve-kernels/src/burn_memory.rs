//! Conversion between Burn's CUDA tensors and the launch wrappers' tensors. `gpu_memory.rs` says how the wrappers
//! allocate and launch with this memory.
use crate::step_tape::StepTape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::ComputeClient;
use cubecl::server::{Binding, Handle};
use cubecl::zspace::metadata::Metadata;
use sieve_gpu::{CudaTensor, DType};
use std::fmt;
use std::sync::Arc;

/// A tensor primitive of `burn_cuda::Cuda<f32, i32>`.
pub type CudaPrimitive = CubeTensor<CudaRuntime>;

/// A tensor's buffer in CubeCL's allocator.
#[derive(Clone)]
pub(crate) struct BurnMemory {
    /// Its `offset_start` is `None`: each tensor has the offset of its first element.
    pub(crate) handle: Handle,
    pub(crate) client: ComputeClient<CudaRuntime>,
    pub(crate) device: CudaDevice,
    /// Records the launches on this memory, and on memory that is allocated from it.
    pub(crate) tape: Option<StepTape>,
}

/// Converts a Burn tensor to the launch wrappers' type, without a copy. Both share the buffer: while the result lives,
/// Burn's in-place ops write to a copy.
pub fn kernel_tensor(primitive: CudaPrimitive) -> CudaTensor {
    let (shape, strides) = (primitive.meta.shape().to_vec(), primitive.meta.strides().to_vec());
    let dtype = kernel_dtype(primitive.dtype);
    let mut handle = primitive.handle;
    let offset = handle.offset_start.take().unwrap_or(0) as usize;
    let memory = BurnMemory { handle, client: primitive.client, device: primitive.device, tape: None };
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

/// The memory of a tensor on a GPU.
///
/// # Panics
/// For a tensor of a [`Recorder`](crate::Recorder), which must not reach Burn.
pub(crate) fn burn_memory(tensor: &CudaTensor) -> &BurnMemory {
    tensor.memory().expect("a recorded tensor has no memory on a GPU")
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
