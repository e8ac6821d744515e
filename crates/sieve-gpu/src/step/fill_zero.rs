//! Launch of `kernels/fill_zero.cu`.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, require_non_empty};

const NAME: &str = "fill_zero";

/// Sets a contiguous f32 tensor to zero in place. Every clone of it shares the change.
///
/// # Errors
/// Another type, gaps, no elements.
pub fn fill_zero(tensor: &CudaTensor) -> Result<(), KernelError> {
    tensor.require_dtype(NAME, "the tensor", DType::F32)?;
    tensor.require_contiguous(NAME, "the tensor")?;
    let num_elements = tensor.num_elements();
    require_non_empty(NAME, "the number of elements", num_elements)?;
    let params = params!(FillZeroParams { num_elements });
    // SAFETY: writes `num_elements` elements of a contiguous tensor.
    unsafe { FILL_ZERO.launch([num_elements.div_ceil(1024), 1, 1], &[tensor], &params) }
}

const FILL_ZERO: SourceKernel = SourceKernel::new(NAME).threads(256);

/// A new f32 tensor of zeros on the device of `like`.
pub(crate) fn empty_zero(like: &CudaTensor, shape: &[usize]) -> Result<CudaTensor, KernelError> {
    let zeros = like.empty_contiguous(shape, DType::F32);
    fill_zero(&zeros)?;
    Ok(zeros)
}
