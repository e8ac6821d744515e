//! Output projection and cross-entropy in one op: the logits of all tokens are never held at once.
use crate::SieveBackend;
use burn::tensor::{Int, Tensor, TensorPrimitive};

/// A label that takes no part in the loss.
pub const IGNORE_LABEL: i32 = -100;

/// Summed cross-entropy in nats, `[1]`: `sum over labelled tokens of lse(h Wᵀ) - (h Wᵀ)[label] + z_loss * lse²`.
///
/// # Shapes
/// - h: `[tokens, d_model]`
/// - weight: `[vocab_size, d_model]`
/// - labels: `[tokens]`, [`IGNORE_LABEL`] where there is none
pub fn linear_cross_entropy<B: SieveBackend>(
    h: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    labels: Tensor<B, 1, Int>,
    z_loss: f64,
) -> Tensor<B, 1> {
    let loss = B::linear_cross_entropy(
        h.into_primitive().tensor(),
        weight.into_primitive().tensor(),
        labels.into_primitive(),
        z_loss,
    );
    Tensor::from_primitive(TensorPrimitive::Float(loss))
}

/// Cross-entropy of every token in nats, `[tokens]`; zero where the label is [`IGNORE_LABEL`]. Shapes as above.
pub fn token_losses<B: SieveBackend>(
    h: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    labels: Tensor<B, 1, Int>,
) -> Tensor<B, 1> {
    let losses = B::token_losses(
        h.into_primitive().tensor(),
        weight.into_primitive().tensor(),
        labels.into_primitive(),
    );
    Tensor::from_primitive(TensorPrimitive::Float(losses))
}

#[cfg(test)]
mod tests;
