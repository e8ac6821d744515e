//! Multi-head latent attention's ops in plain Burn operations.
use super::{MlaCall, MlaPackCall, MlaSpec};
use crate::AttentionOutput;
use crate::attention::reference::{separate_attention, separate_attention_backward};
use crate::norm::reference::{norm_heads, norm_heads_backward};
use crate::rope::reference::Angles;
use crate::tensors::{Float, primitive, tensor, upcast};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};

/// Splits `[.., head_dim + rope_dim]` into the unrotated and the rotated columns.
fn parts<B: Backend>(x: Tensor<B, 4>, spec: MlaSpec) -> [Tensor<B, 4>; 2] {
    [x.clone().narrow(3, 0, spec.head_dim), x.narrow(3, spec.head_dim, spec.rope_dim)]
}

/// q, k, v before norms and rotation, `[batch, seq_len, num_heads, width]`; k_rope is repeated for each head.
fn heads<B: Backend>([q, kv, k_rope]: [Tensor<B, 3>; 3], spec: MlaSpec) -> [Tensor<B, 4>; 3] {
    let MlaSpec { num_heads, head_dim, rope_dim, .. } = spec;
    let [batch, n, _] = q.dims();
    let kv = kv.reshape([batch, n, num_heads, 2 * head_dim]);
    let k_rope = k_rope.reshape([batch, n, 1, rope_dim]);
    let k_c = kv.clone().narrow(3, 0, head_dim);
    [
        q.reshape([batch, n, num_heads, spec.key_dim()]),
        Tensor::cat(vec![k_c, k_rope.expand([batch, n, num_heads, rope_dim])], 3),
        kv.narrow(3, head_dim, head_dim),
    ]
}

/// Reference of [`crate::mla_pack`].
pub fn mla_pack<B: Backend>(inputs: [Float<B>; 3], call: MlaPackCall<B>) -> (Float<B>, Option<[Float<B>; 2]>) {
    let spec = call.spec;
    let dtype = inputs[0].dtype();
    let inputs = inputs.map(|x| upcast::<B, 3>(x).0);
    let k_rope = inputs[2].clone();
    let [mut q, mut k, v] = heads(inputs, spec);
    let [batch, n, num_heads, _] = q.dims();
    let angles = Angles::new(&call.rope, call.positions, q.dtype());
    let mut keys = None;
    if let Some(norm) = call.norm {
        (q, _) = norm_heads::<B>(q, norm.q_weight, norm.epsilon);
        let inverse;
        (k, inverse) = norm_heads::<B>(k, norm.k_weight.clone(), norm.epsilon);
        let k_weight = tensor::<B, 1>(norm.k_weight).cast(k.dtype());
        let k_rope = k_rope * k_weight.narrow(0, spec.head_dim, spec.rope_dim).unsqueeze();
        let rotated = angles.rotate(k_rope.unsqueeze_dim(2), 1.0).squeeze_dim::<3>(2);
        let inverse = inverse.reshape([batch, n, num_heads]);
        keys = Some([primitive(rotated.cast(dtype)), primitive(inverse)]);
    }
    let rotated = |x| {
        let [content, rope] = parts(x, spec);
        Tensor::cat(vec![content, angles.rotate(rope, 1.0)], 3)
    };
    let packed = join([rotated(q), rotated(k), v]);
    (primitive(packed.cast(dtype)), keys)
}

/// `[dq, dkv, dk_rope]` of [`mla_pack`] and, with norms, `[dq_weight, dk_weight]`; then `normed` holds the inputs.
pub fn mla_pack_backward<B: Backend>(
    call: MlaPackCall<B>,
    normed: Option<[Float<B>; 3]>,
    dy: Float<B>,
) -> ([Float<B>; 3], Option<[Float<B>; 2]>) {
    let spec = call.spec;
    let (dy, dtype) = upcast::<B, 3>(dy);
    let [batch, n, _] = dy.dims();
    let angles = Angles::new(&call.rope, call.positions, dy.dtype());
    let unrotated = |x| {
        let [content, rope] = parts(x, spec);
        Tensor::cat(vec![content, angles.rotate(rope, -1.0)], 3)
    };
    let [dq, dk, dv] = split(dy, spec);
    let [mut dq, mut dk] = [dq, dk].map(unrotated);
    let mut weights = None;
    if let (Some(norm), Some(inputs)) = (call.norm, normed) {
        let [q, k, _] = heads(inputs.map(|x| upcast::<B, 3>(x).0), spec);
        let (of_q, dq_weight) = norm_heads_backward::<B>(q, norm.q_weight, norm.epsilon, dq);
        let (of_k, dk_weight) = norm_heads_backward::<B>(k, norm.k_weight, norm.epsilon, dk);
        (dq, dk, weights) = (of_q, of_k, Some([dq_weight, dk_weight]));
    }
    let [dk_c, dk_r] = parts(dk, spec);
    let dkv = Tensor::cat(vec![dk_c, dv], 3);
    let gradients = [
        primitive(dq.reshape([batch, n, spec.num_heads * spec.key_dim()]).cast(dtype)),
        primitive(dkv.reshape([batch, n, spec.num_heads * 2 * spec.head_dim]).cast(dtype)),
        primitive(dk_r.sum_dim(2).reshape([batch, n, spec.rope_dim]).cast(dtype)),
    ];
    (gradients, weights)
}

/// Concatenates q, k, v of each token, `[batch, seq_len, num_heads * (2 * key_dim + head_dim)]`.
fn join<B: Backend>(qkv: [Tensor<B, 4>; 3]) -> Tensor<B, 3> {
    let flat = qkv.map(|x| {
        let [batch, n, heads, width] = x.dims();
        x.reshape([batch, n, heads * width])
    });
    Tensor::cat(flat.into(), 2)
}

/// The inverse of [`join`]: q, k and v of the packed tensor.
fn split<B: Backend>(packed: Tensor<B, 3>, spec: MlaSpec) -> [Tensor<B, 4>; 3] {
    let [batch, n, _] = packed.dims();
    let MlaSpec { num_heads, head_dim, .. } = spec;
    let wide = num_heads * spec.key_dim();
    let part = |first: usize, len: usize, width: usize| {
        let x = packed.clone().narrow(2, first, len);
        x.reshape([batch, n, num_heads, width])
    };
    [part(0, wide, spec.key_dim()), part(wide, wide, spec.key_dim()), part(2 * wide, num_heads * head_dim, head_dim)]
}

/// Reference of [`crate::mla_attention`].
pub fn mla_attention<B: Backend>(packed: Float<B>, call: &MlaCall<B>) -> AttentionOutput<B> {
    let (packed, dtype) = upcast::<B, 3>(packed);
    separate_attention(split(packed, call.spec), &call.attention(), dtype)
}

/// Gradient of the packed tensor of [`mla_attention`].
pub fn mla_attention_backward<B: Backend>(
    packed: Float<B>,
    call: &MlaCall<B>,
    output: AttentionOutput<B>,
    d_o: Float<B>,
) -> Float<B> {
    let (packed, dtype) = upcast::<B, 3>(packed);
    let qkv = split(packed, call.spec);
    let gradients = separate_attention_backward(qkv, &call.attention(), output, d_o);
    let packed = join(gradients);
    primitive(packed.cast(dtype))
}
