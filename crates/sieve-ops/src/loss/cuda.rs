//! Projection and cross-entropy on CUDA, a block of tokens at a time.
use super::backend::{LossBackend, LossGradients};
use super::reference;
use crate::device::cuda::{Cuda, cast, tensors, writable};
use crate::device::paths::{kernel_on, kernel_or};
use burn::tensor::DType;
use sieve_kernels::step::FixedSum;
use sieve_kernels::{CudaPrimitive as Float, KernelError, ToBurn};

impl LossBackend for Cuda {
    fn token_losses(h: Float, weight: Float, labels: Float) -> Float {
        let [states, table, ids] = tensors([&h, &weight, &labels]);
        let attempt = sieve_kernels::token_losses(&states, &table, &ids);
        kernel_or("token_losses", attempt.map(ToBurn::burn), || {
            reference::token_losses::<Self>(h, weight, labels)
        })
    }

    fn linear_cross_entropy(h: Float, weight: Float, labels: Float) -> Float {
        let attempt = summed(&h, &weight, &labels);
        kernel_or("linear_cross_entropy", attempt, || {
            reference::linear_cross_entropy::<Self>(h, weight, labels)
        })
    }
}

impl LossGradients for Cuda {
    fn linear_cross_entropy_with_gradients(h: Float, weight: Float, labels: Float) -> (Float, Float, Float) {
        let attempt = with_gradients(&h, &weight, &labels);
        kernel_or("linear_cross_entropy_with_gradients", attempt, || {
            reference::linear_cross_entropy_with_gradients::<Self>(h, weight, labels)
        })
    }

    /// In place where nobody else holds x.
    fn scale(x: Float, factor: Float) -> Float {
        let x = writable(x);
        let outcome = sieve_kernels::step::scale(&x, &cast(&factor, DType::F32));
        kernel_on("scale", x.burn(), outcome, |x| reference::scale::<Self>(x, factor))
    }
}

/// The sum of all losses.
fn summed(h: &Float, weight: &Float, labels: &Float) -> Result<Float, KernelError> {
    let [h, weight, labels] = tensors([h, weight, labels]);
    let losses = sieve_kernels::token_losses(&h, &weight, &labels)?;
    FixedSum::of(&losses).map(ToBurn::burn)
}

/// `(loss, dh, dweight)`, dweight in f32.
fn with_gradients(h: &Float, weight: &Float, labels: &Float) -> Result<(Float, Float, Float), KernelError> {
    let [h, weight, labels] = tensors([h, weight, labels]);
    let all = sieve_kernels::linear_cross_entropy_with_gradients(&h, &weight, &labels)?;
    Ok((all.loss.burn(), all.dh.burn(), all.dweight.burn()))
}
