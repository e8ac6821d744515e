//! The calls of MLA's ops, and what a backend computes of them; the shapes are those of the functions of the same
//! names.
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::documents::DocumentBounds;
use crate::rope::RopeTables;
use crate::tensors::{Float, Ints};
use burn::tensor::backend::Backend;

/// Sizes and scale of a latent attention call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlaSpec {
    /// Heads, of queries as of keys and values.
    pub num_heads: usize,
    /// Width of the part without rotation, and of a value.
    pub head_dim: usize,
    /// Width of the rotated part.
    pub rope_dim: usize,
    /// Factor on `q·k`, usually `1/sqrt(head_dim + rope_dim)`.
    pub softmax_scale: f64,
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

    /// The dense attention call it amounts to.
    pub fn attention(&self) -> AttentionSpec {
        AttentionSpec {
            num_heads: self.num_heads,
            num_kv_heads: self.num_heads,
            softmax_scale: self.softmax_scale,
            window_size: None,
        }
    }
}

/// Norms of queries and keys; an addition to the paper.
#[derive(Clone, Debug)]
pub struct MlaNorm<B: Backend> {
    /// `[head_dim + rope_dim]`.
    pub q_weight: Float<B>,
    /// `[head_dim + rope_dim]`.
    pub k_weight: Float<B>,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// What [`mla_pack`](MlaBackend::mla_pack) norms with and rotates by, and its sizes.
#[derive(Clone, Debug)]
pub struct MlaPackCall<B: Backend> {
    /// `[batch, seq_len]`, each below the tables' length.
    pub positions: Ints<B>,
    /// Tables of width `rope_dim`.
    pub rope: RopeTables<B>,
    /// Norms of queries and keys, where there are any.
    pub norm: Option<MlaNorm<B>>,
    /// Sizes.
    pub spec: MlaSpec,
}

/// MLA's ops.
pub trait MlaBackend: Backend {
    /// See [`crate::mla_pack`]; inputs are q, kv, k_rope.
    fn mla_pack(inputs: [Float<Self>; 3], call: MlaPackCall<Self>) -> (Float<Self>, Option<[Float<Self>; 2]>);
    /// See [`crate::mla_attention`].
    fn mla_attention(packed: Float<Self>, documents: &DocumentBounds<Self>, spec: MlaSpec) -> AttentionOutput<Self>;
}

/// Gradients of MLA's ops, as a device computes them.
pub trait MlaGradients: MlaBackend {
    /// Gradients of the inputs of [`mla_pack`](MlaBackend::mla_pack), and of its norms' weights. `normed` are the
    /// inputs of a call with norms.
    fn mla_pack_backward(
        call: MlaPackCall<Self>,
        normed: Option<[Float<Self>; 3]>,
        dy: Float<Self>,
    ) -> ([Float<Self>; 3], Option<[Float<Self>; 2]>);
    /// Gradient of [`mla_attention`](MlaBackend::mla_attention).
    fn mla_attention_backward(
        packed: Float<Self>,
        documents: &DocumentBounds<Self>,
        spec: MlaSpec,
        output: AttentionOutput<Self>,
        d_o: Float<Self>,
    ) -> Float<Self>;
}
