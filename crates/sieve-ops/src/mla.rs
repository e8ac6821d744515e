//! Multi-head latent attention (arXiv:2405.04434, section 2.1): keys and values of every head come from one small
//! latent, beside one rotated key that all heads share.
mod autodiff;
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{MlaBackend, MlaGradients, MlaNorm, MlaPackCall, MlaSpec};

use crate::documents::Documents;
use crate::rope::{QkNorm, RotaryEmbedding};
use crate::tensors::{primitive, tensor};
use burn::tensor::{Int, Tensor};

/// Rotates and packs queries, keys and values: per token `num_heads` queries `[q_C ; RoPE(q_R)]`, as many keys
/// `[k_C ; RoPE(k_R)]` with one k_R for all heads, as many values. With `norm` each head's query and key go through
/// RMSNorm before the rotation; its weights are `[head_dim + rope_dim]`.
///
/// Returns what is packed and, with `norm`, what decoding needs of the keys, without gradient: k_R times its weight,
/// rotated, and the 1 / rms of each head's key, f32.
///
/// # Shapes
/// - q: `[batch, seq_len, num_heads * (head_dim + rope_dim)]`
/// - kv: `[batch, seq_len, num_heads * 2 * head_dim]`, k_C then v of each head
/// - k_rope: `[batch, seq_len, rope_dim]`
/// - positions: `[batch, seq_len]`, each below the tables' length; the tables are `rope_dim` wide
/// - returns: `[batch, seq_len, num_heads * (3 * head_dim + 2 * rope_dim)]`, `[batch, seq_len, rope_dim]`,
///   `[batch, seq_len, num_heads]`
pub fn mla_pack<B: MlaBackend>(
    [q, kv, k_rope]: [Tensor<B, 3>; 3],
    norm: Option<QkNorm<B>>,
    positions: Tensor<B, 2, Int>,
    rope: &RotaryEmbedding<B>,
    spec: MlaSpec,
) -> (Tensor<B, 3>, Option<[Tensor<B, 3>; 2]>) {
    let call = MlaPackCall {
        positions: positions.into_primitive(),
        rope: rope.tables(),
        norm: norm.map(|norm| MlaNorm {
            q_weight: primitive(norm.q_weight),
            k_weight: primitive(norm.k_weight),
            epsilon: norm.epsilon,
        }),
        spec,
    };
    let (packed, keys) = B::mla_pack([q, kv, k_rope].map(primitive), call);
    (tensor(packed), keys.map(|keys| keys.map(tensor)))
}

/// Dense causal attention on the tensor of [`mla_pack`]; values are narrower than keys.
///
/// # Shapes
/// - packed: `[batch, seq_len, num_heads * (3 * head_dim + 2 * rope_dim)]`
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn mla_attention<B: MlaBackend>(packed: Tensor<B, 3>, documents: &Documents<B>, spec: MlaSpec) -> Tensor<B, 4> {
    tensor(B::mla_attention(primitive(packed), &documents.bounds(), spec).o)
}
