//! The packed projection of queries, keys and values, with biases, per-head norms and rotary positions.
use crate::{LayerContext, Linear, PassState, RmsNorm, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::ModelShape;
use sieve_ops::{
    AttentionLayer, AttentionSpec, ContextParallel, Heads, QkNorm, SieveBackend, TokenAttention, TokenExtra,
};

/// Projects x to packed queries, keys and values, `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`, and
/// rotates queries and keys, after their per-head norms where the model has such norms.
#[derive(Module, Debug)]
pub struct QkvProjection<B: Backend> {
    /// `[(num_heads + 2 * num_kv_heads) * head_dim, d_model]`, rows in the order q, k, v.
    pub qkv_proj: Linear<B>,
    /// Bias of the projection, `[(num_heads + 2 * num_kv_heads) * head_dim]`, in models like Qwen2; `None` in others.
    pub qkv_bias: Option<Param<Tensor<B, 1>>>,
    /// RMSNorm of query heads, weight `[head_dim]`; absent in models like Llama.
    pub q_norm: Option<RmsNorm<B>>,
    /// RMSNorm of key heads, weight `[head_dim]`; absent in models like Llama.
    pub k_norm: Option<RmsNorm<B>>,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

impl<B: Backend> QkvProjection<B> {
    /// Normal weights from `init`, biases of zero, norms of one.
    pub fn new(shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Self {
        let ModelShape { d_model, num_heads, num_kv_heads, head_dim, rms_norm_eps, .. } = *shape;
        let packed = (num_heads + 2 * num_kv_heads) * head_dim;
        let norm = |init: &mut WeightInit| shape.qk_norm.then(|| RmsNorm::new(head_dim, rms_norm_eps, init, device));
        Self {
            qkv_proj: Linear::new(d_model, packed, init, device),
            qkv_bias: shape.qkv_bias.then(|| init.constant(0.0, [packed], device)),
            q_norm: norm(init),
            k_norm: norm(init),
            num_heads,
            num_kv_heads,
            head_dim,
        }
    }

    /// Sizes and scale of the attention call that follows.
    pub fn spec(&self, window_size: Option<usize>) -> AttentionSpec {
        AttentionSpec { window_size, ..AttentionSpec::dense([self.num_heads, self.num_kv_heads], self.head_dim) }
    }
}

impl<B: SieveBackend> QkvProjection<B> {
    /// The packed queries, keys and values of x, normed and rotated.
    ///
    /// # Shapes
    /// - x: `[batch, seq_len, d_model]`
    /// - returns: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
    pub fn forward(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 4> {
        self.norm_rope(self.project(x), context)
    }

    /// Operands of [`sieve_ops::attention_layer`] for the layer from `norm` to `o_proj`. `None` for a projection
    /// without per-head norms or with biases, which that op does not support.
    pub(crate) fn layer_op(
        &self,
        norm: &RmsNorm<B>,
        o_proj: &Linear<B>,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
    ) -> Option<AttentionLayer<B>> {
        let qk_norm = self.qk_norm().filter(|_| self.qkv_bias.is_none())?;
        Some(AttentionLayer {
            norm: norm.weight.val(),
            epsilon: norm.epsilon,
            qkv: self.qkv_proj.weight.val(),
            qk_norm,
            o: o_proj.weight.val(),
            dma: None,
            precision: context.settings.precision,
            keeping: context.settings.keeping,
            sums: state.take_sums([&self.qkv_proj, o_proj]),
            kept: state.attention.take(),
        })
    }

    /// Operands of [`sieve_ops::token_step`] for the layer from this projection to `o_proj`.
    pub(crate) fn for_token_step(&self, o_proj: &Linear<B>, spec: AttentionSpec) -> TokenAttention<B> {
        TokenAttention {
            sinks: None,
            qkv: self.qkv_proj.weight.val(),
            qkv_bias: self.qkv_bias.as_ref().map(Param::val),
            qk_norm: self.qk_norm(),
            dma: None,
            extra: TokenExtra::None,
            o: o_proj.weight.val(),
            spec,
        }
    }

    /// Exchanges a packed tensor of this process's part of each row for whole rows of its share of the heads.
    pub(crate) fn own_heads(&self, qkv: Tensor<B, 4>, parts: &ContextParallel) -> Tensor<B, 4> {
        parts.to_heads(qkv, &[self.num_heads, self.num_kv_heads, self.num_kv_heads].map(Heads::Split))
    }

    /// Projects like [`forward`](Self::forward), without norms and rotation.
    pub fn project(&self, x: Tensor<B, 3>) -> Tensor<B, 4> {
        let [batch, seq_len, _d_model] = x.dims();
        let heads = self.num_heads + 2 * self.num_kv_heads;
        let packed = self.qkv_proj.forward(x);
        let packed = match &self.qkv_bias {
            Some(bias) => sieve_ops::add_bias(packed, bias.val()),
            None => packed,
        };
        packed.reshape([batch, seq_len, heads, self.head_dim])
    }

    /// Norms and rotation of a packed tensor.
    pub fn norm_rope(&self, qkv: Tensor<B, 4>, context: &LayerContext<'_, B>) -> Tensor<B, 4> {
        self.at_positions(qkv, context.positions.clone(), context)
    }

    /// Norms of a packed tensor, without rotation. It passes position 0 for every token, which is no rotation.
    pub fn norm(&self, qkv: Tensor<B, 4>, context: &LayerContext<'_, B>) -> Tensor<B, 4> {
        self.at_positions(qkv, context.positions.zeros_like(), context)
    }

    /// Per-head norms, where the model has them, then the rotation by `positions`.
    fn at_positions(
        &self,
        qkv: Tensor<B, 4>,
        positions: Tensor<B, 2, Int>,
        context: &LayerContext<'_, B>,
    ) -> Tensor<B, 4> {
        match self.qk_norm() {
            Some(norm) => sieve_ops::qk_norm_rope(qkv, norm, positions, context.rope, self.num_kv_heads),
            None => sieve_ops::rope(qkv, positions, context.rope, self.num_kv_heads),
        }
    }

    /// The per-head norms; `None` in models without them.
    pub(crate) fn qk_norm(&self) -> Option<QkNorm<B>> {
        Some(RmsNorm::qk_norm(self.q_norm.as_ref()?, self.k_norm.as_ref()?))
    }
}
