//! Sliding-window attention.
use super::LayerContext;
use crate::kv_cache::by_row;
use crate::{LayerCache, Linear, QkvProjection, RmsNorm, WeightInit};
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::ModelShape;
use sieve_ops::{AttentionLayer, AttentionSpec, SieveBackend};

/// Query i sees the keys `i - window_size < j <= i` of its document.
#[derive(Module, Debug)]
pub struct SlidingWindowAttention<B: Backend> {
    /// Packed projection with q/k-norm and RoPE.
    pub qkv: QkvProjection<B>,
    /// `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    window_size: usize,
}

impl<B: Backend> SlidingWindowAttention<B> {
    /// Weights drawn by `init` from a normal distribution; `window_size` counts tokens, the query's own included.
    pub fn new(
        shape: &ModelShape,
        window_size: usize,
        init: &mut WeightInit,
        device: &B::Device,
    ) -> Self {
        Self {
            qkv: QkvProjection::new(shape, init, device),
            o_proj: Linear::new(
                shape.num_heads * shape.head_dim,
                shape.d_model,
                init,
                device,
            ),
            window_size,
        }
    }

    pub(super) fn spec(&self) -> AttentionSpec {
        self.qkv.spec(Some(self.window_size))
    }
}

impl<B: SieveBackend> SlidingWindowAttention<B> {
    /// `residual` plus the attention's output; both `[batch, seq_len, d_model]`.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        residual: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
    ) -> Tensor<B, 3> {
        let qkv = self.qkv.forward(x, context);
        let o = context.attend(qkv, |qkv, documents| {
            sieve_ops::attention(qkv, documents, self.spec())
        });
        self.o_proj.forward_add(o.flatten(2, 3), residual)
    }

    /// The layer after `norm`, as one op takes it.
    pub(crate) fn stream_layer(&self, norm: &RmsNorm<B>) -> (AttentionLayer<B>, AttentionSpec) {
        (self.qkv.stream_layer(norm, &self.o_proj), self.spec())
    }

    /// As [`forward`](Self::forward) with a cache of `window_size` keys; see [`LayerCache`].
    pub fn forward_cached(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        caches: &mut [&mut LayerCache<B>],
    ) -> Tensor<B, 3> {
        let qkv = self.qkv.forward(x, context);
        let o = by_row(caches, qkv, |cache, qkv| {
            cache.attend_recent(qkv, context.documents, self.spec())
        });
        self.o_proj.forward(o.flatten(2, 3))
    }
}
