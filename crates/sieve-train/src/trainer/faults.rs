//! Faults that tests inject into a run: at one place of a step, [`Trainer::falsify`], and at the beginning of a replay,
//! of a validation, and of a checkpoint's two parts. Any other run passes these places unchanged.
use super::Trainer;
use super::steps::StepAhead;
use crate::TrainError;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use sieve_ops::TrainBackend;
use std::sync::Arc;

/// A point at which tests inject a fault.
#[doc(hidden)]
#[derive(Debug)]
pub enum Moment<'a> {
    /// A step is about to be taken.
    Step(&'a mut StepAhead),
    /// Ranks are about to compute the micro-batch whose gradients they compare; what its loss is multiplied by.
    Replay(&'a mut f64),
    /// A validation begins.
    Validating,
    /// The thread that writes a checkpoint begins.
    Writing,
    /// All ranks have written a checkpoint, which is about to get its final name.
    Naming,
}

/// Fault injection for tests: a function that is called at each [`Moment`]. Its first argument is the first row of the
/// step, or outside of a step the number of steps done.
#[doc(hidden)]
#[derive(Clone)]
pub struct FaultInjection(Arc<dyn Fn(u64, Moment<'_>) + Send + Sync>);

impl Default for FaultInjection {
    fn default() -> Self {
        Self::new(|_, _| ())
    }
}

impl FaultInjection {
    /// Fault injection that calls `disturb` at every [`Moment`].
    pub fn new(disturb: impl Fn(u64, Moment<'_>) + Send + Sync + 'static) -> Self {
        Self(Arc::new(disturb))
    }

    /// Tells the function of a [`Moment`].
    pub(super) fn at(&self, number: u64, moment: Moment<'_>) {
        (self.0)(number, moment);
    }
}

impl<B: TrainBackend> Trainer<B> {
    /// Lets a test change the step that is about to be taken, and the weights before it.
    pub(super) fn falsify(&mut self, step: &mut StepAhead) -> Result<(), TrainError> {
        self.machine.disturbance.at(self.progress.next_sample, Moment::Step(step));
        if step.weights != 1.0 {
            self.finish_leaves()?;
            self.learner.model = self.learner.model.take().map(|model| model.map(&mut Scaled(step.weights)));
        }
        Ok(())
    }
}

/// Multiplies all parameters by a factor.
struct Scaled(f64);

impl<B: TrainBackend> ModuleMapper<B> for Scaled {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| Tensor::from_inner(tensor.inner() * self.0).require_grad())
    }
}
