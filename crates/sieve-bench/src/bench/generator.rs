//! Operands with the structure of attention: first tokens that every query looks for (sinks), single keys that many
//! look for (vertical lines), neighbours (local mass), keys at fixed distances (diagonals), and noise, of single
//! tokens and of regions. What each query head looks for is a weight for each of these, in units of logits.
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, TensorData};
use sieve_testing::Random;

/// What queries look for, in the order of [`Weights`].
pub(super) const PARTS: [&str; 5] = ["sinks", "lines", "local", "diagonals", "regions"];

/// The weight of each part for the queries of a head: what it adds to a logit; of regions, a standard deviation.
pub(super) type Weights = [f32; PARTS.len()];

/// Width of the heads.
pub(super) const HEAD_DIM: usize = 128;

/// Frequencies of each of the two codes of a position.
const FREQUENCIES: usize = 24;
/// Distance at which local mass has fallen to 1 / e of its logit.
const LOCAL_RANGE: f64 = 64.0;
/// Diagonals of each KV head, at distances between these.
const DIAGONALS: usize = 2;
const DISTANCES: std::ops::Range<f64> = 128.0..8192.0;
/// First tokens that are sinks.
const SINKS: usize = 4;
/// One key in this many is a vertical line.
const LINE_EVERY: usize = 512;
/// Tokens of a region: no multiple of a tile.
const REGION: usize = 160;
const REGION_WIDTH: usize = 14;
const NOISE_WIDTH: usize = 16;
/// Standard deviation that the noise of single tokens adds to a logit.
const NOISE: f32 = 1.0;

/// Tokens that share a phase's larger part; lengths are multiples of it.
pub(super) const STEP: usize = 1024;

/// Keys and values, and queries before the heads' weights.
pub(super) struct Generated<B: Backend> {
    /// `[num_heads, seq_len, HEAD_DIM]`.
    queries: Tensor<B, 3>,
    /// `[num_kv_heads, seq_len, HEAD_DIM]`.
    pub(super) keys: Tensor<B, 3>,
    pub(super) values: Tensor<B, 3>,
}

impl<B: Backend> Generated<B> {
    /// The same for the same sizes and seed of the backend; `seq_len` is a multiple of [`STEP`].
    pub(super) fn draw(seq_len: usize, heads: [usize; 2], device: &B::Device) -> Self {
        let [num_heads, num_kv_heads] = heads;
        let mut random = Random(11);
        let mut frequencies = |of: &mut dyn FnMut(f64) -> f64| -> Vec<f64> {
            let count = num_kv_heads * FREQUENCIES;
            (0..count).map(|_| of(random.unit())).collect()
        };
        // The mean of the cosine over Cauchy's distribution falls as exp(-distance), over an even one at once.
        let half = std::f64::consts::FRAC_PI_2;
        let cauchy = &mut |unit: f64| ((0.98 * unit * half).tan() / LOCAL_RANGE).min(3.0);
        let local = frequencies(cauchy);
        let even = frequencies(&mut |unit| unit * 2.0 * half);
        let distances: Vec<f64> = (0..num_kv_heads * DIAGONALS)
            .map(|_| DISTANCES.start * (DISTANCES.end / DISTANCES.start).powf(random.unit()))
            .map(f64::round)
            .collect();
        let of = |shift: usize| -> Vec<f64> {
            let of_head = distances.chunks_exact(DIAGONALS);
            of_head.map(|distances| distances[shift]).collect()
        };
        let none = vec![0.0; num_kv_heads];
        let local = code::<B>(seq_len, &local, &none, device);
        let own = code::<B>(seq_len, &even, &none, device);
        let earlier = (0..DIAGONALS).map(|at| code::<B>(seq_len, &even, &of(at), device));
        let earlier = earlier.reduce(|sum, code| sum + code).expect("a diagonal");

        let normal = |shape: [usize; 3]| Tensor::<B, 3>::random(shape, Distribution::Normal(0.0, 1.0), device);
        let regions = |heads: usize| {
            let count = seq_len.div_ceil(REGION);
            let x = normal([heads, count, REGION_WIDTH]).reshape([heads, count, 1, REGION_WIDTH]);
            let x = x.expand([heads, count, REGION, REGION_WIDTH]);
            x.reshape([heads, count * REGION, REGION_WIDTH]).narrow(1, 0, seq_len)
        };
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
            own,
            marks,
            regions(num_kv_heads),
            normal([num_kv_heads, seq_len, NOISE_WIDTH]),
        ];
        let queries = vec![
            per_head(local),
            per_head(earlier),
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

    /// Queries with the weights of their heads. With fewer heads than weights, heads take weights at even distances.
    pub(super) fn queries(&self, weights: &[Weights]) -> Tensor<B, 3> {
        let num_heads = self.queries.dims()[0];
        let of_head = |head: usize| scales(&weights[head * weights.len() / num_heads]);
        let scales: Vec<f32> = (0..num_heads).flat_map(of_head).collect();
        let scales = TensorData::new(scales, [num_heads, 1, HEAD_DIM]);
        self.queries.clone() * Tensor::from_data(scales, &self.queries.device())
    }
}

/// The factor of each column of a head's queries; attention divides by the root of the width.
fn scales([sinks, lines, local, diagonals, regions]: &Weights) -> Vec<f32> {
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
    let of = |&(scale, width): &(f32, usize)| vec![root * scale; width];
    columns.iter().flat_map(of).collect()
}

/// Cosine and sine of `frequency * (position - shift)`, `[kv_heads, seq_len, 2 * FREQUENCIES]`. Angles are made on the
/// host, in f64, for a step and for the positions inside one; their sums on the device.
fn code<B: Backend>(seq_len: usize, frequencies: &[f64], shifts: &[f64], device: &B::Device) -> Tensor<B, 3> {
    let heads = shifts.len();
    let table = |count: usize, stride: usize, shifts: &[f64], of: fn(f64) -> f64| {
        let mut values = Vec::with_capacity(heads * count * FREQUENCIES);
        for (head, frequencies) in frequencies.chunks_exact(FREQUENCIES).enumerate() {
            for at in 0..count {
                let position = (at * stride) as f64 - shifts[head];
                values.extend(frequencies.iter().map(|one| of(one * position) as f32));
            }
        }
        Tensor::<B, 3>::from_data(TensorData::new(values, [heads, count, FREQUENCIES]), device)
    };
    let steps = seq_len / STEP;
    let none = vec![0.0; heads];
    let large = |of| table(steps, STEP, &none, of).reshape([heads, steps, 1, FREQUENCIES]);
    let small = |of| table(STEP, 1, shifts, of).reshape([heads, 1, STEP, FREQUENCIES]);
    let (cos, sin) = (large(f64::cos), large(f64::sin));
    let (small_cos, small_sin) = (small(f64::cos), small(f64::sin));
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
    fn a_phase_is_right_far_from_the_start() {
        let n = 64 * STEP;
        let frequencies = vec![2.9; FREQUENCIES];
        let code = code::<Flex>(n, &frequencies, &[7.0], &FlexDevice);
        let last: Vec<f32> = code.narrow(1, n - 1, 1).into_data().to_vec().expect("f32");
        let angle = 2.9 * (n - 8) as f64;
        assert!((f64::from(last[0]) - angle.cos()).abs() < 1e-5);
        assert!((f64::from(last[FREQUENCIES]) - angle.sin()).abs() < 1e-5);
    }
}
