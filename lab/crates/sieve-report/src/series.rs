//! Packs logged numbers compactly into the page.
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;

/// A longer series is reduced to this many bins at most.
const NUM_BINS: usize = 4000;

/// `f32` numbers as base64 of their little-endian bytes. NaN stands for a number that was not logged.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct Packed(String);

impl Packed {
    pub(crate) fn new(values: impl IntoIterator<Item = f32>) -> Self {
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        Self(STANDARD.encode(bytes))
    }
}

/// A metric over the steps of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Series {
    step: Packed,
    mean: Packed,
    /// Least number of each bin; `None` without binning.
    #[serde(skip_serializing_if = "Option::is_none")]
    low: Option<Packed>,
    /// Largest number of each bin; `None` without binning.
    #[serde(skip_serializing_if = "Option::is_none")]
    high: Option<Packed>,
}

impl Series {
    /// A series of all numbers, without binning.
    pub(crate) fn whole(steps: &[f32], values: &[f32]) -> Self {
        Self {
            step: Packed::new(steps.iter().copied()),
            mean: Packed::new(values.iter().copied()),
            low: None,
            high: None,
        }
    }

    /// At most [`NUM_BINS`] bins of consecutive numbers, with mean, least and largest number of each. Numbers that are
    /// not finite are left out.
    pub(crate) fn binned(steps: &[f32], values: &[f32]) -> Self {
        if values.len() <= NUM_BINS {
            return Self::whole(steps, values);
        }
        let size = values.len().div_ceil(NUM_BINS);
        let bins: Vec<(f32, Bin)> = steps
            .chunks(size)
            .zip(values.chunks(size))
            .map(|(steps, values)| (steps[steps.len() / 2], Bin::of(values)))
            .collect();
        let column = |part: fn(&Bin) -> f32| Packed::new(bins.iter().map(|(_, bin)| part(bin)));
        Self {
            step: Packed::new(bins.iter().map(|(step, _)| *step)),
            mean: column(|bin| bin.mean),
            low: Some(column(|bin| bin.low)),
            high: Some(column(|bin| bin.high)),
        }
    }
}

/// Statistics of consecutive numbers; all NaN if none is finite.
#[derive(Debug, PartialEq)]
struct Bin {
    mean: f32,
    low: f32,
    high: f32,
}

impl Bin {
    /// The mean, least and greatest of the finite values.
    fn of(values: &[f32]) -> Self {
        let finite = || values.iter().copied().filter(|value| value.is_finite());
        let sum: f64 = finite().map(f64::from).sum();
        Self {
            mean: (sum / finite().count() as f64) as f32,
            low: finite().fold(f32::NAN, f32::min),
            high: finite().fold(f32::NAN, f32::max),
        }
    }
}

/// Tokens, seconds and FLOPs used up to some of the steps, at most [`NUM_BINS`] + 1. The page interpolates between
/// them.
#[derive(Debug, Serialize)]
pub(crate) struct Knots {
    step: Packed,
    tokens: Packed,
    seconds: Packed,
    flops: Packed,
}

impl Knots {
    /// Keeps every n-th step and the last of the sums `[tokens, seconds, FLOPs]`, which all logged steps have.
    pub(crate) fn new(steps: &[f32], sums: &[[f64; 3]]) -> Self {
        let stride = steps.len().div_ceil(NUM_BINS).max(1);
        let last = steps.len().saturating_sub(1);
        let kept: Vec<usize> = (0..last).step_by(stride).chain([last]).collect();
        let column = |which: usize| Packed::new(kept.iter().map(|&idx| sums[idx][which] as f32));
        Self {
            step: Packed::new(kept.iter().map(|&idx| steps[idx])),
            tokens: column(0),
            seconds: column(1),
            flops: column(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unpacked(packed: &Packed) -> Vec<f32> {
        let bytes = STANDARD.decode(&packed.0).unwrap();
        bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
    }

    #[test]
    fn a_bin_leaves_out_what_is_not_finite() {
        let bin = Bin::of(&[1.0, f32::NAN, 4.0, f32::INFINITY]);
        assert_eq!(bin, Bin { mean: 2.5, low: 1.0, high: 4.0 });
        assert!(Bin::of(&[f32::NAN]).mean.is_nan());
        assert!(Bin::of(&[f32::NAN]).low.is_nan());
    }

    #[test]
    fn a_short_column_is_kept_whole_and_a_long_one_keeps_its_extremes() {
        let steps: Vec<f32> = (0..100_000).map(|step| step as f32).collect();
        let mut values = vec![1.0; steps.len()];
        values[54_321] = 9.0;
        values[77] = -9.0;
        let series = Series::binned(&steps, &values);
        let high = unpacked(series.high.as_ref().unwrap());
        let low = unpacked(series.low.as_ref().unwrap());
        assert!(high.len() <= NUM_BINS);
        assert_eq!(high.iter().copied().fold(0.0, f32::max), 9.0);
        assert_eq!(low.iter().copied().fold(0.0, f32::min), -9.0);
        let mean = unpacked(&series.mean);
        let total: f32 = mean.iter().sum::<f32>() / mean.len() as f32;
        assert!((total - 1.0).abs() < 1e-3, "{total}");

        let short = Series::binned(&steps[..10], &values[..10]);
        assert!(short.high.is_none());
        assert_eq!(unpacked(&short.step), &steps[..10]);
    }

    #[test]
    fn knots_hold_the_first_and_the_last_step() {
        let steps: Vec<f32> = (1..=10_001).map(|step| step as f32).collect();
        let sums: Vec<[f64; 3]> = steps.iter().map(|&step| [f64::from(step) * 8.0; 3]).collect();
        let knots = Knots::new(&steps, &sums);
        let kept = unpacked(&knots.step);
        assert_eq!((kept[0], *kept.last().unwrap()), (1.0, 10_001.0));
        assert!(kept.len() <= NUM_BINS + 1);
        assert_eq!(*unpacked(&knots.tokens).last().unwrap(), 80_008.0);
    }
}
