//! Generates queries, keys and values whose attention looks like a trained model's. Queries attend to the first tokens
//! (sinks), to single keys that many queries share (vertical lines), to neighbours (local mass) and to keys at fixed
//! distances (diagonals); noise of single tokens and of regions is added. Each query head has a weight for each of
//! these parts, in units of logits.
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, TensorData};
use sieve_testing::Random;
use std::f64::consts::{FRAC_PI_2, PI};

/// What queries look for, in the order of [`Weights`].
pub(super) const PARTS: [&str; 5] = ["sinks", "lines", "local", "diagonals", "regions"];

/// For one query head: each of the [`PARTS`]' share of a logit; for regions, the standard deviation of that share.
pub(super) type Weights = [f32; PARTS.len()];

/// Columns of each head.
pub(super) const HEAD_DIM: usize = 128;

/// Frequencies of a position code (cosines and sines of the position); keys have two codes, for local mass and for
/// diagonals.
const FREQUENCIES: usize = 24;
/// Distance in tokens at which the logit of local mass has fallen to 1 / e.
const LOCAL_RANGE: f64 = 64.0;
/// Diagonals with high scores in each KV head.
const DIAGONALS: usize = 2;
/// Between which distances diagonals lie, in tokens.
const DISTANCES: std::ops::Range<f64> = 128.0..8192.0;
/// First tokens that act as attention sinks.
const SINKS: usize = 4;
/// One key in this many is a vertical line: many queries attend to it.
const LINE_EVERY: usize = 512;
/// Tokens of a region: no multiple of a tile.
const REGION: usize = 160;
const REGION_WIDTH: usize = 14;
const NOISE_WIDTH: usize = 16;
/// Standard deviation that the noise of single tokens adds to a logit.
const NOISE: f32 = 1.0;

/// A position code's angle is the sum of a part that this many tokens share and a part within them ([`position_code`]).
/// Lengths of generated texts are multiples of it.
pub(super) const STEP: usize = 1024;

/// Generated keys and values, and queries to which no head's weights were applied yet.
pub(super) struct Generated<B: Backend> {
    /// Queries, `[num_heads, seq_len, HEAD_DIM]`.
    queries: Tensor<B, 3>,
    /// Keys, `[num_kv_heads, seq_len, HEAD_DIM]`.
    pub(super) keys: Tensor<B, 3>,
    pub(super) values: Tensor<B, 3>,
}

impl<B: Backend> Generated<B> {
    /// Draws a text of `seq_len` tokens, a multiple of [`STEP`]; `heads` are query and KV heads. The same sizes and
    /// backend seed give the same numbers.
    pub(super) fn draw(seq_len: usize, heads: [usize; 2], device: &B::Device) -> Self {
        let [num_heads, num_kv_heads] = heads;
        let mut random = Random(11);
        let mut frequencies = |quantile: fn(f64) -> f64| -> Vec<f64> {
            let count = num_kv_heads * FREQUENCIES;
            (0..count).map(|_| quantile(random.unit())).collect()
        };
        // The product of two position codes is the mean of cos(frequency * distance). With Cauchy-distributed
        // frequencies that mean falls as exp(-distance / LOCAL_RANGE); with uniform ones it is near 0 from distance 1
        // on.
        let local_frequencies = frequencies(|unit| ((0.98 * unit * FRAC_PI_2).tan() / LOCAL_RANGE).min(3.0));
        let uniform_frequencies = frequencies(|unit| unit * PI);
        let distances: Vec<f64> = (0..num_kv_heads * DIAGONALS)
            .map(|_| DISTANCES.start * (DISTANCES.end / DISTANCES.start).powf(random.unit()))
            .map(f64::round)
            .collect();
        let no_shift = vec![0.0; num_kv_heads];
        let local = position_code::<B>(seq_len, &local_frequencies, &no_shift, device);
        let own_position = position_code::<B>(seq_len, &uniform_frequencies, &no_shift, device);
        // A query looks for the positions that are its head's distances before it.
        let earlier_positions = (0..DIAGONALS).map(|diagonal| {
            let shifts: Vec<f64> = distances.iter().skip(diagonal).step_by(DIAGONALS).copied().collect();
            position_code::<B>(seq_len, &uniform_frequencies, &shifts, device)
        });
        let earlier_positions = earlier_positions.reduce(|sum, code| sum + code).expect("a diagonal");

        let normal = |shape: [usize; 3]| Tensor::<B, 3>::random(shape, Distribution::Normal(0.0, 1.0), device);
        // All tokens of a region share a random vector.
        let regions = |heads: usize| {
            let count = seq_len.div_ceil(REGION);
            let x = normal([heads, count, REGION_WIDTH]).reshape([heads, count, 1, REGION_WIDTH]);
            let x = x.expand([heads, count, REGION, REGION_WIDTH]);
            x.reshape([heads, count * REGION, REGION_WIDTH]).narrow(1, 0, seq_len)
        };
        // Two columns: whether a key is a sink, and whether it is a vertical line.
        let marks: Vec<f32> = (0..num_kv_heads * seq_len)
            .flat_map(|at| {
                let is_line = random.below(LINE_EVERY) == 0;
                [at % seq_len < SINKS, is_line].map(|is_marked| f32::from(u8::from(is_marked)))
            })
            .collect();
        let marks = TensorData::new(marks, [num_kv_heads, seq_len, 2]);
        let marks = Tensor::<B, 3>::from_data(marks, device);
        let per_head = |x: Tensor<B, 3>| {
            let [heads, rows, width] = x.dims();
            let x = x.reshape([heads, 1, rows, width]);
            let x = x.expand([heads, num_heads / num_kv_heads, rows, width]);
            x.reshape([num_heads, rows, width])
        };
        let keys = vec![
            local.clone(),
            own_position,
            marks,
            regions(num_kv_heads),
            normal([num_kv_heads, seq_len, NOISE_WIDTH]),
        ];
        let queries = vec![
            per_head(local),
            per_head(earlier_positions),
            Tensor::ones([num_heads, seq_len, 2], device),
            regions(num_heads),
            normal([num_heads, seq_len, NOISE_WIDTH]),
        ];
        Self {
            queries: Tensor::cat(queries, 2),
            keys: Tensor::cat(keys, 2),
            values: normal([num_kv_heads, seq_len, HEAD_DIM]),
        }
    }

    /// Queries scaled by the weights of their heads. With fewer heads than weights, the heads take every second weight,
    /// every fourth and so on.
    pub(super) fn queries(&self, weights: &[Weights]) -> Tensor<B, 3> {
        let num_heads = self.queries.dims()[0];
        let head_scales = |head: usize| column_scales(&weights[head * weights.len() / num_heads]);
        let scales: Vec<f32> = (0..num_heads).flat_map(head_scales).collect();
        let scales = TensorData::new(scales, [num_heads, 1, HEAD_DIM]);
        self.queries.clone() * Tensor::from_data(scales, &self.queries.device())
    }
}

/// The factor of each column of a head's queries. It includes the root of the head width, since attention divides
/// logits by this root.
fn column_scales([sinks, lines, local, diagonals, regions]: &Weights) -> Vec<f32> {
    let root = (HEAD_DIM as f32).sqrt();
    let count = FREQUENCIES as f32;
    let columns = [
        (local / count, 2 * FREQUENCIES),
        (diagonals / count, 2 * FREQUENCIES),
        (*sinks, 1),
        (*lines, 1),
        (regions / (REGION_WIDTH as f32).sqrt(), REGION_WIDTH),
        (NOISE / (NOISE_WIDTH as f32).sqrt(), NOISE_WIDTH),
    ];
    let repeated = |&(scale, width): &(f32, usize)| vec![root * scale; width];
    columns.iter().flat_map(repeated).collect()
}

/// Cosine and sine of `frequency * (position - shift)`, `[kv_heads, seq_len, 2 * FREQUENCIES]`. An f32 angle would be
/// wrong far from the start. So the host computes cosines and sines in f64 for multiples of [`STEP`] and for the
/// positions within a step, and the device adds the angles by the addition theorems.
fn position_code<B: Backend>(seq_len: usize, frequencies: &[f64], shifts: &[f64], device: &B::Device) -> Tensor<B, 3> {
    let heads = shifts.len();
    let table = |count: usize, stride: usize, shifts: &[f64], function: fn(f64) -> f64| {
        let mut values = Vec::with_capacity(heads * count * FREQUENCIES);
        for (head, frequencies) in frequencies.chunks_exact(FREQUENCIES).enumerate() {
            for at in 0..count {
                let position = (at * stride) as f64 - shifts[head];
                values.extend(frequencies.iter().map(|frequency| function(frequency * position) as f32));
            }
        }
        Tensor::<B, 3>::from_data(TensorData::new(values, [heads, count, FREQUENCIES]), device)
    };
    let steps = seq_len / STEP;
    let no_shift = vec![0.0; heads];
    let of_steps = |function| table(steps, STEP, &no_shift, function).reshape([heads, steps, 1, FREQUENCIES]);
    let within_step = |function| table(STEP, 1, shifts, function).reshape([heads, 1, STEP, FREQUENCIES]);
    let (cos, sin) = (of_steps(f64::cos), of_steps(f64::sin));
    let (small_cos, small_sin) = (within_step(f64::cos), within_step(f64::sin));
    let joined = |x: Tensor<B, 4>| x.reshape([heads, seq_len, FREQUENCIES]);
    Tensor::cat(
        vec![
            joined(cos.clone() * small_cos.clone() - sin.clone() * small_sin.clone()),
            joined(sin * small_cos + cos * small_sin),
        ],
        2,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::{Flex, FlexDevice};

    /// Logits of each query and key, `[seq_len, seq_len]`, of the first head.
    fn logits(weights: Weights, seq_len: usize) -> Vec<f32> {
        let drawn = Generated::<Flex>::draw(seq_len, [2, 1], &FlexDevice);
        let q = drawn.queries(&[weights, weights]).narrow(0, 0, 1);
        let logits = q.matmul(drawn.keys.swap_dims(1, 2)) / (HEAD_DIM as f32).sqrt();
        logits.into_data().to_vec().expect("f32")
    }

    fn mean(values: impl Iterator<Item = f32>) -> f32 {
        let values: Vec<f32> = values.collect();
        values.iter().sum::<f32>() / values.len() as f32
    }

    #[test]
    fn each_part_adds_its_weight_to_its_keys() {
        let n = 2 * STEP;
        let at = |logits: &[f32], i: usize, j: usize| logits[i * n + j];
        let none = logits([0.0; 5], n);
        assert!((0.9..1.1).contains(&mean(none.iter().map(|x| x * x)).sqrt()));
        let sinks = logits([5.0, 0.0, 0.0, 0.0, 0.0], n);
        let of_sinks = mean((0..n).map(|i| at(&sinks, i, 2)));
        assert!((4.8..5.2).contains(&of_sinks), "{of_sinks}");
        let local = logits([0.0, 0.0, 5.0, 0.0, 0.0], n);
        let own = mean((0..n).map(|i| at(&local, i, i)));
        let near = mean((64..n).map(|i| at(&local, i, i - 64)));
        let far = mean((n / 2..n).map(|i| at(&local, i, i - n / 2)));
        assert!((4.8..5.2).contains(&own), "{own}");
        assert!(near > 0.5 && near < 3.5 && far.abs() < 1.5, "{near} {far}");
        // Lines are whole columns, one in some hundred keys.
        let lines = logits([0.0, 20.0, 0.0, 0.0, 0.0], n);
        let columns = (0..n).filter(|&j| mean((0..n).map(|i| at(&lines, i, j))) > 19.0);
        assert!((1..12).contains(&columns.count()));
        // Each diagonal is one distance for all queries.
        let diagonals = logits([0.0, 0.0, 0.0, 20.0, 0.0], n);
        let on = |d: usize| mean((d..n).map(|i| at(&diagonals, i, i - d)));
        let found = (0..n - 64).filter(|&d| on(d) > 14.0).count();
        assert!(found <= DIAGONALS, "{found}");
    }

    #[test]
    fn position_codes_are_exact_far_from_the_start() {
        let n = 64 * STEP;
        let frequencies = vec![2.9; FREQUENCIES];
        let code = position_code::<Flex>(n, &frequencies, &[7.0], &FlexDevice);
        let last: Vec<f32> = code.narrow(1, n - 1, 1).into_data().to_vec().expect("f32");
        let angle = 2.9 * (n - 8) as f64;
        assert!((f64::from(last[0]) - angle.cos()).abs() < 1e-5);
        assert!((f64::from(last[FREQUENCIES]) - angle.sin()).abs() < 1e-5);
    }
}
