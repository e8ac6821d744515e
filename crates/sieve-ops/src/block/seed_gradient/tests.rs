use super::seed_gradient;
use crate::tensors::tensor;
use crate::testing::{Ad, Random, RandomInput};
use burn::tensor::{DType, Tensor};
use burn_flex::Flex;

#[test]
fn hands_the_given_gradient_to_its_input_and_nothing_else() {
    let mut random = Random(1);
    let [x, dy] = [(); 2].map(|()| tensor::<Flex, 3>(random.input(&[2, 3, 5]).tensor(DType::F32)));
    let leaf = Tensor::<Ad, 3>::from_inner(x).require_grad();
    let given = Tensor::<Ad, 3>::from_inner(dy.clone()).require_grad();
    let y = leaf.clone() * 3.0;
    let seed = seed_gradient(y, given.clone());
    assert_eq!(seed.clone().into_data().to_vec::<f32>().expect("f32"), [0.0]);
    // The gradient that reaches the seed is replaced by dy.
    let gradients = (seed * 7.0).backward();
    let gradient = leaf.grad(&gradients).expect("y depends on the leaf");
    gradient.into_data().assert_eq(&(dy * 3.0).into_data(), true);
    assert!(given.grad(&gradients).is_none());
}
