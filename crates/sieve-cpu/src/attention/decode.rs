//! Attention of one new token per batch row over cached keys and values.

use pulp::Simd;
use rayon::prelude::*;

use crate::simd::{dot, exp_and_sum, on_arch};

/// Sizes of a decoding step. The cache may hold any subset of the past in any order (a ring, or DMA's kept keys).
#[derive(Clone, Copy, Debug)]
pub struct DecodeShape<'a> {
    /// Query heads, a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Slots each batch row has in the cache.
    pub capacity: usize,
    /// Elements from one slot to the next in k and v, at least `num_kv_heads * head_dim`.
    pub slot_stride: usize,
    /// Slots in use per batch row, `[batch]`; the first ones.
    pub kv_len: &'a [usize],
    /// Factor on `q . k`.
    pub softmax_scale: f32,
}

/// `o = softmax(scale q k^T + delta) v` for one query token per batch row; slots past `kv_len` are not read.
///
/// # Shapes
/// - q, o: `[batch, num_heads, head_dim]`
/// - k, v: `[batch, capacity, num_kv_heads, head_dim]`, slots `slot_stride` apart
/// - delta: `[batch, num_kv_heads, capacity]`
///
/// # Panics
/// When lengths do not fit.
pub fn attention_decode(
    shape: &DecodeShape<'_>,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    delta: Option<&[f32]>,
    o: &mut [f32],
) {
    let DecodeShape {
        num_heads,
        num_kv_heads,
        head_dim,
        capacity,
        slot_stride,
        kv_len,
        ..
    } = *shape;
    let batch = kv_len.len();
    assert!(
        num_kv_heads > 0 && head_dim > 0 && num_heads % num_kv_heads == 0,
        "attention_decode: impossible heads"
    );
    assert!(
        slot_stride >= num_kv_heads * head_dim,
        "attention_decode: slots overlap"
    );
    assert_eq!(
        q.len(),
        batch * num_heads * head_dim,
        "attention_decode: q is not [batch, num_heads, head_dim]"
    );
    assert_eq!(o.len(), q.len(), "attention_decode: o is not as long as q");
    if let Some(delta) = delta {
        assert_eq!(
            delta.len(),
            batch * num_kv_heads * capacity,
            "attention_decode: delta has another size"
        );
    }
    let group_size = num_heads / num_kv_heads;
    let heads = o
        .par_chunks_mut(group_size * head_dim)
        .zip(q.par_chunks(group_size * head_dim))
        .enumerate();
    heads.for_each(|(row_and_head, (o, q))| {
        let (row, kv_head) = (row_and_head / num_kv_heads, row_and_head % num_kv_heads);
        let len = kv_len[row];
        assert!(
            len <= capacity,
            "attention_decode: kv_len {len} exceeds the capacity {capacity}"
        );
        let first = row * capacity * slot_stride + kv_head * head_dim;
        let slot = |cache: &'_ [f32], s: usize| first + s * slot_stride + head_dim <= cache.len();
        assert!(
            len == 0 || (slot(k, len - 1) && slot(v, len - 1)),
            "attention_decode: k or v is too short"
        );
        let delta = delta.map(|delta| &delta[row_and_head * capacity..row_and_head * capacity + len]);
        let mut logits = vec![0.0; len];
        let (k, v) = (&k[first.min(k.len())..], &v[first.min(v.len())..]);
        attend_group(shape, q, k, v, delta, &mut logits, o);
    });
}

on_arch! {
    fn attend_group<'a>(
        shape: &'a DecodeShape<'a>, q: &'a [f32], k: &'a [f32], v: &'a [f32], delta: Option<&'a [f32]>,
        logits: &'a mut [f32], o: &'a mut [f32],
    ) -> () = attend_group_simd;
}

/// The query heads of one (batch row, KV head); k and v begin with its first slot.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn attend_group_simd<S: Simd>(
    simd: S,
    shape: &DecodeShape<'_>,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    delta: Option<&[f32]>,
    logits: &mut [f32],
    o: &mut [f32],
) {
    let (d, stride) = (shape.head_dim, shape.slot_stride);
    // Biases count less the largest: beside a large one q . k would lose its digits.
    let largest = |delta: &[f32]| delta.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let base = delta.map_or(0.0, largest);
    for (o, q) in o.chunks_exact_mut(d).zip(q.chunks_exact(d)) {
        let mut max = f32::NEG_INFINITY;
        for (s, logit) in logits.iter_mut().enumerate() {
            let dot = dot(simd, q, &k[s * stride..s * stride + d]);
            *logit = shape.softmax_scale * dot + delta.map_or(0.0, |delta| delta[s] - base);
            max = if *logit > max { *logit } else { max };
        }
        weigh(simd, logits, max, |s| &v[s * stride..s * stride + d], o);
    }
}

/// Turns the logits, whose largest is `max`, into their softmax, and `o` into the values' mean by it; 0 without keys.
#[inline(always)]
pub(crate) fn weigh<'v, S: Simd>(
    simd: S,
    logits: &mut [f32],
    max: f32,
    value: impl Fn(usize) -> &'v [f32],
    o: &mut [f32],
) {
    let sum = exp_and_sum(simd, logits, max);
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
    use crate::attention::{AttentionShape, Documents, Mask};
    use crate::reference::{AttentionCall, Rounding};
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, whole_rows};

    const HEADS: usize = 6;
    const KV_HEADS: usize = 3;
    const LEN: usize = 37;

    /// q of the last token, k and v `[LEN, KV_HEADS, d]` of one packed row.
    fn split(qkv: &[f32], d: usize) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let token_len = (HEADS + 2 * KV_HEADS) * d;
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for token in qkv.chunks(token_len) {
            k.extend_from_slice(&token[HEADS * d..(HEADS + KV_HEADS) * d]);
            v.extend_from_slice(&token[(HEADS + KV_HEADS) * d..]);
        }
        (qkv[(LEN - 1) * token_len..][..HEADS * d].to_vec(), k, v)
    }

    fn decode_shape(d: usize, kv_len: &[usize], capacity: usize) -> DecodeShape<'_> {
        let (num_heads, num_kv_heads, softmax_scale) = (HEADS, KV_HEADS, 0.3);
        DecodeShape {
            num_heads,
            num_kv_heads,
            head_dim: d,
            capacity,
            slot_stride: num_kv_heads * d,
            kv_len,
            softmax_scale,
        }
    }

    /// Output of one query a row.
    fn decode(shape: &DecodeShape<'_>, [q, k, v]: [&[f32]; 3], delta: Option<&[f32]>) -> Vec<f32> {
        let mut o = vec![f32::NAN; shape.kv_len.len() * HEADS * shape.head_dim];
        attention_decode(shape, q, k, v, delta, &mut o);
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
                let shape = AttentionShape {
                    batch: 1,
                    seq_len: LEN,
                    num_heads: HEADS,
                    num_kv_heads: KV_HEADS,
                    head_dim: d,
                    softmax_scale: 0.3,
                };
                let (q, k, v) = split(&qkv, d);
                let masks = [
                    (None, Mask::Causal),
                    (
                        Some(&delta),
                        Mask::Expire {
                            expire: &expire,
                            delta: &delta,
                        },
                    ),
                ];
                for (delta, mask) in masks {
                    let full = AttentionCall::packed(shape, &qkv, documents, mask, &d_o).run(Rounding::None);
                    let delta = delta.map(Vec::as_slice);
                    let o = decode(&decode_shape(d, &[LEN], LEN), [&q, &k, &v], delta);
                    assert_close_relative("o", &o, &full.o[(LEN - 1) * HEADS * d..], 2e-6);
                }
            }
        });
    }

    #[test]
    fn rows_differ_in_length_and_unused_slots_may_be_nan() {
        let (d, capacity) = (8, 10);
        let mut random = Random(1);
        let kv_len = [4, 0, 10];
        let q = random.vector(3 * HEADS * d);
        let (mut k, mut v) = (
            random.vector(3 * capacity * KV_HEADS * d),
            random.vector(3 * capacity * KV_HEADS * d),
        );
        let mut delta = random.vector(3 * KV_HEADS * capacity);
        let shape = decode_shape(d, &kv_len, capacity);
        let o = decode(&shape, [&q, &k, &v], Some(&delta));
        assert!(o[HEADS * d..2 * HEADS * d].iter().all(|&x| x == 0.0));
        for row in 0..3 {
            for slot in kv_len[row]..capacity {
                let at = (row * capacity + slot) * KV_HEADS * d;
                k[at..at + KV_HEADS * d].fill(f32::NAN);
                v[at..at + KV_HEADS * d].fill(f32::NAN);
                for head in 0..KV_HEADS {
                    delta[(row * KV_HEADS + head) * capacity + slot] = f32::NAN;
                }
            }
        }
        assert_eq!(o, decode(&shape, [&q, &k, &v], Some(&delta)));
    }

    #[test]
    fn the_order_of_slots_does_not_matter() {
        let d = 16;
        let mut random = Random(2);
        let qkv = random.vector(LEN * (HEADS + 2 * KV_HEADS) * d);
        let (q, k, v) = split(&qkv, d);
        let reverse = |x: &[f32]| x.chunks(KV_HEADS * d).rev().flatten().copied().collect::<Vec<f32>>();
        let shape = decode_shape(d, &[LEN], LEN);
        let o = decode(&shape, [&q, &k, &v], None);
        let reversed = decode(&shape, [&q, &reverse(&k), &reverse(&v)], None);
        let expected: Vec<f64> = o.iter().map(|&x| f64::from(x)).collect();
        assert_close_relative("o", &reversed, &expected, 1e-6);
    }

    #[test]
    #[should_panic(expected = "exceeds the capacity")]
    fn more_slots_than_the_cache_has_are_refused() {
        decode(&decode_shape(1, &[3], 2), [&[0.0; HEADS], &[0.0; 9], &[0.0; 9]], None);
    }
}
