//! RMSNorm, and q/k-norm with rotary positions.
use super::{cast, tensors};
use crate::RopeTables;
use burn::tensor::DType;
use sieve_kernels::{CudaPrimitive, CudaTensor, GradientTarget, KernelError, QkNormRope, Reuse};

pub(super) fn rms(
    x: &CudaPrimitive,
    weight: &CudaPrimitive,
    epsilon: f64,
) -> Result<CudaPrimitive, KernelError> {
    let [x, weight] = tensors([x, weight]);
    sieve_kernels::rms_norm_forward(&x, &weight, epsilon as f32).map(Into::into)
}

/// `(dx, dweight)`, dweight in f32.
pub(super) fn rms_backward(
    x: &CudaPrimitive,
    weight: &CudaPrimitive,
    epsilon: f64,
    dy: &CudaPrimitive,
) -> Result<(CudaPrimitive, CudaPrimitive), KernelError> {
    let [x, weight, dy] = tensors([x, weight, dy]);
    let (dx, dweight) = sieve_kernels::rms_norm_backward(
        &x,
        &weight,
        epsilon as f32,
        &dy,
        None,
        GradientTarget::New,
    )?;
    Ok((dx.into(), dweight.into()))
}

/// As [`rms_backward`] with `d_residual` added to dx, and the norm's output.
pub(super) fn rms_backward_with_output(
    x: &CudaPrimitive,
    weight: &CudaPrimitive,
    epsilon: f64,
    dy: &CudaPrimitive,
    d_residual: &CudaPrimitive,
) -> Result<(CudaPrimitive, CudaPrimitive, CudaPrimitive), KernelError> {
    let [x, weight, dy, d_residual] = tensors([x, weight, dy, d_residual]);
    let (dx, dweight, y) = sieve_kernels::rms_norm_backward_with_output(
        &x,
        &weight,
        epsilon as f32,
        &dy,
        &d_residual,
        GradientTarget::New,
    )?;
    Ok((dx.into(), dweight.into(), y.into()))
}

/// The tensors of a q/k-norm call, as the kernels take them.
pub(super) struct Rotation {
    q_weight: CudaTensor,
    k_weight: CudaTensor,
    positions: CudaTensor,
    cos: CudaTensor,
    sin: CudaTensor,
    num_kv_heads: usize,
    epsilon: f32,
}

impl Rotation {
    pub(super) fn new(
        weights: [&CudaPrimitive; 2],
        positions: &CudaPrimitive,
        rope: &RopeTables<super::Cuda>,
        num_kv_heads: usize,
        epsilon: f64,
    ) -> Self {
        let [q_weight, k_weight] = tensors(weights);
        Self {
            q_weight,
            k_weight,
            positions: CudaTensor::from(positions.clone()),
            cos: cast(&rope.cos, DType::F32),
            sin: cast(&rope.sin, DType::F32),
            num_kv_heads,
            epsilon: epsilon as f32,
        }
    }

    fn args(&self) -> QkNormRope<'_> {
        QkNormRope {
            q_weight: &self.q_weight,
            k_weight: &self.k_weight,
            positions: &self.positions,
            cos: &self.cos,
            sin: &self.sin,
            num_kv_heads: self.num_kv_heads,
            epsilon: self.epsilon,
        }
    }

    pub(super) fn forward(&self, qkv: &CudaPrimitive) -> Result<CudaPrimitive, KernelError> {
        let qkv = CudaTensor::from(qkv.clone());
        sieve_kernels::qk_norm_rope_forward(&qkv, &self.args(), Reuse::Copy).map(Into::into)
    }

    /// `(dqkv, dq_weight, dk_weight)`, the weights' in f32; dqkv lies in `dy` where nobody else holds it.
    pub(super) fn backward(
        &self,
        qkv: &CudaPrimitive,
        dy: &CudaPrimitive,
        is_free: bool,
    ) -> Result<(CudaPrimitive, CudaPrimitive, CudaPrimitive), KernelError> {
        let [qkv, dy] = tensors([qkv, dy]);
        let reuse = if is_free && dy.is_contiguous() {
            Reuse::InPlace
        } else {
            Reuse::Copy
        };
        let targets = [GradientTarget::New; 2];
        let gradients =
            sieve_kernels::qk_norm_rope_backward(&qkv, &self.args(), &dy, reuse, targets)?;
        Ok((
            gradients.dqkv.into(),
            gradients.dq_weight.into(),
            gradients.dk_weight.into(),
        ))
    }
}
