//! Per-head RMSNorm of q and k, then rotary positions, on the packed output of the qkv projection.
//!
//! Rotate-half form, as Hugging Face's Qwen3: `rope(x) = x * cos + cat(-x2, x1) * sin` with x1, x2 the halves of a
//! head.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use crate::simd::arch;

use crate::attention::Documents;
use crate::rms_norm::{add_partials, norm_row_backward, reciprocal_rms};

/// Tokens one task handles; also the tokens one partial weight gradient covers, so it fixes the order of that sum.
const TOKENS: usize = 32;

/// Sizes and weights of the op.
#[derive(Clone, Copy, Debug)]
pub struct QkNormRope<'a> {
    /// Rows of the batch.
    pub batch: usize,
    /// Tokens per row.
    pub seq_len: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of a head, even.
    pub head_dim: usize,
    /// Norm weight of the queries, `[head_dim]`; not read by [`rope`].
    pub q_weight: &'a [f32],
    /// Norm weight of the keys, `[head_dim]`; not read by [`rope`].
    pub k_weight: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
    /// Cosines, `[max_positions, head_dim / 2]`.
    pub cos: &'a [f32],
    /// Sines, `[max_positions, head_dim / 2]`.
    pub sin: &'a [f32],
    /// Added to every position; when decoding, the number of tokens before these.
    pub position_offset: usize,
}

impl QkNormRope<'_> {
    fn heads(&self) -> usize {
        self.num_heads + 2 * self.num_kv_heads
    }

    fn token_len(&self) -> usize {
        self.heads() * self.head_dim
    }

    fn check(&self, documents: Documents<'_>) {
        let tokens = self.batch * self.seq_len;
        assert!(
            self.head_dim > 0 && self.head_dim.is_multiple_of(2),
            "qk_norm_rope: head_dim must be even"
        );
        assert_eq!(
            self.cos.len(),
            self.sin.len(),
            "qk_norm_rope: cos and sin differ in length"
        );
        assert_eq!(
            documents.start.len(),
            tokens,
            "qk_norm_rope: documents.start is not [batch, seq_len]"
        );
    }

    fn check_weights(&self) {
        for (name, weight) in [("q_weight", self.q_weight), ("k_weight", self.k_weight)] {
            assert_eq!(weight.len(), self.head_dim, "qk_norm_rope: {name} is not [head_dim]");
        }
    }

    /// Cosines and sines of one token: position inside its document plus the offset.
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
    op.check(documents);
    op.check_weights();
    let token_len = op.token_len();
    assert_eq!(
        qkv.len(),
        op.batch * op.seq_len * token_len,
        "qk_norm_rope_forward: qkv has another size"
    );
    assert_eq!(out.len(), qkv.len(), "qk_norm_rope_forward: out is not as long as qkv");
    let tasks = out
        .par_chunks_mut(TOKENS * token_len)
        .zip(qkv.par_chunks(TOKENS * token_len))
        .enumerate();
    tasks.for_each(|(task, (out, qkv))| {
        arch().dispatch(Forward {
            op,
            documents,
            first: task * TOKENS,
            qkv,
            out,
        });
    });
}

/// Rotates q and k without norms, copies v; otherwise as [`qk_norm_rope_forward`]. With negated sines it is its own
/// gradient.
///
/// # Panics
/// When lengths do not fit or a position is outside the tables.
pub fn rope(op: &QkNormRope<'_>, qkv: &[f32], documents: Documents<'_>, out: &mut [f32]) {
    op.check(documents);
    let (token_len, head_dim) = (op.token_len(), op.head_dim);
    assert_eq!(
        qkv.len(),
        op.batch * op.seq_len * token_len,
        "rope: qkv has another size"
    );
    assert_eq!(out.len(), qkv.len(), "rope: out is not as long as qkv");
    let rotated = (op.num_heads + op.num_kv_heads) * head_dim;
    let tokens = out.par_chunks_mut(token_len).zip(qkv.par_chunks(token_len)).enumerate();
    tokens.with_min_len(TOKENS).for_each(|(token, (out, x))| {
        let (cos, sin) = op.angles(documents, token);
        let heads = out[..rotated].chunks_exact_mut(head_dim).zip(x.chunks_exact(head_dim));
        for (out, x) in heads {
            rotate(x, cos, sin, out);
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
    op.check(documents);
    op.check_weights();
    let (token_len, head_dim) = (op.token_len(), op.head_dim);
    assert_eq!(
        qkv.len(),
        op.batch * op.seq_len * token_len,
        "qk_norm_rope_backward: qkv has another size"
    );
    assert_eq!(
        (d_out.len(), d_qkv.len()),
        (qkv.len(), qkv.len()),
        "qk_norm_rope_backward: gradients have other sizes"
    );
    assert_eq!(
        d_q_weight.len(),
        head_dim,
        "qk_norm_rope_backward: d_q_weight is not [head_dim]"
    );
    assert_eq!(
        d_k_weight.len(),
        head_dim,
        "qk_norm_rope_backward: d_k_weight is not [head_dim]"
    );
    let tasks = d_qkv
        .par_chunks_mut(TOKENS * token_len)
        .zip(qkv.par_chunks(TOKENS * token_len))
        .zip(d_out.par_chunks(TOKENS * token_len))
        .enumerate();
    let (q_partial, k_partial): (Vec<Vec<f32>>, Vec<Vec<f32>>) = tasks
        .map(|(task, ((d_qkv, qkv), d_out))| {
            let mut d_q_weight = vec![0.0; head_dim];
            let mut d_k_weight = vec![0.0; head_dim];
            let (d_q, d_k) = (d_q_weight.as_mut_slice(), d_k_weight.as_mut_slice());
            let first = task * TOKENS;
            arch().dispatch(Backward {
                op,
                documents,
                first,
                qkv,
                d_out,
                d_qkv,
                d_q_weight: d_q,
                d_k_weight: d_k,
            });
            (d_q_weight, d_k_weight)
        })
        .unzip();
    add_partials(&q_partial, d_q_weight);
    add_partials(&k_partial, d_k_weight);
}

/// Some tokens of the forward pass, `first` of the batch and those after it.
struct Forward<'a> {
    op: &'a QkNormRope<'a>,
    documents: Documents<'a>,
    first: usize,
    qkv: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.op.head_dim {
            32 => self.run::<S, 32>(simd),
            64 => self.run::<S, 64>(simd),
            128 => self.run::<S, 128>(simd),
            _ => self.run::<S, 0>(simd),
        }
    }
}

impl Forward<'_> {
    /// With the head_dim known to the compiler, or 0: loops over a few vectors are then straight code.
    #[inline(always)]
    fn run<S: Simd, const HEAD_DIM: usize>(self, simd: S) {
        let Self {
            op,
            documents,
            first,
            qkv,
            out,
        } = self;
        let head_dim = if HEAD_DIM == 0 { op.head_dim } else { HEAD_DIM };
        let token_len = op.token_len();
        let (q_len, k_len) = (op.num_heads * head_dim, op.num_kv_heads * head_dim);
        for (t, (out, qkv)) in out
            .chunks_exact_mut(token_len)
            .zip(qkv.chunks_exact(token_len))
            .enumerate()
        {
            let (cos, sin) = op.angles(documents, first + t);
            let ((q, kv), (q_out, kv_out)) = (qkv.split_at(q_len), out.split_at_mut(q_len));
            let ((k, v), (k_out, v_out)) = (kv.split_at(k_len), kv_out.split_at_mut(k_len));
            for (out, x) in q_out.chunks_exact_mut(head_dim).zip(q.chunks_exact(head_dim)) {
                norm_and_rotate(simd, x, op.q_weight, op.eps, cos, sin, out);
            }
            for (out, x) in k_out.chunks_exact_mut(head_dim).zip(k.chunks_exact(head_dim)) {
                norm_and_rotate(simd, x, op.k_weight, op.eps, cos, sin, out);
            }
            v_out.copy_from_slice(v);
        }
    }
}

/// Some tokens of the backward pass; adds to the weight gradients.
struct Backward<'a> {
    op: &'a QkNormRope<'a>,
    documents: Documents<'a>,
    first: usize,
    qkv: &'a [f32],
    d_out: &'a [f32],
    d_qkv: &'a mut [f32],
    d_q_weight: &'a mut [f32],
    d_k_weight: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.op.head_dim {
            32 => self.run::<S, 32>(simd),
            64 => self.run::<S, 64>(simd),
            128 => self.run::<S, 128>(simd),
            _ => self.run::<S, 0>(simd),
        }
    }
}

impl Backward<'_> {
    /// With the head_dim known to the compiler, or 0.
    #[inline(always)]
    fn run<S: Simd, const HEAD_DIM: usize>(self, simd: S) {
        let Self {
            op,
            documents,
            first,
            qkv,
            d_out,
            d_qkv,
            d_q_weight,
            d_k_weight,
        } = self;
        let head_dim = if HEAD_DIM == 0 { op.head_dim } else { HEAD_DIM };
        let token_len = op.token_len();
        let (q_len, k_len) = (op.num_heads * head_dim, op.num_kv_heads * head_dim);
        let mut d_norm = vec![0.0; head_dim];
        let tokens = d_qkv.chunks_exact_mut(token_len).zip(qkv.chunks_exact(token_len));
        for (t, ((d_qkv, qkv), d_out)) in tokens.zip(d_out.chunks_exact(token_len)).enumerate() {
            let (cos, sin) = op.angles(documents, first + t);
            let (dq, dkv) = d_qkv.split_at_mut(q_len);
            let (dk, dv) = dkv.split_at_mut(k_len);
            let heads = dq.chunks_exact_mut(head_dim).zip(qkv.chunks_exact(head_dim));
            for ((dx, x), dy) in heads.zip(d_out.chunks_exact(head_dim)) {
                rotate_back(dy, cos, sin, &mut d_norm[..head_dim]);
                norm_row_backward(simd, x, op.q_weight, op.eps, &d_norm, dx, d_q_weight);
            }
            let heads = dk.chunks_exact_mut(head_dim).zip(qkv[q_len..].chunks_exact(head_dim));
            for ((dx, x), dy) in heads.zip(d_out[q_len..].chunks_exact(head_dim)) {
                rotate_back(dy, cos, sin, &mut d_norm[..head_dim]);
                norm_row_backward(simd, x, op.k_weight, op.eps, &d_norm, dx, d_k_weight);
            }
            dv.copy_from_slice(&d_out[q_len + k_len..]);
        }
    }
}

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

#[inline(always)]
fn rotate(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
    let half = x.len() / 2;
    let (cos, sin) = (&cos[..half], &sin[..half]);
    let (x1, x2) = x.split_at(half);
    let (out1, out2) = out.split_at_mut(half);
    let columns = x1.iter().zip(x2).zip(cos.iter().zip(sin));
    for ((out1, out2), ((&x1, &x2), (&c, &s))) in out1.iter_mut().zip(out2).zip(columns) {
        *out1 = x1 * c - x2 * s;
        *out2 = x2 * c + x1 * s;
    }
}

#[inline(always)]
fn rotate_back(dy: &[f32], cos: &[f32], sin: &[f32], dx: &mut [f32]) {
    let half = dy.len() / 2;
    let (cos, sin) = (&cos[..half], &sin[..half]);
    let (dy1, dy2) = dy.split_at(half);
    let (dx1, dx2) = dx.split_at_mut(half);
    let columns = dy1.iter().zip(dy2).zip(cos.iter().zip(sin));
    for ((dx1, dx2), ((&dy1, &dy2), (&c, &s))) in dx1.iter_mut().zip(dx2).zip(columns) {
        *dx1 = dy1 * c + dy2 * s;
        *dx2 = dy2 * c - dy1 * s;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, finite_differences, inner, threads, whole_rows, wide};

    struct Case {
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
        fn new(sizes: [usize; 5], offset: usize, packed: bool) -> Self {
            let [batch, seq_len, num_heads, num_kv_heads, head_dim] = sizes;
            let mut random = Random(head_dim as u64);
            let (start, end) = if packed {
                random.documents(batch, seq_len)
            } else {
                whole_rows(batch, seq_len)
            };
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
            qk_norm_rope_backward(
                &self.op(),
                &self.qkv,
                self.documents(),
                &self.d_out,
                &mut d_qkv,
                &mut dq,
                &mut dk,
            );
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
                let x: Vec<f64> = x
                    .iter()
                    .zip(weight)
                    .map(|(x, w)| w * x / (mean + 1e-6).sqrt())
                    .collect();
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
    fn equals_the_definition_and_its_differences() {
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
