//! Faults that tests inject into a run.
use burn::module::{ModuleMapper, Param};
use burn::tensor::Tensor;
use sieve_data::Batch;
use sieve_ops::TrainBackend;
use std::sync::Arc;

/// A point at which tests inject a fault.
#[doc(hidden)]
#[derive(Debug)]
pub enum Moment<'a> {
    /// The factor multiplies the loss of a step, and with it the gradients.
    Loss,
    /// The factor multiplies the loss of the micro-batch whose gradients ranks compare.
    Replay,
    /// The factor multiplies the learning rate of a step.
    Rate,
    /// The factor multiplies the weights that this rank computes with, after a step.
    Leaves,
    /// The micro-batches of a step were read, and may be changed.
    Batches(&'a mut [Batch]),
    /// A validation begins.
    Validating,
    /// The thread that writes a checkpoint begins.
    Writing,
    /// All ranks have written a checkpoint, which is about to get its final name.
    Naming,
}

/// Fault injection for tests: a function that is called at each [`Moment`]. Its first argument is the first row of the
/// step, or outside of a step the number of steps done. It returns a factor; 1 changes nothing.
#[doc(hidden)]
#[derive(Clone)]
pub struct FaultInjection(Arc<dyn Fn(u64, Moment<'_>) -> f64 + Send + Sync>);

impl Default for FaultInjection {
    fn default() -> Self {
        Self::new(|_, _| 1.0)
    }
}

impl FaultInjection {
    /// Fault injection that calls `disturb` at every [`Moment`].
    pub fn new(disturb: impl Fn(u64, Moment<'_>) -> f64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(disturb))
    }

    /// The factor by which `disturb` falsifies a number at a [`Moment`].
    pub(super) fn at(&self, number: u64, moment: Moment<'_>) -> f64 {
        (self.0)(number, moment)
    }
}

/// Multiplies all parameters by a factor, for [`FaultInjection`].
pub(super) struct Scaled(pub(super) f64);

impl<B: TrainBackend> ModuleMapper<B> for Scaled {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| Tensor::from_inner(tensor.inner() * self.0).require_grad())
    }
}
