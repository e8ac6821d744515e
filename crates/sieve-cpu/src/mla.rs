//! The packed tensor of multi-head latent attention (arXiv:2405.04434, section 2.1): what was projected up per head,
//! beside rotary parts; keys share one.

use rayon::prelude::*;

/// Sizes and tables of the op.
#[derive(Clone, Copy, Debug)]
pub struct MlaPack<'a> {
    /// Heads, of queries as of keys and values.
    pub num_heads: usize,
    /// Width of the part without rotation, and of a value.
    pub head_dim: usize,
    /// Width of the rotated part, even.
    pub rope_dim: usize,
    /// Cosines, `[max_positions, rope_dim / 2]`.
    pub cos: &'a [f32],
    /// Sines, `[max_positions, rope_dim / 2]`.
    pub sin: &'a [f32],
    /// Position of each token, `[tokens]`.
    pub positions: &'a [i32],
}

impl MlaPack<'_> {
    fn q_len(&self) -> usize {
        self.num_heads * (self.head_dim + self.rope_dim)
    }

    fn kv_len(&self) -> usize {
        self.num_heads * 2 * self.head_dim
    }

    /// Elements of one token in the packed tensor.
    pub fn token_len(&self) -> usize {
        2 * self.q_len() + self.num_heads * self.head_dim
    }

    fn check(&self, q: &[f32], kv: &[f32], k_rope: &[f32], packed: &[f32]) {
        let tokens = self.positions.len();
        assert!(
            self.num_heads > 0 && self.head_dim > 0 && self.rope_dim > 0,
            "mla_pack: a size is 0"
        );
        assert!(self.rope_dim.is_multiple_of(2), "mla_pack: rope_dim must be even");
        assert_eq!(
            (q.len(), kv.len(), k_rope.len(), packed.len()),
            (
                tokens * self.q_len(),
                tokens * self.kv_len(),
                tokens * self.rope_dim,
                tokens * self.token_len()
            ),
            "mla_pack: q, kv, k_rope or the packed tensor has another size"
        );
    }

    /// Cosines and sines of one token.
    fn angles(&self, token: usize) -> (&[f32], &[f32]) {
        let half = self.rope_dim / 2;
        let known = self.cos.len() / half;
        let position = self.positions[token];
        assert!(
            position >= 0 && (position as usize) < known,
            "mla_pack: position {position} is outside the tables ({known} rows)"
        );
        let at = position as usize * half;
        (&self.cos[at..at + half], &self.sin[at..at + half])
    }
}

/// `y = rotate(x)` by halves; with `back`, the inverse rotation, which is the gradient.
fn rotate(x: &[f32], (cos, sin): (&[f32], &[f32]), back: bool, y: &mut [f32]) {
    let half = x.len() / 2;
    let sign = if back { -1.0 } else { 1.0 };
    let (x1, x2) = x.split_at(half);
    let (y1, y2) = y.split_at_mut(half);
    for i in 0..half {
        let (c, s) = (cos[i], sign * sin[i]);
        y1[i] = x1[i] * c - x2[i] * s;
        y2[i] = x2[i] * c + x1[i] * s;
    }
}

/// Packs queries, keys and values: `q = [q_C ; RoPE(q_R)]`, `k = [k_C ; RoPE(k_R)]` with one k_R for all heads, v.
///
/// # Shapes
/// - q: `[tokens, num_heads, head_dim + rope_dim]`
/// - kv: `[tokens, num_heads, 2 * head_dim]`, k_C then v of each head
/// - k_rope: `[tokens, rope_dim]`
/// - packed: per token `num_heads` queries and `num_heads` keys of `head_dim + rope_dim`, `num_heads` values of
///   `head_dim`; written whole
///
/// # Panics
/// When lengths do not fit or a position is outside the tables.
pub fn mla_pack_forward(op: &MlaPack<'_>, q: &[f32], kv: &[f32], k_rope: &[f32], packed: &mut [f32]) {
    op.check(q, kv, k_rope, packed);
    let (d, rope) = (op.head_dim, op.rope_dim);
    packed
        .par_chunks_exact_mut(op.token_len())
        .enumerate()
        .for_each(|(token, packed)| {
            let angles = op.angles(token);
            let (to_q, rest) = packed.split_at_mut(op.q_len());
            let (to_k, to_v) = rest.split_at_mut(op.q_len());
            let q = &q[token * op.q_len()..(token + 1) * op.q_len()];
            let kv = &kv[token * op.kv_len()..(token + 1) * op.kv_len()];
            let k_rope = &k_rope[token * rope..(token + 1) * rope];
            for head in 0..op.num_heads {
                let wide = head * (d + rope)..(head + 1) * (d + rope);
                let (q, to_q) = (&q[wide.clone()], &mut to_q[wide.clone()]);
                to_q[..d].copy_from_slice(&q[..d]);
                rotate(&q[d..], angles, false, &mut to_q[d..]);
                let to_k = &mut to_k[wide];
                let kv = &kv[head * 2 * d..(head + 1) * 2 * d];
                to_k[..d].copy_from_slice(&kv[..d]);
                rotate(k_rope, angles, false, &mut to_k[d..]);
                to_v[head * d..(head + 1) * d].copy_from_slice(&kv[d..]);
            }
        });
}

/// Gradients of [`mla_pack_forward`].
///
/// # Shapes
/// - d_packed: as packed; d_q, d_kv, d_k_rope: as q, kv, k_rope, written whole
///
/// # Panics
/// When lengths do not fit or a position is outside the tables.
pub fn mla_pack_backward(op: &MlaPack<'_>, d_packed: &[f32], d_q: &mut [f32], d_kv: &mut [f32], d_k_rope: &mut [f32]) {
    op.check(d_q, d_kv, d_k_rope, d_packed);
    let (d, rope) = (op.head_dim, op.rope_dim);
    d_q.par_chunks_exact_mut(op.q_len())
        .zip(d_kv.par_chunks_exact_mut(op.kv_len()))
        .zip(d_k_rope.par_chunks_exact_mut(rope))
        .enumerate()
        .for_each(|(token, ((d_q, d_kv), d_k_rope))| {
            let angles = op.angles(token);
            let packed = &d_packed[token * op.token_len()..(token + 1) * op.token_len()];
            let (from_q, rest) = packed.split_at(op.q_len());
            let (from_k, from_v) = rest.split_at(op.q_len());
            // The rotation is the same for all heads, so their gradients are added first.
            let mut rotated = vec![0.0; rope];
            for head in 0..op.num_heads {
                let wide = head * (d + rope)..(head + 1) * (d + rope);
                let (from_q, d_q) = (&from_q[wide.clone()], &mut d_q[wide.clone()]);
                d_q[..d].copy_from_slice(&from_q[..d]);
                rotate(&from_q[d..], angles, true, &mut d_q[d..]);
                let from_k = &from_k[wide];
                let d_kv = &mut d_kv[head * 2 * d..(head + 1) * 2 * d];
                d_kv[..d].copy_from_slice(&from_k[..d]);
                d_kv[d..].copy_from_slice(&from_v[head * d..(head + 1) * d]);
                for (sum, x) in rotated.iter_mut().zip(&from_k[d..]) {
                    *sum += x;
                }
            }
            rotate(&rotated, angles, true, d_k_rope);
        });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{AttentionShape, Documents};
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, finite_differences, inner, wide};

    const HEADS: usize = 3;
    const D: usize = 5;
    const ROPE: usize = 4;
    const TOKENS: usize = 7;

    /// Definition in f64; `x` holds q, kv and k_rope one after another.
    fn definition(x: &[f64], positions: &[i32]) -> Vec<f64> {
        let (q, rest) = x.split_at(TOKENS * HEADS * (D + ROPE));
        let (kv, k_rope) = rest.split_at(TOKENS * HEADS * 2 * D);
        let rotated = |x: &[f64], position: i32| -> Vec<f64> {
            (0..ROPE)
                .map(|i| {
                    let pair = i % (ROPE / 2);
                    let angle = f64::from(position) * 100f64.powf(-2.0 * pair as f64 / ROPE as f64);
                    let other = match i < ROPE / 2 {
                        true => -x[i + ROPE / 2],
                        false => x[i - ROPE / 2],
                    };
                    x[i] * angle.cos() + other * angle.sin()
                })
                .collect()
        };
        let mut packed = Vec::new();
        for (token, &position) in positions.iter().enumerate() {
            for head in 0..HEADS {
                let at = (token * HEADS + head) * (D + ROPE);
                packed.extend(&q[at..at + D]);
                packed.extend(rotated(&q[at + D..at + D + ROPE], position));
            }
            let kv = &kv[token * HEADS * 2 * D..(token + 1) * HEADS * 2 * D];
            for head in 0..HEADS {
                packed.extend(&kv[head * 2 * D..head * 2 * D + D]);
                packed.extend(rotated(&k_rope[token * ROPE..(token + 1) * ROPE], position));
            }
            for head in 0..HEADS {
                packed.extend(&kv[head * 2 * D + D..(head + 1) * 2 * D]);
            }
        }
        packed
    }

    #[test]
    fn mla_pack_equals_the_definition() {
        let positions = [0, 1, 2, 0, 1, 9, 10];
        let tables = |f: fn(f64) -> f64| -> Vec<f32> {
            (0..11 * ROPE / 2)
                .map(|n| {
                    let (position, pair) = (n / (ROPE / 2), n % (ROPE / 2));
                    let frequency = 100f64.powf(-2.0 * pair as f64 / ROPE as f64);
                    f(position as f64 * frequency) as f32
                })
                .collect()
        };
        let (cos, sin) = (tables(f64::cos), tables(f64::sin));
        let op = MlaPack {
            num_heads: HEADS,
            head_dim: D,
            rope_dim: ROPE,
            cos: &cos,
            sin: &sin,
            positions: &positions,
        };
        let mut random = Random(4);
        let q = random.vector(TOKENS * HEADS * (D + ROPE));
        let kv = random.vector(TOKENS * HEADS * 2 * D);
        let k_rope = random.vector(TOKENS * ROPE);
        let all: Vec<f64> = [&q, &kv, &k_rope].into_iter().flat_map(|x| wide(x)).collect();
        let mut packed = vec![f32::NAN; TOKENS * op.token_len()];
        mla_pack_forward(&op, &q, &kv, &k_rope, &mut packed);
        assert_close_relative("packed", &packed, &definition(&all, &positions), 1e-6);
        let d_packed = random.vector(packed.len());
        let [mut dq, mut dkv] = [&q, &kv].map(|x| vec![f32::NAN; x.len()]);
        let mut dk_rope = vec![f32::NAN; k_rope.len()];
        mla_pack_backward(&op, &d_packed, &mut dq, &mut dkv, &mut dk_rope);
        let expected = finite_differences(&all, |x| inner(&definition(x, &positions), &d_packed));
        let got: Vec<f32> = [dq, dkv, dk_rope].concat();
        assert_close_relative("gradients", &got, &expected, 1e-5);
    }

    #[test]
    fn narrow_values_are_wide_values_cut_off() {
        on_every_arch(|| {
            for (n, heads, d, d_v) in [(70, 3, 24, 16), (130, 2, 192, 128), (33, 2, 96, 64)] {
                let mut random = Random(n as u64);
                let shape = AttentionShape {
                    batch: 2,
                    seq_len: n,
                    num_heads: heads,
                    num_kv_heads: heads,
                    head_dim: d,
                    softmax_scale: 0.2,
                };
                let (start, end) = random.documents(2, n);
                let documents = Documents {
                    start: &start,
                    end: &end,
                };
                // Values of the wide tensor are zero from d_v on.
                let mut full = random.vector(2 * n * shape.token_len());
                let mut narrow = Vec::new();
                for token in full.chunks_exact_mut(3 * heads * d) {
                    narrow.extend_from_slice(&token[..2 * heads * d]);
                    for v in token[2 * heads * d..].chunks_exact_mut(d) {
                        v[d_v..].fill(0.0);
                        narrow.extend_from_slice(&v[..d_v]);
                    }
                }
                let cut = |x: &[f32]| -> Vec<f32> { x.chunks_exact(d).flat_map(|x| x[..d_v].to_vec()).collect() };
                let mut d_o = random.vector(2 * n * heads * d);
                d_o.chunks_exact_mut(d).for_each(|x| x[d_v..].fill(0.0));
                let mask = crate::Mask::Causal;
                let [mut o, mut lse] = [2 * n * heads * d, 2 * heads * n].map(|len| vec![0.0; len]);
                crate::attention_forward(shape, &full, documents, mask, &mut o, &mut lse);
                let mut d_full = vec![0.0; full.len()];
                crate::attention_backward(shape, &full, documents, mask, &o, &lse, &d_o, &mut d_full, None);
                let [mut o_v, mut lse_v] = [2 * n * heads * d_v, 2 * heads * n].map(|len| vec![f32::NAN; len]);
                crate::mla_attention_forward(shape, d_v, &narrow, documents, &mut o_v, &mut lse_v);
                assert_close_relative("o", &o_v, &wide(&cut(&o)), 1e-6);
                assert_close_relative("lse", &lse_v, &wide(&lse), 1e-6);
                let mut d_narrow = vec![f32::NAN; narrow.len()];
                crate::mla_attention_backward(shape, d_v, &narrow, documents, &o_v, &lse_v, &cut(&d_o), &mut d_narrow);
                let mut expected = Vec::new();
                for token in d_full.chunks_exact(3 * heads * d) {
                    expected.extend_from_slice(&token[..2 * heads * d]);
                    expected.extend(cut(&token[2 * heads * d..]));
                }
                assert_close_relative("d_qkv", &d_narrow, &wide(&expected), 3e-6);
            }
        });
    }
}
