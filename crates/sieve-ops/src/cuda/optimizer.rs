//! AdamW, norms of gradients, and products with a number on the device.
use super::{Cuda, cast, tensors};
use crate::{AdamWStep, AdamWTensors};
use burn::tensor::DType;
use sieve_kernels::{
    AdamwTensors, AdamwUpdate, CudaPrimitive, CudaTensor, FixedSum, KernelError, Term,
};

/// A contiguous tensor that may be written in place: `x` itself where nobody else holds it, else a copy.
fn writable(x: CudaPrimitive) -> CudaTensor {
    let x = if x.can_mut() { x } else { x.copy() };
    CudaTensor::from(x).contiguous()
}

/// One update, in place where nobody else holds a tensor. The tensors come back after a refusal too: a clone of them kept for that
/// case would make every update copy.
pub(super) fn adamw(
    tensors: AdamWTensors<Cuda>,
    grad: &CudaPrimitive,
    grad_scale: &CudaPrimitive,
    step: AdamWStep,
) -> (AdamWTensors<Cuda>, Result<(), KernelError>) {
    let [param, exp_avg, exp_avg_sq] =
        [tensors.param, tensors.exp_avg, tensors.exp_avg_sq].map(writable);
    let leaf = tensors.leaf.map(writable);
    let grad = cast(grad, DType::F32).contiguous();
    let grad_scale = cast(grad_scale, DType::F32);
    let outcome = sieve_kernels::adamw(
        AdamwTensors {
            param: &param,
            exp_avg: &exp_avg,
            exp_avg_sq: &exp_avg_sq,
            grad: &grad,
            grad_scale: &grad_scale,
            leaf: leaf.as_ref(),
        },
        AdamwUpdate {
            lr: step.lr,
            beta1: step.beta1,
            beta2: step.beta2,
            eps: step.eps,
            weight_decay: step.weight_decay,
            bias_correction1: step.bias_correction1,
            bias_correction2: step.bias_correction2,
        },
    );
    let tensors = AdamWTensors {
        param: param.into(),
        leaf: leaf.map(Into::into),
        exp_avg: exp_avg.into(),
        exp_avg_sq: exp_avg_sq.into(),
    };
    (tensors, outcome)
}

/// `(leaf, rest)`.
pub(super) fn split_master(
    master: &CudaPrimitive,
) -> Result<(CudaPrimitive, CudaPrimitive), KernelError> {
    let master = CudaTensor::from(master.clone()).contiguous();
    let (leaf, rest) = sieve_kernels::split_master(&master)?;
    Ok((leaf.into(), rest.into()))
}

pub(super) fn join_master(
    leaf: &CudaPrimitive,
    rest: &CudaPrimitive,
) -> Result<CudaPrimitive, KernelError> {
    let [leaf, rest] = tensors([leaf, rest]);
    sieve_kernels::join_master(&leaf.contiguous(), &rest).map(Into::into)
}

/// The norm over all tensors, one launch each.
pub(super) fn global_norm(tensors: &[CudaPrimitive]) -> Result<CudaPrimitive, KernelError> {
    let tensors: Vec<CudaTensor> = tensors
        .iter()
        .map(|tensor| CudaTensor::from(tensor.clone()))
        .collect();
    let sizes = tensors.iter().map(CudaTensor::num_elements);
    let mut sum = FixedSum::new(&tensors[0], Term::Square, sizes);
    for tensor in &tensors {
        sum.add(tensor)?;
    }
    // The factor that clips comes for free and is not used: the trainer's own rule is the same on every backend.
    Ok(sum.clip(1.0)?.norm.into())
}

pub(super) fn sum_of_squares(x: &CudaPrimitive) -> Result<CudaPrimitive, KernelError> {
    sieve_kernels::sum_of_squares(&CudaTensor::from(x.clone())).map(Into::into)
}

/// `x` times the `[1]` `factor`, in place where nobody else holds x; x comes back after a refusal too.
pub(super) fn scaled(
    x: CudaPrimitive,
    factor: &CudaPrimitive,
) -> (CudaPrimitive, Result<(), KernelError>) {
    let x = writable(x);
    let outcome = sieve_kernels::scale(&x, &cast(factor, DType::F32));
    (x.into(), outcome)
}
