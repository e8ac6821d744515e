//! AdamW (arXiv:1711.05101) over f32 master weights.
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
mod snapshot;
#[cfg(test)]
mod tests;

pub use backend::{AdamWTensors, OptimizerBackend};
pub use sieve_core::AdamWStep;
pub use snapshot::{Snapshot, SnapshotReader};

use crate::tensors::{Float, primitive, tensor};
use burn::tensor::Tensor;

/// One update of one parameter, in the order of PyTorch's AdamW: decay, moments, step.
///
/// `grad` has the parameter's shape; `grad_scale` is `[1]` and multiplies it.
pub fn adamw<B: OptimizerBackend, const D: usize>(
    tensors: AdamWTensors<B>,
    grad: Tensor<B, D>,
    grad_scale: Tensor<B, 1>,
    step: AdamWStep,
) -> AdamWTensors<B> {
    B::adamw(tensors, primitive(grad), primitive(grad_scale), step)
}

/// `(leaf, rest)`: a bf16 leaf of an f32 `master`, and what [`adamw`] needs beside it, as a primitive that nothing else
/// reads.
pub fn split_master<B: OptimizerBackend, const D: usize>(master: Tensor<B, D>) -> (Tensor<B, D>, Float<B>) {
    let (leaf, rest) = B::split_master(primitive(master));
    (tensor(leaf), rest)
}

/// The master of a leaf and its rest, exactly.
pub fn join_master<B: OptimizerBackend, const D: usize>(leaf: Tensor<B, D>, rest: Float<B>) -> Tensor<B, D> {
    tensor(B::join_master(primitive(leaf), rest))
}

/// Sum of squares in an order that does not depend on the number of threads, `[1]`.
pub fn sum_of_squares<B: OptimizerBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, 1> {
    tensor(B::sum_of_squares(primitive(x)))
}
