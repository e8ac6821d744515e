//! Output projection with cross-entropy, a block of tokens at a time.
use super::tensors;
use sieve_kernels::{CudaPrimitive, GradientTarget, KernelError, LossFactors, fixed_sum};

pub(super) fn token_losses(
    h: &CudaPrimitive,
    weight: &CudaPrimitive,
    labels: &CudaPrimitive,
) -> Result<CudaPrimitive, KernelError> {
    let [h, weight, labels] = tensors([h, weight, labels]);
    sieve_kernels::token_losses(&h, &weight, &labels).map(Into::into)
}

/// The sum of all losses. Without a z-loss only: that term is the training pass's.
pub(super) fn summed(
    h: &CudaPrimitive,
    weight: &CudaPrimitive,
    labels: &CudaPrimitive,
    z_loss: f64,
) -> Result<CudaPrimitive, KernelError> {
    if z_loss != 0.0 {
        return Err(KernelError::Unsupported {
            kernel: "linear_cross_entropy",
            what: "z_loss without gradients",
            got: z_loss.to_string(),
            supported: "0".to_owned(),
        });
    }
    let [h, weight, labels] = tensors([h, weight, labels]);
    let losses = sieve_kernels::token_losses(&h, &weight, &labels)?;
    fixed_sum(&losses).map(Into::into)
}

/// `(loss, dh, dweight)`, dweight in f32.
pub(super) fn with_gradients(
    h: &CudaPrimitive,
    weight: &CudaPrimitive,
    labels: &CudaPrimitive,
    z_loss: f64,
) -> Result<(CudaPrimitive, CudaPrimitive, CudaPrimitive), KernelError> {
    let [h, weight, labels] = tensors([h, weight, labels]);
    let factors = LossFactors {
        z_loss: z_loss as f32,
        gradient_scale: 1.0,
    };
    let target = GradientTarget::New;
    let all =
        sieve_kernels::linear_cross_entropy_with_gradients(&h, &weight, &labels, factors, target)?;
    Ok((all.loss.into(), all.dh.into(), all.dweight.into()))
}
