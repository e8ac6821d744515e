//! One token drawn from logits, as [`Draw`] says.
//!
//! `kernels/draw.cu` computes the same whole numbers: equal logits and draws give the same token on every device.
use crate::first_of_largest;
use rayon::prelude::*;
use sieve_core::Draw;
use std::f32::consts::LN_2;

/// Coefficients of 2^f for f from -0.5 to 0.5, from the highest power on: ln(2)^n / n!.
const EXP2: [f32; 7] = [1.540_353e-4, 1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, LN_2, 1.0];
/// Adding and subtracting it rounds a number of less than 2^22 to a whole one.
const ROUND: f32 = 12_582_912.0;
/// The weight of the largest logit, 2^44.
const ONE: f32 = Draw::LARGEST_WEIGHT as f32;

/// `2^44 exp2((logit - largest) * scale)`, rounded down. Each product and sum is rounded by itself, as the kernel does.
fn weight(logit: f32, largest: f32, scale: f32) -> u64 {
    let y = ((logit - largest) * scale).max(-63.0);
    let whole = (y + ROUND) - ROUND;
    let f = y - whole;
    let p = EXP2[1..].iter().fold(EXP2[0], |p, c| p * f + c);
    ((p * ONE) as u64) >> (-whole) as u32
}

/// The upper half of a product.
fn upper(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

/// Draws a token from its logits; `None` if a logit is NaN or infinite.
///
/// Panics on an empty slice.
pub fn draw(logits: &[f32], draw: &Draw) -> Option<u32> {
    let likeliest = first_of_largest(logits)?;
    if *draw == Draw::LIKELIEST {
        return Some(likeliest);
    }
    let largest = logits[likeliest as usize];
    let weights: Vec<u64> = logits.iter().map(|&logit| weight(logit, largest, draw.scale)).collect();
    let all = || (0..).zip(logits).map(|(token, &logit)| place(token, logit));
    let top_k = draw.top_k as usize;
    let (mut places, most): (Vec<u64>, u64) = if (1..logits.len()).contains(&top_k) {
        let mut places: Vec<u64> = all().collect();
        places.select_nth_unstable(top_k);
        places.truncate(top_k);
        let total = places.iter().map(|place| weights[token(*place) as usize]).sum();
        (places, total)
    } else {
        (Vec::new(), u64::MAX)
    };
    // Tokens of at least this weight come first in the order, as the `top_k` likeliest do.
    let total = most.min(weights.iter().filter(|weight| **weight >= draw.least_weight).sum());
    let mut kept = total;
    let target = |kept| upper(draw.random, kept) + 1;
    let first = match draw.top_p {
        Draw::WHOLE => target(total),
        top_p => upper(top_p, total).max(1),
    };
    if places.is_empty() {
        // All tokens of less weight than this together are less than what may be missing, so the others reach `first`.
        let least = ((total - first) / weights.len() as u64).max(1);
        places = all().zip(&weights).filter(|(_, weight)| **weight >= least).map(|(place, _)| place).collect();
    }
    if draw.top_p != Draw::WHOLE {
        let (last, sum) = first_to_reach(&mut places, &weights, first);
        places.truncate(last + 1);
        kept = sum;
    }
    let (drawn, _) = first_to_reach(&mut places, &weights, target(kept));
    Some(token(places[drawn]))
}

/// Draws a token of each row of `width` logits, among its first `num_tokens`; rows are divided among threads, and no
/// draw depends on which one makes it.
///
/// Panics where there is not one draw for each row.
pub fn draw_rows(logits: &[f32], width: usize, num_tokens: usize, draws: &[Draw]) -> Vec<Option<u32>> {
    assert_eq!(logits.len(), width * draws.len(), "one draw for each row");
    let rows = logits.par_chunks(width).zip(draws);
    rows.map(|(row, one)| draw(&row[..num_tokens], one)).collect()
}

/// A token's place among all: the larger its logit, the smaller; of equal logits the lower token has the smaller one.
/// -0 is as large as +0.
fn place(token: u32, logit: f32) -> u64 {
    let bits = (logit + 0.0).to_bits();
    let rising = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!rising) << 32 | u64::from(token)
}

/// The token of a place.
fn token(place: u64) -> u32 {
    place as u32
}

/// Puts first what the smallest places have until their tokens' weights reach `wanted`; returns the last one's index,
/// and the sum up to it. Halves what is looked at until it is short, and sorts only that.
fn first_to_reach(places: &mut [u64], weights: &[u64], wanted: u64) -> (usize, u64) {
    const SHORT: usize = 64;
    let of = |place: &u64| weights[token(*place) as usize];
    let (mut low, mut high, mut sum) = (0, places.len(), 0);
    while high - low > SHORT {
        let middle = (high - low) / 2;
        places[low..high].select_nth_unstable(middle);
        let left: u64 = places[low..low + middle].iter().map(of).sum();
        if sum + left >= wanted {
            high = low + middle;
        } else {
            (low, sum) = (low + middle, sum + left);
        }
    }
    places[low..high].sort_unstable();
    for (at, place) in places.iter().enumerate().take(high).skip(low) {
        sum += of(place);
        if sum >= wanted {
            return (at, sum);
        }
    }
    unreachable!("the weights of all tokens reach their sum")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: all tokens sorted, and sums from the first on.
    fn by_definition(logits: &[f32], draw: &Draw) -> u32 {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).expect("finite").then(a.cmp(&b)));
        if draw.top_k > 0 {
            order.truncate(draw.top_k as usize);
        }
        let of = |token: &u32| weight(logits[*token as usize], largest, draw.scale);
        order.retain(|token| of(token) >= draw.least_weight);
        let mut total: u64 = order.iter().map(of).sum();
        if draw.top_p != Draw::WHOLE {
            let wanted = upper(draw.top_p, total).max(1);
            let mut sum = 0;
            for token in &order {
                sum += of(token);
                if sum >= wanted {
                    break;
                }
            }
            total = sum;
        }
        let target = upper(draw.random, total);
        let mut sum = 0;
        *order
            .iter()
            .find(|&token| {
                sum += of(token);
                sum > target
            })
            .expect("the target is below the sum")
    }

    #[test]
    fn draws_are_those_of_the_definition() {
        let mut state = 7u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state ^ (state >> 29)
        };
        for len in [1usize, 2, 31, 1000] {
            for (spread, steps) in [(0.0, 1.0), (0.01, 1e6), (3.0, 8.0), (20.0, 1e6), (200.0, 4.0)] {
                let logit = |x: u64| (((x >> 40) as f64 / 2f64.powi(24) - 0.5) * spread * steps).round() / steps;
                let logits: Vec<f32> = (0..len).map(|_| logit(random()) as f32).collect();
                for temperature in [1e-40, 0.1, 0.8, 1.0, 30.0] {
                    for top_k in [None, Some(1), Some(7), Some(5000)] {
                        for top_p in [1e-18, 0.3, 0.95, 1.0 - 1e-12, 1.0] {
                            for (number, min_p) in [(0, 0.2), (u64::MAX, 0.0), (random(), 0.0), (random(), 1e-3)] {
                                let one = Draw::new(temperature, top_k, top_p, number).above(min_p);
                                let found = draw(&logits, &one).expect("finite");
                                assert_eq!(found, by_definition(&logits, &one), "{len} {spread} {one:?}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn min_p_leaves_tokens_of_a_share_of_the_largest_probability() {
        // Probabilities 0.6, 0.3, 0.09, 0.01: the largest random number draws the last token that is left.
        let logits = [0.6f32, 0.3, 0.09, 0.01].map(f32::ln);
        let left = |temperature, min_p| {
            let last = Draw::new(temperature, None, 1.0, u64::MAX).above(min_p);
            draw(&logits, &last).map(|token| token + 1)
        };
        for (min_p, expected) in [(0.0, 4), (0.01, 4), (0.1, 3), (0.49, 2), (0.51, 1), (1.0, 1)] {
            assert_eq!(left(1.0, min_p), Some(expected), "{min_p}");
        }
        // A higher temperature makes the tokens more alike, and at 0 the likeliest is taken.
        assert_eq!([0.49, 0.35].map(|min_p| left(2.0, min_p)), [Some(2), Some(3)]);
        assert_eq!(left(0.0, 0.49), Some(1));
    }

    #[test]
    fn rows_are_drawn_as_each_alone() {
        let logits: Vec<f32> = (0..5 * 9).map(|at| ((at * 37) % 11) as f32 * 0.3).collect();
        let draws: Vec<Draw> = (0..5).map(|row| Draw::new(1.0, None, 0.9, row * (u64::MAX / 5))).collect();
        let alone = |row: usize| draw(&logits[9 * row..][..7], &draws[row]);
        assert_eq!(draw_rows(&logits, 9, 7, &draws), (0..5).map(alone).collect::<Vec<_>>());
    }

    #[test]
    fn weights_are_those_of_the_exponential() {
        for at in 0..4000 {
            let logit = -f64::from(at) * 0.007;
            let exact = logit.exp() * f64::from(ONE);
            let found = weight(logit as f32, 0.0, std::f32::consts::LOG2_E) as f64;
            // f32 products of up to 40 carry an error of 40 * 2^-24; the rest is rounding down.
            assert!((found - exact).abs() <= exact * 4e-6 + 1.0, "{logit}: {found} {exact}");
        }
        assert_eq!(weight(0.0, 0.0, 1e30), Draw::LARGEST_WEIGHT);
        assert_eq!(weight(-1.0, 0.0, 1e30), 0);
        assert_eq!(weight(f32::MIN, f32::MAX, 1.0), 0);
    }

    #[test]
    fn zeros_of_both_signs_are_equal_and_what_is_not_finite_is_none() {
        let pick = |random| draw(&[-0.0, 0.0, -0.0], &Draw::new(1.0, None, 1.0, random));
        assert_eq!([0, u64::MAX / 2, u64::MAX].map(pick), [Some(0), Some(1), Some(2)]);
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(draw(&[0.0, wrong], &Draw::new(1.0, None, 1.0, 3)), None);
        }
    }
}
