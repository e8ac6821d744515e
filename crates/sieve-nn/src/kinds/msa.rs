//! MSA (arXiv:2606.13392): queries choose blocks by an indexer, which may score blocks as QSA (Qwen3.8-Flash-Next)
//! does.
use super::{Attention, BuildLayer, ChosenBlocksAttention};
use crate::pass::LayerContext;
use crate::{Linear, RmsNorm, WeightInit};
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::{ModelShape, MsaShape, NsaBlocks};
use sieve_ops::{AttentionSpec, Documents, NsaCall, QkNorm, RotaryEmbedding, SieveBackend};

impl BuildLayer for MsaShape {
    fn build<B: Backend>(&self, shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Attention<B> {
        let layer = ChosenBlocksAttention::new(shape, self.choice(), init, device);
        // A layer that reads another layer's blocks has no indexer.
        let indexer = shape.indexer().map(|_| Indexer::new(shape, init, device));
        let has_loss = indexer.is_some() || self.index_loss_of_shared;
        let loss_weight = if has_loss { self.index_loss_weight } else { 0.0 };
        Attention::Chosen(layer.with_indexer(indexer, loss_weight, self.index_warmup))
    }
}

/// The indexer of MSA and of QSA: queries and one key head by which an attention layer chooses blocks.
///
/// One query head per KV head of the attention, and one key head; all are normed and rotated.
#[derive(Module, Debug)]
pub struct Indexer<B: Backend> {
    /// `[(num_kv_heads + 1) * head_dim, d_model]`: rows of the query heads, then of the key head.
    pub proj: Linear<B>,
    /// RMSNorm of each query head, weight `[head_dim]`.
    pub q_norm: RmsNorm<B>,
    /// RMSNorm of the key head, weight `[head_dim]`.
    pub k_norm: RmsNorm<B>,
    num_heads: usize,
}

impl<B: Backend> Indexer<B> {
    /// Normal weights from `init`; norms with weights of 1.
    pub fn new(shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Self {
        let (num_heads, head_dim) = (shape.num_kv_heads, shape.head_dim);
        Self {
            proj: Linear::new(shape.d_model, (num_heads + 1) * head_dim, init, device),
            q_norm: RmsNorm::new(head_dim, shape.rms_norm_eps, init, device),
            k_norm: RmsNorm::new(head_dim, shape.rms_norm_eps, init, device),
            num_heads,
        }
    }
}

impl<B: SieveBackend> Indexer<B> {
    /// The indexer's packed tensor, `[batch, seq_len, num_kv_heads + 2, head_dim]`, from x, `[batch, seq_len,
    /// d_model]`: the queries, the key, and the key before its norm in place of a value. x gets no gradient.
    pub fn forward(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 4> {
        let [batch, seq_len, _d_model] = x.dims();
        let packed = self.proj.forward(x.detach());
        let packed = packed.reshape([batch as i32, seq_len as i32, self.num_heads as i32 + 1, -1]);
        let key = packed.clone().narrow(2, self.num_heads, 1);
        let packed = Tensor::cat(vec![packed, key], 2);
        let (positions, num_key_heads) = (context.positions.clone(), 1);
        sieve_ops::qk_norm_rope(packed, self.qk_norm(), positions, context.rope, num_key_heads)
    }

    /// QSA's keys of complete blocks, `[batch, num_slots, head_dim]`. `index` is the result of
    /// [`forward`](Self::forward), `spec` is [`sieve_ops::indexer_spec`] of the attention.
    pub(crate) fn block_keys(
        &self,
        index: Tensor<B, 4>,
        documents: &Documents<B>,
        (spec, blocks): (AttentionSpec, NsaBlocks),
        rope: &RotaryEmbedding<B>,
    ) -> Tensor<B, 3> {
        let [batch, seq_len, _, d] = index.dims();
        let num_slots = blocks.num_slots(seq_len);
        // Index 1 of the means has the packed tensor's values: the keys before their norm.
        let call = NsaCall::new(documents.bounds(), spec, blocks);
        let means = sieve_ops::nsa_mean_pool(index, &call).narrow(0, 1, 1);
        let positions = sieve_ops::block_positions(documents, blocks);
        self.keys_of(means.reshape([batch, num_slots, 1, d]), positions, rope)
    }

    /// Norms and rotates means of blocks' keys, `[batch, blocks, 1, head_dim]`, at the positions of the blocks' first
    /// tokens, `[batch, blocks]`; returns `[batch, blocks, head_dim]`.
    pub(crate) fn keys_of(
        &self,
        means: Tensor<B, 4>,
        positions: Tensor<B, 2, Int>,
        rope: &RotaryEmbedding<B>,
    ) -> Tensor<B, 3> {
        let [batch, blocks, _, d] = means.dims();
        let norm = RmsNorm::qk_norm(&self.k_norm, &self.k_norm);
        // The op takes a packed tensor. The keys are its query head, with the keys' norm; its other heads are not read.
        let packed = Tensor::cat(vec![means; 3], 2);
        let num_key_heads = 1;
        let keys = sieve_ops::qk_norm_rope(packed, norm, positions, rope, num_key_heads);
        keys.narrow(2, 0, 1).reshape([batch, blocks, d])
    }

    pub(crate) fn qk_norm(&self) -> QkNorm<B> {
        RmsNorm::qk_norm(&self.q_norm, &self.k_norm)
    }
}
