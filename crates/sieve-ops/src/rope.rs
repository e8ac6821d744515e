//! Rotary position embedding on the packed tensor, after per-head RMSNorm of queries and keys or without it: the ops,
//! their gradients, and all on every device.
mod tables;
#[cfg(test)]
mod tests;

pub use tables::{RopeTables, RotaryEmbedding};

use crate::device::{
    CudaPrimitive, cast, contiguous, floats, from_vec, ints, kernel_or, tensors, unless_f32, zeros_like,
};
use crate::norm::reference::{normalise, normalise_backward};
use crate::swiglu::reuse;
use crate::tensors::{Float, Ints, primitive, split_heads, tensor, upcast};
use crate::{Cuda, DeviceBackend, SieveBackend};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use sieve_kernels::{CudaTensor, KernelError, ToBurn, kernel_tensor};

/// Weights of the two per-head norms and what they share.
#[derive(Clone, Debug)]
pub struct QkNorm<B: Backend> {
    /// `[head_dim]`.
    pub q_weight: Tensor<B, 1>,
    /// `[head_dim]`.
    pub k_weight: Tensor<B, 1>,
    /// Added to the mean square.
    pub epsilon: f64,
}

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
    tensor(B::node([&qkv, &q_weight, &k_weight], y, |dy| {
        B::Inner::qk_norm_rope_backward(x, call, dy)
    }))
}

/// Rotates q and k inside the packed tensor, without norms; v passes through. Shapes as in [`qk_norm_rope()`].
pub fn rope<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    positions: Tensor<B, 2, Int>,
    rope: &RotaryEmbedding<B>,
    num_kv_heads: usize,
) -> Tensor<B, 4> {
    let qkv = primitive(qkv);
    let call = RopeCall {
        positions: positions.into_primitive(),
        rope: rope.tables().values(),
        num_kv_heads,
    };
    let y = B::Inner::rope(B::value(qkv.clone()), call.clone());
    tensor(B::node([&qkv], y, |dy| [B::Inner::rope(dy, call.inverse())]))
}

/// What a call of [`crate::qk_norm_rope`] has beside the packed tensor.
#[derive(Clone, Debug)]
pub struct QkNormRopeCall<B: Backend> {
    /// `[head_dim]`.
    pub q_weight: Float<B>,
    /// `[head_dim]`.
    pub k_weight: Float<B>,
    /// `[batch, seq_len]`, an index into the tables' rows.
    pub positions: Ints<B>,
    /// Tables of the angles.
    pub rope: RopeTables<B>,
    /// Key heads, and as many value heads, after the query heads.
    pub num_kv_heads: usize,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// What a call of [`crate::rope`] has beside the packed tensor.
#[derive(Clone, Debug)]
pub struct RopeCall<B: Backend> {
    /// `[batch, seq_len]`, an index into the tables' rows.
    pub positions: Ints<B>,
    /// Tables of the angles.
    pub rope: RopeTables<B>,
    /// Key heads, and as many value heads, after the query heads.
    pub num_kv_heads: usize,
}

impl<B: Backend> RopeCall<B> {
    /// The rotation by the negative angles, which is the gradient.
    pub(crate) fn inverse(self) -> Self {
        let rope = RopeTables {
            sin: B::float_neg(self.rope.sin),
            ..self.rope
        };
        Self { rope, ..self }
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

    /// `[dqkv, dq_weight, dk_weight]`: the inverse rotation, then the norm's gradient.
    pub fn qk_norm_rope_backward<B: Backend>(qkv: Float<B>, call: QkNormRopeCall<B>, dy: Float<B>) -> [Float<B>; 3] {
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
        let dqkv = Tensor::cat(vec![dq, dk, dv], 2).cast(dtype);
        [primitive(dqkv), dq_weight, dk_weight]
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
}

pub(crate) mod cpu {
    //! Rotary positions, with and without per-head norms, on the CPU.
    use super::*;

    pub(crate) fn qk_norm_rope(qkv: FlexTensor, call: QkNormRopeCall<Flex>) -> FlexTensor {
        unless_f32!(&qkv, "qk_norm_rope": reference::qk_norm_rope(qkv, call));
        let (qkv, operands) = (contiguous(qkv), Operands::new(call));
        let mut y = zeros_like(&qkv);
        let documents = operands.tokens.documents();
        sieve_cpu::qk_norm_rope_forward(&operands.op(&qkv), floats(&qkv), documents, &mut y);
        from_vec(y, qkv.shape())
    }

    pub(crate) fn rope(qkv: FlexTensor, call: RopeCall<Flex>) -> FlexTensor {
        unless_f32!(&qkv, "rope": reference::rope(qkv, call));
        let (qkv, tokens) = (contiguous(qkv), Tokens::new(call));
        let mut y = zeros_like(&qkv);
        sieve_cpu::rope(&tokens.op(&qkv), floats(&qkv), tokens.documents(), &mut y);
        from_vec(y, qkv.shape())
    }

    pub(crate) fn qk_norm_rope_backward(
        qkv: FlexTensor,
        call: QkNormRopeCall<Flex>,
        dy: FlexTensor,
    ) -> [FlexTensor; 3] {
        unless_f32!(&qkv, "qk_norm_rope_backward": reference::qk_norm_rope_backward(qkv, call, dy));
        let [qkv, dy] = [qkv, dy].map(contiguous);
        let operands = Operands::new(call);
        let mut dqkv = zeros_like(&qkv);
        let (mut dq, mut dk) = (zeros_like(&operands.q_weight), zeros_like(&operands.k_weight));
        sieve_cpu::qk_norm_rope_backward(
            &operands.op(&qkv),
            floats(&qkv),
            operands.tokens.documents(),
            floats(&dy),
            &mut dqkv,
            &mut dq,
            &mut dk,
        );
        let weight_shape = operands.q_weight.shape();
        [
            from_vec(dqkv, qkv.shape()),
            from_vec(dq, weight_shape.clone()),
            from_vec(dk, weight_shape),
        ]
    }

    /// The arguments of q/k-norm with RoPE, contiguous and owned.
    struct Operands {
        q_weight: FlexTensor,
        k_weight: FlexTensor,
        epsilon: f64,
        tokens: Tokens,
    }

    impl Operands {
        fn new(call: QkNormRopeCall<Flex>) -> Self {
            Self {
                q_weight: contiguous(call.q_weight),
                k_weight: contiguous(call.k_weight),
                epsilon: call.epsilon,
                tokens: Tokens::new(RopeCall {
                    positions: call.positions,
                    rope: call.rope,
                    num_kv_heads: call.num_kv_heads,
                }),
            }
        }

        fn op(&self, qkv: &FlexTensor) -> sieve_cpu::QkNormRope<'_> {
            sieve_cpu::QkNormRope {
                q_weight: floats(&self.q_weight),
                k_weight: floats(&self.k_weight),
                eps: self.epsilon as f32,
                ..self.tokens.op(qkv)
            }
        }
    }

    /// Tables and positions, contiguous and owned.
    struct Tokens {
        cos: FlexTensor,
        sin: FlexTensor,
        start: Vec<i32>,
        num_kv_heads: usize,
    }

    impl Tokens {
        fn new(call: RopeCall<Flex>) -> Self {
            let seq_len = call.positions.shape()[1];
            // The kernel counts positions from a document's start; any position is a start for some column.
            let start = ints(&contiguous(call.positions))
                .iter()
                .enumerate()
                .map(|(token, &position)| (token % seq_len) as i32 - position)
                .collect();
            Self {
                cos: contiguous(call.rope.cos),
                sin: contiguous(call.rope.sin),
                start,
                num_kv_heads: call.num_kv_heads,
            }
        }

        /// The rotation alone.
        fn op(&self, qkv: &FlexTensor) -> sieve_cpu::QkNormRope<'_> {
            let shape = qkv.shape();
            sieve_cpu::QkNormRope {
                batch: shape[0],
                seq_len: shape[1],
                num_heads: shape[2] - 2 * self.num_kv_heads,
                num_kv_heads: self.num_kv_heads,
                head_dim: shape[3],
                q_weight: &[],
                k_weight: &[],
                eps: 0.0,
                cos: floats(&self.cos),
                sin: floats(&self.sin),
                position_offset: 0,
            }
        }

        /// Only the starts are read by the kernel.
        fn documents(&self) -> sieve_cpu::Documents<'_> {
            sieve_cpu::Documents {
                start: &self.start,
                end: &self.start,
            }
        }
    }
}

pub(crate) mod cuda {
    //! Rotary positions, with and without per-head norms, on CUDA.
    use super::*;

    pub(crate) fn qk_norm_rope(qkv: CudaPrimitive, call: QkNormRopeCall<Cuda>) -> CudaPrimitive {
        let attempt = Rotation::new(&call).forward(&qkv);
        kernel_or("qk_norm_rope", attempt, || reference::qk_norm_rope(qkv, call))
    }

    pub(crate) fn rope(qkv: CudaPrimitive, call: RopeCall<Cuda>) -> CudaPrimitive {
        let (packed, positions) = (kernel_tensor(qkv.clone()), kernel_tensor(call.positions.clone()));
        let tables = [cast(&call.rope.cos, DType::F32), cast(&call.rope.sin, DType::F32)];
        let attempt = sieve_kernels::step::rope(&packed, &positions, tables.each_ref(), call.num_kv_heads);
        kernel_or("rope", attempt.map(ToBurn::burn), || reference::rope(qkv, call))
    }

    pub(crate) fn qk_norm_rope_backward(
        qkv: CudaPrimitive,
        call: QkNormRopeCall<Cuda>,
        dy: CudaPrimitive,
    ) -> [CudaPrimitive; 3] {
        let is_free = dy.can_mut();
        let attempt = Rotation::new(&call).backward(&qkv, &dy, is_free);
        kernel_or("qk_norm_rope_backward", attempt, || {
            reference::qk_norm_rope_backward(qkv, call, dy)
        })
    }

    /// The tensors of a q/k-norm call, as the kernels take them.
    struct Rotation {
        q_weight: CudaTensor,
        k_weight: CudaTensor,
        positions: CudaTensor,
        cos: CudaTensor,
        sin: CudaTensor,
        num_kv_heads: usize,
        epsilon: f32,
    }

    impl Rotation {
        fn new(call: &QkNormRopeCall<Cuda>) -> Self {
            let [q_weight, k_weight] = tensors([&call.q_weight, &call.k_weight]);
            Self {
                q_weight,
                k_weight,
                positions: kernel_tensor(call.positions.clone()),
                cos: cast(&call.rope.cos, DType::F32),
                sin: cast(&call.rope.sin, DType::F32),
                num_kv_heads: call.num_kv_heads,
                epsilon: call.epsilon as f32,
            }
        }

        fn args(&self) -> sieve_kernels::step::QkNormRope<'_> {
            sieve_kernels::step::QkNormRope {
                q_weight: &self.q_weight,
                k_weight: &self.k_weight,
                positions: &self.positions,
                cos: &self.cos,
                sin: &self.sin,
                num_kv_heads: self.num_kv_heads,
                epsilon: self.epsilon,
            }
        }

        fn forward(&self, qkv: &CudaPrimitive) -> Result<CudaPrimitive, KernelError> {
            let qkv = kernel_tensor(qkv.clone());
            let rotated = self.args().qk_norm_rope_forward(&qkv);
            rotated.map(ToBurn::burn)
        }

        /// `[dqkv, dq_weight, dk_weight]`, the weights' in f32; dqkv lies in `dy` where nobody else holds it.
        fn backward(
            &self,
            qkv: &CudaPrimitive,
            dy: &CudaPrimitive,
            is_free: bool,
        ) -> Result<[CudaPrimitive; 3], KernelError> {
            let [qkv, dy] = tensors([qkv, dy]);
            let reuse = reuse(is_free && dy.is_contiguous());
            let gradients = self.args().qk_norm_rope_backward(&qkv, &dy, reuse)?;
            Ok([gradients.dqkv, gradients.dq_weight, gradients.dk_weight].map(ToBurn::burn))
        }
    }
}
