//! Random draws that depend only on a few numbers, and are the same on every machine.

use crate::permutation::mix;

/// SplitMix64 (Steele, Lea and Flood, 2014), seeded with a hash of some numbers.
pub(crate) struct Draws {
    state: u64,
}

const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

impl Draws {
    /// Draws that depend on these numbers alone.
    pub(crate) fn new(numbers: [u64; 4]) -> Self {
        let state = numbers.iter().fold(0, |state, &number| mix(mix(state ^ number).wrapping_add(GOLDEN_GAMMA)));
        Self { state }
    }

    /// The next 64 random bits.
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

    /// Uniform in `0..limit` without some forbidden numbers. `allowed_before` has, for each forbidden number in
    /// ascending order, how many allowed numbers are below it.
    pub(super) fn below_without(&mut self, limit: u64, allowed_before: &[u64]) -> u64 {
        let rank = self.below(limit - allowed_before.len() as u64);
        rank + allowed_before.partition_point(|&allowed| allowed <= rank) as u64
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

    /// Draws `count` different slots one after another, with the probability of a slot in proportion to its weight;
    /// `inverse_weights` are `1 / weight`.
    ///
    /// Each slot gets an exponentially distributed time with its weight as rate. The slots in the order of their times
    /// are a weighted draw without replacement (Efraimidis and Spirakis, 2006).
    pub(super) fn weighted_slots(&mut self, inverse_weights: &[f64], count: usize) -> Vec<usize> {
        let time = |(slot, inverse_weight): (usize, &f64)| {
            // Uniform in (0, 1], because the logarithm of 0 is not finite.
            let uniform = ((self.word() >> 11) + 1) as f64 * 2f64.powi(-53);
            (-inverse_weight * uniform.ln(), slot)
        };
        let mut times = inverse_weights.iter().enumerate().map(time).collect::<Vec<_>>();
        let earlier = |a: &(f64, usize), b: &(f64, usize)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        if count < times.len() {
            times.select_nth_unstable_by(count, earlier);
            times.truncate(count);
        }
        times.sort_unstable_by(earlier);
        times.into_iter().map(|(_, slot)| slot).collect()
    }
}
