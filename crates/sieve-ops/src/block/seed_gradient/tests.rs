use super::seed_gradient;
use crate::testing::{Ad, Random, RandomInput};
use burn::tensor::{DType, Tensor, TensorPrimitive};

#[test]
fn hands_the_given_gradient_to_its_input_and_nothing_else() {
    let mut random = Random(1);
    let mut tensor = |dims: &[usize]| {
        let x = random.input(dims).tensor(DType::F32);
        Tensor::<burn_flex::Flex, 3>::from_primitive(TensorPrimitive::Float(x))
    };
    let (x, dy) = (tensor(&[2, 3, 5]), tensor(&[2, 3, 5]));
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
