//! AdamW and norms on the CPU, where a master is its own rest.
use super::backend::{AdamWTensors, OptimizerBackend};
use super::reference;
use super::snapshot::Snapshot;
use crate::device::flex::{contiguous, floats, from_vec, is_f32, plain};
use burn::tensor::FloatDType;
use burn::tensor::ops::FloatTensorOps;
use burn_flex::{Flex, FlexDevice, FlexTensor};
use sieve_core::AdamWStep;

impl OptimizerBackend for Flex {
    fn adamw(
        tensors: AdamWTensors<Self>,
        grad: FlexTensor,
        grad_scale: FlexTensor,
        step: AdamWStep,
    ) -> AdamWTensors<Self> {
        if !is_f32(&tensors.param) || tensors.leaf.is_some() {
            return plain("adamw", || reference::adamw::<Self>(tensors, grad, grad_scale, step));
        }
        let grad = contiguous(grad);
        let grad_scale = floats(&contiguous(grad_scale))[0];
        if grad_scale == 0.0 || !grad_scale.is_finite() {
            return tensors;
        }
        let AdamWTensors {
            param,
            exp_avg,
            exp_avg_sq,
            ..
        } = tensors;
        let [mut param, mut exp_avg, mut exp_avg_sq] = [param, exp_avg, exp_avg_sq].map(contiguous);
        // In place where nobody else holds the tensor; `storage_mut` copies where somebody does.
        sieve_cpu::adamw(
            param.storage_mut::<f32>(),
            floats(&grad),
            exp_avg.storage_mut::<f32>(),
            exp_avg_sq.storage_mut::<f32>(),
            grad_scale,
            &step,
        );
        AdamWTensors {
            param,
            leaf: None,
            exp_avg,
            exp_avg_sq,
        }
    }

    fn split_master(master: FlexTensor) -> (FlexTensor, FlexTensor) {
        let leaf = Self::float_cast(master.clone(), FloatDType::BF16);
        (leaf, master)
    }

    fn join_master(_leaf: FlexTensor, rest: FlexTensor) -> FlexTensor {
        rest
    }

    fn sum_of_squares(x: FlexTensor) -> FlexTensor {
        if !is_f32(&x) {
            return plain("sum_of_squares", || reference::sum_of_squares::<Self>(x));
        }
        let x = contiguous(x);
        from_vec(vec![sieve_cpu::sum_of_squares(floats(&x)) as f32], [1])
    }

    fn global_norm(tensors: Vec<FlexTensor>) -> FlexTensor {
        reference::global_norm::<Self>(tensors)
    }

    fn snapshot(tensor: FlexTensor) -> Snapshot {
        Snapshot::read_now::<Self>(tensor)
    }

    fn snapshot_room(_device: &FlexDevice) -> u64 {
        0
    }
}
