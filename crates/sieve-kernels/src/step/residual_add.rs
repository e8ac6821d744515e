//! Launch of `kernels/residual_add.cu`.
use crate::error::KernelError;
use crate::runtime::checks::{require_float, require_non_empty};
use crate::runtime::cuda_tensor::CudaTensor;
use crate::runtime::params::params;
use crate::runtime::source_kernel::SourceKernel;
use crate::step::swiglu_forward::{THREADS, as_rows, vector_width};

const NAME: &str = "residual_add";

/// `a + b` of one shape, both bf16 or both f32; returns a new contiguous tensor.
///
/// # Errors
/// Another type, shapes that differ, no elements.
pub fn residual_add(a: &CudaTensor, b: &CudaTensor) -> Result<CudaTensor, KernelError> {
    let is_bf16 = require_float(NAME, "a's type", a)?;
    b.require_dtype(NAME, "b", a.dtype())?;
    b.require_shape(NAME, "b", a.shape())?;
    let y = a.empty_contiguous(a.shape(), a.dtype());
    let ((a, rows, a_stride), (b, _rows, b_stride)) = (as_rows(a), as_rows(b));
    let width = a.shape().last().copied().unwrap_or(0);
    require_non_empty(NAME, "the number of elements", rows * width)?;
    let vector = vector_width(is_bf16, &[width, a_stride, b_stride]);
    let grid = [rows, width.div_ceil(THREADS * vector), 1];
    let params = params!(ResidualAddParams {
        width,
        a_stride,
        b_stride
    });
    // SAFETY: reads rows of `width` columns of both, writes every element of y; sizes were read off the tensors.
    unsafe { residual_add_kernel(is_bf16, vector).launch(grid, &[&a, &b, &y], &params) }?;
    Ok(y)
}

/// The specialisation for an element type and a vector width (1, or 16 bytes' worth).
pub(crate) fn residual_add_kernel(is_bf16: bool, vector: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("IS_BF16", is_bf16 as u8)
        .define("VECTOR", vector)
        .threads(THREADS)
}
