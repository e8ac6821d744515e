//! The optimizer's ops below the autodiff graph.
use super::backend::{AdamWTensors, OptimizerBackend};
use super::snapshot::Snapshot;
use crate::device::autodiff::constant;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use sieve_core::AdamWStep;

impl<B: OptimizerBackend, C: CheckpointStrategy> OptimizerBackend for Autodiff<B, C> {
    fn adamw(
        tensors: AdamWTensors<Self>,
        grad: Float<Self>,
        grad_scale: Float<Self>,
        step: AdamWStep,
    ) -> AdamWTensors<Self> {
        let inner = AdamWTensors {
            param: tensors.param.primitive,
            leaf: tensors.leaf.map(|leaf| leaf.primitive),
            exp_avg: tensors.exp_avg.primitive,
            exp_avg_sq: tensors.exp_avg_sq.primitive,
        };
        let next = B::adamw(inner, grad.primitive, grad_scale.primitive, step);
        AdamWTensors {
            param: constant::<B, C>(next.param),
            leaf: next.leaf.map(constant::<B, C>),
            exp_avg: constant::<B, C>(next.exp_avg),
            exp_avg_sq: constant::<B, C>(next.exp_avg_sq),
        }
    }

    fn split_master(master: Float<Self>) -> (Float<Self>, Float<Self>) {
        let (leaf, rest) = B::split_master(master.primitive);
        (constant::<B, C>(leaf), constant::<B, C>(rest))
    }

    fn join_master(leaf: Float<Self>, rest: Float<Self>) -> Float<Self> {
        constant::<B, C>(B::join_master(leaf.primitive, rest.primitive))
    }

    fn sum_of_squares(x: Float<Self>) -> Float<Self> {
        constant::<B, C>(B::sum_of_squares(x.primitive))
    }

    fn global_norm(tensors: Vec<Float<Self>>) -> Float<Self> {
        let tensors = tensors.into_iter().map(|x| x.primitive).collect();
        constant::<B, C>(B::global_norm(tensors))
    }

    fn snapshot(tensor: Float<Self>) -> Snapshot {
        B::snapshot(tensor.primitive)
    }

    fn snapshot_room(device: &Self::Device) -> u64 {
        B::snapshot_room(device)
    }
}
