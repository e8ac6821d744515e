//! DMA's score of each key, from the values of all KV heads: `z[g] = a[g] * softplus(concat(v) . w[g])`.
//!
//! A token's score depends on its own values alone, to the bit. So decoding one token at a time gives the scores of the
//! whole pass, and nearly equal scores are ordered alike in both.

use pulp::Simd;
use rayon::prelude::*;
use sieve_core::AttentionShape;

use crate::rms_norm::add_partials;
use crate::simd::{dot, on_arch};

/// Tokens of a parallel task. Each task sums its own weight gradients, so this also fixes the order of additions.
const TOKENS: usize = 64;

/// Scores of all keys.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`; only its values are read
/// - w: `[num_kv_heads, num_kv_heads * head_dim]`; a: `[num_kv_heads]`
/// - z: `[batch, num_kv_heads, seq_len]`, written whole
///
/// # Panics
/// When the lengths do not fit.
pub fn dma_scores_forward(shape: AttentionShape, qkv: &[f32], w: &[f32], a: &[f32], z: &mut [f32]) {
    check(shape, "dma_scores_forward", qkv, w, a, z);
    let (heads, seq_len) = (shape.num_kv_heads, shape.seq_len);
    // `[batch, seq_len, num_kv_heads]`, so that a task writes a slice of its own; z has the heads before the tokens.
    let mut by_token = vec![0.0; z.len()];
    by_token.par_chunks_mut(TOKENS * heads).zip(qkv.par_chunks(TOKENS * shape.token_len())).for_each(|(z, qkv)| {
        forward_tokens(shape, qkv, w, a, z);
    });
    for (n, z) in z.iter_mut().enumerate() {
        let (row_and_head, key) = (n / seq_len, n % seq_len);
        let (row, head) = (row_and_head / heads, row_and_head % heads);
        *z = by_token[(row * seq_len + key) * heads + head];
    }
}

/// Gradients of [`dma_scores_forward`]; the softplus arguments are recomputed.
///
/// # Shapes
/// - qkv, w, a: shaped as in [`dma_scores_forward`]; dz: `[batch, num_kv_heads, seq_len]`
/// - d_qkv: shaped as qkv; the gradient of the values is added to it
/// - dw, da: shaped as w and a, written whole
///
/// # Panics
/// When the lengths do not fit.
#[allow(clippy::too_many_arguments)]
pub fn dma_scores_backward(
    shape: AttentionShape,
    qkv: &[f32],
    w: &[f32],
    a: &[f32],
    dz: &[f32],
    d_qkv: &mut [f32],
    dw: &mut [f32],
    da: &mut [f32],
) {
    check(shape, "dma_scores_backward", qkv, w, a, dz);
    assert_eq!(
        (d_qkv.len(), dw.len(), da.len()),
        (qkv.len(), w.len(), a.len()),
        "dma_scores_backward: a gradient is not as long as its input"
    );
    let task_len = TOKENS * shape.token_len();
    let (dw_partial, da_partial): (Vec<Vec<f32>>, Vec<Vec<f32>>) = d_qkv
        .par_chunks_mut(task_len)
        .zip(qkv.par_chunks(task_len))
        .enumerate()
        .map(|(task, (d_qkv, qkv))| {
            let (mut dw, mut da) = (vec![0.0; w.len()], vec![0.0; a.len()]);
            backward_tokens(shape, task * TOKENS, qkv, w, a, dz, d_qkv, &mut dw, &mut da);
            (dw, da)
        })
        .unzip();
    add_partials(&dw_partial, dw);
    add_partials(&da_partial, da);
}

fn check(shape: AttentionShape, op: &str, qkv: &[f32], w: &[f32], a: &[f32], z: &[f32]) {
    let (heads, tokens) = (shape.num_kv_heads, shape.batch * shape.seq_len);
    assert_eq!(qkv.len(), tokens * shape.token_len(), "{op}: qkv has the wrong size");
    assert_eq!(w.len(), heads * heads * shape.head_dim, "{op}: w is not [num_kv_heads, num_kv_heads * head_dim]");
    assert_eq!(a.len(), heads, "{op}: a is not [num_kv_heads]");
    assert_eq!(z.len(), tokens * heads, "{op}: z is not [batch, num_kv_heads, seq_len]");
}

/// `ln(1 + e^x)` without overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

on_arch! {
    fn forward_tokens<'a>(
        shape: AttentionShape, qkv: &'a [f32], w: &'a [f32], a: &'a [f32], z: &'a mut [f32],
    ) -> () = forward_tokens_simd;
}

/// Scores of the tokens of `qkv`, written to z as `[tokens, num_kv_heads]`; a token's values are its last heads.
#[inline(always)]
fn forward_tokens_simd<S: Simd>(simd: S, shape: AttentionShape, qkv: &[f32], w: &[f32], a: &[f32], z: &mut [f32]) {
    let width = shape.num_kv_heads * shape.head_dim;
    let tokens = qkv.chunks_exact(shape.token_len());
    for (token, z) in tokens.zip(z.chunks_exact_mut(shape.num_kv_heads)) {
        let v = &token[token.len() - width..];
        for ((z, w), a) in z.iter_mut().zip(w.chunks_exact(width)).zip(a) {
            *z = a * softplus(dot(simd, v, w));
        }
    }
}

on_arch! {
    fn backward_tokens<'a>(
        shape: AttentionShape, first: usize, qkv: &'a [f32], w: &'a [f32], a: &'a [f32], dz: &'a [f32],
        d_qkv: &'a mut [f32], dw: &'a mut [f32], da: &'a mut [f32],
    ) -> () = backward_tokens_simd;
}

/// Adds the gradients of the tokens of `qkv` to d_qkv, dw and da; `first` is the index of the first of them in the
/// batch.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn backward_tokens_simd<S: Simd>(
    simd: S,
    shape: AttentionShape,
    first: usize,
    qkv: &[f32],
    w: &[f32],
    a: &[f32],
    dz: &[f32],
    d_qkv: &mut [f32],
    dw: &mut [f32],
    da: &mut [f32],
) {
    let (heads, seq_len) = (shape.num_kv_heads, shape.seq_len);
    let token_len = shape.token_len();
    let width = heads * shape.head_dim;
    let tokens = qkv.chunks_exact(token_len);
    let gradients = d_qkv.chunks_exact_mut(token_len);
    for (n, (token, d_token)) in tokens.zip(gradients).enumerate() {
        let (row, key) = ((first + n) / seq_len, (first + n) % seq_len);
        let v = &token[token_len - width..];
        let dv = &mut d_token[token_len - width..];
        for head in 0..heads {
            let dz = dz[(row * heads + head) * seq_len + key];
            let w = &w[head * width..][..width];
            let x = dot(simd, v, w);
            da[head] += dz * softplus(x);
            let dx = dz * a[head] * sigmoid(x);
            for (dw, v) in dw[head * width..][..width].iter_mut().zip(v) {
                *dw += dx * v;
            }
            for (dv, w) in dv.iter_mut().zip(w) {
                *dv += dx * w;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::{Random, assert_close_relative, finite_differences, inner, threads, wide};

    fn shape(batch: usize, seq_len: usize, head_dim: usize) -> AttentionShape {
        AttentionShape::new(batch, seq_len, [6, 3], [head_dim; 2])
    }

    struct Case {
        shape: AttentionShape,
        qkv: Vec<f32>,
        w: Vec<f32>,
        a: Vec<f32>,
    }

    fn case(shape: AttentionShape) -> Case {
        let mut random = Random(1);
        let width = shape.num_kv_heads * shape.head_dim;
        let w = random.vector(shape.num_kv_heads * width);
        Case {
            shape,
            qkv: random.vector(shape.batch * shape.seq_len * shape.token_len()),
            w: w.iter().map(|w| w / (width as f32).sqrt()).collect(),
            a: random.vector(shape.num_kv_heads),
        }
    }

    /// The definition in f64.
    fn scores(shape: AttentionShape, qkv: &[f64], w: &[f64], a: &[f64]) -> Vec<f64> {
        let (heads, seq_len) = (shape.num_kv_heads, shape.seq_len);
        let width = heads * shape.head_dim;
        (0..shape.batch * heads * seq_len)
            .map(|n| {
                let (batch, head, key) = (n / seq_len / heads, n / seq_len % heads, n % seq_len);
                let end = (batch * seq_len + key + 1) * shape.token_len();
                let v = &qkv[end - width..end];
                let x: f64 = v.iter().zip(&w[head * width..]).map(|(v, w)| v * w).sum();
                a[head] * (x.max(0.0) + (-x.abs()).exp().ln_1p())
            })
            .collect()
    }

    #[test]
    fn scores_and_gradients_equal_the_definition() {
        for (batch, seq_len, head_dim) in [(2, 63, 5), (1, 1, 16), (3, 40, 7)] {
            let Case { shape, qkv, w, a } = case(shape(batch, seq_len, head_dim));
            let mut z = vec![f32::NAN; batch * 3 * seq_len];
            dma_scores_forward(shape, &qkv, &w, &a, &mut z);
            let exact = scores(shape, &wide(&qkv), &wide(&w), &wide(&a));
            assert_close_relative("z", &z, &exact, 1e-6);

            let dz = Random(2).vector(z.len());
            // The gradient of the values is added to the 0.5 that d_qkv already has.
            let (mut d_qkv, mut dw, mut da) = (vec![0.5; qkv.len()], vec![f32::NAN; w.len()], vec![f32::NAN; a.len()]);
            dma_scores_backward(shape, &qkv, &w, &a, &dz, &mut d_qkv, &mut dw, &mut da);
            let (qkv, w, a) = (wide(&qkv), wide(&w), wide(&a));
            let numeric = finite_differences(&w, |w| inner(&scores(shape, &qkv, w, &a), &dz));
            assert_close_relative("dw", &dw, &numeric, 1e-5);
            let numeric = finite_differences(&a, |a| inner(&scores(shape, &qkv, &w, a), &dz));
            assert_close_relative("da", &da, &numeric, 1e-5);
            if seq_len < 63 {
                let numeric = finite_differences(&qkv, |x| inner(&scores(shape, x, &w, &a), &dz));
                let added: Vec<f64> = numeric.iter().map(|d| d + 0.5).collect();
                assert_close_relative("d_qkv", &d_qkv, &added, 1e-5);
            }
        }
    }

    #[test]
    fn extreme_arguments_stay_finite() {
        for x in [-1e30, -100.0, -20.0, 0.0, 20.0, 100.0, 1e30_f32] {
            let wide = f64::from(x);
            let exact = wide.max(0.0) + (-wide.abs()).exp().ln_1p();
            assert_close_relative("softplus", &[softplus(x)], &[exact], 1e-6);
            assert_close_relative("sigmoid", &[sigmoid(x)], &[1.0 / (1.0 + (-wide).exp())], 1e-6);
        }
    }

    #[test]
    fn scores_depend_on_no_other_token_and_gradients_on_no_number_of_threads() {
        let Case { shape, qkv, w, a } = case(shape(2, 70, 16));
        let mut z = vec![0.0; 2 * 3 * 70];
        dma_scores_forward(shape, &qkv, &w, &a, &mut z);
        let one = AttentionShape { batch: 1, seq_len: 1, ..shape };
        for token in [0, 63, 64, 69, 70, 139] {
            let mut alone = [0.0; 3];
            let its = &qkv[token * shape.token_len()..][..shape.token_len()];
            dma_scores_forward(one, its, &w, &a, &mut alone);
            for (head, alone) in alone.iter().enumerate() {
                assert_eq!(*alone, z[(token / 70 * 3 + head) * 70 + token % 70]);
            }
        }
        let dz = Random(3).vector(z.len());
        let backward = || {
            let mut all = [vec![0.0; qkv.len()], vec![0.0; w.len()], vec![0.0; a.len()]];
            let [d_qkv, dw, da] = &mut all;
            dma_scores_backward(shape, &qkv, &w, &a, &dz, d_qkv, dw, da);
            all
        };
        let here = backward();
        assert_eq!(threads(3).install(backward), here);
    }
}
