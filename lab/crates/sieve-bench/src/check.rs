//! `sieve kernels check`: every kernel and gradient on this device against references on the host.
use crate::attention;
use crate::bands;
use crate::device::{Device, Gpu, portable_only};
use crate::emulator::Emulator;
use crate::error::{BenchError, Result};
use crate::extent::{CheckPart, Extent, GROUPS, WIDTHS, add_attention};
use crate::report::{Report, wrong};
use crate::timed::BenchRows;
use crate::{
    biases, block_order, branch_order, decode, key_order, latent, models, nsa, select, selection, sparse, step,
    trained_bits,
};
use burn::backend::Autodiff;
use burn::tensor::DType;
use burn_flex::{Flex, FlexDevice};
use serde_json::{Value, json};
use sieve_core::ShownPath;
use sieve_kernels::{
    Arrivals, AttentionNeeds, AttentionShape, DeviceReport, KernelPolicy, NeededKernels, NeededKeys, ScoreBias,
    SumOrder,
};
use sieve_ops::{Cuda, TrainBackend};
use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

/// Random calls of attention in a short check; selections and caches get a fifth of them.
const SHORT_CHECK_CASES: usize = 25;

/// The kernels that a check covers, and how thoroughly.
#[derive(Clone, Copy, Debug)]
pub struct CheckSettings {
    /// Random calls of attention's launch wrappers; a fifth as many of other kernels.
    pub cases: usize,
    /// Tokens of the longest random row; some of DMA's rows have more than 1024 tokens in any case.
    pub longest: usize,
    /// Seed of the random calls.
    pub seed: u64,
    /// Factor on queries and keys of all calls; when absent, calls alternate between small, usual and large factors.
    pub magnitude: Option<f32>,
    /// Check only the portable kernels, even if the device has its own family.
    pub portable: bool,
    /// Whether one lane or every lane of a warp arrives at a barrier of the Hopper backward kernels.
    pub arrivals: Arrivals,
    /// The part of the kernels to check.
    pub part: CheckPart,
    /// Whether cuBLAS's GEMMs are checked, and then models, which run them.
    pub gemms: bool,
}

impl CheckPart {
    /// Every specialisation that the random calls can launch. The caller compiles them on all cores before the check.
    pub fn kernels(self, gpu: &DeviceReport) -> NeededKernels {
        let mut list = match self {
            Self::All | Self::Attention => all_kernels(gpu),
            Self::Sparse => sparse::sparse_kernels(gpu),
            Self::Bands => bands::kernels(gpu),
            Self::Nsa => nsa::nsa_check_kernels(gpu),
            Self::Mla => latent::latent_kernels(gpu),
            Self::Sinks => token_kernels(gpu),
            Self::KeyOrder => key_order::kernels(gpu),
            Self::BlockOrder => {
                let mut list = block_order::kernels(gpu);
                list.extend(branch_order::kernels(gpu));
                list
            }
        };
        list.extend(models::needed_kernels(self, gpu));
        list
    }
}

impl BenchRows {
    /// The specialisations that this benchmark, and the short check before it, launch.
    pub fn kernels(self, gpu: &DeviceReport) -> NeededKernels {
        match self {
            Self::Sparse | Self::Selectors => CheckPart::Sparse.kernels(gpu),
            Self::Nsa => CheckPart::Nsa.kernels(gpu),
            Self::Bands => CheckPart::Bands.kernels(gpu),
            Self::Latent => CheckPart::Mla.kernels(gpu),
            Self::Decode => token_kernels(gpu),
            Self::Standard | Self::Table2 | Self::Scaling | Self::Step | Self::Dma => CheckPart::All.kernels(gpu),
        }
    }
}

/// Compares every kernel, and then models, on a device with references on the host; `on_part` is called after each
/// part.
///
/// # Errors
/// A GPU that does not answer; a wrong result is a row of the report.
pub fn check(
    settings: &CheckSettings,
    target: &sieve_kernels::Device,
    on_part: &mut dyn FnMut(CheckedPart),
) -> Result<Report> {
    let cpu_has_fp8 = false;
    let mut progress = Progress::new(on_part);
    match target {
        sieve_kernels::Device::Cpu => {
            progress.models::<Autodiff<Flex>>((&FlexDevice, DType::F32), [cpu_has_fp8, true], settings)?
        }
        sieve_kernels::Device::Cuda(gpu) => on_cuda(&mut progress, gpu, settings)?,
    }
    Ok(progress.report)
}

impl CheckSettings {
    /// The calls that the settings ask for, with every head width and group size, and the policy under which the
    /// kernels run.
    fn extent(&self) -> Extent {
        Extent {
            is_part: self.part != CheckPart::All,
            magnitude: self.magnitude,
            policy: KernelPolicy { arrivals: self.arrivals, ..portable_only(self.portable) },
            ..Extent::all(self.cases, self.longest, self.seed)
        }
    }
}

/// Runs the portable kernels on the CPU emulator and compares them with references: the wrappers of attention,
/// selection, decoding and the training step, at one head width. Needs g++ and no GPU. The folder `programs` keeps the
/// compiled kernels. Also returns the names of the kernels that ran; `on_part` is called after each part. Each
/// processor runs a part at a time, on an emulator of its own.
///
/// # Errors
/// A folder that cannot be written; a wrong result is a row of the report.
pub fn check_emulated(
    settings: &CheckSettings,
    programs: &Path,
    on_part: &mut dyn FnMut(CheckedPart),
) -> Result<(Report, Vec<&'static str>)> {
    let extent =
        Extent { magnitude: settings.magnitude, ..Extent::emulated(settings.cases, settings.longest, settings.seed) };
    let parts = match settings.part {
        CheckPart::All => [&OF_A_FAMILY[1..], ONLY_PORTABLE].concat(),
        part => part.of_a_family().to_vec(),
    };
    let next = AtomicUsize::new(0);
    let (send, receive) = mpsc::channel();
    let mut done = Vec::new();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(parts.len()) {
            let (send, next, parts, extent) = (send.clone(), &next, &parts, &extent);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(part) = parts.get(index) else {
                        // Another thread has taken the last part.
                        break;
                    };
                    // The receiver is gone where the caller panicked.
                    if send.send((index, emulated(part, programs, extent))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(send);
        for (index, outcome) in receive {
            if let Ok((_, Some(part), _)) = &outcome {
                on_part(part.clone());
            }
            done.push((index, outcome));
        }
    });
    // In the order of the parts, whichever was done first.
    done.sort_by_key(|(index, _)| *index);
    let (mut report, mut kernels) = (Report::default(), BTreeSet::new());
    for (_, outcome) in done {
        let (of_part, _, ran) = outcome?;
        report.merge(of_part);
        kernels.extend(ran);
    }
    Ok((report, kernels.into_iter().collect()))
}

/// What one part found on an emulator of its own, and the names of the kernels that ran.
type Emulated = (Report, Option<CheckedPart>, Vec<&'static str>);

/// Runs one part on an emulator of its own.
fn emulated(part: &Part, programs: &Path, extent: &Extent) -> Result<Emulated> {
    let emulator = Emulator::new(programs).map_err(|e| BenchError::Refused(format!("{}: {e}", programs.shown())))?;
    let mut checked = None;
    let mut keep = |part| checked = Some(part);
    let mut progress = Progress::new(&mut keep);
    progress.wrappers("emulated", &[*part], &emulator, extent)?;
    Ok((progress.report, checked, emulator.kernels()))
}

/// A part's name and its check of the launch wrappers.
type Part = (&'static str, fn(&mut Report, &dyn Device, &Extent) -> Result<()>);

const ATTENTION: Part = ("attention", attention::check_wrappers);
const BANDS: Part = ("attention with bands", bands::check_wrappers);
const DECODED_BANDS: Part = ("decoding with bands", decode::bands::check_wrappers);
const SELECTIONS: Part = ("selectors", select::check_wrappers);
const MASKS: Part = ("attention under masks", sparse::check_wrappers);
const LATENT: Part = ("latent attention", latent::check_wrappers);
const NSA: Part = ("native sparse attention", nsa::check_wrappers);
const SELECTION: Part = ("DMA's selection", selection::check_wrappers);
const DECODING: Part = ("decoding", decode::check_wrappers);
const STEP: Part = ("step", step::check_wrappers);
const SINKS: Part = ("sinks", step::check_sinks);
const KEY_ORDER: Part = ("DMA's order of keys", key_order::check);
const BLOCK_ORDER: Part = ("steps over chosen blocks as in whole rows", block_order::check);
const BRANCH_ORDER: Part = ("steps of native sparse attention as in whole rows", branch_order::check);

/// Parts whose kernels exist in the portable and in the Hopper family. The first, "long rows", is too slow for the
/// emulator.
const OF_A_FAMILY: &[Part] = &[
    ("long rows", attention::check_long_row),
    ATTENTION,
    BANDS,
    DECODING,
    DECODED_BANDS,
    MASKS,
    ("large biases", biases::check_wrappers),
    LATENT,
    NSA,
    KEY_ORDER,
    BLOCK_ORDER,
    BRANCH_ORDER,
];

/// Parts whose kernels are portable ones alone.
const ONLY_PORTABLE: &[Part] = &[SELECTIONS, SELECTION, STEP];

/// Parts about the attention of one new token: under decode selectors, and over a KV cache.
const TOKENS: &[Part] = &[("tokens under selectors", select::check_tokens), DECODING, DECODED_BANDS];

impl CheckPart {
    /// The group's parts that are checked with each family of kernels.
    fn of_a_family(self) -> &'static [Part] {
        match self {
            Self::All => OF_A_FAMILY,
            Self::Attention => &[ATTENTION],
            Self::Bands => &[BANDS, DECODED_BANDS],
            Self::Sparse => &[SELECTIONS, MASKS],
            Self::Nsa => &[NSA],
            Self::Mla => &[LATENT],
            Self::Sinks => &[SINKS, DECODING],
            Self::KeyOrder => &[KEY_ORDER],
            Self::BlockOrder => &[BLOCK_ORDER, BRANCH_ORDER],
        }
    }
}

/// A part of a check that has ended.
#[derive(Debug, Clone)]
pub struct CheckedPart {
    /// Names of the kernels or ops that the part checked.
    pub name: String,
    /// Number of cases compared.
    pub cases: usize,
    /// Number of cases that failed.
    pub failures: usize,
    /// Duration of the check in seconds.
    pub seconds: f64,
}

impl fmt::Display for CheckedPart {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, cases, failures, seconds } = self;
        write!(out, "{seconds:7.1} s  {name}: {cases} cases, {failures} failed")
    }
}

/// The report so far, and the callback after each part.
struct Progress<'a> {
    report: Report,
    on_part: &'a mut dyn FnMut(CheckedPart),
}

impl<'a> Progress<'a> {
    fn new(on_part: &'a mut dyn FnMut(CheckedPart)) -> Self {
        let report = Report::default();
        Self { report, on_part }
    }

    /// Runs one part, then calls `on_part` with its cases, failures and duration.
    fn part(&mut self, name: String, check: impl FnOnce(&mut Report) -> Result<()>) -> Result<()> {
        let (started, before) = (Instant::now(), self.report.counts());
        check(&mut self.report)?;
        let after = self.report.counts();
        (self.on_part)(CheckedPart {
            name,
            cases: after[0] - before[0],
            failures: after[1] - before[1],
            seconds: started.elapsed().as_secs_f64(),
        });
        Ok(())
    }

    /// Checks the launch wrappers of these parts; `family` names the kernels that they take.
    fn wrappers(&mut self, family: &str, parts: &[Part], device: &dyn Device, extent: &Extent) -> Result<()> {
        parts.iter().try_for_each(|(name, check)| {
            self.part(format!("{family}, {name}"), |report| check(report, device, extent))
        })
    }

    /// Checks models on a device that computes in the given dtype; `with_fp8`: in fp8 too. `has_same_bits`: a trained
    /// token has the bits of its whole row there.
    fn models<B: TrainBackend>(
        &mut self,
        on: (&B::Device, DType),
        [with_fp8, has_same_bits]: [bool; 2],
        settings: &CheckSettings,
    ) -> Result<()> {
        let extent = settings.extent();
        self.part("models".to_owned(), |report| {
            if has_same_bits {
                trained_bits::check::<B>(report, on, settings.part, &extent)?;
            }
            models::check::<B>(report, on, (settings.part, with_fp8), &extent)
        })
    }
}

/// Checks both families of kernels, then models. When the GPU stops answering, the check ends with a failed row.
fn on_cuda(progress: &mut Progress<'_>, gpu: &DeviceReport, settings: &CheckSettings) -> Result<()> {
    let extent = settings.extent();
    let has_own_family = (gpu.major, gpu.minor) == (9, 0) && !settings.portable;
    let portable = Gpu::new(gpu.index, portable_only(true));
    let both = settings.part.of_a_family();
    let mut good = stage(progress, "portable kernels", |progress| {
        if settings.part == CheckPart::All {
            progress.part("launches".to_owned(), |report| step::check_order(report, &portable, &extent))?;
            progress.wrappers("portable kernels", ONLY_PORTABLE, &portable, &extent)?;
            if settings.gemms {
                progress.part("GEMMs".to_owned(), |report| check_gemms(report, &portable, &extent, gpu))?;
            }
        }
        progress.wrappers("portable kernels", both, &portable, &extent)
    })?;
    if good && has_own_family {
        let own = Gpu::new(gpu.index, extent.policy);
        good = stage(progress, "Hopper kernels", |progress| {
            if settings.part == CheckPart::All {
                let check = |report: &mut Report| step::check_same_bits(report, &own, &extent);
                progress.part("a row's product, in calls of few rows and of many".to_owned(), check)?;
            }
            progress.wrappers("Hopper kernels", both, &own, &extent)
        })?;
    }
    if good && settings.gemms {
        stage(progress, "models", |progress| {
            let has = [models::has_fp8(gpu), has_own_family];
            progress.models::<Autodiff<Cuda>>((&portable.device, DType::BF16), has, settings)
        })?;
    }
    Ok(())
}

fn check_gemms(report: &mut Report, device: &Gpu, extent: &Extent, gpu: &DeviceReport) -> Result<()> {
    step::check_gemms(report, device, extent);
    step::check_fp8_gemms(report, device, extent, (gpu.major, gpu.minor));
    Ok(())
}

/// Runs a part of the check; returns false when it panicked, as Burn does when the GPU reports an error.
fn stage(progress: &mut Progress<'_>, name: &str, part: impl FnOnce(&mut Progress<'_>) -> Result<()>) -> Result<bool> {
    match catch_unwind(AssertUnwindSafe(|| part(progress))) {
        Ok(result) => result.map(|()| true),
        Err(panic) => {
            let words = panic.downcast_ref::<String>().map(String::as_str);
            let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            let first = words.lines().next().unwrap_or_default().to_owned();
            let report = &mut progress.report;
            report.add(name, "stopped here", "the GPU", wrong(first));
            Ok(false)
        }
    }
}

/// A short check of the wrappers that these rows time, on a GPU: times of wrong kernels are worth nothing. `on_part` is
/// called after it.
///
/// # Errors
/// A GPU that does not answer; a wrong result is a row of the report.
pub fn short_check(
    gpu: &DeviceReport,
    portable: bool,
    rows: BenchRows,
    on_part: &mut dyn FnMut(CheckedPart),
) -> Result<Report> {
    let device = &Gpu::new(gpu.index, portable_only(portable));
    let mut progress = Progress::new(on_part);
    let (longest, seed) = (300, 2);
    let extent = Extent::all(SHORT_CHECK_CASES, longest, seed);
    let parts: &[Part] = match rows {
        BenchRows::Step => &[STEP],
        BenchRows::Sparse | BenchRows::Selectors => &[SELECTIONS, MASKS],
        BenchRows::Decode => TOKENS,
        BenchRows::Nsa => &[NSA],
        BenchRows::Bands => &[BANDS],
        BenchRows::Latent => &[LATENT],
        BenchRows::Scaling => &[NSA, LATENT, ATTENTION, SELECTION, DECODING],
        BenchRows::Standard | BenchRows::Table2 | BenchRows::Dma => &[ATTENTION, SELECTION, DECODING],
    };
    let check = |report: &mut Report| {
        if rows == BenchRows::Step {
            check_gemms(report, device, &extent, gpu)?;
        }
        parts.iter().try_for_each(|(_, check)| check(report, device, &extent))
    };
    stage(&mut progress, "the check", |progress| progress.part("check before the times".to_owned(), check))?;
    Ok(progress.report)
}

/// Every specialisation that checks and benchmarks of one new token launch.
fn token_kernels(gpu: &DeviceReport) -> NeededKernels {
    let mut list = sparse::sparse_kernels(gpu);
    list.extend(bands::kernels(gpu));
    // A token's rotation is compared with the kernel that rotates whole rows.
    list.extend(step::rare_kernels(gpu, &[]));
    let [exp, linear] = [ScoreBias::Exp, ScoreBias::Linear].map(NeededKeys::Chosen);
    for &(head_dim, head_dim_v) in WIDTHS {
        let blocks = (head_dim == head_dim_v && [64, 128].contains(&head_dim)).then_some(NeededKeys::Blocks);
        for keys in [NeededKeys::Neighbours, exp, linear].into_iter().chain(blocks) {
            let needs = AttentionNeeds {
                shape: AttentionShape::new(1, 1, [1, 1], [head_dim, head_dim_v]),
                keys,
                order: SumOrder::Any,
                has_sinks: keys == NeededKeys::Neighbours,
            };
            list.extend(needs.decoding(&gpu.arch()));
        }
    }
    list
}

/// Every specialisation that ships or that the checks of all groups launch.
fn all_kernels(gpu: &DeviceReport) -> NeededKernels {
    let mut list = NeededKernels::shipped_for(&gpu.arch());
    list.extend(bands::kernels(gpu));
    list.extend(latent::latent_kernels(gpu));
    list.extend(sparse::sparse_kernels(gpu));
    list.extend(nsa::nsa_check_kernels(gpu));
    list.extend(key_order::kernels(gpu));
    list.extend(block_order::kernels(gpu));
    list.extend(branch_order::kernels(gpu));
    list.extend(step::rare_kernels(gpu, step::SCORED_KV_HEADS));
    let [exp, linear] = [ScoreBias::Exp, ScoreBias::Linear].map(NeededKeys::Chosen);
    for &(head_dim, head_dim_v) in WIDTHS {
        for &group in GROUPS {
            let shape = AttentionShape::new(1, 1, [group, 1], [head_dim, head_dim_v]);
            add_attention(&mut list, gpu, shape, &[NeededKeys::Neighbours, NeededKeys::AllBiased, exp, linear]);
        }
    }
    list
}

/// The report of a check as JSON, for programs.
pub fn check_json(report: &Report, settings: &CheckSettings, target: &sieve_kernels::Device) -> Value {
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
    use sieve_kernels::{AttentionShape, CudaTensor, DType, Hardware, KernelError, Recorder, SourceKernel, Step};
    use std::cell::RefCell;
    use std::collections::HashMap;

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

    /// A kernel that is compiled at its first launch costs a check a second; the kernels listed before are compiled on
    /// all cores at once.
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
        // Operands and references of these two take the host most of a minute.
        let is_quick = |(name, _): &&Part| !["step", "large biases"].contains(name);
        let quick = |parts: &[Part]| -> Vec<Part> { parts.iter().filter(is_quick).copied().collect() };
        let (ada, hopper) = ((8, 9), (9, 0));
        let lists = [(ada, ONLY_PORTABLE), (ada, OF_A_FAMILY), (hopper, OF_A_FAMILY), (hopper, &TOKENS[..1])];
        let lists = lists.into_iter().chain([(hopper, &[SINKS][..])]);
        let parts: Vec<_> =
            lists.flat_map(|(on, parts)| quick(parts).into_iter().map(move |part| (on, part))).collect();
        let launched = parts.into_par_iter().map(|(on, part)| ((on, part.0), launched_by(&part, on)));
        let launched: HashMap<_, _> = launched.collect();
        let all = all_kernels(&gpu);
        for (on, parts, compiled) in [
            (ada, ONLY_PORTABLE, all.clone()),
            (ada, OF_A_FAMILY, all.clone()),
            (hopper, OF_A_FAMILY, all),
            (hopper, TOKENS, BenchRows::Decode.kernels(&gpu)),
            (hopper, CheckPart::Sinks.of_a_family(), CheckPart::Sinks.kernels(&gpu)),
        ] {
            let (mut kernels, ahead) = (compiled.clone(), compiled.kernels.len());
            for (name, _) in quick(parts) {
                kernels.extend_kernels(launched[&(on, name)].iter().cloned());
                assert!(kernels.kernels[ahead..].is_empty(), "{name}: {:#?}", &kernels.kernels[ahead..]);
            }
        }
    }

    /// The kernels that a part launches on a GPU of this compute capability.
    fn launched_by(part: &Part, compute_capability: (u32, u32)) -> Vec<SourceKernel> {
        let hardware = Hardware { compute_capability, ..Hardware::HOPPER };
        let policy = KernelPolicy::default();
        let device = Noted { recorder: Recorder::new(hardware), kernels: RefCell::default(), policy };
        let mut cases = 0;
        let mut on_part = |done: CheckedPart| cases = done.cases;
        let ended = Progress::new(&mut on_part).wrappers("noted", &[*part], &device, &Extent::all(20, 60, 1));
        ended.expect("cases can be drawn");
        device.note();
        assert!(cases > 0, "{}", part.0);
        device.kernels.into_inner().kernels
    }

    /// Names and defines of what the parts of a family launch on a Hopper GPU under a policy.
    fn launched(policy: KernelPolicy) -> Vec<String> {
        let device = Noted { recorder: Recorder::new(Hardware::HOPPER), kernels: RefCell::default(), policy };
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
        let every_lane = launched(KernelPolicy { arrivals: Arrivals::EveryLane, ..KernelPolicy::default() });
        let arriving = |kernels: &[String]| {
            let all = kernels.iter().filter(|kernel| kernel.contains("EVERY_LANE_ARRIVES"));
            all.count()
        };
        assert!(arriving(&every_lane) > 4 && arriving(&all) == 0, "{every_lane:#?}");
    }

    #[test]
    fn a_part_that_panics_leaves_its_message_in_the_report() {
        type Part = fn(&mut Progress<'_>) -> Result<()>;
        let parts: [Part; 2] =
            [|_| panic!("no memory"), |progress| panic!("after {} row", progress.report.rows().len())];
        let mut on_part = |_| ();
        let mut progress = Progress::new(&mut on_part);
        for part in parts {
            assert!(matches!(stage(&mut progress, "a part", part), Ok(false)));
        }
        assert_eq!(progress.report.rows()[0].failures, ["the GPU: no memory", "the GPU: after 1 row"]);
    }
}
