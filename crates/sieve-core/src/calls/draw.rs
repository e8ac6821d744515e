//! How one token is drawn from its logits, as every device is told.

/// One draw of a token: temperature, top-k, min-p (arXiv:2407.01082), nucleus (arXiv:1904.09751) and a random number.
///
/// A token's weight is `2^44 exp2((logit - largest) * scale)`, rounded down to a whole number, so that sums of weights
/// do not depend on their order. Tokens are sorted by falling logit, and by id where logits are equal. The first
/// `top_k` tokens stay, if their weight is `least_weight` or more; of these, as few from the front as reach `top_p` of
/// their weight. The drawn token is the first whose prefix sum exceeds `random / 2^64` of the weight that stays.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// `log2(e) / temperature`.
    pub scale: f32,
    /// Draw only from this number of likeliest tokens; 0 draws from all.
    pub top_k: u32,
    /// The share of the weight that the likeliest tokens must reach, in units of `2^-64`; [`Draw::WHOLE`] is 1.
    pub top_p: u64,
    /// The weight that a token needs, up to [`Draw::LARGEST_WEIGHT`], the likeliest token's; 0 draws from all.
    pub least_weight: u64,
    /// A uniform random number, in units of `2^-64`.
    pub random: u64,
}

impl Draw {
    /// The `top_p` with which all tokens stay.
    pub const WHOLE: u64 = u64::MAX;
    /// Words of a draw as kernels read it.
    pub const WORDS: usize = 8;
    /// The weight of the likeliest token.
    pub const LARGEST_WEIGHT: u64 = 1 << 44;
    /// The token of the largest logit; of equal ones the first.
    pub const LIKELIEST: Self =
        Self { scale: Self::MOST_SCALE, top_k: 1, top_p: Self::WHOLE, least_weight: 0, random: 0 };
    /// A larger scale would make 0 times it a NaN; below it every other logit has a weight of 0 already.
    const MOST_SCALE: f32 = 1e30;

    /// A draw at a temperature of 0 or more, where 0 takes the likeliest token; `top_p` is in `(0, 1]`.
    pub fn new(temperature: f64, top_k: Option<usize>, top_p: f64, random: u64) -> Self {
        if temperature == 0.0 {
            return Self::LIKELIEST;
        }
        let scale = (std::f64::consts::LOG2_E / temperature).min(f64::from(Self::MOST_SCALE));
        let top_k = top_k.map_or(0, |top_k| u32::try_from(top_k).unwrap_or(0));
        let share = if top_p < 1.0 { (top_p * 2f64.powi(64)) as u64 } else { Self::WHOLE };
        Self { scale: scale as f32, top_k, top_p: share, least_weight: 0, random }
    }

    /// The same draw among the tokens whose probability is at least `min_p` of the likeliest one's, from 0 (all) to 1.
    #[must_use]
    pub fn above(self, min_p: f64) -> Self {
        Self { least_weight: (min_p * Self::LARGEST_WEIGHT as f64) as u64, ..self }
    }

    /// The draw as kernels read it.
    pub fn words(&self) -> [i32; Self::WORDS] {
        let halves = |x: u64| [x as u32 as i32, (x >> 32) as u32 as i32];
        let [[p0, p1], [w0, w1], [r0, r1]] = [self.top_p, self.least_weight, self.random].map(halves);
        [self.scale.to_bits() as i32, self.top_k as i32, p0, p1, w0, w1, r0, r1]
    }

    /// The draw of [`words`](Self::words).
    pub fn of_words(words: [i32; Self::WORDS]) -> Self {
        let [scale, top_k, p0, p1, w0, w1, r0, r1] = words.map(|word| word as u32);
        let joined = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        Self {
            scale: f32::from_bits(scale),
            top_k,
            top_p: joined(p0, p1),
            least_weight: joined(w0, w1),
            random: joined(r0, r1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_comes_back_from_its_words() {
        for draw in [
            Draw::LIKELIEST,
            Draw::new(0.8, Some(40), 0.95, 0x0123_4567_89ab_cdef),
            Draw::new(1e-40, None, 1.0, u64::MAX),
            Draw::new(1.0, None, 0.5, 7).above(0.05),
        ] {
            assert_eq!(Draw::of_words(draw.words()), draw);
            assert!(draw.scale.is_finite());
        }
    }
}
