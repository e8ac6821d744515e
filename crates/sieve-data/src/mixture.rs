//! Determines the source of each sample of a mixture: exact shares in any prefix, and no state besides the sample's
//! index.

use crate::error::DataError;

/// A periodic sequence of sources.
///
/// For every n, the first n samples hold more than `n w_s - 1` and less than `n w_s + 1` samples of source s, with
/// weights w that add up to 1. Of the sources that are far enough behind their share, each place takes the one whose
/// next sample is due first (Tijdeman, "The chairman assignment problem", 1980). A table holds one period; a sample's
/// index in its source follows from the table and the number of whole periods before.
#[derive(Debug, Clone)]
pub(crate) struct Schedule {
    /// For each place in the period, the source, and the number of earlier places with that source.
    places: Vec<(u32, u32)>,
    /// Number of places of each source in a period.
    counts: Vec<u64>,
}

/// The longest exact period. Weights of up to six decimals that need no longer one are exact; others are rounded to
/// fractions of this period.
const MAX_PERIOD: u64 = 1 << 20;

impl Schedule {
    /// The schedule for these weights, which need not add up to 1.
    ///
    /// # Errors
    /// No weights, more than 65536, or one that is not a positive number.
    pub(crate) fn new(weights: &[f64]) -> Result<Self, DataError> {
        let bad = |reason: String| Err(DataError::setting("weights", reason));
        if weights.is_empty() || weights.len() > 1 << 16 {
            return bad(format!("{} sources cannot be mixed", weights.len()));
        }
        if let Some(weight) = weights.iter().find(|weight| !(weight.is_finite() && **weight > 0.0)) {
            return bad(format!("{weight} is not a positive number\n  hint: remove a source that is not wanted"));
        }
        let counts = parts(weights);
        let period = counts.iter().sum::<u64>();
        let mut given = vec![0u64; counts.len()];
        let mut places = Vec::with_capacity(period as usize);
        for place in 1..=period {
            let source = next_source(&counts, &given, period, place);
            places.push((source as u32, given[source] as u32));
            given[source] += 1;
        }
        debug_assert_eq!(given, counts);
        Ok(Self { places, counts })
    }

    /// The source of a sample, and the sample's index in that source.
    pub(crate) fn get(&self, sample: u64) -> (usize, u64) {
        let period = self.places.len() as u64;
        let (source, earlier) = self.places[(sample % period) as usize];
        let source = source as usize;
        (source, sample / period * self.counts[source] + u64::from(earlier))
    }
}

/// Tijdeman's rule for k sources: of the sources that would be at least 1 / (2k - 2) samples behind their share after
/// this place, the one whose share first exceeds `given + 1 - 1 / (2k - 2)`. `given` are the samples that each source
/// had.
fn next_source(counts: &[u64], given: &[u64], period: u64, place: u64) -> usize {
    let slack = 2 * counts.len().max(2) as i128 - 2;
    let (period, place) = (i128::from(period), i128::from(place));
    let of = |list: &[u64], source: usize| i128::from(list[source]);
    let behind = |source: usize| place * of(counts, source) - of(given, source) * period;
    // A source's next sample is due at place `period * due / (slack * counts)`; compared below without dividing.
    let due = |source: usize| slack * (of(given, source) + 1) - 1;
    (0..counts.len())
        .filter(|&source| behind(source) * slack >= period)
        .min_by(|&a, &b| (due(a) * of(counts, b)).cmp(&(due(b) * of(counts, a))))
        .expect("together the sources are one sample behind, so one of them is far enough")
}

/// Whole numbers in the proportion of the weights, at least 1 each.
fn parts(weights: &[f64]) -> Vec<u64> {
    // The first power of ten that makes all weights whole numbers, if their sum is a period that is short enough.
    for scale in [1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6] {
        let scaled = weights.iter().map(|weight| weight * scale);
        let exact =
            scaled.clone().all(|part| (0.5..1e15).contains(&part) && (part - part.round()).abs() <= 1e-9 * part);
        if !exact {
            continue;
        }
        let mut parts = scaled.map(|part| part.round() as u64).collect::<Vec<_>>();
        let divisor = parts.iter().copied().fold(0, gcd);
        parts.iter_mut().for_each(|part| *part /= divisor);
        if parts.iter().sum::<u64>() <= MAX_PERIOD {
            return parts;
        }
    }
    // Weights that no such power makes whole are rounded to shares of the longest period.
    let total = weights.iter().sum::<f64>();
    let share = |weight: f64| (weight / total * MAX_PERIOD as f64).round();
    weights.iter().map(|&weight| (share(weight) as u64).max(1)).collect()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Checks every prefix of two periods, and that each source's samples are numbered without gaps.
    fn assert_exact(weights: &[f64]) {
        let schedule = Schedule::new(weights).unwrap();
        let period = schedule.places.len() as u64;
        let mut given = vec![0u64; weights.len()];
        for sample in 0..2 * period {
            let (source, place) = schedule.get(sample);
            assert_eq!(place, given[source], "sample {sample} of {weights:?}");
            given[source] += 1;
            for (source, &given) in given.iter().enumerate() {
                let share = (sample + 1) as f64 * schedule.counts[source] as f64 / period as f64;
                assert!(
                    (given as f64 - share).abs() < 1.0,
                    "{given} of {} samples, share {share}, {weights:?}",
                    sample + 1
                );
            }
        }
    }

    #[test]
    fn decimal_weights_are_exact_and_their_period_is_short() {
        for (weights, counts) in [
            (vec![1.0], vec![1]),
            (vec![0.9, 0.1], vec![9, 1]),
            (vec![0.7, 0.2, 0.1], vec![7, 2, 1]),
            (vec![2.0, 4.0], vec![1, 2]),
            (vec![0.125, 0.875], vec![1, 7]),
            (vec![220.2, 28.0, 4.0], vec![1101, 140, 20]),
        ] {
            assert_eq!(Schedule::new(&weights).unwrap().counts, counts);
            assert_exact(&weights);
        }
    }

    #[test]
    fn other_weights_are_rounded_to_a_millionth() {
        let weights = [std::f64::consts::PI, 1.0, 1e-9];
        let counts = parts(&weights);
        let total = counts.iter().sum::<u64>() as f64;
        assert!((counts[0] as f64 / total - weights[0] / (weights[0] + 1.0)).abs() < 2e-6);
        assert_eq!(counts[2], 1);
    }

    #[test]
    fn invalid_weights_are_refused() {
        for weights in [vec![], vec![1.0, 0.0], vec![-1.0], vec![f64::NAN], vec![f64::INFINITY]] {
            let error = Schedule::new(&weights).unwrap_err().to_string();
            assert!(error.starts_with("weights: "), "{error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn every_prefix_has_its_shares(parts in proptest::collection::vec(1u32..60, 1..9)) {
            assert_exact(&parts.iter().map(|&part| f64::from(part)).collect::<Vec<_>>());
        }
    }
}
