//! Root-mean-square normalisation (arXiv:1910.07467, eq. 4).
mod autodiff;
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{NormBackend, NormGradients, RmsNormCall};

use crate::tensors::{primitive, tensor};
use burn::tensor::Tensor;

/// `y = x / sqrt(mean(x²) + epsilon) * weight`, the mean over the last dimension and computed in f32.
///
/// # Shapes
/// - x: `[.., d_model]`
/// - weight: `[d_model]`
/// - returns: shape of x
pub fn rms_norm<B: NormBackend, const D: usize>(x: Tensor<B, D>, weight: Tensor<B, 1>, epsilon: f64) -> Tensor<B, D> {
    tensor(B::rms_norm(RmsNormCall {
        x: primitive(x),
        weight: primitive(weight),
        epsilon,
    }))
}
