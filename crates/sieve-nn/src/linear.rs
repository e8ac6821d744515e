//! Linear layer without bias.
use crate::WeightInit;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_ops::SieveBackend;

/// The linear layer `y = x Wᵀ`.
#[derive(Module, Debug)]
pub struct Linear<B: Backend> {
    /// Weight W, `[out, in]`.
    pub weight: Param<Tensor<B, 2>>,
}

/// Whether a CPU may keep the parameter of this name in bf16, while other parameters are f32. It may if only
/// [`sieve_ops::linear`], the embedding and the loss read the parameter. Other ops also read DMA's `dt_proj` and MLA's
/// `kv_b_proj`.
pub fn may_be_bf16(name: &str) -> bool {
    let is = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    is(&["proj.weight", "lm_head.weight", "embed_tokens.weight"]) && !is(&["dt_proj.weight", "kv_b_proj.weight"])
}

impl<B: Backend> Linear<B> {
    /// A layer with normal random weights from `init`.
    pub fn new(d_in: usize, d_out: usize, init: &mut WeightInit, device: &B::Device) -> Self {
        Self { weight: init.normal([d_out, d_in], device) }
    }
}

impl<B: SieveBackend> Linear<B> {
    /// Maps x `[.., in]` to y `[.., out]`.
    pub fn forward<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        sieve_ops::linear(x, self.weight.val())
    }

    /// Like [`forward`](Self::forward), in an order of sums that depends on nothing but the number of columns.
    pub fn forward_in_order<const D: usize>(&self, x: Tensor<B, D>) -> Tensor<B, D> {
        sieve_ops::linear_in_order(x, self.weight.val())
    }

    /// Like [`forward`](Self::forward), and adds `residual`, `[.., out]`.
    pub fn forward_add<const D: usize>(&self, x: Tensor<B, D>, residual: Tensor<B, D>) -> Tensor<B, D> {
        sieve_ops::linear_add(x, self.weight.val(), residual)
    }
}
