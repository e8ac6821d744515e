//! Attention and its gradients as full matrices on the host: the definition that kernels are measured against, and the
//! same with every intermediate matrix rounded to bf16, which is the error that a plain computation would make.
use crate::case::Case;
use crate::outputs::Outputs;
use crate::shape::sizes;
use rayon::prelude::*;
use sieve_cpu::{Matrix, MatrixMut, Threads, matmul};
use sieve_testing::round_bf16;

/// What is rounded on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// Nothing: all in f32.
    None,
    /// Each product's result, the probabilities and their gradient, as a framework's bf16 attention does.
    Bf16,
}

impl Rounding {
    fn all(self, values: &mut [f32]) {
        if self == Self::Bf16 {
            values.iter_mut().for_each(|x| *x = round_bf16(*x));
        }
    }
}

/// Results, and the size of what cancels in them.
pub(crate) struct Reference {
    pub(crate) outputs: Outputs,
    /// Largest `sum_i P_ij (|dP_ij| + |sum_j P_ij dP_ij|)` of any key: `ddelta` is the same sum without the bars, so
    /// its rounding error is proportional to this, even where it is 0.
    pub(crate) ddelta_terms: f32,
}

/// One KV head's part of the results; gradients of its query heads side by side.
struct Part {
    /// For each query head of the group: o `[seq_len, head_dim_v]`, lse `[seq_len]`, dq `[seq_len, head_dim]`.
    heads: Vec<[Vec<f32>; 3]>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    ddelta: Vec<f32>,
    terms: Vec<f32>,
}

/// Computes everything for a case.
pub(crate) fn attention(case: &Case, rounding: Rounding) -> Reference {
    let [batch, seq_len, num_heads, num_kv_heads, head_dim, head_dim_v] = sizes(case.shape);
    let parts: Vec<Part> = (0..batch * num_kv_heads)
        .into_par_iter()
        .map(|row| kv_head(case, row / num_kv_heads, row % num_kv_heads, rounding))
        .collect();
    let mut all = Outputs::zeros(case.shape);
    let group = case.shape.group_size();
    let mut ddelta_terms = 0.0f32;
    for (row, part) in parts.into_iter().enumerate() {
        let (b, kv) = (row / num_kv_heads, row % num_kv_heads);
        for (at, [o, lse, dq]) in part.heads.into_iter().enumerate() {
            let head = kv * group + at;
            put(&mut all.o, &o, b * seq_len, num_heads, head, head_dim_v);
            put(&mut all.dq, &dq, b * seq_len, num_heads, head, head_dim);
            all.lse[(b * num_heads + head) * seq_len..][..seq_len].copy_from_slice(&lse);
        }
        put(&mut all.dk, &part.dk, b * seq_len, num_kv_heads, kv, head_dim);
        put(&mut all.dv, &part.dv, b * seq_len, num_kv_heads, kv, head_dim_v);
        all.ddelta[row * seq_len..][..seq_len].copy_from_slice(&part.ddelta);
        ddelta_terms = part.terms.into_iter().fold(ddelta_terms, f32::max);
    }
    if !case.has_bias() {
        all.ddelta.clear();
    }
    all.expire.clone_from(&case.expire);
    Reference {
        outputs: all,
        ddelta_terms,
    }
}

/// One query over the keys given, each with a bias: `k` `[keys, head_dim]`, `v` `[keys, head_dim_v]`.
pub(crate) fn one_query(q: &[f32], k: &[f32], v: &[f32], delta: &[f32], scale: f32, rounding: Rounding) -> Vec<f32> {
    let (n, head_dim, head_dim_v) = (delta.len(), q.len(), v.len() / delta.len());
    let (q, k) = (Matrix::new(q, 1, head_dim), Matrix::new(k, n, head_dim));
    let mut p = product(q, k.t(), 1, n, rounding);
    softmax(&mut p, n, n - 1, scale, Some(delta), &vec![n as i32; n]);
    rounding.all(&mut p);
    let v = Matrix::new(v, n, head_dim_v);
    product(Matrix::new(&p, 1, n), v, 1, head_dim_v, rounding)
}

/// Writes one head's rows into a `[tokens, heads, width]` tensor.
fn put(to: &mut [f32], rows: &[f32], first_token: usize, heads: usize, head: usize, width: usize) {
    for (i, row) in rows.chunks_exact(width).enumerate() {
        let at = ((first_token + i) * heads + head) * width;
        to[at..at + width].copy_from_slice(row);
    }
}

/// One head of a `[batch, seq_len, heads, width]` tensor as a matrix `[seq_len, width]`.
fn head(x: &[f32], b: usize, seq_len: usize, heads: usize, head: usize, width: usize) -> Matrix<'_> {
    let first = (b * seq_len * heads + head) * width;
    Matrix::strided(&x[first..], seq_len, width, heads * width, 1)
}

/// `factor * a b`, rounded; `[rows, cols]`.
fn product(a: Matrix<'_>, b: Matrix<'_>, rows: usize, cols: usize, rounding: Rounding) -> Vec<f32> {
    let mut c = vec![0.0; rows * cols];
    matmul(Threads::One, 1.0, a, b, 0.0, MatrixMut::new(&mut c, rows, cols));
    rounding.all(&mut c);
    c
}

fn kv_head(case: &Case, b: usize, kv: usize, rounding: Rounding) -> Part {
    let [_, n, num_heads, num_kv_heads, head_dim, head_dim_v] = sizes(case.shape);
    let k = head(&case.k, b, n, num_kv_heads, kv, head_dim);
    let v = head(&case.v, b, n, num_kv_heads, kv, head_dim_v);
    let per_key = (b * num_kv_heads + kv) * n;
    let expire = &case.expire[per_key..][..n];
    let delta = case.has_bias().then(|| &case.delta[per_key..][..n]);
    let group = case.shape.group_size();
    let mut part = Part {
        heads: Vec::new(),
        dk: vec![0.0; n * head_dim],
        dv: vec![0.0; n * head_dim_v],
        ddelta: vec![0.0; n],
        terms: vec![0.0; n],
    };
    for at in 0..group {
        let query = kv * group + at;
        let q = head(&case.q, b, n, num_heads, query, head_dim);
        let d_o = head(&case.d_o, b, n, num_heads, query, head_dim_v);
        // Logits become exact probabilities in place.
        let mut p = product(q, k.t(), n, n, rounding);
        let lse = softmax(&mut p, n, 0, case.scale, delta, expire);
        let mut rounded = p.clone();
        rounding.all(&mut rounded);
        let weights = Matrix::new(&rounded, n, n);
        let o = product(weights, v, n, head_dim_v, rounding);
        let dv = product(weights.t(), d_o, n, head_dim_v, rounding);
        let mut ds = product(d_o, v.t(), n, n, rounding);
        for (i, (ds, p)) in ds.chunks_exact_mut(n).zip(p.chunks_exact(n)).enumerate() {
            let mean: f32 = ds[..=i].iter().zip(p).map(|(ds, p)| ds * p).sum();
            for (j, (ds, &p)) in ds.iter_mut().zip(p).enumerate() {
                if p == 0.0 {
                    *ds = 0.0;
                    continue;
                }
                part.terms[j] += p * (ds.abs() + mean.abs());
                *ds = p * (*ds - mean);
                part.ddelta[j] += *ds;
                *ds *= case.scale;
            }
        }
        rounding.all(&mut ds);
        let ds = Matrix::new(&ds, n, n);
        let dq = product(ds, k, n, head_dim, rounding);
        let dk = product(ds.t(), q, n, head_dim, rounding);
        add(&mut part.dk, &dk);
        add(&mut part.dv, &dv);
        part.heads.push([o, lse, dq]);
    }
    rounding.all(&mut part.dk);
    rounding.all(&mut part.dv);
    part
}

/// Softmax of each row, the first of which is that of query `first`, over its active keys; returns the logarithm of
/// each row's sum. The largest bias that a row sees is taken from all of its biases first, as kernels do: beside a
/// large one `q . k` would lose its digits.
fn softmax(p: &mut [f32], n: usize, first: usize, scale: f32, delta: Option<&[f32]>, expire: &[i32]) -> Vec<f32> {
    let mut lse = vec![f32::NEG_INFINITY; p.len() / n];
    for (row, (p, lse)) in p.chunks_exact_mut(n).zip(&mut lse).enumerate() {
        let (i, row) = (first + row, p);
        let active = |j: usize| j <= i && (i as i32) < expire[j];
        let base = delta.map_or(0.0, |delta| {
            let seen = (0..=i).filter(|&j| active(j)).map(|j| delta[j]);
            seen.fold(f32::NEG_INFINITY, f32::max)
        });
        let mut maximum = f32::NEG_INFINITY;
        for (j, p) in row.iter_mut().enumerate() {
            *p = if active(j) {
                *p * scale + delta.map_or(0.0, |delta| delta[j] - base)
            } else {
                f32::NEG_INFINITY
            };
            maximum = maximum.max(*p);
        }
        if maximum == f32::NEG_INFINITY {
            row.fill(0.0);
            continue;
        }
        let total: f64 = row.iter().map(|&s| f64::from((s - maximum).exp())).sum();
        *lse = maximum + total.ln() as f32;
        row.iter_mut()
            .for_each(|p| *p = (f64::from((*p - maximum).exp()) / total) as f32);
    }
    lse
}

fn add(to: &mut [f32], values: &[f32]) {
    to.iter_mut().zip(values).for_each(|(to, x)| *to += x);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Cuts, Keys};
    use crate::scores::Scores;
    use crate::shape::attention_shape;

    fn case(keys: Keys) -> Case {
        let shape = attention_shape(2, 9, [2, 1], [16, 16]);
        Case::draw(shape, keys, Cuts::Count(2), &Scores::Independent, 4).expect("two documents")
    }

    /// `sum(o * d_o)` of a case: the loss whose gradients the reference claims.
    fn loss(case: &Case) -> f64 {
        let o = attention(case, Rounding::None).outputs.o;
        o.iter()
            .zip(&case.d_o)
            .map(|(&o, &g)| f64::from(o) * f64::from(g))
            .sum()
    }

    #[test]
    fn gradients_are_the_slopes_of_the_loss() {
        let case = case(Keys::chosen(3));
        let gradients = attention(&case, Rounding::None).outputs;
        type Field = fn(&mut Case) -> &mut Vec<f32>;
        let fields: [(&str, Field, &[f32]); 4] = [
            ("q", |c| &mut c.q, &gradients.dq),
            ("k", |c| &mut c.k, &gradients.dk),
            ("v", |c| &mut c.v, &gradients.dv),
            ("delta", |c| &mut c.delta, &gradients.ddelta),
        ];
        for (name, field, gradient) in fields {
            for at in (0..gradient.len()).step_by(gradient.len() / 7 + 1) {
                const STEP: f32 = 1e-2;
                let shifted = |by: f32| {
                    let mut case = case.clone();
                    field(&mut case)[at] += by;
                    loss(&case)
                };
                let slope = (shifted(STEP) - shifted(-STEP)) / f64::from(2.0 * STEP);
                let gap = (slope - f64::from(gradient[at])).abs();
                assert!(gap < 5e-3, "d{name}[{at}]: {slope} and {}", gradient[at]);
            }
        }
    }

    #[test]
    fn a_single_key_has_no_gradient_of_its_bias() {
        let reference = attention(&case(Keys::chosen(1)), Rounding::None);
        let largest = reference.outputs.ddelta.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        assert!(largest <= 1e-6 * reference.ddelta_terms, "{largest}");
        assert!(reference.ddelta_terms > 1.0);
    }

    #[test]
    fn rounding_costs_what_bf16_costs() {
        let case = case(Keys::Dense);
        let exact = attention(&case, Rounding::None).outputs;
        let plain = attention(&case, Rounding::Bf16).outputs;
        let gap = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        let error = gap(&exact.o, &plain.o);
        assert!(error > 1e-4 && error < 3e-2, "{error}");
        assert!(exact.ddelta.is_empty(), "no bias, no gradient of it");
    }
}
