//! Inputs and comparisons that the checks of this folder share. Inputs may have gaps between rows, filled with NaN.
//! Results are compared with the plain-Burn references, or with each other bit for bit.
use crate::device::Device;
use crate::report::{Wrong, wrong};
use crate::tensors::cast;
use crate::tolerance::Tolerance;
use burn::tensor::ops::FloatTensor;
use burn_flex::{Flex, FlexDevice};
use sieve_kernels::{CudaTensor, DType};
use sieve_testing::Random;

/// Vocabulary size of both timed models.
pub(super) const VOCAB: usize = 50280;

/// Seed of the labels and token numbers of a timed call.
pub(super) const SEED: u64 = 20;

/// Elements between the end of a row and the start of the next in [`LaunchCheck::pitched`].
pub(super) const GAP: usize = 24;

/// The state of one check: draws inputs, and remembers the largest error.
pub(super) struct LaunchCheck<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) random: Random,
    /// The largest ratio of error to tolerance so far.
    pub(super) worst: f32,
}

/// A tensor on the device, and its values on the host.
pub(super) struct Input {
    pub(super) tensor: CudaTensor,
    pub(super) values: Vec<f32>,
}

impl Input {
    /// The values as an f32 tensor of the CPU backend.
    pub(super) fn host<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<Flex> {
        cast::<Flex, D>(&self.values, shape, burn::tensor::DType::F32, &FlexDevice)
    }
}

impl<'a> LaunchCheck<'a> {
    pub(super) fn new(device: &'a dyn Device, seed: u64) -> Self {
        Self { device, random: Random(seed), worst: 0.0 }
    }

    /// Draws bf16 rows with [`GAP`] NaN between them.
    pub(super) fn pitched(&mut self, shape: [usize; 2]) -> Result<Input, Wrong> {
        self.with_gaps(shape, GAP)
    }

    /// Draws bf16 rows with `gap` NaN between them.
    pub(super) fn with_gaps(&mut self, [rows, width]: [usize; 2], gap: usize) -> Result<Input, Wrong> {
        let values = self.random.bf16_normals(rows * width);
        let buffer = gapped(&values, width, width + gap);
        let all = self.device.float(&buffer, &[rows, width + gap], DType::BF16);
        let tensor = all.view("check", "x", &[rows, width], &[width + gap, 1])?;
        Ok(Input { tensor, values })
    }

    /// Draws the values of a contiguous tensor.
    pub(super) fn flat(&mut self, shape: &[usize], dtype: DType) -> Input {
        let values = self.random.bf16_normals(shape.iter().product());
        self.input(values, shape, dtype)
    }

    /// A contiguous tensor of given values.
    pub(super) fn input(&self, values: Vec<f32>, shape: &[usize], dtype: DType) -> Input {
        let tensor = self.device.float(&values, shape, dtype);
        Input { tensor, values }
    }

    /// Fails where `got` differs from `exact` by more than one rounding to bf16, or, in f32, by more than the error of
    /// a sum.
    pub(super) fn close(&mut self, name: &str, got: &CudaTensor, exact: &[f32]) -> Result<(), Wrong> {
        let share = match got.dtype() {
            DType::BF16 => 1.0 / 256.0,
            _ => 2e-5,
        };
        self.within(Tolerance::new(0.0, 1e-6, share), name, got, [exact, exact])
    }

    /// Fails where `got` is not within `tolerance` of `exact`; `plain` is the result of a plain bf16 computation.
    pub(super) fn within(
        &mut self,
        tolerance: Tolerance,
        name: &str,
        got: &CudaTensor,
        [plain, exact]: [&[f32]; 2],
    ) -> Result<(), Wrong> {
        let got = self.device.floats(got)?;
        self.worst = self.worst.max(tolerance.judge(name, &got, plain, exact)?);
        Ok(())
    }

    /// Fails unless both tensors are equal bit for bit.
    pub(super) fn equal(&self, what: &str, a: &CudaTensor, b: &CudaTensor) -> Result<(), Wrong> {
        self.holds(what, a, &self.device.floats(b)?)
    }

    /// Fails unless the tensor holds exactly the numbers in `expected`.
    pub(super) fn holds(&self, what: &str, got: &CudaTensor, expected: &[f32]) -> Result<(), Wrong> {
        same(what, &self.device.floats(got)?, expected)
    }
}

/// Pads rows of `width` numbers with NaN to `pitch` numbers.
pub(super) fn gapped(values: &[f32], width: usize, pitch: usize) -> Vec<f32> {
    let mut buffer = Vec::with_capacity(values.len() / width * pitch);
    for row in values.chunks_exact(width) {
        buffer.extend(row);
        buffer.resize(buffer.len() + pitch - width, f32::NAN);
    }
    buffer
}

/// `a + b` of each pair, added in f64 and rounded to f32.
pub(super) fn plus<T: Copy + Into<f64>>(a: &[T], b: &[f32]) -> Vec<f32> {
    let pairs = a.iter().zip(b);
    pairs.map(|(&a, &b)| (a.into() + f64::from(b)) as f32).collect()
}

/// Fails unless both lists are equal; a NaN equals a NaN.
pub(super) fn same(what: &str, got: &[f32], expected: &[f32]) -> Result<(), Wrong> {
    let equal = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
    let differ = got.iter().zip(expected).position(|pair| !equal(pair));
    match differ {
        None if got.len() == expected.len() => Ok(()),
        None => {
            let (got, expected) = (got.len(), expected.len());
            wrong(format!("{what}: {got} numbers, expected {expected}"))
        }
        Some(at) => {
            let (got, expected) = (got[at], expected[at]);
            wrong(format!("{what}: number {at} is {got}, expected {expected}"))
        }
    }
}
