//! The learning rate over the steps: warm up, stay, decay (WSD, arXiv:2404.06395).

use super::{DecayType, LrSchedulerSection, Recipe};

/// The largest share of the steps after `after_step` that a second schedule spends on warm-up. `warmup_steps` is meant
/// for the whole run, and may be more than the steps that are left.
const MOST_WARMUP_AGAIN: f64 = 0.2;

impl Recipe {
    /// Learning rate of `step`, counted from 0.
    pub fn learning_rate(&self, step: usize) -> f64 {
        self.optimizer.lr * self.lr_scheduler.factor(step, self.training.steps)
    }
}

impl LrSchedulerSection {
    /// Share of `optimizer.lr` at `step` (counted from 0) of `total_steps`.
    ///
    /// The same numbers as torchtitan v0.2's `linear_warmup_stable_decay`: warm-up gives `(step + 1) / warmup_steps`;
    /// the decay takes the last `round(total_steps * decay_ratio)` steps (halves round to even), at most what warm-up
    /// leaves; it is stretched over one step more than there are, so that the last step still learns. Two departures:
    /// `decay_ratio` has no default (1.0 is torchtitan's absent one: decay from the end of the warm-up), and a step
    /// past the end stays at the decay's floor instead of following the formula below it.
    ///
    /// With `after_step`, the steps before it have a schedule of their own, and a second schedule spans the steps after
    /// it. At most a fifth of the second schedule's steps warm up, and the last `decay_ratio` of them decay; if the
    /// warm-up had to be shortened, all steps after it decay. The last step has at most the rate at which the first
    /// schedule ended.
    pub fn factor(&self, step: usize, total_steps: usize) -> f64 {
        let after = self.after_step.min(total_steps);
        if after == 0 || step < after {
            let num_steps = if after == 0 { total_steps } else { after };
            let warmup_steps = self.warmup_steps.min(num_steps);
            let decay_steps = self.decay_steps(num_steps, warmup_steps);
            let end_like = decay_steps;
            return self.factor_of_one(step, num_steps, warmup_steps, [decay_steps, end_like]);
        }
        let first_decay = self.decay_steps(after, self.warmup_steps.min(after));
        let num_steps = total_steps - after;
        let most_warmup = (num_steps as f64 * MOST_WARMUP_AGAIN) as usize;
        let warmup_steps = self.warmup_steps.min(most_warmup);
        // A warm-up that had to be shortened means that the second schedule has few steps. All of them after the
        // warm-up decay: a phase at the highest rate would lose what the first schedule's decay gained.
        let decay_steps = match (self.decay_ratio > 0.0, most_warmup < self.warmup_steps) {
            (false, _) => 0,
            (true, true) => num_steps - warmup_steps,
            (true, false) => self.decay_steps(num_steps, warmup_steps).max(1),
        };
        let end_like = first_decay.max(decay_steps);
        self.factor_of_one(step - after, num_steps, warmup_steps, [decay_steps, end_like])
    }

    /// [`factor`](Self::factor) of one schedule, which begins at step 0. Its decay takes `decay_steps`, and ends at the
    /// rate at which a decay over `end_like` steps would end; `end_like` is at least `decay_steps`.
    fn factor_of_one(
        &self,
        step: usize,
        total_steps: usize,
        warmup_steps: usize,
        [decay_steps, end_like]: [usize; 2],
    ) -> f64 {
        if step < warmup_steps {
            return (step + 1) as f64 / warmup_steps as f64;
        }
        let before_decay = total_steps - decay_steps;
        if decay_steps == 0 || step < before_decay {
            return 1.0;
        }
        let decayed = (step - before_decay) as f64;
        // With `end_like` the last step has progress (end_like - 1) / end_like, and the others are spaced evenly.
        let progress = match (end_like == decay_steps, decay_steps) {
            (true, _) => decayed / decay_steps as f64,
            (false, 1) => (end_like - 1) as f64 / end_like as f64 + decayed,
            (false, _) => decayed / (decay_steps - 1) as f64 * (end_like - 1) as f64 / end_like as f64,
        };
        if progress == 0.0 {
            // Exactly 1, which the sum below could miss by rounding.
            return 1.0;
        }
        let progress = progress.min(1.0);
        let remaining = match self.decay_type {
            DecayType::Linear => 1.0 - progress,
            DecayType::Sqrt => 1.0 - progress.sqrt(),
            DecayType::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.min_lr_factor + (1.0 - self.min_lr_factor) * remaining
    }

    /// Steps of the final decay of a schedule of `total_steps`.
    fn decay_steps(&self, total_steps: usize, warmup_steps: usize) -> usize {
        let wanted = (total_steps as f64 * self.decay_ratio).round_ties_even() as usize;
        wanted.min(total_steps - warmup_steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(
        warmup_steps: usize,
        decay_ratio: f64,
        decay_type: DecayType,
        min_lr_factor: f64,
    ) -> LrSchedulerSection {
        LrSchedulerSection { warmup_steps, decay_ratio, decay_type, min_lr_factor, after_step: 0 }
    }

    #[test]
    fn factors_equal_those_of_torchtitan() {
        let (linear, sqrt, cosine) = (DecayType::Linear, DecayType::Sqrt, DecayType::Cosine);
        // The factors were computed by running torchtitan v0.2.0's own function in Python.
        for (what, schedule, expected) in [
            (
                "linear with a floor",
                schedule(3, 0.4, linear, 0.1),
                "0.3333333333333333 0.6666666666666666 1 1 1 1 1 0.775 0.55 0.325",
            ),
            ("square root", schedule(2, 0.5, sqrt, 0.0), "0.5 1 1 1 1 1 0.5 0.2928932188134524 0.1339745962155614"),
            (
                "cosine over all that warm-up leaves",
                schedule(3, 1.0, cosine, 0.02),
                "0.3333333333333333 0.6666666666666666 1 1 0.9064183272437243 0.6614183272437243 0.35858167275627584 \
                 0.1135816727562758",
            ),
            ("half a step rounds to even", schedule(1, 0.5, linear, 0.0), "1 1 1 1 0.5"),
            ("no decay and no warm-up", schedule(0, 0.0, linear, 0.0), "1 1 1 1"),
        ] {
            let expected = expected.split(' ').map(|factor| factor.parse::<f64>().expect("a number"));
            let expected = expected.collect::<Vec<_>>();
            for (step, wanted) in expected.iter().enumerate() {
                let factor = schedule.factor(step, expected.len());
                assert!((factor - wanted).abs() < 1e-12, "{what}, step {step}: {factor} is not {wanted}");
            }
        }
    }

    #[test]
    fn factor_stays_in_bounds_and_never_rises_after_warm_up() {
        for total_steps in [1, 2, 3, 7, 50, 401] {
            for warmup_steps in [0, 1, 2, total_steps / 2, total_steps] {
                for decay_ratio in [0.0, 0.01, 0.2, 0.5, 0.999, 1.0] {
                    for decay_type in [DecayType::Linear, DecayType::Sqrt, DecayType::Cosine] {
                        let schedule = schedule(warmup_steps.min(total_steps), decay_ratio, decay_type, 0.05);
                        let factors = (0..total_steps + 5).map(|step| schedule.factor(step, total_steps));
                        let factors = factors.collect::<Vec<_>>();
                        assert!(factors.iter().all(|factor| *factor > 0.0 && *factor <= 1.0));
                        let after = &factors[schedule.warmup_steps..];
                        assert!(after.iter().all(|factor| *factor >= 0.05 - 1e-12), "{schedule:?}");
                        assert!(after.windows(2).all(|pair| pair[1] <= pair[0] + 1e-12), "{schedule:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_longer_run_has_a_second_schedule_of_the_same_shape() {
        let once = schedule(2, 0.5, DecayType::Linear, 0.1);
        let twice = LrSchedulerSection { after_step: 8, ..once.clone() };
        for step in 0..8 {
            assert_eq!(twice.factor(step, 20), once.factor(step, 8));
        }
        for step in 8..25 {
            assert_eq!(twice.factor(step, 20), once.factor(step - 8, 12));
        }
    }

    #[test]
    fn a_short_extension_warms_up_decays_and_ends_at_the_earlier_last_rate() {
        // The schedule of `sieve recipe new`: 400 steps, 80 of warm-up, 80 of decay.
        for decay_type in [DecayType::Linear, DecayType::Sqrt, DecayType::Cosine] {
            for (warmup_steps, decay_ratio) in [(80, 0.2), (100, 0.25), (400, 0.2), (0, 1.0)] {
                let schedule = schedule(warmup_steps, decay_ratio, decay_type, 0.05);
                let end = schedule.factor(399, 400);
                for more in [1, 2, 4, 5, 40, 80, 170, 400, 1000] {
                    let again = LrSchedulerSection { after_step: 400, ..schedule.clone() };
                    let rates = (400..400 + more).map(|step| again.factor(step, 400 + more));
                    let rates = rates.collect::<Vec<_>>();
                    let what = format!("{again:?}, {more} more steps: {rates:?}");
                    let last = *rates.last().expect("a step");
                    assert!(last <= end + 1e-12 && last > 0.05 - 1e-12, "{end} {what}");
                    let top = rates.iter().position(|rate| *rate == 1.0).unwrap_or(0);
                    assert!(5 * top <= more, "{what}");
                    assert!(rates[top..].is_sorted_by(|a, b| a >= b), "{what}");
                    assert!(again.factor(400 + more, 400 + more) <= last, "{what}");
                }
            }
        }
        let first = schedule(80, 0.2, DecayType::Linear, 0.0);
        let again = LrSchedulerSection { after_step: 400, ..first.clone() };
        // Forty more: eight steps up instead of 80, so 32 down to the rate of step 400.
        let factor = |step: usize| again.factor(400 + step, 440);
        assert_eq!([factor(0), factor(7), factor(8)], [0.125, 1.0, 1.0]);
        assert!(factor(9) < 1.0 && factor(24) < 0.6, "{}", factor(24));
        assert!((factor(39) - 1.0 / 80.0).abs() < 1e-12, "{}", factor(39));
    }

    #[test]
    fn last_step_of_a_run_still_learns_and_later_ones_do_not_fall_below_the_floor() {
        let schedule = schedule(2, 1.0, DecayType::Linear, 0.0);
        assert!(schedule.factor(9, 10) > 0.0);
        assert_eq!(schedule.factor(10, 10), 0.0);
        assert_eq!(schedule.factor(99, 10), 0.0);
    }
}
