//! Rotary position embedding on the packed tensor, after per-head RMSNorm of queries and keys or without it: the ops
//! and their gradients on every device. Calls that the kernels of `cpu` or `cuda` refuse run `reference`.
mod call;
mod tables;
#[cfg(test)]
mod tests;

pub use call::{QkNorm, QkNormRopeCall, RopeCall};
pub use tables::{RopeTables, RotaryEmbedding};

use crate::device::{contiguous, floats, from_vec, ints, unless_f32, zeros_like};
use crate::norm::reference::{norm_heads, norm_heads_backward};
use crate::tensors::{Float, Ints, primitive, split_heads, tensor, upcast};
use crate::{DeviceBackend, SieveBackend};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorMetadata};
use burn_flex::{Flex, FlexTensor};

/// Normalises and rotates q and k inside the packed tensor; v passes through.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - positions: `[batch, seq_len]`, each below the tables' length
/// - returns: shape of qkv
pub fn qk_norm_rope<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    norm: QkNorm<B>,
    positions: Tensor<B, 2, Int>,
    rope: &RotaryEmbedding<B>,
    num_kv_heads: usize,
) -> Tensor<B, 4> {
    let [qkv, q_weight, k_weight] = [primitive(qkv), primitive(norm.q_weight), primitive(norm.k_weight)];
    let call = QkNormRopeCall {
        q_weight: B::value(q_weight.clone()),
        k_weight: B::value(k_weight.clone()),
        positions: positions.into_primitive(),
        rope: rope.tables().values(),
        num_kv_heads,
        epsilon: norm.epsilon,
    };
    let x = B::value(qkv.clone());
    let y = B::Inner::qk_norm_rope(x.clone(), call.clone());
    tensor(B::node([&qkv, &q_weight, &k_weight], y, |dy| B::Inner::qk_norm_rope_backward(x, call, dy)))
}

/// Rotates q and k inside the packed tensor, without norms; v passes through. Shapes as in [`qk_norm_rope()`].
pub fn rope<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    positions: Tensor<B, 2, Int>,
    rope: &RotaryEmbedding<B>,
    num_kv_heads: usize,
) -> Tensor<B, 4> {
    let qkv = primitive(qkv);
    let call = RopeCall { positions: positions.into_primitive(), rope: rope.tables().values(), num_kv_heads };
    let y = B::Inner::rope(B::value(qkv.clone()), call.clone());
    tensor(B::node([&qkv], y, |dy| [B::Inner::rope(dy, call.inverse())]))
}

impl<B: SieveBackend> RopeTables<B> {
    /// The tables' values, without their place in a graph.
    pub(crate) fn values(&self) -> RopeTables<B::Inner> {
        RopeTables { cos: B::value(self.cos.clone()), sin: B::value(self.sin.clone()) }
    }
}

pub(crate) mod reference {
    //! Rotary positions, with and without per-head norms, in plain Burn operations.
    use super::*;

    /// Normalises and rotates the q and k heads of `qkv [batch, seq_len, heads, head_dim]`; v passes through.
    pub fn qk_norm_rope<B: Backend>(qkv: Float<B>, call: QkNormRopeCall<B>) -> Float<B> {
        let (qkv, dtype) = upcast::<B, 4>(qkv);
        let rope = Angles::new(&call.rope, call.positions, qkv.dtype());
        let [q, k, v] = split_heads(qkv, call.num_kv_heads);
        let rotated = |x, weight| rope.rotate(norm_heads::<B>(x, weight, call.epsilon).0, 1.0);
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

    /// `[dqkv, dq_weight, dk_weight]`: the inverse rotation, then the norm's gradient.
    pub fn qk_norm_rope_backward<B: Backend>(qkv: Float<B>, call: QkNormRopeCall<B>, dy: Float<B>) -> [Float<B>; 3] {
        let (qkv, dtype) = upcast::<B, 4>(qkv);
        let (dy, _) = upcast::<B, 4>(dy);
        let rope = Angles::new(&call.rope, call.positions, qkv.dtype());
        let [q, k, _] = split_heads(qkv, call.num_kv_heads);
        let [dq, dk, dv] = split_heads(dy, call.num_kv_heads);
        let backward = |x, dy, weight| norm_heads_backward::<B>(x, weight, call.epsilon, rope.rotate(dy, -1.0));
        let (dq, dq_weight) = backward(q, dq, call.q_weight);
        let (dk, dk_weight) = backward(k, dk, call.k_weight);
        let dqkv = Tensor::cat(vec![dq, dk, dv], 2).cast(dtype);
        [primitive(dqkv), dq_weight, dk_weight]
    }

    /// Cosines and sines of each token, `[batch, seq_len, 1, head_dim / 2]`.
    pub(crate) struct Angles<B: Backend> {
        cos: Tensor<B, 4>,
        sin: Tensor<B, 4>,
    }

    impl<B: Backend> Angles<B> {
        /// Looks up each token's position in the tables.
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
            Self { cos: gather(&rope.cos), sin: gather(&rope.sin) }
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
}

pub(crate) mod cpu {
    //! Rotary positions, with and without per-head norms, on the CPU.
    use super::*;

    /// Norms and rotates the query and key heads of `qkv`, `[batch, seq_len, heads, head_dim]`, and copies the value
    /// heads. `with_op` gives the call's positions as documents, as sieve-cpu takes them.
    pub(crate) fn qk_norm_rope(qkv: FlexTensor, call: QkNormRopeCall<Flex>) -> FlexTensor {
        unless_f32!(&qkv, "qk_norm_rope": reference::qk_norm_rope(qkv, call));
        let qkv = contiguous(qkv);
        let mut y = zeros_like(&qkv);
        let (weights, epsilon, rotation) = parts(call);
        with_op(&qkv, rotation, Some((&weights, epsilon)), |op, documents| {
            sieve_cpu::qk_norm_rope_forward(op, floats(&qkv), documents, &mut y);
        });
        from_vec(y, qkv.shape())
    }

    /// Rotates the query and key heads of `qkv`, `[batch, seq_len, heads, head_dim]`, and copies the value heads.
    /// `with_op` gives the call's positions as documents, as sieve-cpu takes them.
    pub(crate) fn rope(qkv: FlexTensor, call: RopeCall<Flex>) -> FlexTensor {
        unless_f32!(&qkv, "rope": reference::rope(qkv, call));
        let qkv = contiguous(qkv);
        let mut y = zeros_like(&qkv);
        let norm = None;
        with_op(&qkv, call, norm, |op, documents| {
            sieve_cpu::rope(op, floats(&qkv), documents, &mut y);
        });
        from_vec(y, qkv.shape())
    }

    /// `[dqkv, dq_weight, dk_weight]`, from the heads before norm and rotation and the gradient `dy` of those after.
    pub(crate) fn qk_norm_rope_backward(
        qkv: FlexTensor,
        call: QkNormRopeCall<Flex>,
        dy: FlexTensor,
    ) -> [FlexTensor; 3] {
        unless_f32!(&qkv, "qk_norm_rope_backward": reference::qk_norm_rope_backward(qkv, call, dy));
        let [qkv, dy] = [qkv, dy].map(contiguous);
        let (weights, epsilon, rotation) = parts(call);
        let (mut dqkv, [mut dq, mut dk]) = (zeros_like(&qkv), weights.each_ref().map(zeros_like));
        with_op(&qkv, rotation, Some((&weights, epsilon)), |op, documents| {
            let (x, dy) = (floats(&qkv), floats(&dy));
            sieve_cpu::qk_norm_rope_backward(op, x, documents, dy, &mut dqkv, &mut dq, &mut dk);
        });
        let shape = weights[0].shape();
        [from_vec(dqkv, qkv.shape()), from_vec(dq, shape.clone()), from_vec(dk, shape)]
    }

    /// The contiguous norm weights of a call, its epsilon, and its rotation.
    fn parts(call: QkNormRopeCall<Flex>) -> ([FlexTensor; 2], f64, RopeCall<Flex>) {
        let rotation = RopeCall { positions: call.positions, rope: call.rope, num_kv_heads: call.num_kv_heads };
        ([call.q_weight, call.k_weight].map(contiguous), call.epsilon, rotation)
    }

    /// Calls `run` with the sizes, tables and positions of a rotation, and with norm weights and epsilon where there
    /// are norms, in the form that the ops of `sieve-cpu` take.
    fn with_op(
        qkv: &FlexTensor,
        call: RopeCall<Flex>,
        norm: Option<(&[FlexTensor; 2], f64)>,
        run: impl FnOnce(&sieve_cpu::QkNormRope<'_>, sieve_cpu::Documents<'_>),
    ) {
        let shape = qkv.shape();
        // The kernels compute a position as the token's column minus its document's start, and read nothing else of the
        // documents. These starts give the call's positions.
        let columns = (0..shape[1] as i32).cycle();
        let positions = contiguous(call.positions);
        let starts = ints(&positions).iter().zip(columns);
        let start: Vec<i32> = starts.map(|(&position, column)| column - position).collect();
        let [cos, sin] = [call.rope.cos, call.rope.sin].map(contiguous);
        let ([q_weight, k_weight], eps) = match norm {
            Some((weights, epsilon)) => (weights.each_ref().map(floats), epsilon as f32),
            None => ([[].as_slice(); 2], 0.0),
        };
        let op = sieve_cpu::QkNormRope {
            batch: shape[0],
            seq_len: shape[1],
            num_heads: shape[2] - 2 * call.num_kv_heads,
            num_kv_heads: call.num_kv_heads,
            head_dim: shape[3],
            q_weight,
            k_weight,
            eps,
            cos: floats(&cos),
            sin: floats(&sin),
            position_offset: 0,
        };
        run(&op, sieve_cpu::Documents::new(&start, &start));
    }
}

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    //! Rotary positions, with and without per-head norms, on CUDA.
    use super::*;
    use crate::Cuda;
    use crate::device::{CudaPrimitive, cast, kernel_or, tensors};
    use crate::swiglu::cuda::reuse;
    use sieve_kernels::{ToBurn, kernel_tensor};

    pub(crate) fn qk_norm_rope(qkv: CudaPrimitive, call: QkNormRopeCall<Cuda>) -> CudaPrimitive {
        let x = kernel_tensor(qkv.clone());
        let attempt = with_kernel_call(&call, |call| call.qk_norm_rope_forward(&x));
        kernel_or("qk_norm_rope", attempt.map(ToBurn::burn), || reference::qk_norm_rope(qkv, call))
    }

    pub(crate) fn rope(qkv: CudaPrimitive, call: RopeCall<Cuda>) -> CudaPrimitive {
        let (packed, positions) = (kernel_tensor(qkv.clone()), kernel_tensor(call.positions.clone()));
        let tables = [cast(&call.rope.cos, DType::F32), cast(&call.rope.sin, DType::F32)];
        let attempt = sieve_kernels::step::rope(&packed, &positions, tables.each_ref(), call.num_kv_heads);
        kernel_or("rope", attempt.map(ToBurn::burn), || reference::rope(qkv, call))
    }

    /// `[dqkv, dq_weight, dk_weight]`, the weights' gradients in f32; dqkv reuses the memory of `dy` if it has no other
    /// owner.
    pub(crate) fn qk_norm_rope_backward(
        qkv: CudaPrimitive,
        call: QkNormRopeCall<Cuda>,
        dy: CudaPrimitive,
    ) -> [CudaPrimitive; 3] {
        let is_free = dy.can_mut();
        let [x, d] = tensors([&qkv, &dy]);
        let reuse = reuse(is_free && d.is_contiguous());
        let attempt = with_kernel_call(&call, |call| call.qk_norm_rope_backward(&x, &d, reuse));
        let attempt = attempt.map(|all| [all.dqkv, all.dq_weight, all.dk_weight].map(ToBurn::burn));
        kernel_or("qk_norm_rope_backward", attempt, || reference::qk_norm_rope_backward(qkv, call, dy))
    }

    /// Calls `launch` with the call's operands as kernels take them: CUDA tensors, with f32 tables.
    fn with_kernel_call<T>(
        call: &QkNormRopeCall<Cuda>,
        launch: impl FnOnce(sieve_kernels::step::QkNormRope<'_>) -> T,
    ) -> T {
        let [q_weight, k_weight, positions] = tensors([&call.q_weight, &call.k_weight, &call.positions]);
        launch(sieve_kernels::step::QkNormRope {
            q_weight: &q_weight,
            k_weight: &k_weight,
            positions: &positions,
            cos: &cast(&call.rope.cos, DType::F32),
            sin: &cast(&call.rope.sin, DType::F32),
            num_kv_heads: call.num_kv_heads,
            epsilon: call.epsilon as f32,
        })
    }
}
