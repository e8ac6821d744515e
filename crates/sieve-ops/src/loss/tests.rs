use super::{IGNORE_LABEL, linear_cross_entropy, token_losses};
use crate::reference;
use crate::testing::{
    Ad, Float, Input, Random, RandomInput, View, assert_close, check_finite_differences, check_parity, check_views,
    evaluate, float, host, ints, primitive,
};
use burn::tensor::{DType, Int, Tensor};

fn inputs([tokens, d_model, vocab_size]: [usize; 3]) -> [Input; 2] {
    let mut random = Random(1);
    [random.input(&[tokens, d_model]), random.input(&[vocab_size, d_model]).affine(0.5, 0.0)]
}

/// Every third token has no label.
fn labels(tokens: usize, vocab_size: usize) -> Tensor<Ad, 1, Int> {
    let mut random = Random(2);
    let label = |token| match token % 3 {
        1 => IGNORE_LABEL,
        _ => random.below(vocab_size) as i32,
    };
    ints((0..tokens).map(label).collect(), [tokens])
}

fn run(inputs: &[Float], labels: &Tensor<Ad, 1, Int>) -> Float {
    let (h, weight) = (float(&inputs[0]), float(&inputs[1]));
    primitive(linear_cross_entropy(h, weight, labels.clone()))
}

fn reference_run(inputs: &[Float], labels: &Tensor<Ad, 1, Int>) -> Float {
    let (h, weight) = (inputs[0].clone(), inputs[1].clone());
    reference::linear_cross_entropy::<Ad>(h, weight, labels.clone().into_primitive())
}

#[test]
fn equals_the_reference_and_finite_differences_for_any_sizes() {
    for dims in [[63, 24, 40], [1, 5, 3], [300, 16, 700], [7, 3, 1], [21, 16, 30], [8, 5, 6]] {
        let (inputs, labels) = (inputs(dims), labels(dims[0], dims[2]));
        let op = |inputs: &[Float]| run(inputs, &labels);
        let what = format!("linear_cross_entropy {dims:?}");
        check_parity(&what, &inputs, &op, &|inputs| reference_run(inputs, &labels));
        check_views(&what, &inputs, &op);
        if dims == [8, 5, 6] {
            check_finite_differences(&what, &inputs, &op);
        }
    }
}

#[test]
fn token_losses_add_up_to_the_loss() {
    let dims = [63, 24, 40];
    let labels = labels(dims[0], dims[2]);
    let [h, weight] = inputs(dims).map(|input| input.untracked(DType::F32));
    let losses = token_losses(float(&h), float(&weight), labels.clone());
    let losses = host(primitive(losses).primitive);
    for (token, loss) in losses.iter().enumerate() {
        assert_eq!(token % 3 == 1, *loss == 0.0, "token {token}: {loss}");
    }
    let sum = host(run(&[h, weight], &labels).primitive);
    assert_close("sum", &[losses.iter().sum::<f64>()], &sum, 1e-4);
    let [h, weight] = inputs(dims).map(|input| input.untracked(DType::F64));
    let exact = host(primitive(token_losses(float(&h), float(&weight), labels)).primitive);
    assert_close("losses", &losses, &exact, 4e-6);
}

#[test]
fn without_labels_all_is_zero() {
    let inputs = inputs([5, 4, 6]);
    let none = ints(vec![IGNORE_LABEL; 5], [5]);
    let op = |inputs: &[Float]| run(inputs, &none);
    for dtype in [DType::F32, DType::F64] {
        let all = evaluate(&op, &inputs, 3, dtype, View::Contiguous);
        assert_eq!(all.output, [0.0]);
        assert!(all.gradients.concat().iter().all(|&x| x == 0.0));
    }
}

#[test]
fn large_logits_stay_finite() {
    let mut inputs = inputs([9, 16, 30]);
    inputs[0] = inputs[0].clone().affine(300.0, 0.0);
    let labels = labels(9, 30);
    let op = |inputs: &[Float]| run(inputs, &labels);
    check_parity("large logits", &inputs, &op, &|inputs| reference_run(inputs, &labels));
}
