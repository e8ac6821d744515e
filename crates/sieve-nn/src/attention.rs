//! The attention kinds behind one interface.

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
use sieve_core::model::AttentionForm;
use sieve_core::{Keeping, ModelShape};
use sieve_ops::{
    AttentionLayer, AttentionSpec, ContextParallel, DeviceBackend, Documents, GemmPrecision, KernelPolicy, LayerTokens,
    RotaryEmbedding, SieveBackend, TokenAttention, WeightSums,
};
use std::cell::RefCell;
use std::collections::HashMap;

/// What every layer of a forward pass shares.
#[derive(Clone, Debug)]
pub struct LayerContext<'a, B: Backend> {
    /// Document bounds of the rows.
    pub documents: &'a Documents<B>,
    /// Positions to rotate by, `[batch, seq_len]`; those of the documents, shifted by the cache's length when decoding.
    pub positions: Tensor<B, 2, Int>,
    /// Rotary tables.
    pub rope: &'a RotaryEmbedding<B>,
    /// Context parallelism: the whole rows, where these tokens are one part of each.
    pub parts: Option<&'a ContextParallel>,
    /// Where one prompt stands before several endings: what the attention sees in place of `documents`.
    pub shared: Option<&'a SharedPrompts<B>>,
    /// Data type of the projections' GEMMs (bf16 or fp8) where a layer is one op: the feed-forward layers, and
    /// attention but for latent and native sparse.
    pub precision: GemmPrecision,
    /// What those layers leave their backward pass beside the least.
    pub keeping: Keeping,
    /// Which kernels attention takes on a GPU, and how these sum.
    pub policy: KernelPolicy,
    /// Gradients of earlier micro-batches by weight. A layer takes those of its projections, and its backward pass
    /// returns them with its own gradients added.
    pub sums: Option<&'a RefCell<HashMap<ParamId, Tensor<B, 2>>>>,
    /// Weight of one token in layers' own losses (an indexer's), which their backward pass adds to the gradients: one
    /// over the tokens of an optimizer step besides padding. 0: no such loss.
    pub token_share: f64,
    /// Whether layers with an indexer say how well it fits.
    pub measures_indexers: bool,
    /// Whether queries of kinds that choose blocks read all keys in this pass, as those of dense layers.
    pub reads_all: bool,
    /// What layers chose in this pass, for layers behind them that share their choice.
    pub last_choice: LastChoice<B>,
}

impl<'a, B: Backend> LayerContext<'a, B> {
    /// The context of a pass without cache.
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
    /// Positions, tables and documents, as [`sieve_ops::attention_layer`] takes them.
    pub(crate) fn tokens(&self) -> LayerTokens<'_, B> {
        LayerTokens {
            positions: self.positions.clone(),
            rope: self.rope,
            documents: self.documents,
            parts: self.parts,
        }
    }

    /// An attention call under this pass's policy.
    pub(crate) fn under_policy(&self, spec: AttentionSpec) -> AttentionSpec {
        let policy = self.policy;
        AttentionSpec { policy, ..spec }
    }

    /// Takes out the accumulated weight gradients of two projections.
    pub(crate) fn take_sums(&self, projections: [&Linear<B>; 2]) -> WeightSums<B> {
        projections.map(|linear| self.sums?.borrow_mut().remove(&linear.weight.id))
    }

    /// Attention of a packed tensor over the documents, each prompt repeated where it is shared.
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

/// Width of the rotary tables that the layers of `shape` read: MLA rotates a part of a head of its own.
pub(crate) fn rope_dim(shape: &ModelShape) -> usize {
    match shape.attention {
        sieve_core::Attention::Mla(mla) => mla.qk_rope_head_dim,
        _ => shape.head_dim,
    }
}

/// Output of an attention layer, or of a whole block.
#[derive(Clone, Debug)]
pub struct LayerOutput<B: SieveBackend> {
    /// The residual stream with the layer's output added, `[batch, seq_len, d_model]`.
    pub x: Tensor<B, 3>,
    /// DMA's mask, `[batch, num_kv_heads, seq_len]`: the first query that no longer sees the key.
    pub expire: Option<Tensor<B, 3, Int>>,
    /// DMA's scores where its bias clamps large ones ([`DmaBias::Exp`](sieve_core::DmaBias::Exp)), without gradient,
    /// `[batch, num_kv_heads, seq_len]`.
    pub clamped_scores: Option<Tensor<B, 3>>,
    /// How well MSA's indexer fits, where the context asks for it; see [`sieve_ops::index_statistics`].
    pub indexer: Option<Tensor<B::Inner, 1>>,
}

impl<B: SieveBackend> LayerOutput<B> {
    /// Of a kind without a mask of its own.
    fn of(x: Tensor<B, 3>) -> Self {
        Self {
            x,
            expire: None,
            clamped_scores: None,
            indexer: None,
        }
    }
}

/// The layer of an attention kind.
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
    /// InfLLM-V2, MoBA and MSA.
    Chosen(ChosenBlocksAttention<B>),
}

impl<B: Backend> Attention<B> {
    /// The kind that `shape` names.
    pub fn new(shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Self {
        match shape.attention.form() {
            AttentionForm::Grouped { window } => Self::Grouped(MultiHeadAttention::new(shape, window, init, device)),
            AttentionForm::Latent(mla) => Self::Mla(LatentAttention::new(shape, mla, init, device)),
            AttentionForm::Branches(nsa) => Self::Nsa(NativeSparseAttention::new(shape, nsa, init, device)),
            AttentionForm::Ranked(dma) => Self::Dma(DynamicMaskAttention::new(shape, dma, init, device)),
            AttentionForm::Blocks(choice) => Self::Chosen(ChosenBlocksAttention::new(shape, choice, init, device)),
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

    /// The layer after `norm` as one op, which keeps less for the backward pass than [`forward`](Self::forward) after
    /// the norm; `None` where the call takes several ops.
    pub(crate) fn layer_op(
        &self,
        norm: &RmsNorm<B>,
        context: &LayerContext<'_, B>,
    ) -> Option<(AttentionLayer<B>, AttentionSpec)> {
        if context.shared.is_some() {
            return None;
        }
        match self {
            Self::Grouped(layer) => layer.qkv.is_in_layer_op().then(|| layer.layer_op(norm, context)),
            Self::Dma(layer) => layer.qkv.is_in_layer_op().then(|| layer.layer_op(norm, context)),
            Self::Mla(_) | Self::Nsa(_) | Self::Chosen(_) => None,
        }
    }

    /// The layer as a step of one token takes it; `None` of a kind that no step takes.
    pub(crate) fn for_token_step(&self) -> Option<TokenAttention<B>> {
        match self {
            Self::Grouped(layer) => Some(layer.qkv.for_token_step(&layer.o_proj, layer.spec())),
            Self::Mla(layer) => Some(layer.for_token_step()),
            Self::Nsa(layer) => Some(layer.for_token_step()),
            Self::Dma(layer) => Some(layer.for_token_step()),
            Self::Chosen(layer) => layer.for_token_step(),
        }
    }

    /// The weight of each key for each query, `[num_heads, seq_len, seq_len]` with the keys last, of one document.
    ///
    /// Rows sum to 1; those of NSA to the sum of the query's gates, and a compressed block's weight is spread evenly
    /// over its tokens. Pass the context of the whole pass: an earlier layer may have chosen the blocks that this one
    /// reads.
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

    /// The blocks that each query reads, as the layer's `block_indices` gives them; `None` of a kind without blocks.
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

    /// The output alone, `[batch, seq_len, d_model]`, reading and extending one cache of all rows, or one of each row,
    /// by any number of tokens; only one of all rows may be empty.
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
