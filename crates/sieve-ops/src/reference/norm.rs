//! RMSNorm, and per-head q/k-norm with rotary positions.
use super::{primitive, rows, tensor, unrows, upcast};
use crate::RopeTables;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Int, Tensor};

/// `x / sqrt(mean(x²) + epsilon) * weight` over the last dimension.
pub fn rms_norm<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    epsilon: f64,
) -> FloatTensor<B> {
    let (x, dtype, shape) = rows::<B>(x);
    let weight = tensor::<B, 1>(weight).cast(x.dtype());
    unrows(normalise(x, epsilon).0 * weight.unsqueeze(), dtype, shape)
}

/// With `r = 1/sqrt(mean(x²) + epsilon)`, `n = x r`, `g = dy * weight`: `dx = r (g - n mean(g n))`, `dweight = sum(dy n)`.
pub fn rms_norm_backward<B: Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    epsilon: f64,
    dy: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (x, dtype, shape) = rows::<B>(x);
    let (dy, _, _) = rows::<B>(dy);
    let weight_dtype = burn::tensor::TensorMetadata::dtype(&weight);
    let weight = tensor::<B, 1>(weight).cast(x.dtype());
    let (dx, dweight) = normalise_backward(x, weight, epsilon, dy);
    (
        unrows(dx, dtype, shape),
        primitive(dweight.cast(weight_dtype)),
    )
}

/// `(n, r)` of the rows.
fn normalise<B: Backend>(x: Tensor<B, 2>, epsilon: f64) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let r = (x.clone().powi_scalar(2).mean_dim(1) + epsilon)
        .sqrt()
        .recip();
    (x * r.clone(), r)
}

fn normalise_backward<B: Backend>(
    x: Tensor<B, 2>,
    weight: Tensor<B, 1>,
    epsilon: f64,
    dy: Tensor<B, 2>,
) -> (Tensor<B, 2>, Tensor<B, 1>) {
    let (n, r) = normalise(x, epsilon);
    let g = dy.clone() * weight.unsqueeze();
    let dx = r * (g.clone() - n.clone() * (g * n.clone()).mean_dim(1));
    (dx, (dy * n).sum_dim(0).squeeze_dim(0))
}

/// The arguments that q/k-norm with RoPE has beside the tensor and the tables.
#[derive(Clone, Debug)]
pub struct QkNormRope<B: Backend> {
    /// `[head_dim]`.
    pub q_weight: FloatTensor<B>,
    /// `[head_dim]`.
    pub k_weight: FloatTensor<B>,
    /// `[batch, seq_len]`.
    pub positions: IntTensor<B>,
    /// Key heads, and as many value heads, after the query heads.
    pub num_kv_heads: usize,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// Normalises and rotates the q and k heads of `qkv [batch, seq_len, heads, head_dim]`; v passes through.
pub fn qk_norm_rope<B: Backend>(
    qkv: FloatTensor<B>,
    args: QkNormRope<B>,
    rope: &RopeTables<B>,
) -> FloatTensor<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let rope = Angles::new(rope, args.positions, qkv.dtype());
    let [q, k, v] = split_heads(qkv, args.num_kv_heads);
    let rotated = |x: Tensor<B, 4>, weight: FloatTensor<B>| {
        let shape = x.dims();
        let weight = tensor::<B, 1>(weight).cast(x.dtype());
        let x = x.reshape([shape[0] * shape[1] * shape[2], shape[3]]);
        let normed = normalise(x, args.epsilon).0 * weight.unsqueeze();
        rope.rotate(normed.reshape(shape), 1.0)
    };
    let q = rotated(q, args.q_weight);
    let k = rotated(k, args.k_weight);
    primitive(Tensor::cat(vec![q, k, v], 2).cast(dtype))
}

/// `(dqkv, dq_weight, dk_weight)`: the inverse rotation, then the norm's gradient.
pub fn qk_norm_rope_backward<B: Backend>(
    qkv: FloatTensor<B>,
    args: QkNormRope<B>,
    rope: &RopeTables<B>,
    dy: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>) {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let (dy, _) = upcast::<B, 4>(dy);
    let rope = Angles::new(rope, args.positions, qkv.dtype());
    let [q, k, _] = split_heads(qkv, args.num_kv_heads);
    let [dq, dk, dv] = split_heads(dy, args.num_kv_heads);
    let backward = |x: Tensor<B, 4>, dy: Tensor<B, 4>, weight: FloatTensor<B>| {
        let shape = x.dims();
        let weight_dtype = burn::tensor::TensorMetadata::dtype(&weight);
        let weight = tensor::<B, 1>(weight).cast(x.dtype());
        let flat = [shape[0] * shape[1] * shape[2], shape[3]];
        let dy = rope.rotate(dy, -1.0).reshape(flat);
        let (dx, dweight) = normalise_backward(x.reshape(flat), weight, args.epsilon, dy);
        (dx.reshape(shape), primitive(dweight.cast(weight_dtype)))
    };
    let (dq, dq_weight) = backward(q, dq, args.q_weight);
    let (dk, dk_weight) = backward(k, dk, args.k_weight);
    (
        primitive(Tensor::cat(vec![dq, dk, dv], 2).cast(dtype)),
        dq_weight,
        dk_weight,
    )
}

/// `[q, k, v]` of a packed tensor.
pub(super) fn split_heads<B: Backend>(qkv: Tensor<B, 4>, num_kv_heads: usize) -> [Tensor<B, 4>; 3] {
    let [_, _, heads, _] = qkv.dims();
    let num_heads = heads - 2 * num_kv_heads;
    [
        qkv.clone().narrow(2, 0, num_heads),
        qkv.clone().narrow(2, num_heads, num_kv_heads),
        qkv.narrow(2, num_heads + num_kv_heads, num_kv_heads),
    ]
}

/// Cosines and sines of each token, `[batch, seq_len, 1, head_dim / 2]`.
pub(super) struct Angles<B: Backend> {
    cos: Tensor<B, 4>,
    sin: Tensor<B, 4>,
}

impl<B: Backend> Angles<B> {
    pub(super) fn new(
        rope: &RopeTables<B>,
        positions: IntTensor<B>,
        dtype: burn::tensor::DType,
    ) -> Self {
        let positions: Tensor<B, 2, Int> = Tensor::from_primitive(positions);
        let [batch, seq_len] = positions.dims();
        let positions = positions.reshape([batch * seq_len]);
        let gather = |table: &FloatTensor<B>| {
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
    pub(super) fn rotate(&self, x: Tensor<B, 4>, sign: f64) -> Tensor<B, 4> {
        let [_, _, _, head_dim] = x.dims();
        let half = head_dim / 2;
        let (x1, x2) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
        let sin = self.sin.clone() * sign;
        let y1 = x1.clone() * self.cos.clone() - x2.clone() * sin.clone();
        let y2 = x2 * self.cos.clone() + x1 * sin;
        Tensor::cat(vec![y1, y2], 3)
    }
}
