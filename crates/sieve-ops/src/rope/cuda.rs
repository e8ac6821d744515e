//! Rotary positions, with and without per-head norms, on CUDA.
use super::backend::{QkNormRopeCall, RopeBackend, RopeCall, RopeGradients};
use super::reference;
use crate::device::cuda::{Cuda, cast, tensors};
use crate::device::paths::kernel_or;
use burn::tensor::DType;
use sieve_kernels::step::Reuse;
use sieve_kernels::{CudaPrimitive as Float, CudaTensor, KernelError, ToBurn, kernel_tensor};

impl RopeBackend for Cuda {
    fn qk_norm_rope(qkv: Float, call: QkNormRopeCall<Self>) -> Float {
        let attempt = Rotation::new(&call).forward(&qkv);
        kernel_or("qk_norm_rope", attempt, || reference::qk_norm_rope(qkv, call))
    }

    fn rope(qkv: Float, call: RopeCall<Self>) -> Float {
        let (packed, positions) = (kernel_tensor(qkv.clone()), kernel_tensor(call.positions.clone()));
        let tables = [cast(&call.rope.cos, DType::F32), cast(&call.rope.sin, DType::F32)];
        let attempt = sieve_kernels::step::rope(&packed, &positions, tables.each_ref(), call.num_kv_heads);
        kernel_or("rope", attempt.map(ToBurn::burn), || reference::rope(qkv, call))
    }
}

impl RopeGradients for Cuda {
    fn qk_norm_rope_backward(qkv: Float, call: QkNormRopeCall<Self>, dy: Float) -> (Float, Float, Float) {
        let is_free = dy.can_mut();
        let attempt = Rotation::new(&call).backward(&qkv, &dy, is_free);
        kernel_or("qk_norm_rope_backward", attempt, || {
            reference::qk_norm_rope_backward(qkv, call, dy)
        })
    }
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

    fn forward(&self, qkv: &Float) -> Result<Float, KernelError> {
        let qkv = kernel_tensor(qkv.clone());
        let rotated = self.args().qk_norm_rope_forward(&qkv);
        rotated.map(ToBurn::burn)
    }

    /// `(dqkv, dq_weight, dk_weight)`, the weights' in f32; dqkv lies in `dy` where nobody else holds it.
    fn backward(&self, qkv: &Float, dy: &Float, is_free: bool) -> Result<(Float, Float, Float), KernelError> {
        let [qkv, dy] = tensors([qkv, dy]);
        let reuse = if is_free && dy.is_contiguous() {
            Reuse::InPlace
        } else {
            Reuse::Copy
        };
        let gradients = self.args().qk_norm_rope_backward(&qkv, &dy, reuse)?;
        Ok((
            gradients.dqkv.burn(),
            gradients.dq_weight.burn(),
            gradients.dk_weight.burn(),
        ))
    }
}
