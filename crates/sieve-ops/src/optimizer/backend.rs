//! AdamW, norms and snapshots as a backend computes them; none has a gradient.
use super::snapshot::Snapshot;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

/// Hyper-parameters of one AdamW update (arXiv:1711.05101), bias corrections already computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay; zero for tensors that do not decay.
    pub weight_decay: f64,
    /// `1 - beta1^t`.
    pub bias_correction1: f64,
    /// `1 - beta2^t`.
    pub bias_correction2: f64,
}

/// One parameter's state in an AdamW update, all of one shape and, but for `leaf` and what belongs to it, f32 (f64 in tests).
#[derive(Clone, Debug)]
pub struct AdamWTensors<B: Backend> {
    /// The master weights; beside a leaf, what [`OptimizerBackend::split_master`] returned beside it.
    pub param: FloatTensor<B>,
    /// The weights that the model computes with, in bf16, where they are another tensor than `param`.
    pub leaf: Option<FloatTensor<B>>,
    /// First moment.
    pub exp_avg: FloatTensor<B>,
    /// Second moment.
    pub exp_avg_sq: FloatTensor<B>,
}

/// What a training loop does with parameters and their gradients.
pub trait OptimizerBackend: Backend {
    /// One AdamW update; `grad_scale` is `[1]` on the device. Where it is zero or no finite number nothing changes: the
    /// gate of a step whose gradients are spoilt.
    fn adamw_step(
        tensors: AdamWTensors<Self>,
        grad: FloatTensor<Self>,
        grad_scale: FloatTensor<Self>,
        step: AdamWStep,
    ) -> AdamWTensors<Self>;
    /// `(leaf, rest)` of f32 master weights: the bf16 leaf that a model computes with, and what
    /// [`adamw_step`](Self::adamw_step) needs beside it to know the master.
    fn split_master(master: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>);
    /// The inverse of [`split_master`](Self::split_master), exact.
    fn join_master(leaf: FloatTensor<Self>, rest: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Sum of squares in a fixed order, `[1]`.
    fn sum_of_squares(x: FloatTensor<Self>) -> FloatTensor<Self>;
    /// Euclidean norm over all `tensors` together, in their order, `[1]`; at least one tensor.
    fn global_norm(tensors: Vec<FloatTensor<Self>>) -> FloatTensor<Self>;

    /// The values of a tensor as they are now, to be read on any thread.
    fn snapshot(tensor: FloatTensor<Self>) -> Snapshot;
    /// Bytes that snapshots may hold on a device beside everything else; 0 where they hold none there.
    fn snapshot_room(device: &Self::Device) -> u64;
}
