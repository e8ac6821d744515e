//! One type for the layers of all kinds of attention, and what the layers of a pass share.

pub(crate) mod block_mlp;
pub(crate) mod chosen_blocks;
pub(crate) mod config;
pub(crate) mod dynamic_mask;
pub(crate) mod indexer;
pub(crate) mod latent;
pub(crate) mod multi_head;
pub(crate) mod native_sparse;
pub(crate) mod shared_prompts;
mod weights;

use crate::{LayerCaches, Linear, RmsNorm, WeightInit};
use burn::module::{Module, ParamId};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use chosen_blocks::{ChosenBlocksAttention, LastChoice};
use dynamic_mask::DynamicMaskAttention;
use latent::LatentAttention;
use multi_head::MultiHeadAttention;
use native_sparse::NativeSparseAttention;
use shared_prompts::SharedPrompts;
use sieve_core::{Keeping, ModelShape};
use sieve_ops::{
    AttentionLayer, AttentionSpec, ContextParallel, DeviceBackend, Documents, GemmPrecision, KernelPolicy, LayerTokens,
    RotaryEmbedding, SieveBackend, TokenAttention, WeightSums,
};
use std::cell::RefCell;
use std::collections::HashMap;

/// Operands and settings that all layers of a forward pass share.
#[derive(Clone, Debug)]
pub struct LayerContext<'a, B: Backend> {
    /// Document bounds and positions of the tokens.
    pub documents: &'a Documents<B>,
    /// Positions to rotate by, `[batch, seq_len]`: positions in the documents, plus the cache's length when decoding.
    pub positions: Tensor<B, 2, Int>,
    /// Cosine and sine tables of RoPE.
    pub rope: &'a RotaryEmbedding<B>,
    /// With context parallelism: the whole rows that these tokens are one rank's part of.
    pub parts: Option<&'a ContextParallel>,
    /// With prompts that several endings share: the rows and documents that attention sees in place of `documents`.
    pub shared: Option<&'a SharedPrompts<B>>,
    /// Data type of the GEMMs with the projections, in layers that are one op: feed-forward layers and the attention
    /// layers of [`Attention::Grouped`] and [`Attention::Dma`].
    pub precision: GemmPrecision,
    /// What layers that are one op keep for the backward pass beyond the minimum.
    pub keeping: Keeping,
    /// Which kernels attention may use on a GPU, and in which order backward kernels sum.
    pub policy: KernelPolicy,
    /// Sums of earlier micro-batches' gradients, by weight. A layer takes the sums of its projections out, and its
    /// backward pass adds its gradients to them.
    pub sums: Option<&'a RefCell<HashMap<ParamId, Tensor<B, 2>>>>,
    /// Weight of one token in an indexer's loss, whose gradient the indexer's backward pass computes: 1 / the number of
    /// tokens in an optimizer step, without padding. 0: no such loss.
    pub token_share: f64,
    /// Whether layers with an indexer return its statistics, [`LayerOutput::indexer`].
    pub measures_indexers: bool,
    /// Whether queries of kinds that choose blocks read all earlier keys in this pass instead.
    pub reads_all: bool,
    /// The blocks that layers chose in this pass, for later layers that read the same blocks.
    pub last_choice: LastChoice<B>,
}

impl<'a, B: Backend> LayerContext<'a, B> {
    /// The context of a pass without cache, with default settings.
    pub fn new(documents: &'a Documents<B>, rope: &'a RotaryEmbedding<B>) -> Self {
        Self {
            documents,
            positions: documents.positions.clone(),
            rope,
            parts: None,
            shared: None,
            precision: GemmPrecision::Tensors,
            keeping: Keeping::default(),
            policy: KernelPolicy::default(),
            sums: None,
            token_share: 0.0,
            measures_indexers: false,
            reads_all: false,
            last_choice: LastChoice::default(),
        }
    }
}

impl<B: Backend> LayerContext<'_, B> {
    /// Positions, RoPE tables and documents for [`sieve_ops::attention_layer`].
    pub(crate) fn tokens(&self) -> LayerTokens<'_, B> {
        LayerTokens { positions: self.positions.clone(), rope: self.rope, documents: self.documents, parts: self.parts }
    }

    /// A copy of `spec` with this pass's kernel policy.
    pub(crate) fn under_policy(&self, spec: AttentionSpec) -> AttentionSpec {
        let policy = self.policy;
        AttentionSpec { policy, ..spec }
    }

    /// Takes the gradient sums of two projections out of `sums`.
    pub(crate) fn take_sums(&self, projections: [&Linear<B>; 2]) -> WeightSums<B> {
        projections.map(|linear| self.sums?.borrow_mut().remove(&linear.weight.id))
    }

    /// Calls `attention` with the packed tensor and its documents. With shared prompts it gets rows in which each
    /// prompt is repeated, and the output is mapped back to the tokens of `packed`.
    pub(crate) fn attend(
        &self,
        packed: Tensor<B, 4>,
        attention: impl FnOnce(Tensor<B, 4>, &Documents<B>) -> Tensor<B, 4>,
    ) -> Tensor<B, 4> {
        match self.shared {
            None => attention(packed, self.documents),
            Some(shared) => shared.once(attention(shared.repeat(packed), shared.documents())),
        }
    }
}

/// Width of the rotary tables that the layers of `shape` read: `head_dim`, or MLA's `qk_rope_head_dim`.
pub(crate) fn rope_dim(shape: &ModelShape) -> usize {
    match shape.attention.as_kind().rope_width() {
        0 => shape.head_dim,
        width => width,
    }
}

/// Output of an attention layer, or of a whole block.
#[derive(Clone, Debug)]
pub struct LayerOutput<B: SieveBackend> {
    /// The residual stream with the layer's output added, `[batch, seq_len, d_model]`.
    pub x: Tensor<B, 3>,
    /// DMA's mask, `[batch, num_kv_heads, seq_len]`: the first query that no longer sees the key. `None` for other
    /// kinds and with shared prompts.
    pub expire: Option<Tensor<B, 3, Int>>,
    /// DMA's scores, `[batch, num_kv_heads, seq_len]`, without gradient; `None` where `expire` is, and with a bias that
    /// does not clamp large scores, unlike [`DmaBias::Exp`](sieve_core::DmaBias::Exp).
    pub clamped_scores: Option<Tensor<B, 3>>,
    /// Statistics of an indexer, see [`sieve_ops::index_statistics`]; only with `measures_indexers` in the context.
    pub indexer: Option<Tensor<B::Inner, 1>>,
}

impl<B: SieveBackend> LayerOutput<B> {
    /// The output of a kind without further results.
    fn of(x: Tensor<B, 3>) -> Self {
        Self { x, expire: None, clamped_scores: None, indexer: None }
    }
}

/// An attention layer of one of the kinds.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum Attention<B: Backend> {
    /// Dense causal attention, or a sliding window.
    Grouped(MultiHeadAttention<B>),
    /// Multi-head latent attention.
    Mla(LatentAttention<B>),
    /// Native sparse attention.
    Nsa(NativeSparseAttention<B>),
    /// Dynamic mask attention.
    Dma(DynamicMaskAttention<B>),
    /// InfLLM-V2, MoBA or MSA: queries choose blocks of keys.
    Chosen(ChosenBlocksAttention<B>),
}

impl<B: Backend> Attention<B> {
    /// A layer of the kind that `shape.attention` names, with weights from `init`.
    pub fn new(shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Self {
        use sieve_core::Attention as Kind;
        let chosen = |choice, init: &mut WeightInit| ChosenBlocksAttention::new(shape, choice, init, device);
        match shape.attention {
            Kind::Mha => Self::Grouped(MultiHeadAttention::new(shape, None, init, device)),
            Kind::Swa(swa) => Self::Grouped(MultiHeadAttention::new(shape, Some(swa.sliding_window), init, device)),
            Kind::Mla(mla) => Self::Mla(LatentAttention::new(shape, mla, init, device)),
            Kind::Nsa(nsa) => Self::Nsa(NativeSparseAttention::new(shape, nsa, init, device)),
            Kind::Dma(dma) => Self::Dma(DynamicMaskAttention::new(shape, dma, init, device)),
            Kind::InfllmV2(infllm) => Self::Chosen(chosen(infllm.choice(), init)),
            Kind::Moba(moba) => Self::Chosen(chosen(moba.choice(), init)),
            Kind::Msa(msa) => Self::Chosen(chosen(msa.choice(), init)),
        }
    }
}

impl<B: SieveBackend> Attention<B> {
    /// `residual` plus the attention's output; both `[batch, seq_len, d_model]`.
    pub fn forward(&self, x: Tensor<B, 3>, residual: Tensor<B, 3>, context: &LayerContext<'_, B>) -> LayerOutput<B> {
        match self {
            Self::Grouped(layer) => LayerOutput::of(layer.forward(x, residual, context)),
            Self::Mla(layer) => LayerOutput::of(residual + layer.forward(x, context)),
            Self::Nsa(layer) => LayerOutput::of(residual + layer.forward(x, context)),
            Self::Dma(layer) => layer.forward(x, residual, context),
            Self::Chosen(layer) => layer.forward(x, residual, context),
        }
    }

    /// Operands of [`sieve_ops::attention_layer`], which computes `norm` and this layer as one op and keeps less for
    /// the backward pass than [`forward`](Self::forward). `None` where the layer needs several ops.
    pub(crate) fn layer_op(
        &self,
        norm: &RmsNorm<B>,
        context: &LayerContext<'_, B>,
    ) -> Option<(AttentionLayer<B>, AttentionSpec)> {
        // With shared prompts attention sees other rows than the projections.
        if context.shared.is_some() {
            return None;
        }
        match self {
            Self::Grouped(layer) => Some((layer.qkv.layer_op(norm, &layer.o_proj, context)?, layer.spec())),
            Self::Dma(layer) => {
                let dma = Some(layer.dma_layer());
                let operands = layer.qkv.layer_op(norm, &layer.o_proj, context)?;
                Some((AttentionLayer { dma, ..operands }, layer.spec()))
            }
            Self::Mla(_) | Self::Nsa(_) | Self::Chosen(_) => None,
        }
    }

    /// The layer's operands for [`sieve_ops::token_step`]; `None` where it does not support the layer.
    pub(crate) fn for_token_step(&self) -> Option<TokenAttention<B>> {
        match self {
            Self::Grouped(layer) => Some(layer.qkv.for_token_step(&layer.o_proj, layer.spec())),
            Self::Mla(layer) => Some(layer.for_token_step()),
            Self::Nsa(layer) => Some(layer.for_token_step()),
            Self::Dma(layer) => Some(layer.for_token_step()),
            Self::Chosen(layer) => layer.for_token_step(),
        }
    }

    /// The attention weight of each key for each query of one document, `[num_heads, seq_len, seq_len]`, keys last.
    ///
    /// Each row sums to 1. With NSA it sums to the sum of the query's gates, and the weight of a compressed block is
    /// spread evenly over its tokens. `context` must be the one of the whole pass, because an earlier layer may have
    /// chosen the blocks that this layer reads.
    ///
    /// # Shapes
    /// - x: `[1, seq_len, d_model]`, after the layer's norm
    ///
    /// # Panics
    /// With more than one row in `x`.
    pub fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        match self {
            Self::Grouped(layer) => weights::dense(&layer.qkv, layer.spec(), x, context),
            Self::Mla(layer) => layer.weights(x, context),
            Self::Nsa(layer) => layer.weights(x, context),
            Self::Dma(layer) => layer.weights(x, context),
            Self::Chosen(layer) => layer.weights(x, context),
        }
    }

    /// The blocks that each query reads, `[batch, seq_len, choosers, blocks]`: ascending, then -1. A chooser is a head
    /// that chooses blocks for itself. `None` for kinds without blocks, which do not call `x`, and where queries read
    /// all keys.
    pub fn block_indices(
        &self,
        x: impl FnOnce() -> Tensor<B, 3>,
        context: &LayerContext<'_, B>,
    ) -> Option<Tensor<B, 4, Int>> {
        match self {
            Self::Nsa(layer) => Some(layer.block_indices(x(), context)),
            Self::Chosen(layer) => layer.block_indices(x(), context),
            Self::Grouped(_) | Self::Mla(_) | Self::Dma(_) => None,
        }
    }

    /// The attention's output without the residual, `[batch, seq_len, d_model]`. Reads and extends one cache of all
    /// rows, or one cache per row, by any number of tokens. An empty cache must be one of all rows.
    pub fn forward_cached(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        caches: &mut LayerCaches<'_, B>,
    ) -> Tensor<B, 3>
    where
        B: DeviceBackend,
    {
        match self {
            Self::Grouped(layer) => layer.forward_cached(x, context, caches),
            Self::Mla(layer) => layer.forward_cached(x, context, caches),
            Self::Nsa(layer) => layer.forward_cached(x, context, caches),
            Self::Dma(layer) => layer.forward_cached(x, context, caches),
            Self::Chosen(layer) => layer.forward_cached(x, context, caches),
        }
    }
}

#[cfg(test)]
mod tests;
