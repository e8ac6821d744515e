//! Dynamic Mask Attention (paper: Trainable Dynamic Mask Sparse Attention), which selects single tokens.
use super::weights::{by_key, with_values};
use super::{LayerContext, LayerOutput};
use crate::{AttentionConfig, LayerCaches, Linear, QkvProjection, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::{Attention, DmaBias, DmaShape, ModelShape};
use sieve_ops::{AttentionSpec, DeviceBackend, DmaLayer, Documents, SieveBackend, TokenAttention};

/// Every KV head scores each key once, from the token's values. A query sees the `keep_window_size` earlier keys with
/// the highest scores.
#[derive(Module, Debug)]
pub struct DynamicMaskAttention<B: Backend> {
    /// Packed projection to q, k and v, with q/k-norm and RoPE.
    pub qkv: QkvProjection<B>,
    /// Output projection, `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    /// Scores from the values of all KV heads (eq. 3's Δ), `[num_kv_heads, num_kv_heads * head_dim]`.
    pub dt_proj: Linear<B>,
    /// Gate per KV head (eq. 3's A), `[num_kv_heads]`. At 0 all scores are equal, and DMA is a sliding window.
    pub a: Param<Tensor<B, 1>>,
    #[module(skip)]
    dma: DmaShape,
}

impl AttentionConfig {
    /// Dynamic mask attention: of a recipe's form with [`DmaShape::new`], of the published one with
    /// [`DmaShape::published`]. Panics when [`validate`](Self::validate) fails or `keep_window_size` is 0.
    pub fn dynamic_mask<B: Backend>(&self, dma: DmaShape, device: &B::Device) -> DynamicMaskAttention<B> {
        assert!(dma.keep_window_size > 0, "a query keeps at least one key");
        let shape = self.shape(Attention::Dma(dma));
        DynamicMaskAttention::new(&shape, dma, &mut self.weights(), device)
    }
}

impl<B: Backend> DynamicMaskAttention<B> {
    /// Normal weights from `init`; A filled with `dma.a_init`.
    pub fn new(shape: &ModelShape, dma: DmaShape, init: &mut WeightInit, device: &B::Device) -> Self {
        let ModelShape { d_model, num_heads, num_kv_heads, head_dim, .. } = *shape;
        Self {
            qkv: QkvProjection::new(shape, init, device),
            o_proj: Linear::new(num_heads * head_dim, d_model, init, device),
            dt_proj: Linear::new(num_kv_heads * head_dim, num_kv_heads, init, device),
            a: init.constant(dma.a_init, [num_kv_heads], device),
            dma,
        }
    }

    pub(crate) fn spec(&self) -> AttentionSpec {
        self.qkv.spec(None)
    }
}

impl<B: SieveBackend> DynamicMaskAttention<B> {
    /// `residual` plus the attention's output, both `[batch, seq_len, d_model]`, and the mask.
    pub fn forward(&self, x: Tensor<B, 3>, residual: Tensor<B, 3>, context: &LayerContext<'_, B>) -> LayerOutput<B> {
        let qkv = self.qkv.forward(x, context);
        let (mut expire, mut scores) = (None, None);
        let o = context.attend(qkv, |qkv, documents| {
            let result = self.attend(qkv, documents, context.under_policy(self.spec()));
            // With shared prompts the mask is of rows with repeated prompts, so it is not reported.
            if context.shared.is_none() {
                expire = Some(result.expire);
                // Only the bias `exp(min(z, 60))` clamps scores; the linear bias is z itself.
                scores = Some(result.rank).filter(|_| self.dma.bias == DmaBias::Exp);
            }
            result.o
        });
        LayerOutput {
            expire,
            clamped_scores: scores,
            ..LayerOutput::of(self.o_proj.forward_add(o.flatten(2, 3), residual))
        }
    }

    /// The layer's weights and sizes for [`sieve_ops::token_step`].
    pub(super) fn for_token_step(&self) -> TokenAttention<B> {
        TokenAttention { dma: Some(self.dma_layer()), ..self.qkv.for_token_step(&self.o_proj, self.spec()) }
    }

    /// The parameters w_dt and a, which rank keys.
    pub fn dma_layer(&self) -> DmaLayer<B> {
        DmaLayer { w_dt: self.dt_proj.weight.val(), a: self.a.val(), spec: self.dma }
    }

    pub(super) fn attend(
        &self,
        qkv: Tensor<B, 4>,
        documents: &Documents<B>,
        spec: AttentionSpec,
    ) -> sieve_ops::DmaAttention<B> {
        let found = sieve_ops::dynamic_mask_attention(qkv, self.dma_layer(), documents, spec);
        found.unwrap_or_else(|error| panic!("{error}"))
    }

    /// The weight of each key for each query of one document, `[num_heads, seq_len, seq_len]`.
    pub(super) fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let (qkv, spec, documents) = (self.qkv.forward(x, context), self.spec(), context.documents);
        // DMA's scores depend on the values, so the mask is computed before one-hot values replace them.
        let chosen = self.attend(qkv.clone(), documents, spec);
        by_key(&qkv, |one_hot| {
            let qkv = with_values(&qkv, one_hot, spec.num_kv_heads);
            let (rank, expire) = (chosen.rank.clone(), chosen.expire.clone());
            let o = sieve_ops::dma_attention(qkv, rank, expire, documents, spec, self.dma.bias);
            o.expect("the mask and the ranks are of this packed tensor")
        })
    }

    /// The output of new tokens without the residual; reads and extends the caches, which have a fixed size.
    pub fn forward_cached(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        caches: &mut LayerCaches<'_, B>,
    ) -> Tensor<B, 3>
    where
        B: DeviceBackend,
    {
        let qkv = self.qkv.forward(x, context);
        let o = caches.attend(qkv, |cached, qkv| {
            if cached.cache.is_empty() {
                let result = self.attend(qkv.clone(), context.documents, self.spec());
                cached.keep_selected(qkv, result.rank, result.expire, self.spec(), self.dma.window());
                return result.o;
            }
            cached.attend_selected(qkv, self.dma_layer(), self.spec())
        });
        self.o_proj.forward(o.flatten(2, 3))
    }
}
