//! Launch of `kernels/scale.cu`: a tensor times a number on the device.
use crate::KernelError;
use crate::runtime::{CudaTensor, SourceKernel, operands, params, require_float, require_non_empty};
use crate::step::swiglu_forward::THREADS;
use crate::step::{Rows, vector_width};

const NAME: &str = "scale";

/// Multiplies `x`, contiguous bf16 or f32 of any shape, by `factor`, f32 `[1]`, in place. Every clone of `x` shares the
/// change.
///
/// # Errors
/// Another type or layout, no elements.
pub fn scale(x: &CudaTensor, factor: &CudaTensor) -> Result<(), KernelError> {
    let is_bf16 = require_float(NAME, "x's type", x)?;
    x.require_contiguous(NAME, "x")?;
    operands!(only NAME, factor: F32[1] strided);
    let Rows { tensor: x, rows, width, stride } = Rows::of(x);
    require_non_empty(NAME, "the number of elements", rows * width)?;
    let vector = vector_width(x.dtype(), &[width, stride]);
    let grid = [rows, width.div_ceil(THREADS * vector), 1];
    let params = params!(ScaleParams { width, stride });
    // SAFETY: reads and writes rows of `width` columns of x; sizes were read off the tensor.
    unsafe { scale_kernel(is_bf16, vector).launch(grid, &[factor, &x], &params) }
}

/// The specialisation for an element type and a vector width (1, or 16 bytes' worth).
fn scale_kernel(is_bf16: bool, vector: usize) -> SourceKernel {
    SourceKernel::new(NAME).define("IS_BF16", is_bf16 as u8).define("VECTOR", vector).threads(THREADS)
}
