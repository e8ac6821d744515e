//! Steps that would spoil the weights: not finite, or a spike.
//!
//! Whether a step is taken is decided on the device, before the update, and gates it: no value is read back for that. The
//! host learns of it later.
use burn::tensor::{Bool, Tensor};
use sieve_core::recipe::TrainingSection;
use sieve_hf::GuardState;
use sieve_ops::TrainBackend;

/// Steps whose norms the running mean needs before it limits anything: the first ones fall fast.
const WARM_UP_STEPS: f64 = 20.0;
/// Weight of a new norm in the running mean, once there are more norms than its reciprocal.
const NEW_NORM_WEIGHT: f64 = 0.02;

/// Judges steps on the device.
#[derive(Debug)]
pub(crate) struct Guard<B: TrainBackend> {
    /// 0: no limit on the norm.
    spike_factor: f64,
    mean_norm: Tensor<B::InnerBackend, 1>,
    mean_loss: Tensor<B::InnerBackend, 1>,
    num_norms: Tensor<B::InnerBackend, 1>,
}

/// Device values of one judged step.
pub(crate) struct Judgement<B: TrainBackend> {
    /// The scale, and 0 where the step must not be taken; never NaN. `[1]`.
    pub(crate) grad_scale: Tensor<B::InnerBackend, 1>,
    /// Loss, gradient norm, 1 where the step is taken and else 0, mean norm and mean loss it was judged by. `[5]`.
    pub(crate) row: Tensor<B::InnerBackend, 1>,
}

/// The numbers of a [`Judgement`] on the host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct JudgedStep {
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    pub(crate) is_taken: bool,
    pub(crate) mean_norm: f64,
    pub(crate) mean_loss: f64,
}

impl JudgedStep {
    /// Reads a [`Judgement`]'s row, which waits for the device.
    pub(crate) fn read<B: TrainBackend>(row: &Tensor<B::InnerBackend, 1>) -> Self {
        let mut values = row.clone().into_data().iter::<f64>().collect::<Vec<_>>();
        values.resize(5, f64::NAN);
        Self {
            loss: values[0],
            grad_norm: values[1],
            is_taken: values[2] == 1.0,
            mean_norm: values[3],
            mean_loss: values[4],
        }
    }
}

impl<B: TrainBackend> Guard<B> {
    pub(crate) fn new(training: &TrainingSection, state: GuardState, device: &B::Device) -> Self {
        let scalar = |value: f32| Tensor::from_floats([value], device);
        // Without a mean loss the guard warms up again.
        let state = if state.mean_loss == 0.0 {
            GuardState::default()
        } else {
            state
        };
        Self {
            spike_factor: training.guard_spike_factor,
            mean_norm: scalar(state.mean_norm),
            mean_loss: scalar(state.mean_loss),
            num_norms: scalar(state.num_norms),
        }
    }

    /// Reads the state back, which waits for the device.
    pub(crate) fn state(&self) -> GuardState {
        let read = |tensor: &Tensor<B::InnerBackend, 1>| {
            let data = tensor.clone().into_data();
            data.iter::<f32>().next().unwrap_or_default()
        };
        GuardState {
            mean_norm: read(&self.mean_norm),
            mean_loss: read(&self.mean_loss),
            num_norms: read(&self.num_norms),
        }
    }

    /// Judges a step by its loss and gradient norm, `[1]` each, and counts its norm where it is taken.
    pub(crate) fn judge(
        &mut self,
        loss: Tensor<B::InnerBackend, 1>,
        grad_norm: Tensor<B::InnerBackend, 1>,
        clip_scale: Tensor<B::InnerBackend, 1>,
    ) -> Judgement<B> {
        // Infinity and NaN times 0 are NaN, which equals nothing.
        let zero = (loss.clone() + grad_norm.clone()).mul_scalar(0.0);
        let mut is_taken: Tensor<B::InnerBackend, 1, Bool> = zero.equal_elem(0.0);
        let (mean, mean_loss) = (self.mean_norm.clone(), self.mean_loss.clone());
        if self.spike_factor > 0.0 {
            let limit = mean.clone().mul_scalar(self.spike_factor);
            // As much worse in perplexity as a norm may be larger.
            let loss_limit = mean_loss.clone().add_scalar(self.spike_factor.ln());
            let below = grad_norm
                .clone()
                .lower_equal(limit)
                .bool_and(loss.clone().lower_equal(loss_limit));
            let too_early = self.num_norms.clone().lower_elem(WARM_UP_STEPS);
            is_taken = is_taken.bool_and(below.bool_or(too_early));
        }
        let count = self.num_norms.clone().add_scalar(1.0);
        let weight = count.clone().recip().clamp_min(NEW_NORM_WEIGHT);
        let next = mean.clone() + (grad_norm.clone() - mean.clone()) * weight.clone();
        self.mean_norm = mean.clone().mask_where(is_taken.clone(), next);
        let next = mean_loss.clone() + (loss.clone() - mean_loss.clone()) * weight;
        self.mean_loss = mean_loss.clone().mask_where(is_taken.clone(), next);
        self.num_norms = self.num_norms.clone().mask_where(is_taken.clone(), count);
        let grad_scale = clip_scale
            .zeros_like()
            .mask_where(is_taken.clone(), clip_scale);
        let row = Tensor::cat(vec![loss, grad_norm, is_taken.float(), mean, mean_loss], 0);
        Judgement { grad_scale, row }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Autodiff;
    use burn_flex::Flex;

    type B = Autodiff<Flex>;

    fn guard(spike_factor: f64) -> Guard<B> {
        let mut guard = Guard::new(
            &TrainingSection {
                steps: 1,
                seq_len: 1,
                local_batch_size: 1,
                global_batch_size: 1,
                max_norm: 1.0,
                seed: 0,
                deterministic: false,
                one_document_per_row: false,
                guard_spike_factor: 0.0,
                guard_patience: 1,
            },
            GuardState::default(),
            &Default::default(),
        );
        guard.spike_factor = spike_factor;
        guard
    }

    /// Whether the step was taken, and its scale.
    fn judged(guard: &mut Guard<B>, loss: f32, norm: f32) -> (bool, f32) {
        let scalar = |value: f32| Tensor::<Flex, 1>::from_floats([value], &Default::default());
        let judged = guard.judge(scalar(loss), scalar(norm), scalar(0.5).mul_scalar(norm));
        let scale = judged.grad_scale.into_data().iter::<f32>().next().unwrap();
        (JudgedStep::read::<B>(&judged.row).is_taken, scale)
    }

    #[test]
    fn what_is_not_finite_is_never_taken_and_its_scale_is_zero() {
        let mut guard = guard(0.0);
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for (loss, norm) in [(nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, inf), (-inf, inf)] {
            assert_eq!(
                judged(&mut guard, loss, norm),
                (false, 0.0),
                "{loss} {norm}"
            );
        }
        assert_eq!(guard.state(), GuardState::default());
        assert_eq!(judged(&mut guard, 3.0, 1e30), (true, 5e29));
    }

    #[test]
    fn a_spike_is_known_by_the_mean_of_the_steps_before() {
        let mut guard = guard(4.0);
        // Nothing is a spike before the mean means something.
        assert!(judged(&mut guard, 1.0, 1.0).0);
        assert!(judged(&mut guard, 1.0, 99.0).0);
        for _ in 0..200 {
            assert!(judged(&mut guard, 1.0, 2.0).0);
        }
        let before = guard.state();
        assert!((before.mean_norm - 2.0).abs() < 0.5, "{before:?}");
        assert_eq!(judged(&mut guard, 1.0, 11.0), (false, 0.0));
        assert_eq!(guard.state(), before, "a step not taken counts for nothing");
        assert!(judged(&mut guard, 1.0, 7.0).0);
        // ln 4 = 1.386 nats above the mean loss of 1.
        assert_eq!(judged(&mut guard, 2.5, 2.0), (false, 0.0));
        assert!(judged(&mut guard, 2.3, 2.0).0);
        assert!(judged(&mut guard, 0.1, 2.0).0, "a fall is no spike");
    }

    #[test]
    fn the_state_survives_a_checkpoint() {
        let mut one = guard(4.0);
        for norm in [1.0, 0.3, 2.2] {
            judged(&mut one, 1.0, norm);
        }
        let mut other = guard(4.0);
        let scalar = |value: f32| Tensor::from_floats([value], &Default::default());
        other.mean_norm = scalar(one.state().mean_norm);
        other.mean_loss = scalar(one.state().mean_loss);
        other.num_norms = scalar(one.state().num_norms);
        judged(&mut one, 1.0, 0.7);
        judged(&mut other, 1.0, 0.7);
        assert_eq!(one.state(), other.state());
    }
}
