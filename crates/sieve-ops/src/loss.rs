//! Output projection and cross-entropy in one op: the logits of all tokens are never held at once.
mod autodiff;
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{LossBackend, LossGradients};

use crate::tensors::{primitive, tensor};
use burn::tensor::{Int, Tensor};

/// A label that takes no part in the loss.
pub const IGNORE_LABEL: i32 = -100;

/// Summed cross-entropy in nats, `[1]`: `sum over labelled tokens of lse(h Wᵀ) - (h Wᵀ)[label]`.
///
/// # Shapes
/// - h: `[tokens, d_model]`
/// - weight: `[vocab_size, d_model]`
/// - labels: `[tokens]`, [`IGNORE_LABEL`] where there is none
pub fn linear_cross_entropy<B: LossBackend>(
    h: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    labels: Tensor<B, 1, Int>,
) -> Tensor<B, 1> {
    let labels = labels.into_primitive();
    tensor(B::linear_cross_entropy(primitive(h), primitive(weight), labels))
}

/// Cross-entropy of every token in nats, `[tokens]`; zero where the label is [`IGNORE_LABEL`]. Shapes as above.
pub fn token_losses<B: LossBackend>(h: Tensor<B, 2>, weight: Tensor<B, 2>, labels: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    let labels = labels.into_primitive();
    tensor(B::token_losses(primitive(h), primitive(weight), labels))
}
