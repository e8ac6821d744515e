use super::embedding;
use crate::reference;
use crate::testing::{Ad, Float, Random, RandomInput, check_op, float, ints, primitive};
use burn::tensor::{DType, Int, Tensor};

const VOCAB_SIZE: usize = 11;

/// Ids with repeats; some rows stay unused.
fn ids(batch: usize, seq_len: usize) -> Tensor<Ad, 2, Int> {
    let mut random = Random(5);
    let ids = (0..batch * seq_len).map(|_| random.below(VOCAB_SIZE - 3) as i32);
    ints(ids.collect(), [batch, seq_len])
}

#[test]
fn equals_the_reference_and_finite_differences() {
    for (batch, seq_len, d_model) in [(2, 63, 24), (1, 1, 5), (2, 7, 3)] {
        let ids = ids(batch, seq_len);
        let inputs = [Random(1).input(&[VOCAB_SIZE, d_model])];
        let op = |inputs: &[Float]| primitive(embedding(float(&inputs[0]), ids.clone()));
        let reference = |inputs: &[Float]| reference::embedding::<Ad>(inputs[0].clone(), ids.clone().into_primitive());
        check_op("embedding", [&inputs], &inputs, &op, &reference);
    }
}

#[test]
fn ids_may_be_a_view() {
    let weight = Random(3).input(&[VOCAB_SIZE, 4]);
    let weight: Tensor<Ad, 2> = float(&weight.untracked(DType::F32));
    let stored = ids(3, 5);
    let viewed = stored.clone().swap_dims(0, 1);
    let copied = ints(viewed.clone().into_data().to_vec().expect("i32"), [5, 3]);
    let rows = |ids| embedding(weight.clone(), ids).into_data();
    rows(viewed).assert_eq(&rows(copied), true);
}
