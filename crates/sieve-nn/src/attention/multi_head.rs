//! Causal attention with grouped queries, over all earlier keys or a sliding window.
use super::LayerContext;
use crate::{AttentionConfig, LayerCaches, Linear, QkvProjection, RmsNorm, WeightInit};
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::{Attention, ModelShape};
use sieve_ops::{AttentionLayer, AttentionSpec, DeviceBackend, SieveBackend};

/// Every query sees the earlier keys of its document, all or the last `window_size` (arXiv:2305.13245 for the groups).
#[derive(Module, Debug)]
pub struct MultiHeadAttention<B: Backend> {
    /// Packed projection with q/k-norm and RoPE.
    pub qkv: QkvProjection<B>,
    /// `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    window_size: Option<usize>,
}

impl AttentionConfig {
    /// Dense causal attention. Panics when [`validate`](Self::validate) fails.
    pub fn multi_head<B: Backend>(&self, device: &B::Device) -> MultiHeadAttention<B> {
        let shape = self.shape(Attention::Mha);
        MultiHeadAttention::new(&shape, None, &mut self.weights(), device)
    }

    /// Attention over the last `window_size` tokens. Panics when [`validate`](Self::validate) fails or the window is 0.
    pub fn sliding_window<B: Backend>(&self, window_size: usize, device: &B::Device) -> MultiHeadAttention<B> {
        assert!(window_size > 0, "a window holds at least the token itself");
        let shape = self.shape(Attention::swa(window_size));
        MultiHeadAttention::new(&shape, Some(window_size), &mut self.weights(), device)
    }
}

impl<B: Backend> MultiHeadAttention<B> {
    /// Weights drawn by `init` from a normal distribution; `window_size` counts tokens, the query's own included, and
    /// `None` is dense attention.
    pub fn new(shape: &ModelShape, window_size: Option<usize>, init: &mut WeightInit, device: &B::Device) -> Self {
        Self {
            qkv: QkvProjection::new(shape, init, device),
            o_proj: Linear::new(shape.num_heads * shape.head_dim, shape.d_model, init, device),
            window_size,
        }
    }

    /// Sizes of its heads, and its window.
    pub(crate) fn spec(&self) -> AttentionSpec {
        self.qkv.spec(self.window_size)
    }

    /// Whether every earlier key is seen.
    pub(crate) fn is_dense(&self) -> bool {
        self.window_size.is_none()
    }
}

impl<B: SieveBackend> MultiHeadAttention<B> {
    /// `residual` plus the attention's output; both `[batch, seq_len, d_model]`.
    pub fn forward(&self, x: Tensor<B, 3>, residual: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let qkv = self.qkv.forward(x, context);
        let o = context.attend(qkv, |qkv, documents| {
            sieve_ops::attention(qkv, documents, context.under_policy(self.spec()))
        });
        self.o_proj.forward_add(o.flatten(2, 3), residual)
    }

    /// The layer after `norm`, as one op takes it.
    pub(crate) fn layer_op(
        &self,
        norm: &RmsNorm<B>,
        context: &LayerContext<'_, B>,
    ) -> (AttentionLayer<B>, AttentionSpec) {
        (self.qkv.layer_op(norm, &self.o_proj, context), self.spec())
    }

    /// The output alone, with a cache; see [`LayerCache`](crate::LayerCache).
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
            cached.attend_recent(qkv, context.documents, self.spec())
        });
        self.o_proj.forward(o.flatten(2, 3))
    }
}
