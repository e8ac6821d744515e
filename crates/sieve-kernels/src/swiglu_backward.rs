//! Launch of `kernels/swiglu_backward.cu`.
use crate::checks::{require_float, require_non_empty};
use crate::cuda_tensor::CudaTensor;
use crate::error::KernelError;
use crate::source_kernel::SourceKernel;
use crate::swiglu_forward::{THREADS, as_rows, packed_width, vector_width};

const NAME: &str = "swiglu_backward";

/// Gradient of [`swiglu_forward`](crate::swiglu_forward()) with respect to its packed input: `gate_up` `[.., 2 * d_ff]`,
/// `dy` `[.., d_ff]`, both bf16 or both f32; returns `[.., 2 * d_ff]`.
///
/// # Errors
/// Another type, shapes that do not fit each other, no rows.
pub fn swiglu_backward(gate_up: &CudaTensor, dy: &CudaTensor) -> Result<CudaTensor, KernelError> {
    let is_bf16 = require_float(NAME, "gate_up's type", gate_up)?;
    dy.require_dtype(NAME, "dy", gate_up.dtype())?;
    let d_ff = packed_width(NAME, gate_up)?;
    let mut expected = gate_up.shape().to_vec();
    if let Some(width) = expected.last_mut() {
        *width = d_ff;
    }
    dy.require_shape(NAME, "dy", &expected)?;
    let (gate_up, rows, row_stride) = as_rows(gate_up);
    let (dy, _rows, dy_stride) = as_rows(dy);
    require_non_empty(NAME, "the number of rows", rows)?;
    let dgate_up = gate_up.empty_contiguous(gate_up.shape(), gate_up.dtype());
    let vector = vector_width(is_bf16, &[d_ff, row_stride, dy_stride]);
    let grid = [rows, d_ff.div_ceil(THREADS * vector), 1];
    let words = [d_ff, row_stride, dy_stride].map(|word| word as u64);
    // SAFETY: reads rows of 2*d_ff and d_ff columns, writes every element of dgate_up; sizes were read off the tensors.
    unsafe {
        swiglu_backward_kernel(is_bf16, vector).launch(grid, &[&gate_up, &dy, &dgate_up], &words)
    }?;
    Ok(dgate_up)
}

/// The specialisation for an element type and a vector width (1, or 16 bytes' worth).
pub fn swiglu_backward_kernel(is_bf16: bool, vector: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("IS_BF16", is_bf16 as u8)
        .define("VECTOR", vector)
        .threads(THREADS)
}
