use super::{CHUNK, WeightInit, drawing_only};
use burn::tensor::Tensor;
use burn_flex::Flex;

/// The values of the next normal parameter.
fn draw(init: &mut WeightInit, shape: [usize; 2]) -> Vec<f32> {
    let param = init.normal::<Flex, 2>(shape, &Default::default());
    let values: Tensor<Flex, 2> = param.val();
    values.into_data().to_vec().expect("f32")
}

#[test]
fn weights_do_not_depend_on_the_number_of_threads() {
    let shape = [3, CHUNK + 77];
    let weights = |threads| sieve_testing::threads(threads).install(|| draw(&mut WeightInit::new(5, 0.02), shape));
    let one = weights(1);
    for threads in [2, 5] {
        assert!(weights(threads) == one);
    }
}

#[test]
fn a_part_has_the_values_of_the_whole() {
    let shape = [3, CHUNK + 77];
    let whole = draw(&mut WeightInit::new(5, 0.02), shape);
    for range in [0..whole.len(), 5..5, 7..CHUNK, CHUNK..CHUNK + 9, 2 * CHUNK - 3..3 * CHUNK + 200] {
        let part = drawing_only(range.clone(), || draw(&mut WeightInit::new(5, 0.02), shape));
        assert!(part == whole[range]);
    }
    let pattern = WeightInit::new(5, 0.02).repeated::<Flex>(&[1.0, 2.0, 3.0], 10, &Default::default());
    let part: Vec<f32> = drawing_only(4..9, || pattern.val()).into_data().to_vec().expect("f32");
    assert_eq!(part, [2.0, 3.0, 1.0, 2.0, 3.0]);
}

#[test]
fn a_parameter_depends_on_its_number_and_the_seed_alone() {
    let (mut a, mut b) = (WeightInit::new(5, 0.02), WeightInit::new(5, 0.02));
    let first = draw(&mut a, [4, 10]);
    draw(&mut b, [300, 300]);
    b.constant::<Flex, 1>(1.0, [7], &Default::default());
    let second = draw(&mut a, [6, 5]);
    assert_eq!(draw(&mut b, [6, 5]), second);
    assert_ne!(first[..30], second[..]);
    assert_ne!(draw(&mut WeightInit::new(6, 0.02), [4, 10]), first);
}

/// Drawn by rand_chacha 0.9 and rand_distr 0.5: a model of a seed is the same one with every version of Sieve.
#[test]
fn values_of_a_seed_do_not_change() {
    let mut init = WeightInit::new(5, 0.02);
    draw(&mut init, [1, 1]);
    let bits: Vec<u32> = draw(&mut init, [1, 4]).into_iter().map(f32::to_bits).collect();
    assert_eq!(bits, [0x3b50_f7e8, 0xbc70_9e20, 0x3cd5_7da1, 0xbb8c_a33b]);
}

#[test]
fn values_are_normal_with_the_given_deviation() {
    let values = draw(&mut WeightInit::new(7, 0.02), [400, 500]);
    let count = values.len() as f64;
    let moment = |power: i32| values.iter().map(|&x| (f64::from(x) / 0.02).powi(power)).sum::<f64>() / count;
    // Standard errors are 0.0022, 0.0032 and 0.022.
    assert!(moment(1).abs() < 0.01, "{}", moment(1));
    assert!((moment(2) - 1.0).abs() < 0.015, "{}", moment(2));
    assert!((moment(4) - 3.0).abs() < 0.1, "{}", moment(4));
}

#[test]
fn a_constant_parameter_has_one_value() {
    let param = WeightInit::new(0, 1.0).constant::<Flex, 1>(0.25, [5], &Default::default());
    let values: Vec<f32> = param.val().into_data().to_vec().expect("f32");
    assert_eq!(values, [0.25; 5]);
}
