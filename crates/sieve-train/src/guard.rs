//! Skips steps whose loss or gradient norm is NaN or infinite, and detects losses far above their running mean.
//!
//! [`gate`] decides on the device whether a step is skipped, before the update and without copying a value to the host.
//! The host reads the losses later, and [`LossMean`] compares them with their mean.
use burn::tensor::{Bool, Tensor};
use sieve_core::recipe::TrainingSection;
use sieve_hf::GuardState;
use sieve_ops::TrainBackend;

/// Number of losses before one can count as far above their mean: the first losses fall fast.
const WARM_UP_STEPS: f32 = 20.0;
/// Weight of a new loss in the mean. The first 50 losses are averaged evenly.
const NEW_LOSS_WEIGHT: f32 = 0.02;

/// Loss and gradient norm of a step, still on the device.
pub(crate) struct GatedStep<B: TrainBackend> {
    /// `[1]`: the clip scale, or 0 if the step is skipped; never NaN.
    pub(crate) grad_scale: Tensor<B::InnerBackend, 1>,
    /// `[3]`: loss, gradient norm, and 1 if the step is taken, else 0.
    pub(crate) row: Tensor<B::InnerBackend, 1>,
}

/// Decides whether a step is taken, by its loss and gradient norm, `[1]` each.
pub(crate) fn gate<B: TrainBackend>(
    loss: Tensor<B::InnerBackend, 1>,
    grad_norm: Tensor<B::InnerBackend, 1>,
    clip_scale: Tensor<B::InnerBackend, 1>,
) -> GatedStep<B> {
    // Infinity and NaN times 0 are NaN, which is not equal to 0.
    let zero = (loss.clone() + grad_norm.clone()).mul_scalar(0.0);
    let is_taken: Tensor<B::InnerBackend, 1, Bool> = zero.equal_elem(0.0);
    let grad_scale = clip_scale.zeros_like().mask_where(is_taken.clone(), clip_scale);
    let row = Tensor::cat(vec![loss, grad_norm, is_taken.float()], 0);
    GatedStep { grad_scale, row }
}

/// The numbers of a [`GatedStep`] on the host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepNumbers {
    pub(crate) loss: f32,
    pub(crate) grad_norm: f32,
    pub(crate) is_taken: bool,
}

impl StepNumbers {
    /// Reads a [`GatedStep`]'s row, which waits for the device.
    pub(crate) fn read<B: TrainBackend>(row: &Tensor<B::InnerBackend, 1>) -> Self {
        let values = row.clone().into_data().iter::<f32>().collect::<Vec<_>>();
        Self { loss: values[0], grad_norm: values[1], is_taken: values[2] == 1.0 }
    }
}

/// The running mean of the losses of steps that were taken. Losses far above the mean are left out of it.
#[derive(Debug)]
pub(crate) struct LossMean {
    /// A loss that exceeds the mean by more than this, in nats, is far above it; infinite if the check is off.
    margin: f32,
    state: GuardState,
}

impl LossMean {
    /// Continues from the mean in `state`; a `guard_spike_factor` of 0 turns the check off.
    pub(crate) fn new(training: &TrainingSection, state: GuardState) -> Self {
        let factor = training.guard_spike_factor;
        Self { margin: if factor > 0.0 { factor.ln() as f32 } else { f32::INFINITY }, state }
    }

    /// Forgets all losses, because the next ones are of other data or of another model.
    pub(crate) fn restart(&mut self) {
        self.state = GuardState::default();
    }

    pub(crate) fn state(&self) -> GuardState {
        self.state
    }

    /// Whether the loss of a step that was taken is far above the mean. If not, adds it to the mean.
    pub(crate) fn judge(&mut self, loss: f32) -> bool {
        let state = &mut self.state;
        if state.num_losses == 0.0 {
            state.mean_loss = loss;
        }
        let rise = loss - state.mean_loss;
        if state.num_losses >= WARM_UP_STEPS && rise > self.margin {
            return true;
        }
        state.num_losses += 1.0;
        let weight = state.num_losses.recip().max(NEW_LOSS_WEIGHT);
        // Limited, so that one very high loss during the warm-up does not lift the mean above all later losses.
        state.mean_loss += rise.min(self.margin) * weight;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Autodiff;
    use burn_flex::Flex;

    type B = Autodiff<Flex>;

    /// Whether a step of this loss and norm is taken, and its scale where clipping gives `norm / 2`.
    fn gated(loss: f32, norm: f32) -> (bool, f32) {
        let scalar = |value: f32| Tensor::<Flex, 1>::from_floats([value], &Default::default());
        let gated = gate::<B>(scalar(loss), scalar(norm), scalar(0.5).mul_scalar(norm));
        let scale = gated.grad_scale.into_data().iter::<f32>().next().unwrap();
        (StepNumbers::read::<B>(&gated.row).is_taken, scale)
    }

    fn mean(spike_factor: f64) -> LossMean {
        let text = include_str!("../../../recipes/quickstart.toml");
        let recipe = sieve_core::Recipe::load(text, "quickstart", &[]).expect("a shipped recipe");
        let training = TrainingSection { guard_spike_factor: spike_factor, guard_patience: 1, ..recipe.training };
        LossMean::new(&training, GuardState::default())
    }

    #[test]
    fn a_step_that_is_not_finite_is_skipped_with_a_scale_of_zero() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for (loss, norm) in [(nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, inf), (-inf, inf)] {
            assert_eq!(gated(loss, norm), (false, 0.0), "{loss} {norm}");
        }
        assert_eq!(gated(3.0, 1e30), (true, 5e29));
        assert_eq!(gated(1e30, 0.0), (true, 0.0));
    }

    #[test]
    fn a_loss_is_far_above_the_mean_of_those_before() {
        let mut mean = mean(4.0);
        // During the warm-up no loss is far above the mean, and one very high loss does not lift the mean for long.
        assert!(!mean.judge(1.0));
        assert!(!mean.judge(1e4));
        for _ in 0..200 {
            assert!(!mean.judge(1.0));
        }
        assert!((mean.state().mean_loss - 1.0).abs() < 0.05, "{mean:?}");
        // The margin is ln 4 = 1.386 above a mean of 1.
        assert!(mean.judge(2.5));
        assert!(!mean.judge(2.3));
        assert!(!mean.judge(0.1), "a fall is not far above");
    }

    #[test]
    fn the_mean_follows_a_loss_that_rises_slowly() {
        let mut mean = mean(10.0);
        for step in 0..1000u16 {
            assert!(!mean.judge(1.0 + f32::from(step) / 50.0), "{step}");
        }
        assert!(mean.state().mean_loss > 15.0, "{mean:?}");
    }

    #[test]
    fn a_mean_continues_from_a_saved_state() {
        let mut one = mean(4.0);
        for loss in [1.0, 0.3, 2.2] {
            one.judge(loss);
        }
        let mut other = mean(4.0);
        other.state = one.state();
        one.judge(0.7);
        other.judge(0.7);
        assert_eq!(one.state(), other.state());
        one.restart();
        assert_eq!(one.state(), GuardState::default());
    }
}
