use super::swiglu;
use crate::reference;
use crate::testing::{
    Ad, Float, Random, RandomInput, check_finite_differences, check_parity, check_views, float,
    primitive,
};

fn op(inputs: &[Float]) -> Float {
    primitive(swiglu(float::<3>(&inputs[0])))
}

fn reference_op(inputs: &[Float]) -> Float {
    reference::swiglu::<Ad>(inputs[0].clone())
}

#[test]
fn equals_the_reference_for_any_sizes() {
    for [batch, seq_len, d_ff] in [[2, 63, 20], [1, 1, 1], [3, 2, 33]] {
        let inputs = [Random(1).input(&[batch, seq_len, 2 * d_ff])];
        let what = format!("swiglu {batch} {seq_len} {d_ff}");
        check_parity(&what, &inputs, &op, &reference_op);
        check_views(&what, &inputs, &op);
    }
}

#[test]
fn large_gates_saturate() {
    let inputs = [Random(2).input(&[2, 3, 8]).affine(60.0, 0.0)];
    check_parity("swiglu", &inputs, &op, &reference_op);
}

#[test]
fn gradients_are_those_of_the_function() {
    check_finite_differences("swiglu", &[Random(3).input(&[2, 3, 6])], &op);
}
