//! Products with a weight in eight-bit floats: e4m3 forward, e5m2 for the gradient of the output, one scale a tensor
//! from its largest magnitude at hand, bf16 results, f32 sums and weight gradients.
//!
//! The blocks call these on a device, inside one node of the graph each; there is no function for users.
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{Fp8Gradients, Fp8Kept, ToRound};

/// In which numbers the blocks of a model multiply by their weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProductPrecision {
    /// Those of the tensors.
    #[default]
    Tensors,
    /// Eight-bit floats, forward and backward.
    Fp8,
}
