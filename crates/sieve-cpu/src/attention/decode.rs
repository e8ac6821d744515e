//! Attention of one new token per batch row over cached keys and values.
//!
//! Each sum has the order that it has in [`attention_forward`](crate::attention_forward): a score is one chain of fused
//! products over the columns, and keys are added one by one by rising position. So a token's output has the same bits
//! in both, whatever the cache held before and in whichever slots its keys lie.

use std::cell::RefCell;

use pulp::{Arch, Simd};
use rayon::prelude::*;

use super::sinks::factor;
use super::softmax::{NO_POWER, Powers, log_sum_exp, probability, within_range};
#[cfg(target_arch = "x86_64")]
use crate::linear::few_rows::in_one_chain;
use crate::simd::{arch, on_arch};

/// Sizes of a decoding step. A head is one KV head of one batch row; its cache may hold any subset of the past in any
/// order (a ring, or DMA's kept keys).
#[derive(Clone, Copy, Debug)]
pub struct DecodeShape {
    /// Query heads that read one KV head.
    pub group_size: usize,
    /// Columns of a query and of a key.
    pub head_dim: usize,
    /// Columns of a value.
    pub head_dim_v: usize,
    /// Slots of each head in the cache.
    pub capacity: usize,
    /// How many slots are read, from the first on.
    pub kv_len: usize,
    /// Factor on the dot products `q . k`.
    pub softmax_scale: f32,
}

/// The keys that a decoding step reads.
#[derive(Clone, Copy, Debug)]
pub struct DecodeKeys<'a> {
    /// Keys, `[heads, capacity, head_dim]`; the last head may end after its `kv_len` slots.
    pub k: &'a [f32],
    /// Values, `[heads, capacity, head_dim_v]`, shaped as `k`.
    pub v: &'a [f32],
    /// Different positions of the keys, `[heads, kv_len]`; `None`: keys lie by rising position.
    pub positions: Option<&'a [i32]>,
}

/// What is added to the logits of a decoding step, or joins them.
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeBias<'a> {
    /// Bias of each key, `[heads, kv_len]`; `None`: keys have no biases.
    pub delta: Option<&'a [f32]>,
    /// One more logit of each query head, whose value is zero (a sink), `[num_heads]` of one batch row; `None`: none.
    pub sinks: Option<&'a [f32]>,
}

/// `o = softmax(scale q k^T + delta) v` for one query token of each batch row. Slots from `kv_len` on are not read.
///
/// # Shapes
/// - q: `[heads, group_size, head_dim]`, heads counted over all batch rows
/// - keys: as [`DecodeKeys`] says
/// - bias: as [`DecodeBias`] says
/// - o: `[heads, group_size, head_dim_v]`, written whole
///
/// # Panics
/// When lengths do not fit.
pub fn attention_decode(shape: DecodeShape, q: &[f32], keys: DecodeKeys<'_>, bias: DecodeBias<'_>, o: &mut [f32]) {
    let DecodeBias { delta, sinks } = bias;
    let DecodeShape { group_size, head_dim, head_dim_v, capacity, kv_len, .. } = shape;
    let (group_len, output_len) = (group_size * head_dim, group_size * head_dim_v);
    assert!(
        group_len > 0 && q.len().is_multiple_of(group_len),
        "attention_decode: q is not [heads, group_size, head_dim]"
    );
    let heads = q.len() / group_len;
    assert_eq!(o.len(), heads * output_len, "attention_decode: o is not [heads, group_size, head_dim_v]");
    assert!(kv_len <= capacity, "attention_decode: kv_len {kv_len} exceeds the capacity {capacity}");
    if let Some(delta) = delta {
        assert_eq!(delta.len(), heads * kv_len, "attention_decode: delta has the wrong size");
    }
    if let Some(positions) = keys.positions {
        assert_eq!(positions.len(), heads * kv_len, "attention_decode: positions has the wrong size");
    }
    if let Some(sinks) = sinks {
        let query_heads = heads * group_size;
        let fits =
            sinks.len().is_multiple_of(group_size) && !sinks.is_empty() && query_heads.is_multiple_of(sinks.len());
        assert!(fits, "attention_decode: sinks are not one for each query head");
    }
    if kv_len == 0 || output_len == 0 {
        return o.fill(0.0);
    }
    let groups = o.par_chunks_mut(output_len).zip(q.par_chunks(group_len)).enumerate();
    groups.for_each(|(head, (o, q))| {
        let [k, v] = [(keys.k, head_dim), (keys.v, head_dim_v)].map(|(cache, width)| {
            let slots = cache.get(head * capacity * width..(head * capacity + kv_len) * width);
            slots.expect("attention_decode: k or v is too short")
        });
        let of_head = |x: &[f32]| -> Vec<f32> { x[head * kv_len..][..kv_len].to_vec() };
        let sinks = sinks.map(|sinks| &sinks[head * group_size % sinks.len()..][..group_size]);
        let q: Vec<f32> = q.iter().map(|x| shape.softmax_scale * x).collect();
        let mut scores = vec![0.0; group_size * kv_len];
        products(&q, k, [group_size, head_dim, kv_len], &mut scores);
        let delta = delta.map(of_head);
        let heads = Group { scores: &mut scores, delta, sinks, v, o };
        match keys.positions.map(|positions| &positions[head * kv_len..][..kv_len]) {
            Some(positions) if !positions.is_sorted() => {
                BY_POSITION.with_borrow_mut(|buffer| attend_group(shape, buffer.order(positions), heads));
            }
            _ => attend_group(shape, &[], heads),
        }
    });
}

/// The query heads of one KV head of one batch row.
struct Group<'a> {
    /// `q . k`, scaled, `[group_size, kv_len]`; they become unnormalised probabilities.
    scores: &'a mut [f32],
    /// Biases of the keys, `[kv_len]`.
    delta: Option<Vec<f32>>,
    /// Sinks of the query heads, `[group_size]`.
    sinks: Option<&'a [f32]>,
    /// Values, `[kv_len, head_dim_v]`.
    v: &'a [f32],
    /// Output, `[group_size, head_dim_v]`.
    o: &'a mut [f32],
}

thread_local! {
    static BY_POSITION: RefCell<ByPosition> = const { RefCell::new(ByPosition::new()) };
}

/// Sorts slots by the positions of their keys. A token replaces one of thousands of keys, and sorting by comparison
/// would take several times as long as their attention. The buffers are reused.
struct ByPosition {
    /// A bit for each position that a key has.
    taken: Vec<u64>,
    /// The slot of each position's key; other entries may hold anything.
    slot: Vec<u32>,
    order: Vec<u32>,
}

impl ByPosition {
    const fn new() -> Self {
        Self { taken: Vec::new(), slot: Vec::new(), order: Vec::new() }
    }

    /// The slots by rising position; positions are different.
    fn order(&mut self, positions: &[i32]) -> &[u32] {
        let first = positions.iter().copied().min().unwrap_or(0);
        let last = positions.iter().copied().max().unwrap_or(0);
        let span = last.abs_diff(first) as usize + 1;
        self.taken.clear();
        self.taken.resize(span.div_ceil(64), 0);
        self.slot.resize(self.slot.len().max(span), 0);
        for (slot, position) in (0..).zip(positions) {
            let at = position.abs_diff(first) as usize;
            self.taken[at / 64] |= 1 << (at % 64);
            self.slot[at] = slot;
        }
        self.order.clear();
        for (word, &taken) in self.taken.iter().enumerate() {
            let mut left = taken;
            while left != 0 {
                self.order.push(self.slot[word * 64 + left.trailing_zeros() as usize]);
                left &= left - 1;
            }
        }
        assert_eq!(self.order.len(), positions.len(), "attention_decode: two keys have one position");
        &self.order
    }
}

/// `q kᵀ`, `[rows, keys]`, each a chain of fused products over the columns.
fn products(q: &[f32], k: &[f32], sizes: [usize; 3], scores: &mut [f32]) {
    match arch() {
        #[cfg(target_arch = "x86_64")]
        Arch::V4(simd) => in_one_chain(simd, q, k, sizes, scores),
        #[cfg(target_arch = "x86_64")]
        Arch::V3(simd) => in_one_chain(simd, q, k, sizes, scores),
        _ => plain_products(q, k, sizes, scores),
    }
}

on_arch! {
    fn plain_products<'a>(q: &'a [f32], k: &'a [f32], sizes: [usize; 3], scores: &'a mut [f32]) -> () =
        plain_products_simd;
}

/// [`products`] for instruction sets without a transpose in registers: the lanes are keys.
#[inline(always)]
fn plain_products_simd<S: Simd>(simd: S, q: &[f32], k: &[f32], [_rows, d, keys]: [usize; 3], scores: &mut [f32]) {
    let mut column = vec![0.0; S::F32_LANES];
    for (q, scores) in q.chunks_exact(d).zip(scores.chunks_exact_mut(keys)) {
        for (scores, k) in scores.chunks_mut(S::F32_LANES).zip(k.chunks(S::F32_LANES * d)) {
            let mut sums = simd.splat_f32s(0.0);
            for (at, &q) in q.iter().enumerate() {
                for (x, k) in column.iter_mut().zip(k.chunks_exact(d)) {
                    *x = k[at];
                }
                sums = simd.mul_add_e_f32s(simd.splat_f32s(q), S::as_simd_f32s(&column).0[0], sums);
            }
            simd.partial_store_f32s(scores, sums);
        }
    }
}

on_arch! {
    fn attend_group<'a>(shape: DecodeShape, order: &'a [u32], group: Group<'a>) -> () = attend_group_simd;
}

/// Attention of the query heads of one KV head of one batch row. `order` are the slots by rising position; empty: they
/// are in order.
#[inline(always)]
fn attend_group_simd<S: Simd>(simd: S, shape: DecodeShape, order: &[u32], group: Group<'_>) {
    let Group { scores, delta, sinks, v, o } = group;
    let (kv_len, width) = (shape.kv_len, shape.head_dim_v);
    // The largest bias is subtracted: next to a large bias `q . k` would lose its digits.
    let bias = delta.map(|mut delta| {
        let base = delta.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        delta.iter_mut().for_each(|delta| *delta -= base);
        delta
    });
    let slot = |at: usize| if order.is_empty() { at } else { order[at] as usize };
    let rows = scores.chunks_mut(MAX_ROWS * kv_len).zip(o.chunks_mut(MAX_ROWS * width));
    for (chunk, (scores, o)) in rows.enumerate() {
        let mut powers = [NO_POWER; MAX_ROWS];
        for (power, scores) in powers.iter_mut().zip(scores.chunks_exact_mut(kv_len)) {
            if let Some(bias) = &bias {
                scores.iter_mut().zip(bias).for_each(|(score, bias)| *score += bias);
            }
            *power = probabilities(simd, scores);
        }
        let sums = match scores.len() / kv_len {
            1 => weigh::<S, 1>(simd, scores, v, [kv_len, width], slot, o),
            2 => weigh::<S, 2>(simd, scores, v, [kv_len, width], slot, o),
            _ => weigh::<S, MAX_ROWS>(simd, scores, v, [kv_len, width], slot, o),
        };
        for (row, (o, (sum, power))) in o.chunks_exact_mut(width).zip(sums.into_iter().zip(powers)).enumerate() {
            let normalise = if sum == 0.0 { 0.0 } else { 1.0 / sum };
            o.iter_mut().for_each(|o| *o *= normalise);
            if let Some(sinks) = sinks {
                let kept = factor(log_sum_exp(power, sum), sinks[chunk * MAX_ROWS + row]);
                o.iter_mut().for_each(|o| *o *= kept);
            }
        }
    }
}

/// Query heads that are weighed together.
const MAX_ROWS: usize = 4;

/// Turns a query's logits into unnormalised probabilities, and returns the power of the largest.
#[inline(always)]
fn probabilities<S: Simd>(simd: S, logits: &mut [f32]) -> f32 {
    let mut max = simd.splat_f32s(f32::NEG_INFINITY);
    let (vectors, tail) = S::as_simd_f32s(logits);
    for &x in vectors {
        max = simd.max_f32s(max, x);
    }
    let max = tail.iter().copied().fold(simd.reduce_max_f32s(max), f32::max);
    let (largest, is_too_large) = within_range(simd, simd.splat_f32s(max));
    let powers = Powers::of(simd, largest);
    let probability_of = |x| probability(simd, if is_too_large { within_range(simd, x).0 } else { x }, powers);
    let (vectors, tail) = S::as_mut_simd_f32s(logits);
    for x in vectors {
        *x = probability_of(*x);
    }
    if !tail.is_empty() {
        let last = probability_of(simd.partial_load_f32s(tail));
        simd.partial_store_f32s(tail, last);
    }
    let mut power = [0.0];
    simd.partial_store_f32s(&mut power, powers.power);
    power[0]
}

/// Writes `sum_s p_s value(s)` of up to `ROWS` query heads to o, `[rows, width]`, and returns the sums of p. Keys are
/// added in the order of `slot(0)`, `slot(1)` and so on.
///
/// # Shapes
/// - p: `[rows, kv_len]`, v: `[kv_len, width]`
#[inline(always)]
fn weigh<S: Simd, const ROWS: usize>(
    simd: S,
    p: &[f32],
    v: &[f32],
    [kv_len, width]: [usize; 2],
    slot: impl Fn(usize) -> usize,
    o: &mut [f32],
) -> [f32; MAX_ROWS] {
    let rows = p.len() / kv_len;
    // Past the last row, the last one is computed again; that result is not stored.
    let mut of_row = [p; ROWS];
    for (row, of_row) in of_row.iter_mut().enumerate() {
        *of_row = &p[row.min(rows - 1) * kv_len..][..kv_len];
    }
    let mut sums = [0.0; MAX_ROWS];
    let (lanes, mut first) = (S::F32_LANES, 0);
    while first < width {
        // AVX-512 has 32 registers, other instruction sets 16.
        let vectors = match (width - first) / lanes {
            4.. if lanes == 16 => columns::<S, ROWS, 4>(simd, of_row, v, [first, width], &slot, o, &mut sums),
            2.. => columns::<S, ROWS, 2>(simd, of_row, v, [first, width], &slot, o, &mut sums),
            _ => columns::<S, ROWS, 1>(simd, of_row, v, [first, width], &slot, o, &mut sums),
        };
        first += vectors * lanes;
    }
    sums
}

/// [`weigh`] for `VECTORS` vectors of columns from column `first` on; the last vector of a row may be shorter. Returns
/// the number of vectors.
#[inline(always)]
fn columns<S: Simd, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    p: [&[f32]; ROWS],
    v: &[f32],
    [first, width]: [usize; 2],
    slot: &impl Fn(usize) -> usize,
    o: &mut [f32],
    totals: &mut [f32; MAX_ROWS],
) -> usize {
    let (zero, len) = (simd.splat_f32s(0.0), (VECTORS * S::F32_LANES).min(width - first));
    let mut sums = [[zero; VECTORS]; ROWS];
    let mut total = [zero; ROWS];
    for at in 0..p[0].len() {
        let slot = slot(at);
        let value = &v[slot * width + first..][..len];
        let mut vectors = [zero; VECTORS];
        match S::as_simd_f32s(value).0.first_chunk::<VECTORS>() {
            Some(whole) => vectors = *whole,
            // One vector that is not whole.
            None => vectors[0] = simd.partial_load_f32s(value),
        }
        for row in 0..ROWS {
            let p = simd.splat_f32s(p[row][slot]);
            total[row] = simd.add_f32s(total[row], p);
            for column in 0..VECTORS {
                sums[row][column] = simd.mul_add_e_f32s(p, vectors[column], sums[row][column]);
            }
        }
    }
    for (row, o) in o.chunks_exact_mut(width).enumerate().take(ROWS) {
        for (o, sum) in o[first..][..len].chunks_mut(S::F32_LANES).zip(sums[row]) {
            simd.partial_store_f32s(o, sum);
        }
        simd.partial_store_f32s(&mut totals[row..=row], total[row]);
    }
    VECTORS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Documents, Mask, ScaledShape};
    use crate::reference::{AttentionCall, Rounding};
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, whole_rows};

    const HEADS: usize = 6;
    const KV_HEADS: usize = 3;
    const LEN: usize = 37;

    /// q of the last token, k and v `[KV_HEADS, LEN, d]` of one packed row.
    fn split(qkv: &[f32], d: usize) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let token_len = (HEADS + 2 * KV_HEADS) * d;
        let heads = |first: usize| -> Vec<f32> {
            let of_head = |head: usize| {
                let tokens = qkv.chunks(token_len);
                tokens.flat_map(move |token| &token[(first + head) * d..(first + head + 1) * d])
            };
            (0..KV_HEADS).flat_map(of_head).copied().collect()
        };
        let q = qkv[(LEN - 1) * token_len..][..HEADS * d].to_vec();
        (q, heads(HEADS), heads(HEADS + KV_HEADS))
    }

    fn decode_shape(head_dim: usize, kv_len: usize, capacity: usize) -> DecodeShape {
        DecodeShape {
            group_size: HEADS / KV_HEADS,
            head_dim,
            head_dim_v: head_dim,
            capacity,
            kv_len,
            softmax_scale: 0.3,
        }
    }

    fn decode(shape: DecodeShape, [q, k, v]: [&[f32]; 3], delta: Option<&[f32]>) -> Vec<f32> {
        let mut o = vec![f32::NAN; q.len()];
        let keys = DecodeKeys { k, v, positions: None };
        attention_decode(shape, q, keys, DecodeBias { delta, sinks: None }, &mut o);
        o
    }

    #[test]
    fn equals_the_last_row_of_the_definition() {
        on_every_arch(|| {
            for d in [1, 16, 23, 64] {
                let mut random = Random(d as u64);
                let qkv = random.vector(LEN * (HEADS + 2 * KV_HEADS) * d);
                let d_o = vec![0.0; LEN * HEADS * d];
                let delta = random.vector(KV_HEADS * LEN);
                let expire = vec![LEN as i32; KV_HEADS * LEN];
                let (start, end) = whole_rows(1, LEN);
                let documents = Documents::new(&start, &end);
                let shape = ScaledShape { softmax_scale: 0.3, ..ScaledShape::new([1, LEN], [HEADS, KV_HEADS], d) };
                let (q, k, v) = split(&qkv, d);
                let masks = [(None, Mask::Causal), (Some(&delta), Mask::Expire { expire: &expire, delta: &delta })];
                for (delta, mask) in masks {
                    let full = AttentionCall::packed(shape, &qkv, documents, mask, &d_o).run(Rounding::None);
                    let delta = delta.map(Vec::as_slice);
                    let o = decode(decode_shape(d, LEN, LEN), [&q, &k, &v], delta);
                    assert_close_relative("o", &o, &full.o[(LEN - 1) * HEADS * d..], 2e-6);
                }
            }
        });
    }

    #[test]
    fn an_empty_cache_gives_zeros_and_unused_slots_may_be_nan() {
        let (d, capacity, heads) = (8, 10, 3 * KV_HEADS);
        let mut random = Random(1);
        let q = random.vector(3 * HEADS * d);
        let (mut k, mut v) = (random.vector(heads * capacity * d), random.vector(heads * capacity * d));
        for kv_len in [10, 4, 0] {
            let delta = random.vector(heads * kv_len);
            let shape = decode_shape(d, kv_len, capacity);
            let o = decode(shape, [&q, &k, &v], Some(&delta));
            assert_eq!(o.iter().all(|&x| x == 0.0), kv_len == 0);
            for cache in [&mut k, &mut v] {
                for slots in cache.chunks_mut(capacity * d) {
                    slots[kv_len * d..].fill(f32::NAN);
                }
            }
            assert_eq!(o, decode(shape, [&q, &k, &v], Some(&delta)));
        }
    }

    #[test]
    #[should_panic(expected = "exceeds the capacity")]
    fn more_slots_than_the_cache_has_are_refused() {
        decode(decode_shape(1, 3, 2), [&[0.0; HEADS], &[0.0; 9], &[0.0; 9]], None);
    }
}
