//! Burn's CUDA tensors as the kernels of `sieve-kernels` take them.
use burn::tensor::DType;
pub use sieve_cuda::Cuda;
pub(crate) use sieve_kernels::CudaPrimitive;
use sieve_kernels::{CudaTensor, kernel_tensor};

/// The kernels' view of some tensors; no copy.
pub(crate) fn tensors<const N: usize>(primitives: [&CudaPrimitive; N]) -> [CudaTensor; N] {
    primitives.map(|primitive| kernel_tensor(primitive.clone()))
}

/// A contiguous tensor that may be written in place: `x` itself where nobody else holds it, else a copy.
pub(crate) fn writable(x: CudaPrimitive) -> CudaTensor {
    let x = if x.can_mut() { x } else { x.copy() };
    kernel_tensor(x).contiguous()
}

/// The tensor in another float type, itself when it has that type.
pub(crate) fn cast(x: &CudaPrimitive, dtype: DType) -> CudaTensor {
    if x.dtype == dtype {
        return kernel_tensor(x.clone());
    }
    kernel_tensor(burn_cubecl::kernel::cast(x.clone(), dtype))
}
