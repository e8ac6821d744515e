//! Per-head RMSNorm of q and k, then rotary positions, on the packed output of the qkv projection.
//!
//! Rotate-half form, as Hugging Face's Qwen3: `rope(x) = x * cos + cat(-x2, x1) * sin` with x1, x2 the halves of a
//! head.

use pulp::Simd;
use rayon::prelude::*;

use crate::attention::Documents;
use crate::rms_norm::{add_partials, norm_row_backward, reciprocal_rms};
use crate::simd::on_arch;

/// Tokens of a parallel task. Each task sums its own weight gradients, so this also fixes the order of additions.
const TOKENS: usize = 32;

/// Sizes and weights of q/k-norm and RoPE.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRope<'a> {
    /// Sequences in the batch.
    pub batch: usize,
    /// Tokens of each sequence.
    pub seq_len: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads.
    pub num_kv_heads: usize,
    /// Columns of a head, an even number.
    pub head_dim: usize,
    /// Norm weight of the queries, `[head_dim]`; not read by [`rope`].
    pub q_weight: &'a [f32],
    /// Norm weight of the keys, `[head_dim]`; not read by [`rope`].
    pub k_weight: &'a [f32],
    /// Epsilon that the norms add to the mean square.
    pub eps: f32,
    /// Cosines, `[max_positions, head_dim / 2]`.
    pub cos: &'a [f32],
    /// Sines, `[max_positions, head_dim / 2]`.
    pub sin: &'a [f32],
    /// Offset of all positions: when decoding, the number of tokens before these.
    pub position_offset: usize,
}

impl QkNormRope<'_> {
    fn token_len(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    /// Elements of a token's queries and keys, which come before its values.
    fn rotated_len(&self) -> usize {
        (self.num_heads + self.num_kv_heads) * self.head_dim
    }

    fn check(&self, qkv: &[f32], documents: Documents<'_>) {
        let tokens = self.batch * self.seq_len;
        assert!(self.head_dim > 0 && self.head_dim.is_multiple_of(2), "qk_norm_rope: head_dim must be even");
        assert_eq!(self.cos.len(), self.sin.len(), "qk_norm_rope: cos and sin differ in length");
        assert_eq!(documents.start.len(), tokens, "qk_norm_rope: documents.start is not [batch, seq_len]");
        assert_eq!(qkv.len(), tokens * self.token_len(), "qk_norm_rope: qkv has the wrong size");
    }

    fn check_weights(&self) {
        for (name, weight) in [("q_weight", self.q_weight), ("k_weight", self.k_weight)] {
            assert_eq!(weight.len(), self.head_dim, "qk_norm_rope: {name} is not [head_dim]");
        }
    }

    /// Cosines and sines of one token, at its position inside its document plus the offset.
    #[inline(always)]
    fn angles(&self, documents: Documents<'_>, token: usize) -> (&[f32], &[f32]) {
        let half = self.head_dim / 2;
        let position = (token % self.seq_len) as i64 - i64::from(documents.start[token]) + self.position_offset as i64;
        let known = (self.cos.len() / half) as i64;
        assert!(
            (0..known).contains(&position),
            "qk_norm_rope: position {position} is outside the tables ({known} rows)"
        );
        let at = position as usize * half;
        (&self.cos[at..at + half], &self.sin[at..at + half])
    }
}

/// Normalises and rotates q and k, copies v.
///
/// The position of a token is `i - documents.start[i] + position_offset`.
///
/// # Shapes
/// - qkv, out: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`, heads in the order q, k, v; out is written
///   whole
///
/// # Panics
/// When lengths do not fit or a position is outside the tables.
pub fn qk_norm_rope_forward(op: &QkNormRope<'_>, qkv: &[f32], documents: Documents<'_>, out: &mut [f32]) {
    op.check(qkv, documents);
    op.check_weights();
    let token_len = op.token_len();
    assert_eq!(out.len(), qkv.len(), "qk_norm_rope_forward: out is not as long as qkv");
    let tasks = out.par_chunks_mut(TOKENS * token_len).zip(qkv.par_chunks(TOKENS * token_len)).enumerate();
    tasks.for_each(|(task, (out, qkv))| forward_tokens(op, documents, task * TOKENS, qkv, out));
}

/// Rotates q and k without norms, copies v; otherwise as [`qk_norm_rope_forward`]. The gradient is the same function
/// with negated sines.
///
/// # Panics
/// When lengths do not fit or a position is outside the tables.
pub fn rope(op: &QkNormRope<'_>, qkv: &[f32], documents: Documents<'_>, out: &mut [f32]) {
    op.check(qkv, documents);
    let (token_len, rotated) = (op.token_len(), op.rotated_len());
    assert_eq!(out.len(), qkv.len(), "rope: out is not as long as qkv");
    let tokens = out.par_chunks_mut(token_len).zip(qkv.par_chunks(token_len)).enumerate();
    tokens.with_min_len(TOKENS).for_each(|(token, (out, x))| {
        let (cos, sin) = op.angles(documents, token);
        let heads = out[..rotated].chunks_exact_mut(op.head_dim);
        for (out, x) in heads.zip(x.chunks_exact(op.head_dim)) {
            let sign = 1.0;
            rotate(x, cos, sin, sign, out);
        }
        out[rotated..].copy_from_slice(&x[rotated..]);
    });
}

/// Gradients of [`qk_norm_rope_forward`]; `qkv` is its input, and the norms are recomputed.
///
/// # Shapes
/// - qkv, d_out, d_qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - d_q_weight, d_k_weight: `[head_dim]`; all three gradients are written whole
///
/// # Panics
/// When lengths do not fit or a position is outside the tables.
pub fn qk_norm_rope_backward(
    op: &QkNormRope<'_>,
    qkv: &[f32],
    documents: Documents<'_>,
    d_out: &[f32],
    d_qkv: &mut [f32],
    d_q_weight: &mut [f32],
    d_k_weight: &mut [f32],
) {
    op.check(qkv, documents);
    op.check_weights();
    let (token_len, head_dim) = (op.token_len(), op.head_dim);
    assert_eq!(
        (d_out.len(), d_qkv.len(), d_q_weight.len(), d_k_weight.len()),
        (qkv.len(), qkv.len(), head_dim, head_dim),
        "qk_norm_rope_backward: a gradient has the wrong size"
    );
    let tasks = d_qkv
        .par_chunks_mut(TOKENS * token_len)
        .zip(qkv.par_chunks(TOKENS * token_len))
        .zip(d_out.par_chunks(TOKENS * token_len))
        .enumerate();
    let (q_partial, k_partial): (Vec<Vec<f32>>, Vec<Vec<f32>>) = tasks
        .map(|(task, ((d_qkv, qkv), d_out))| {
            let (mut d_q_weight, mut d_k_weight) = (vec![0.0; head_dim], vec![0.0; head_dim]);
            let first = task * TOKENS;
            backward_tokens(op, documents, first, qkv, d_out, d_qkv, &mut d_q_weight, &mut d_k_weight);
            (d_q_weight, d_k_weight)
        })
        .unzip();
    add_partials(&q_partial, d_q_weight);
    add_partials(&k_partial, d_k_weight);
}

on_arch! {
    fn forward_tokens<'a>(
        op: &'a QkNormRope<'a>, documents: Documents<'a>, first: usize, qkv: &'a [f32], out: &'a mut [f32],
    ) -> () = forward_tokens_simd;
}

/// The forward pass of some tokens; `first` is the index of the first of them in the batch.
#[inline(always)]
fn forward_tokens_simd<S: Simd>(
    simd: S,
    op: &QkNormRope<'_>,
    documents: Documents<'_>,
    first: usize,
    qkv: &[f32],
    out: &mut [f32],
) {
    match op.head_dim {
        32 => forward_of_width::<S, 32>(simd, op, documents, first, qkv, out),
        64 => forward_of_width::<S, 64>(simd, op, documents, first, qkv, out),
        128 => forward_of_width::<S, 128>(simd, op, documents, first, qkv, out),
        _ => forward_of_width::<S, 0>(simd, op, documents, first, qkv, out),
    }
}

/// `HEAD_DIM` is the head_dim as a constant, so that the compiler unrolls the loops over a head; 0: any other head_dim.
#[inline(always)]
fn forward_of_width<S: Simd, const HEAD_DIM: usize>(
    simd: S,
    op: &QkNormRope<'_>,
    documents: Documents<'_>,
    first: usize,
    qkv: &[f32],
    out: &mut [f32],
) {
    let head_dim = if HEAD_DIM == 0 { op.head_dim } else { HEAD_DIM };
    let (token_len, rotated) = (op.token_len(), op.rotated_len());
    let tokens = out.chunks_exact_mut(token_len).zip(qkv.chunks_exact(token_len));
    for (token, (out, x)) in tokens.enumerate() {
        let (cos, sin) = op.angles(documents, first + token);
        let heads = out[..rotated].chunks_exact_mut(head_dim).zip(x.chunks_exact(head_dim));
        for (head, (out, x)) in heads.enumerate() {
            let weight = if head < op.num_heads { op.q_weight } else { op.k_weight };
            norm_and_rotate(simd, x, weight, op.eps, cos, sin, out);
        }
        out[rotated..].copy_from_slice(&x[rotated..]);
    }
}

on_arch! {
    fn backward_tokens<'a>(
        op: &'a QkNormRope<'a>, documents: Documents<'a>, first: usize, qkv: &'a [f32], d_out: &'a [f32],
        d_qkv: &'a mut [f32], d_q_weight: &'a mut [f32], d_k_weight: &'a mut [f32],
    ) -> () = backward_tokens_simd;
}

/// The backward pass of some tokens; adds to the weight gradients. `first` is the index of the first of them in the
/// batch.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "the operands of the public function")]
fn backward_tokens_simd<S: Simd>(
    simd: S,
    op: &QkNormRope<'_>,
    documents: Documents<'_>,
    first: usize,
    qkv: &[f32],
    d_out: &[f32],
    d_qkv: &mut [f32],
    d_q_weight: &mut [f32],
    d_k_weight: &mut [f32],
) {
    let weights = [d_q_weight, d_k_weight];
    match op.head_dim {
        32 => backward_of_width::<S, 32>(simd, op, documents, first, [qkv, d_out], d_qkv, weights),
        64 => backward_of_width::<S, 64>(simd, op, documents, first, [qkv, d_out], d_qkv, weights),
        128 => backward_of_width::<S, 128>(simd, op, documents, first, [qkv, d_out], d_qkv, weights),
        _ => backward_of_width::<S, 0>(simd, op, documents, first, [qkv, d_out], d_qkv, weights),
    }
}

/// The backward pass of [`forward_of_width`]: writes d_qkv and adds to the gradients of the weights.
#[inline(always)]
fn backward_of_width<S: Simd, const HEAD_DIM: usize>(
    simd: S,
    op: &QkNormRope<'_>,
    documents: Documents<'_>,
    first: usize,
    [qkv, d_out]: [&[f32]; 2],
    d_qkv: &mut [f32],
    [d_q_weight, d_k_weight]: [&mut [f32]; 2],
) {
    let head_dim = if HEAD_DIM == 0 { op.head_dim } else { HEAD_DIM };
    let (token_len, rotated) = (op.token_len(), op.rotated_len());
    let mut d_norm = vec![0.0; head_dim];
    let tokens = d_qkv.chunks_exact_mut(token_len).zip(qkv.chunks_exact(token_len));
    for (token, ((dx, x), dy)) in tokens.zip(d_out.chunks_exact(token_len)).enumerate() {
        let (cos, sin) = op.angles(documents, first + token);
        let heads = dx[..rotated].chunks_exact_mut(head_dim).zip(x.chunks_exact(head_dim));
        for (head, ((dx, x), dy)) in heads.zip(dy.chunks_exact(head_dim)).enumerate() {
            let sign = -1.0;
            rotate(dy, cos, sin, sign, &mut d_norm[..head_dim]);
            let (weight, d_weight) =
                if head < op.num_heads { (op.q_weight, &mut *d_q_weight) } else { (op.k_weight, &mut *d_k_weight) };
            norm_row_backward(simd, x, weight, op.eps, &d_norm, dx, d_weight);
        }
        dx[rotated..].copy_from_slice(&dy[rotated..]);
    }
}

/// Normalises one head and rotates it by the angles; `weight` is the norm's weight.
#[inline(always)]
fn norm_and_rotate<S: Simd>(simd: S, x: &[f32], weight: &[f32], eps: f32, cos: &[f32], sin: &[f32], out: &mut [f32]) {
    let half = x.len() / 2;
    let (cos, sin) = (&cos[..half], &sin[..half]);
    let rstd = reciprocal_rms(simd, x, eps);
    let ((x1, x2), (w1, w2)) = (x.split_at(half), weight.split_at(half));
    let (out1, out2) = out.split_at_mut(half);
    let columns = x1.iter().zip(x2).zip(w1.iter().zip(w2)).zip(cos.iter().zip(sin));
    for ((o1, o2), (((&x1, &x2), (&w1, &w2)), (&c, &s))) in out1.iter_mut().zip(out2).zip(columns) {
        let (y1, y2) = (w1 * (x1 * rstd), w2 * (x2 * rstd));
        *o1 = y1 * c - y2 * s;
        *o2 = y2 * c + y1 * s;
    }
}

/// Rotates by the angles, or by their negatives with `sign` -1, which is the gradient.
#[inline(always)]
fn rotate(x: &[f32], cos: &[f32], sin: &[f32], sign: f32, out: &mut [f32]) {
    let half = x.len() / 2;
    let (cos, sin) = (&cos[..half], &sin[..half]);
    let (x1, x2) = x.split_at(half);
    let (out1, out2) = out.split_at_mut(half);
    let columns = x1.iter().zip(x2).zip(cos.iter().zip(sin));
    for ((out1, out2), ((&x1, &x2), (&c, &s))) in out1.iter_mut().zip(out2).zip(columns) {
        let s = sign * s;
        *out1 = x1 * c - x2 * s;
        *out2 = x2 * c + x1 * s;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, finite_differences, inner, threads, whole_rows, wide};

    struct Case {
        /// `[batch, seq_len, num_heads, num_kv_heads, head_dim]`.
        sizes: [usize; 5],
        q_weight: Vec<f32>,
        k_weight: Vec<f32>,
        cos: Vec<f32>,
        sin: Vec<f32>,
        qkv: Vec<f32>,
        d_out: Vec<f32>,
        start: Vec<i32>,
        end: Vec<i32>,
        offset: usize,
    }

    impl Case {
        /// `offset` is added to all positions; `packed`: rows have several documents.
        fn new(sizes: [usize; 5], offset: usize, packed: bool) -> Self {
            let [batch, seq_len, num_heads, num_kv_heads, head_dim] = sizes;
            let mut random = Random(head_dim as u64);
            let (start, end) = if packed { random.documents(batch, seq_len) } else { whole_rows(batch, seq_len) };
            let angle =
                |position: usize, i: usize| position as f64 * 10_000_f64.powf(-2.0 * i as f64 / head_dim as f64);
            let table = |f: fn(f64) -> f64| {
                (0..(seq_len + offset) * head_dim / 2)
                    .map(|at| f(angle(at / (head_dim / 2), at % (head_dim / 2))) as f32)
                    .collect()
            };
            let len = batch * seq_len * (num_heads + 2 * num_kv_heads) * head_dim;
            Self {
                sizes,
                q_weight: random.vector(head_dim),
                k_weight: random.vector(head_dim),
                cos: table(f64::cos),
                sin: table(f64::sin),
                qkv: random.vector(len),
                d_out: random.vector(len),
                start,
                end,
                offset,
            }
        }

        fn op(&self) -> QkNormRope<'_> {
            let [batch, seq_len, num_heads, num_kv_heads, head_dim] = self.sizes;
            QkNormRope {
                batch,
                seq_len,
                num_heads,
                num_kv_heads,
                head_dim,
                q_weight: &self.q_weight,
                k_weight: &self.k_weight,
                eps: 1e-6,
                cos: &self.cos,
                sin: &self.sin,
                position_offset: self.offset,
            }
        }

        fn documents(&self) -> Documents<'_> {
            Documents::new(&self.start, &self.end)
        }

        fn forward(&self) -> Vec<f32> {
            let mut out = vec![f32::NAN; self.qkv.len()];
            qk_norm_rope_forward(&self.op(), &self.qkv, self.documents(), &mut out);
            out
        }

        fn backward(&self) -> [Vec<f32>; 3] {
            let mut d_qkv = vec![f32::NAN; self.qkv.len()];
            let (mut dq, mut dk) = (vec![f32::NAN; self.q_weight.len()], vec![f32::NAN; self.q_weight.len()]);
            qk_norm_rope_backward(&self.op(), &self.qkv, self.documents(), &self.d_out, &mut d_qkv, &mut dq, &mut dk);
            [d_qkv, dq, dk]
        }

        /// As Hugging Face writes it: x * cos + rotate_half(x) * sin, angles from the definition.
        fn reference(&self, qkv: &[f64], q_weight: &[f64], k_weight: &[f64]) -> Vec<f64> {
            let [_, seq_len, num_heads, num_kv_heads, d] = self.sizes;
            let heads = num_heads + 2 * num_kv_heads;
            let mut out = Vec::new();
            for (vector, x) in qkv.chunks(d).enumerate() {
                let (token, head) = (vector / heads, vector % heads);
                if head >= num_heads + num_kv_heads {
                    out.extend_from_slice(x);
                    continue;
                }
                let position = token % seq_len - self.start[token] as usize + self.offset;
                let weight = if head < num_heads { q_weight } else { k_weight };
                let mean = x.iter().map(|x| x * x).sum::<f64>() / d as f64;
                let x: Vec<f64> = x.iter().zip(weight).map(|(x, w)| w * x / (mean + 1e-6).sqrt()).collect();
                for c in 0..d {
                    let angle = position as f64 * 10_000_f64.powf(-2.0 * (c % (d / 2)) as f64 / d as f64);
                    let rotated = if c < d / 2 { -x[c + d / 2] } else { x[c - d / 2] };
                    out.push(x[c] * angle.cos() + rotated * angle.sin());
                }
            }
            out
        }
    }

    #[test]
    fn results_equal_the_definition_and_gradients_its_finite_differences() {
        on_every_arch(|| {
            for (sizes, offset, packed) in [
                ([1, 1, 1, 1, 2], 0, false),
                ([2, 3, 4, 2, 6], 5, false),
                ([1, 11, 3, 1, 8], 0, true),
                ([2, 2, 2, 1, 34], 1, true),
            ] {
                let case = Case::new(sizes, offset, packed);
                let (qkv, q_weight, k_weight) = (wide(&case.qkv), wide(&case.q_weight), wide(&case.k_weight));
                let expected = case.reference(&qkv, &q_weight, &k_weight);
                assert_close_relative("out", &case.forward(), &expected, 2e-6);
                let [d_qkv, dq, dk] = case.backward();
                let loss = |qkv: &[f64], q: &[f64], k: &[f64]| inner(&case.reference(qkv, q, k), &case.d_out);
                let check = |what: &str, got: &[f32], x: &[f64], loss: &dyn Fn(&[f64]) -> f64| {
                    assert_close_relative(what, got, &finite_differences(x, loss), 3e-5);
                };
                check("d_qkv", &d_qkv, &qkv, &|x| loss(x, &q_weight, &k_weight));
                check("dq_weight", &dq, &q_weight, &|x| loss(&qkv, x, &k_weight));
                check("dk_weight", &dk, &k_weight, &|x| loss(&qkv, &q_weight, x));
            }
        });
    }

    #[test]
    fn one_token_with_an_offset_equals_its_row() {
        let mut case = Case::new([1, 9, 4, 2, 16], 0, false);
        let whole = case.forward();
        let token = whole.len() / 9;
        let last = case.qkv[8 * token..].to_vec();
        case.qkv = last;
        case.sizes[1] = 1;
        case.offset = 8;
        (case.start, case.end) = (vec![0], vec![1]);
        assert_eq!(case.forward(), whole[8 * token..]);
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let case = Case::new([3, 70, 4, 2, 16], 0, true);
        let one = threads(1).install(|| (case.forward(), case.backward()));
        assert_eq!(threads(3).install(|| (case.forward(), case.backward())), one);
    }

    #[test]
    #[should_panic(expected = "position 9 is outside the tables")]
    fn a_position_past_the_tables_is_refused() {
        let mut case = Case::new([1, 9, 1, 1, 4], 0, false);
        case.offset = 1;
        case.forward();
    }
}
