//! The ops of MLA that a backend may override.
use crate::{AttentionOutput, AttentionSpec, DocumentBounds, RopeTables, reference};
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};

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

/// MLA's part of [`SieveBackend`](crate::SieveBackend), on primitives; the shapes are those of the functions of the same
/// names. Default bodies are the references.
pub trait MlaBackend: Backend {
    /// See [`crate::mla_pack`]; inputs are q, kv, k_rope.
    fn mla_pack(
        inputs: [FloatTensor<Self>; 3],
        positions: IntTensor<Self>,
        rope: &RopeTables<Self>,
        spec: MlaSpec,
    ) -> FloatTensor<Self> {
        let [q, kv, k_rope] = inputs;
        reference::mla_pack::<Self>(q, kv, k_rope, positions, rope, spec)
    }
    /// Gradients of the inputs of [`crate::mla_pack`].
    fn mla_pack_backward(
        positions: IntTensor<Self>,
        rope: &RopeTables<Self>,
        spec: MlaSpec,
        dy: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 3] {
        reference::mla_pack_backward::<Self>(positions, rope, spec, dy)
    }

    /// See [`crate::mla_attention`].
    fn mla_attention(
        packed: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: MlaSpec,
    ) -> AttentionOutput<Self> {
        reference::mla_attention::<Self>(packed, documents, spec)
    }
    /// Gradient of [`crate::mla_attention`].
    fn mla_attention_backward(
        packed: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: MlaSpec,
        output: AttentionOutput<Self>,
        d_o: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::mla_attention_backward::<Self>(packed, documents, spec, output, d_o)
    }
}
