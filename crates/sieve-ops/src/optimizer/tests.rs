use super::{adamw, orthogonalised, sum_of_squares};
use crate::tensors::{primitive, tensor};
use crate::testing::{Input, Random, RandomInput, assert_close, host};
use crate::{AdamWStep, AdamWTensors};
use burn::tensor::{DType, Tensor};
use burn_flex::{Flex, FlexTensor};

/// The settings of a step, whose number is counted from 1.
fn step_number(number: i32) -> AdamWStep {
    AdamWStep::usual(3e-3, number)
}

/// A parameter before its first step: its moments are 0.
fn start(param: FlexTensor) -> AdamWTensors<Flex> {
    let zeros = || FlexTensor::zeros(param.layout().shape().clone(), param.dtype());
    AdamWTensors { exp_avg: zeros(), exp_avg_sq: zeros(), leaf: None, param }
}

fn scale(value: f64, dtype: DType) -> Tensor<Flex, 1> {
    Tensor::from_data([value], (&Default::default(), dtype))
}

/// The tensors after their first step, in f32.
fn stepped(tensors: AdamWTensors<Flex>, gradient: FlexTensor) -> AdamWTensors<Flex> {
    adamw(tensors, tensor::<Flex, 2>(gradient), scale(1.0, DType::F32), step_number(1))
}

/// Ten steps with a fresh gradient each.
fn ten_steps(dtype: DType) -> AdamWTensors<Flex> {
    let mut random = Random(1);
    let mut tensors = start(random.input(&[63, 40]).tensor(dtype));
    for t in 1..=10 {
        let gradient = tensor::<Flex, 2>(random.input(&[63, 40]).tensor(dtype));
        tensors = adamw(tensors, gradient, scale(0.5, dtype), step_number(t));
    }
    tensors
}

#[test]
fn ten_steps_equal_the_formulas() {
    // AdamW's formulas on single numbers.
    let mut random = Random(1);
    let mut param = random.input(&[63, 40]).values;
    let (mut m, mut v) = (vec![0.0; param.len()], vec![0.0; param.len()]);
    for t in 1..=10 {
        let gradient = random.input(&[63, 40]).values;
        let step = step_number(t);
        for (((p, g), m), v) in param.iter_mut().zip(&gradient).zip(&mut m).zip(&mut v) {
            let g = 0.5 * g;
            *p *= 1.0 - step.lr * step.weight_decay;
            *m = step.beta1 * *m + (1.0 - step.beta1) * g;
            *v = step.beta2 * *v + (1.0 - step.beta2) * g * g;
            let (m, v) = (*m / step.bias_correction1, *v / step.bias_correction2);
            *p -= step.lr * m / (v.sqrt() + step.eps);
        }
    }
    for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::F64, 1e-13)] {
        let got = ten_steps(dtype);
        assert_close("param", &host(got.param), &param, tolerance);
        assert_close("exp_avg", &host(got.exp_avg), &m, tolerance);
        assert_close("exp_avg_sq", &host(got.exp_avg_sq), &v, tolerance);
    }
}

#[test]
fn a_scale_of_zero_or_nan_changes_nothing() {
    for dtype in [DType::F32, DType::F64] {
        let tensors = || start(Random(2).input(&[30, 7]).tensor(dtype));
        let [infinite, gradient] = [3, 4].map(|seed| tensor::<Flex, 2>(Random(seed).input(&[30, 7]).tensor(dtype)));
        let infinite = infinite / 0.0;
        let once = adamw(tensors(), gradient, scale(1.0, dtype), step_number(1));
        for gate in [0.0, f64::NAN, f64::INFINITY] {
            let after = adamw(once.clone(), infinite.clone(), scale(gate, dtype), step_number(2));
            assert_eq!(host(after.param), host(once.param.clone()), "{dtype:?}");
            assert_eq!(host(after.exp_avg), host(once.exp_avg.clone()));
            assert_eq!(host(after.exp_avg_sq), host(once.exp_avg_sq.clone()));
        }
        assert!(host(once.param) != host(tensors().param), "a step moves");
    }
}

#[test]
fn the_leaf_is_the_rounded_weight() {
    let mut tensors = start(Random(2).input(&[30, 7]).tensor(DType::F32));
    let leaf = tensor::<Flex, 2>(tensors.param.clone()).cast(DType::BF16);
    tensors.leaf = Some(primitive(leaf));
    let after = stepped(tensors, Random(3).input(&[30, 7]).tensor(DType::F32));
    let leaf = tensor::<Flex, 2>(after.leaf.expect("it was given one"));
    assert_eq!(leaf.dtype(), DType::BF16);
    let rounded = tensor::<Flex, 2>(after.param).cast(DType::BF16);
    assert_eq!(leaf.into_data(), rounded.into_data());
}

/// A `[rows, columns]` matrix with these singular values: u diag(values) v, with orthogonal u and v.
fn of_singular_values(values: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    // Householder reflections are orthogonal: I - 2 w wᵀ / |w|².
    let reflection = |n: usize, seed: u64| {
        let w = Random(seed).input(&[n]).values;
        let square: f64 = w.iter().map(|x| x * x).sum();
        move |r: usize, c: usize| f64::from(u8::from(r == c)) - 2.0 * w[r] * w[c] / square
    };
    let (u, v) = (reflection(rows, 8), reflection(columns, 9));
    let mut x = vec![0.0; rows * columns];
    for (i, x) in x.iter_mut().enumerate() {
        let (r, c) = (i / columns, i % columns);
        *x = values.iter().enumerate().map(|(k, s)| u(r, k) * s * v(k, c)).sum();
    }
    x
}

/// Newton-Schulz steps apply the polynomial to each singular value, so the expected values come from single numbers.
#[test]
fn orthogonalised_maps_the_singular_values() {
    let quintic = |x: f64| 3.4445 * x - 4.775 * x.powi(3) + 2.0315 * x.powi(5);
    for (rows, columns) in [(12, 12), (12, 40), (40, 12), (1, 9), (33, 64)] {
        let count = rows.min(columns);
        let values: Vec<f64> = (0..count).map(|k| 5.0 * 0.75_f64.powi(k as i32)).collect();
        let norm = values.iter().map(|s| s * s).sum::<f64>().sqrt();
        let mapped: Vec<f64> = values.iter().map(|s| (0..5).fold(s / norm, |x, _| quintic(x))).collect();
        assert!(count > 1 || (mapped[0] - 1.0).abs() < 0.35, "one value comes out near 1");
        let expected = of_singular_values(&mapped, rows, columns);
        let x = of_singular_values(&values, rows, columns);
        for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::F64, 1e-12)] {
            let x = Tensor::<Flex, 2>::from_data(
                burn::tensor::TensorData::new(x.clone(), [rows, columns]),
                (&Default::default(), dtype),
            );
            let got = host(primitive(orthogonalised(x)));
            assert_close(&format!("{rows} x {columns} {dtype:?}"), &got, &expected, tolerance);
        }
    }
}

#[test]
fn orthogonalised_zero_is_zero() {
    let x = tensor::<Flex, 2>(FlexTensor::zeros([6, 4].into(), DType::F32));
    let zero = host(primitive(orthogonalised(x)));
    assert!(zero.iter().all(|&x| x == 0.0));
}

fn address(x: &FlexTensor) -> *const f32 {
    x.storage::<f32>().as_ptr()
}

#[test]
fn tensors_without_another_owner_are_updated_in_place() {
    let tensors = start(Random(2).input(&[300, 7]).tensor(DType::F32));
    let addresses = |x: &AdamWTensors<Flex>| [address(&x.param), address(&x.exp_avg), address(&x.exp_avg_sq)];
    let before = addresses(&tensors);
    let after = stepped(tensors, Random(3).input(&[300, 7]).tensor(DType::F32));
    assert_eq!(addresses(&after), before);
}

#[test]
fn a_tensor_with_another_owner_is_not_changed() {
    let tensors = start(Random(2).input(&[300, 7]).tensor(DType::F32));
    let held = tensors.clone();
    let after = stepped(tensors, Random(3).input(&[300, 7]).tensor(DType::F32));
    assert_eq!(host(held.param.clone()), Random(2).input(&[300, 7]).values);
    assert!(host(held.exp_avg).iter().all(|&x| x == 0.0));
    assert!(address(&after.param) != address(&held.param));
}

#[test]
fn gradients_may_be_views() {
    let gradient = Random(4).input(&[6, 10]).tensor(DType::F32);
    let run = |param: FlexTensor, gradient: FlexTensor| host(stepped(start(param), gradient).param);
    let param = Random(5).input(&[6, 10]).tensor(DType::F32);
    let transposed = gradient.clone().transpose(0, 1).to_contiguous().transpose(0, 1);
    assert_eq!(run(param.clone(), transposed), run(param, gradient.clone()));
    // A parameter that is a slice of a larger tensor.
    let narrow = Random(6).input(&[8, 10]).tensor(DType::F32).narrow(0, 1, 6);
    assert_eq!(run(narrow.clone(), gradient.clone()), run(narrow.to_contiguous(), gradient));
}

#[test]
fn the_sum_of_squares_is_the_same_in_any_view() {
    let input: Input = Random(7).input(&[63, 40]);
    let exact: f64 = input.values.iter().map(|x| x * x).sum();
    let x = input.tensor(DType::F32);
    let sum = |x: FlexTensor| -> f64 { sum_of_squares(tensor::<Flex, 2>(x)).into_scalar().into() };
    assert_close("sum", &[sum(x.clone())], &[exact], 2e-7 * exact);
    assert_close("transposed", &[sum(x.transpose(0, 1))], &[exact], 2e-7 * exact);
    let in_f64 = host(primitive(sum_of_squares(tensor::<Flex, 2>(input.tensor(DType::F64)))));
    assert_close("in f64", &in_f64, &[exact], 1e-11 * exact);
    assert!(sum(FlexTensor::filled_typed([3, 4].into(), DType::F32, f32::NAN)).is_nan());
}
