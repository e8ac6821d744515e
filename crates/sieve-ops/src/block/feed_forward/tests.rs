use super::{FeedForward, Residual, feed_forward, forward};
use crate::block::gemm::Operands;
use crate::linear::added;
use crate::testing::{Ad, Float, Input, Random, RandomInput, check_op, evaluate, float, primitive};
use crate::{GemmPrecision, PassFor, RmsNormCall, linear, linear_add, reference, rms_norm, swiglu};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorMetadata};
use burn_flex::Flex;
use sieve_core::Keeping;

const EPSILON: f64 = 1e-5;
const ALL: Keeping = Keeping::ALL;

/// x, and the weights of the norm, of gate and up, and of the down projection.
fn inputs([batch, seq_len, d_model, d_ff]: [usize; 4], seed: u64) -> [Input; 4] {
    let mut random = Random(seed);
    [
        random.input(&[batch, seq_len, d_model]),
        random.input(&[d_model]).affine(0.5, 1.0),
        random.input(&[2 * d_ff, d_model]).affine(0.3, 0.0),
        random.input(&[d_model, d_ff]).affine(0.3, 0.0),
    ]
}

/// The layer whose weights are in `inputs`, after x.
fn layer(inputs: &[Float], keeping: Keeping) -> FeedForward<Ad> {
    FeedForward {
        norm: float(&inputs[1]),
        gate_up: float(&inputs[2]),
        down: float(&inputs[3]),
        epsilon: EPSILON,
        precision: GemmPrecision::Tensors,
        keeping,
        pass: PassFor::Output,
        sums: [None, None],
    }
}

fn op(residual: Residual) -> impl Fn(&[Float]) -> Float {
    op_that_keeps(residual, Keeping::default())
}

fn op_that_keeps(residual: Residual, keeping: Keeping) -> impl Fn(&[Float]) -> Float {
    move |inputs| primitive(feed_forward(float::<3>(&inputs[0]), layer(inputs, keeping), residual))
}

/// The references of the layer's ops, one after another.
fn reference_op(residual: Residual) -> impl Fn(&[Float]) -> Float {
    move |inputs| {
        let [x, weight, gate_up, down] = [0, 1, 2, 3].map(|n| inputs[n].clone());
        let norm = RmsNormCall { x: x.clone(), weight, epsilon: EPSILON };
        let hidden = reference::linear::<Ad>(reference::rms_norm::<Ad>(norm), gate_up);
        let y = reference::linear::<Ad>(reference::swiglu::<Ad>(hidden), down);
        added::<Ad>((residual == Residual::Stream).then_some(x), y)
    }
}

const BOTH: [Residual; 2] = [Residual::Stream, Residual::None];

#[test]
fn equals_the_reference_and_finite_differences_for_any_sizes() {
    for residual in BOTH {
        let sizes = [[2, 63, 24, 20], [1, 1, 5, 3], [3, 2, 33, 8], [1, 17, 8, 1]];
        let (all, small) = (sizes.map(|sizes| inputs(sizes, 1)), inputs([2, 3, 7, 4], 2));
        let what = format!("feed_forward {residual:?}");
        check_op(&what, all, &small, &op(residual), &reference_op(residual));
    }
}

// A layer of single ops keeps every intermediate value. The op of the whole layer recomputes some, with the same ops.
#[test]
fn equals_a_chain_of_single_ops_to_the_last_bit() {
    let parts = |inputs: &[Float]| {
        let x: Tensor<Ad, 3> = float(&inputs[0]);
        let normed = rms_norm(x.clone(), float(&inputs[1]), EPSILON);
        let hidden = swiglu(linear(normed, float(&inputs[2])));
        primitive(linear_add(hidden, float(&inputs[3]), x))
    };
    for sizes in [[2, 63, 24, 20], [1, 1, 8, 5]] {
        let inputs = inputs(sizes, 4);
        let whole = crate::testing::View::Contiguous;
        let expected = evaluate(&parts, &inputs, 5, DType::F32, whole);
        let found = evaluate(&op(Residual::Stream), &inputs, 5, DType::F32, whole);
        assert_eq!(found, expected, "{sizes:?}");
        let found = evaluate(&op_that_keeps(Residual::Stream, ALL), &inputs, 5, DType::F32, whole);
        assert_eq!(found, expected, "{sizes:?}, all kept");
    }
}

#[test]
fn a_pass_for_gradients_alone_leaves_the_output_out_and_has_the_same_gradients() {
    let inputs = inputs([2, 7, 24, 20], 6);
    let ways = BOTH.into_iter().flat_map(|residual| [(residual, Keeping::default()), (residual, ALL)]);
    for (residual, keeping) in ways {
        let op = |pass| {
            move |inputs: &[Float]| {
                let layer = FeedForward { pass, ..layer(inputs, keeping) };
                primitive(feed_forward(float::<3>(&inputs[0]), layer, residual))
            }
        };
        let of = |pass| evaluate(&op(pass), &inputs, 5, DType::F32, crate::testing::View::Contiguous);
        let [whole, alone] = [PassFor::Output, PassFor::Gradients].map(of);
        assert_eq!(alone.gradients, whole.gradients, "{residual:?} {keeping:?}");
        assert_eq!(alone.output, inputs[0].values);
        assert_ne!(whole.output, alone.output);
    }
}

/// With `recomputable`, sieve-plan counts the normed residual stream (`d_model` numbers of each token) and the gated
/// activation (`d_ff`); without it, it counts nothing.
#[test]
fn kept_activations_are_those_that_the_plan_counts() {
    let [batch, seq_len, d_model, d_ff] = [2, 7, 24, 20];
    let inputs = inputs([batch, seq_len, d_model, d_ff], 3).map(|x| x.tensor(DType::F32));
    let leaves = inputs.clone().map(Ad::from_inner);
    let num_kept = |keeping| {
        let layer = layer(&leaves, keeping).values();
        let (_output, kept) = forward::<Flex>(inputs[0].clone(), layer, Residual::Stream);
        let num_kept_of = |operands: Operands<Flex>| match operands {
            Operands::X(x) => x.shape().num_elements(),
            _ => 0,
        };
        kept.operands.map(num_kept_of).iter().sum::<usize>()
    };
    assert_eq!(num_kept(ALL), batch * seq_len * (d_model + d_ff));
    assert_eq!(num_kept(Keeping::default()), 0);
}
