//! fp8 GEMMs on CUDA: Sieve's kernels round the operands, cuBLASLt multiplies them. Refused calls run the reference.
use super::{Fp8Kept, ToQuantise, reference};
use crate::Cuda;
use crate::device::{kernel_or, tensors};
use crate::linear::added;
use crate::swiglu::cuda::{self as swiglu, reuse};
use burn::tensor::TensorMetadata;
use sieve_kernels::DType::{BF16, F32};
use sieve_kernels::step::{
    Fp8Format, Fp8Matrix, Fp8Pair, fp8_quantise, residual_add, swiglu_backward_with_amax, swiglu_forward_with_amax,
};
use sieve_kernels::{CudaPrimitive as Float, CudaTensor, KernelError, MatmulOutput, ToBurn, fp8_matmul, kernel_tensor};

const NAME: &str = "fp8_linear";

pub(crate) fn fp8_linear(x: ToQuantise<Cuda>, weight: Float, residual: Option<Float>) -> (Float, Fp8Kept<Cuda>) {
    let attempt = forward(&x, &weight, residual.as_ref());
    kernel_or(NAME, attempt, || reference::fp8_linear::<Cuda>(x.0, weight, residual))
}

/// `[dx, dweight]`. The reference runs where it ran in the forward pass, whose kept operands then have no scales, or
/// where cuBLASLt refuses the call.
pub(crate) fn fp8_linear_backward(kept: Fp8Kept<Cuda>, dy: ToQuantise<Cuda>, sum: Option<Float>) -> [Float; 2] {
    let total = sum.clone().map(kernel_tensor);
    let reference = |kept| {
        let [dx, dweight] = reference::fp8_linear_backward::<Cuda>(kept, dy.0.clone());
        [dx, added::<Cuda>(sum, dweight)]
    };
    match &kept.scales {
        // The forward pass ran the reference.
        None => reference(kept),
        Some(scales) => {
            let attempt = backward(&kept, scales, &dy, total.as_ref());
            kernel_or("fp8_linear_backward", attempt, || reference(reference::unpacked::<Cuda>(kept, &dy.0)))
        }
    }
}

pub(crate) fn fp8_swiglu(gate_up: Float) -> ToQuantise<Cuda> {
    let attempt = swiglu_forward_with_amax(&kernel_tensor(gate_up.clone()));
    let attempt = attempt.map(|(y, amax)| ToQuantise(y.burn(), Some(amax.burn())));
    kernel_or("fp8_swiglu", attempt, || ToQuantise::new(swiglu::swiglu(gate_up)))
}

/// The gradient of `gate_up`, with the largest magnitudes of its parts; it takes the place of `gate_up` if nothing else
/// reads that.
pub(crate) fn fp8_swiglu_backward(gate_up: Float, dy: Float) -> ToQuantise<Cuda> {
    // The gradient may overwrite `gate_up` if nothing else reads it.
    let is_free = gate_up.can_mut();
    let [x, d] = tensors([&gate_up, &dy]);
    let attempt = swiglu_backward_with_amax(&x, &d, reuse(is_free && x.is_contiguous()));
    let attempt = attempt.map(|(dx, amax)| ToQuantise(dx.burn(), Some(amax.burn())));
    kernel_or("fp8_swiglu_backward", attempt, || ToQuantise::new(swiglu::swiglu_backward(gate_up, dy)))
}

/// The tensor rounded to fp8, row-major and column-major.
fn rounded(x: &ToQuantise<Cuda>, format: Fp8Format) -> Result<Fp8Pair, KernelError> {
    let amax = x.1.clone().map(kernel_tensor);
    fp8_quantise(&kernel_tensor(x.0.clone()), format, amax.as_ref())
}

/// The output, and the rounded operands column by column, as the backward pass reads them.
fn forward(
    x: &ToQuantise<Cuda>,
    weight: &Float,
    residual: Option<&Float>,
) -> Result<(Float, Fp8Kept<Cuda>), KernelError> {
    let mut shape = x.0.shape().to_vec();
    let weight = kernel_tensor(weight.clone());
    let [out, inner] = weight.dims(NAME, "weight")?;
    *shape.last_mut().expect("fp8_quantise wants a width") = out;
    let x = rounded(x, Fp8Format::E4m3)?;
    let weight_amax = None;
    let weight = fp8_quantise(&weight, Fp8Format::E4m3, weight_amax)?;
    let gemm = |output| fp8_matmul(&x.rows, &weight.rows, output);
    let y = match residual.map(|residual| kernel_tensor(residual.clone())) {
        None => gemm(MatmulOutput::New(BF16))?,
        // As in bf16 (`gemm_plus_residual` of `linear.rs`), a GEMM with `inner <= out` adds the residual without extra
        // time.
        Some(residual) if inner <= out => gemm(MatmulOutput::PlusC(&residual))?,
        Some(residual) => {
            let y = gemm(MatmulOutput::New(BF16))?.reshaped(NAME, "y", &shape)?;
            residual_add(&residual, &y)?
        }
    };
    let kept = Fp8Kept {
        x: x.columns.values.burn(),
        weight: weight.columns.values.burn(),
        scales: Some([x.columns.scale.burn(), weight.columns.scale.burn()]),
    };
    Ok((y.reshaped(NAME, "y", &shape)?.burn(), kept))
}

/// `[dx, dweight]`; dweight is added to `sum` in place if there is one.
fn backward(
    kept: &Fp8Kept<Cuda>,
    scales: &[Float; 2],
    dy: &ToQuantise<Cuda>,
    sum: Option<&CudaTensor>,
) -> Result<[Float; 2], KernelError> {
    let [x, weight] = [(&kept.x, &scales[0]), (&kept.weight, &scales[1])].map(|(values, scale)| Fp8Matrix {
        values: kernel_tensor(values.clone()),
        scale: kernel_tensor(scale.clone()),
        format: Fp8Format::E4m3,
    });
    let mut shape = dy.0.shape().to_vec();
    let [inner, _out] = weight.values.dims(NAME, "the weight")?;
    *shape.last_mut().expect("fp8_quantise wants a width") = inner;
    let dy = rounded(dy, Fp8Format::E5m2)?;
    let dx = fp8_matmul(&dy.rows, &weight, MatmulOutput::New(BF16))?;
    let output = sum.map_or(MatmulOutput::New(F32), MatmulOutput::AddTo);
    let dweight = fp8_matmul(&dy.columns, &x, output)?;
    Ok([dx.reshaped(NAME, "dx", &shape)?.burn(), dweight.burn()])
}
