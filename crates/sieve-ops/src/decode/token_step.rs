//! One new token of every row through a whole model, as a device may do it in one piece.
use super::{DmaCache, KeyCache, TokenBuffer};
use crate::RotaryEmbedding;
use crate::attention::AttentionSpec;
use crate::backend::DeviceBackend;
use crate::block::DmaLayer;
use crate::rope::QkNorm;
use crate::tensors::tensor;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::BlockChoice;

/// A step of a model whose layers attend over all keys, a window, DMA's slots or chosen blocks.
#[derive(Debug)]
pub struct TokenStep<'a, B: Backend> {
    /// `[batch, 1]`.
    pub ids: Tensor<B, 2, Int>,
    /// Tokens of every row before this one.
    pub position: usize,
    /// `[vocab_size, d_model]`.
    pub embedding: Tensor<B, 2>,
    /// In order.
    pub layers: Vec<TokenLayer<'a, B>>,
    /// Before the output projection, `[d_model]`.
    pub norm: Tensor<B, 1>,
    /// `[vocab_size, d_model]`.
    pub output: Tensor<B, 2>,
    /// Added to the mean squares of rows of `d_model`.
    pub epsilon: f64,
    /// Tables of more positions than `position`.
    pub rope: &'a RotaryEmbedding<B>,
}

/// Weights and cache of a block.
#[derive(Debug)]
pub struct TokenLayer<'a, B: Backend> {
    /// Before the attention and before the feed-forward layer, `[d_model]`.
    pub norms: [Tensor<B, 1>; 2],
    /// `[(num_heads + 2 * num_kv_heads) * head_dim, d_model]`.
    pub qkv: Tensor<B, 2>,
    /// Added to the product, `[(num_heads + 2 * num_kv_heads) * head_dim]`; absent but in models like Qwen2.
    pub qkv_bias: Option<Tensor<B, 1>>,
    /// Absent in models like Llama.
    pub qk_norm: Option<QkNorm<B>>,
    /// What DMA ranks keys by; the cache holds slots then.
    pub dma: Option<DmaLayer<B>>,
    /// `[d_model, num_heads * head_dim]`.
    pub o: Tensor<B, 2>,
    /// `[2 * d_ff, d_model]`.
    pub gate_up: Tensor<B, 2>,
    /// `[d_model, d_ff]`.
    pub down: Tensor<B, 2>,
    /// Heads, scale and window.
    pub spec: AttentionSpec,
    /// One of all rows.
    pub cache: TokenCache<'a, B>,
}

/// Keys of earlier tokens.
#[derive(Debug)]
pub enum TokenCache<'a, B: Backend> {
    /// All of them, or at least the window's.
    Recent(&'a mut KeyCache<B>),
    /// DMA's.
    Slots(&'a mut DmaCache<B>),
    /// All keys, in blocks from which queries choose.
    Chosen {
        /// Keys and values.
        keys: &'a mut KeyCache<B>,
        /// Means of keys, `[batch, num_kv_heads, room, head_dim]`; the caller counts those that have ended.
        pooled: &'a mut TokenBuffer<B, 4>,
        /// Pooled keys, blocks and the rule.
        choice: BlockChoice,
    },
}

/// Logits of the next token of every row, `[batch, vocab_size]`; writes the token's keys behind the others, where the
/// caller counts them. What was computed is kept in `graph` for [`repeat_token_step`]. `None` where the device has no
/// such path for the model: nothing has changed.
pub fn token_step<B: DeviceBackend>(step: TokenStep<'_, B>, graph: &mut B::StepGraph) -> Option<Tensor<B, 2>> {
    B::token_step(step, graph).map(tensor)
}

/// The step in `graph` for other tokens, ids `[batch, 1]`, at the next position: as [`token_step`]. `None` where there
/// is none, or where a buffer of it is full. Between two steps nobody else writes to the caches.
pub fn repeat_token_step<B: DeviceBackend>(
    graph: &mut B::StepGraph,
    ids: &Tensor<B, 2, Int>,
    position: usize,
) -> Option<Tensor<B, 2>> {
    B::repeat_token_step(graph, ids.clone().into_primitive(), position).map(tensor)
}
