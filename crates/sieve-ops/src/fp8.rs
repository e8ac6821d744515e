//! fp8 GEMMs with a weight. Operands of the forward pass are rounded to e4m3, the gradient of the output to e5m2, with
//! one scale per tensor from the tensor's largest magnitude. Results are bf16, sums and weight gradients f32.
//!
//! Only the ops of whole layers (`block`) call these; there is no public function.
//!
//! An op in fp8 keeps the rounded operands of its GEMMs for the backward pass, transposed, because tensor cores
//! multiply bytes only along rows. Latent and native sparse attention, attention without norms or with biases,
//! validation and inference do not compute in fp8.
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use crate::tensors::Float;
use burn::tensor::backend::Backend;

/// Data type of the GEMMs in the ops of whole layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GemmPrecision {
    /// The dtype of the tensors.
    #[default]
    Tensors,
    /// fp8, forward and backward.
    Fp8,
}

/// The rounded operands of an fp8 GEMM, which its backward pass needs.
#[derive(Clone, Debug)]
pub struct Fp8Kept<B: Backend> {
    /// The rounded x. With scales: bytes, `[in, tokens]`. Without: rounded values, shape of x.
    pub(crate) x: Float<B>,
    /// The rounded weight. With scales: bytes, `[in, out]`. Without: rounded values, `[out, in]`.
    pub(crate) weight: Float<B>,
    /// Scales of x and of the weight, `[1]`; `None` where the reference ran.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the CPU keeps no bytes"))]
    pub(crate) scales: Option<[Float<B>; 2]>,
}

/// A tensor to be rounded to fp8, and the largest magnitudes of its parts if the kernel that wrote it computed them.
#[derive(Clone, Debug)]
pub struct ToQuantise<B: Backend>(pub(crate) Float<B>, pub(crate) Option<Float<B>>);

impl<B: Backend> ToQuantise<B> {
    /// A tensor without known magnitudes.
    pub fn new(x: Float<B>) -> Self {
        Self(x, None)
    }
}
