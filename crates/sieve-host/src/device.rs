//! The flag `--device`: where a command computes.
use anyhow::{Context, Result, bail};
use burn::tensor::{DType, Distribution, Tensor};
use burn_flex::{Flex, FlexDevice};
use clap::ValueEnum;
use sieve_core::ModelShape;
use sieve_hf::Kept;
pub use sieve_kernels::Device;
use sieve_kernels::{CudaReport, DeviceReport, KernelCache, KernelError};
use sieve_plan::gpu_attention_gap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

/// A parsed `--device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA GPU if there is one, otherwise the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The CUDA GPU with this index.
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
                .ok_or_else(|| format!("'{text}' is not a device; use auto, cpu, cuda or cuda:N")),
        }
    }
}

/// The number type of loaded weights: f32 for all, or bf16 for the weights of GEMMs and f32 for the others.
#[expect(missing_docs, reason = "clap shows the comment of a variant as help")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    F32,
    Bf16,
}

/// The device a model runs on, and the type its parameters have there.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    /// The device.
    pub device: Device,
    /// The type in which weights are kept there.
    pub kept: Kept,
}

impl Place {
    /// # Errors
    /// `dtype` with a GPU: parameters are always bf16 there.
    pub fn new(device: Device, dtype: Option<DtypeArg>) -> Result<Self> {
        let kept = match (&device, dtype) {
            (Device::Cpu, None | Some(DtypeArg::F32)) => Kept::All(DType::F32),
            (Device::Cpu, Some(DtypeArg::Bf16)) => Kept::Bf16Weights,
            (Device::Cuda(_), None) => Kept::All(DType::BF16),
            (Device::Cuda(gpu), Some(_)) => bail!(
                "--dtype is what a CPU keeps weights in; this model computes on cuda:{}, where all is bf16\n  \
                 hint: leave --dtype out, or add --device cpu",
                gpu.index
            ),
        };
        Ok(Self { device, kept })
    }

    /// With `--verbose`, prints the device's name.
    fn print_name(&self) {
        if !crate::terminal::is_verbose() {
            return;
        }
        let kept = match self.kept {
            Kept::Bf16Weights => ", weights in bf16, sums in f32",
            Kept::All(_) => "",
        };
        crate::terminal::note(&match &self.device {
            Device::Cpu => format!("device: the CPU, {} threads{kept}", num_threads()),
            Device::Cuda(gpu) => format!("device: cuda:{}, {}", gpu.index, gpu.name),
        });
    }
}

impl DeviceChoice {
    /// Finds the device. A CUDA device is probed and the kernel cache is opened here, before any tensor exists.
    pub fn resolve(self) -> Result<Device> {
        self.resolve_and_prepare(|_, _| Ok(()))
    }

    /// The device for a model of this shape, chosen by [`resolve`](Self::resolve) and [`for_model`](Self::for_model),
    /// and the type its weights are kept in.
    pub fn resolve_for(self, dtype: Option<DtypeArg>, shape: impl FnOnce() -> Result<ModelShape>) -> Result<Place> {
        let device = match self.look(|_, _| Ok(()))? {
            Device::Cuda(gpu) if self == Self::Auto => self.for_model(&Device::Cuda(gpu), &[shape()?]),
            device => device,
        };
        let place = Place::new(device, dtype)?;
        place.print_name();
        Ok(place)
    }

    /// The device a model runs on, which has these shapes in the run's stages. With `auto`, a GPU whose kernels do not
    /// take its attention in one of them is not used: the reference op would be slower than the CPU. Then a line is
    /// printed.
    pub fn for_model(self, found: &Device, shapes: &[ModelShape]) -> Device {
        match (self, found, shapes.iter().find_map(gpu_attention_gap)) {
            (Self::Auto, Device::Cuda(gpu), Some(reason)) => {
                crate::terminal::note(&format!(
                    "device: using the CPU, because {reason}; --device cuda:{} would run its reference on {}",
                    gpu.index, gpu.name
                ));
                Device::Cpu
            }
            _ => found.clone(),
        }
    }

    /// Finds the device; before a CUDA device is opened, `prepare` may add kernels to its kernel cache.
    pub fn resolve_and_prepare(
        self,
        prepare: impl FnOnce(&KernelCache, &DeviceReport) -> Result<()>,
    ) -> Result<Device> {
        let place = Place::new(self.look(prepare)?, None)?;
        place.print_name();
        Ok(place.device)
    }

    /// Finds the device. `auto` takes the first CUDA GPU, and the CPU if there is none or it cannot be used.
    fn look(self, prepare: impl FnOnce(&KernelCache, &DeviceReport) -> Result<()>) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Auto => match sieve_kernels::CudaReport::probe() {
                Ok(report) => open_cuda(&report, 0, prepare),
                Err(KernelError::NoDriver | KernelError::NoDevice) => Ok(Device::Cpu),
                Err(error) => {
                    crate::terminal::note(&format!("device: using the CPU, because {error}"));
                    Ok(Device::Cpu)
                }
            },
            Self::Cuda(index) => open_cuda(&sieve_kernels::CudaReport::probe()?, index, prepare),
        }
    }
}

/// Opens the kernel cache of the CUDA device `index`, after `prepare` has filled it.
fn open_cuda(
    report: &CudaReport,
    index: usize,
    prepare: impl FnOnce(&KernelCache, &DeviceReport) -> Result<()>,
) -> Result<Device> {
    let device = report.device(index)?.clone();
    let cache = KernelCache::open(&cache_root()?, &device.arch(), report.nvrtc)?;
    prepare(&cache, &device)?;
    cache.init_runtime()?;
    // The cache's file lock must be held until the process ends.
    std::mem::forget(cache);
    Ok(Device::Cuda(device))
}

/// Folder of caches: `$XDG_CACHE_HOME/sieve`, else `~/.cache/sieve`.
pub fn cache_root() -> Result<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let base = variable("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .context("no place for compiled kernels: set XDG_CACHE_HOME or HOME")?;
    Ok(base.join("sieve"))
}

/// `(in use, total)` memory of a CUDA device, in bytes; zero when the driver does not answer.
pub fn cuda_memory(index: usize) -> (u64, u64) {
    sieve_kernels::DeviceReport::memory_bytes(index).map_or((0, 0), |(free, total)| (total - free, total))
}

/// FLOP/s of f32 GEMMs on this CPU: the best of five GEMMs of 1024 x 1024 x 1024.
pub fn cpu_peak_flops() -> f64 {
    const SIZE: usize = 1024;
    let a = Tensor::<Flex, 2>::random([SIZE, SIZE], Distribution::Default, &FlexDevice);
    let seconds = (0..5).map(|_| {
        let started = Instant::now();
        let _gemm = sieve_ops::linear(a.clone(), a.clone());
        started.elapsed().as_secs_f64()
    });
    2.0 * (SIZE as f64).powi(3) / seconds.fold(f64::INFINITY, f64::min)
}

/// The system's load average of the last minute: processes that ran or waited for a core. `None` without /proc/loadavg.
pub fn load() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}

/// Number of threads that compute on the CPU.
pub fn num_threads() -> usize {
    rayon::current_num_threads()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_core::Recipe;
    use sieve_core::recipe::sibling;

    /// The GPU of this index of a host of H200s.
    fn h200(index: usize) -> Device {
        Device::Cuda(DeviceReport {
            index,
            name: "NVIDIA H200".to_owned(),
            major: 9,
            minor: 0,
            num_multiprocessors: 132,
            total_memory_bytes: 141_000_000_000,
        })
    }

    fn shape(recipe: &str) -> ModelShape {
        let recipe = Recipe::load(recipe, "a recipe", &[]).expect("a shipped recipe");
        recipe.model_shape(50_277).expect("a shape")
    }

    #[test]
    fn auto_never_takes_a_gpu_for_a_reference_of_attention() {
        let gpu = h200(1);
        let [auto, cuda] = [DeviceChoice::Auto, DeviceChoice::Cuda(1)];
        let nsa = shape(include_str!("../../../recipes/nsa_80m.toml"));
        let mla = shape(&sibling("mla_80m", include_str!("../../../recipes/mha_80m.toml")).expect("a known name"));
        let dma = shape(include_str!("../../../recipes/dma_80m.toml"));
        let narrow = ModelShape { head_dim: 40, ..dma.clone() };
        let narrow_nsa = ModelShape { head_dim: 96, ..nsa.clone() };
        for shape in [&narrow_nsa, &narrow] {
            let shapes = &[dma.clone(), shape.clone()];
            assert_eq!(auto.for_model(&gpu, shapes), Device::Cpu);
            // A GPU that the user names is used.
            assert_eq!(cuda.for_model(&gpu, shapes), gpu);
            assert_eq!(auto.for_model(&Device::Cpu, shapes), Device::Cpu);
        }
        for shape in [&dma, &mla, &nsa] {
            assert_eq!(auto.for_model(&gpu, std::slice::from_ref(shape)), gpu);
        }
    }

    #[test]
    fn devices_parse() {
        assert_eq!("auto".parse(), Ok(DeviceChoice::Auto));
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(DeviceChoice::Cuda(3)));
        assert!("gpu".parse::<DeviceChoice>().is_err());
        assert!("cuda:x".parse::<DeviceChoice>().is_err());
    }

    #[test]
    fn only_a_cpu_has_a_choice_of_type() {
        let gpu = h200(2);
        let kept = |dtype| Place::new(Device::Cpu, dtype).expect("a CPU takes any").kept;
        assert_eq!(kept(None), Kept::All(DType::F32));
        assert_eq!(kept(Some(DtypeArg::F32)), Kept::All(DType::F32));
        assert_eq!(kept(Some(DtypeArg::Bf16)), Kept::Bf16Weights);
        assert_eq!(Place::new(gpu.clone(), None).expect("bf16").kept, Kept::All(DType::BF16));
        for dtype in [DtypeArg::F32, DtypeArg::Bf16] {
            let error = Place::new(gpu.clone(), Some(dtype)).expect_err("a GPU").to_string();
            assert!(error.contains("cuda:2") && error.contains("--device cpu"), "{error}");
        }
    }
}
