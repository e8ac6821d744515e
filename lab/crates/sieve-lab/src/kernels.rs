//! `sieve kernels check`, `bench`, `capture` and `run`: what the CUDA kernels compute, and in which time.
mod arguments;

use anyhow::{Context, Result, bail};
pub use arguments::KernelsCommand;
use arguments::{BenchArgs, CaptureArgs, CheckArgs, RunArgs};
use sieve_bench::{BenchEvent, BenchSettings, Captured, CheckSettings, CheckedPart, RunSettings, Scores};
use sieve_core::ShownPath;
use sieve_hf::Kept;
use sieve_host::device::{Device, Place};
use sieve_host::kernels_ahead::prepare;
use sieve_host::loaded::on_device;
use sieve_host::out_file::OutFile;
use sieve_host::{hub, loaded, terminal};
use sieve_kernels::Arrivals;
use sieve_ops::DeviceBackend;
use std::path::Path;
use std::time::Instant;

/// Runs a check, a benchmark, or a recording of the kernels.
///
/// # Errors
/// A wrong result, what a command refuses, and failures of files and devices.
pub fn run(command: KernelsCommand) -> Result<()> {
    match command {
        KernelsCommand::Check(args) => check(&args),
        KernelsCommand::Bench(args) => bench(args),
        KernelsCommand::Capture(args) => capture(&args),
        KernelsCommand::Run(args) => run_op(args),
    }
}

/// Runs `sieve kernels check`: prints a line for each part, then the table; fails if a row failed.
fn check(args: &CheckArgs) -> Result<()> {
    if args.cases == 0 {
        bail!("--cases 0: nothing would be checked");
    }
    if args.json.is_none() {
        terminal::end_with_reader();
    }
    let (cases, longest) = args.extent();
    let settings = CheckSettings {
        cases,
        longest,
        seed: args.seed,
        magnitude: args.magnitude,
        portable: args.portable,
        arrivals: if args.every_lane_arrives { Arrivals::EveryLane } else { Arrivals::Warp },
        part: args.part(),
        gemms: !args.without_gemms,
    };
    let started = Instant::now();
    let prepare = prepare(|gpu| settings.part.kernels(gpu));
    let target = args.device.resolve_and_prepare(prepare)?;
    let report = sieve_bench::check(&settings, &target, &mut print_part)?;
    terminal::line(&report.to_string());
    if let Some(path) = &args.json {
        write_json(path, &sieve_bench::check_json(&report, &settings, &target))?;
    }
    let (name, seconds) = (target.name(), started.elapsed().as_secs_f64());
    match report.failed() {
        0 => {
            let cases: usize = report.rows().iter().map(|row| row.cases).sum();
            terminal::line(&format!("every row passed on {name}, {cases} cases, {seconds:.0} s"));
            Ok(())
        }
        failed => bail!("{failed} of {} rows failed on {name}", report.rows().len()),
    }
}

fn print_part(part: CheckedPart) {
    terminal::line(&part.to_string());
}

/// Runs `sieve kernels bench`: a short check, then the times.
fn bench(args: BenchArgs) -> Result<()> {
    if args.repetitions == 0 {
        bail!("--repetitions 0: nothing would be timed");
    }
    if args.json.is_none() {
        terminal::end_with_reader();
    }
    let rows = args.rows();
    let prepare = prepare(|gpu| rows.kernels(gpu));
    let gpu = match args.device.resolve_and_prepare(prepare)? {
        Device::Cuda(gpu) => gpu,
        Device::Cpu => bail!(
            "kernels bench times the CUDA kernels, and there is no GPU here\n  \
             hint: `cargo run --release -p sieve-cpu --example bench_cpu` in the sources times the CPU's kernels"
        ),
    };
    let report = sieve_bench::short_check(&gpu, args.portable, rows, &mut print_part)?;
    if report.failed() > 0 {
        terminal::line(&report.to_string());
        bail!("the check failed, so nothing is timed");
    }
    let mut scores = args.scores;
    if scores.is_empty() {
        scores = vec![Scores::Independent, Scores::Rising, Scores::Tied];
    }
    let settings = BenchSettings {
        rows,
        scores,
        portable: args.portable,
        repetitions: args.repetitions,
        operands: args.operands,
        selectors: args.selector,
        lengths: args.lengths,
        heads: args.heads,
        width: args.width,
        blocks_per_tile: args.blocks_per_tile,
    };
    let mut print = |event| match event {
        BenchEvent::Ceilings(ceilings) => terminal::line(&ceilings.to_string()),
        BenchEvent::Row(row) => terminal::line(&row.to_string()),
    };
    let result = sieve_bench::bench(&settings, &gpu, &mut print)?;
    if let Some(path) = &args.json {
        write_json(path, &result.json)?;
    }
    match result.failed {
        0 => Ok(()),
        failed => bail!("{failed} rows could not be timed"),
    }
}

fn write_json(path: &OutFile, value: &serde_json::Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value).context("writing JSON")?;
    path.write_text(&text)
}

fn capture(args: &CaptureArgs) -> Result<()> {
    let checkpoint = &hub::folder(&args.checkpoint)?;
    let (text, out) = (args.text.as_deref(), &args.out);
    on_device!(Place::new(args.device.resolve()?, None)?, capture_to(checkpoint, text, out))
}

/// Runs `sieve kernels capture` on the backend of a device.
fn capture_to<B: DeviceBackend>(
    checkpoint: &Path,
    text: Option<&Path>,
    out: &OutFile,
    device: &B::Device,
    kept: Kept,
) -> Result<()> {
    let (loaded, tokenizer) = loaded::load::<B>(checkpoint, device, kept)?;
    let text = match text {
        Some(path) => sieve_files::read_text(path).with_context(|| format!("reading text from {}", path.shown()))?,
        None => sieve_bench::kernel_sources()?,
    };
    let tokens = tokenizer.encode(&text)?;
    let captured = out.write(|file| anyhow::Ok(sieve_bench::capture(&loaded, tokens, file, device)?))?;
    let step = loaded.step().map_or(String::new(), |step| format!(" of step {step}"));
    let out = out.shown();
    terminal::line(&match captured {
        Captured::Scores([rows, tokens]) => format!(
            "captured the scores of {tokens} tokens by {rows} KV heads{step} in {out}; use them with --scores \
             captured:{out}"
        ),
        Captured::Operands([tokens, heads, kv_heads]) => format!(
            "captured q, k and v of {tokens} tokens, {heads} query and {kv_heads} KV heads{step} in {out}; \
             use them with kernels bench --selectors --operands {out}"
        ),
    });
    Ok(())
}

/// Runs `sieve kernels run`.
fn run_op(args: Box<RunArgs>) -> Result<()> {
    let nsa = args.nsa();
    let settings = RunSettings {
        op: args.op,
        shape: args.shape,
        window: args.window,
        local_window: args.local_window,
        periods: args.periods,
        documents: args.documents,
        scores: args.scores,
        seed: args.seed,
        magnitude: args.magnitude,
        deterministic: args.deterministic,
        parts: args.parts,
        nsa,
        selector: args.selector,
    };
    let target = || args.device.resolve();
    let (names, device) = args.out.write(|file| anyhow::Ok(sieve_bench::run(&settings, file, target)?))?;
    let (names, out) = (names.join(" "), args.out.shown());
    terminal::line(&format!("wrote {names} to {out}, computed on {device}"));
    Ok(())
}
