//! `sieve kernels check`: every kernel and gradient on this device against references on the host.
use crate::attention;
use crate::bench::BenchRows;
use crate::device::Device;
use crate::emulator::Emulator;
use crate::error::{BenchError, Result};
use crate::extent::Extent;
use crate::latent::{self, latent_kernels};
use crate::place::Place;
use crate::report::Report;
use crate::shape::attention_shape;
use crate::{biases, decode, nsa, select, selection, sparse, step};
use burn_cuda::CudaDevice;
use burn_flex::{Flex, FlexDevice};
use serde_json::{Value, json};
use sieve_kernels::{
    AttentionNeeds, DeviceReport, KernelFamily, NeededKernels, NeededKeys, ScoreBias, SumOrder,
};
use sieve_ops::Cuda;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Random calls of attention in a short check.
const SHORT_CHECK_CASES: usize = 15;

/// What to check.
#[derive(Clone, Copy, Debug)]
pub struct CheckSettings {
    /// Random calls of attention, once through the ops and once through the kernels' own wrappers.
    pub cases: usize,
    /// Longest usual sequence; some of DMA's are longer than 1024 in any case.
    pub longest: usize,
    /// Seed of the random calls.
    pub seed: u64,
    /// Check the portable kernels alone, also where the device has a family of its own.
    pub portable: bool,
    /// What to check.
    pub part: CheckPart,
}

/// A part of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckPart {
    /// Everything.
    All,
    /// Attention under selectors' masks, on a GPU.
    Sparse,
    /// Native sparse attention.
    Nsa,
    /// Latent attention.
    Mla,
}

impl CheckPart {
    /// Every specialisation that the random calls can ask for: what to compile, on all cores, before the first of them.
    pub fn kernels(self, gpu: &DeviceReport) -> NeededKernels {
        match self {
            Self::All => all_kernels(gpu),
            Self::Sparse => sparse::sparse_kernels(gpu),
            Self::Nsa => nsa::nsa_check_kernels(gpu),
            Self::Mla => latent::latent_kernels(gpu),
        }
    }
}

/// Where a check runs.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// The CPU.
    Cpu,
    /// A CUDA device whose runtime is ready.
    Cuda(DeviceReport),
}

impl Target {
    /// The device in words.
    pub fn name(&self) -> String {
        match self {
            Self::Cpu => "cpu".to_owned(),
            Self::Cuda(gpu) => format!("{} ({})", gpu.name, gpu.arch()),
        }
    }
}

/// Compares every kernel and gradient on a device with references on the host.
///
/// # Errors
/// A GPU that cannot be asked; a wrong result is a row of the report.
pub fn check(settings: &CheckSettings, target: &Target) -> Result<Report> {
    let mut report = Report::default();
    match target {
        Target::Cpu => ops::<Flex>(&mut report, &FlexDevice, settings, false)?,
        Target::Cuda(gpu) => on_cuda(&mut report, gpu, settings)?,
    }
    Ok(report)
}

impl CheckSettings {
    fn extent(&self) -> Extent {
        let all = Extent::all(self.cases, self.longest, self.seed);
        Extent {
            is_part: self.part != CheckPart::All,
            ..all
        }
    }
}

/// Compares the portable kernels, run by the CPU emulator, with references: the wrappers of attention, selection,
/// decoding and the step, at one head width. Needs g++ and no GPU. Compiled programs stay in a folder. Returns the
/// names of the kernels that ran, too.
///
/// # Errors
/// A folder that cannot be written; a wrong result is a row of the report.
pub fn check_emulated(
    settings: &CheckSettings,
    programs: &Path,
) -> Result<(Report, Vec<&'static str>)> {
    let emulator = Emulator::new(programs)
        .map_err(|e| BenchError::Refused(format!("{}: {e}", programs.display())))?;
    let mut report = Report::default();
    let extent = Extent::emulated(settings.cases, settings.longest, settings.seed);
    wrappers(&mut report, &emulator, &extent)?;
    Ok((report, emulator.kernels()))
}

/// Both families of kernels, then the ops as models call them. A GPU that stops answering ends the check, with a row.
fn on_cuda(report: &mut Report, gpu: &DeviceReport, settings: &CheckSettings) -> Result<()> {
    let (device, extent) = (CudaDevice::new(gpu.index), settings.extent());
    let has_own_family = (gpu.major, gpu.minor) == (9, 0) && !settings.portable;
    KernelFamily::use_portable_only(true);
    let both = |report: &mut Report| match settings.part {
        CheckPart::All => {
            attention::check_long_row(report, &device, &extent)?;
            attention::check_wrappers(report, &device, &extent)?;
            sparse::check_wrappers(report, &device, &extent)?;
            biases::check_wrappers(report, &device, &extent)?;
            latent::check_wrappers(report, &device, &extent)?;
            nsa::check_wrappers(report, &device, &extent)
        }
        CheckPart::Sparse => {
            select::check_wrappers(report, &device, &extent)?;
            sparse::check_wrappers(report, &device, &extent)
        }
        CheckPart::Nsa => nsa::check_wrappers(report, &device, &extent),
        CheckPart::Mla => latent::check_wrappers(report, &device, &extent),
    };
    let mut good = stage(report, "portable kernels", |report| {
        if settings.part == CheckPart::All {
            only_portable(report, &device, &extent)?;
            step::check_products(report, &device, &extent);
            step::check_fp8_products(report, &device, &extent, (gpu.major, gpu.minor));
        }
        both(report)
    })?;
    KernelFamily::use_portable_only(!has_own_family);
    if good && has_own_family {
        good = stage(report, "Hopper kernels", both)?;
    }
    if good {
        stage(report, "ops", |report| {
            ops::<Cuda>(report, &device, settings, true)
        })?;
    }
    Ok(())
}

/// Runs a part of the check; false when it panicked, as Burn does when the GPU reports an error.
fn stage(
    report: &mut Report,
    name: &str,
    part: impl FnOnce(&mut Report) -> Result<()>,
) -> Result<bool> {
    match catch_unwind(AssertUnwindSafe(|| part(report))) {
        Ok(result) => result.map(|()| true),
        Err(panic) => {
            let words = panic
                .downcast_ref::<String>()
                .map_or("no message", String::as_str);
            let first = words.lines().next().unwrap_or_default().to_owned();
            report.add(name, "stopped here", "the GPU", Err(first));
            Ok(false)
        }
    }
}

/// A short check of the wrappers that these rows time, on a GPU: times of wrong kernels are worth nothing.
///
/// # Errors
/// A GPU that cannot be asked; a wrong result is a row of the report.
pub fn short_check(gpu: &DeviceReport, portable: bool, rows: BenchRows) -> Result<Report> {
    KernelFamily::use_portable_only(portable);
    let device = &CudaDevice::new(gpu.index);
    let mut report = Report::default();
    let extent = Extent::all(SHORT_CHECK_CASES, 300, 2);
    // Five selections and caches.
    let others = Extent::all(25, 300, 2);
    stage(&mut report, "the check", |report| {
        if rows == BenchRows::Step {
            step::check_wrappers(report, device, &extent);
            step::check_products(report, device, &extent);
            step::check_fp8_products(report, device, &extent, (gpu.major, gpu.minor));
            return Ok(());
        }
        if matches!(rows, BenchRows::Sparse | BenchRows::Selectors) {
            select::check_wrappers(report, device, &others)?;
            return sparse::check_wrappers(report, device, &others);
        }
        if rows == BenchRows::Decode {
            select::check_tokens(report, device, &others);
            return decode::check_wrappers(report, device, &others);
        }
        if matches!(rows, BenchRows::Nsa | BenchRows::Scaling) {
            nsa::check_wrappers(report, device, &others)?;
        }
        if matches!(rows, BenchRows::Latent | BenchRows::Scaling) {
            latent::check_wrappers(report, device, &others)?;
        }
        if matches!(rows, BenchRows::Nsa | BenchRows::Latent) {
            return Ok(());
        }
        attention::check_wrappers(report, device, &extent)?;
        selection::check_wrappers(report, device, &others)?;
        decode::check_wrappers(report, device, &others)
    })?;
    Ok(report)
}

fn ops<B: Place>(
    report: &mut Report,
    device: &B::Device,
    settings: &CheckSettings,
    is_cuda: bool,
) -> Result<()> {
    let (path, extent) = (if is_cuda { "kernel" } else { "cpu" }, &settings.extent());
    match settings.part {
        CheckPart::All => {}
        CheckPart::Sparse => return Ok(()),
        CheckPart::Nsa => return nsa::check_ops::<B>(report, device, extent, is_cuda),
        CheckPart::Mla => return latent::check_ops::<B>(report, device, extent, is_cuda),
    }
    attention::check_ops::<B>(report, device, extent, is_cuda)?;
    selection::check_ops::<B>(report, device, extent, path)?;
    decode::check_ops::<B>(report, device, extent, is_cuda)?;
    latent::check_ops::<B>(report, device, extent, is_cuda)?;
    nsa::check_ops::<B>(report, device, extent, is_cuda)?;
    step::check::<B>(report, device, extent.seed, is_cuda);
    Ok(())
}

fn wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    attention::check_wrappers(report, device, extent)?;
    sparse::check_wrappers(report, device, extent)?;
    biases::check_wrappers(report, device, extent)?;
    latent::check_wrappers(report, device, extent)?;
    nsa::check_wrappers(report, device, extent)?;
    only_portable(report, device, extent)
}

/// Kernels that no family but the portable one has.
fn only_portable(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    select::check_wrappers(report, device, extent)?;
    selection::check_wrappers(report, device, extent)?;
    decode::check_wrappers(report, device, extent)?;
    step::check_wrappers(report, device, extent);
    Ok(())
}

fn all_kernels(gpu: &DeviceReport) -> NeededKernels {
    let mut list = NeededKernels::shipped_for(&gpu.arch());
    let Extent { widths, groups, .. } = Extent::all(0, 0, 0);
    list.extend(latent_kernels(gpu));
    for &(head_dim, head_dim_v) in widths {
        for &group in groups {
            let shape = attention_shape(1, 1, [group, 1], [head_dim, head_dim_v]);
            for keys in [
                NeededKeys::Neighbours,
                NeededKeys::AllBiased,
                NeededKeys::Chosen(ScoreBias::Exp),
            ] {
                for order in [SumOrder::Any, SumOrder::Fixed] {
                    let needs = AttentionNeeds { shape, keys, order };
                    list.extend(needs.kernels(&gpu.arch()));
                }
            }
        }
    }
    list
}

/// A report as JSON, for programs.
pub fn check_json(report: &Report, settings: &CheckSettings, target: &Target) -> Value {
    json!({
        "device": target.name(),
        "sieve": env!("CARGO_PKG_VERSION"),
        "cases": settings.cases,
        "seed": settings.seed,
        "failed_rows": report.failed(),
        "rows": report.rows(),
    })
}
