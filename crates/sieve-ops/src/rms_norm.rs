//! Root-mean-square normalisation (arXiv:1910.07467, eq. 4).
use crate::SieveBackend;
use burn::tensor::{Tensor, TensorPrimitive};

/// `y = x / sqrt(mean(x²) + epsilon) * weight`, the mean over the last dimension and computed in f32.
///
/// # Shapes
/// - x: `[.., d_model]`
/// - weight: `[d_model]`
/// - returns: shape of x
pub fn rms_norm<B: SieveBackend, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 1>,
    epsilon: f64,
) -> Tensor<B, D> {
    let y = B::rms_norm(
        x.into_primitive().tensor(),
        weight.into_primitive().tensor(),
        epsilon,
    );
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

#[cfg(test)]
mod tests;
