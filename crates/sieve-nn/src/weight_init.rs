//! Initial weights drawn on the host, the same on every backend and for any number of threads.
use burn::module::Param;
use burn::tensor::backend::Backend;
use burn::tensor::{Shape, Tensor, TensorData};
use chacha20::ChaCha8Rng;
use chacha20::rand_core::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

/// Values one random stream yields.
const CHUNK: usize = 1 << 16;

/// Draws parameters one after another; the n-th parameter of a model depends on the seed and on n alone.
#[derive(Clone, Debug)]
pub struct WeightInit {
    seed: u64,
    standard_deviation: f64,
    num_drawn: u64,
}

impl WeightInit {
    /// Normal values of mean 0 and the given standard deviation.
    pub fn new(seed: u64, standard_deviation: f64) -> Self {
        Self {
            seed,
            standard_deviation,
            num_drawn: 0,
        }
    }

    /// The next parameter, normal.
    pub fn normal<B: Backend, const D: usize>(&mut self, shape: [usize; D], device: &B::Device) -> Param<Tensor<B, D>> {
        let first_stream = self.num_drawn << 32;
        self.num_drawn += 1;
        let mut values = vec![0f32; shape.iter().product()];
        values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
            let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
            rng.set_stream(first_stream + chunk as u64);
            for value in values {
                let unit: f64 = StandardNormal.sample(&mut rng);
                *value = (unit * self.standard_deviation) as f32;
            }
        });
        parameter(values, shape, device)
    }

    /// A vector of `len` values that repeat `pattern`.
    pub fn repeated<B: Backend>(&mut self, pattern: &[f64], len: usize, device: &B::Device) -> Param<Tensor<B, 1>> {
        let values = pattern.iter().map(|&x| x as f32).cycle().take(len);
        parameter(values.collect(), [len], device)
    }

    /// A parameter filled with one value.
    pub fn constant<B: Backend, const D: usize>(
        &mut self,
        value: f64,
        shape: [usize; D],
        device: &B::Device,
    ) -> Param<Tensor<B, D>> {
        parameter(vec![value as f32; shape.iter().product()], shape, device)
    }
}

fn parameter<B: Backend, const D: usize>(
    values: Vec<f32>,
    shape: [usize; D],
    device: &B::Device,
) -> Param<Tensor<B, D>> {
    Param::from_data(TensorData::new(values, Shape::new(shape)), device)
}

#[cfg(test)]
mod tests;
