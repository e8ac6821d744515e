//! The indexer of MSA (arXiv:2606.13392): queries and one key head that choose blocks for an attention.
use super::LayerContext;
use crate::{Linear, RmsNorm, WeightInit};
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::ModelShape;
use sieve_ops::{QkNorm, SieveBackend};

/// One query head for each KV head, and one key head, normed and rotated as those of the attention.
#[derive(Module, Debug)]
pub struct Indexer<B: Backend> {
    /// `[(num_kv_heads + 1) * head_dim, d_model]`, the key's rows last.
    pub proj: Linear<B>,
    /// `[head_dim]`.
    pub q_norm: RmsNorm<B>,
    /// `[head_dim]`.
    pub k_norm: RmsNorm<B>,
    num_heads: usize,
}

impl<B: Backend> Indexer<B> {
    /// Normal weights from `init`, norms of one.
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
    /// `[batch, seq_len, num_heads + 2, head_dim]` from `[batch, seq_len, d_model]`: queries, the key, and in place of
    /// a packed tensor's values the key before its norm. No gradient flows to x.
    pub fn forward(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 4> {
        let [batch, seq_len, _d_model] = x.dims();
        let packed = self.proj.forward(x.detach());
        let packed = packed.reshape([batch as i32, seq_len as i32, self.num_heads as i32 + 1, -1]);
        let key = packed.clone().narrow(2, self.num_heads, 1);
        let packed = Tensor::cat(vec![packed, key], 2);
        sieve_ops::qk_norm_rope(packed, self.qk_norm(), context.positions.clone(), context.rope, 1)
    }

    pub(crate) fn qk_norm(&self) -> QkNorm<B> {
        QkNorm {
            q_weight: self.q_norm.weight.val(),
            k_weight: self.k_norm.weight.val(),
            epsilon: self.q_norm.epsilon,
        }
    }
}
