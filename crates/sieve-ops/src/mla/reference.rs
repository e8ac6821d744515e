//! Multi-head latent attention's ops in plain Burn operations.
use super::backend::{MlaPackCall, MlaSpec};
use crate::attention::AttentionOutput;
use crate::attention::reference::{separate_attention, separate_attention_backward};
use crate::documents::DocumentBounds;
use crate::rope::reference::Angles;
use crate::tensors::{Float, primitive, upcast};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// `[.., head_dim + rope_dim]` split into its two parts.
fn parts<B: Backend>(x: Tensor<B, 4>, spec: MlaSpec) -> [Tensor<B, 4>; 2] {
    [
        x.clone().narrow(3, 0, spec.head_dim),
        x.narrow(3, spec.head_dim, spec.rope_dim),
    ]
}

/// See [`crate::mla_pack`].
pub fn mla_pack<B: Backend>([q, kv, k_rope]: [Float<B>; 3], call: MlaPackCall<B>) -> Float<B> {
    let spec = call.spec;
    let (q, dtype) = upcast::<B, 3>(q);
    let (kv, _) = upcast::<B, 3>(kv);
    let (k_rope, _) = upcast::<B, 3>(k_rope);
    let [batch, n, _] = q.dims();
    let MlaSpec {
        num_heads,
        head_dim,
        rope_dim,
        ..
    } = spec;
    let angles = Angles::new(&call.rope, call.positions, q.dtype());
    let [q_c, q_r] = parts(q.reshape([batch, n, num_heads, spec.key_dim()]), spec);
    let kv = kv.reshape([batch, n, num_heads, 2 * head_dim]);
    let k_c = kv.clone().narrow(3, 0, head_dim);
    let v = kv.narrow(3, head_dim, head_dim);
    let k_r = angles
        .rotate(k_rope.reshape([batch, n, 1, rope_dim]), 1.0)
        .expand([batch, n, num_heads, rope_dim]);
    let q = Tensor::cat(vec![q_c, angles.rotate(q_r, 1.0)], 3);
    let k = Tensor::cat(vec![k_c, k_r], 3);
    primitive(join([q, k, v]).cast(dtype))
}

/// `[dq, dkv, dk_rope]` of [`mla_pack`].
pub fn mla_pack_backward<B: Backend>(call: MlaPackCall<B>, dy: Float<B>) -> [Float<B>; 3] {
    let spec = call.spec;
    let (dy, dtype) = upcast::<B, 3>(dy);
    let [batch, n, _] = dy.dims();
    let MlaSpec {
        num_heads,
        head_dim,
        rope_dim,
        ..
    } = spec;
    let angles = Angles::new(&call.rope, call.positions, dy.dtype());
    let [dq, dk, dv] = split(dy, spec);
    let [dq_c, dq_r] = parts(dq, spec);
    let [dk_c, dk_r] = parts(dk, spec);
    let dq = Tensor::cat(vec![dq_c, angles.rotate(dq_r, -1.0)], 3);
    let dkv = Tensor::cat(vec![dk_c, dv], 3);
    let dk_rope = angles.rotate(dk_r.sum_dim(2), -1.0);
    [
        primitive(dq.reshape([batch, n, num_heads * spec.key_dim()]).cast(dtype)),
        primitive(dkv.reshape([batch, n, num_heads * 2 * head_dim]).cast(dtype)),
        primitive(dk_rope.reshape([batch, n, rope_dim]).cast(dtype)),
    ]
}

/// q, k, v as one token-major tensor.
fn join<B: Backend>(qkv: [Tensor<B, 4>; 3]) -> Tensor<B, 3> {
    let flat = qkv.map(|x| {
        let [batch, n, heads, width] = x.dims();
        x.reshape([batch, n, heads * width])
    });
    Tensor::cat(flat.into(), 2)
}

/// The inverse of [`join`].
fn split<B: Backend>(packed: Tensor<B, 3>, spec: MlaSpec) -> [Tensor<B, 4>; 3] {
    let [batch, n, _] = packed.dims();
    let MlaSpec {
        num_heads, head_dim, ..
    } = spec;
    let wide = num_heads * spec.key_dim();
    let part = |first: usize, len: usize, width: usize| {
        let x = packed.clone().narrow(2, first, len);
        x.reshape([batch, n, num_heads, width])
    };
    [
        part(0, wide, spec.key_dim()),
        part(wide, wide, spec.key_dim()),
        part(2 * wide, num_heads * head_dim, head_dim),
    ]
}

/// See [`crate::mla_attention`].
pub fn mla_attention<B: Backend>(packed: Float<B>, documents: &DocumentBounds<B>, spec: MlaSpec) -> AttentionOutput<B> {
    let (packed, dtype) = upcast::<B, 3>(packed);
    separate_attention(split(packed, spec), documents, spec.attention(), dtype)
}

/// Gradient of [`mla_attention`].
pub fn mla_attention_backward<B: Backend>(
    packed: Float<B>,
    documents: &DocumentBounds<B>,
    spec: MlaSpec,
    output: AttentionOutput<B>,
    d_o: Float<B>,
) -> Float<B> {
    let (packed, dtype) = upcast::<B, 3>(packed);
    let qkv = split(packed, spec);
    let gradients = separate_attention_backward(qkv, documents, spec.attention(), output, d_o);
    let packed = join(gradients);
    primitive(packed.cast(dtype))
}
