//! AdamW, norms and snapshots as a backend computes them; none has a gradient.
use super::snapshot::Snapshot;
use crate::tensors::Float;
use burn::tensor::backend::Backend;
use sieve_core::AdamWStep;

/// One parameter's state in an AdamW update, all of one shape and, but for `leaf` and what belongs to it, f32 (f64 in
/// tests).
#[derive(Clone, Debug)]
pub struct AdamWTensors<B: Backend> {
    /// The master weights; beside a leaf, what [`OptimizerBackend::split_master`] returned beside it.
    pub param: Float<B>,
    /// The weights that the model computes with, in bf16, where they are another tensor than `param`.
    pub leaf: Option<Float<B>>,
    /// First moment.
    pub exp_avg: Float<B>,
    /// Second moment.
    pub exp_avg_sq: Float<B>,
}

/// What a training loop does with parameters and their gradients.
pub trait OptimizerBackend: Backend {
    /// One AdamW update; `grad_scale` is `[1]` on the device. Where it is zero or no finite number nothing changes: the
    /// gate of a step whose gradients are spoilt.
    fn adamw(
        tensors: AdamWTensors<Self>,
        grad: Float<Self>,
        grad_scale: Float<Self>,
        step: AdamWStep,
    ) -> AdamWTensors<Self>;
    /// `(leaf, rest)` of f32 master weights: the bf16 leaf that a model computes with, and what
    /// [`adamw`](Self::adamw) needs beside it to know the master.
    fn split_master(master: Float<Self>) -> (Float<Self>, Float<Self>);
    /// The inverse of [`split_master`](Self::split_master), exact.
    fn join_master(leaf: Float<Self>, rest: Float<Self>) -> Float<Self>;

    /// Sum of squares in a fixed order, `[1]`.
    fn sum_of_squares(x: Float<Self>) -> Float<Self>;
    /// Euclidean norm over all `tensors` together, in their order, `[1]`; at least one tensor.
    fn global_norm(tensors: Vec<Float<Self>>) -> Float<Self>;

    /// The values of a tensor as they are now, to be read on any thread.
    fn snapshot(tensor: Float<Self>) -> Snapshot;
    /// Bytes that snapshots may hold on a device beside everything else; 0 where they hold none there.
    fn snapshot_room(device: &Self::Device) -> u64;
}
