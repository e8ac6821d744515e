//! RMSNorm with a learned weight.
use crate::WeightInit;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_ops::{QkNorm, SieveBackend};

/// `y = x / sqrt(mean(x²) + epsilon) * weight` (arXiv:1910.07467).
#[derive(Module, Debug)]
pub struct RmsNorm<B: Backend> {
    /// Weight of the norm, one factor a column, `[d_model]`.
    pub weight: Param<Tensor<B, 1>>,
    pub(crate) epsilon: f64,
}

impl<B: Backend> RmsNorm<B> {
    /// A norm whose weights are all 1.
    pub fn new(d_model: usize, epsilon: f64, init: &mut WeightInit, device: &B::Device) -> Self {
        Self { weight: init.constant(1.0, [d_model], device), epsilon }
    }
}

impl<B: SieveBackend> RmsNorm<B> {
    /// The norm over the last dimension of x, `[.., d_model]`.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        sieve_ops::rms_norm(x, self.weight.val(), self.epsilon)
    }

    /// The per-head norms of queries and of keys as one operand. Both have the same epsilon.
    pub(crate) fn qk_norm(queries: &Self, keys: &Self) -> QkNorm<B> {
        QkNorm { q_weight: queries.weight.val(), k_weight: keys.weight.val(), epsilon: queries.epsilon }
    }
}
