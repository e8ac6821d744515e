//! Inputs and comparisons of the ops' tests.
//!
//! An op under test is a function of primitives, which have no number of dimensions in their type, so that one harness
//! serves all ops. Its reference is the plain-Burn forward pass on `Autodiff<Flex>`: Burn's own autodiff then gives
//! gradients that share nothing with ours.
pub(crate) use crate::tensors::primitive;
use crate::tensors::tensor;
use crate::{AttentionSpec, Documents};
use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{DType, Int, Shape, Slice, Tensor, TensorData};
use burn_flex::{Flex, FlexTensor};
use sieve_testing::wide;
pub(crate) use sieve_testing::{Random, assert_close};

/// The backend on which ops are tested.
pub(crate) type Ad = Autodiff<Flex>;
/// A float tensor of that backend with any number of dimensions.
pub(crate) type Float = FloatTensor<Ad>;
/// An op under test.
pub(crate) type Op<'a> = &'a dyn Fn(&[Float]) -> Float;

/// Random inputs.
pub(crate) trait RandomInput {
    /// Normal values, exact in f32.
    fn input(&mut self, dims: &[usize]) -> Input;
}

impl RandomInput for Random {
    fn input(&mut self, dims: &[usize]) -> Input {
        Input { values: wide(&self.vector(dims.iter().product())), dims: dims.to_vec() }
    }
}

/// Values of one input, exact in f32.
#[derive(Clone, Debug)]
pub(crate) struct Input {
    pub(crate) values: Vec<f64>,
    pub(crate) dims: Vec<usize>,
}

impl Input {
    /// `scale * x + offset`, rounded to f32.
    pub(crate) fn affine(mut self, scale: f64, offset: f64) -> Self {
        for value in &mut self.values {
            *value = f64::from((scale * *value + offset) as f32);
        }
        self
    }

    /// An input of the same shape whose entries along the first dimension all have the values of the first one.
    fn with_equal_rows(&self) -> Self {
        let row = self.values.len() / self.dims[0];
        Self { values: self.values[..row].repeat(self.dims[0]), dims: self.dims.clone() }
    }

    pub(crate) fn tensor(&self, dtype: DType) -> FlexTensor {
        FlexTensor::from_data(TensorData::new(self.values.clone(), self.dims.clone()).convert_dtype(dtype))
    }

    /// The input of an op, without gradient.
    pub(crate) fn untracked(&self, dtype: DType) -> Float {
        Ad::from_inner(self.tensor(dtype))
    }
}

/// Memory layout of an input; its values are the same in all layouts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum View {
    Contiguous,
    /// A slice of a larger tensor, which is NaN elsewhere.
    Sliced,
    /// Stored with the dimensions in reverse order.
    Transposed,
    /// One stored row, repeated by a stride of 0.
    Expanded,
}

/// The input as a tensor that lies in memory as `view` says.
fn view(input: &Input, dtype: DType, view: View) -> FlexTensor {
    let rank = input.dims.len();
    match view {
        View::Contiguous => input.tensor(dtype),
        View::Sliced => {
            let wide: Vec<usize> = input.dims.iter().map(|n| n + 2).collect();
            let nans = Input { values: vec![f64::NAN; wide.iter().product()], dims: wide }.tensor(dtype);
            let inside: Vec<Slice> = input.dims.iter().map(|&n| (1..=n).into()).collect();
            let padded = Flex::float_slice_assign(nans, &inside, input.tensor(dtype));
            (0..rank).fold(padded, |x, dim| x.narrow(dim, 1, input.dims[dim]))
        }
        View::Transposed => {
            let reversed: Vec<usize> = (0..rank).rev().collect();
            input.tensor(dtype).permute(&reversed).to_contiguous().permute(&reversed)
        }
        View::Expanded => {
            let row = input.tensor(dtype).narrow(0, 0, 1);
            Flex::float_expand(row, Shape::from(input.dims.clone()))
        }
    }
}

/// Output and gradients of an op, as f64.
#[derive(Debug, PartialEq)]
pub(crate) struct Evaluation {
    pub(crate) output: Vec<f64>,
    pub(crate) gradients: Vec<Vec<f64>>,
}

pub(crate) fn host(x: FlexTensor) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// The values of an integer tensor.
pub(crate) fn host_ints<B: Backend, const D: usize>(x: Tensor<B, D, Int>) -> Vec<i64> {
    x.into_data().iter::<i64>().collect()
}

pub(crate) fn float<const D: usize>(x: &Float) -> Tensor<Ad, D> {
    tensor(x.clone())
}

fn flat(x: Float) -> Tensor<Ad, 1> {
    let len = x.primitive.layout().num_elements();
    tensor(Ad::float_reshape(x, [len].into()))
}

/// The op's output, and the gradients of `sum(output * dy)` with dy drawn from the seed. In views other than
/// contiguous, dy is not contiguous either.
pub(crate) fn evaluate(op: Op, inputs: &[Input], seed: u64, dtype: DType, how: View) -> Evaluation {
    let leaf = |input| Ad::float_set_require_grad(Ad::from_inner(view(input, dtype, how)), true);
    let leaves: Vec<Float> = inputs.iter().map(leaf).collect();
    let y = op(&leaves);
    let dims = y.primitive.layout().shape().to_vec();
    let dy = Random(seed).input(&dims).untracked(dtype);
    let output = host(y.primitive.clone());
    let last = dims.len() - 1;
    let swap = |x: Float| match how {
        View::Contiguous => x,
        _ => Ad::float_swap_dims(x, 0, last),
    };
    let loss = (flat(swap(y)) * flat(swap(dy))).sum();
    let gradients = Ad::backward(primitive(loss));
    let gradient = |leaf| Ad::grad(leaf, &gradients).expect("every input has a gradient");
    Evaluation { output, gradients: leaves.iter().map(|leaf| host(gradient(leaf))).collect() }
}

/// Largest absolute difference; infinite where a value is not finite.
fn max_error(got: &[f64], exact: &[f64]) -> f64 {
    got.iter().zip(exact).fold(0.0, |max: f64, (got, exact)| {
        let error = (got - exact).abs();
        max.max(if error.is_finite() { error } else { f64::INFINITY })
    })
}

fn largest(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |max: f64, x| max.max(x.abs()))
}

/// Names of an evaluation's parts, with the parts.
fn parts<'a>(what: &str, x: &'a Evaluation) -> Vec<(String, &'a Vec<f64>)> {
    let gradients = x.gradients.iter().enumerate();
    std::iter::once((format!("{what}: output"), &x.output))
        .chain(gradients.map(|(n, gradient)| (format!("{what}: gradient {n}"), gradient)))
        .collect()
}

/// Checks that the error of the op in f32, against the reference in f64, is at most twice the error of the reference in
/// f32 plus 32 f32 epsilons of the largest value. Also checks that the op in f64, which runs our explicit backward
/// pass, agrees with Burn's autodiff of the reference to 1e-11.
#[track_caller]
pub(crate) fn check_parity(what: &str, inputs: &[Input], op: Op, reference: Op) {
    check_parity_within(32.0, what, inputs, op, reference);
}

/// [`check_parity`] with `roundings` f32 epsilons in place of 32.
#[track_caller]
pub(crate) fn check_parity_within(roundings: f64, what: &str, inputs: &[Input], op: Op, reference: Op) {
    let run = |op, dtype| evaluate(op, inputs, 77, dtype, View::Contiguous);
    let exact = run(reference, DType::F64);
    let plain = run(reference, DType::F32);
    let fast = run(op, DType::F32);
    let explicit = run(op, DType::F64);
    assert_eq!(exact.gradients.len(), fast.gradients.len());
    let plain = parts(what, &plain);
    let fast = parts(what, &fast);
    let explicit = parts(what, &explicit);
    for (n, (name, exact)) in parts(what, &exact).into_iter().enumerate() {
        let scale = largest(exact);
        assert_close(&format!("{name} in f64"), explicit[n].1, exact, 1e-11 * (1.0 + scale));
        // Inputs are of order 1, so results that cancel to less than 1 still have rounding errors of order epsilon.
        let floor = roundings * f64::from(f32::EPSILON) * (1.0 + scale);
        let tolerance = 2.0 * max_error(plain[n].1, exact) + floor;
        assert_close(&name, fast[n].1, exact, tolerance);
    }
}

/// Checks that every view of the inputs gives the same bits as contiguous inputs.
#[track_caller]
pub(crate) fn check_views(what: &str, inputs: &[Input], op: Op) {
    let contiguous = evaluate(op, inputs, 78, DType::F32, View::Contiguous);
    for how in [View::Sliced, View::Transposed] {
        let viewed = evaluate(op, inputs, 78, DType::F32, how);
        assert_same(what, how, &viewed, &contiguous);
    }
    let equal: Vec<Input> = inputs.iter().map(Input::with_equal_rows).collect();
    let stored = evaluate(op, &equal, 78, DType::F32, View::Contiguous);
    let expanded = evaluate(op, &equal, 78, DType::F32, View::Expanded);
    assert_same(what, View::Expanded, &expanded, &stored);
}

/// Checks that output and gradients have equal values.
#[track_caller]
fn assert_same(what: &str, how: View, got: &Evaluation, expected: &Evaluation) {
    let (got, expected) = (parts(what, got), parts(what, expected));
    for ((name, got), (_, expected)) in got.into_iter().zip(expected) {
        assert_close(&format!("{name}, {how:?}"), got, expected, 0.0);
    }
}

/// Checks the explicit gradients in f64 against central differences, at up to `MAX_COORDINATES` coordinates per input.
#[track_caller]
pub(crate) fn check_finite_differences(what: &str, inputs: &[Input], op: Op) {
    const MAX_COORDINATES: usize = 48;
    let seed = 79;
    let explicit = evaluate(op, inputs, seed, DType::F64, View::Contiguous);
    let dy = Random(seed).input(&[explicit.output.len()]);
    let value = |inputs: &[Input]| -> f64 {
        let leaves: Vec<Float> = inputs.iter().map(|input| input.untracked(DType::F64)).collect();
        let y = host(op(&leaves).primitive);
        y.iter().zip(&dy.values).map(|(y, dy)| y * dy).sum()
    };
    for (which, gradient) in explicit.gradients.iter().enumerate() {
        let len = gradient.len();
        let mut at = inputs.to_vec();
        let (mut expected, mut got) = (Vec::new(), Vec::new());
        for n in (0..len).step_by(len.div_ceil(MAX_COORDINATES)) {
            let x = inputs[which].values[n];
            let step = 1e-5 * (1.0 + x.abs());
            at[which].values[n] = x + step;
            let above = value(&at);
            at[which].values[n] = x - step;
            let below = value(&at);
            at[which].values[n] = x;
            expected.push((above - below) / (2.0 * step));
            got.push(gradient[n]);
        }
        let tolerance = 1e-6 * (1.0 + largest(&expected));
        let name = format!("{what}: gradient {which} against differences");
        assert_close(&name, &got, &expected, tolerance);
    }
}

/// [`check_parity`] and [`check_views`] with each of the inputs, and [`check_finite_differences`] with the small ones.
#[track_caller]
pub(crate) fn check_op<I: AsRef<[Input]>>(
    what: &str,
    all: impl IntoIterator<Item = I>,
    small: &[Input],
    op: Op,
    reference: Op,
) {
    for inputs in all {
        let inputs = inputs.as_ref();
        let dims: Vec<_> = inputs.iter().map(|input| &input.dims).collect();
        let what = format!("{what} {dims:?}");
        check_parity(&what, inputs, op, reference);
        check_views(&what, inputs, op);
    }
    check_finite_differences(what, small, op);
}

/// Documents of the given lengths in every row, and a last document with the remaining tokens of the row.
pub(crate) fn documents<B: Backend>(lengths: &[usize], [batch, seq_len]: [usize; 2]) -> Documents<B> {
    let (mut start, mut end) = (Vec::new(), Vec::new());
    let mut first = 0_usize;
    for &len in lengths.iter().chain([&usize::MAX]) {
        let last = first.max(first.saturating_add(len).min(seq_len));
        start.extend(vec![first as u32; last - first]);
        end.extend(vec![last as u32; last - first]);
        first = last;
    }
    let device = Default::default();
    Documents::new(&start.repeat(batch), &end.repeat(batch), [batch, seq_len], &device)
}

/// An op over documents.
pub(crate) type RowOp<'a> = &'a dyn Fn(&[Float], &Documents<Ad>) -> Float;

/// Output rows of a batch of one with documents of these lengths, in f32.
fn rows_of(inputs: &[Input], lengths: &[usize], op: RowOp) -> Vec<Vec<f64>> {
    let seq_len = inputs[0].dims[1];
    let leaves: Vec<Float> = inputs.iter().map(|input| input.untracked(DType::F32)).collect();
    let o = host(op(&leaves, &documents(lengths, [1, seq_len])).primitive);
    o.chunks(o.len() / seq_len).map(<[f64]>::to_vec).collect()
}

/// The op's output rows for the inputs as they are, and with other values in the tokens `changed` of the first input.
fn rows_with_others(
    inputs: &[Input],
    changed: &std::ops::Range<usize>,
    lengths: &[usize],
    op: RowOp,
) -> [Vec<Vec<f64>>; 2] {
    let mut other = inputs.to_vec();
    let token = other[0].values.len() / other[0].dims[1];
    let values = &mut other[0].values[changed.start * token..changed.end * token];
    values.iter_mut().for_each(|x| *x = -2.0 * *x + 1.0);
    [rows_of(inputs, lengths, op), rows_of(&other, lengths, op)]
}

/// Checks that output rows change by at most `tolerance` when later tokens change; inputs have 150 tokens.
#[track_caller]
pub(crate) fn check_later_tokens_change_nothing<const N: usize>(inputs: [Input; N], tolerance: f64, op: RowOp) {
    for from in [1, 15, 16, 64, 100, 149] {
        let [before, after] = rows_with_others(&inputs, &(from..150), &[], op);
        let what = format!("changed from {from}");
        assert_close(&what, &after[..from].concat(), &before[..from].concat(), tolerance);
        assert!(before[from] != after[from], "{what}");
    }
}

/// Checks that output rows change by at most `tolerance` when tokens of other documents change, and that they do change
/// with their own document; inputs have 120 tokens in four documents.
#[track_caller]
pub(crate) fn check_other_documents_change_nothing<const N: usize>(inputs: [Input; N], tolerance: f64, op: RowOp) {
    for document in [0..50, 50..51, 51..84, 84..120] {
        let [before, after] = rows_with_others(&inputs, &document, &[50, 1, 33], op);
        for (row, (before, after)) in before.iter().zip(&after).enumerate() {
            let what = format!("{document:?} changed, row {row}");
            if document.contains(&row) {
                assert!(before != after, "{what}")
            } else {
                assert_close(&what, after, before, tolerance)
            }
        }
    }
}

/// Host integers as a tensor.
pub(crate) fn ints<const D: usize>(values: Vec<i32>, dims: [usize; D]) -> Tensor<Ad, D, Int> {
    Tensor::from_data(TensorData::new(values, dims), &Default::default())
}

/// Sizes and documents of an attention call under test.
pub(crate) struct Call {
    /// `[batch, seq_len]`.
    pub(crate) dims: [usize; 2],
    pub(crate) spec: AttentionSpec,
    pub(crate) head_dim: usize,
    pub(crate) documents: Documents<Ad>,
}

impl Call {
    pub(crate) fn new(dims: [usize; 2], heads: [usize; 2], head_dim: usize, lengths: &[usize]) -> Self {
        Self { dims, spec: AttentionSpec::dense(heads, head_dim), head_dim, documents: documents(lengths, dims) }
    }

    pub(crate) fn qkv(&self, seed: u64) -> Input {
        let [batch, n] = self.dims;
        Random(seed).input(&[batch, n, self.spec.packed_heads(), self.head_dim])
    }
}

/// [`check_parity`] and [`check_views`] with the inputs of each of [`calls`], and [`check_finite_differences`] with
/// those of a small call.
#[track_caller]
pub(crate) fn check_calls<const N: usize>(
    what: &str,
    inputs: impl Fn(&Call) -> [Input; N],
    op: impl Fn(&Call, &[Float]) -> Float,
    reference: impl Fn(&Call, &[Float]) -> Float,
) {
    for call in calls() {
        let (inputs, op) = (inputs(&call), |inputs: &[Float]| op(&call, inputs));
        check_parity(what, &inputs, &op, &|inputs| reference(&call, inputs));
        check_views(what, &inputs, &op);
    }
    let small = Call::new([2, 13], [4, 2], 3, &[6]);
    check_finite_differences(what, &inputs(&small), &|inputs| op(&small, inputs));
}

/// Calls of several sizes, with documents and without.
pub(crate) fn calls() -> Vec<Call> {
    vec![
        Call::new([2, 23], [4, 2], 6, &[]),
        Call::new([2, 31], [3, 3], 16, &[5, 1, 3, 12]),
        Call::new([1, 1], [2, 1], 4, &[]),
        Call::new([1, 3], [2, 2], 8, &[2]),
        Call::new([1, 70], [6, 2], 20, &[33]),
    ]
}
