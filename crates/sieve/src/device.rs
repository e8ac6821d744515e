//! `--device`: where a command computes.
use anyhow::{Result, bail};
use burn::tensor::{Distribution, Tensor};
use burn_flex::{Flex, FlexDevice};
use std::str::FromStr;
use std::time::Instant;

/// A parsed `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceChoice {
    /// The first CUDA device where there is one, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// A CUDA device by index.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|index| index.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| format!("'{text}' is no device; use auto, cpu, cuda or cuda:N")),
        }
    }
}

/// What a command was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// The CPU.
    Cpu,
}

impl DeviceChoice {
    /// Looks for the device.
    pub(crate) fn resolve(self) -> Result<Device> {
        match self {
            Self::Auto | Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(index) => bail!(
                "--device cuda:{index}: training on CUDA is not part of this build yet\n  hint: use --device cpu"
            ),
        }
    }
}

/// FLOP/s of f32 matrix products on this CPU: the best of a few products of 1024 x 1024 x 1024.
pub(crate) fn cpu_peak_flops() -> f64 {
    const SIZE: usize = 1024;
    let a = Tensor::<Flex, 2>::random([SIZE, SIZE], Distribution::Default, &FlexDevice);
    let b = a.clone().transpose();
    let seconds = (0..5).map(|_| {
        let started = Instant::now();
        let _product = a.clone().matmul(b.clone());
        started.elapsed().as_secs_f64()
    });
    2.0 * (SIZE as f64).powi(3) / seconds.fold(f64::INFINITY, f64::min)
}

/// Threads that compute on the CPU.
pub(crate) fn num_threads() -> usize {
    rayon::current_num_threads()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_parse() {
        assert_eq!("auto".parse(), Ok(DeviceChoice::Auto));
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(DeviceChoice::Cuda(3)));
        assert!("gpu".parse::<DeviceChoice>().is_err());
        assert!("cuda:x".parse::<DeviceChoice>().is_err());
    }
}
