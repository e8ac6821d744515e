//! Gated linear unit with SiLU (arXiv:2002.05202).
use crate::SieveBackend;
use burn::tensor::{Tensor, TensorPrimitive};

/// `silu(gate) * up` of a packed tensor, gate first.
///
/// # Shapes
/// - gate_up: `[.., 2 * d_ff]`
/// - returns: `[.., d_ff]`
pub fn swiglu<B: SieveBackend, const D: usize>(gate_up: Tensor<B, D>) -> Tensor<B, D> {
    let y = B::swiglu(gate_up.into_primitive().tensor());
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

#[cfg(test)]
mod tests;
