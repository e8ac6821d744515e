//! Launch of `kernels/residual_add.cu`: the sum of two tensors.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operand, params, require_non_empty};
use crate::step::swiglu_forward::THREADS;
use crate::step::{Rows, vector_width};

const NAME: &str = "residual_add";

/// `a + b` of two bf16 tensors of one shape; returns a new contiguous tensor.
///
/// # Errors
/// Another type, shapes that differ, no elements.
pub fn residual_add(a: &CudaTensor, b: &CudaTensor) -> Result<CudaTensor, KernelError> {
    a.require_dtype(NAME, "a", DType::BF16)?;
    operand(NAME, "b", b, DType::BF16, a.shape())?;
    let y = a.empty_contiguous(a.shape(), DType::BF16);
    let (a, b) = (Rows::of(a), Rows::of(b));
    let Rows { rows, width, .. } = a;
    require_non_empty(NAME, "the number of elements", rows * width)?;
    let vector = vector_width(DType::BF16, &[width, a.stride, b.stride]);
    let grid = [rows, width.div_ceil(THREADS * vector), 1];
    let params = params!(ResidualAddParams { width, a_stride: a.stride, b_stride: b.stride });
    // SAFETY: reads rows of `width` columns of both, writes every element of y; sizes were read off the tensors.
    unsafe { residual_add_kernel(vector).launch(grid, &[&a.tensor, &b.tensor, &y], &params) }?;
    Ok(y)
}

/// The specialisation for a vector width, 1 or 8.
fn residual_add_kernel(vector: usize) -> SourceKernel {
    SourceKernel::new(NAME).define("IS_BF16", 1).define("VECTOR", vector).threads(THREADS)
}
