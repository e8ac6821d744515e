//! AdamW and norms of gradients on CUDA.
use super::backend::{AdamWTensors, OptimizerBackend};
use super::reference;
use super::snapshot::Snapshot;
use crate::device::cuda::{Cuda, cast, tensors, writable};
use crate::device::paths::{kernel_on, kernel_or};
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, FloatDType};
use sieve_core::AdamWStep;
use sieve_cuda::CudaDevice;
use sieve_kernels::step::{AdamwTensors, FixedSum, Term};
use sieve_kernels::{CudaPrimitive as Float, CudaTensor, HostCopy, KernelError, ToBurn, kernel_tensor};

impl OptimizerBackend for Cuda {
    fn adamw(tensors: AdamWTensors<Self>, grad: Float, grad_scale: Float, step: AdamWStep) -> AdamWTensors<Self> {
        let (tensors, outcome) = launch(tensors, &grad, &grad_scale, step);
        kernel_on("adamw", tensors, outcome, |tensors| {
            let AdamWTensors { param, leaf, .. } = &tensors;
            let Some(leaf) = leaf.clone().filter(|_| param.dtype == DType::BF16) else {
                return reference::adamw::<Self>(tensors, grad, grad_scale, step);
            };
            let param = Self::join_master(leaf, param.clone());
            let whole = AdamWTensors { param, ..tensors };
            let next = reference::adamw::<Self>(whole, grad, grad_scale, step);
            let (leaf, param) = Self::split_master(next.param);
            AdamWTensors {
                param,
                leaf: Some(leaf),
                ..next
            }
        })
    }

    fn split_master(master: Float) -> (Float, Float) {
        let attempt = sieve_kernels::step::split_master(&kernel_tensor(master.clone()).contiguous());
        let attempt = attempt.map(|(leaf, rest)| (leaf.burn(), rest.burn()));
        kernel_or("split_master", attempt, || {
            (Self::float_cast(master.clone(), FloatDType::BF16), master)
        })
    }

    fn join_master(leaf: Float, rest: Float) -> Float {
        if rest.dtype != DType::BF16 {
            // The kernel refused to split it: the rest is the master.
            return rest;
        }
        let [leaf, rest] = tensors([&leaf, &rest]);
        let joined = sieve_kernels::step::join_master(&leaf.contiguous(), &rest);
        // No other way reads a rest.
        joined.unwrap_or_else(|error| panic!("{error}")).burn()
    }

    fn sum_of_squares(x: Float) -> Float {
        let attempt = FixedSum::sum_of_squares(&kernel_tensor(x.clone()));
        kernel_or("sum_of_squares", attempt.map(ToBurn::burn), || {
            reference::sum_of_squares::<Self>(x)
        })
    }

    fn global_norm(tensors: Vec<Float>) -> Float {
        let attempt = norm_of(&tensors);
        kernel_or("global_norm", attempt, || reference::global_norm::<Self>(tensors))
    }

    fn snapshot(tensor: Float) -> Snapshot {
        match HostCopy::new(&kernel_tensor(tensor.clone())) {
            Ok(copy) => Snapshot::of_cuda(copy),
            // Slower, and right.
            Err(_) => Snapshot::read_now::<Self>(tensor),
        }
    }

    fn snapshot_room(device: &CudaDevice) -> u64 {
        sieve_kernels::DeviceReport::memory_bytes(device.index).map_or(0, |(free, _)| free)
    }
}

/// One update, in place where nobody else holds a tensor. The tensors come back after a refusal too: a clone of them
/// kept for that case would make every update copy.
fn launch(
    tensors: AdamWTensors<Cuda>,
    grad: &Float,
    grad_scale: &Float,
    step: AdamWStep,
) -> (AdamWTensors<Cuda>, Result<(), KernelError>) {
    let [param, exp_avg, exp_avg_sq] = [tensors.param, tensors.exp_avg, tensors.exp_avg_sq].map(writable);
    let leaf = tensors.leaf.map(writable);
    let grad = cast(grad, DType::F32).contiguous();
    let grad_scale = cast(grad_scale, DType::F32);
    let update = AdamwTensors {
        param: &param,
        exp_avg: &exp_avg,
        exp_avg_sq: &exp_avg_sq,
        grad: &grad,
        grad_scale: &grad_scale,
        leaf: leaf.as_ref(),
    };
    let outcome = update.adamw(step);
    let tensors = AdamWTensors {
        param: param.burn(),
        leaf: leaf.map(ToBurn::burn),
        exp_avg: exp_avg.burn(),
        exp_avg_sq: exp_avg_sq.burn(),
    };
    (tensors, outcome)
}

/// The norm over all tensors, one launch each.
fn norm_of(tensors: &[Float]) -> Result<Float, KernelError> {
    let tensors: Vec<CudaTensor> = tensors.iter().map(|tensor| kernel_tensor(tensor.clone())).collect();
    let sizes = tensors.iter().map(CudaTensor::num_elements);
    let mut sum = FixedSum::new(&tensors[0], Term::Square, sizes);
    for tensor in &tensors {
        sum.add(tensor)?;
    }
    sum.root().map(ToBurn::burn)
}
