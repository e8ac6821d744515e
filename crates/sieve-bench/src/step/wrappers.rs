//! Launch wrappers called with rows with gaps, sums added to what is there, results in place, and equal repeats. Values
//! are compared with the plain-Burn references.
use crate::device::Device;
use crate::report::{Wrong, wrong};
use crate::tensors::cast;
use crate::tolerance::Tolerance;
use burn::tensor::ops::FloatTensor;
use burn_flex::{Flex, FlexDevice};
use sieve_kernels::CudaTensor;
use sieve_kernels::DType;
use sieve_testing::Random;

/// Elements between the end of a row and the next.
pub(super) const GAP: usize = 24;

pub(super) struct LaunchCheck<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) random: Random,
    pub(super) worst: f32,
}

/// A tensor on the device and its values.
pub(super) struct Input {
    pub(super) on: CudaTensor,
    pub(super) values: Vec<f32>,
}

impl Input {
    /// The same on the host.
    pub(super) fn host<const D: usize>(&self, shape: [usize; D]) -> FloatTensor<Flex> {
        cast::<Flex, D>(&self.values, shape, burn::tensor::DType::F32, &FlexDevice)
    }
}

impl<'a> LaunchCheck<'a> {
    pub(super) fn new(device: &'a dyn Device, seed: u64) -> Self {
        let random = Random(seed);
        Self {
            device,
            random,
            worst: 0.0,
        }
    }

    /// Rows with gaps between them.
    pub(super) fn pitched(&mut self, shape: [usize; 2], dtype: DType) -> Result<Input, Wrong> {
        self.with_gaps(shape, GAP, dtype)
    }

    /// Rows with this many NaN between them.
    pub(super) fn with_gaps(&mut self, [rows, width]: [usize; 2], gap: usize, dtype: DType) -> Result<Input, Wrong> {
        let values = self.random.bf16_normals(rows * width);
        let buffer = gapped(&values, width, width + gap);
        let all = self.device.float(&buffer, &[rows, width + gap], dtype);
        let on = all.view("check", "x", &[rows, width], &[width + gap, 1])?;
        Ok(Input { on, values })
    }

    pub(super) fn flat(&mut self, shape: &[usize], dtype: DType) -> Input {
        let values = self.random.bf16_normals(shape.iter().product());
        let on = self.device.float(&values, shape, dtype);
        Input { on, values }
    }

    /// Within one rounding to bf16, or, in f32, within the noise of a sum.
    pub(super) fn close(&mut self, name: &str, got: &CudaTensor, exact: &[f32]) -> Result<(), Wrong> {
        let share = match got.dtype() {
            DType::BF16 => 1.0 / 256.0,
            _ => 2e-5,
        };
        self.within(Tolerance::new(0.0, 1e-6, share), name, got, [exact, exact])
    }

    /// Within a tolerance, by what a plain computation gives and what is exact.
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

    /// Equal to the last bit.
    pub(super) fn equal(&self, what: &str, a: &CudaTensor, b: &CudaTensor) -> Result<(), Wrong> {
        self.holds(what, a, &self.device.floats(b)?)
    }

    /// These numbers, to the last bit.
    pub(super) fn holds(&self, what: &str, got: &CudaTensor, all: &[f32]) -> Result<(), Wrong> {
        same(what, &self.device.floats(got)?, all)
    }
}

/// Rows made longer with NaN.
pub(super) fn gapped(values: &[f32], width: usize, pitch: usize) -> Vec<f32> {
    let mut buffer = Vec::with_capacity(values.len() / width * pitch);
    for row in values.chunks_exact(width) {
        buffer.extend(row);
        buffer.resize(buffer.len() + pitch - width, f32::NAN);
    }
    buffer
}

pub(super) fn added<'a>(a: &'a [f32], b: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
    a.iter().zip(b).map(|(a, b)| a + b)
}

pub(super) fn added_of(a: &[f32], b: &[f32]) -> Vec<f32> {
    added(a, b).collect()
}

/// Sums in f64 with something added to each.
pub(super) fn plus(sums: &[f64], more: &[f32]) -> Vec<f32> {
    let pairs = sums.iter().zip(more);
    pairs.map(|(a, &b)| (a + f64::from(b)) as f32).collect()
}

/// Equal to the last bit; a NaN equals a NaN.
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
