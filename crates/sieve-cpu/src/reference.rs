//! Attention and its gradients by their definition, query by query in f64: what every fast path is tested against. With
//! [`Rounding::Bf16`] it is a plain computation in bf16, whose error is what a kernel may have.

use crate::attention::{AttentionShape, Documents, Mask};
use crate::simd::on_arch;
use pulp::Simd;
use rayon::prelude::*;

/// What is rounded on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// Nothing.
    None,
    /// Each product's result, the probabilities and their gradient, as a framework's bf16 attention does.
    Bf16,
}

impl Rounding {
    #[inline(always)]
    fn of(self, x: f64) -> f64 {
        match self {
            Self::None => x,
            Self::Bf16 => {
                // The upper half of an f32, to the nearest, ties to even.
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
    /// `[head_dim]`.
    pub k: &'a [T],
    /// `[head_dim_v]`.
    pub v: &'a [T],
    /// Added to the logit.
    pub bias: f64,
}

/// What a query makes of its keys, beside its output.
#[derive(Clone, Debug, PartialEq)]
pub struct Attended {
    /// Log-sum-exp of the logits, -inf without keys.
    pub lse: f64,
    /// Probability of each key, in the order given; not rounded.
    pub p: Vec<f64>,
}

/// Attention of one query: `o = sum p_j v_j`, 0 without keys. Biases count from the largest among the keys, as in
/// kernels: beside a large one `q . k` would lose its digits.
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

/// `sum a_i b_i`.
#[inline(always)]
fn dot<T: Copy + Into<f64>>(a: &[T], b: &[T]) -> f64 {
    // Eight sums, for the compiler to add side by side.
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

/// `to += factor * x`.
#[inline(always)]
fn add<T: Copy + Into<f64>>(to: &mut [f64], factor: f64, x: &[T]) {
    to.iter_mut().zip(x).for_each(|(to, &x)| *to += factor * x.into());
}

/// A tensor `[batch, seq_len, heads, width]`, or the part of a packed one that begins with its first head.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a> {
    /// From the first token's first head on.
    pub values: &'a [f32],
    /// Elements from a token to the next one.
    pub token_len: usize,
    /// Width of a head.
    pub width: usize,
}

impl<'a> Heads<'a> {
    /// The heads of a tensor that holds nothing else.
    pub fn new(values: &'a [f32], heads: usize, width: usize) -> Self {
        let token_len = heads * width;
        Self {
            values,
            token_len,
            width,
        }
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
    pub shape: AttentionShape,
    /// Queries.
    pub q: Heads<'a>,
    /// Keys.
    pub k: Heads<'a>,
    /// Values.
    pub v: Heads<'a>,
    /// Gradient of the output.
    pub d_o: Heads<'a>,
    /// Documents that no query looks beyond.
    pub documents: Documents<'a>,
    /// Which keys a query sees, and with what bias.
    pub mask: Mask<'a>,
}

/// Output and gradients.
#[derive(Clone, Debug, Default)]
pub struct Results {
    /// `[batch, seq_len, num_heads, head_dim_v]`.
    pub o: Vec<f64>,
    /// `[batch, num_heads, seq_len]`.
    pub lse: Vec<f64>,
    /// Like q.
    pub dq: Vec<f64>,
    /// Like k.
    pub dk: Vec<f64>,
    /// Like v.
    pub dv: Vec<f64>,
    /// Gradient of the bias, `sum_i dS_ij`, `[batch, num_kv_heads, seq_len]`.
    pub d_delta: Vec<f64>,
    /// `sum_i P_ij (|dP_ij| + |sum_j P_ij dP_ij|)` of each key: the rounding error of `d_delta`, which is the same sum
    /// without the bars, is proportional to this, even where `d_delta` is 0.
    pub d_delta_terms: Vec<f64>,
}

impl<'a> AttentionCall<'a> {
    /// Attention on a packed tensor `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`.
    #[cfg(test)]
    pub(crate) fn packed(
        shape: AttentionShape,
        qkv: &'a [f32],
        documents: Documents<'a>,
        mask: Mask<'a>,
        d_o: &'a [f32],
    ) -> Self {
        let (width, token_len) = (shape.head_dim, shape.token_len());
        let heads = |first: usize| Heads {
            values: &qkv[first * width..],
            token_len,
            width,
        };
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
    /// Computes everything, KV heads side by side on all threads.
    pub fn run(&self, rounding: Rounding) -> Results {
        let AttentionShape {
            batch,
            seq_len,
            num_kv_heads,
            ..
        } = self.shape;
        let mut all = Results::zeros(self, batch * num_kv_heads);
        (0..batch * num_kv_heads)
            .into_par_iter()
            .map(|at| kv_head(self, at / num_kv_heads, at % num_kv_heads, rounding))
            .collect::<Vec<Results>>()
            .iter()
            .enumerate()
            .for_each(|(at, head)| {
                let (row, kv_head) = (at / num_kv_heads, at % num_kv_heads);
                let tensors = [
                    (&mut all.o, &head.o),
                    (&mut all.dq, &head.dq),
                    (&mut all.dk, &head.dk),
                    (&mut all.dv, &head.dv),
                ];
                for (to, from) in tensors {
                    let len = from.len() / seq_len;
                    for (i, from) in from.chunks_exact(len).enumerate() {
                        let first = ((row * seq_len + i) * num_kv_heads + kv_head) * len;
                        to[first..first + len].copy_from_slice(from);
                    }
                }
                let rows = [
                    (&mut all.lse, &head.lse),
                    (&mut all.d_delta, &head.d_delta),
                    (&mut all.d_delta_terms, &head.d_delta_terms),
                ];
                for (to, from) in rows {
                    to[at * from.len()..][..from.len()].copy_from_slice(from);
                }
            });
        all
    }

    /// The bias of key j for query i, where the query sees it.
    fn bias(&self, row: usize, kv_head: usize, i: usize, j: usize) -> Option<f64> {
        let AttentionShape {
            seq_len, num_kv_heads, ..
        } = self.shape;
        let inside = j <= i && j as i32 >= self.documents.start[row * seq_len + i];
        let at = (row * num_kv_heads + kv_head) * seq_len + j;
        match self.mask {
            Mask::Causal => inside.then_some(0.0),
            Mask::Window(window_size) => (inside && j + window_size > i).then_some(0.0),
            Mask::Expire { expire, delta } => (inside && (i as i32) < expire[at]).then(|| f64::from(delta[at])),
        }
    }
}

impl Results {
    /// Of some KV heads, each with its query heads.
    fn zeros(call: &AttentionCall<'_>, kv_heads: usize) -> Self {
        let zeros = |width: usize| vec![0.0; kv_heads * call.shape.seq_len * width];
        let group = call.shape.group_size();
        Self {
            o: zeros(group * call.v.width),
            lse: zeros(group),
            dq: zeros(group * call.q.width),
            dk: zeros(call.k.width),
            dv: zeros(call.v.width),
            d_delta: zeros(1),
            d_delta_terms: zeros(1),
        }
    }
}

on_arch! {
    /// The results of one KV head, its query heads side by side.
    fn kv_head<'a>(call: &'a AttentionCall<'a>, row: usize, kv_head: usize, rounding: Rounding) -> Results = kv_head_on;
}

#[inline(always)]
fn kv_head_on<S: Simd>(_simd: S, call: &AttentionCall<'_>, row: usize, kv_head: usize, rounding: Rounding) -> Results {
    let (n, group) = (call.shape.seq_len, call.shape.group_size());
    let (width_k, width_v) = (call.k.width, call.v.width);
    let scale = f64::from(call.shape.softmax_scale);
    let [k, v] = [call.k, call.v].map(|x| -> Vec<f64> {
        let tokens = row * n..(row + 1) * n;
        tokens.flat_map(|token| x.of_token(token, kv_head)).collect()
    });
    let mut all = Results::zeros(call, 1);
    for at in 0..group {
        let (mut dk, mut dv) = (vec![0.0; k.len()], vec![0.0; v.len()]);
        for i in 0..n {
            let [q, d_o] =
                [call.q, call.d_o].map(|x| x.of_token(row * n + i, kv_head * group + at).collect::<Vec<f64>>());
            let key = |j: usize| {
                let (k, v) = (&k[j * width_k..][..width_k], &v[j * width_v..][..width_v]);
                let bias = call.bias(row, kv_head, i, j)?;
                Some((j, Key { k, v, bias }))
            };
            let (seen, keys): (Vec<usize>, Vec<Key<'_, f64>>) = (0..=i).filter_map(key).unzip();
            let o = &mut all.o[(i * group + at) * width_v..][..width_v];
            let Attended { lse, p } = attend(&q, &keys, scale, rounding, o);
            all.lse[at * n + i] = lse;
            let dp: Vec<f64> = keys.iter().map(|key| rounding.of(dot(&d_o, key.v))).collect();
            let mean = dot(&p, &dp);
            let dq = &mut all.dq[(i * group + at) * width_k..][..width_k];
            for ((&j, key), (&p, &dp)) in seen.iter().zip(&keys).zip(p.iter().zip(&dp)) {
                let ds = p * (dp - mean);
                all.d_delta[j] += ds;
                all.d_delta_terms[j] += p * (dp.abs() + mean.abs());
                let ds = rounding.of(scale * ds);
                add(dq, ds, key.k);
                add(&mut dk[j * width_k..][..width_k], ds, &q);
                add(&mut dv[j * width_v..][..width_v], rounding.of(p), &d_o);
            }
            rounding.all(dq);
        }
        for (sum, mut of_head) in [(&mut all.dk, dk), (&mut all.dv, dv)] {
            rounding.all(&mut of_head);
            add(sum, 1.0, &of_head);
        }
    }
    rounding.all(&mut all.dk);
    rounding.all(&mut all.dv);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::{Random, round_bf16, whole_rows};

    fn run(mask: Mask<'_>, rounding: Rounding) -> Results {
        let shape = AttentionShape {
            batch: 2,
            seq_len: 9,
            num_heads: 2,
            num_kv_heads: 1,
            head_dim: 16,
            softmax_scale: 0.25,
        };
        let mut random = Random(4);
        let qkv = random.bf16_normals(2 * 9 * 4 * 16);
        let d_o = random.bf16_normals(2 * 9 * 2 * 16);
        let (start, end) = whole_rows(2, 9);
        let documents = Documents {
            start: &start,
            end: &end,
        };
        AttentionCall::packed(shape, &qkv, documents, mask, &d_o).run(rounding)
    }

    #[test]
    fn rounding_is_that_of_bf16() {
        let mut random = Random(1);
        let half = 1.0 / 256.0;
        let halves = [1.0 + half, -1.0 - 3.0 * half, 0.0, f32::INFINITY];
        let drawn: Vec<f32> = (0..1000).map(|_| random.normal_with_tails()).collect();
        for x in halves.into_iter().chain(drawn) {
            let got = Rounding::Bf16.of(f64::from(x));
            assert_eq!(got, f64::from(round_bf16(x)), "{x}");
        }
    }

    #[test]
    fn a_single_key_has_no_gradient_of_its_bias() {
        let expire: Vec<i32> = (0..18).map(|at| at % 9 + 1).collect();
        let delta = Random(5).vector(18);
        let mask = Mask::Expire {
            expire: &expire,
            delta: &delta,
        };
        let got = run(mask, Rounding::None);
        let largest = |x: &[f64]| x.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let (gradient, terms) = (largest(&got.d_delta), largest(&got.d_delta_terms));
        assert!(gradient <= 1e-12 * terms, "{gradient} of {terms}");
        assert!(terms > 1.0);
    }

    #[test]
    fn rounding_costs_what_bf16_costs() {
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
