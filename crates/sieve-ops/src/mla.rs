//! Multi-head latent attention (arXiv:2405.04434, section 2.1): the keys and values of all heads are projections of one
//! small latent per token, and all heads share one rotated key.
mod call;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use call::{MlaCall, MlaNorm, MlaPackCall, MlaSpec};

use crate::tensors::{primitive, tensor};
use crate::{DeviceBackend, DocumentBounds, Documents, QkNorm, RotaryEmbedding, SieveBackend};
use burn::tensor::{Int, Tensor};

/// Rotates and packs queries, keys and values. A token has `num_heads` queries `[q_C ; RoPE(q_R)]`, then `num_heads`
/// keys `[k_C ; RoPE(k_R)]` with one k_R for all heads, then `num_heads` values. With `norm`, of weights `[head_dim +
/// rope_dim]`, each head's query and key are normed before the rotation.
///
/// Returns the packed tensor and, with `norm`, two tensors without gradient that decoding needs: k_R times the norm's
/// weight, rotated, and 1 / rms of each head's key, f32.
///
/// # Shapes
/// - q: `[batch, seq_len, num_heads * (head_dim + rope_dim)]`
/// - kv: `[batch, seq_len, num_heads * 2 * head_dim]`, k_C then v of each head
/// - k_rope: `[batch, seq_len, rope_dim]`
/// - positions: `[batch, seq_len]`, each below the tables' length; the tables are `rope_dim` wide
/// - returns: `[batch, seq_len, num_heads * (3 * head_dim + 2 * rope_dim)]`, `[batch, seq_len, rope_dim]`,
///   `[batch, seq_len, num_heads]`
pub fn mla_pack<B: SieveBackend>(
    inputs: [Tensor<B, 3>; 3],
    norm: Option<QkNorm<B>>,
    positions: Tensor<B, 2, Int>,
    rope: &RotaryEmbedding<B>,
    spec: MlaSpec,
) -> (Tensor<B, 3>, Option<[Tensor<B, 3>; 2]>) {
    let inputs = inputs.map(primitive);
    let norm = norm.map(|norm| ([primitive(norm.q_weight), primitive(norm.k_weight)], norm.epsilon));
    let call = MlaPackCall {
        positions: positions.into_primitive(),
        rope: rope.tables().values(),
        norm: norm.clone().map(|(weights, epsilon)| {
            let [q_weight, k_weight] = weights.map(B::value);
            MlaNorm { q_weight, k_weight, epsilon }
        }),
        spec,
    };
    let values = inputs.clone().map(B::value);
    let (packed, keys) = B::Inner::mla_pack(values.clone(), call.clone());
    let [q, kv, k_rope] = &inputs;
    let packed = match &norm {
        None => B::node([q, kv, k_rope], packed, |dy| {
            let normed = None;
            B::Inner::mla_pack_backward(call, normed, dy).0
        }),
        Some(([q_weight, k_weight], _)) => B::node([q, kv, k_rope, q_weight, k_weight], packed, |dy| {
            let ([dq, dkv, dk_rope], weights) = B::Inner::mla_pack_backward(call, Some(values), dy);
            let [dq_weight, dk_weight] = weights.expect("the call has norms");
            [dq, dkv, dk_rope, dq_weight, dk_weight]
        }),
    };
    (tensor(packed), keys.map(|keys| keys.map(|key| tensor(B::constant(key)))))
}

/// Dense causal attention over the packed tensor of [`mla_pack`]; values are narrower than keys.
///
/// # Shapes
/// - packed: `[batch, seq_len, num_heads * (3 * head_dim + 2 * rope_dim)]`
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn mla_attention<B: SieveBackend>(packed: Tensor<B, 3>, documents: &Documents<B>, spec: MlaSpec) -> Tensor<B, 4> {
    let packed = primitive(packed);
    let (x, call) = (B::value(packed.clone()), MlaCall::new(documents.bounds(), spec));
    let output = B::Inner::mla_attention(x.clone(), &call);
    tensor(B::node([&packed], output.o.clone(), move |d_o| [B::Inner::mla_attention_backward(x, &call, output, d_o)]))
}

/// Attention of the tokens from `first` on in rows of one document each, without a graph; the tokens before them have
/// keys and values alone. Each has the output of [`mla_attention`], on a CPU to the bit.
///
/// # Shapes
/// - packed: `[batch, tokens, num_heads * (3 * head_dim + 2 * rope_dim)]`
/// - bounds: those that [`bounds_of_last`](crate::bounds_of_last) makes, for all layers of a pass
/// - returns: `[batch, tokens - first, num_heads, head_dim]`
pub fn mla_attention_of_last<B: DeviceBackend>(
    packed: Tensor<B, 3>,
    spec: MlaSpec,
    (first, bounds): (usize, DocumentBounds<B>),
) -> Tensor<B, 4> {
    let tokens = packed.dims()[1];
    let output = B::mla_attention(primitive(packed), &MlaCall::new(bounds, spec));
    tensor::<B, 4>(output.o).narrow(1, first, tokens - first)
}
