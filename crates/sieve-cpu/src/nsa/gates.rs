//! The gated sum of the three branches.

use rayon::prelude::*;

use crate::rms_norm::add_partials;
use crate::simd::{dot, on_arch};
use pulp::Simd;

/// Branches: compressed, selected, window.
const BRANCHES: usize = 3;

/// Tokens one task handles; also the tokens one partial bias gradient covers, so it fixes the order of that sum.
const TOKENS: usize = 64;

/// `o = sum_c sigmoid(logits_c + bias_c) o_c` per token and head.
///
/// # Shapes
/// - branches (compressed, selected, window), o: `[tokens, num_heads, head_dim]`
/// - logits: `[tokens, num_heads, 3]`, bias: `[num_heads, 3]`; o is written whole
///
/// # Panics
/// When lengths do not fit.
pub fn nsa_gates_forward(branches: [&[f32]; BRANCHES], logits: &[f32], bias: &[f32], head_dim: usize, o: &mut [f32]) {
    let heads = check(branches, logits, bias, head_dim, o.len());
    let width = heads * head_dim;
    o.par_chunks_mut(TOKENS * width).enumerate().for_each(|(task, o)| {
        for (token, o) in o.chunks_exact_mut(width).enumerate() {
            let token = task * TOKENS + token;
            let logits = &logits[token * heads * BRANCHES..(token + 1) * heads * BRANCHES];
            for (head, o) in o.chunks_exact_mut(head_dim).enumerate() {
                let at = token * width + head * head_dim;
                let gate = |c| sigmoid(logits[head * BRANCHES + c] + bias[head * BRANCHES + c]);
                let [g0, g1, g2] = [gate(0), gate(1), gate(2)];
                let [x0, x1, x2] = branches.map(|x| &x[at..at + head_dim]);
                for (((o, x0), x1), x2) in o.iter_mut().zip(x0).zip(x1).zip(x2) {
                    *o = g0 * x0 + g1 * x1 + g2 * x2;
                }
            }
        }
    });
}

/// Gradients of [`nsa_gates_forward`].
///
/// # Shapes
/// - d_o, d_branches: as the branches; d_logits: `[tokens, num_heads, 3]`, d_bias: `[num_heads, 3]`; all written whole
///
/// # Panics
/// When lengths do not fit.
#[allow(clippy::too_many_arguments, reason = "the operands of one op, all slices")]
pub fn nsa_gates_backward(
    branches: [&[f32]; BRANCHES],
    logits: &[f32],
    bias: &[f32],
    head_dim: usize,
    d_o: &[f32],
    d_branches: [&mut [f32]; BRANCHES],
    d_logits: &mut [f32],
    d_bias: &mut [f32],
) {
    let heads = check(branches, logits, bias, head_dim, d_o.len());
    assert_eq!(
        (d_logits.len(), d_bias.len()),
        (logits.len(), bias.len()),
        "nsa_gates_backward: gradients have other sizes"
    );
    let width = heads * head_dim;
    let [d0, d1, d2] = d_branches;
    for d in [&d0, &d1, &d2] {
        assert_eq!(d.len(), d_o.len(), "nsa_gates_backward: gradients have other sizes");
    }
    let tasks = d0
        .par_chunks_mut(TOKENS * width)
        .zip(d1.par_chunks_mut(TOKENS * width))
        .zip(d2.par_chunks_mut(TOKENS * width))
        .zip(d_logits.par_chunks_mut(TOKENS * heads * BRANCHES))
        .enumerate();
    let partial: Vec<Vec<f32>> = tasks
        .map(|(task, (((d0, d1), d2), d_logits))| {
            let first = task * TOKENS;
            backward_rows(
                branches.map(|x| &x[first * width..][..d0.len()]),
                &logits[first * heads * BRANCHES..][..d_logits.len()],
                bias,
                head_dim,
                &d_o[first * width..][..d0.len()],
                [d0, d1, d2],
                d_logits,
            )
        })
        .collect();
    add_partials(&partial, d_bias);
}

fn check(branches: [&[f32]; BRANCHES], logits: &[f32], bias: &[f32], head_dim: usize, len: usize) -> usize {
    assert!(
        head_dim > 0 && !bias.is_empty() && bias.len().is_multiple_of(BRANCHES),
        "nsa_gates: bias is not [num_heads, 3]"
    );
    let heads = bias.len() / BRANCHES;
    for x in branches {
        assert_eq!(x.len(), len, "nsa_gates: branches differ in size");
    }
    assert!(
        len.is_multiple_of(heads * head_dim) && logits.len() == len / head_dim * BRANCHES,
        "nsa_gates: logits are not [tokens, num_heads, 3]"
    );
    heads
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

on_arch! {
    fn backward_rows<'t>(
        branches: [&'t [f32]; BRANCHES], logits: &'t [f32], bias: &'t [f32], head_dim: usize,
        d_o: &'t [f32], d_branches: [&'t mut [f32]; BRANCHES], d_logits: &'t mut [f32],
    ) -> Vec<f32> = backward_rows_simd;
}

/// One task; returns its sum of the bias's gradient.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn backward_rows_simd<S: Simd>(
    simd: S,
    branches: [&[f32]; BRANCHES],
    logits: &[f32],
    bias: &[f32],
    head_dim: usize,
    d_o: &[f32],
    d_branches: [&mut [f32]; BRANCHES],
    d_logits: &mut [f32],
) -> Vec<f32> {
    let mut d_bias = vec![0.0; bias.len()];
    for (row, d_o) in d_o.chunks_exact(head_dim).enumerate() {
        let at = row * head_dim;
        let gate_at = row * BRANCHES;
        for c in 0..BRANCHES {
            let bias_at = (gate_at + c) % bias.len();
            let g = sigmoid(logits[gate_at + c] + bias[bias_at]);
            let d_gate = dot(simd, d_o, &branches[c][at..at + head_dim]);
            for (dx, d_o) in d_branches[c][at..at + head_dim].iter_mut().zip(d_o) {
                *dx = g * d_o;
            }
            let d_logit = d_gate * g * (1.0 - g);
            d_logits[gate_at + c] = d_logit;
            d_bias[bias_at] += d_logit;
        }
    }
    d_bias
}
