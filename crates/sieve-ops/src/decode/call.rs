//! Calls of decoding ops, and the layers of a decoding step.
use super::{DmaCache, KeyCache, SelectorCache, TokenBuffer};
use crate::tensors::Float;
use crate::{AttentionSpec, DmaLayer, QkNorm, RotaryEmbedding};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::{BlockChoice, KernelPolicy, NsaBlocks};

/// What [`dma_decode`](crate::dma_decode) reads of one new token of every sequence.
#[derive(Clone, Debug)]
pub struct DmaToken<B: Backend> {
    /// `[batch, num_heads, head_dim]`.
    pub q: Float<B>,
    /// `[batch, num_kv_heads, head_dim]`.
    pub k: Float<B>,
    /// `[batch, num_kv_heads, head_dim]`.
    pub v: Float<B>,
    /// Rank of the key, `[batch, num_kv_heads]`.
    pub rank: Float<B>,
    /// Position of the token, larger than any in the cache.
    pub position: usize,
    /// Which kernels may be taken: with keys by epochs, those with the order of whole rows.
    pub policy: KernelPolicy,
}

/// Tokens of each row before a step's.
#[derive(Clone, Copy, Debug)]
pub enum TokensBefore<'a> {
    /// All rows have this many tokens.
    Same(usize),
    /// Each row's own number. The caches are [`RowsOf::Texts`](crate::RowsOf::Texts): they have room for all tokens of
    /// every row, where a token lies at its position.
    Each(&'a [usize]),
}

/// Operands of one decoding step of a model without residual scales.
#[derive(Debug)]
pub struct TokenStep<'a, B: Backend> {
    /// Token id of each row, `[batch, 1]`.
    pub ids: Tensor<B, 2, Int>,
    /// Tokens of each row before this one.
    pub before: TokensBefore<'a>,
    /// Weight of the token embedding, `[vocab_size, d_model]`.
    pub embedding: Tensor<B, 2>,
    /// The model's layers, from the first to the last.
    pub layers: Vec<TokenLayer<B>>,
    /// The layers' caches, each of all rows.
    pub caches: Vec<TokenCache<'a, B>>,
    /// Weight of the norm before the output projection, `[d_model]`.
    pub norm: Tensor<B, 1>,
    /// Weight of the output projection, `[vocab_size, d_model]`.
    pub output: Tensor<B, 2>,
    /// Epsilon of the norms of width `d_model`.
    pub epsilon: f64,
    /// Rotary tables for every position that the step's tokens may have.
    pub rope: &'a RotaryEmbedding<B>,
    /// Which kernels the step may take: with sums in a fixed order, those with the order of whole rows.
    pub policy: KernelPolicy,
}

/// Weights of one block: attention and feed-forward layer.
#[derive(Debug)]
pub struct TokenLayer<B: Backend> {
    /// Weights of the norms before the attention and before the feed-forward layer, `[d_model]`.
    pub norms: [Tensor<B, 1>; 2],
    /// Weights of the attention layer.
    pub attention: TokenAttention<B>,
    /// Packed gate and up weights, `[2 * d_ff, d_model]`.
    pub gate_up: Tensor<B, 2>,
    /// Weight of the down projection, `[d_model, d_ff]`.
    pub down: Tensor<B, 2>,
    /// Whether queries and keys are rotated; otherwise the layer reads [`RotaryEmbedding::still`].
    pub rotates: bool,
}

/// Weights and sizes of an attention layer.
#[derive(Debug)]
pub struct TokenAttention<B: Backend> {
    /// `[(num_heads + 2 * num_kv_heads) * head_dim, d_model]`; of latent attention the queries alone.
    pub qkv: Tensor<B, 2>,
    /// Bias of the projection, `[(num_heads + 2 * num_kv_heads) * head_dim]`, in models like Qwen2; `None` in others.
    pub qkv_bias: Option<Tensor<B, 1>>,
    /// Norms of queries and keys; `None` in models without them, like Llama.
    pub qk_norm: Option<QkNorm<B>>,
    /// What DMA computes ranks from; its cache is [`TokenCache::Slots`]. `None` for other kinds.
    pub dma: Option<DmaLayer<B>>,
    /// Further weights of other kinds of attention.
    pub extra: TokenExtra<B>,
    /// Weight of the output projection, `[d_model, num_heads * head_dim]`.
    pub o: Tensor<B, 2>,
    /// Sinks, `[num_heads]`, as in [`attention_with_sinks`](crate::attention_with_sinks); `None`: no sinks.
    pub sinks: Option<Tensor<B, 1>>,
    /// Numbers of heads, softmax scale and window.
    pub spec: AttentionSpec,
}

/// Weights that only one kind of attention has.
#[derive(Debug)]
pub enum TokenExtra<B: Backend> {
    /// The attention kind has no further weights.
    None,
    /// The weights of MSA's indexer.
    Indexer {
        /// `[(num_kv_heads + 1) * head_dim, d_model]`, the key's rows last.
        proj: Tensor<B, 2>,
        /// Norms of its queries and its key.
        norm: QkNorm<B>,
    },
    /// The weights of NSA's three branches.
    Branches(TokenBranches<B>),
    /// The weights of multi-head latent attention.
    Latent {
        /// Projection to the latent and the shared rotated key, `[kv_lora_rank + rope_dim, d_model]`.
        down: Tensor<B, 2>,
        /// Weight of the latent's norm, `[kv_lora_rank]`.
        norm: Tensor<B, 1>,
        /// From the latent to keys and values, `[num_heads * 2 * head_dim, kv_lora_rank]`: each head's key, then its
        /// value.
        up: Tensor<B, 2>,
        /// Columns of a key that RoPE rotates.
        rope_dim: usize,
    },
}

/// Weights of NSA's branches. Queries come from [`TokenAttention::qkv`], as do the keys and values of the window branch
/// and of any branch without weights here.
#[derive(Debug)]
pub struct TokenBranches<B: Backend> {
    /// Projection to the compressed branch's keys and values, `[2 * num_kv_heads * head_dim, d_model]`.
    pub compress_kv: Option<Tensor<B, 2>>,
    /// Projection to the selected branch's keys and values, of the same shape.
    pub select_kv: Option<Tensor<B, 2>>,
    /// The compression MLPs of keys and of values, each of position embeddings `[size, head_dim]` and two weights,
    /// `[hidden, size * head_dim]` and `[head_dim, hidden]`; `None`: blocks are means. With MLPs the branch's queries
    /// and keys are not rotated.
    pub mlp: Option<[[Tensor<B, 2>; 3]; 2]>,
    /// Projection to the branches' gates, `[num_heads * 3, d_model]`.
    pub gate: Tensor<B, 2>,
    /// Bias of the gates, `[num_heads * 3]`.
    pub gate_bias: Tensor<B, 1>,
}

/// A layer's cache of earlier tokens, by attention kind.
#[derive(Debug)]
pub enum TokenCache<'a, B: Backend> {
    /// All keys, or at least the window's.
    Recent(&'a mut KeyCache<B>),
    /// DMA's fixed-size cache; without DMA, the cache of [`heavy_decode`](crate::heavy_decode).
    Slots(&'a mut DmaCache<B>),
    /// All keys; a selector chooses which keys a token reads. [`SelectorCache::is_fixed`] is true.
    Selector(&'a mut SelectorCache<B>),
    /// All keys, in blocks from which queries choose.
    Chosen {
        /// Keys and values of all tokens.
        keys: &'a mut KeyCache<B>,
        /// Means of the blocks' keys, `[batch, num_kv_heads, room, head_dim]`, or an indexer's keys, with one head. The
        /// step writes the mean of a block that ends, and the caller counts it.
        pooled: &'a mut TokenBuffer<B, 4>,
        /// How blocks are pooled, scored and chosen.
        choice: BlockChoice,
    },
    /// The caches of NSA's three branches.
    Branches {
        /// Compressed keys and values. The step writes the pair of a block that ends, and the caller counts the pairs.
        compressed: &'a mut KeyCache<B>,
        /// Keys and values of the selected branch, all tokens.
        selected: &'a mut KeyCache<B>,
        /// At least the last keys of the window branch that its window holds.
        window: &'a mut KeyCache<B>,
        /// At least the last `compress_block_size` uncompressed keys of the compressed branch.
        tail: &'a mut KeyCache<B>,
        /// Block sizes of the compressed and the selected branch.
        blocks: NsaBlocks,
    },
    /// Latents with rotated keys, `[batch, room, kv_lora_rank + rope_dim]`. Where keys are normed, also the factors of
    /// their norms, f32 `[batch, room, num_heads]`.
    Latents(&'a mut TokenBuffer<B, 3>, Option<&'a mut TokenBuffer<B, 3>>),
}
