//! Attention of one new token per batch row over cached keys and values.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::simd::{dot, exp_and_sum};

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
pub fn decode_attention(
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
        "decode_attention: impossible heads"
    );
    assert!(
        slot_stride >= num_kv_heads * head_dim,
        "decode_attention: slots overlap"
    );
    assert_eq!(
        q.len(),
        batch * num_heads * head_dim,
        "decode_attention: q is not [batch, num_heads, head_dim]"
    );
    assert_eq!(o.len(), q.len(), "decode_attention: o is not as long as q");
    if let Some(delta) = delta {
        assert_eq!(
            delta.len(),
            batch * num_kv_heads * capacity,
            "decode_attention: delta has another size"
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
            "decode_attention: kv_len {len} exceeds the capacity {capacity}"
        );
        let first = row * capacity * slot_stride + kv_head * head_dim;
        let slot = |cache: &'_ [f32], s: usize| first + s * slot_stride + head_dim <= cache.len();
        assert!(
            len == 0 || (slot(k, len - 1) && slot(v, len - 1)),
            "decode_attention: k or v is too short"
        );
        let delta =
            delta.map(|delta| &delta[row_and_head * capacity..row_and_head * capacity + len]);
        let mut logits = vec![0.0; len];
        let (k, v) = (&k[first.min(k.len())..], &v[first.min(v.len())..]);
        Arch::new().dispatch(Group {
            shape,
            q,
            k,
            v,
            delta,
            logits: &mut logits,
            o,
        });
    });
}

/// The query heads of one (batch row, KV head); k and v begin with its first slot.
struct Group<'a> {
    shape: &'a DecodeShape<'a>,
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    delta: Option<&'a [f32]>,
    logits: &'a mut [f32],
    o: &'a mut [f32],
}

impl WithSimd for Group<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            shape,
            q,
            k,
            v,
            delta,
            logits,
            o,
        } = self;
        let (d, stride) = (shape.head_dim, shape.slot_stride);
        for (o, q) in o.chunks_exact_mut(d).zip(q.chunks_exact(d)) {
            let mut max = f32::NEG_INFINITY;
            for (s, logit) in logits.iter_mut().enumerate() {
                let dot = dot(simd, q, &k[s * stride..s * stride + d]);
                *logit = shape.softmax_scale * dot + delta.map_or(0.0, |delta| delta[s]);
                max = if *logit > max { *logit } else { max };
            }
            let sum = exp_and_sum(simd, logits, max);
            o.fill(0.0);
            for (s, &p) in logits.iter().enumerate() {
                for (o, &v) in o.iter_mut().zip(&v[s * stride..s * stride + d]) {
                    *o += p * v;
                }
            }
            if sum != 0.0 {
                for o in o.iter_mut() {
                    *o /= sum;
                }
            }
        }
    }
}
