//! Dense causal attention with grouped queries.
use super::LayerContext;
use crate::kv_cache::by_row;
use crate::{LayerCache, Linear, QkvProjection, RmsNorm, WeightInit};
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::ModelShape;
use sieve_ops::{AttentionLayer, AttentionSpec, SieveBackend};

/// Every query sees all earlier keys of its document (arXiv:2305.13245 for the groups).
#[derive(Module, Debug)]
pub struct MultiHeadAttention<B: Backend> {
    /// Packed projection with q/k-norm and RoPE.
    pub qkv: QkvProjection<B>,
    /// `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
}

impl<B: Backend> MultiHeadAttention<B> {
    /// Normal weights from `init`.
    pub fn new(shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Self {
        Self {
            qkv: QkvProjection::new(shape, init, device),
            o_proj: Linear::new(
                shape.num_heads * shape.head_dim,
                shape.d_model,
                init,
                device,
            ),
        }
    }
}

impl<B: SieveBackend> MultiHeadAttention<B> {
    /// `residual` plus the attention's output; both `[batch, seq_len, d_model]`.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        residual: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
    ) -> Tensor<B, 3> {
        let qkv = self.qkv.forward(x, context);
        let spec = self.qkv.spec(None);
        let o = context.attend(qkv, |qkv, documents| {
            sieve_ops::attention(qkv, documents, spec)
        });
        self.o_proj.forward_add(o.flatten(2, 3), residual)
    }

    /// The layer after `norm`, as one op takes it.
    pub(crate) fn stream_layer(&self, norm: &RmsNorm<B>) -> (AttentionLayer<B>, AttentionSpec) {
        let spec = self.qkv.spec(None);
        (self.qkv.stream_layer(norm, &self.o_proj), spec)
    }

    /// The output alone, with a cache; see [`LayerCache`].
    pub fn forward_cached(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        caches: &mut [&mut LayerCache<B>],
    ) -> Tensor<B, 3> {
        let qkv = self.qkv.forward(x, context);
        let spec = self.qkv.spec(None);
        let o = by_row(caches, qkv, |cache, qkv| {
            cache.attend_recent(qkv, context.documents, spec)
        });
        self.o_proj.forward(o.flatten(2, 3))
    }
}
