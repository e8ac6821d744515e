use super::{QkNorm, QkNormRopeCall, RopeCall, RotaryEmbedding, qk_norm_rope};
use crate::reference;
use crate::testing::{
    Ad, Float, Input, Random, RandomInput, check_op, check_parity, documents, float, ints, primitive,
};
use burn::tensor::{DType, Int, Tensor, TensorMetadata};

const EPSILON: f64 = 1e-6;
const THETA: f64 = 100.0;

/// The tables in the dtype of the op's input.
fn rope(qkv: &Float, max_positions: usize) -> RotaryEmbedding<Ad> {
    let head_dim = qkv.shape()[3];
    let device = Default::default();
    RotaryEmbedding::with_dtype(head_dim, max_positions, THETA, &device, qkv.dtype())
}

/// The op on a packed tensor and the norms' weights.
fn run(inputs: &[Float], positions: Tensor<Ad, 2, Int>, num_kv_heads: usize) -> Float {
    let rope = rope(&inputs[0], 64);
    let norm = QkNorm { q_weight: float(&inputs[1]), k_weight: float(&inputs[2]), epsilon: EPSILON };
    let y = qk_norm_rope(float(&inputs[0]), norm, positions, &rope, num_kv_heads);
    primitive(y)
}

/// The op's reference on the same inputs.
fn reference_run(inputs: &[Float], positions: Tensor<Ad, 2, Int>, num_kv_heads: usize) -> Float {
    let call = QkNormRopeCall {
        q_weight: inputs[1].clone(),
        k_weight: inputs[2].clone(),
        positions: positions.into_primitive(),
        rope: rope(&inputs[0], 64).tables(),
        num_kv_heads,
        epsilon: EPSILON,
    };
    reference::qk_norm_rope::<Ad>(inputs[0].clone(), call)
}

fn inputs(dims: [usize; 4]) -> [Input; 3] {
    let mut random = Random(1);
    [random.input(&dims), random.input(&[dims[3]]).affine(0.5, 1.0), random.input(&[dims[3]]).affine(0.5, 1.0)]
}

#[test]
fn equals_the_reference_for_groups_and_documents() {
    for (dims, num_kv_heads) in [([2, 63, 9, 16], 3), ([2, 63, 12, 6], 3), ([1, 1, 18, 10], 3), ([2, 5, 6, 4], 2)] {
        let positions = documents::<Ad>(&[2, 18, 1, 30], [dims[0], dims[1]]).positions;
        let op = |inputs: &[Float]| run(inputs, positions.clone(), num_kv_heads);
        let reference = |inputs: &[Float]| reference_run(inputs, positions.clone(), num_kv_heads);
        check_op("qk_norm_rope", [inputs(dims)], &inputs(dims), &op, &reference);
    }
}

#[test]
fn positions_may_start_anywhere_and_be_a_view() {
    let inputs = inputs([2, 5, 6, 8]);
    let shifted = documents::<Ad>(&[3], [2, 5]).positions.add_scalar(40);
    let columns = shifted.clone().swap_dims(0, 1).into_data();
    let viewed = ints(columns.to_vec().expect("i32"), [5, 2]).swap_dims(0, 1);
    let op = |inputs: &[Float]| run(inputs, viewed.clone(), 2);
    let reference = |inputs: &[Float]| reference_run(inputs, shifted.clone(), 2);
    check_parity("qk_norm_rope, shifted", &inputs, &op, &reference);
}

#[test]
fn values_pass_through() {
    let inputs = inputs([1, 4, 5, 6]);
    let positions = documents::<Ad>(&[], [1, 4]).positions;
    let leaves = inputs.map(|input| input.untracked(DType::F32));
    let y: Tensor<Ad, 4> = float(&run(&leaves, positions, 2));
    let v = |x: Tensor<Ad, 4>| x.narrow(2, 3, 2).into_data();
    v(y).assert_eq(&v(float(&leaves[0])), true);
}

#[test]
fn without_norms_it_equals_its_reference_and_its_gradient_is_the_inverse() {
    for (dims, num_kv_heads) in [([2, 63, 9, 16], 3), ([2, 5, 6, 4], 2), ([1, 1, 18, 10], 3)] {
        let inputs = [Random(1).input(&dims)];
        let positions = documents::<Ad>(&[2, 18, 1, 30], [dims[0], dims[1]]).positions;
        let op = |inputs: &[Float]| {
            let rope = rope(&inputs[0], 64);
            primitive(super::rope(float(&inputs[0]), positions.clone(), &rope, num_kv_heads))
        };
        let reference = |inputs: &[Float]| {
            let call = RopeCall {
                positions: positions.clone().into_primitive(),
                rope: rope(&inputs[0], 64).tables(),
                num_kv_heads,
            };
            reference::rope::<Ad>(inputs[0].clone(), call)
        };
        check_op("rope", [&inputs], &inputs, &op, &reference);
    }
}
