//! Rotary positions, with and without per-head norms, in plain Burn operations.
use super::backend::{QkNormRopeCall, RopeCall, RopeTables};
use crate::norm::reference::{normalise, normalise_backward};
use crate::tensors::{Float, Ints, primitive, split_heads, tensor, upcast};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorMetadata};

/// Normalises and rotates the q and k heads of `qkv [batch, seq_len, heads, head_dim]`; v passes through.
pub fn qk_norm_rope<B: Backend>(qkv: Float<B>, call: QkNormRopeCall<B>) -> Float<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let rope = Angles::new(&call.rope, call.positions, qkv.dtype());
    let [q, k, v] = split_heads(qkv, call.num_kv_heads);
    let rotated = |x: Tensor<B, 4>, weight: Float<B>| {
        let shape = x.dims();
        let weight = tensor::<B, 1>(weight).cast(x.dtype());
        let x = x.reshape([shape[0] * shape[1] * shape[2], shape[3]]);
        let normed = normalise(x, call.epsilon).0 * weight.unsqueeze();
        rope.rotate(normed.reshape(shape), 1.0)
    };
    let q = rotated(q, call.q_weight);
    let k = rotated(k, call.k_weight);
    primitive(Tensor::cat(vec![q, k, v], 2).cast(dtype))
}

/// Rotates the q and k heads of `qkv [batch, seq_len, heads, head_dim]`; v passes through.
pub fn rope<B: Backend>(qkv: Float<B>, call: RopeCall<B>) -> Float<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let angles = Angles::new(&call.rope, call.positions, qkv.dtype());
    let [q, k, v] = split_heads(qkv, call.num_kv_heads);
    let [q, k] = [q, k].map(|x| angles.rotate(x, 1.0));
    primitive(Tensor::cat(vec![q, k, v], 2).cast(dtype))
}

/// `(dqkv, dq_weight, dk_weight)`: the inverse rotation, then the norm's gradient.
pub fn qk_norm_rope_backward<B: Backend>(
    qkv: Float<B>,
    call: QkNormRopeCall<B>,
    dy: Float<B>,
) -> (Float<B>, Float<B>, Float<B>) {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let (dy, _) = upcast::<B, 4>(dy);
    let rope = Angles::new(&call.rope, call.positions, qkv.dtype());
    let [q, k, _] = split_heads(qkv, call.num_kv_heads);
    let [dq, dk, dv] = split_heads(dy, call.num_kv_heads);
    let backward = |x: Tensor<B, 4>, dy: Tensor<B, 4>, weight: Float<B>| {
        let shape = x.dims();
        let weight_dtype = weight.dtype();
        let weight = tensor::<B, 1>(weight).cast(x.dtype());
        let flat = [shape[0] * shape[1] * shape[2], shape[3]];
        let dy = rope.rotate(dy, -1.0).reshape(flat);
        let (dx, dweight) = normalise_backward(x.reshape(flat), weight, call.epsilon, dy);
        (dx.reshape(shape), primitive(dweight.cast(weight_dtype)))
    };
    let (dq, dq_weight) = backward(q, dq, call.q_weight);
    let (dk, dk_weight) = backward(k, dk, call.k_weight);
    (
        primitive(Tensor::cat(vec![dq, dk, dv], 2).cast(dtype)),
        dq_weight,
        dk_weight,
    )
}

/// Cosines and sines of each token, `[batch, seq_len, 1, head_dim / 2]`.
pub(crate) struct Angles<B: Backend> {
    cos: Tensor<B, 4>,
    sin: Tensor<B, 4>,
}

impl<B: Backend> Angles<B> {
    pub(crate) fn new(rope: &RopeTables<B>, positions: Ints<B>, dtype: DType) -> Self {
        let positions: Tensor<B, 2, Int> = Tensor::from_primitive(positions);
        let [batch, seq_len] = positions.dims();
        let positions = positions.reshape([batch * seq_len]);
        let gather = |table: &Float<B>| {
            let table = tensor::<B, 2>(table.clone());
            let [_, half] = table.dims();
            let rows = table.select(0, positions.clone());
            rows.reshape([batch, seq_len, 1, half]).cast(dtype)
        };
        Self {
            cos: gather(&rope.cos),
            sin: gather(&rope.sin),
        }
    }

    /// Rotates the pairs `(x[i], x[i + head_dim / 2])` by the angle, or by its negative for `sign = -1`.
    pub(crate) fn rotate(&self, x: Tensor<B, 4>, sign: f64) -> Tensor<B, 4> {
        let [_, _, _, head_dim] = x.dims();
        let half = head_dim / 2;
        let (x1, x2) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
        let sin = self.sin.clone() * sign;
        let y1 = x1.clone() * self.cos.clone() - x2.clone() * sin.clone();
        let y2 = x2 * self.cos.clone() + x1 * sin;
        Tensor::cat(vec![y1, y2], 3)
    }
}
