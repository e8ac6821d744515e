//! Multi-head latent attention (arXiv:2405.04434, section 2.1): keys and values of every head come from one small
//! latent, beside one rotated key that all heads share.
mod autodiff;
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{MlaBackend, MlaGradients, MlaPackCall, MlaSpec};

use crate::documents::Documents;
use crate::rope::RotaryEmbedding;
use crate::tensors::{primitive, tensor};
use burn::tensor::{Int, Tensor};

/// Rotates and packs queries, keys and values: per token `num_heads` queries `[q_C ; RoPE(q_R)]`, as many keys
/// `[k_C ; RoPE(k_R)]` with one k_R for all heads, as many values.
///
/// # Shapes
/// - q: `[batch, seq_len, num_heads * (head_dim + rope_dim)]`
/// - kv: `[batch, seq_len, num_heads * 2 * head_dim]`, k_C then v of each head
/// - k_rope: `[batch, seq_len, rope_dim]`
/// - positions: `[batch, seq_len]`, each below the tables' length; the tables are `rope_dim` wide
/// - returns: `[batch, seq_len, num_heads * (3 * head_dim + 2 * rope_dim)]`
pub fn mla_pack<B: MlaBackend>(
    q: Tensor<B, 3>,
    kv: Tensor<B, 3>,
    k_rope: Tensor<B, 3>,
    positions: Tensor<B, 2, Int>,
    rope: &RotaryEmbedding<B>,
    spec: MlaSpec,
) -> Tensor<B, 3> {
    let call = MlaPackCall {
        positions: positions.into_primitive(),
        rope: rope.tables(),
        spec,
    };
    tensor(B::mla_pack([q, kv, k_rope].map(primitive), call))
}

/// Dense causal attention on the tensor of [`mla_pack`]; values are narrower than keys.
///
/// # Shapes
/// - packed: `[batch, seq_len, num_heads * (3 * head_dim + 2 * rope_dim)]`
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn mla_attention<B: MlaBackend>(packed: Tensor<B, 3>, documents: &Documents<B>, spec: MlaSpec) -> Tensor<B, 4> {
    tensor(B::mla_attention(primitive(packed), &documents.bounds(), spec).o)
}
