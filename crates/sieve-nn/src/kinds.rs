//! The Burn layer of each kind of attention and its cache, in one file a kind.
//!
//! [`KindLayer`] is the trait of layers, [`Attention::as_layer`] its one dispatch; [`KindCache`] and
//! [`LayerCache::as_cache`] are the same of caches. All other files ask the traits and never which kind it is. The rest
//! of a kind's definition is in the file of the same name in sieve-core's `kinds`.
//!
//! A kind's attention is written once, as `KindAttention`, from which `layer.rs` makes the forward pass for whole rows,
//! parts of rows, shared prompts and caches; where a layer is one op, `layer_op` names its operands.

mod chosen_blocks;
mod cowindow;
mod dense;
mod dynamic_mask;
mod infllm;
mod latent;
mod moba;
mod msa;
mod native_sparse;
mod window;

pub use chosen_blocks::{ChosenBlocksAttention, ChosenCache};
pub use dense::{MultiHeadAttention, RecentCache};
pub use dynamic_mask::{DynamicMaskAttention, SlotCache};
pub use latent::{LatentAttention, LatentCache};
pub use msa::Indexer;
pub use native_sparse::{BlockCache, BlockMlp, NativeSparseAttention};

use crate::pass::{LayerContext, LayerOutput, PassState};
use crate::{LayerCaches, RmsNorm, WeightInit};
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::ModelShape;
use sieve_core::kinds::Dense;
use sieve_ops::{AttentionLayer, AttentionSpec, RowsOf, SelectorCache, SieveBackend, TokenAttention, TokenCache};

/// The forward pass of an attention layer, which `layer.rs` makes of every kind's attention.
pub trait Forward<B: SieveBackend> {
    /// `residual` plus the attention's output; both `[batch, seq_len, d_model]`, as x, which comes after the layer's
    /// norm.
    ///
    /// With `caches` the tokens of x follow those in the caches, which are extended: one cache of all rows, or one
    /// cache per row. An empty cache must be one of all rows. What is read from a cache gets no gradient.
    fn forward(
        &self,
        x: Tensor<B, 3>,
        residual: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
        caches: Option<&mut LayerCaches<'_, B::Inner>>,
    ) -> LayerOutput<B>;
}

/// The attention layer of a kind.
pub trait KindLayer<B: SieveBackend>: Forward<B> {
    /// Operands of [`sieve_ops::attention_layer`], which computes `norm` and this layer as one op and keeps less for
    /// the backward pass than [`Forward`]. `None` where the layer needs several ops.
    fn layer_op(
        &self,
        _norm: &RmsNorm<B>,
        _context: &LayerContext<'_, B>,
        _state: &mut PassState<B>,
    ) -> Option<(AttentionLayer<B>, AttentionSpec)> {
        None
    }

    /// Whether the scores of keys are a bias that is clamped, [`LayerOutput::clamped_scores`].
    fn clamps_scores(&self) -> bool {
        false
    }

    /// The layer's operands for [`sieve_ops::token_step`]; `None` where it does not support the layer.
    fn for_token_step(&self) -> Option<TokenAttention<B>>;

    /// The attention weight of each key for each query of one document, `[num_heads, seq_len, seq_len]`, keys last.
    ///
    /// Each row sums to 1, with sinks to less. With NSA it sums to the sum of the query's gates, and the weight of a
    /// compressed block is spread evenly over its tokens. `state` must be the one of the whole pass, because an earlier
    /// layer may have chosen the blocks that this layer reads.
    ///
    /// # Shapes
    /// - x: `[1, seq_len, d_model]`, after the layer's norm
    ///
    /// # Panics
    /// With more than one row in `x`.
    fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>, state: &PassState<B>) -> Tensor<B, 3>;

    /// As [`weights`](Self::weights), but the weights of dense attention with the same queries and keys and without
    /// DMA's bias. `None` except for kinds that choose keys under one softmax.
    fn dense_weights(&self, _x: Tensor<B, 3>, _context: &LayerContext<'_, B>) -> Option<Tensor<B, 3>> {
        None
    }

    /// The blocks that each query reads, `[batch, seq_len, choosers, blocks]`: ascending, then -1. A chooser is a head
    /// that chooses blocks for itself. `None` for kinds without blocks, which do not call `x`, and where queries read
    /// all keys. `state` as in [`weights`](Self::weights).
    fn block_indices(
        &self,
        _x: &dyn Fn() -> Tensor<B, 3>,
        _context: &LayerContext<'_, B>,
        _state: &PassState<B>,
    ) -> Option<Tensor<B, 4, Int>> {
        None
    }

    /// DMA's scores of the keys (its ranks without recency), `[batch, num_kv_heads, seq_len]`, for x after the layer's
    /// norm; `None` for kinds that do not score single keys.
    fn key_scores(
        &self,
        _x: &dyn Fn() -> Tensor<B, 3>,
        _context: &LayerContext<'_, B>,
    ) -> Option<Result<Tensor<B::Inner, 3>, String>> {
        None
    }

    /// The layer, if it is dense or has a sliding window.
    fn as_grouped(&self) -> Option<&MultiHeadAttention<B>> {
        None
    }
}

/// The cache of a layer after a prompt, implemented for what each kind of attention stores.
pub(crate) trait KindCache<B: Backend> {
    /// Earlier keys per head that the next query may see.
    fn num_keys(&self) -> usize;

    /// The cache as an operand of [`sieve_ops::token_step`]; `None` where a selector reads a share of its keys.
    fn for_token_step(&mut self) -> Option<TokenCache<'_, B>>;

    /// Counts the token that [`sieve_ops::token_step`] has written.
    fn count_token(&mut self);

    /// A copy with the rows that `rows` names: copies of each row, empty rows for texts, or the row of one text. A text
    /// of `tokens` tokens has `tokens` entries in its cache, and room for no more.
    fn rows(&self, rows: RowsOf) -> LayerCache<B>;

    /// Copies `text`, the one-row cache of a prompt of `tokens` tokens, into row `row`. The key of a token goes to its
    /// position, also where a window keeps only the last tokens. What is not stored per token (DMA's slots, pooled and
    /// compressed keys) begins at index 0 of the row.
    fn put(&mut self, row: usize, text: &LayerCache<B>, tokens: usize);
}

/// Builds the layers of a kind; implemented for the kind's sizes.
trait BuildLayer {
    /// A layer of a model of this shape, whose only kind this is, with weights from `init`.
    fn build<B: Backend>(&self, shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Attention<B>;
}

/// An attention layer of one of the kinds.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum Attention<B: Backend> {
    /// Dense causal attention, or a sliding window, with or without keys beyond it.
    Grouped(MultiHeadAttention<B>),
    /// Multi-head latent attention.
    Latent(LatentAttention<B>),
    /// Native sparse attention.
    Branches(NativeSparseAttention<B>),
    /// Dynamic mask attention.
    Ranked(DynamicMaskAttention<B>),
    /// Queries choose blocks of keys.
    Chosen(ChosenBlocksAttention<B>),
}

impl<B: Backend> Attention<B> {
    /// A layer of the kind that `shape.attention` names, with weights from `init`. No other code maps a kind to its
    /// layer.
    pub fn new(shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Self {
        use sieve_core::Attention as Kind;
        match shape.attention {
            Kind::Mha => Dense.build(shape, init, device),
            Kind::Swa(swa) => swa.build(shape, init, device),
            Kind::Mla(mla) => mla.build(shape, init, device),
            Kind::Nsa(nsa) => nsa.build(shape, init, device),
            Kind::Dma(dma) => dma.build(shape, init, device),
            Kind::InfllmV2(infllm) => infllm.build(shape, init, device),
            Kind::Moba(moba) => moba.build(shape, init, device),
            Kind::Msa(msa) => msa.build(shape, init, device),
            Kind::Cowa(cowa) => cowa.build(shape, init, device),
        }
    }
}

impl<B: SieveBackend> Attention<B> {
    /// The layer of the kind.
    pub fn as_layer(&self) -> &dyn KindLayer<B> {
        match self {
            Self::Grouped(layer) => layer,
            Self::Latent(layer) => layer,
            Self::Branches(layer) => layer,
            Self::Ranked(layer) => layer,
            Self::Chosen(layer) => layer,
        }
    }
}

/// Cache of one layer. A call may add any number of tokens, and its output equals the rows of one pass over all tokens.
#[derive(Clone, Debug)]
pub enum LayerCache<B: Backend> {
    /// No token was processed yet.
    Empty,
    /// The most recent keys: all keys for dense attention, at least `window_size` for a sliding window.
    Recent(RecentCache<B>),
    /// The keys that DMA's mask still shows, at most `keep_window_size` per KV head.
    Selected(SlotCache<B>),
    /// Keys and values of NSA's three branches.
    Blocks(BlockCache<B>),
    /// All keys, and the pooled keys or indexer keys by which blocks are chosen.
    Chosen(ChosenCache<B>),
    /// The latents from which MLA computes keys and values.
    Latent(LatentCache<B>),
    /// All keys; for each token a selector chooses which keys it reads.
    Selector(SelectorCache<B>),
}

impl<B: Backend> LayerCache<B> {
    /// Whether no token was processed yet.
    pub fn is_empty(&self) -> bool {
        self.as_cache().is_none()
    }

    /// Earlier keys per head that the next query may see.
    pub fn num_keys(&self) -> usize {
        self.as_cache().map_or(0, KindCache::num_keys)
    }

    /// A copy with the rows that `rows` names, see [`KindCache::rows`].
    pub(crate) fn rows(&self, rows: RowsOf) -> Self {
        self.as_cache().map_or(Self::Empty, |cache| cache.rows(rows))
    }

    /// The cache of the kind; `None` if no token was processed yet.
    fn as_cache(&self) -> Option<&dyn KindCache<B>> {
        Some(match self {
            Self::Empty => return None,
            Self::Recent(cache) => cache,
            Self::Selected(cache) => cache,
            Self::Blocks(cache) => cache,
            Self::Chosen(cache) => cache,
            Self::Latent(cache) => cache,
            Self::Selector(cache) => cache,
        })
    }

    /// As [`as_cache`](Self::as_cache), to change it.
    pub(crate) fn as_cache_mut(&mut self) -> Option<&mut dyn KindCache<B>> {
        Some(match self {
            Self::Empty => return None,
            Self::Recent(cache) => cache,
            Self::Selected(cache) => cache,
            Self::Blocks(cache) => cache,
            Self::Chosen(cache) => cache,
            Self::Latent(cache) => cache,
            Self::Selector(cache) => cache,
        })
    }
}

/// Why [`KindCache::put`] refuses another cache.
const OTHER_CACHE: &str = "both caches must be of one model, without a selector, and filled by a prompt";

#[cfg(test)]
mod tests;
