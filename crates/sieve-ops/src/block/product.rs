//! A product of a block in the numbers that the block multiplies in.
use super::residual::{Residual, norm_gradient};
use crate::DeviceBackend;
use crate::fp8::{Fp8Kept, ProductPrecision};
use crate::linear::LinearBackend;
use crate::norm::RmsNormCall;
use crate::tensors::Float;

/// `x wᵀ [+ residual]`; in eight-bit floats also the rounded operands, from which its gradients are computed. Other
/// products read x again, which the block makes once more.
pub(super) fn product<B: DeviceBackend>(
    precision: ProductPrecision,
    x: Float<B>,
    weight: Float<B>,
    residual: Option<Float<B>>,
) -> (Float<B>, Option<Fp8Kept<B>>) {
    match (precision, residual) {
        (ProductPrecision::Fp8, residual) => {
            let (y, kept) = B::fp8_linear(x, weight, residual);
            (y, Some(kept))
        }
        (ProductPrecision::Tensors, Some(residual)) => (B::linear_add(x, weight, residual), None),
        (ProductPrecision::Tensors, None) => (<B as LinearBackend>::linear(x, weight), None),
    }
}

/// `[dx, dweight]` of a product whose x is at hand.
pub(super) fn product_gradients<B: DeviceBackend>(
    fp8: Option<Fp8Kept<B>>,
    x: Float<B>,
    weight: Float<B>,
    dy: Float<B>,
) -> [Float<B>; 2] {
    match fp8 {
        Some(kept) => B::fp8_linear_backward(kept, dy),
        None => [
            B::linear_input_gradient(weight, dy.clone()),
            B::linear_weight_gradient(x, dy),
        ],
    }
}

/// Gradients of x, the norm's weight and the product's weight, of the norm and the product that begin a layer whose
/// output had the gradient `dy`; `d_product` is that of the product.
pub(super) fn begin_gradients<B: DeviceBackend>(
    norm: RmsNormCall<B>,
    (fp8, weight): (Option<Fp8Kept<B>>, Float<B>),
    d_product: Float<B>,
    (residual, dy): (Residual, Float<B>),
) -> [Float<B>; 3] {
    let Some(kept) = fp8 else {
        let d_normed = B::linear_input_gradient(weight, d_product.clone());
        let (dx, d_norm, normed) = norm_gradient::<B>(norm, d_normed, (residual, dy));
        return [dx, d_norm, B::linear_weight_gradient(normed, d_product)];
    };
    let [d_normed, d_weight] = B::fp8_linear_backward(kept, d_product);
    let beside = (residual == Residual::Stream).then_some(dy);
    let (dx, d_norm) = B::rms_norm_backward(norm, d_normed, beside);
    [dx, d_norm, d_weight]
}
