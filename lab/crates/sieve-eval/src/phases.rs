//! Whether a score depends on the phase: the position of a key modulo a period, such as the size of a block.
//!
//! Each row (a needle, a sample) has a score at every phase, so differences between phases are paired. Chance is what
//! remains when each row's scores are rotated over the phases by a random number of its own: what neighbouring phases
//! of a row have in common stays, as do differences between rows, and what rows have in common at a phase goes.
//! Shuffles would take away the former too, and call a smooth row an effect of the phase.

use crate::seeded::seeded;
use chacha20::ChaCha8Rng;
use chacha20::rand_core::Rng;
use serde::Serialize;
use std::f64::consts::TAU;

/// Resamples of the rows for the intervals; the same number of rotations for chance.
const NUM_DRAWS: usize = 1000;
/// A gap that fewer rotations than this share reach is beyond chance.
const LEVEL: f64 = 0.05;
/// What differs less than by this share of it is equal: sums of the same numbers in another order.
const ROUNDING: f64 = 1e-9;

/// Which scores are the good ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Better {
    /// High scores: shares, likelihoods.
    High,
    /// Low scores: ranks.
    Low,
}

/// The mean score at one phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PhaseScore {
    /// Position modulo the period.
    pub phase: usize,
    /// Mean over the rows.
    pub mean: f64,
    /// 95 % interval of the mean, by resampled rows; absent for a single row.
    pub interval: Option<[f64; 2]>,
}

/// What the gap between the best and the worst phase says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PhaseVerdict {
    /// All phases have the same mean.
    NoGap,
    /// Fewer than 5 % of the rotations have a gap as large.
    BeyondChance,
    /// Rotations have such gaps too: there is no effect, or there are too few rows to see it.
    WithinChance,
}

/// One score by phase: the gap between the best and the worst phase, and the gap that chance gives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseGap {
    /// The mean score at each phase, by rising phase.
    pub phases: Vec<PhaseScore>,
    /// Number of rows, each with a score at every phase.
    pub num_rows: usize,
    /// The phase with the best mean, the lowest of equal ones.
    pub best: usize,
    /// The phase with the worst mean, the lowest of equal ones.
    pub worst: usize,
    /// Difference between the means of the best and of the worst phase, at least 0.
    pub gap: f64,
    /// 95 % interval of the gap by resampled rows; absent for a single row. It is the basic bootstrap, which takes off
    /// the gap that noise adds to the largest of several means.
    pub gap_interval: Option<[f64; 2]>,
    /// Median gap of the rotations.
    pub chance_median: f64,
    /// 95th percentile of the rotations' gaps.
    pub chance_high: f64,
    /// Share of the rotations whose gap is as large, the observed order counted as one of them.
    pub p_gap: f64,
    /// From the 2.5th percentile of the rotations' lowest phase to the 97.5th percentile of their highest one.
    pub chance_band: [f64; 2],
    /// Amplitude of the first Fourier component: a wave of one period through the means.
    pub wave: f64,
    /// Share of the rotations whose wave has as large an amplitude, the observed order counted as one of them.
    pub p_wave: f64,
    /// What the gap says.
    pub verdict: PhaseVerdict,
}

impl PhaseGap {
    /// The mean score at a phase; 0 at a phase that was not asked.
    pub fn mean_at(&self, phase: usize) -> f64 {
        self.phases.iter().find(|score| score.phase == phase).map_or(0.0, |score| score.mean)
    }
}

/// Measures how scores depend on the phase. `scores` has a row for each needle or sample, with a finite score at each
/// of `phases`, which are positions modulo `period`. The same seed gives the same numbers. `None` without a row, or
/// with fewer than two phases.
pub(crate) fn phase_gap(
    scores: &[Vec<f64>],
    phases: &[usize],
    period: usize,
    better: Better,
    seed: u64,
) -> Option<PhaseGap> {
    let (num_rows, num_phases) = (scores.len(), phases.len());
    if num_rows == 0 || num_phases < 2 {
        return None;
    }
    let means = means(scores.iter(), num_phases, num_rows);
    let wave = Wave::of(phases, period);
    let (gap, amplitude) = (span(&means), wave.amplitude(&means));
    let (low, high) = extremes(&means);
    let at = |value: f64| means.iter().position(|&mean| mean == value).map_or(0, |at| phases[at]);
    let [best, worst] = match better {
        Better::High => [at(high), at(low)],
        Better::Low => [at(low), at(high)],
    };
    let resampled = Resampled::of(scores, num_phases, seed);
    let mean_of = |(at, &mean): (usize, &f64)| PhaseScore {
        phase: phases[at],
        mean,
        interval: resampled.as_ref().map(|resampled| resampled.of_phase(at)),
    };
    let rotated = Rotated::of(scores, &wave, num_phases, seed);
    let p_gap = Rotated::share(&rotated.gaps, gap);
    Some(PhaseGap {
        phases: means.iter().enumerate().map(mean_of).collect(),
        num_rows,
        best,
        worst,
        gap,
        gap_interval: resampled.as_ref().map(|resampled| resampled.of_gap(gap, all_span(scores))),
        chance_median: percentile(&rotated.gaps, 0.5),
        chance_high: percentile(&rotated.gaps, 1.0 - LEVEL),
        p_gap,
        chance_band: [percentile(&rotated.lowest, 0.025), percentile(&rotated.highest, 0.975)],
        wave: amplitude,
        p_wave: Rotated::share(&rotated.waves, amplitude),
        verdict: match gap {
            0.0 => PhaseVerdict::NoGap,
            _ if p_gap < LEVEL => PhaseVerdict::BeyondChance,
            _ => PhaseVerdict::WithinChance,
        },
    })
}

/// Mean of the rows at each phase.
fn means<'a>(rows: impl Iterator<Item = &'a Vec<f64>>, num_phases: usize, num_rows: usize) -> Vec<f64> {
    let mut sums = vec![0.0; num_phases];
    for row in rows {
        for (sum, score) in sums.iter_mut().zip(row) {
            *sum += score;
        }
    }
    sums.iter().map(|sum| sum / num_rows as f64).collect()
}

/// The least and the largest of some numbers.
fn extremes(values: &[f64]) -> (f64, f64) {
    let ends = |(low, high): (f64, f64), &value: &f64| (low.min(value), high.max(value));
    values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), ends)
}

/// The largest number minus the least; 0 if they differ by rounding alone.
fn span(values: &[f64]) -> f64 {
    let (low, high) = extremes(values);
    let is_rounding = high - low <= ROUNDING * low.abs().max(high.abs());
    if is_rounding { 0.0 } else { high - low }
}

/// The largest score minus the least, over all rows and phases.
fn all_span(scores: &[Vec<f64>]) -> f64 {
    let all = scores.iter().flatten().copied();
    span(&all.collect::<Vec<_>>())
}

/// A percentile of sorted numbers, given as a share.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// A random number below `count`.
fn below(random: &mut ChaCha8Rng, count: usize) -> usize {
    (random.next_u64() % count as u64) as usize
}

/// The wave whose amplitude is measured: cosine and sine at each phase.
struct Wave {
    parts: Vec<(f64, f64)>,
}

impl Wave {
    fn of(phases: &[usize], period: usize) -> Self {
        let angle = |&phase: &usize| TAU * phase as f64 / period as f64;
        Self { parts: phases.iter().map(|phase| (angle(phase).cos(), angle(phase).sin())).collect() }
    }

    /// The amplitude of the first wave over the phases in `means`, one a phase.
    fn amplitude(&self, means: &[f64]) -> f64 {
        let count = means.len() as f64;
        // Around the mean, so that the phases left out of a period and rounding add nothing.
        let middle = means.iter().sum::<f64>() / count;
        let sum = |part: fn(&(f64, f64)) -> f64| -> f64 {
            self.parts.iter().zip(means).map(|(at, mean)| part(at) * (mean - middle)).sum()
        };
        // Two phases have one wave, whose cosine is full at both.
        let share = if means.len() == 2 { 1.0 } else { 2.0 };
        share / count * sum(|part| part.0).hypot(sum(|part| part.1))
    }
}

/// Means and gaps of resampled rows, sorted.
struct Resampled {
    means: Vec<Vec<f64>>,
    gaps: Vec<f64>,
}

impl Resampled {
    /// `None` for a single row, which has no spread.
    fn of(scores: &[Vec<f64>], num_phases: usize, seed: u64) -> Option<Self> {
        if scores.len() < 2 {
            return None;
        }
        let mut random = seeded([seed, 1, scores.len() as u64, num_phases as u64]);
        let (mut of_phases, mut gaps) = (vec![Vec::with_capacity(NUM_DRAWS); num_phases], Vec::new());
        for _ in 0..NUM_DRAWS {
            let rows = (0..scores.len()).map(|_| &scores[below(&mut random, scores.len())]);
            let drawn = means(rows, num_phases, scores.len());
            gaps.push(span(&drawn));
            for (all, mean) in of_phases.iter_mut().zip(drawn) {
                all.push(mean);
            }
        }
        Some(Self { means: of_phases.into_iter().map(sorted).collect(), gaps: sorted(gaps) })
    }

    fn of_phase(&self, at: usize) -> [f64; 2] {
        [0.025, 0.975].map(|share| percentile(&self.means[at], share))
    }

    /// The basic bootstrap's interval, within what a gap can be.
    fn of_gap(&self, gap: f64, most: f64) -> [f64; 2] {
        [0.975, 0.025].map(|share| (2.0 * gap - percentile(&self.gaps, share)).clamp(0.0, most))
    }
}

/// What remains when each row is rotated over its phases at random; every list is sorted.
struct Rotated {
    gaps: Vec<f64>,
    waves: Vec<f64>,
    lowest: Vec<f64>,
    highest: Vec<f64>,
}

impl Rotated {
    /// What random rotations of each row over its phases give, and so what rows without a common phase would.
    /// `scores`: rows of one score a phase.
    fn of(scores: &[Vec<f64>], wave: &Wave, num_phases: usize, seed: u64) -> Self {
        let mut random = seeded([seed, 2, scores.len() as u64, num_phases as u64]);
        let mut rows = scores.to_vec();
        let [mut gaps, mut waves, mut lowest, mut highest] = [const { Vec::new() }; 4];
        for _ in 0..NUM_DRAWS {
            for row in &mut rows {
                row.rotate_left(below(&mut random, num_phases));
            }
            let drawn = means(rows.iter(), num_phases, rows.len());
            let (low, high) = extremes(&drawn);
            gaps.push(span(&drawn));
            waves.push(wave.amplitude(&drawn));
            lowest.push(low);
            highest.push(high);
        }
        Self { gaps: sorted(gaps), waves: sorted(waves), lowest: sorted(lowest), highest: sorted(highest) }
    }

    /// The share of the rotations in which `drawn` is at least `observed`; the observed order is one more of them.
    fn share(drawn: &[f64], observed: f64) -> f64 {
        let below = drawn.partition_point(|&value| value < observed * (1.0 - ROUNDING));
        (1 + drawn.len() - below) as f64 / (1 + drawn.len()) as f64
    }
}

#[cfg(test)]
mod tests;
