//! The keys that a query sees beyond its window, by position alone.

use std::ops::Range;

/// The keys that a query sees beyond its window: the first tokens of its document, and a band of distances that each KV
/// head has for itself.
///
/// The bands lie side by side and have equal widths, to a token. A distance is the number of tokens from a key to the
/// query, 0 for the query's own key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FarKeys {
    /// Number of first tokens of the document that every later query sees.
    pub sink_tokens: usize,
    /// The first distance of the first band, and the distance at which the last band ends.
    pub distances: [usize; 2],
    /// Number of bands, at least 1. KV head h has band h; where there are fewer bands than heads, they begin again.
    pub num_bands: usize,
    /// The band of a call's first KV head: 0, unless the call has only some of the layer's heads.
    pub first_band: usize,
}

impl FarKeys {
    /// The distances that a KV head of the call sees.
    pub fn band(&self, kv_head: usize) -> Range<usize> {
        let [first, end] = self.distances;
        let band = (self.first_band + kv_head) % self.num_bands;
        let border =
            |at: usize| first + (end.saturating_sub(first) as u128 * at as u128 / self.num_bands as u128) as usize;
        border(band)..border(band + 1)
    }

    /// The keys that a KV head's query sees where its own key is the last of `len`, by rising position: the first ones,
    /// the band and the last `window`. A key that two of them hold is in the later one alone.
    pub fn ranges(&self, kv_head: usize, window: usize, len: usize) -> [Range<usize>; 3] {
        let (band, near) = (self.band(kv_head), len - window.min(len));
        let first = self.sink_tokens.min(near);
        let low = len.saturating_sub(band.end).max(first);
        [0..first, low..len.saturating_sub(band.start).min(near).max(low), near..len]
    }

    /// The most keys that a query of any head sees, the last `window` included.
    pub fn most_keys(&self, window: usize) -> usize {
        let [first, end] = self.distances;
        let widest = end.saturating_sub(first).div_ceil(self.num_bands);
        self.sink_tokens.saturating_add(window).saturating_add(widest)
    }

    /// The same for a call whose first KV head is this call's head `kv_head`.
    #[must_use]
    pub fn of_heads_from(self, kv_head: usize) -> Self {
        Self { first_band: (self.first_band + kv_head) % self.num_bands, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::FarKeys;

    #[test]
    fn bands_lie_side_by_side_and_parts_of_the_heads_have_their_own() {
        let far = FarKeys { sink_tokens: 4, distances: [10, 33], num_bands: 3, first_band: 0 };
        assert_eq!([0, 1, 2, 3].map(|head| far.band(head)), [10..17, 17..25, 25..33, 10..17]);
        assert_eq!([0, 1].map(|head| far.of_heads_from(2).band(head)), [25..33, 10..17]);
        assert_eq!(far.most_keys(10), 4 + 10 + 8);
        for num_bands in 1..40 {
            let far = FarKeys { num_bands, ..far };
            let widest = (0..num_bands).map(|head| far.band(head).len()).max();
            assert_eq!(Some(far.most_keys(0) - 4), widest, "{num_bands} bands");
        }
        let many = FarKeys { distances: [10, usize::MAX], num_bands: usize::MAX, ..far };
        assert_eq!((many.most_keys(0), many.band(usize::MAX - 1).end), (5, usize::MAX), "in no time");
        let none = FarKeys { distances: [10, 10], ..far };
        assert!((0..3).all(|head| none.band(head).is_empty()));
    }
    #[test]
    fn the_ranges_of_a_query_hold_every_key_that_it_sees_once() {
        for distances in [[10, 33], [4, 20], [13, 13]] {
            let far = FarKeys { sink_tokens: 4, distances, num_bands: 3, first_band: 1 };
            for (head, window, len) in [(0, 10, 1), (1, 10, 12), (2, 1, 30), (0, 7, 60), (1, 100, 60)] {
                let seen = |key: usize| {
                    let distance = len - 1 - key;
                    distance < window || key < 4 || far.band(head).contains(&distance)
                };
                let expected: Vec<usize> = (0..len).filter(|&key| seen(key)).collect();
                let got: Vec<usize> = far.ranges(head, window, len).into_iter().flatten().collect();
                assert_eq!(got, expected, "{distances:?} head {head}, window {window} of {len}");
            }
        }
    }
}
