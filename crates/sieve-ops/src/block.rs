//! Whole layers as single nodes of the autodiff graph.
//!
//! The nodes keep the residual stream, the packed projections and the attention's output. Normed streams, the gated
//! activation and rotated heads are recomputed in the backward pass, or kept where the memory plan finds room on a
//! GPU. A block that is recomputed leaves out its last GEMM, because the output was already read (`PassFor`).
//! Attention without norms of queries and keys, or with biases (Llama, Qwen2), is several ops instead.
mod attention_layer;
mod feed_forward;
mod gemm;
mod seed_gradient;

pub use attention_layer::{
    AttentionLayer, AttentionLayerOutput, KeptAttention, LayerTokens, MaskAndRanks, attention_layer,
};
pub use feed_forward::{FeedForward, feed_forward};
pub use seed_gradient::seed_gradient;

use crate::SieveBackend;
use burn::tensor::Tensor;
use sieve_core::Keeping;

/// Gradients of a layer's two projections, summed over earlier micro-batches, f32. The backward pass adds its
/// gradients, in place where it can, and returns the sums. `None`: it returns its gradients alone.
pub type WeightSums<B> = [Option<Tensor<B, 2>>; 2];

/// Whether a layer adds its output to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// The output is `x + layer(x)`.
    Stream,
    /// The output is `layer(x)`, without x.
    None,
}

/// What a pass over a layer is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PassFor {
    /// Its output, and its backward pass if there is one.
    #[default]
    Output,
    /// Its backward pass alone, as of a block that is recomputed: the output was read before. What only the output
    /// needs may be left out, and its values mean nothing then.
    Gradients,
}

/// `keeping`, or nothing where there is no backward pass.
fn kept_by<B: SieveBackend>(keeping: Keeping) -> Keeping {
    if B::HAS_GRAPH { keeping } else { Keeping::NOTHING }
}
