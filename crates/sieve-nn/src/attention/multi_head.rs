//! Causal attention with grouped queries, over all earlier keys or a sliding window.
use super::LayerContext;
use crate::{AttentionConfig, LayerCaches, Linear, QkvProjection, WeightInit};
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::{Attention, ModelShape};
use sieve_ops::{AttentionSpec, DeviceBackend, SieveBackend};

/// Grouped-query attention (arXiv:2305.13245): a query sees all earlier keys of its document, or the last
/// `window_size`.
#[derive(Module, Debug)]
pub struct MultiHeadAttention<B: Backend> {
    /// Packed projection to q, k and v, with q/k-norm and RoPE.
    pub qkv: QkvProjection<B>,
    /// Output projection, `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    /// Number of last tokens that a query sees; `None`: all.
    window_size: Option<usize>,
}

impl AttentionConfig {
    /// Dense causal attention. Panics when [`validate`](Self::validate) fails.
    pub fn multi_head<B: Backend>(&self, device: &B::Device) -> MultiHeadAttention<B> {
        let (shape, window_size) = (self.shape(Attention::Mha), None);
        MultiHeadAttention::new(&shape, window_size, &mut self.weights(), device)
    }

    /// Attention over the last `window_size` tokens. Panics when [`validate`](Self::validate) fails or the window is 0.
    pub fn sliding_window<B: Backend>(&self, window_size: usize, device: &B::Device) -> MultiHeadAttention<B> {
        assert!(window_size > 0, "a window holds at least the token itself");
        let shape = self.shape(Attention::swa(window_size));
        MultiHeadAttention::new(&shape, Some(window_size), &mut self.weights(), device)
    }
}

impl<B: Backend> MultiHeadAttention<B> {
    /// Normal weights from `init`. A query sees the last `window_size` tokens, its own included; `None`: all.
    pub fn new(shape: &ModelShape, window_size: Option<usize>, init: &mut WeightInit, device: &B::Device) -> Self {
        Self {
            qkv: QkvProjection::new(shape, init, device),
            o_proj: Linear::new(shape.num_heads * shape.head_dim, shape.d_model, init, device),
            window_size,
        }
    }

    /// Sizes of the heads, scale and window.
    pub(crate) fn spec(&self) -> AttentionSpec {
        self.qkv.spec(self.window_size)
    }
}

impl<B: SieveBackend> MultiHeadAttention<B> {
    /// `residual` plus the attention's output; both `[batch, seq_len, d_model]`.
    pub fn forward(&self, x: Tensor<B, 3>, residual: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let qkv = self.qkv.forward(x, context);
        let o = context
            .attend(qkv, |qkv, documents| sieve_ops::attention(qkv, documents, context.under_policy(self.spec())));
        self.o_proj.forward_add(o.flatten(2, 3), residual)
    }

    /// The output of new tokens without the residual; reads and extends the caches.
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
        let o = caches.attend(qkv, |cached, qkv| cached.attend_recent(qkv, context.documents, self.spec()));
        self.o_proj.forward(o.flatten(2, 3))
    }
}
