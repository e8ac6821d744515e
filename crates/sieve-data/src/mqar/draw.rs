//! Random draws that depend on a few numbers alone, the same on every machine.

use crate::permutation::mix;

/// SplitMix64 (Steele, Lea and Flood, 2014), begun from a hash of some numbers.
pub(crate) struct Draws {
    state: u64,
}

const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

impl Draws {
    pub(crate) fn new(numbers: [u64; 4]) -> Self {
        let state = numbers
            .iter()
            .fold(0, |state, &number| mix(mix(state ^ number).wrapping_add(GOLDEN_GAMMA)));
        Self { state }
    }

    pub(crate) fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        mix(self.state)
    }

    /// Uniform in `0..limit`, without the bias of a remainder (Lemire, 2019).
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        let threshold = limit.wrapping_neg() % limit;
        loop {
            let product = u128::from(self.word()) * u128::from(limit);
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
        }
    }

    /// Uniform in `0..limit` without the numbers of `forbidden`, which is sorted.
    pub(super) fn below_without(&mut self, limit: u64, forbidden: &[u64]) -> u64 {
        let rank = self.below(limit - forbidden.len() as u64);
        // Every forbidden number at or below the result pushes it up by one.
        let (mut low, mut high) = (0, forbidden.len());
        while low < high {
            let middle = low.midpoint(high);
            match forbidden[middle] - middle as u64 <= rank {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        rank + low as u64
    }

    /// `count` different numbers of `0..limit`, in random order.
    pub(super) fn different(&mut self, limit: u64, count: usize) -> Vec<u64> {
        let mut numbers = (0..limit).collect::<Vec<_>>();
        for place in 0..count {
            let other = place + self.below(limit - place as u64) as usize;
            numbers.swap(place, other);
        }
        numbers.truncate(count);
        numbers
    }

    /// `count` different slots, drawn one after another with the weights given inverted.
    ///
    /// Each slot gets an exponential waiting time with its weight as rate; the order in which they ring is a draw
    /// without replacement (the race of Efraimidis and Spirakis, 2006).
    pub(super) fn weighted_slots(&mut self, inverse_weights: &[f64], count: usize) -> Vec<usize> {
        let mut times = inverse_weights
            .iter()
            .enumerate()
            // In (0, 1]: the logarithm of 0 is not finite.
            .map(|(slot, inverse)| {
                (
                    -inverse * (((self.word() >> 11) + 1) as f64 * 2f64.powi(-53)).ln(),
                    slot,
                )
            })
            .collect::<Vec<_>>();
        if count < times.len() {
            times.select_nth_unstable_by(count, |a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            times.truncate(count);
        }
        times.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        times.into_iter().map(|(_, slot)| slot).collect()
    }
}
