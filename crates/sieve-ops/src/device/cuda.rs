//! Burn's CUDA tensors as the kernels of `sieve-kernels` take them.
use burn::tensor::{DType, Tensor};
pub use sieve_cuda::Cuda;
pub(crate) use sieve_kernels::CudaPrimitive;
use sieve_kernels::{CudaTensor, kernel_tensor};

/// The kernels' view of some tensors; no copy.
pub(crate) fn tensors<const N: usize>(primitives: [&CudaPrimitive; N]) -> [CudaTensor; N] {
    primitives.map(|primitive| kernel_tensor(primitive.clone()))
}

/// The kernels' view of a tensor; no copy.
pub(crate) fn kernel_of<const D: usize>(tensor: &Tensor<Cuda, D>) -> CudaTensor {
    kernel_tensor(tensor.clone().into_primitive().tensor())
}

/// A contiguous tensor that may be written in place: `x` itself if it has no other owner, else a copy.
pub(crate) fn writable(x: CudaPrimitive) -> CudaTensor {
    let x = if x.can_mut() { x } else { x.copy() };
    kernel_tensor(x).contiguous()
}

/// The tensor in another float dtype; no copy if it has that dtype.
pub(crate) fn cast(x: &CudaPrimitive, dtype: DType) -> CudaTensor {
    if x.dtype == dtype {
        return kernel_tensor(x.clone());
    }
    kernel_tensor(burn_cubecl::kernel::cast(x.clone(), dtype))
}
