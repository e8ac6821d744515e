//! Initial weights, drawn on the host, equal on every backend and for any number of threads. A parameter is drawn when
//! its value is first read, so a model whose weights are loaded from a file draws none.
use burn::module::{Param, ParamId};
use burn::tensor::backend::Backend;
use burn::tensor::{Shape, Tensor, TensorData};
use chacha20::ChaCha8Rng;
use chacha20::rand_core::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

/// Values that are drawn from one random stream.
const CHUNK: usize = 1 << 16;

/// Draws parameters one after another. The n-th normal parameter depends only on the seed and on n.
#[derive(Clone, Debug)]
pub struct WeightInit {
    seed: u64,
    standard_deviation: f64,
    num_drawn: u64,
}

impl WeightInit {
    /// Normal values of mean 0 and the given standard deviation.
    pub fn new(seed: u64, standard_deviation: f64) -> Self {
        Self { seed, standard_deviation, num_drawn: 0 }
    }

    /// The next parameter, with normal random values.
    pub fn normal<B: Backend, const D: usize>(&mut self, shape: [usize; D], device: &B::Device) -> Param<Tensor<B, D>> {
        // Each parameter has 2^32 random streams, one for each chunk.
        let (seed, standard_deviation, first_stream) = (self.seed, self.standard_deviation, self.num_drawn << 32);
        self.num_drawn += 1;
        let draw = move || {
            let mut values = vec![0f32; shape.iter().product()];
            values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
                let mut rng = ChaCha8Rng::seed_from_u64(seed);
                rng.set_stream(first_stream + chunk as u64);
                for value in values {
                    let unit: f64 = StandardNormal.sample(&mut rng);
                    *value = (unit * standard_deviation) as f32;
                }
            });
            values
        };
        parameter(draw, shape, device)
    }

    /// A vector of `len` values that repeat `pattern`.
    pub fn repeated<B: Backend>(&mut self, pattern: &[f64], len: usize, device: &B::Device) -> Param<Tensor<B, 1>> {
        let pattern = pattern.iter().map(|&x| x as f32).collect::<Vec<_>>();
        parameter(move || pattern.iter().copied().cycle().take(len).collect(), [len], device)
    }

    /// A parameter filled with one value.
    pub fn constant<B: Backend, const D: usize>(
        &mut self,
        value: f64,
        shape: [usize; D],
        device: &B::Device,
    ) -> Param<Tensor<B, D>> {
        parameter(move || vec![value as f32; shape.iter().product()], shape, device)
    }
}

/// A trained parameter that calls `values` when it is first read.
fn parameter<B: Backend, const D: usize>(
    values: impl Fn() -> Vec<f32> + Send + Sync + 'static,
    shape: [usize; D],
    device: &B::Device,
) -> Param<Tensor<B, D>> {
    let drawn = move |device: &B::Device, requires_grad| {
        let data = TensorData::new(values(), Shape::new(shape));
        B::memory_persistent_allocations(device, data, |data| Tensor::from_data(data, device))
            .set_require_grad(requires_grad)
    };
    let requires_grad = true;
    Param::uninitialized(ParamId::new(), drawn, device.clone(), requires_grad, Shape::new(shape))
}

#[cfg(test)]
mod tests;
