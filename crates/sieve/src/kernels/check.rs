//! `sieve kernels check`: every kernel and gradient on this device against references on the host.
pub(crate) mod attention;
pub(crate) mod bar;
mod biases;
pub(crate) mod decode;
mod plain_loss;
pub(crate) mod report;
mod selection;
mod steps;

use super::build::prefill;
use super::place::Place;
use crate::device::{Device, DeviceChoice};
use crate::terminal;
use anyhow::{Context, Result, bail};
use attention::{GROUPS, WIDTHS};
use burn_cuda::CudaDevice;
use burn_flex::{Flex, FlexDevice};
use clap::Args;
use report::Report;
use serde_json::json;
use sieve_kernels::{
    AttentionNeeds, AttentionShape, DeviceReport, KernelCache, NeededKernels, NeededKeys,
    ScoreBias, SumOrder, attention_decode_kernel, needed_kernels, shared_bytes_of,
    shipped_kernels_for, use_portable_kernels_only,
};
use sieve_ops::Cuda;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Arguments of `sieve kernels check`.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// Random calls of attention, once through the ops and once through the kernels' own wrappers
    #[arg(long, default_value_t = 200)]
    cases: usize,
    /// Longest usual sequence; some of DMA's are longer than 1024 in any case
    #[arg(long, default_value_t = 700)]
    longest: usize,
    /// Seed of the random calls
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Check the portable kernels alone, also where the device has a family of its own
    #[arg(long)]
    portable: bool,
    /// Also write the rows as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

/// Runs the command.
pub(crate) fn run(args: &CheckArgs) -> Result<()> {
    if args.cases == 0 {
        bail!("--cases 0: nothing would be checked");
    }
    let started = Instant::now();
    let device = args.device.resolve_and_prepare(prepare)?;
    let mut report = Report::default();
    let name = match &device {
        Device::Cpu => {
            ops::<Flex>(&mut report, &FlexDevice, args, false)?;
            "cpu".to_owned()
        }
        Device::Cuda(gpu) => {
            on_cuda(&mut report, gpu, args)?;
            format!("{} ({})", gpu.name, gpu.arch())
        }
    };
    report.print();
    if let Some(path) = &args.json {
        write_json(path, &report, &name, args)?;
    }
    let seconds = started.elapsed().as_secs_f64();
    match report.failed() {
        0 => {
            terminal::line(&format!(
                "every row passed on {name}, {} cases, {seconds:.0} s",
                args.cases
            ));
            Ok(())
        }
        failed => bail!("{failed} of {} rows failed on {name}", report.rows().len()),
    }
}

/// Both families of kernels, then the ops as models call them. A GPU that stops answering ends the check, with a row.
fn on_cuda(report: &mut Report, gpu: &DeviceReport, args: &CheckArgs) -> Result<()> {
    let device = CudaDevice::new(gpu.index);
    let has_own_family = (gpu.major, gpu.minor) == (9, 0) && !args.portable;
    use_portable_kernels_only(true);
    let mut good = stage(report, "portable kernels", |report| {
        wrappers(report, &device, args)
    })?;
    use_portable_kernels_only(!has_own_family);
    if good && has_own_family {
        good = stage(report, "Hopper kernels", |report| {
            attention::check_wrappers(report, &device, args.cases, args.longest, args.seed)?;
            biases::check_wrappers(report, &device, args.seed)
        })?;
    }
    if good {
        stage(report, "ops", |report| {
            ops::<Cuda>(report, &device, args, true)
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

/// Compiles everything that random calls can ask for, on all cores, before the first of them.
pub(crate) fn prepare(cache: &KernelCache, gpu: &DeviceReport) -> Result<()> {
    prefill(cache, &gpu.arch(), &all_kernels(gpu)?)
}

/// A short check of the wrappers: times of wrong kernels are worth nothing.
pub(crate) fn require_parity(device: &CudaDevice, cases: usize) -> Result<()> {
    let mut report = Report::default();
    stage(&mut report, "the check", |report| {
        attention::check_wrappers(report, device, cases, 300, 2)?;
        selection::check_wrappers(report, device, cases.div_ceil(3), 2)?;
        decode::check_wrappers(report, device, cases.div_ceil(3), 2)
    })?;
    if report.failed() > 0 {
        report.print();
        bail!("the check failed, so nothing is timed");
    }
    Ok(())
}

fn ops<B: Place>(
    report: &mut Report,
    device: &B::Device,
    args: &CheckArgs,
    is_cuda: bool,
) -> Result<()> {
    let path = if is_cuda { "kernel" } else { "cpu" };
    attention::check_ops::<B>(report, device, args.cases, args.longest, args.seed, is_cuda)?;
    selection::check_ops::<B>(report, device, few(args), args.seed, path)?;
    decode::check_ops::<B>(report, device, few(args), args.seed, is_cuda)?;
    steps::check::<B>(report, device, args.seed, is_cuda);
    Ok(())
}

fn wrappers(report: &mut Report, device: &CudaDevice, args: &CheckArgs) -> Result<()> {
    attention::check_wrappers(report, device, args.cases, args.longest, args.seed)?;
    biases::check_wrappers(report, device, args.seed)?;
    selection::check_wrappers(report, device, few(args), args.seed)?;
    decode::check_wrappers(report, device, few(args), args.seed)
}

/// Cases of what is checked token by token or entry by entry.
fn few(args: &CheckArgs) -> usize {
    args.cases.div_ceil(5)
}

/// Every specialisation that the random calls can ask for.
fn all_kernels(gpu: &DeviceReport) -> Result<NeededKernels> {
    let shared_bytes = shared_bytes_of(&gpu.arch()).unwrap_or(99 * 1024);
    let mut list = shipped_kernels_for(shared_bytes);
    for (head_dim, head_dim_v) in WIDTHS {
        for group in GROUPS {
            let shape = AttentionShape {
                batch: 1,
                seq_len: 1,
                num_heads: group,
                num_kv_heads: 1,
                head_dim,
                head_dim_v,
            };
            list.kernels
                .push(attention_decode_kernel(head_dim, head_dim_v, 1));
            for keys in [
                NeededKeys::Neighbours,
                NeededKeys::AllBiased,
                NeededKeys::Chosen(ScoreBias::Exp),
            ] {
                for order in [SumOrder::Any, SumOrder::Fixed] {
                    list.extend(needed_kernels(
                        &AttentionNeeds { shape, keys, order },
                        &gpu.arch(),
                    ));
                }
            }
        }
    }
    Ok(list.deduplicated()?)
}

fn write_json(path: &Path, report: &Report, device: &str, args: &CheckArgs) -> Result<()> {
    let all = json!({
        "device": device,
        "sieve": env!("CARGO_PKG_VERSION"),
        "cases": args.cases,
        "seed": args.seed,
        "failed_rows": report.failed(),
        "rows": report.rows(),
    });
    let text = serde_json::to_string_pretty(&all).context("writing JSON")?;
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
