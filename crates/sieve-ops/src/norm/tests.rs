use super::{RmsNormCall, rms_norm};
use crate::reference;
use crate::testing::{Ad, Float, Random, RandomInput, check_op, check_parity, float, primitive};

const EPSILON: f64 = 1e-6;

fn op(inputs: &[Float]) -> Float {
    primitive(rms_norm(float::<3>(&inputs[0]), float(&inputs[1]), EPSILON))
}

fn reference_op(inputs: &[Float]) -> Float {
    reference::rms_norm::<Ad>(RmsNormCall { x: inputs[0].clone(), weight: inputs[1].clone(), epsilon: EPSILON })
}

#[test]
fn equals_the_reference_and_finite_differences_for_any_sizes() {
    let inputs = |[batch, seq_len, d_model]: [usize; 3]| {
        let x = Random(1).input(&[batch, seq_len, d_model]);
        [x, Random(2).input(&[d_model]).affine(0.5, 1.0)]
    };
    let all = [[2, 63, 40], [1, 1, 3], [1, 5, 129], [3, 2, 1]].map(inputs);
    check_op("rms_norm", all, &inputs([2, 3, 7]), &op, &reference_op);
}

#[test]
fn epsilon_keeps_a_row_of_zeros_finite() {
    let inputs = [Random(3).input(&[1, 2, 8]).affine(0.0, 0.0), Random(4).input(&[8])];
    check_parity("rms_norm of zeros", &inputs, &op, &reference_op);
}
