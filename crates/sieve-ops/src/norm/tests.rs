use super::{RmsNormCall, rms_norm};
use crate::reference;
use crate::testing::{
    Ad, Float, Random, RandomInput, check_finite_differences, check_parity, check_views, float, primitive,
};

const EPSILON: f64 = 1e-6;

fn op(inputs: &[Float]) -> Float {
    primitive(rms_norm(float::<3>(&inputs[0]), float(&inputs[1]), EPSILON))
}

fn reference_op(inputs: &[Float]) -> Float {
    reference::rms_norm::<Ad>(RmsNormCall {
        x: inputs[0].clone(),
        weight: inputs[1].clone(),
        epsilon: EPSILON,
    })
}

#[test]
fn equals_the_reference_for_any_sizes() {
    let mut random = Random(1);
    for [batch, seq_len, d_model] in [[2, 63, 40], [1, 1, 3], [1, 5, 129], [3, 2, 1]] {
        let inputs = [
            random.input(&[batch, seq_len, d_model]),
            random.input(&[d_model]).affine(0.5, 1.0),
        ];
        let what = format!("rms_norm {batch} {seq_len} {d_model}");
        check_parity(&what, &inputs, &op, &reference_op);
        check_views(&what, &inputs, &op);
    }
}

#[test]
fn gradients_are_those_of_the_function() {
    let mut random = Random(2);
    let inputs = [random.input(&[2, 3, 7]), random.input(&[7])];
    check_finite_differences("rms_norm", &inputs, &op);
}

#[test]
fn epsilon_keeps_a_row_of_zeros_finite() {
    let inputs = [Random(3).input(&[1, 2, 8]).affine(0.0, 0.0), Random(4).input(&[8])];
    check_parity("rms_norm of zeros", &inputs, &op, &reference_op);
}
