use super::{add_bias, linear};
use crate::reference;
use crate::tensors::tensor;
use crate::testing::{Ad, Float, Random, RandomInput, check_op, check_parity, float, primitive};
use burn::tensor::DType;
use burn_flex::Flex;

fn op(inputs: &[Float]) -> Float {
    primitive(linear(float::<3>(&inputs[0]), float(&inputs[1])))
}

fn reference_op(inputs: &[Float]) -> Float {
    reference::linear::<Ad>(inputs[0].clone(), inputs[1].clone())
}

#[test]
fn equals_the_reference_and_finite_differences_for_any_sizes() {
    let inputs = |[batch, seq_len, d_in, d_out]: [usize; 4]| {
        let x = Random(1).input(&[batch, seq_len, d_in]);
        [x, Random(2).input(&[d_out, d_in])]
    };
    let sizes = [[2, 63, 48, 40], [1, 1, 5, 3], [3, 1, 33, 65], [1, 129, 17, 1], [2, 5, 1, 7], [2, 19, 24, 36]];
    check_op("linear", sizes.map(inputs), &inputs([2, 3, 5, 4]), &op, &reference_op);
}

#[test]
fn a_matrix_needs_no_batch() {
    let mut random = Random(4);
    let inputs = [random.input(&[7, 5]), random.input(&[3, 5])];
    let op = |inputs: &[Float]| primitive(linear(float::<2>(&inputs[0]), float(&inputs[1])));
    check_parity("linear of a matrix", &inputs, &op, &reference_op);
}

#[test]
fn a_bias_equals_a_plain_addition() {
    for [batch, seq_len, width] in [[2, 63, 48], [1, 1, 5], [3, 1, 33], [1, 129, 1]] {
        let mut random = Random(5);
        let inputs = [random.input(&[batch, seq_len, width]), random.input(&[width])];
        let op = |inputs: &[Float]| primitive(add_bias(float::<3>(&inputs[0]), float(&inputs[1])));
        let plain = |inputs: &[Float]| primitive(float::<3>(&inputs[0]) + float::<1>(&inputs[1]).unsqueeze());
        check_parity("a bias", &inputs, &op, &plain);
    }
}

// A prompt has many rows and a decoding step one: the same row must give the same bits.
#[test]
fn a_row_does_not_depend_on_the_number_of_rows() {
    let mut random = Random(1);
    for [d_in, d_out] in [[64, 128], [192, 1024], [48, 40], [512, 192], [768, 2304], [3000, 200]] {
        let mut matrix = |rows| tensor::<Flex, 2>(random.input(&[rows, d_in]).tensor(DType::F32));
        let (weight, x) = (matrix(d_out), matrix(130));
        let all: Vec<f32> = linear(x.clone(), weight.clone()).into_data().to_vec().unwrap();
        for count in [1, 2, 5, 7, 8, 9, 16, 33, 65] {
            let some = linear(x.clone().narrow(0, 3, count), weight.clone()).into_data();
            let some: Vec<f32> = some.to_vec().unwrap();
            let expected = &all[3 * d_out..(3 + count) * d_out];
            assert_eq!(some, expected, "{d_in} to {d_out}, {count} rows");
        }
    }
}
