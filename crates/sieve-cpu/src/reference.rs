//! Attention and its gradients by their definition, query by query in f64. Every fast path is tested against it. With
//! [`Rounding::Bf16`] it rounds as plain bf16 attention does; this rounding error sets the tolerance of kernels.

use crate::attention::{Documents, Mask, ScaledShape};
use crate::simd::on_arch;
use pulp::Simd;
use rayon::prelude::*;
use sieve_core::AttentionShape;

/// Which intermediate results are rounded to bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// No result is rounded: all arithmetic is f64.
    None,
    /// The results of GEMMs, the probabilities and their gradients are rounded to bf16, as in a framework's attention.
    Bf16,
}

impl Rounding {
    /// The number as it is, or rounded to f32 and then to bf16.
    #[inline(always)]
    fn of(self, x: f64) -> f64 {
        match self {
            Self::None => x,
            Self::Bf16 => {
                // bf16 is the upper half of an f32: rounds to nearest, ties to even.
                let bits = (x as f32).to_bits();
                let up = 0x7fff + ((bits >> 16) & 1);
                f64::from(f32::from_bits(bits.wrapping_add(up) & 0xffff_0000))
            }
        }
    }

    #[inline(always)]
    fn all(self, values: &mut [f64]) {
        values.iter_mut().for_each(|x| *x = self.of(*x));
    }
}

/// A key that a query sees.
#[derive(Clone, Copy, Debug)]
pub struct Key<'a, T> {
    /// The key vector, `[head_dim]`.
    pub k: &'a [T],
    /// The value vector, `[head_dim_v]`.
    pub v: &'a [T],
    /// Bias that is added to the logit.
    pub bias: f64,
}

/// Softmax statistics of one query.
#[derive(Clone, Debug, PartialEq)]
pub struct Attended {
    /// Log-sum-exp of the logits, -inf without keys.
    pub lse: f64,
    /// Probability of each key, in the order given; not rounded.
    pub p: Vec<f64>,
}

/// Attention of one query: writes `o = sum p_j v_j`, 0 without keys. As in kernels, the largest bias of the keys is
/// subtracted from all, because next to a large bias `q . k` would lose its digits.
#[inline(always)]
pub fn attend<T: Copy + Into<f64>>(
    q: &[T],
    keys: &[Key<'_, T>],
    scale: f64,
    rounding: Rounding,
    o: &mut [f64],
) -> Attended {
    let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::NEG_INFINITY, f64::max);
    let base = largest(&mut keys.iter().map(|key| key.bias));
    let logit = |key: &Key<'_, T>| scale * rounding.of(dot(q, key.k)) + (key.bias - base);
    let mut p: Vec<f64> = keys.iter().map(logit).collect();
    let max = largest(&mut p.iter().copied());
    p.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f64 = p.iter().sum();
    o.fill(0.0);
    for (p, key) in p.iter_mut().zip(keys) {
        *p /= sum;
        add(o, rounding.of(*p), key.v);
    }
    rounding.all(o);
    let lse = match keys {
        [] => f64::NEG_INFINITY,
        _ => max + sum.ln(),
    };
    Attended { lse, p }
}

/// Dot product `sum a_i b_i`.
#[inline(always)]
pub(crate) fn dot<T: Copy + Into<f64>>(a: &[T], b: &[T]) -> f64 {
    // Eight independent sums, which the compiler vectorises.
    let mut sums = [0.0; 8];
    let ((a8, a_tail), (b8, b_tail)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a8.iter().zip(b8) {
        for (sum, (&a, &b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a.into() * b.into();
        }
    }
    let tail = a_tail.iter().zip(b_tail).map(|(&a, &b)| a.into() * b.into());
    sums.into_iter().chain(tail).sum()
}

/// Adds a multiple of a vector: `to += factor * x`.
#[inline(always)]
fn add<T: Copy + Into<f64>>(to: &mut [f64], factor: f64, x: &[T]) {
    to.iter_mut().zip(x).for_each(|(to, &x)| *to += factor * x.into());
}

/// A tensor `[batch, seq_len, heads, width]`, or consecutive heads of a packed tensor.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a> {
    /// The tensor's elements from the first token's first head on.
    pub values: &'a [f32],
    /// Elements from a token to the next one.
    pub token_len: usize,
    /// Columns of a head.
    pub width: usize,
}

impl<'a> Heads<'a> {
    /// The heads of a tensor that is not packed.
    pub fn new(values: &'a [f32], heads: usize, width: usize) -> Self {
        let token_len = heads * width;
        Self { values, token_len, width }
    }

    fn of_token(&self, token: usize, head: usize) -> impl Iterator<Item = f64> + use<'a> {
        let first = token * self.token_len + head * self.width;
        self.values[first..first + self.width].iter().map(|&x| f64::from(x))
    }
}

/// An attention op and the gradient of its output.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCall<'a> {
    /// Sizes; `head_dim` is the width of q and k.
    pub shape: ScaledShape,
    /// Queries of all tokens, `num_heads` heads of `head_dim`.
    pub q: Heads<'a>,
    /// Keys of all tokens, `num_kv_heads` heads of `head_dim`.
    pub k: Heads<'a>,
    /// Values of all tokens, `num_kv_heads` heads of `head_dim_v`.
    pub v: Heads<'a>,
    /// Gradient of the attention output.
    pub d_o: Heads<'a>,
    /// Document bounds of the batch.
    pub documents: Documents<'a>,
    /// Which keys each query sees, and their biases.
    pub mask: Mask<'a>,
}

/// Output and gradients of an attention call, and the sizes of the terms that they sum.
#[derive(Clone, Debug, Default)]
pub struct Results {
    /// Attention output, `[batch, seq_len, num_heads, head_dim_v]`.
    pub o: Vec<f64>,
    /// Log-sum-exp of each row's logits, `[batch, num_heads, seq_len]`.
    pub lse: Vec<f64>,
    /// Gradient of the queries, `[batch, seq_len, num_heads, head_dim]`.
    pub dq: Vec<f64>,
    /// Gradient of the keys, `[batch, seq_len, num_kv_heads, head_dim]`.
    pub dk: Vec<f64>,
    /// Gradient of the values, `[batch, seq_len, num_kv_heads, head_dim_v]`.
    pub dv: Vec<f64>,
    /// Gradient of the bias, `sum_i dS_ij`, `[batch, num_kv_heads, seq_len]`.
    pub d_delta: Vec<f64>,
    /// `sum_i P_ij (|dP_ij| + |sum_j P_ij dP_ij|)` of each key, `[batch, num_kv_heads, seq_len]`. `d_delta` is the same
    /// sum without absolute values, so its rounding error is proportional to this even where its terms cancel.
    pub d_delta_terms: Vec<f64>,
    /// Magnitudes of the terms that each row of the other results sums.
    pub terms: Terms,
}

/// For each row of a result (one head of one token), the root of the sum of squares of the terms that it sums. If the
/// terms have independent rounding errors, the row's error is proportional to this, even where the terms cancel. The
/// gradient of a score counts with `P_ij (|dP_ij| + |sum_j P_ij dP_ij|)` plus P_ij times the typical size of `do . v`.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// Size of the terms of o, `[batch, seq_len, num_heads]`.
    pub o: Vec<f64>,
    /// Size of the terms of dq, `[batch, seq_len, num_heads]`.
    pub dq: Vec<f64>,
    /// Size of the terms of dk, `[batch, seq_len, num_kv_heads]`.
    pub dk: Vec<f64>,
    /// Size of the terms of dv, `[batch, seq_len, num_kv_heads]`.
    pub dv: Vec<f64>,
}

impl<'a> AttentionCall<'a> {
    /// Attention on a packed tensor `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`.
    pub fn packed(
        shape: ScaledShape,
        qkv: &'a [f32],
        documents: Documents<'a>,
        mask: Mask<'a>,
        d_o: &'a [f32],
    ) -> Self {
        let (width, token_len) = (shape.head_dim, shape.token_len());
        let heads = |first: usize| Heads { values: &qkv[first * width..], token_len, width };
        Self {
            shape,
            q: heads(0),
            k: heads(shape.num_heads),
            v: heads(shape.num_heads + shape.num_kv_heads),
            d_o: Heads::new(d_o, shape.num_heads, width),
            documents,
            mask,
        }
    }

    /// Computes the results, query heads in parallel.
    pub fn run(&self, rounding: Rounding) -> Results {
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, .. } = *self.shape;
        let group_size = self.shape.group_size();
        let heads: Vec<Results> = (0..batch * num_heads)
            .into_par_iter()
            .map(|at| query_head(self, at / num_heads, at % num_heads, rounding))
            .collect();
        let tokens = batch * seq_len;
        let mut all = Results::zeros(self, tokens * num_heads, tokens * num_kv_heads);
        for (at, head) in heads.iter().enumerate() {
            let (row, head_at) = (at / num_heads, at % num_heads);
            spread(&mut all.o, &head.o, row, head_at, num_heads, seq_len);
            spread(&mut all.dq, &head.dq, row, head_at, num_heads, seq_len);
            spread(&mut all.terms.o, &head.terms.o, row, head_at, num_heads, seq_len);
            spread(&mut all.terms.dq, &head.terms.dq, row, head_at, num_heads, seq_len);
            all.lse[at * seq_len..][..seq_len].copy_from_slice(&head.lse);
        }
        for (at, heads) in heads.chunks_exact(group_size).enumerate() {
            let (row, kv_head) = (at / num_kv_heads, at % num_kv_heads);
            // Sums a result over the query heads of the KV head; each head's part and the sum are rounded.
            let sum = |of: fn(&Results) -> &[f64], rounding: Rounding| {
                let mut sum = vec![0.0; of(&heads[0]).len()];
                for head in heads {
                    let mut of_head = of(head).to_vec();
                    rounding.all(&mut of_head);
                    add(&mut sum, 1.0, &of_head);
                }
                rounding.all(&mut sum);
                sum
            };
            let (dk, dv) = (sum(|head| &head.dk, rounding), sum(|head| &head.dv, rounding));
            spread(&mut all.dk, &dk, row, kv_head, num_kv_heads, seq_len);
            spread(&mut all.dv, &dv, row, kv_head, num_kv_heads, seq_len);
            let exact = |of| sum(of, Rounding::None);
            let root = |of| exact(of).into_iter().map(f64::sqrt).collect::<Vec<f64>>();
            let (dk, dv) = (root(|head| &head.terms.dk), root(|head| &head.terms.dv));
            spread(&mut all.terms.dk, &dk, row, kv_head, num_kv_heads, seq_len);
            spread(&mut all.terms.dv, &dv, row, kv_head, num_kv_heads, seq_len);
            let of_keys = at * seq_len..(at + 1) * seq_len;
            all.d_delta[of_keys.clone()].copy_from_slice(&exact(|head| &head.d_delta));
            all.d_delta_terms[of_keys].copy_from_slice(&exact(|head| &head.d_delta_terms));
        }
        all
    }

    /// The bias of key j for query i; `None` where the query does not see the key.
    fn bias(&self, row: usize, kv_head: usize, i: usize, j: usize) -> Option<f64> {
        let AttentionShape { seq_len, num_kv_heads, .. } = *self.shape;
        let first = self.documents.start[row * seq_len + i] as usize;
        if j > i || j < first {
            return None;
        }
        let at = (row * num_kv_heads + kv_head) * seq_len + j;
        match self.mask {
            Mask::Causal => Some(0.0),
            Mask::Window(window_size) => (j + window_size > i).then_some(0.0),
            Mask::Far(window_size, far) => {
                let is_far = j - first < far.sink_tokens || far.band(kv_head).contains(&(i - j));
                (j + window_size > i || is_far).then_some(0.0)
            }
            Mask::Expire { expire, delta } => ((i as i32) < expire[at]).then(|| f64::from(delta[at])),
            Mask::Chosen(chosen) => {
                let block = ((j - first) / chosen.block_size) as i32;
                let blocks = chosen.of(row * seq_len + i, num_kv_heads, kv_head);
                blocks.contains(&block).then_some(0.0)
            }
        }
    }
}

/// Copies one head's `[seq_len, width]` into `[batch, seq_len, heads, width]`.
fn spread(to: &mut [f64], from: &[f64], row: usize, head: usize, heads: usize, seq_len: usize) {
    let width = from.len() / seq_len;
    for (i, from) in from.chunks_exact(width).enumerate() {
        let first = ((row * seq_len + i) * heads + head) * width;
        to[first..first + width].copy_from_slice(from);
    }
}

impl Results {
    /// Zeros for so many query vectors and key vectors.
    fn zeros(call: &AttentionCall<'_>, queries: usize, keys: usize) -> Self {
        Self {
            o: vec![0.0; queries * call.v.width],
            lse: vec![0.0; queries],
            dq: vec![0.0; queries * call.q.width],
            dk: vec![0.0; keys * call.k.width],
            dv: vec![0.0; keys * call.v.width],
            d_delta: vec![0.0; keys],
            d_delta_terms: vec![0.0; keys],
            terms: Terms { o: vec![0.0; queries], dq: vec![0.0; queries], dk: vec![0.0; keys], dv: vec![0.0; keys] },
        }
    }
}

on_arch! {
    /// The results of one query head, one row per token. dk and dv are not rounded; `terms.dk` and `terms.dv` are still
    /// sums of squares, before the root.
    fn query_head<'a>(
        call: &'a AttentionCall<'a>,
        row: usize,
        head: usize,
        rounding: Rounding,
    ) -> Results = query_head_on;
}

/// Adds dk, dv and d_delta up over the queries.
#[inline(always)]
fn query_head_on<S: Simd>(_simd: S, call: &AttentionCall<'_>, row: usize, head: usize, rounding: Rounding) -> Results {
    let (n, kv_head) = (call.shape.seq_len, head / call.shape.group_size());
    let (width_k, width_v) = (call.k.width, call.v.width);
    let scale = f64::from(call.shape.softmax_scale);
    let [k, v] = [call.k, call.v].map(|x| -> Vec<f64> {
        let tokens = row * n..(row + 1) * n;
        tokens.flat_map(|token| x.of_token(token, kv_head)).collect()
    });
    let mut all = Results::zeros(call, n, n);
    let of_squares = |x: &[f64]| dot(x, x);
    let squares_k: Vec<f64> = k.chunks_exact(width_k).map(of_squares).collect();
    let squares_v: Vec<f64> = v.chunks_exact(width_v).map(of_squares).collect();
    for i in 0..n {
        let [q, d_o] = [call.q, call.d_o].map(|x| x.of_token(row * n + i, head).collect::<Vec<f64>>());
        let (square_q, square_do) = (of_squares(&q), of_squares(&d_o));
        let key = |j: usize| {
            let (k, v) = (&k[j * width_k..][..width_k], &v[j * width_v..][..width_v]);
            let bias = call.bias(row, kv_head, i, j)?;
            Some((j, Key { k, v, bias }))
        };
        let first = call.documents.start[row * n + i] as usize;
        let (seen, keys): (Vec<usize>, Vec<Key<'_, f64>>) = (first..=i).filter_map(key).unzip();
        let o = &mut all.o[i * width_v..][..width_v];
        let Attended { lse, p } = attend(&q, &keys, scale, rounding, o);
        all.lse[i] = lse;
        let dp: Vec<f64> = keys.iter().map(|key| rounding.of(dot(&d_o, key.v))).collect();
        let mean = dot(&p, &dp);
        let dq = &mut all.dq[i * width_k..][..width_k];
        let (mut terms_o, mut terms_dq) = (0.0, 0.0);
        for ((&j, key), (&p, &dp)) in seen.iter().zip(&keys).zip(p.iter().zip(&dp)) {
            let ds = p * (dp - mean);
            all.d_delta[j] += ds;
            all.d_delta_terms[j] += p * (dp.abs() + mean.abs());
            // The typical size of `do . v`: where dp is smaller because its terms cancel, its rounding error is not.
            let usual = (square_do * squares_v[j] / width_v as f64).sqrt();
            let size = (scale * p * (dp.abs() + mean.abs() + usual)).powi(2);
            terms_o += p * p * squares_v[j];
            terms_dq += size * squares_k[j];
            all.terms.dk[j] += size * square_q;
            all.terms.dv[j] += p * p * square_do;
            let ds = rounding.of(scale * ds);
            add(dq, ds, key.k);
            add(&mut all.dk[j * width_k..][..width_k], ds, &q);
            add(&mut all.dv[j * width_v..][..width_v], rounding.of(p), &d_o);
        }
        rounding.all(dq);
        (all.terms.o[i], all.terms.dq[i]) = (f64::sqrt(terms_o), f64::sqrt(terms_dq));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::{Random, round_bf16, whole_rows};

    fn run(mask: Mask<'_>, rounding: Rounding) -> Results {
        let shape = ScaledShape::new([2, 9], [2, 1], 16);
        let mut random = Random(4);
        let qkv = random.bf16_normals(2 * 9 * 4 * 16);
        let d_o = random.bf16_normals(2 * 9 * 2 * 16);
        let (start, end) = whole_rows(2, 9);
        let documents = Documents::new(&start, &end);
        AttentionCall::packed(shape, &qkv, documents, mask, &d_o).run(rounding)
    }

    #[test]
    fn rounding_is_that_of_bf16() {
        let mut random = Random(1);
        let half = 1.0 / 256.0;
        // Halfway between two bf16 numbers: the even one is taken.
        let halves = [1.0 + half, -1.0 - 3.0 * half, 0.0, f32::INFINITY];
        let drawn: Vec<f32> = (0..1000).map(|_| random.normal_with_tails()).collect();
        for x in halves.into_iter().chain(drawn) {
            let got = Rounding::Bf16.of(f64::from(x));
            assert_eq!(got, f64::from(round_bf16(x)), "{x}");
        }
    }

    #[test]
    fn a_single_key_has_no_gradient_of_its_bias() {
        // Each key expires at the next query, so each query sees only its own key.
        let expire: Vec<i32> = (0..18).map(|at| at % 9 + 1).collect();
        let delta = Random(5).vector(18);
        let mask = Mask::Expire { expire: &expire, delta: &delta };
        let got = run(mask, Rounding::None);
        let largest = |x: &[f64]| x.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let (gradient, terms) = (largest(&got.d_delta), largest(&got.d_delta_terms));
        assert!(gradient <= 1e-12 * terms, "{gradient} of {terms}");
        assert!(terms > 1.0);
    }

    #[test]
    fn results_rounded_to_bf16_have_an_error_of_its_size() {
        let [exact, plain] = [Rounding::None, Rounding::Bf16].map(|r| run(Mask::Causal, r));
        let error = |of: fn(&Results) -> &[f64]| {
            let pairs = of(&exact).iter().zip(of(&plain));
            pairs.fold(0.0f64, |m, (a, b)| m.max((a - b).abs()))
        };
        for error in [error(|r| &r.o), error(|r| &r.dq), error(|r| &r.dv)] {
            assert!(error > 1e-4 && error < 3e-2, "{error}");
        }
    }
}
