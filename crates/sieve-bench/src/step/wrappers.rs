//! Launch wrappers called with rows with gaps, sums added to what is there, results in place, and equal repeats. Values
//! are compared with the plain-Burn references.
use crate::bar::Bar;
use crate::device::Device;
use burn::tensor::DType;
use sieve_kernels::{CudaTensor, KernelError};
use sieve_testing::Random;

/// Largest error of each call, as a share of what is allowed.
pub(super) type Outcome = Result<f32, String>;

/// Elements between the end of a row and the next.
pub(super) const GAP: usize = 24;

pub(super) struct Calls<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) random: Random,
    pub(super) worst: f32,
}

/// A tensor on the device and its values.
pub(super) struct Input {
    pub(super) on: CudaTensor,
    pub(super) values: Vec<f32>,
}

impl<'a> Calls<'a> {
    pub(super) fn new(device: &'a dyn Device, seed: u64) -> Self {
        let random = Random(seed);
        Self {
            device,
            random,
            worst: 0.0,
        }
    }

    pub(super) fn pitched(&mut self, rows: usize, width: usize, dtype: DType) -> Result<Input, String> {
        self.with_gaps([rows, width], GAP, dtype)
    }

    /// Rows with this many NaN between them.
    pub(super) fn with_gaps(&mut self, [rows, width]: [usize; 2], gap: usize, dtype: DType) -> Result<Input, String> {
        let values = self.random.bf16_normals(rows * width);
        let mut buffer = Vec::with_capacity(rows * (width + gap));
        for row in values.chunks_exact(width) {
            buffer.extend(row);
            buffer.resize(buffer.len() + gap, f32::NAN);
        }
        let all = self.device.float(&buffer, &[rows, width + gap], dtype);
        let on = all
            .view("check", "x", &[rows, width], &[width + gap, 1])
            .map_err(text)?;
        Ok(Input { on, values })
    }

    pub(super) fn flat(&mut self, shape: &[usize], dtype: DType) -> Input {
        let values = self.random.bf16_normals(shape.iter().product());
        Input {
            on: self.device.float(&values, shape, dtype),
            values,
        }
    }

    /// Within one rounding to bf16, or, in f32, within the noise of a sum.
    pub(super) fn close(&mut self, name: &str, got: &CudaTensor, exact: &[f32]) -> Result<(), String> {
        let share = if got.dtype() == DType::BF16 { 1.0 / 256.0 } else { 2e-5 };
        let bar = Bar {
            plain: 0.0,
            floor: 1e-6,
            share,
            norm: false,
        };
        let got = self.device.floats(got).map_err(text)?;
        self.worst = self.worst.max(bar.judge(name, &got, exact, exact)?);
        Ok(())
    }

    /// Equal to the last bit.
    pub(super) fn equal(&self, what: &str, a: &CudaTensor, b: &CudaTensor) -> Result<(), String> {
        let (a, b) = (
            self.device.floats(a).map_err(text)?,
            self.device.floats(b).map_err(text)?,
        );
        same(what, &a, &b)
    }
}

pub(super) fn text(error: KernelError) -> String {
    error.to_string()
}

pub(super) fn added<'a>(a: &'a [f32], b: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
    a.iter().zip(b).map(|(a, b)| a + b)
}

pub(super) fn added_of(a: &[f32], b: &[f32]) -> Vec<f32> {
    added(a, b).collect()
}

/// Equal to the last bit; a NaN equals a NaN.
pub(super) fn same(what: &str, got: &[f32], expected: &[f32]) -> Result<(), String> {
    let equal = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
    let differ = got.iter().zip(expected).position(|pair| !equal(pair));
    match differ {
        None if got.len() == expected.len() => Ok(()),
        None => Err(format!("{what}: {} numbers, expected {}", got.len(), expected.len())),
        Some(at) => Err(format!("{what}: number {at} is {}, expected {}", got[at], expected[at])),
    }
}
