//! The packed tensor of multi-head latent attention (arXiv:2405.04434, section 2.1): what was projected up per head,
//! beside rotary parts; keys share one. Norms of queries and keys are an addition.

pub mod decode;

use pulp::Simd;
use rayon::prelude::*;

use crate::rms_norm::{add_partials, norm_row_backward, reciprocal_rms};
use crate::simd::{dot, on_arch};

/// Tokens one task handles; also the tokens one partial weight gradient covers, so it fixes the order of that sum.
const TOKENS: usize = 32;

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
    /// Norms of each head's query and key, before the rotation.
    pub norm: Option<MlaNorm<'a>>,
}

/// Weights of the two norms, which all heads share.
#[derive(Clone, Copy, Debug)]
pub struct MlaNorm<'a> {
    /// `[head_dim + rope_dim]`.
    pub q_weight: &'a [f32],
    /// `[head_dim + rope_dim]`.
    pub k_weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

impl MlaPack<'_> {
    fn key_dim(&self) -> usize {
        self.head_dim + self.rope_dim
    }

    fn q_len(&self) -> usize {
        self.num_heads * self.key_dim()
    }

    fn kv_len(&self) -> usize {
        self.num_heads * 2 * self.head_dim
    }

    /// Elements of one token in the packed tensor.
    pub fn token_len(&self) -> usize {
        2 * self.q_len() + self.num_heads * self.head_dim
    }

    fn check(&self, [q, kv, k_rope]: [&[f32]; 3], packed: &[f32]) {
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
        if let Some(norm) = self.norm {
            assert_eq!(
                [norm.q_weight.len(), norm.k_weight.len()],
                [self.key_dim(); 2],
                "mla_pack: a norm's weight is not [head_dim + rope_dim]"
            );
        }
    }

    /// The part of q, kv and k_rope that belongs to one token.
    fn of_token<'x>(&self, [q, kv, k_rope]: [&'x [f32]; 3], token: usize) -> [&'x [f32]; 3] {
        let part = |x: &'x [f32], len: usize| &x[token * len..(token + 1) * len];
        [
            part(q, self.q_len()),
            part(kv, self.kv_len()),
            part(k_rope, self.rope_dim),
        ]
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
#[inline(always)]
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

/// `y = weight x factor`.
#[inline(always)]
fn weigh(x: &[f32], weight: &[f32], factor: f32, y: &mut [f32]) {
    for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
        *y = weight * (x * factor);
    }
}

/// Packs queries, keys and values: `q = [q_C ; RoPE(q_R)]`, `k = [k_C ; RoPE(k_R)]` with one k_R for all heads, v. With
/// norms each head's query and key, k_R included, are normed before the rotation.
///
/// Returns, with norms, what decoding needs of the keys: k_R times its weight, rotated, `[tokens, rope_dim]`, and
/// 1 / rms of each head's key, `[tokens, num_heads]`.
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
pub fn mla_pack_forward(op: &MlaPack<'_>, inputs: [&[f32]; 3], packed: &mut [f32]) -> Option<[Vec<f32>; 2]> {
    op.check(inputs, packed);
    let tokens = op.positions.len();
    let [mut rotated, mut scale] = [op.rope_dim, op.num_heads].map(|width| vec![0.0; tokens * width]);
    packed
        .par_chunks_exact_mut(op.token_len())
        .zip(rotated.par_chunks_exact_mut(op.rope_dim))
        .zip(scale.par_chunks_exact_mut(op.num_heads))
        .enumerate()
        .for_each(|(token, ((packed, rotated), scale))| {
            forward_token(op, op.of_token(inputs, token), op.angles(token), packed, rotated, scale);
        });
    op.norm.map(|_| [rotated, scale])
}

on_arch! {
    fn forward_token<'a>(
        op: &'a MlaPack<'a>, inputs: [&'a [f32]; 3], angles: (&'a [f32], &'a [f32]), packed: &'a mut [f32],
        rotated: &'a mut [f32], scale: &'a mut [f32],
    ) -> () = forward_token_simd;
}

#[inline(always)]
fn forward_token_simd<S: Simd>(
    simd: S,
    op: &MlaPack<'_>,
    [q, kv, k_rope]: [&[f32]; 3],
    angles: (&[f32], &[f32]),
    packed: &mut [f32],
    rotated: &mut [f32],
    scale: &mut [f32],
) {
    let (d, key_dim) = (op.head_dim, op.key_dim());
    let (to_q, rest) = packed.split_at_mut(op.q_len());
    let (to_k, to_v) = rest.split_at_mut(op.q_len());
    let mut weighed = vec![0.0; op.rope_dim];
    // The key that heads share, but for their 1 / rms.
    match op.norm {
        None => rotate(k_rope, angles, false, rotated),
        Some(norm) => {
            weigh(k_rope, &norm.k_weight[d..], 1.0, &mut weighed);
            rotate(&weighed, angles, false, rotated);
        }
    }
    for head in 0..op.num_heads {
        let wide = head * key_dim..(head + 1) * key_dim;
        let (q, to_q, to_k) = (&q[wide.clone()], &mut to_q[wide.clone()], &mut to_k[wide]);
        let (k, v) = kv[head * 2 * d..(head + 1) * 2 * d].split_at(d);
        to_v[head * d..(head + 1) * d].copy_from_slice(v);
        let Some(norm) = op.norm else {
            to_q[..d].copy_from_slice(&q[..d]);
            rotate(&q[d..], angles, false, &mut to_q[d..]);
            to_k[..d].copy_from_slice(k);
            to_k[d..].copy_from_slice(rotated);
            continue;
        };
        let inverse = reciprocal_rms(simd, q, norm.eps);
        weigh(&q[..d], norm.q_weight, inverse, &mut to_q[..d]);
        weigh(&q[d..], &norm.q_weight[d..], inverse, &mut weighed);
        rotate(&weighed, angles, false, &mut to_q[d..]);
        let squares = dot(simd, k, k) + dot(simd, k_rope, k_rope);
        let inverse = 1.0 / (squares / key_dim as f32 + norm.eps).sqrt();
        weigh(k, norm.k_weight, inverse, &mut to_k[..d]);
        for (to, &x) in to_k[d..].iter_mut().zip(&*rotated) {
            *to = x * inverse;
        }
        scale[head] = inverse;
    }
}

/// Gradients of [`mla_pack_forward`]. With norms it returns `[d_q_weight, d_k_weight]` and needs `inputs`, which the
/// forward pass read.
///
/// # Shapes
/// - d_packed: as packed; gradients: as q, kv, k_rope, written whole
///
/// # Panics
/// When lengths do not fit, inputs are missing, or a position is outside the tables.
pub fn mla_pack_backward(
    op: &MlaPack<'_>,
    inputs: Option<[&[f32]; 3]>,
    d_packed: &[f32],
    [d_q, d_kv, d_k_rope]: [&mut [f32]; 3],
) -> Option<[Vec<f32>; 2]> {
    op.check([&*d_q, &*d_kv, &*d_k_rope], d_packed);
    let inputs = op
        .norm
        .map(|_| inputs.expect("mla_pack_backward: norms need the inputs"));
    if let Some(inputs) = inputs {
        op.check(inputs, d_packed);
    }
    let weight_len = op.norm.map_or(0, |_| op.key_dim());
    let tasks = d_q
        .par_chunks_mut(TOKENS * op.q_len())
        .zip(d_kv.par_chunks_mut(TOKENS * op.kv_len()))
        .zip(d_k_rope.par_chunks_mut(TOKENS * op.rope_dim))
        .zip(d_packed.par_chunks(TOKENS * op.token_len()))
        .enumerate();
    let (q_partial, k_partial): (Vec<Vec<f32>>, Vec<Vec<f32>>) = tasks
        .map(|(task, (((d_q, d_kv), d_k_rope), d_packed))| {
            let [mut d_q_weight, mut d_k_weight] = [(); 2].map(|()| vec![0.0; weight_len]);
            let tokens = d_q
                .chunks_exact_mut(op.q_len())
                .zip(d_kv.chunks_exact_mut(op.kv_len()))
                .zip(d_k_rope.chunks_exact_mut(op.rope_dim))
                .zip(d_packed.chunks_exact(op.token_len()));
            for (at, (((d_q, d_kv), d_k_rope), d_packed)) in tokens.enumerate() {
                let token = task * TOKENS + at;
                let inputs = inputs.map(|inputs| op.of_token(inputs, token));
                let gradients = [d_q, d_kv, d_k_rope];
                let weights = [d_q_weight.as_mut_slice(), d_k_weight.as_mut_slice()];
                backward_token(op, inputs, op.angles(token), d_packed, gradients, weights);
            }
            (d_q_weight, d_k_weight)
        })
        .unzip();
    op.norm.map(|_| {
        [q_partial, k_partial].map(|partial| {
            let mut total = vec![0.0; weight_len];
            add_partials(&partial, &mut total);
            total
        })
    })
}

on_arch! {
    fn backward_token<'a>(
        op: &'a MlaPack<'a>, inputs: Option<[&'a [f32]; 3]>, angles: (&'a [f32], &'a [f32]), d_packed: &'a [f32],
        gradients: [&'a mut [f32]; 3], d_weights: [&'a mut [f32]; 2],
    ) -> () = backward_token_simd;
}

#[inline(always)]
fn backward_token_simd<S: Simd>(
    simd: S,
    op: &MlaPack<'_>,
    inputs: Option<[&[f32]; 3]>,
    angles: (&[f32], &[f32]),
    d_packed: &[f32],
    [d_q, d_kv, d_k_rope]: [&mut [f32]; 3],
    [d_q_weight, d_k_weight]: [&mut [f32]; 2],
) {
    let (d, key_dim) = (op.head_dim, op.key_dim());
    let (from_q, rest) = d_packed.split_at(op.q_len());
    let (from_k, from_v) = rest.split_at(op.q_len());
    // Without norms the rotation is the same for all heads, so their gradients are added first.
    let mut rotated = vec![0.0; op.rope_dim];
    let (mut x, mut dy, mut dx) = (vec![0.0; key_dim], vec![0.0; key_dim], vec![0.0; key_dim]);
    d_k_rope.fill(0.0);
    for head in 0..op.num_heads {
        let wide = head * key_dim..(head + 1) * key_dim;
        let (from_q, from_k) = (&from_q[wide.clone()], &from_k[wide.clone()]);
        let (d_q, d_kv) = (&mut d_q[wide.clone()], &mut d_kv[head * 2 * d..(head + 1) * 2 * d]);
        d_kv[d..].copy_from_slice(&from_v[head * d..(head + 1) * d]);
        let (Some(norm), Some([q, kv, k_rope])) = (op.norm, inputs) else {
            d_q[..d].copy_from_slice(&from_q[..d]);
            rotate(&from_q[d..], angles, true, &mut d_q[d..]);
            d_kv[..d].copy_from_slice(&from_k[..d]);
            for (sum, x) in rotated.iter_mut().zip(&from_k[d..]) {
                *sum += x;
            }
            continue;
        };
        dy[..d].copy_from_slice(&from_q[..d]);
        rotate(&from_q[d..], angles, true, &mut dy[d..]);
        norm_row_backward(simd, &q[wide], norm.q_weight, norm.eps, &dy, d_q, d_q_weight);
        x[..d].copy_from_slice(&kv[head * 2 * d..][..d]);
        x[d..].copy_from_slice(k_rope);
        dy[..d].copy_from_slice(&from_k[..d]);
        rotate(&from_k[d..], angles, true, &mut dy[d..]);
        norm_row_backward(simd, &x, norm.k_weight, norm.eps, &dy, &mut dx, d_k_weight);
        d_kv[..d].copy_from_slice(&dx[..d]);
        for (sum, x) in d_k_rope.iter_mut().zip(&dx[d..]) {
            *sum += x;
        }
    }
    if op.norm.is_none() {
        rotate(&rotated, angles, true, d_k_rope);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{AttentionShape, Documents};
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, finite_differences, inner, threads, wide};

    const HEADS: usize = 3;
    const D: usize = 5;
    const ROPE: usize = 4;
    const TOKENS: usize = 7;

    const EPS: f32 = 1e-3;

    /// Definition in f64; `x` holds q, kv, k_rope and, where there are norms, their weights one after another.
    fn definition(x: &[f64], positions: &[i32]) -> Vec<f64> {
        let (q, rest) = x.split_at(TOKENS * HEADS * (D + ROPE));
        let (kv, rest) = rest.split_at(TOKENS * HEADS * 2 * D);
        let (k_rope, weights) = rest.split_at(TOKENS * ROPE);
        let (q_weight, k_weight) = weights.split_at(weights.len() / 2);
        let normed = |x: &[f64], weight: &[f64]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
            match weight.is_empty() {
                true => x.to_vec(),
                false => x.iter().zip(weight).map(|(x, weight)| x * factor * weight).collect(),
            }
        };
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
                let q = normed(&q[at..at + D + ROPE], q_weight);
                packed.extend(&q[..D]);
                packed.extend(rotated(&q[D..], position));
            }
            let kv = &kv[token * HEADS * 2 * D..(token + 1) * HEADS * 2 * D];
            for head in 0..HEADS {
                let k = [&kv[head * 2 * D..head * 2 * D + D], &k_rope[token * ROPE..][..ROPE]].concat();
                let k = normed(&k, k_weight);
                packed.extend(&k[..D]);
                packed.extend(rotated(&k[D..], position));
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
        on_every_arch(|| {
            let mut random = Random(4);
            let q = random.vector(TOKENS * HEADS * (D + ROPE));
            let kv = random.vector(TOKENS * HEADS * 2 * D);
            let k_rope = random.vector(TOKENS * ROPE);
            let [q_weight, k_weight] = [(); 2].map(|()| random.vector(D + ROPE));
            let norm = MlaNorm {
                q_weight: &q_weight,
                k_weight: &k_weight,
                eps: EPS,
            };
            for norm in [None, Some(norm)] {
                let op = MlaPack {
                    num_heads: HEADS,
                    head_dim: D,
                    rope_dim: ROPE,
                    cos: &cos,
                    sin: &sin,
                    positions: &positions,
                    norm,
                };
                let weights = norm.map_or([&[][..]; 2], |norm| [norm.q_weight, norm.k_weight]);
                let all = [&q, &kv, &k_rope, weights[0], weights[1]].concat();
                let (all, inputs) = (wide(&all), [&*q, &kv, &k_rope]);
                let mut packed = vec![f32::NAN; TOKENS * op.token_len()];
                let keys = mla_pack_forward(&op, inputs, &mut packed);
                assert_close_relative("packed", &packed, &definition(&all, &positions), 1e-6);
                assert_eq!(keys.is_some(), norm.is_some());
                // What decoding keeps gives the rotated keys of every head.
                if let Some([rotated, scale]) = keys {
                    for (token, packed) in packed.chunks(op.token_len()).enumerate() {
                        for (head, k) in packed[op.q_len()..2 * op.q_len()].chunks(D + ROPE).enumerate() {
                            let rotated = &rotated[token * ROPE..(token + 1) * ROPE];
                            let k_rope: Vec<f32> = rotated.iter().map(|x| x * scale[token * HEADS + head]).collect();
                            assert_eq!(k_rope, k[D..], "token {token}, head {head}");
                        }
                    }
                }
                let d_packed = random.vector(packed.len());
                let [mut dq, mut dkv, mut dk_rope] = inputs.map(|x| vec![f32::NAN; x.len()]);
                let gradients = [&mut *dq, &mut dkv, &mut dk_rope];
                let weights = mla_pack_backward(&op, norm.map(|_| inputs), &d_packed, gradients);
                let expected = finite_differences(&all, |x| inner(&definition(x, &positions), &d_packed));
                let weights = weights.map_or(Vec::new(), |weights| weights.concat());
                assert_close_relative("gradients", &[dq, dkv, dk_rope, weights].concat(), &expected, 2e-5);
            }
        });
    }

    #[test]
    fn threads_do_not_change_a_bit_of_the_weights_gradients() {
        let mut random = Random(9);
        let tokens = 3 * super::TOKENS + 5;
        let positions = vec![0; tokens];
        let (q_weight, k_weight) = (random.vector(D + ROPE), random.vector(D + ROPE));
        let op = MlaPack {
            num_heads: HEADS,
            head_dim: D,
            rope_dim: ROPE,
            cos: &[1.0; ROPE / 2],
            sin: &[0.0; ROPE / 2],
            positions: &positions,
            norm: Some(MlaNorm {
                q_weight: &q_weight,
                k_weight: &k_weight,
                eps: EPS,
            }),
        };
        let inputs = [op.q_len(), op.kv_len(), ROPE].map(|width| random.vector(tokens * width));
        let d_packed = random.vector(tokens * op.token_len());
        let run = |count| {
            let inputs = inputs.each_ref().map(Vec::as_slice);
            let [mut dq, mut dkv, mut dk_rope] = inputs.map(|x| vec![f32::NAN; x.len()]);
            let gradients = [&mut *dq, &mut dkv, &mut dk_rope];
            threads(count).install(|| mla_pack_backward(&op, Some(inputs), &d_packed, gradients))
        };
        assert!(run(1).is_some());
        assert_eq!(run(1), run(3));
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
                let documents = Documents::new(&start, &end);
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
