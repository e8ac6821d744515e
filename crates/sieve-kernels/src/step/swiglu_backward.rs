//! Launch of `kernels/swiglu_backward.cu`.
use crate::error::KernelError;
use crate::runtime::checks::{require_float, require_non_empty};
use crate::runtime::cuda_tensor::CudaTensor;
use crate::runtime::params::{SwigluBackwardParams, params};
use crate::runtime::source_kernel::SourceKernel;
use crate::step::fill_zero::empty_zero;
use crate::step::fp8_quantise::{AMAX_PARTIALS, with_amax};
use crate::step::qk_norm_rope_forward::Reuse;
use crate::step::swiglu_forward::{THREADS, as_rows, packed_width, vector_width};
use burn::tensor::DType;

const NAME: &str = "swiglu_backward";

/// Gradient of [`swiglu_forward`](crate::step::swiglu_forward()) with respect to its packed input: `gate_up`
/// `[.., 2 * d_ff]`, `dy` `[.., d_ff]`, both bf16 or both f32; returns `[.., 2 * d_ff]`. [`Reuse::InPlace`] puts it
/// where a contiguous `gate_up` lies.
///
/// # Errors
/// Another type, shapes that do not fit each other, no rows; a tensor to be reused that is not contiguous.
pub fn swiglu_backward(gate_up: &CudaTensor, dy: &CudaTensor, reuse: Reuse) -> Result<CudaTensor, KernelError> {
    launch([gate_up, dy], reuse, None)
}

/// As [`swiglu_backward`] of bf16, and finds the gradient's largest magnitude: `(dgate_up, amax)`, the latter for
/// [`fp8_quantise`](crate::step::fp8_quantise()).
///
/// # Errors
/// As [`swiglu_backward`]; f32.
pub fn swiglu_backward_with_amax(
    gate_up: &CudaTensor,
    dy: &CudaTensor,
    reuse: Reuse,
) -> Result<(CudaTensor, CudaTensor), KernelError> {
    gate_up.require_dtype(NAME, "gate_up", DType::BF16)?;
    let amax = empty_zero(gate_up, &[AMAX_PARTIALS])?;
    let dgate_up = launch([gate_up, dy], reuse, Some(&amax))?;
    Ok((dgate_up, amax))
}

fn launch([gate_up, dy]: [&CudaTensor; 2], reuse: Reuse, amax: Option<&CudaTensor>) -> Result<CudaTensor, KernelError> {
    let input = Input::of(gate_up, dy)?;
    let dgate_up = output_at(gate_up, "gate_up", reuse)?;
    let kernel = swiglu_backward_kernel(input.is_bf16, input.vector);
    let kernel = match amax {
        Some(_) => with_amax(kernel),
        None => kernel,
    };
    let buffers = [&input.gate_up, &input.dy, &dgate_up];
    let buffers: Vec<_> = buffers.into_iter().chain(amax).collect();
    // SAFETY: reads rows of 2*d_ff and d_ff columns, writes every element of dgate_up; sizes were read off the tensors.
    // dgate_up may lie where gate_up does: a thread writes only columns that it alone has read. Where there is an amax,
    // it has the parts that the kernel was compiled for.
    unsafe { kernel.launch(input.grid(), &buffers, &input.params()) }?;
    Ok(dgate_up)
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
    let input = Input::of(gate_up, dy)?;
    let dgate_up = output_at(gate_up, "gate_up", reuse)?;
    let y = output_at(dy, "dy", reuse)?;
    let kernel = swiglu_backward_with_output_kernel(input.is_bf16, input.vector);
    // SAFETY: as in swiglu_backward; also writes every element of y, which may lie where dy does for the same reason.
    unsafe {
        kernel.launch(
            input.grid(),
            &[&input.gate_up, &input.dy, &dgate_up, &y],
            &input.params(),
        )
    }?;
    Ok((dgate_up, y))
}

/// Where an output of an input's shape goes.
fn output_at(x: &CudaTensor, what: &'static str, reuse: Reuse) -> Result<CudaTensor, KernelError> {
    match reuse {
        Reuse::InPlace => x.require_contiguous(NAME, what).map(|()| x.clone()),
        Reuse::Copy => Ok(x.empty_contiguous(x.shape(), x.dtype())),
    }
}

/// Checked operands of a call.
struct Input {
    gate_up: CudaTensor,
    dy: CudaTensor,
    rows: usize,
    d_ff: usize,
    strides: [usize; 2],
    is_bf16: bool,
    vector: usize,
}

impl Input {
    fn of(gate_up: &CudaTensor, dy: &CudaTensor) -> Result<Self, KernelError> {
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
        Ok(Self {
            vector: vector_width(is_bf16, &[d_ff, row_stride, dy_stride]),
            strides: [row_stride, dy_stride],
            gate_up,
            dy,
            rows,
            d_ff,
            is_bf16,
        })
    }

    fn grid(&self) -> [usize; 3] {
        [self.rows, self.d_ff.div_ceil(THREADS * self.vector), 1]
    }

    fn params(&self) -> SwigluBackwardParams {
        params!(SwigluBackwardParams {
            d_ff: self.d_ff,
            row_stride: self.strides[0],
            dy_stride: self.strides[1],
        })
    }
}

/// The specialisation for an element type and a vector width (1, or 16 bytes' worth).
pub(crate) fn swiglu_backward_kernel(is_bf16: bool, vector: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("IS_BF16", is_bf16 as u8)
        .define("VECTOR", vector)
        .threads(THREADS)
}

/// As [`swiglu_backward_kernel`], with the output beside the gradient.
pub(crate) fn swiglu_backward_with_output_kernel(is_bf16: bool, vector: usize) -> SourceKernel {
    swiglu_backward_kernel(is_bf16, vector).define("HAS_OUTPUT", 1)
}
