//! Ops composed of others, each one node of the autodiff graph.
mod attention_layer;
mod feed_forward;
mod product;
pub(crate) mod reference;
mod residual;
mod seed_gradient;

pub use attention_layer::{
    AttentionLayer, AttentionLayerBackend, AttentionLayerCall, DmaLayer, MaskAndRanks, attention_layer,
};
pub use feed_forward::{FeedForward, FeedForwardBackend, feed_forward};
pub use residual::Residual;
pub use seed_gradient::{SeedBackend, seed_gradient};

use burn::tensor::Tensor;

/// Gradients of a layer's two weights from earlier micro-batches, f32: the backward pass adds to them, in place where
/// it can, and returns the sums. `None`: it returns new gradients.
pub type WeightSums<B> = [Option<Tensor<B, 2>>; 2];
