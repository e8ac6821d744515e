//! GEMMs of a block, in bf16 or fp8, and the backward pass of the norm and GEMM that begin a layer.
use crate::tensors::{Float, primitive};
use crate::{DeviceBackend, Fp8Kept, GemmPrecision, RmsNormCall, ToQuantise};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::Keeping;

/// What a GEMM keeps for its backward pass.
#[derive(Clone, Debug)]
pub(super) enum Operands<B: Backend> {
    /// Both rounded operands of an fp8 GEMM.
    Fp8(Fp8Kept<B>),
    /// The GEMM's input x.
    X(Float<B>),
    /// Nothing: the block recomputes the input x.
    None,
}

/// `x wᵀ`, plus the residual if there is one.
pub(super) fn gemm<B: DeviceBackend>(
    (precision, keeping): (GemmPrecision, Keeping),
    x: ToQuantise<B>,
    weight: Float<B>,
    residual: Option<Float<B>>,
) -> (Float<B>, Operands<B>) {
    if precision == GemmPrecision::Fp8 {
        let (y, kept) = B::fp8_linear(x, weight, residual);
        return (y, Operands::Fp8(kept));
    }
    let x = x.0;
    let operands = if keeping.recomputable { Operands::X(x.clone()) } else { Operands::None };
    (<B as DeviceBackend>::linear(x, weight, residual), operands)
}

/// A weight, and the sum of earlier gradients that its gradient is added to.
pub(super) struct Weight<B: Backend>(pub(super) Float<B>, pub(super) Option<Float<B>>);

impl<B: Backend> Weight<B> {
    pub(super) fn new(weight: Tensor<B, 2>, sum: Option<Tensor<B, 2>>) -> Self {
        Self(primitive(weight), sum.map(primitive))
    }
}

/// `[dx, dweight]` of a GEMM; `None` where x was not kept.
pub(super) fn gemm_gradients<B: DeviceBackend>(
    operands: Operands<B>,
    Weight(weight, sum): &Weight<B>,
    dy: ToQuantise<B>,
) -> Option<[Float<B>; 2]> {
    match operands {
        Operands::Fp8(kept) => Some(B::fp8_linear_backward(kept, dy, sum.clone())),
        Operands::X(x) => Some([
            B::linear_input_gradient(weight.clone(), dy.0.clone()),
            B::linear_weight_gradient(x, dy.0, sum.clone()),
        ]),
        Operands::None => None,
    }
}

/// Backward pass of the `linear(rms_norm(x))` that begins a layer: gradients of x, the norm's weight and the linear
/// weight. `d_gemm` is the gradient of the GEMM's output; `d_residual`, the gradient of the residual stream if there is
/// one, is added to the gradient of x.
pub(super) fn begin_gradients<B: DeviceBackend>(
    norm: RmsNormCall<B>,
    (operands, weight): (Operands<B>, Weight<B>),
    d_gemm: ToQuantise<B>,
    d_residual: Option<Float<B>>,
) -> [Float<B>; 3] {
    let gradients = gemm_gradients(operands, &weight, d_gemm.clone());
    if let Some([d_normed, d_weight]) = gradients {
        let [dx, d_norm] = B::rms_norm_backward(norm, d_normed, d_residual);
        return [dx, d_norm, d_weight];
    }
    // The norm's output was not kept: the norm's backward pass recomputes it.
    let (Weight(weight, sum), d_gemm) = (weight, d_gemm.0);
    let d_normed = B::linear_input_gradient(weight, d_gemm.clone());
    let [dx, d_norm, normed] = match d_residual {
        Some(d_residual) => B::rms_norm_backward_with_output(norm, d_normed, d_residual),
        None => {
            let (normed, d_residual) = (B::rms_norm(norm.clone()), None);
            let [dx, d_norm] = B::rms_norm_backward(norm, d_normed, d_residual);
            [dx, d_norm, normed]
        }
    };
    [dx, d_norm, B::linear_weight_gradient(normed, d_gemm, sum)]
}
