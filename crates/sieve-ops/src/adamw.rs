//! AdamW (arXiv:1711.05101) over f32 master weights.
use crate::{AdamWStep, AdamWTensors, SieveBackend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorPrimitive};

/// One update of one parameter, in the order of PyTorch's AdamW: decay, moments, step.
///
/// `grad` has the parameter's shape; `grad_scale` is `[1]` and multiplies it.
pub fn adamw_step<B: SieveBackend, const D: usize>(
    tensors: AdamWTensors<B>,
    grad: Tensor<B, D>,
    grad_scale: Tensor<B, 1>,
    step: AdamWStep,
) -> AdamWTensors<B> {
    B::adamw_step(
        tensors,
        grad.into_primitive().tensor(),
        grad_scale.into_primitive().tensor(),
        step,
    )
}

/// `(leaf, rest)`: a bf16 leaf of an f32 `master`, and what [`adamw_step`] needs beside it, as a primitive that nothing else reads.
pub fn split_master<B: SieveBackend, const D: usize>(
    master: Tensor<B, D>,
) -> (Tensor<B, D>, FloatTensor<B>) {
    let (leaf, rest) = B::split_master(master.into_primitive().tensor());
    (Tensor::from_primitive(TensorPrimitive::Float(leaf)), rest)
}

/// The master of a leaf and its rest, exactly.
pub fn join_master<B: SieveBackend, const D: usize>(
    leaf: Tensor<B, D>,
    rest: FloatTensor<B>,
) -> Tensor<B, D> {
    let master = B::join_master(leaf.into_primitive().tensor(), rest);
    Tensor::from_primitive(TensorPrimitive::Float(master))
}

/// Sum of squares in an order that does not depend on the number of threads, `[1]`.
pub fn sum_of_squares<B: SieveBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, 1> {
    Tensor::from_primitive(TensorPrimitive::Float(B::sum_of_squares(
        x.into_primitive().tensor(),
    )))
}

#[cfg(test)]
mod tests;
