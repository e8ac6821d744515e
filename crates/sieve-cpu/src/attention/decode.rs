//! Attention of one new token per batch row over cached keys and values.

use pulp::Simd;
use rayon::prelude::*;

use crate::simd::{dot, exp_and_sum, on_arch};

/// Sizes of a decoding step. A head is one KV head of one batch row; its cache may hold any subset of the past in any
/// order (a ring, or DMA's kept keys).
#[derive(Clone, Copy, Debug)]
pub struct DecodeShape {
    /// Query heads that read one KV head.
    pub group_size: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// Slots of each head in the cache.
    pub capacity: usize,
    /// How many slots are read, from the first on.
    pub kv_len: usize,
    /// Factor on the dot products `q . k`.
    pub softmax_scale: f32,
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
/// - q, o: `[heads, group_size, head_dim]`, heads counted over all batch rows
/// - k, v: `[heads, capacity, head_dim]`; the last head may end after its `kv_len` slots
/// - bias: as [`DecodeBias`] says
///
/// # Panics
/// When lengths do not fit.
pub fn attention_decode(shape: DecodeShape, q: &[f32], k: &[f32], v: &[f32], bias: DecodeBias<'_>, o: &mut [f32]) {
    let DecodeBias { delta, sinks } = bias;
    let DecodeShape { group_size, head_dim, capacity, kv_len, .. } = shape;
    let group_len = group_size * head_dim;
    assert!(
        group_len > 0 && q.len().is_multiple_of(group_len),
        "attention_decode: q is not [heads, group_size, head_dim]"
    );
    assert_eq!(o.len(), q.len(), "attention_decode: o is not as long as q");
    assert!(kv_len <= capacity, "attention_decode: kv_len {kv_len} exceeds the capacity {capacity}");
    if let Some(delta) = delta {
        let heads = q.len() / group_len;
        assert_eq!(delta.len(), heads * kv_len, "attention_decode: delta has the wrong size");
    }
    if let Some(sinks) = sinks {
        let heads = q.len() / head_dim;
        let fits = sinks.len().is_multiple_of(group_size) && !sinks.is_empty() && heads.is_multiple_of(sinks.len());
        assert!(fits, "attention_decode: sinks are not one for each query head");
    }
    let groups = o.par_chunks_mut(group_len).zip(q.par_chunks(group_len)).enumerate();
    groups.for_each(|(head, (o, q))| {
        let [k, v] = [k, v].map(|cache| {
            let slots = cache.get(head * capacity * head_dim..(head * capacity + kv_len) * head_dim);
            slots.expect("attention_decode: k or v is too short")
        });
        let delta = delta.map(|delta| &delta[head * kv_len..][..kv_len]);
        let sinks = sinks.map(|sinks| &sinks[head * group_size % sinks.len()..][..group_size]);
        attend_group(shape, q, k, v, DecodeBias { delta, sinks }, o);
    });
}

on_arch! {
    fn attend_group<'a>(
        shape: DecodeShape, q: &'a [f32], k: &'a [f32], v: &'a [f32], bias: DecodeBias<'a>, o: &'a mut [f32],
    ) -> () = attend_group_simd;
}

/// Attention of the query heads of one KV head of one batch row.
#[inline(always)]
fn attend_group_simd<S: Simd>(
    simd: S,
    shape: DecodeShape,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    DecodeBias { delta, sinks }: DecodeBias<'_>,
    o: &mut [f32],
) {
    let d = shape.head_dim;
    let mut logits = vec![0.0; shape.kv_len];
    // The largest bias is subtracted: next to a large bias `q . k` would lose its digits.
    let largest = |delta: &[f32]| delta.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let base = delta.map_or(0.0, largest);
    for (head, (o, q)) in o.chunks_exact_mut(d).zip(q.chunks_exact(d)).enumerate() {
        let sink = sinks.map(|sinks| sinks[head]);
        let mut max = sink.unwrap_or(f32::NEG_INFINITY);
        for (slot, (logit, k)) in logits.iter_mut().zip(k.chunks_exact(d)).enumerate() {
            let bias = delta.map_or(0.0, |delta| delta[slot] - base);
            *logit = shape.softmax_scale * dot(simd, q, k) + bias;
            max = if *logit > max { *logit } else { max };
        }
        let without_value = sink.filter(|sink| *sink > f32::NEG_INFINITY).map_or(0.0, |sink| (sink - max).exp());
        weigh(simd, &mut logits, [max, without_value], |slot| &v[slot * d..(slot + 1) * d], o);
    }
}

/// Computes `o = sum_s softmax(logits)_s value(s)`, 0 without keys. `max` is the largest logit, `without_value` the
/// unnormalised probability of logits that have no value; the logits become unnormalised probabilities.
#[inline(always)]
pub(crate) fn weigh<'v, S: Simd>(
    simd: S,
    logits: &mut [f32],
    [max, without_value]: [f32; 2],
    value: impl Fn(usize) -> &'v [f32],
    o: &mut [f32],
) {
    let sum = exp_and_sum(simd, logits, max) + without_value;
    o.fill(0.0);
    for (s, &p) in logits.iter().enumerate() {
        for (o, &v) in o.iter_mut().zip(value(s)) {
            *o += p * v;
        }
    }
    if sum != 0.0 {
        for o in o.iter_mut() {
            *o /= sum;
        }
    }
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
        DecodeShape { group_size: HEADS / KV_HEADS, head_dim, capacity, kv_len, softmax_scale: 0.3 }
    }

    fn decode(shape: DecodeShape, [q, k, v]: [&[f32]; 3], delta: Option<&[f32]>) -> Vec<f32> {
        let mut o = vec![f32::NAN; q.len()];
        attention_decode(shape, q, k, v, DecodeBias { delta, sinks: None }, &mut o);
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
