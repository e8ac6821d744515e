//! Calls of rotary embedding.
use crate::RopeTables;
use crate::tensors::{Float, Ints};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// The RMSNorms of each head's query and key.
#[derive(Clone, Debug)]
pub struct QkNorm<B: Backend> {
    /// Weight of the norm of each query head, `[head_dim]`.
    pub q_weight: Tensor<B, 1>,
    /// Weight of the norm of each key head, `[head_dim]`.
    pub k_weight: Tensor<B, 1>,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// Operands of [`crate::qk_norm_rope`] other than the packed tensor.
#[derive(Clone, Debug)]
pub struct QkNormRopeCall<B: Backend> {
    /// Weight of the norm of each query head, `[head_dim]`.
    pub q_weight: Float<B>,
    /// Weight of the norm of each key head, `[head_dim]`.
    pub k_weight: Float<B>,
    /// Row of the tables for each token, `[batch, seq_len]`.
    pub positions: Ints<B>,
    /// Tables of the angles.
    pub rope: RopeTables<B>,
    /// Number of key heads, and of value heads.
    pub num_kv_heads: usize,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// Operands of [`crate::rope`] other than the packed tensor.
#[derive(Clone, Debug)]
pub struct RopeCall<B: Backend> {
    /// Row of the tables for each token, `[batch, seq_len]`.
    pub positions: Ints<B>,
    /// Tables of the angles.
    pub rope: RopeTables<B>,
    /// Number of key heads, and of value heads.
    pub num_kv_heads: usize,
}

impl<B: Backend> RopeCall<B> {
    /// The rotation by the negative angles: the backward pass of this one.
    pub(crate) fn inverse(self) -> Self {
        let rope = RopeTables { sin: B::float_neg(self.rope.sin), ..self.rope };
        Self { rope, ..self }
    }
}
