//! A seeded permutation of `0..n` that stores nothing: a Feistel network with cycle walking.

/// A permutation of `0..len` that is determined by `(len, seed, epoch)`. Each element is computed by itself, in
/// constant expected time.
///
/// A balanced Feistel network permutes `0..4^k`, with the smallest `4^k >= len`. A value outside `0..len` is permuted
/// again until it falls inside (cycle walking; Black and Rogaway, 2002), fewer than four times on average.
#[derive(Debug, Clone)]
pub(crate) struct Permutation {
    len: u64,
    half_bits: u32,
    round_keys: [u64; NUM_ROUNDS],
}

/// Four rounds are enough for large domains; small ones need more.
const NUM_ROUNDS: usize = 8;

impl Permutation {
    /// The permutation of `0..len` for this seed and epoch.
    pub(crate) fn new(len: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        let mut state = mix(seed ^ mix(epoch ^ mix(len)));
        // The numbers of SplitMix64: its increment, then its finalizer.
        let round_keys = std::array::from_fn(|_| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            mix(state)
        });
        Self { len, half_bits: bits.div_ceil(2).max(1), round_keys }
    }

    /// The image of `index`.
    ///
    /// # Panics
    /// When `index >= len`.
    pub(crate) fn get(&self, index: u64) -> u64 {
        assert!(index < self.len, "index {index} is outside a permutation of {}", self.len);
        let mut value = self.encrypt(index);
        while value >= self.len {
            value = self.encrypt(value);
        }
        value
    }

    /// One pass through all rounds of the Feistel network.
    fn encrypt(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.round_keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        (left << self.half_bits) | right
    }
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
pub(crate) fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn assert_bijection(len: u64, seed: u64, epoch: u64) {
        let permutation = Permutation::new(len, seed, epoch);
        let mut seen = vec![false; len as usize];
        for index in 0..len {
            let value = permutation.get(index) as usize;
            assert!(!std::mem::replace(&mut seen[value], true), "{value} comes twice at len {len}, seed {seed}");
        }
    }

    #[test]
    fn every_small_length_is_permuted() {
        for len in 1..=300 {
            for seed in 0..4 {
                assert_bijection(len, seed, seed * 7);
            }
        }
    }

    #[test]
    fn permutations_of_the_largest_lengths_stay_inside() {
        for len in [u64::from(u32::MAX), u64::MAX / 2, u64::MAX] {
            let permutation = Permutation::new(len, 5, 0);
            for index in [0, 1, len / 2, len - 1] {
                assert!(permutation.get(index) < len);
            }
        }
    }

    /// Each of 5 elements should come first in about a fifth of the epochs.
    #[test]
    fn every_element_comes_first_equally_often() {
        let mut counts = [0u32; 5];
        for epoch in 0..10_000 {
            counts[Permutation::new(5, 11, epoch).get(0) as usize] += 1;
        }
        for count in counts {
            assert!((1_800..2_200).contains(&count), "{counts:?}");
        }
    }

    /// 3 elements have 6 orders, and each order should occur.
    #[test]
    fn every_order_of_three_elements_occurs_equally_often() {
        let mut orders = std::collections::HashMap::new();
        for epoch in 0..6_000 {
            let permutation = Permutation::new(3, 2, epoch);
            *orders.entry([permutation.get(0), permutation.get(1), permutation.get(2)]).or_insert(0u32) += 1;
        }
        assert_eq!(orders.len(), 6);
        assert!(orders.values().all(|&count| (850..1_150).contains(&count)), "{orders:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn any_length_and_seed_is_a_bijection(len in 1u64..5_000, seed: u64, epoch: u64) {
            assert_bijection(len, seed, epoch);
        }

        #[test]
        fn seeds_and_epochs_give_other_orders(len in 50u64..5_000, seed: u64, epoch in 0u64..1_000) {
            let order = |seed, epoch| {
                let permutation = Permutation::new(len, seed, epoch);
                (0..len).map(move |index| permutation.get(index)).collect::<Vec<_>>()
            };
            prop_assert_eq!(order(seed, epoch), order(seed, epoch));
            prop_assert_ne!(order(seed, epoch), order(seed, epoch + 1));
            prop_assert_ne!(order(seed, epoch), order(seed ^ 1, epoch));
        }
    }
}
