//! Checks that a token has the same bits in a whole row and in a step of decoding, where kernels promise it: on Hopper,
//! over all keys, windows and bands, for heads of 64 and 128 columns.
use super::caches::Reads;
use crate::device::{Device, family, separate};
use crate::extent::Extent;
use crate::report::{Outcome, Report, wrong};
use sieve_core::FarKeys;
use sieve_kernels::{
    AttentionResult, AttentionShape, DType, DecodeScratch, DecodeStep, KernelFamily, KeySource, KvCache, Qkv,
};
use sieve_testing::Random;

/// Checks calls with and without windows or with bands, sinks and dropped keys, in rows of one stage of keys and of
/// several.
pub(super) fn check(report: &mut Report, device: &dyn Device, extent: &Extent, reads: Reads) {
    let shape = AttentionShape::new(1, 1, [1, 1], [128, 128]);
    if family(device, &shape, KeySource::Dense) != KernelFamily::Hopper {
        return;
    }
    let mut random = Random(extent.seed);
    for at in 0..extent.few().max(12) {
        // Few heads, whose keys eight blocks of threads share where they are over 512, and many.
        let (batch, kv_heads, group) = if at % 4 == 2 {
            (2, random.between(49, 52), 1)
        } else {
            (random.between(1, 2), random.between(1, 3), random.one_of(&[1, 2, 5, 16, 17]))
        };
        let (tokens, heads) = (random.between(1, 2500), [kv_heads * group, kv_heads]);
        let shape = AttentionShape::new(batch, tokens, heads, [[64, 128][at % 2]; 2]);
        let window = [None, Some(1024), Some(random.between(1, 300))][at % 3];
        let window = window.or_else(|| (reads == Reads::Bands).then(|| random.between(1, 130)));
        let far = window.and_then(|window| reads.far(&mut random, window, tokens, kv_heads));
        let (has_sinks, magnitude) = (at % 4 == 3, extent.magnitude_of(at));
        let seed = random.between(0, 1 << 30) as u64;
        let outcome = compare(device, shape, (window, far), has_sinks, magnitude, seed);
        let case = format!("{shape:?} window {window:?} {far:?} sinks {has_sinks} q, k x {magnitude} seed {seed}");
        report.add("a token as in its row", "kernel", &case, outcome);
    }
}

/// Numbers of one kind, `[batch, tokens, heads, head_dim]`.
struct Numbers {
    values: Vec<f32>,
    sizes: [usize; 4],
}

impl Numbers {
    /// The token number `at` of each row.
    fn token(&self, at: usize) -> Vec<f32> {
        let [_, tokens, heads, width] = self.sizes;
        let rows = self.values.chunks(tokens * heads * width);
        rows.flat_map(|row| &row[at * heads * width..][..heads * width]).copied().collect()
    }

    /// The cache of the tokens before `first`, and of those from `kept` to before `end`, `[batch, heads, capacity,
    /// head_dim]`, with NaN where no token is.
    fn cache(&self, [first, kept, end]: [usize; 3], capacity: usize) -> Vec<f32> {
        let [batch, tokens, heads, width] = self.sizes;
        let mut cache = Vec::with_capacity(batch * heads * capacity * width);
        for (row, head) in (0..batch).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            for token in (0..first).chain(kept..end) {
                cache.extend(&self.values[((row * tokens + token) * heads + head) * width..][..width]);
            }
            cache.resize(cache.len() + (capacity - first - (end - kept)) * width, f32::NAN);
        }
        cache
    }
}

/// Compares some tokens of one call.
fn compare(
    device: &dyn Device,
    shape: AttentionShape,
    (window, far): (Option<usize>, Option<FarKeys>),
    has_sinks: bool,
    magnitude: f32,
    seed: u64,
) -> Outcome {
    let AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, .. } = shape;
    let mut random = Random(seed);
    let mut numbers = |heads: usize, factor: f32| {
        let sizes = [batch, seq_len, heads, head_dim];
        let values = random.bf16_normals(sizes.iter().product()).iter().map(|x| x * factor).collect();
        Numbers { values, sizes }
    };
    let (q, k, v) = (numbers(num_heads, magnitude), numbers(num_kv_heads, magnitude), numbers(num_kv_heads, 1.0));
    let sinks = numbers(num_heads, 1.0).values;
    let sinks = has_sinks.then(|| device.float(&sinks[..num_heads], &[num_heads], DType::BF16));
    let scale = 1.0 / (head_dim as f32).sqrt();

    let whole = separate(device, [&q.values, &k.values, &v.values], shape);
    let starts = device.int(&vec![0; batch * seq_len], &[batch, seq_len]);
    let result = match window.zip(far) {
        Some((window, far)) => whole.far_attention_forward(&starts, window, far, scale)?,
        None => whole.attention_forward(&starts, window, scale, None)?,
    };
    let result: AttentionResult = sinks.as_ref().map_or(Ok(result.clone()), |sinks| result.with_sinks(sinks))?;
    let expected = Numbers { values: device.floats(&result.o)?, sizes: [batch, seq_len, num_heads, head_dim] };

    let edges = [0, 1, 127, 128, 129, 512, 1023, 1024, 1151, seq_len - 1];
    let some: [usize; 6] = std::array::from_fn(|_| random.below(seq_len));
    for at in edges.into_iter().filter(|at| *at < seq_len).chain(some) {
        let lowest = window.map_or(0, |window| (at + 1).saturating_sub(window));
        let (first, num_dropped) = match far {
            None => (0, random.below(lowest + 1)),
            // Whole stages of first keys stay, and whole stages behind them are dropped.
            Some(far) => {
                let first = far.sink_tokens.next_multiple_of(128).min(at);
                let lowest = lowest.min((at + 1).saturating_sub(far.distances[1]));
                (first, random.below(lowest.saturating_sub(first) / 128 + 1) * 128)
            }
        };
        let capacity = at + 1 + random.below(4);
        let cache_of = |x: &Numbers| {
            let values = x.cache([first, first + num_dropped, at], capacity);
            device.float(&values, &[batch, num_kv_heads, capacity, head_dim], DType::BF16)
        };
        let cache = KvCache { k: cache_of(&k), v: cache_of(&v) };
        let one = AttentionShape { seq_len: 1, ..shape };
        let token: Qkv = separate(device, [&q, &k, &v].map(|x| x.token(at)).each_ref().map(Vec::as_slice), one);
        let scratch = DecodeScratch::new(&cache.k, one, capacity)?;
        let step =
            DecodeStep { window, far, num_dropped, sinks: sinks.as_ref(), ..DecodeStep::new(at - num_dropped, scale) };
        let lengths = device.int(&vec![at as i32; batch], &[batch]);
        let o = device.floats(&cache.attention_decode(&token, &lengths, step, &scratch)?)?;
        let of_row = expected.token(at);
        let differ = o.iter().zip(&of_row).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        if differ > 0 {
            return wrong(format!("token {at}: {differ} of {} numbers differ from the whole row's", o.len()));
        }
    }
    Ok(0.0)
}
