//! The device that a run trains on, as the trainer takes it.
use anyhow::{Result, anyhow};
use burn::backend::Autodiff;
use burn_cuda::CudaDevice;
use burn_flex::{Flex, FlexDevice};
use sieve_core::recipe::TrainingPrecision;
use sieve_core::{Keeping, ModelShape, Recipe};
use sieve_host::device::Device;
use sieve_host::terminal;
use sieve_kernels::step::require_fp8;
use sieve_kernels::{Cublaslt, DeviceReport, GpuState};
use sieve_ops::Cuda;
use sieve_plan::{check_gpu_attention, gpu_training_gap};
use sieve_train::{DeviceMemory, Hardware, MemoryProbe, Precision};

/// Refuses a recipe that the GPU cannot train; a CPU trains all.
pub(super) fn check_gpu(recipe: &Recipe, shape: &ModelShape, device: &Device) -> Result<()> {
    if recipe.training.same_bits {
        sieve_host::same_bits::check_training(device, shape)?;
    }
    let Device::Cuda(gpu) = device else {
        return Ok(());
    };
    check_gpu_attention(recipe, shape, &gpu.arch())?;
    check_gpu_fp8(recipe, gpu)
}

/// Refuses `training.precision = "fp8"` where the GPU or cuBLASLt cannot run fp8 GEMMs.
fn check_gpu_fp8(recipe: &Recipe, gpu: &DeviceReport) -> Result<()> {
    if recipe.training.precision != TrainingPrecision::Fp8 {
        return Ok(());
    }
    let (name, major, minor) = (&gpu.name, gpu.major, gpu.minor);
    let able = require_fp8((major, minor)).and_then(|()| Cublaslt::require());
    able.map_err(|error| {
        anyhow!(
            "training.precision = \"fp8\" on {name}, compute capability {major}.{minor}: {error}\n  \
             hint: --set training.precision=bf16"
        )
    })
}

/// The hardware of a CPU for the trainer, and its description for the log.
pub(super) fn on_cpu() -> (Hardware<Autodiff<Flex>>, String) {
    // There is no peak_flops for a CPU: no data sheet has one, and a measured one is too low if the machine was busy.
    let hardware = Hardware {
        device: FlexDevice,
        precision: Precision::F32,
        peak_flops: None,
        memory: MemoryProbe::Process,
        keeping: Keeping::default(),
    };
    let description = format!("the CPU, {}", terminal::counted(sieve_host::device::num_threads() as u64, "thread"));
    (hardware, description)
}

/// The hardware of a GPU for the trainer, and its description for the log.
pub(super) fn on_cuda(gpu: &DeviceReport, shape: &ModelShape) -> (Hardware<Autodiff<Cuda>>, String) {
    let peak = sieve_core::model::peak_bf16_flops(&gpu.name);
    let hardware = Hardware {
        device: CudaDevice::new(gpu.index),
        precision: Precision::Bf16,
        peak_flops: peak,
        memory: MemoryProbe::Device(DeviceMemory {
            index: gpu.index,
            now: sieve_host::device::cuda_memory,
            watch: sieve_kernels::MemoryPeak::watch,
            unwatch: sieve_kernels::MemoryPeak::unwatch,
            peak: sieve_kernels::MemoryPeak::seen,
        }),
        keeping: Keeping::default(),
    };
    let peak = peak.map_or("unknown peak".to_owned(), |peak| format!("{:.0} TFLOP/s peak", peak / 1e12));
    let attention = attention_path(shape, &gpu.arch());
    let description = format!("cuda:{} ({}, {peak}), {attention}", gpu.index, gpu.name);
    (hardware, description)
}

/// Clocks, errors and temperature of this process's GPU; `None` on the CPU.
pub(super) fn state_of(place: &Device) -> Option<GpuState> {
    match place {
        Device::Cpu => None,
        Device::Cuda(gpu) => GpuState::of(gpu.index),
    }
}

/// Words for the path that a model's attention takes on a GPU.
fn attention_path(shape: &ModelShape, arch: &str) -> &'static str {
    match gpu_training_gap(shape, arch) {
        None => "attention by kernels",
        Some(_) => "attention by its plain-Burn reference",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_core::recipe::sibling;

    #[test]
    fn the_path_of_attention_is_named() {
        let path = |recipe: &str| {
            let recipe = Recipe::load(recipe, "a recipe", &[]).expect("a shipped recipe");
            attention_path(&recipe.model_shape(50_277).expect("a shape"), "sm_90a")
        };
        let mla = path(&sibling("mla_80m", include_str!("../../../../recipes/mha_80m.toml")).expect("a known name"));
        let nsa = path(include_str!("../../../../recipes/nsa_80m.toml"));
        assert_eq!([mla, nsa], ["attention by kernels"; 2]);
        // Its heads are 32 wide, which NSA's kernels do not take.
        let narrow = path(include_str!("../../../../lab/recipes/mqar_nsa.toml"));
        assert!(narrow.contains("reference"), "{narrow}");
    }
}
