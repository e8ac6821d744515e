//! Launches of `kernels/swiglu_backward.cu`: the gradient of SwiGLU.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operand, params, require_non_empty};
use crate::step::qk_norm_rope_forward::Reuse;
use crate::step::swiglu_forward::{THREADS, packed_width};
use crate::step::{AMAX_PARTIALS, Rows, empty_zero, vector_width, with_amax, with_width};

const NAME: &str = "swiglu_backward";

/// Gradient of [`swiglu_forward`](crate::step::swiglu_forward()) with respect to its packed input `gate_up`
/// `[.., 2 * d_ff]`, from `dy` `[.., d_ff]`; all bf16. With [`Reuse::InPlace`] it overwrites `gate_up`.
///
/// # Errors
/// Another type, shapes that do not fit each other, no rows; with [`Reuse::InPlace`] a tensor that is not contiguous.
pub fn swiglu_backward(gate_up: &CudaTensor, dy: &CudaTensor, reuse: Reuse) -> Result<CudaTensor, KernelError> {
    let (amax, y) = (None, None);
    launch([gate_up, dy], reuse, [amax, y])
}

/// [`swiglu_backward`] that also computes partial maxima of the gradient's magnitude for
/// [`fp8_quantise`](crate::step::fp8_quantise()). Returns `(dgate_up, amax)`.
///
/// # Errors
/// The errors of [`swiglu_backward`].
pub fn swiglu_backward_with_amax(
    gate_up: &CudaTensor,
    dy: &CudaTensor,
    reuse: Reuse,
) -> Result<(CudaTensor, CudaTensor), KernelError> {
    let amax = empty_zero(gate_up, &[AMAX_PARTIALS])?;
    let dgate_up = launch([gate_up, dy], reuse, [Some(&amax), None])?;
    Ok((dgate_up, amax))
}

/// [`swiglu_backward`] that also recomputes y, the output of [`swiglu_forward`](crate::step::swiglu_forward()). Returns
/// `(dgate_up, y)`; with [`Reuse::InPlace`] they overwrite `gate_up` and `dy`.
///
/// # Errors
/// The errors of [`swiglu_backward`].
pub fn swiglu_backward_with_output(
    gate_up: &CudaTensor,
    dy: &CudaTensor,
    reuse: Reuse,
) -> Result<(CudaTensor, CudaTensor), KernelError> {
    let y = output_at(dy, "dy", reuse)?;
    let dgate_up = launch([gate_up, dy], reuse, [None, Some(&y)])?;
    Ok((dgate_up, y))
}

/// Launches the kernel, which also writes partial maxima into `amax` or the recomputed output into `y`, if given.
fn launch(
    [gate_up, dy]: [&CudaTensor; 2],
    reuse: Reuse,
    [amax, y]: [Option<&CudaTensor>; 2],
) -> Result<CudaTensor, KernelError> {
    gate_up.require_dtype(NAME, "gate_up", DType::BF16)?;
    let d_ff = packed_width(NAME, gate_up)?;
    operand(NAME, "dy", dy, DType::BF16, &with_width(gate_up, d_ff))?;
    let dgate_up = output_at(gate_up, "gate_up", reuse)?;
    let (gate_up, dy) = (Rows::of(gate_up), Rows::of(dy));
    require_non_empty(NAME, "the number of rows", gate_up.rows)?;
    let vector = vector_width(DType::BF16, &[d_ff, gate_up.stride, dy.stride]);
    let kernel = match (amax, y) {
        (_, Some(_)) => swiglu_backward_with_output_kernel(vector),
        (Some(_), None) => with_amax(swiglu_backward_kernel(vector)),
        (None, None) => swiglu_backward_kernel(vector),
    };
    let mut buffers = vec![&gate_up.tensor, &dy.tensor, &dgate_up];
    buffers.extend(amax.into_iter().chain(y));
    let grid = [gate_up.rows, d_ff.div_ceil(THREADS * vector), 1];
    let params = params!(SwigluBackwardParams { d_ff, row_stride: gate_up.stride, dy_stride: dy.stride });
    // SAFETY: reads rows of 2*d_ff and d_ff columns, writes every element of dgate_up and y; sizes were read off the
    // tensors. dgate_up may overwrite gate_up and y may overwrite dy: a thread writes only columns that no other thread
    // reads. `amax`, if any, has the number of partial maxima for which the kernel was compiled.
    unsafe { kernel.launch(grid, &buffers, &params) }?;
    Ok(dgate_up)
}

/// The tensor for an output with the shape of `x`: `x` itself, or a new one.
fn output_at(x: &CudaTensor, what: &'static str, reuse: Reuse) -> Result<CudaTensor, KernelError> {
    match reuse {
        Reuse::InPlace => x.require_contiguous(NAME, what).map(|()| x.clone()),
        Reuse::Copy => Ok(x.empty_contiguous(x.shape(), x.dtype())),
    }
}

/// The specialisation for a vector width, 1 or 8.
fn swiglu_backward_kernel(vector: usize) -> SourceKernel {
    SourceKernel::new(NAME).define("IS_BF16", 1).define("VECTOR", vector).threads(THREADS)
}

/// The specialisation for a vector width that also recomputes the output.
fn swiglu_backward_with_output_kernel(vector: usize) -> SourceKernel {
    swiglu_backward_kernel(vector).define("HAS_OUTPUT", 1)
}
