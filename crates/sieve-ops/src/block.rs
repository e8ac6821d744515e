//! Ops composed of others, each one node of the autodiff graph.
mod attention_layer;
mod feed_forward;
mod product;
pub(crate) mod reference;
mod residual;
mod seed_gradient;

pub use attention_layer::{
    AttentionLayer, AttentionLayerBackend, AttentionLayerCall, DmaLayer, attention_layer,
};
pub use feed_forward::{FeedForward, FeedForwardBackend, feed_forward};
pub use residual::Residual;
pub use seed_gradient::{SeedBackend, seed_gradient};
