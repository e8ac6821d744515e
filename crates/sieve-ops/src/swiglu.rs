//! Gated linear unit with SiLU (arXiv:2002.05202).
mod autodiff;
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{SwigluBackend, SwigluGradients};

use crate::tensors::{primitive, tensor};
use burn::tensor::Tensor;

/// `silu(gate) * up` of a packed tensor, gate first.
///
/// # Shapes
/// - gate_up: `[.., 2 * d_ff]`
/// - returns: `[.., d_ff]`
pub fn swiglu<B: SwigluBackend, const D: usize>(gate_up: Tensor<B, D>) -> Tensor<B, D> {
    tensor(B::swiglu(primitive(gate_up)))
}
