//! The additive bias of a key, a function of its score.
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::DmaBias;

/// Scores are clamped to this value before the exponential, which overflows f32 from 88.7 on.
pub const DMA_SCORE_CLAMP: f64 = 60.0;

/// The additive bias of each key: `exp(min(z, 60))` or `z`.
pub fn dma_bias<B: Backend, const D: usize>(z: Tensor<B, D>, bias: DmaBias) -> Tensor<B, D> {
    match bias {
        DmaBias::Exp => z.clamp_max(DMA_SCORE_CLAMP).exp(),
        DmaBias::Linear => z,
    }
}

/// Gradient of [`dma_bias`]: `ddelta * delta` below the clamp and zero above it, or `ddelta`.
pub(crate) fn dma_bias_backward<B: Backend>(
    z: Tensor<B, 3>,
    delta: Tensor<B, 3>,
    d_delta: Tensor<B, 3>,
    bias: DmaBias,
) -> Tensor<B, 3> {
    match bias {
        DmaBias::Exp => (d_delta * delta).mask_fill(z.greater_elem(DMA_SCORE_CLAMP), 0.0),
        DmaBias::Linear => d_delta,
    }
}
