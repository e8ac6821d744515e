//! Accuracy on associative recall by phase: the position of the asked key modulo a period.
//!
//! Keys are at even positions from 0, so each sample has every even phase (and of an odd period every phase) equally
//! often, as far as its pairs fill whole periods; pairs behind the last whole one are left out.
//!
//! The phase is not all that differs. Pair 0 is the sample's first token, and slots are drawn for the pairs in turn, so
//! that early pairs get other distances to their questions than late ones. A model without blocks, asked the same
//! samples, is the control; [`RecallByPhase::distances`] shows how far distances differ.

use super::Answered;
use crate::phases::{Better, PhaseGap, phase_gap};
use serde::Serialize;
use sieve_data::MqarConfig;

/// Accuracy at the phases of the keys.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecallByPhase {
    /// Tokens of a period.
    pub period: usize,
    /// Pairs of a sample, from its first, that fill whole periods; the others are left out.
    pub num_pairs: usize,
    /// Share of right answers; a row is a sample.
    pub accuracy: PhaseGap,
    /// Mean distance in tokens from the value to its question, at each of the phases.
    pub distances: Vec<f64>,
}

impl RecallByPhase {
    /// Groups the answers to all pairs of each sample in turn; `None` where the pairs do not fill a period, or all have
    /// one phase.
    pub(super) fn of(answered: &[Answered], config: &MqarConfig, period: usize) -> Option<Self> {
        // Pairs after which the phases of the keys repeat.
        let repeat = if period.is_multiple_of(2) { period / 2 } else { period };
        let num_pairs = config.num_pairs / repeat * repeat;
        if num_pairs == 0 {
            return None;
        }
        let phase_of = |pair: usize| 2 * pair % period;
        let mut phases: Vec<usize> = (0..repeat).map(phase_of).collect();
        phases.sort_unstable();
        let share = repeat as f64 / num_pairs as f64;
        let mut distances = vec![0.0; repeat];
        let num_rows = answered.len() / config.num_pairs;
        let row = |of_sample: &[Answered]| {
            let mut right = vec![0.0; repeat];
            for (pair, answer) in of_sample[..num_pairs].iter().enumerate() {
                let at = phases.partition_point(|&phase| phase < phase_of(pair));
                right[at] += f64::from(u8::from(answer.is_correct));
                distances[at] += share * answer.distance as f64 / num_rows as f64;
            }
            right.iter().map(|right| right * share).collect()
        };
        let rows: Vec<Vec<f64>> = answered.chunks_exact(config.num_pairs).map(row).collect();
        let accuracy = phase_gap(&rows, &phases, period, Better::High, config.seed)?;
        Some(Self { period, num_pairs, accuracy, distances })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::phases::PhaseVerdict;

    /// Twenty samples of ten pairs, where `is_correct` says which pair of which sample is answered.
    fn grouped(period: usize, is_correct: impl Fn(usize, usize) -> bool) -> Option<RecallByPhase> {
        let answer = |n: usize| Answered { distance: 5 + n % 10, is_correct: is_correct(n / 10, n % 10) };
        let answered: Vec<Answered> = (0..200).map(answer).collect();
        RecallByPhase::of(&answered, &MqarConfig::new(64, 10, 1), period)
    }

    #[test]
    fn a_phase_that_is_never_answered_is_the_worst() {
        let by_phase = grouped(8, |_, pair| 2 * pair % 8 != 4).expect("two periods");
        // Keys 0, 2, 4, 6 and again; pairs 8 and 9 begin a third period.
        assert_eq!(by_phase.num_pairs, 8);
        let means: Vec<(usize, f64)> = by_phase.accuracy.phases.iter().map(|score| (score.phase, score.mean)).collect();
        assert_eq!(means, [(0, 1.0), (2, 1.0), (4, 0.0), (6, 1.0)]);
        assert_eq!((by_phase.accuracy.worst, by_phase.accuracy.verdict), (4, PhaseVerdict::BeyondChance));
        for (distance, known) in by_phase.distances.iter().zip([7.0, 8.0, 9.0, 10.0]) {
            assert!((distance - known).abs() < 1e-9, "{:?}", by_phase.distances);
        }
    }

    #[test]
    fn an_odd_period_has_all_phases() {
        let by_phase = grouped(5, |_, pair| 2 * pair % 5 != 1).expect("two repeats");
        let phases: Vec<usize> = by_phase.accuracy.phases.iter().map(|score| score.phase).collect();
        assert_eq!((phases, by_phase.num_pairs), (vec![0, 1, 2, 3, 4], 10));
        assert_eq!((by_phase.accuracy.worst, by_phase.accuracy.mean_at(1)), (1, 0.0));
    }

    #[test]
    fn answers_by_the_sample_alone_have_no_gap() {
        let by_phase = grouped(8, |sample, _| sample % 3 == 0).expect("two periods");
        assert_eq!((by_phase.accuracy.gap, by_phase.accuracy.verdict), (0.0, PhaseVerdict::NoGap));
    }

    #[test]
    fn pairs_of_less_than_a_period_or_of_one_phase_have_no_phases() {
        assert!(grouped(22, |_, _| true).is_none());
        assert!(grouped(2, |_, _| true).is_none());
    }
}
