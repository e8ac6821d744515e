//! Sizes and calls of multi-head latent attention.
use crate::tensors::{Float, Ints};
use crate::{AttentionCall, AttentionSpec, RopeTables};
use burn::tensor::backend::Backend;
use sieve_core::KernelPolicy;

/// Sizes and scale of a latent attention call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlaSpec {
    /// Heads; queries, keys and values have the same number.
    pub num_heads: usize,
    /// Width of the unrotated columns of a query or key, and of a value.
    pub head_dim: usize,
    /// Width of the rotated columns of a query or key.
    pub rope_dim: usize,
    /// Factor on `q·k`, usually `1/sqrt(head_dim + rope_dim)`.
    pub softmax_scale: f64,
    /// Which kernels a GPU may use, and in which order backward kernels sum.
    pub policy: KernelPolicy,
}

impl MlaSpec {
    /// Width of a query and of a key.
    pub fn key_dim(&self) -> usize {
        self.head_dim + self.rope_dim
    }

    /// Elements of one token in the packed tensor.
    pub fn token_len(&self) -> usize {
        self.num_heads * (2 * self.key_dim() + self.head_dim)
    }

    /// The same attention in terms of dense attention, with as many KV heads as query heads.
    pub fn attention(&self) -> AttentionSpec {
        AttentionSpec {
            num_heads: self.num_heads,
            num_kv_heads: self.num_heads,
            softmax_scale: self.softmax_scale,
            window_size: None,
            far: None,
            policy: self.policy,
        }
    }
}

/// Norms of queries and keys; not in the paper.
#[derive(Clone, Debug)]
pub struct MlaNorm<B: Backend> {
    /// `[head_dim + rope_dim]`.
    pub q_weight: Float<B>,
    /// `[head_dim + rope_dim]`.
    pub k_weight: Float<B>,
    /// Added to the mean of squares.
    pub epsilon: f64,
}

/// Operands of [`mla_pack`](crate::mla_pack) other than q, kv and k_rope.
#[derive(Clone, Debug)]
pub struct MlaPackCall<B: Backend> {
    /// `[batch, seq_len]`, each below the tables' length.
    pub positions: Ints<B>,
    /// Tables of width `rope_dim`.
    pub rope: RopeTables<B>,
    /// Norms of queries and keys, if any.
    pub norm: Option<MlaNorm<B>>,
    /// Number of heads, their widths, and the softmax scale.
    pub spec: MlaSpec,
}

/// Operands of [`mla_attention`](crate::mla_attention) other than the packed tensor.
pub type MlaCall<B> = AttentionCall<B, MlaSpec>;

impl<B: Backend> MlaCall<B> {
    /// The same call in terms of dense attention.
    pub(crate) fn attention(&self) -> AttentionCall<B> {
        AttentionCall::new(self.documents.clone(), self.spec.attention())
    }
}
