//! Matrix product with a weight stored as `[out, in]`, the layout of PyTorch and of safetensors checkpoints.
use crate::SieveBackend;
use burn::tensor::{Tensor, TensorPrimitive};

/// `y = x Wᵀ`.
///
/// # Shapes
/// - x: `[.., in]`
/// - weight: `[out, in]`
/// - returns: `[.., out]`
pub fn linear<B: SieveBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 2>,
) -> Tensor<B, D> {
    let y = B::linear_nt(
        x.into_primitive().tensor(),
        weight.into_primitive().tensor(),
    );
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

/// `y = residual + x Wᵀ`; shapes as [`linear`], residual `[.., out]`.
pub fn linear_add<B: SieveBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 2>,
    residual: Tensor<B, D>,
) -> Tensor<B, D> {
    let y = B::linear_nt_add(
        x.into_primitive().tensor(),
        weight.into_primitive().tensor(),
        residual.into_primitive().tensor(),
    );
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

#[cfg(test)]
mod tests;
