//! Launches of `kernels/swiglu_forward.cu`: SwiGLU.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, require, require_non_empty, uniform_rows};
use crate::step::{AMAX_PARTIALS, empty_zero, with_amax};

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
    let (gate_up, rows, row_stride) = as_rows(gate_up);
    require_non_empty(NAME, "the number of rows", rows)?;
    let y = gate_up.empty_contiguous(&with_width(&gate_up, d_ff), DType::BF16);
    let is_bf16 = true;
    let vector = vector_width(is_bf16, &[d_ff, row_stride]);
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
pub(crate) fn swiglu_forward_kernel(vector: usize) -> SourceKernel {
    SourceKernel::new(NAME).define("IS_BF16", 1).define("VECTOR", vector).threads(THREADS)
}

/// `d_ff`, half the width of a packed tensor.
pub(crate) fn packed_width(kernel: &'static str, gate_up: &CudaTensor) -> Result<usize, KernelError> {
    let width = gate_up.shape().last().copied().unwrap_or(0);
    require_non_empty(kernel, "d_ff", width)?;
    require!(width.is_multiple_of(2), kernel, "width of gate_up": width, "2 * d_ff");
    Ok(width / 2)
}

/// The shape of a tensor with another width.
pub(crate) fn with_width(tensor: &CudaTensor, width: usize) -> Vec<usize> {
    let mut shape = tensor.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = width;
    }
    shape
}

/// `(tensor, rows, row_stride)` of a tensor seen as rows of its last dimension; a contiguous copy if no single stride
/// leads from each row to the next.
pub fn as_rows(tensor: &CudaTensor) -> (CudaTensor, usize, usize) {
    if let Some((rows, stride)) = uniform_rows(tensor.shape(), tensor.strides()) {
        return (tensor.clone(), rows, stride);
    }
    let copy = tensor.contiguous();
    let width = copy.shape().last().copied().unwrap_or(1);
    let rows = copy.num_elements() / width.max(1);
    (copy, rows, width)
}

/// Elements of a 16-byte access if every size allows it, else 1.
pub(crate) fn vector_width(is_bf16: bool, sizes: &[usize]) -> usize {
    let widest = if is_bf16 { 8 } else { 4 };
    if sizes.iter().all(|size| size.is_multiple_of(widest)) { widest } else { 1 }
}
