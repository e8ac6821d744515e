use super::{dma, inputs, reference_run, run, spec, with_recency};
use crate::tensors::tensor;
use crate::testing::{
    Ad, Float, Input, View, assert_close, check_finite_differences, check_parity_within, check_views, documents,
    evaluate, host, primitive,
};
use crate::{DMA_SCORE_CLAMP, DmaBias};
use burn::tensor::DType;
use burn_flex::Flex;

/// Compares DMA's output and gradients with the reference's for each form of bias and recency. `dims` are batch, tokens
/// and head_dim; `lengths` are those of the documents.
fn check(group_size: usize, dims: [usize; 3], keep_window_size: usize, lengths: &[usize]) {
    let spec = spec(group_size, dims[2]);
    let documents = documents::<Ad>(lengths, [dims[0], dims[1]]);
    for dma in
        [dma(keep_window_size, DmaBias::Exp), dma(keep_window_size, DmaBias::Linear), with_recency(keep_window_size)]
    {
        // The gradient of A is a sum of products of biases and their gradients that cancel: an error of up to 63
        // epsilons was measured. The error of the reference, which subtracts each row's largest bias too, is 8
        // epsilons.
        check_parity_within(
            64.0,
            &format!("{dma:?} group {group_size} {dims:?} {lengths:?}"),
            &inputs(spec, dims, 1),
            &|inputs| run(inputs, &documents, spec, dma),
            &|inputs| reference_run(inputs, &documents, spec, dma),
        );
    }
}

#[test]
fn equals_the_reference_for_groups_windows_and_documents() {
    check(1, [2, 63, 16], 7, &[]);
    check(2, [2, 63, 20], 7, &[20, 1, 1, 30]);
    check(4, [2, 63, 16], 2, &[9]);
    check(2, [1, 63, 8], 63, &[]);
    check(2, [1, 63, 8], 100, &[30]);
    check(2, [1, 1, 16], 5, &[]);
    check(2, [1, 193, 32], 40, &[100]);
}

#[test]
fn a_query_that_keeps_one_key_copies_its_value() {
    // The softmax of one key is constant, so only dv is not 0, apart from rounding errors.
    let spec = spec(4, 16);
    let documents = documents::<Ad>(&[9], [2, 63]);
    let inputs = inputs(spec, [2, 63, 16], 1);
    let run_in = |dtype| {
        let op = |inputs: &[Float]| run(inputs, &documents, spec, dma(1, DmaBias::Exp));
        evaluate(&op, &inputs, 5, dtype, View::Contiguous)
    };
    let (fast, exact) = (run_in(DType::F32), run_in(DType::F64));
    // The one probability is between 0.7 and 1.4, by which the value is multiplied and divided.
    assert_close("o", &fast.output, &exact.output, 1e-6);
    assert_close("dqkv", &fast.gradients[0], &exact.gradients[0], 2e-5);
    for n in [1, 2] {
        let zeros = vec![0.0; exact.gradients[n].len()];
        assert_close("in f64", &exact.gradients[n], &zeros, 1e-12);
        assert_close("in f32", &fast.gradients[n], &zeros, 1e-4);
    }
}

#[test]
fn gradients_equal_finite_differences() {
    let spec = spec(2, 4);
    let documents = documents::<Ad>(&[6, 1], [2, 12]);
    for dma in [dma(3, DmaBias::Exp), dma(3, DmaBias::Linear), with_recency(3)] {
        let op = |inputs: &[Float]| run(inputs, &documents, spec, dma);
        check_finite_differences("dma", &inputs(spec, [2, 12, 4], 2), &op);
    }
}

#[test]
fn gates_of_zero_get_gradients_and_w_dt_gets_none() {
    // All scores are equal, whatever W_dt is. A small change of A reorders the keys, so finite differences are taken
    // with a window of all keys.
    let spec = spec(2, 4);
    let documents = documents::<Ad>(&[5], [2, 12]);
    let mut inputs = inputs(spec, [2, 12, 4], 3);
    inputs[2] = inputs[2].clone().affine(0.0, 0.0);
    for bias in [DmaBias::Exp, DmaBias::Linear] {
        let all = |inputs: &[Float]| run(inputs, &documents, spec, dma(12, bias));
        check_finite_differences("dma at A = 0", &inputs, &all);
        for dtype in [DType::F32, DType::F64] {
            let op = |inputs: &[Float]| run(inputs, &documents, spec, dma(3, bias));
            let gradients = evaluate(&op, &inputs, 4, dtype, View::Contiguous).gradients;
            assert!(gradients[1].iter().all(|&dw| dw == 0.0), "dW_dt");
            assert!(gradients[2].iter().all(|&da| da.abs() > 1e-4), "dA");
        }
    }
}

/// Inputs with gates A of `a`: the score of a key is `a` times the softplus of a random number.
fn with_gates(a: f64) -> [Input; 3] {
    let mut inputs = inputs(spec(2, 4), [1, 12, 4], 5);
    inputs[2] = inputs[2].clone().affine(0.0, a);
    inputs
}

#[test]
fn scores_above_the_clamp_get_no_gradient() {
    // The softplus of a number near 0 is about 0.7, so a gate of 400 puts scores near 280, above the clamp of 60.
    let documents = documents::<Ad>(&[], [1, 12]);
    let op = |inputs: &[Float]| run(inputs, &documents, spec(2, 4), dma(5, DmaBias::Exp));
    for dtype in [DType::F32, DType::F64] {
        let clamped = evaluate(&op, &with_gates(400.0), 6, dtype, View::Contiguous);
        assert!(clamped.output.iter().all(|o| o.is_finite()));
        assert!(clamped.gradients[1].iter().all(|&dw| dw == 0.0), "dW_dt");
        assert!(clamped.gradients[2].iter().all(|&da| da == 0.0), "dA");
        let below = evaluate(&op, &with_gates(2.0), 6, dtype, View::Contiguous);
        assert!(below.gradients[2].iter().all(|&da| da != 0.0), "dA");
    }
    // Scores on both sides of the clamp; scores above it have no gradient. exp(60) is too large for finite differences,
    // so the clamp is checked only in the bias.
    let z = [0.0, DMA_SCORE_CLAMP - 1e-3, DMA_SCORE_CLAMP, DMA_SCORE_CLAMP + 1e-3, 88.0, 1e6];
    for dtype in [DType::F32, DType::F64] {
        let z = Input { values: z.to_vec(), dims: vec![1, 1, z.len()] };
        let z = tensor::<Flex, 3>(z.tensor(dtype));
        let delta = super::dma_bias(z.clone(), DmaBias::Exp);
        let dz = crate::dma::dma_bias_backward(z.clone(), delta.clone(), z.ones_like(), DmaBias::Exp);
        let [delta, dz] = [delta, dz].map(|x| host(primitive(x)));
        assert!(delta.iter().all(|x| x.is_finite()));
        assert_eq!(dz[..3], delta[..3]);
        assert_eq!(dz[3..], [0.0; 3]);
        let top = DMA_SCORE_CLAMP.exp();
        assert_close("clamp", &delta[2..], &[top; 4], 1e-5 * top);
    }
}

#[test]
fn views_give_the_same_bits() {
    let spec = spec(2, 16);
    let documents = documents::<Ad>(&[20, 1], [2, 37]);
    let op = |inputs: &[Float]| run(inputs, &documents, spec, dma(7, DmaBias::Exp));
    check_views("dma", &inputs(spec, [2, 37, 16], 7), &op);
}
