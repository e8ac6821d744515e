//! `sieve kernels check`: every kernel and gradient on this device against references on the host.
use crate::attention;
use crate::bench::BenchRows;
use crate::device::{Device, Gpu};
use crate::emulator::Emulator;
use crate::error::{BenchError, Result};
use crate::extent::Extent;
use crate::latent::{self, latent_kernels};
use crate::place::Place;
use crate::report::{Report, wrong};
use crate::{biases, decode, nsa, select, selection, sparse, step};
use burn::tensor::backend::BackendTypes;
use burn_flex::{Flex, FlexDevice};
use serde_json::{Value, json};
use sieve_kernels::{
    Arrivals, AttentionNeeds, AttentionShape, DeviceReport, KernelFamilies, KernelPolicy, NeededKernels, NeededKeys,
    ScoreBias, SumOrder,
};
use sieve_ops::Cuda;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Instant;

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
    /// Factor on queries and keys of all calls; small, usual and large ones in turn where absent.
    pub magnitude: Option<f32>,
    /// Check the portable kernels alone, also where the device has a family of its own.
    pub portable: bool,
    /// Who arrives at a barrier of the Hopper backward kernels.
    pub arrivals: Arrivals,
    /// What to check.
    pub part: CheckPart,
}

/// A part of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckPart {
    /// Everything.
    All,
    /// Dense, windowed and dynamic mask attention.
    Attention,
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
            Self::All | Self::Attention => all_kernels(gpu),
            Self::Sparse => sparse::sparse_kernels(gpu),
            Self::Nsa => nsa::nsa_check_kernels(gpu),
            Self::Mla => latent::latent_kernels(gpu),
        }
    }
}

impl BenchRows {
    /// Every specialisation that these rows, and the short check before them, ask for.
    pub fn kernels(self, gpu: &DeviceReport) -> NeededKernels {
        match self {
            Self::Sparse | Self::Selectors => CheckPart::Sparse.kernels(gpu),
            Self::Nsa => CheckPart::Nsa.kernels(gpu),
            Self::Latent => CheckPart::Mla.kernels(gpu),
            Self::Decode => token_kernels(gpu),
            Self::Standard | Self::Table2 | Self::Scaling | Self::Step | Self::Dma => CheckPart::All.kernels(gpu),
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

/// Compares every kernel and gradient on a device with references on the host; `tell` hears of each part that has
/// ended.
///
/// # Errors
/// A GPU that cannot be asked; a wrong result is a row of the report.
pub fn check(settings: &CheckSettings, target: &Target, tell: &mut dyn FnMut(CheckedPart)) -> Result<Report> {
    let report = Report::default();
    let mut progress = Progress { report, tell };
    match target {
        Target::Cpu => ops::<Flex>(&mut progress, &FlexDevice, settings)?,
        Target::Cuda(gpu) => on_cuda(&mut progress, gpu, settings)?,
    }
    Ok(progress.report)
}

impl CheckSettings {
    fn extent(&self) -> Extent {
        let all = Extent::all(self.cases, self.longest, self.seed);
        Extent {
            is_part: self.part != CheckPart::All,
            magnitude: self.magnitude,
            policy: KernelPolicy {
                arrivals: self.arrivals,
                ..portable_only(self.portable)
            },
            ..all
        }
    }
}

/// The policy of a program that was asked for the portable kernels, or was not.
pub(crate) fn portable_only(portable: bool) -> KernelPolicy {
    KernelPolicy {
        families: match portable {
            true => KernelFamilies::Portable,
            false => KernelFamilies::All,
        },
        ..KernelPolicy::default()
    }
}

/// Compares the portable kernels, run by the CPU emulator, with references: the wrappers of attention, selection,
/// decoding and the step, at one head width. Needs g++ and no GPU. Compiled programs stay in a folder. Returns the
/// names of the kernels that ran, too; `tell` hears of each part that has ended.
///
/// # Errors
/// A folder that cannot be written; a wrong result is a row of the report.
pub fn check_emulated(
    settings: &CheckSettings,
    programs: &Path,
    tell: &mut dyn FnMut(CheckedPart),
) -> Result<(Report, Vec<&'static str>)> {
    let emulator = Emulator::new(programs).map_err(|e| BenchError::Refused(format!("{}: {e}", programs.display())))?;
    let report = Report::default();
    let mut progress = Progress { report, tell };
    let extent = Extent {
        magnitude: settings.magnitude,
        ..Extent::emulated(settings.cases, settings.longest, settings.seed)
    };
    for parts in [&OF_A_FAMILY[1..], ONLY_PORTABLE] {
        progress.wrappers("emulated", parts, &emulator, &extent)?;
    }
    Ok((progress.report, emulator.kernels()))
}

/// A part's name and its check of the launch wrappers.
type Part = (&'static str, fn(&mut Report, &dyn Device, &Extent) -> Result<()>);

const ATTENTION: Part = ("attention", attention::check_wrappers);
const SELECTIONS: Part = ("selectors", select::check_wrappers);
const MASKS: Part = ("attention under masks", sparse::check_wrappers);
const LATENT: Part = ("latent attention", latent::check_wrappers);
const NSA: Part = ("native sparse attention", nsa::check_wrappers);

/// What every family of kernels has, after the first, which no emulator would end.
const OF_A_FAMILY: &[Part] = &[
    ("long rows", attention::check_long_row),
    ATTENTION,
    MASKS,
    ("large biases", biases::check_wrappers),
    LATENT,
    NSA,
];

/// Kernels that no family but the portable one has.
const ONLY_PORTABLE: &[Part] = &[
    SELECTIONS,
    ("DMA's selection", selection::check_wrappers),
    ("decoding", decode::check_wrappers),
    ("step", step::check_wrappers),
];

/// One new token: under selectors, and against caches.
const TOKENS: &[Part] = &[
    ("tokens under selectors", |report, device, extent| {
        select::check_tokens(report, device, extent);
        Ok(())
    }),
    ("decoding", decode::check_wrappers),
];

impl CheckPart {
    fn of_a_family(self) -> &'static [Part] {
        match self {
            Self::All => OF_A_FAMILY,
            Self::Attention => &[ATTENTION],
            Self::Sparse => &[SELECTIONS, MASKS],
            Self::Nsa => &[NSA],
            Self::Mla => &[LATENT],
        }
    }
}

/// A part of a check that has ended.
#[derive(Debug)]
pub struct CheckedPart {
    /// Kernels or ops, and which of them.
    pub name: String,
    /// Cases compared.
    pub cases: usize,
    /// Cases that failed.
    pub failures: usize,
    /// How long it took.
    pub seconds: f64,
}

impl fmt::Display for CheckedPart {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            cases,
            failures,
            seconds,
        } = self;
        write!(out, "{seconds:7.1} s  {name}: {cases} cases, {failures} failed")
    }
}

/// Rows so far, and who is told of each part that has ended.
struct Progress<'a> {
    report: Report,
    tell: &'a mut dyn FnMut(CheckedPart),
}

impl Progress<'_> {
    fn part(&mut self, name: String, check: impl FnOnce(&mut Report) -> Result<()>) -> Result<()> {
        let (started, before) = (Instant::now(), self.report.counts());
        check(&mut self.report)?;
        let after = self.report.counts();
        (self.tell)(CheckedPart {
            name,
            cases: after[0] - before[0],
            failures: after[1] - before[1],
            seconds: started.elapsed().as_secs_f64(),
        });
        Ok(())
    }

    fn wrappers(&mut self, family: &str, parts: &[Part], device: &dyn Device, extent: &Extent) -> Result<()> {
        parts.iter().try_for_each(|(name, check)| {
            self.part(format!("{family}, {name}"), |report| check(report, device, extent))
        })
    }
}

/// Both families of kernels, then the ops as models call them. A GPU that stops answering ends the check, with a row.
fn on_cuda(progress: &mut Progress<'_>, gpu: &DeviceReport, settings: &CheckSettings) -> Result<()> {
    let extent = settings.extent();
    let has_own_family = (gpu.major, gpu.minor) == (9, 0) && !settings.portable;
    let portable = Gpu::new(gpu.index, portable_only(true));
    let both = settings.part.of_a_family();
    let mut good = stage(progress, "portable kernels", |progress| {
        if settings.part == CheckPart::All {
            progress.part("launches".to_owned(), |report| {
                step::check_order(report, &portable, &extent);
                Ok(())
            })?;
            progress.wrappers("portable kernels", ONLY_PORTABLE, &portable, &extent)?;
            progress.part("products".to_owned(), |report| {
                step::check_products(report, &portable, &extent);
                step::check_fp8_products(report, &portable, &extent, (gpu.major, gpu.minor));
                Ok(())
            })?;
        }
        progress.wrappers("portable kernels", both, &portable, &extent)
    })?;
    if good && has_own_family {
        let own = Gpu::new(gpu.index, extent.policy);
        good = stage(progress, "Hopper kernels", |progress| {
            progress.wrappers("Hopper kernels", both, &own, &extent)
        })?;
    }
    if good {
        stage(progress, "ops", |progress| {
            ops::<Cuda>(progress, &portable.device, settings)
        })?;
    }
    Ok(())
}

/// Runs a part of the check; false when it panicked, as Burn does when the GPU reports an error.
fn stage(progress: &mut Progress<'_>, name: &str, part: impl FnOnce(&mut Progress<'_>) -> Result<()>) -> Result<bool> {
    match catch_unwind(AssertUnwindSafe(|| part(progress))) {
        Ok(result) => result.map(|()| true),
        Err(panic) => {
            let words = panic.downcast_ref::<String>().map_or("no message", String::as_str);
            let first = words.lines().next().unwrap_or_default().to_owned();
            let report = &mut progress.report;
            report.add(name, "stopped here", "the GPU", wrong(first));
            Ok(false)
        }
    }
}

/// A short check of the wrappers that these rows time, on a GPU: times of wrong kernels are worth nothing. `tell` hears
/// of it when it has ended.
///
/// # Errors
/// A GPU that cannot be asked; a wrong result is a row of the report.
pub fn short_check(
    gpu: &DeviceReport,
    portable: bool,
    rows: BenchRows,
    tell: &mut dyn FnMut(CheckedPart),
) -> Result<Report> {
    let device = &Gpu::new(gpu.index, portable_only(portable));
    let report = Report::default();
    let mut progress = Progress { report, tell };
    let extent = Extent::all(SHORT_CHECK_CASES, 300, 2);
    // Five selections and caches.
    let others = Extent::all(25, 300, 2);
    let check = |report: &mut Report| {
        if rows == BenchRows::Step {
            step::check_wrappers(report, device, &extent)?;
            step::check_products(report, device, &extent);
            step::check_fp8_products(report, device, &extent, (gpu.major, gpu.minor));
            return Ok(());
        }
        if matches!(rows, BenchRows::Sparse | BenchRows::Selectors) {
            select::check_wrappers(report, device, &others)?;
            return sparse::check_wrappers(report, device, &others);
        }
        if rows == BenchRows::Decode {
            let mut parts = TOKENS.iter();
            return parts.try_for_each(|(_, check)| check(report, device, &others));
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
    };
    stage(&mut progress, "the check", |progress| {
        progress.part("check before the times".to_owned(), check)
    })?;
    Ok(progress.report)
}

/// A part's name and its check of the ops of a backend.
type OpsPart<B> = (
    &'static str,
    fn(&mut Report, &<B as BackendTypes>::Device, &Extent) -> Result<()>,
);

/// The ops as models call them.
fn ops<B: Place>(progress: &mut Progress<'_>, device: &B::Device, settings: &CheckSettings) -> Result<()> {
    let extent = settings.extent();
    let parts: [OpsPart<B>; 6] = [
        (ATTENTION.0, attention::check_ops::<B>),
        ("DMA's selection", selection::check_ops::<B>),
        ("decoding", decode::check_ops::<B>),
        (LATENT.0, latent::check_ops::<B>),
        (NSA.0, nsa::check_ops::<B>),
        ("step", step::check_ops::<B>),
    ];
    let asked = match settings.part {
        CheckPart::All => &parts[..],
        CheckPart::Sparse => &[],
        CheckPart::Attention => &parts[..1],
        CheckPart::Mla => &parts[3..4],
        CheckPart::Nsa => &parts[4..5],
    };
    asked
        .iter()
        .try_for_each(|(name, check)| progress.part(format!("ops, {name}"), |report| check(report, device, &extent)))
}

/// Every specialisation that checks and benchmarks of one new token ask for.
fn token_kernels(gpu: &DeviceReport) -> NeededKernels {
    let mut list = sparse::sparse_kernels(gpu);
    for &(head_dim, head_dim_v) in Extent::all(0, 0, 0).widths {
        let [exp, linear] = [ScoreBias::Exp, ScoreBias::Linear].map(NeededKeys::Chosen);
        let blocks = (head_dim == head_dim_v && [64, 128].contains(&head_dim)).then_some(NeededKeys::Blocks);
        for keys in [NeededKeys::Neighbours, exp, linear].into_iter().chain(blocks) {
            let needs = AttentionNeeds {
                shape: AttentionShape::new(1, 1, [1, 1], [head_dim, head_dim_v]),
                keys,
                order: SumOrder::Any,
            };
            list.extend(needs.decoding(&gpu.arch()));
        }
    }
    list
}

fn all_kernels(gpu: &DeviceReport) -> NeededKernels {
    let mut list = NeededKernels::shipped_for(&gpu.arch());
    let Extent { widths, groups, .. } = Extent::all(0, 0, 0);
    list.extend(latent_kernels(gpu));
    list.extend(sparse::sparse_kernels(gpu));
    list.extend(nsa::nsa_check_kernels(gpu));
    list.extend_kernels(step::rare_kernels());
    for &(head_dim, head_dim_v) in widths {
        for &group in groups {
            let shape = AttentionShape::new(1, 1, [group, 1], [head_dim, head_dim_v]);
            for keys in [
                NeededKeys::Neighbours,
                NeededKeys::AllBiased,
                NeededKeys::Chosen(ScoreBias::Exp),
                NeededKeys::Chosen(ScoreBias::Linear),
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
        "magnitude": settings.magnitude,
        "failed_rows": report.failed(),
        "rows": report.rows(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;
    use sieve_kernels::DType;
    use sieve_kernels::{AttentionShape, CudaTensor, Hardware, KernelError, Recorder, Step};
    use std::cell::RefCell;

    #[test]
    fn the_ops_of_the_cpu_pass() {
        let all = Extent::all;
        // The last number: rows at least.
        let parts: [(OpsPart<Flex>, Extent, usize); 4] = [
            ((ATTENTION.0, attention::check_ops::<Flex>), all(12, 70, 5), 5),
            ((LATENT.0, latent::check_ops::<Flex>), all(20, 70, 5), 2),
            ((NSA.0, nsa::check_ops::<Flex>), all(3, 90, 1), 20),
            (("step", step::check_ops::<Flex>), all(1, 1, 7), 9),
        ];
        parts.into_par_iter().for_each(|((name, check), extent, least_rows)| {
            let mut report = Report::default();
            check(&mut report, &FlexDevice, &extent).expect("cases");
            assert_eq!(report.failed(), 0, "{name}: {report}");
            assert!(report.rows().len() >= least_rows, "{name}: {report}");
        });
    }

    /// A GPU that computes nothing but zeros, and notes the kernels that it is asked for.
    struct Noted {
        recorder: Recorder,
        kernels: RefCell<NeededKernels>,
        policy: KernelPolicy,
    }

    impl Noted {
        fn note(&self) {
            let steps = self.recorder.take_steps().into_iter();
            let kernels = steps.filter_map(|step| match step {
                Step::Launch(launch) => Some(launch.kernel),
                _ => None,
            });
            self.kernels.borrow_mut().extend_kernels(kernels);
        }
    }

    impl Device for Noted {
        fn float(&self, _values: &[f32], shape: &[usize], dtype: DType) -> CudaTensor {
            self.recorder.tensor(shape, dtype).under(self.policy)
        }

        fn int(&self, _values: &[i32], shape: &[usize]) -> CudaTensor {
            self.recorder.tensor(shape, DType::I32)
        }

        fn poison(&self, _shape: AttentionShape) {}

        fn floats(&self, tensor: &CudaTensor) -> Result<Vec<f32>, KernelError> {
            self.note();
            Ok(vec![0.0; tensor.num_elements()])
        }

        fn ints(&self, tensor: &CudaTensor) -> Result<Vec<i32>, KernelError> {
            self.note();
            Ok(vec![0; tensor.num_elements()])
        }
    }

    /// What is compiled at its first use costs a check a second each, one after the other.
    #[test]
    fn what_a_check_launches_is_compiled_before_it() {
        let gpu = DeviceReport {
            index: 0,
            name: "an H200".to_owned(),
            major: 9,
            minor: 0,
            num_multiprocessors: 132,
            total_memory_bytes: 141 << 30,
        };
        let all = all_kernels(&gpu);
        for (compute_capability, parts, compiled) in [
            ((8, 9), ONLY_PORTABLE, all.clone()),
            ((8, 9), OF_A_FAMILY, all.clone()),
            ((9, 0), OF_A_FAMILY, all),
            ((9, 0), TOKENS, BenchRows::Decode.kernels(&gpu)),
        ] {
            let ahead = compiled.kernels.len();
            let hardware = Hardware {
                compute_capability,
                ..Hardware::HOPPER
            };
            let device = Noted {
                recorder: Recorder::new(hardware),
                kernels: RefCell::new(compiled),
                policy: KernelPolicy::default(),
            };
            let mut told = Vec::new();
            let mut tell = |part: CheckedPart| told.push(part.cases);
            let mut progress = Progress {
                report: Report::default(),
                tell: &mut tell,
            };
            // Operands and references of these two take the host most of a minute.
            let is_quick = |(name, _): &&Part| !["step", "large biases"].contains(name);
            let parts: Vec<Part> = parts.iter().filter(is_quick).copied().collect();
            let ended = progress.wrappers("noted", &parts, &device, &Extent::all(20, 60, 1));
            ended.expect("cases can be drawn");
            device.note();
            let kernels = &device.kernels.borrow().kernels[ahead..];
            assert!(kernels.is_empty(), "{kernels:#?}");
            assert_eq!(told.len(), parts.len());
            assert!(told.iter().all(|&cases| cases > 0), "{told:?}");
        }
    }

    /// Names and defines of what the parts of a family launch on a Hopper GPU under a policy.
    fn launched(policy: KernelPolicy) -> Vec<String> {
        let device = Noted {
            recorder: Recorder::new(Hardware::HOPPER),
            kernels: RefCell::default(),
            policy,
        };
        let (mut report, extent) = (Report::default(), Extent::all(20, 60, 1));
        for (_, check) in [ATTENTION, SELECTIONS, MASKS, LATENT, NSA] {
            check(&mut report, &device, &extent).expect("cases can be drawn");
        }
        device.note();
        let kernels = device.kernels.into_inner().kernels;
        kernels.iter().map(|kernel| format!("{kernel:?}")).collect()
    }

    #[test]
    fn a_policy_reaches_every_launch_of_a_check() {
        let hopper = |kernels: &[String]| kernels.iter().filter(|kernel| kernel.contains("hopper_")).count();
        let [all, portable] = [false, true].map(|only| launched(portable_only(only)));
        assert!(hopper(&all) > 10 && hopper(&portable) == 0, "{all:#?} {portable:#?}");
        let every_lane = launched(KernelPolicy {
            arrivals: Arrivals::EveryLane,
            ..KernelPolicy::default()
        });
        let arriving = |kernels: &[String]| {
            let all = kernels.iter().filter(|kernel| kernel.contains("EVERY_LANE_ARRIVES"));
            all.count()
        };
        assert!(arriving(&every_lane) > 4 && arriving(&all) == 0, "{every_lane:#?}");
    }
}
