//! Launches of `kernels/swiglu_forward.cu`: SwiGLU.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, require, require_non_empty};
use crate::step::{AMAX_PARTIALS, Rows, empty_zero, vector_width, with_amax, with_width};

const NAME: &str = "swiglu_forward";

/// Threads of a block, equal to the kernels' launch bounds.
pub(crate) const THREADS: usize = 256;

/// `silu(gate) * up` for packed rows. `gate_up` is bf16 `[.., 2 * d_ff]`, gate columns first; returns bf16
/// `[.., d_ff]`.
///
/// # Errors
/// Another type, an odd or zero width, no rows.
pub fn swiglu_forward(gate_up: &CudaTensor) -> Result<CudaTensor, KernelError> {
    let amax = None;
    launch(gate_up, amax)
}

/// [`swiglu_forward`] that also computes partial maxima of y's magnitude for
/// [`fp8_quantise`](crate::step::fp8_quantise()). Returns `(y, amax)`.
///
/// # Errors
/// The errors of [`swiglu_forward`].
pub fn swiglu_forward_with_amax(gate_up: &CudaTensor) -> Result<(CudaTensor, CudaTensor), KernelError> {
    let amax = empty_zero(gate_up, &[AMAX_PARTIALS])?;
    let y = launch(gate_up, Some(&amax))?;
    Ok((y, amax))
}

/// Launches the kernel; with `amax` it also writes partial maxima of y's magnitude there.
fn launch(gate_up: &CudaTensor, amax: Option<&CudaTensor>) -> Result<CudaTensor, KernelError> {
    gate_up.require_dtype(NAME, "gate_up", DType::BF16)?;
    let d_ff = packed_width(NAME, gate_up)?;
    let Rows { tensor: gate_up, rows, stride: row_stride, .. } = Rows::of(gate_up);
    require_non_empty(NAME, "the number of rows", rows)?;
    let y = gate_up.empty_contiguous(&with_width(&gate_up, d_ff), DType::BF16);
    let vector = vector_width(DType::BF16, &[d_ff, row_stride]);
    let grid = [rows, d_ff.div_ceil(THREADS * vector), 1];
    let kernel = swiglu_forward_kernel(vector);
    let kernel = match amax {
        Some(_) => with_amax(kernel),
        None => kernel,
    };
    let buffers: Vec<_> = [&gate_up, &y].into_iter().chain(amax).collect();
    let params = params!(SwigluForwardParams { d_ff, row_stride });
    // SAFETY: reads rows of 2*d_ff columns, writes every element of y; sizes and strides were read off the tensors.
    // `amax`, if any, has the number of partial maxima for which the kernel was compiled.
    unsafe { kernel.launch(grid, &buffers, &params) }?;
    Ok(y)
}

/// The specialisation for a vector width, 1 or 8.
fn swiglu_forward_kernel(vector: usize) -> SourceKernel {
    SourceKernel::new(NAME).define("IS_BF16", 1).define("VECTOR", vector).threads(THREADS)
}

/// `d_ff`, half the width of a packed tensor.
pub(crate) fn packed_width(kernel: &'static str, gate_up: &CudaTensor) -> Result<usize, KernelError> {
    let width = gate_up.shape().last().copied().unwrap_or(0);
    require_non_empty(kernel, "d_ff", width)?;
    require!(width.is_multiple_of(2), kernel, "width of gate_up": width, "2 * d_ff");
    Ok(width / 2)
}
