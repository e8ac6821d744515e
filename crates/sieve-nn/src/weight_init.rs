//! Initial weights, drawn on the host, equal on every backend and for any number of threads. A parameter is drawn when
//! its value is first read, so a model whose weights are loaded from a file draws none.
use burn::module::{Param, ParamId};
use burn::tensor::backend::Backend;
use burn::tensor::{Shape, Tensor, TensorData};
use chacha20::ChaCha8Rng;
use chacha20::rand_core::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;
use std::cell::RefCell;
use std::ops::Range;

/// Values that are drawn from one random stream.
const CHUNK: usize = 1 << 16;

thread_local! {
    /// The range of elements that parameters are drawn in; see [`drawing_only`].
    static ONLY: RefCell<Option<Range<usize>>> = const { RefCell::new(None) };
}

/// Runs `read`. A parameter that is first read in it has only the elements `range` of its flattened values, as a tensor
/// whose last dimension is their number and whose other dimensions are 1. A parameter that has values keeps them all.
pub fn drawing_only<T>(range: Range<usize>, read: impl FnOnce() -> T) -> T {
    ONLY.set(Some(range));
    let result = read();
    ONLY.set(None);
    result
}

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
        // Draws a chunk's values after its first `num_skipped`, which are drawn too: how many random numbers a normal
        // value takes is known only when it is drawn.
        let draw_chunk = move |chunk: usize, num_skipped: usize, values: &mut [f32]| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(first_stream + chunk as u64);
            let mut next = || -> f64 { StandardNormal.sample(&mut rng) };
            for _ in 0..num_skipped {
                next();
            }
            values.iter_mut().for_each(|value| *value = (next() * standard_deviation) as f32);
        };
        let draw = move |range: Range<usize>| {
            let mut values = vec![0f32; range.len()];
            let (chunk, num_skipped) = (range.start / CHUNK, range.start % CHUNK);
            let (first, others) = values.split_at_mut(range.len().min(CHUNK - num_skipped));
            let draw_others = || {
                let others = others.par_chunks_mut(CHUNK).enumerate();
                others.for_each(|(others, values)| draw_chunk(chunk + 1 + others, 0, values));
            };
            rayon::join(|| draw_chunk(chunk, num_skipped, first), draw_others);
            values
        };
        parameter(draw, shape, device)
    }

    /// A vector of `len` values that repeat `pattern`.
    pub fn repeated<B: Backend>(&mut self, pattern: &[f64], len: usize, device: &B::Device) -> Param<Tensor<B, 1>> {
        let pattern = pattern.iter().map(|&x| x as f32).collect::<Vec<_>>();
        parameter(move |range| range.map(|place| pattern[place % pattern.len()]).collect(), [len], device)
    }

    /// A parameter filled with one value.
    pub fn constant<B: Backend, const D: usize>(
        &mut self,
        value: f64,
        shape: [usize; D],
        device: &B::Device,
    ) -> Param<Tensor<B, D>> {
        parameter(move |range| vec![value as f32; range.len()], shape, device)
    }
}

/// A trained parameter that calls `values` with a range of its flattened elements when it is first read.
fn parameter<B: Backend, const D: usize>(
    values: impl Fn(Range<usize>) -> Vec<f32> + Send + Sync + 'static,
    shape: [usize; D],
    device: &B::Device,
) -> Param<Tensor<B, D>> {
    let drawn = move |device: &B::Device, requires_grad| {
        let (range, shape) = match ONLY.with_borrow(Clone::clone) {
            Some(range) => {
                let mut part = [1; D];
                part[D - 1] = range.len();
                (range, part)
            }
            None => (0..shape.iter().product(), shape),
        };
        let data = TensorData::new(values(range), Shape::new(shape));
        B::memory_persistent_allocations(device, data, |data| Tensor::from_data(data, device))
            .set_require_grad(requires_grad)
    };
    let requires_grad = true;
    Param::uninitialized(ParamId::new(), drawn, device.clone(), requires_grad, Shape::new(shape))
}

#[cfg(test)]
mod tests;
