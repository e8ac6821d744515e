//! Ops composed of others, each one node of the autodiff graph.
mod attention_layer;
mod feed_forward;
mod product;
pub(crate) mod reference;
mod residual;
mod seed_gradient;

pub use attention_layer::{AttentionLayer, AttentionLayerCall, LayerTokens, MaskAndRanks, attention_layer};
pub use feed_forward::{FeedForward, feed_forward};
pub use residual::Residual;
pub use seed_gradient::seed_gradient;

use crate::SieveBackend;
use burn::tensor::Tensor;
use sieve_core::Keeping;

/// Gradients of a layer's two weights from earlier micro-batches, f32: the backward pass adds to them, in place where
/// it can, and returns the sums. `None`: it returns new gradients.
pub type WeightSums<B> = [Option<Tensor<B, 2>>; 2];

/// What a layer's forward pass keeps: nothing where there is no backward pass.
fn kept_by<B: SieveBackend>(keeping: Keeping) -> Keeping {
    match B::HAS_GRAPH {
        true => keeping,
        false => Keeping::NOTHING,
    }
}
