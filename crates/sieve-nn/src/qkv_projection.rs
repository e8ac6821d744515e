//! The packed projection of queries, keys and values, with per-head norms and rotary positions.
use crate::attention::LayerContext;
use crate::{Linear, RmsNorm, WeightInit};
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::ModelShape;
use sieve_ops::{AttentionLayer, AttentionSpec, QkNorm, SieveBackend};

/// `x` to `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`, q and k normalised per head and rotated.
#[derive(Module, Debug)]
pub struct QkvProjection<B: Backend> {
    /// `[(num_heads + 2 * num_kv_heads) * head_dim, d_model]`, rows in the order q, k, v.
    pub qkv_proj: Linear<B>,
    /// `[head_dim]`.
    pub q_norm: RmsNorm<B>,
    /// `[head_dim]`.
    pub k_norm: RmsNorm<B>,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    epsilon: f64,
}

impl<B: Backend> QkvProjection<B> {
    /// Normal weights from `init`, norms of one.
    pub fn new(shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Self {
        let ModelShape {
            d_model,
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = *shape;
        let epsilon = shape.rms_norm_eps;
        let packed = (num_heads + 2 * num_kv_heads) * head_dim;
        Self {
            qkv_proj: Linear::new(d_model, packed, init, device),
            q_norm: RmsNorm::new(head_dim, epsilon, init, device),
            k_norm: RmsNorm::new(head_dim, epsilon, init, device),
            num_heads,
            num_kv_heads,
            head_dim,
            epsilon,
        }
    }

    /// Sizes and scale of the attention call that follows.
    pub fn spec(&self, window_size: Option<usize>) -> AttentionSpec {
        AttentionSpec {
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            softmax_scale: 1.0 / (self.head_dim as f64).sqrt(),
            window_size,
        }
    }
}

impl<B: SieveBackend> QkvProjection<B> {
    /// # Shapes
    /// - x: `[batch, seq_len, d_model]`
    /// - returns: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
    pub fn forward(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 4> {
        self.norm_rope(self.project(x), context)
    }

    /// The layer that ends with `o_proj`, with `norm` before it, as one op takes it.
    pub(crate) fn stream_layer(
        &self,
        norm: &RmsNorm<B>,
        o_proj: &Linear<B>,
        context: &LayerContext<'_, B>,
    ) -> AttentionLayer<B> {
        AttentionLayer {
            norm: norm.weight.val(),
            epsilon: norm.epsilon,
            qkv: self.qkv_proj.weight.val(),
            qk_norm: self.qk_norm(),
            o: o_proj.weight.val(),
            dma: None,
            precision: context.precision,
            keeping: context.keeping,
            sums: context.take_sums([&self.qkv_proj, o_proj]),
        }
    }

    /// The packed product alone, as [`forward`](Self::forward) shapes it.
    pub fn project(&self, x: Tensor<B, 3>) -> Tensor<B, 4> {
        let [batch, seq_len, _d_model] = x.dims();
        let heads = self.num_heads + 2 * self.num_kv_heads;
        self.qkv_proj.forward(x).reshape([batch, seq_len, heads, self.head_dim])
    }

    /// Norms and rotation of a packed tensor.
    pub fn norm_rope(&self, qkv: Tensor<B, 4>, context: &LayerContext<'_, B>) -> Tensor<B, 4> {
        self.at_positions(qkv, context.positions.clone(), context)
    }

    /// Norms of a packed tensor, without rotation: every token stands at position 0.
    pub fn norm(&self, qkv: Tensor<B, 4>, context: &LayerContext<'_, B>) -> Tensor<B, 4> {
        self.at_positions(qkv, context.positions.zeros_like(), context)
    }

    fn at_positions(
        &self,
        qkv: Tensor<B, 4>,
        positions: Tensor<B, 2, Int>,
        context: &LayerContext<'_, B>,
    ) -> Tensor<B, 4> {
        let norm = self.qk_norm();
        sieve_ops::qk_norm_rope(qkv, norm, positions, context.rope, self.num_kv_heads)
    }

    fn qk_norm(&self) -> QkNorm<B> {
        QkNorm {
            q_weight: self.q_norm.weight.val(),
            k_weight: self.k_norm.weight.val(),
            epsilon: self.epsilon,
        }
    }
}
