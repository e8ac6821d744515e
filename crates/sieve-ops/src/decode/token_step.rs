//! One new token of every row through a whole model, as a device may do it in one piece.
use super::{DmaCache, KeyCache, TokenBuffer};
use crate::tensors::tensor;
use crate::{AttentionSpec, DeviceBackend, DmaLayer, NsaBlocks, QkNorm, RotaryEmbedding};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::BlockChoice;

/// A step of a model without residual scales.
#[derive(Debug)]
pub struct TokenStep<'a, B: Backend> {
    /// `[batch, 1]`.
    pub ids: Tensor<B, 2, Int>,
    /// Tokens of every row before this one.
    pub position: usize,
    /// `[vocab_size, d_model]`.
    pub embedding: Tensor<B, 2>,
    /// The model's layers, from the first to the last.
    pub layers: Vec<TokenLayer<B>>,
    /// The layers' caches, each of all rows.
    pub caches: Vec<TokenCache<'a, B>>,
    /// Weight of the norm before the output projection, `[d_model]`.
    pub norm: Tensor<B, 1>,
    /// `[vocab_size, d_model]`.
    pub output: Tensor<B, 2>,
    /// Added to the mean squares of rows of `d_model`.
    pub epsilon: f64,
    /// Tables of more positions than `position`.
    pub rope: &'a RotaryEmbedding<B>,
}

/// Weights of a block.
#[derive(Debug)]
pub struct TokenLayer<B: Backend> {
    /// Before the attention and before the feed-forward layer, `[d_model]`.
    pub norms: [Tensor<B, 1>; 2],
    /// The attention.
    pub attention: TokenAttention<B>,
    /// `[2 * d_ff, d_model]`.
    pub gate_up: Tensor<B, 2>,
    /// `[d_model, d_ff]`.
    pub down: Tensor<B, 2>,
}

/// An attention layer.
#[derive(Debug)]
pub struct TokenAttention<B: Backend> {
    /// `[(num_heads + 2 * num_kv_heads) * head_dim, d_model]`; of latent attention the queries alone.
    pub qkv: Tensor<B, 2>,
    /// Added to the product, `[(num_heads + 2 * num_kv_heads) * head_dim]`; absent but in models like Qwen2.
    pub qkv_bias: Option<Tensor<B, 1>>,
    /// Absent in models like Llama.
    pub qk_norm: Option<QkNorm<B>>,
    /// DMA's inputs of the rank; the cache then holds slots.
    pub dma: Option<DmaLayer<B>>,
    /// Weights that other kinds have beside these.
    pub extra: TokenExtra<B>,
    /// `[d_model, num_heads * head_dim]`.
    pub o: Tensor<B, 2>,
    /// Heads, scale and window.
    pub spec: AttentionSpec,
}

/// What a kind of attention has beside packed queries, keys and values.
#[derive(Debug)]
pub enum TokenExtra<B: Backend> {
    /// Nothing.
    None,
    /// MSA's indexer.
    Indexer {
        /// `[(num_kv_heads + 1) * head_dim, d_model]`, the key's rows last.
        proj: Tensor<B, 2>,
        /// Of its queries and its key.
        norm: QkNorm<B>,
    },
    /// NSA's branches.
    Branches(TokenBranches<B>),
    /// Latent attention.
    Latent {
        /// Latent and shared rotated key, `[kv_lora_rank + rope_dim, d_model]`.
        down: Tensor<B, 2>,
        /// Of the latent, `[kv_lora_rank]`.
        norm: Tensor<B, 1>,
        /// `[num_heads * 2 * head_dim, kv_lora_rank]`, per head the key first.
        up: Tensor<B, 2>,
        /// Rotated columns of a key.
        rope_dim: usize,
    },
}

/// Weights of NSA's branches; the packed projection is the window's, and of all where keys and values are shared.
#[derive(Debug)]
pub struct TokenBranches<B: Backend> {
    /// Keys and values of the compressed branch, `[2 * num_kv_heads * head_dim, d_model]`.
    pub compress_kv: Option<Tensor<B, 2>>,
    /// Keys and values of the selected branch, likewise.
    pub select_kv: Option<Tensor<B, 2>>,
    /// The compression MLPs of keys and of values: position embeddings `[size, head_dim]` and weights
    /// `[hidden, size * head_dim]`, `[head_dim, hidden]`; `None` where blocks are means. With an MLP the branch's
    /// queries and keys are not rotated.
    pub mlp: Option<[[Tensor<B, 2>; 3]; 2]>,
    /// `[num_heads * 3, d_model]`.
    pub gate: Tensor<B, 2>,
    /// `[num_heads * 3]`.
    pub gate_bias: Tensor<B, 1>,
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
        /// Means of keys, `[batch, num_kv_heads, room, head_dim]`, or an indexer's keys, of one head; the caller counts
        /// those that have ended.
        pooled: &'a mut TokenBuffer<B, 4>,
        /// Pooled keys, blocks and the rule.
        choice: BlockChoice,
    },
    /// NSA's.
    Branches {
        /// Compressed keys and values; the caller counts those that have ended.
        compressed: &'a mut KeyCache<B>,
        /// All tokens of the selected branch.
        selected: &'a mut KeyCache<B>,
        /// At least the window's.
        window: &'a mut KeyCache<B>,
        /// Of the compressed branch at least the last `compress_block_size` tokens.
        tail: &'a mut KeyCache<B>,
        /// Compressed and selected blocks.
        blocks: NsaBlocks,
    },
    /// Latents and rotated keys, `[batch, room, kv_lora_rank + rope_dim]`, and where keys are normed their factors,
    /// f32 `[batch, room, num_heads]`.
    Latents(&'a mut TokenBuffer<B, 3>, Option<&'a mut TokenBuffer<B, 3>>),
}

/// Logits of the next token of every row, `[batch, vocab_size]`; appends the token's keys to the caches, whose lengths
/// the caller updates. The step is captured in `graph` for [`repeat_token_step`]. `None`, with nothing changed, where
/// the device has no such path for the model.
pub fn token_step<B: DeviceBackend>(step: TokenStep<'_, B>, graph: &mut B::StepGraph) -> Option<Tensor<B, 2>> {
    B::token_step(step, graph).map(tensor)
}

/// The step in `graph` for other tokens, ids `[batch, 1]`, at the next position: as [`token_step`]. `None` where
/// `graph` is empty or one of its buffers is full. Nothing else may write to the caches between two steps.
pub fn repeat_token_step<B: DeviceBackend>(
    graph: &mut B::StepGraph,
    ids: &Tensor<B, 2, Int>,
    position: usize,
) -> Option<Tensor<B, 2>> {
    B::repeat_token_step(graph, ids.clone().into_primitive(), position).map(tensor)
}
