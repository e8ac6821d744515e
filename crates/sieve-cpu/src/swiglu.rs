//! SwiGLU on the packed output of one projection: `silu(gate) * up`.

use rayon::prelude::*;

use crate::simd::{exp, vectorize};

/// Rows one task handles.
const ROWS: usize = 16;

/// `y = silu(gate) * up`.
///
/// # Shapes
/// - gate_up: `[rows, 2 * d_ff]`, the gate's columns first; y: `[rows, d_ff]`, written whole
///
/// # Panics
/// When the lengths do not fit.
pub fn swiglu_forward(gate_up: &[f32], d_ff: usize, y: &mut [f32]) {
    assert!(
        d_ff > 0 && y.len().is_multiple_of(d_ff),
        "swiglu_forward: y is not [rows, {d_ff}]"
    );
    assert_eq!(
        gate_up.len(),
        2 * y.len(),
        "swiglu_forward: gate_up is not [rows, 2 * d_ff]"
    );
    y.par_chunks_mut(ROWS * d_ff)
        .zip(gate_up.par_chunks(ROWS * 2 * d_ff))
        .for_each(|(y, gate_up)| {
            vectorize(|| {
                for (y, gate_up) in y.chunks_exact_mut(d_ff).zip(gate_up.chunks_exact(2 * d_ff)) {
                    let (gate, up) = gate_up.split_at(d_ff);
                    for ((y, &g), &u) in y.iter_mut().zip(gate).zip(up) {
                        *y = g * sigmoid(g) * u;
                    }
                }
            });
        });
}

/// Gradient of [`swiglu_forward`].
///
/// # Shapes
/// - gate_up, d_gate_up: `[rows, 2 * d_ff]`; dy: `[rows, d_ff]`; d_gate_up is written whole
///
/// # Panics
/// When the lengths do not fit.
pub fn swiglu_backward(gate_up: &[f32], d_ff: usize, dy: &[f32], d_gate_up: &mut [f32]) {
    assert!(
        d_ff > 0 && dy.len().is_multiple_of(d_ff),
        "swiglu_backward: dy is not [rows, {d_ff}]"
    );
    assert_eq!(
        gate_up.len(),
        2 * dy.len(),
        "swiglu_backward: gate_up is not [rows, 2 * d_ff]"
    );
    assert_eq!(
        d_gate_up.len(),
        gate_up.len(),
        "swiglu_backward: d_gate_up is not as long as gate_up"
    );
    d_gate_up
        .par_chunks_mut(ROWS * 2 * d_ff)
        .zip(gate_up.par_chunks(ROWS * 2 * d_ff))
        .zip(dy.par_chunks(ROWS * d_ff))
        .for_each(|((d_gate_up, gate_up), dy)| {
            vectorize(|| {
                let rows = d_gate_up
                    .chunks_exact_mut(2 * d_ff)
                    .zip(gate_up.chunks_exact(2 * d_ff));
                for ((d_gate_up, gate_up), dy) in rows.zip(dy.chunks_exact(d_ff)) {
                    let (gate, up) = gate_up.split_at(d_ff);
                    let (d_gate, d_up) = d_gate_up.split_at_mut(d_ff);
                    for (((dg, du), (&g, &u)), &dy) in
                        d_gate.iter_mut().zip(d_up).zip(gate.iter().zip(up)).zip(dy)
                    {
                        let s = sigmoid(g);
                        *du = dy * g * s;
                        *dg = dy * u * s * (1.0 + g * (1.0 - s));
                    }
                }
            });
        });
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
