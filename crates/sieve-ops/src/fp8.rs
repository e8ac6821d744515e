//! GEMMs with a weight in fp8: e4m3 forward, e5m2 for the gradient of the output, one scale a tensor
//! from its largest magnitude at hand, bf16 results, f32 sums and weight gradients.
//!
//! The blocks call these on a device, inside one node of the graph each; there is no function for users.
pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use crate::tensors::Float;
use burn::tensor::backend::Backend;

/// Data type of the blocks' GEMMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GemmPrecision {
    /// The tensors' own.
    #[default]
    Tensors,
    /// Eight-bit floats, forward and backward.
    Fp8,
}

/// What a GEMM keeps for its gradients: both operands, rounded.
#[derive(Clone, Debug)]
pub struct Fp8Kept<B: Backend> {
    /// With scales: bytes, `[in, tokens]`; without: the values of the bytes, shaped as x.
    pub(crate) x: Float<B>,
    /// With scales: bytes, `[in, out]`; without: the values of the bytes, `[out, in]`.
    pub(crate) weight: Float<B>,
    /// Those of x and of the weight, `[1]`; `None` where the reference ran.
    pub(crate) scales: Option<[Float<B>; 2]>,
}

/// A tensor that is to be rounded, and parts of its largest magnitude, where the kernel that wrote it has found them.
#[derive(Clone, Debug)]
pub struct ToQuantise<B: Backend>(pub(crate) Float<B>, pub(crate) Option<Float<B>>);

impl<B: Backend> ToQuantise<B> {
    /// A tensor without known magnitudes.
    pub fn new(x: Float<B>) -> Self {
        Self(x, None)
    }
}
