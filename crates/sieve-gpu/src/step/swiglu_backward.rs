//! Launch of `kernels/swiglu_backward.cu`.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operand, params, require_non_empty};
use crate::step::qk_norm_rope_forward::Reuse;
use crate::step::swiglu_forward::{THREADS, as_rows, packed_width, vector_width};
use crate::step::{AMAX_PARTIALS, empty_zero, with_amax};

const NAME: &str = "swiglu_backward";

/// Gradient of [`swiglu_forward`](crate::step::swiglu_forward()) with respect to its packed input: `gate_up`
/// `[.., 2 * d_ff]`, `dy` `[.., d_ff]`; returns `[.., 2 * d_ff]`, all bf16. [`Reuse::InPlace`] puts it
/// where a contiguous `gate_up` lies.
///
/// # Errors
/// Another type, shapes that do not fit each other, no rows; a tensor to be reused that is not contiguous.
pub fn swiglu_backward(gate_up: &CudaTensor, dy: &CudaTensor, reuse: Reuse) -> Result<CudaTensor, KernelError> {
    launch([gate_up, dy], reuse, [None; 2])
}

/// As [`swiglu_backward`], and finds the gradient's largest magnitude: `(dgate_up, amax)`, the latter for
/// [`fp8_quantise`](crate::step::fp8_quantise()).
///
/// # Errors
/// As [`swiglu_backward`].
pub fn swiglu_backward_with_amax(
    gate_up: &CudaTensor,
    dy: &CudaTensor,
    reuse: Reuse,
) -> Result<(CudaTensor, CudaTensor), KernelError> {
    let amax = empty_zero(gate_up, &[AMAX_PARTIALS])?;
    let dgate_up = launch([gate_up, dy], reuse, [Some(&amax), None])?;
    Ok((dgate_up, amax))
}

/// As [`swiglu_backward`], and computes y, the output of [`swiglu_forward`](crate::step::swiglu_forward()), again:
/// `(dgate_up, y)`. [`Reuse::InPlace`] puts them where contiguous `gate_up` and `dy` lie.
///
/// # Errors
/// As [`swiglu_backward`]; tensors to be reused that are not contiguous.
pub fn swiglu_backward_with_output(
    gate_up: &CudaTensor,
    dy: &CudaTensor,
    reuse: Reuse,
) -> Result<(CudaTensor, CudaTensor), KernelError> {
    let y = output_at(dy, "dy", reuse)?;
    let dgate_up = launch([gate_up, dy], reuse, [None, Some(&y)])?;
    Ok((dgate_up, y))
}

fn launch(
    [gate_up, dy]: [&CudaTensor; 2],
    reuse: Reuse,
    [amax, y]: [Option<&CudaTensor>; 2],
) -> Result<CudaTensor, KernelError> {
    gate_up.require_dtype(NAME, "gate_up", DType::BF16)?;
    let d_ff = packed_width(NAME, gate_up)?;
    let mut expected = gate_up.shape().to_vec();
    if let Some(width) = expected.last_mut() {
        *width = d_ff;
    }
    operand(NAME, "dy", dy, DType::BF16, &expected)?;
    let dgate_up = output_at(gate_up, "gate_up", reuse)?;
    let ((gate_up, rows, row_stride), (dy, _rows, dy_stride)) = (as_rows(gate_up), as_rows(dy));
    require_non_empty(NAME, "the number of rows", rows)?;
    let vector = vector_width(true, &[d_ff, row_stride, dy_stride]);
    let kernel = match (amax, y) {
        (_, Some(_)) => swiglu_backward_with_output_kernel(vector),
        (Some(_), None) => with_amax(swiglu_backward_kernel(vector)),
        (None, None) => swiglu_backward_kernel(vector),
    };
    let mut buffers = vec![&gate_up, &dy, &dgate_up];
    buffers.extend(amax.into_iter().chain(y));
    let grid = [rows, d_ff.div_ceil(THREADS * vector), 1];
    let params = params!(SwigluBackwardParams {
        d_ff,
        row_stride,
        dy_stride,
    });
    // SAFETY: reads rows of 2*d_ff and d_ff columns, writes every element of dgate_up and y; sizes were read off the
    // tensors. dgate_up may lie where gate_up does and y where dy does: a thread writes only columns that it alone has
    // read. `amax`, if any, has the number of partial maxima that the kernel was compiled for.
    unsafe { kernel.launch(grid, &buffers, &params) }?;
    Ok(dgate_up)
}

/// Where an output of an input's shape goes.
fn output_at(x: &CudaTensor, what: &'static str, reuse: Reuse) -> Result<CudaTensor, KernelError> {
    match reuse {
        Reuse::InPlace => x.require_contiguous(NAME, what).map(|()| x.clone()),
        Reuse::Copy => Ok(x.empty_contiguous(x.shape(), x.dtype())),
    }
}

/// The specialisation for a vector width, 1 or 8.
pub(crate) fn swiglu_backward_kernel(vector: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("IS_BF16", 1)
        .define("VECTOR", vector)
        .threads(THREADS)
}

/// As [`swiglu_backward_kernel`], with the output beside the gradient.
pub(crate) fn swiglu_backward_with_output_kernel(vector: usize) -> SourceKernel {
    swiglu_backward_kernel(vector).define("HAS_OUTPUT", 1)
}
