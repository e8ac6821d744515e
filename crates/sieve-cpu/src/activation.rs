//! SwiGLU, `silu(gate) * up`, on the packed output of the gate and up projection.

use pulp::Simd;
use rayon::prelude::*;

use crate::simd::{on_arch, sigmoid};

/// Rows of the matrix that one task handles.
const ROWS: usize = 16;

/// `y = silu(gate) * up`.
///
/// # Shapes
/// - gate_up: `[rows, 2 * d_ff]`, the gate's columns first; y: `[rows, d_ff]`, written whole
///
/// # Panics
/// When the lengths do not fit.
pub fn swiglu_forward(gate_up: &[f32], d_ff: usize, y: &mut [f32]) {
    assert!(d_ff > 0 && y.len().is_multiple_of(d_ff), "swiglu_forward: y is not [rows, {d_ff}]");
    assert_eq!(gate_up.len(), 2 * y.len(), "swiglu_forward: gate_up is not [rows, 2 * d_ff]");
    y.par_chunks_mut(ROWS * d_ff)
        .zip(gate_up.par_chunks(ROWS * 2 * d_ff))
        .for_each(|(y, gate_up)| forward_rows(gate_up, d_ff, y));
}

/// Gradient of [`swiglu_forward`].
///
/// # Shapes
/// - gate_up, d_gate_up: `[rows, 2 * d_ff]`; dy: `[rows, d_ff]`; d_gate_up is written whole
///
/// # Panics
/// When the lengths do not fit.
pub fn swiglu_backward(gate_up: &[f32], d_ff: usize, dy: &[f32], d_gate_up: &mut [f32]) {
    assert!(d_ff > 0 && dy.len().is_multiple_of(d_ff), "swiglu_backward: dy is not [rows, {d_ff}]");
    assert_eq!(gate_up.len(), 2 * dy.len(), "swiglu_backward: gate_up is not [rows, 2 * d_ff]");
    assert_eq!(d_gate_up.len(), gate_up.len(), "swiglu_backward: d_gate_up is not as long as gate_up");
    d_gate_up
        .par_chunks_mut(ROWS * 2 * d_ff)
        .zip(gate_up.par_chunks(ROWS * 2 * d_ff))
        .zip(dy.par_chunks(ROWS * d_ff))
        .for_each(|((d_gate_up, gate_up), dy)| backward_rows(gate_up, d_ff, dy, d_gate_up));
}

on_arch! {
    fn forward_rows<'a>(gate_up: &'a [f32], d_ff: usize, y: &'a mut [f32]) -> () = forward_rows_simd;
}

/// The forward pass of the rows of one task.
#[inline(always)]
fn forward_rows_simd<S: Simd>(simd: S, gate_up: &[f32], d_ff: usize, y: &mut [f32]) {
    for (y, gate_up) in y.chunks_exact_mut(d_ff).zip(gate_up.chunks_exact(2 * d_ff)) {
        let (gate, up) = gate_up.split_at(d_ff);
        let ((y, y_tail), (gate, gate_tail), (up, up_tail)) =
            (S::as_mut_simd_f32s(y), S::as_simd_f32s(gate), S::as_simd_f32s(up));
        for ((y, &g), &u) in y.iter_mut().zip(gate).zip(up) {
            *y = swiglu(simd, g, u);
        }
        if !y_tail.is_empty() {
            let last = swiglu(simd, simd.partial_load_f32s(gate_tail), simd.partial_load_f32s(up_tail));
            simd.partial_store_f32s(y_tail, last);
        }
    }
}

#[inline(always)]
fn swiglu<S: Simd>(simd: S, gate: S::f32s, up: S::f32s) -> S::f32s {
    simd.mul_f32s(simd.mul_f32s(gate, sigmoid(simd, gate)), up)
}

on_arch! {
    fn backward_rows<'a>(
        gate_up: &'a [f32], d_ff: usize, dy: &'a [f32], d_gate_up: &'a mut [f32],
    ) -> () = backward_rows_simd;
}

/// The backward pass of the rows of one task.
#[inline(always)]
fn backward_rows_simd<S: Simd>(simd: S, gate_up: &[f32], d_ff: usize, dy: &[f32], d_gate_up: &mut [f32]) {
    let rows = d_gate_up.chunks_exact_mut(2 * d_ff).zip(gate_up.chunks_exact(2 * d_ff));
    for ((d_gate_up, gate_up), dy) in rows.zip(dy.chunks_exact(d_ff)) {
        let (gate, up) = gate_up.split_at(d_ff);
        let (d_gate, d_up) = d_gate_up.split_at_mut(d_ff);
        let ((gate, gate_tail), (up, up_tail), (dy, dy_tail)) =
            (S::as_simd_f32s(gate), S::as_simd_f32s(up), S::as_simd_f32s(dy));
        let ((d_gate, d_gate_tail), (d_up, d_up_tail)) = (S::as_mut_simd_f32s(d_gate), S::as_mut_simd_f32s(d_up));
        for (((dg, du), (&g, &u)), &dy) in d_gate.iter_mut().zip(d_up).zip(gate.iter().zip(up)).zip(dy) {
            (*dg, *du) = swiglu_gradients(simd, g, u, dy);
        }
        if !dy_tail.is_empty() {
            let load = |x| simd.partial_load_f32s(x);
            let (dg, du) = swiglu_gradients(simd, load(gate_tail), load(up_tail), load(dy_tail));
            simd.partial_store_f32s(d_gate_tail, dg);
            simd.partial_store_f32s(d_up_tail, du);
        }
    }
}

/// Gradients of gate g and up u: with s = sigmoid(g), `dy u s (1 + g (1 - s))` and `dy g s`.
#[inline(always)]
fn swiglu_gradients<S: Simd>(simd: S, g: S::f32s, u: S::f32s, dy: S::f32s) -> (S::f32s, S::f32s) {
    let one = simd.splat_f32s(1.0);
    let s = sigmoid(simd, g);
    let dy_s = simd.mul_f32s(dy, s);
    let slope = simd.mul_add_e_f32s(g, simd.sub_f32s(one, s), one);
    (simd.mul_f32s(simd.mul_f32s(dy_s, u), slope), simd.mul_f32s(dy_s, g))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, finite_differences, inner, wide};

    fn reference(gate_up: &[f64], d_ff: usize) -> Vec<f64> {
        gate_up
            .chunks(2 * d_ff)
            .flat_map(|row| (0..d_ff).map(|c| row[c] / (1.0 + (-row[c]).exp()) * row[d_ff + c]))
            .collect()
    }

    #[test]
    fn results_equal_the_definition_and_gradients_its_finite_differences() {
        on_every_arch(|| {
            let mut random = Random(1);
            for (rows, d_ff) in [(1, 1), (3, 5), (2, 16), (19, 37), (5, 100)] {
                let gate_up: Vec<f32> = random.vector(rows * 2 * d_ff).iter().map(|x| 3.0 * x).collect();
                let dy = random.vector(rows * d_ff);
                let mut y = vec![f32::NAN; rows * d_ff];
                swiglu_forward(&gate_up, d_ff, &mut y);
                assert_close_relative("y", &y, &reference(&wide(&gate_up), d_ff), 1e-6);
                let mut d_gate_up = vec![f32::NAN; gate_up.len()];
                swiglu_backward(&gate_up, d_ff, &dy, &mut d_gate_up);
                let expected = finite_differences(&wide(&gate_up), |x| inner(&reference(x, d_ff), &dy));
                assert_close_relative("d_gate_up", &d_gate_up, &expected, 1e-5);
            }
        });
    }

    #[test]
    fn large_gates_saturate() {
        on_every_arch(|| {
            let gate_up = [-200.0, 200.0, 3.0, 3.0];
            let (mut y, mut d_gate_up) = ([f32::NAN; 2], [f32::NAN; 4]);
            swiglu_forward(&gate_up, 2, &mut y);
            swiglu_backward(&gate_up, 2, &[1.0, 1.0], &mut d_gate_up);
            assert_eq!(y, [0.0, 600.0]);
            assert_eq!(d_gate_up, [0.0, 3.0, 0.0, 200.0]);
        });
    }
}
