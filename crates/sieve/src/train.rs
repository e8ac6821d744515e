//! `sieve train`.
use crate::device::{Device, DeviceChoice};
use crate::recipe::RecipeArgs;
use crate::{interrupt, terminal};
use anyhow::{Context, Result};
use burn::backend::Autodiff;
use burn_flex::{Flex, FlexDevice};
use clap::Args;
use indicatif::ProgressBar;
use sieve_core::Recipe;
use sieve_data::Progress;
use sieve_train::{
    DataEvent, RunFolder, Start, StepReport, TrainEvent, TrainSummary, Trainer, TrainingData,
    ValidationReport,
};
use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

/// Arguments of `sieve train`.
#[derive(Args, Debug)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Output folder; out/<recipe name> when absent
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Continue from the latest checkpoint of the output folder
    #[arg(long)]
    resume: bool,
    /// Continue from this checkpoint instead of the latest
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    resume_from: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: TrainArgs) -> Result<()> {
    let recipe = args.recipe.load()?;
    let Device::Cpu = args.device.resolve()?;
    let start = match (&args.resume_from, args.resume) {
        (Some(path), _) => Start::ResumeFrom(path.clone()),
        (None, true) => Start::Resume,
        (None, false) => Start::New,
    };
    let out = args
        .out
        .clone()
        .unwrap_or_else(|| PathBuf::from("out").join(args.recipe.name()));
    let folder = RunFolder::open(&out, &recipe.checkpoint.folder, &start)?;
    let stop = interrupt::stop_flag()?;

    let data = prepare(&recipe, &folder)?;
    let config = folder.config_path();
    std::fs::write(&config, recipe.to_toml()?)
        .with_context(|| format!("writing {}", config.display()))?;
    let log = Log::open(&folder, data.prepared.reused)?;

    let peak = crate::device::cpu_peak_flops();
    let device = FlexDevice;
    let folder_path = folder.path().to_owned();
    let mut trainer =
        Trainer::<Autodiff<Flex>>::new(recipe.clone(), data, folder, &start, device, Some(peak))?;
    log.line(&describe(&recipe, &trainer, peak));
    let bar = terminal::progress_bar(
        recipe.training.steps as u64,
        "{bar:30} {pos}/{len} steps  {msg}",
    );
    bar.set_position(trainer.step());
    let started = Instant::now();
    let summary = trainer.run(&stop, &mut |event| show(&log, &bar, &event))?;
    bar.finish_and_clear();
    let elapsed = started.elapsed().as_secs_f64();
    finish(&log, &recipe, &trainer, &summary, &folder_path, elapsed)
}

/// Shards and tokenizer, with a bar or plain lines.
fn prepare(recipe: &Recipe, folder: &RunFolder) -> Result<TrainingData> {
    let dir = match &recipe.data.cache_dir {
        Some(dir) => PathBuf::from(sieve_core::paths::expand(dir, &variable)?),
        None => folder.data_path(),
    };
    let bar: RefCell<Option<ProgressBar>> = RefCell::new(None);
    let data = sieve_train::prepare_data(recipe, &dir, &variable, &mut |event| match event {
        DataEvent::TrainingTokenizer {
            vocab_size,
            sample_bytes,
        } => terminal::line(&format!(
            "tokenizer: training a byte-level BPE of {vocab_size} tokens on up to {}",
            terminal::bytes(sample_bytes)
        )),
        DataEvent::Preparing(Progress::Tokenising {
            bytes_done,
            bytes_total,
            ..
        }) => {
            let mut bar = bar.borrow_mut();
            let bar = bar.get_or_insert_with(|| {
                terminal::progress_bar(
                    bytes_total,
                    "tokenising {bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}, {eta} left",
                )
            });
            bar.set_length(bytes_total);
            bar.set_position(bytes_done);
        }
        DataEvent::Preparing(Progress::Waiting) => {
            terminal::line("data: another process is preparing the same folder; waiting");
        }
        DataEvent::Preparing(Progress::Writing) => {}
    })?;
    if let Some(bar) = bar.into_inner() {
        bar.finish_and_clear();
    }
    let meta = &data.prepared.meta;
    let verb = if data.prepared.reused {
        "found"
    } else {
        "wrote"
    };
    terminal::line(&format!(
        "data: {verb} {} training tokens in {} documents, {} held-out tokens in {} documents ({}, {:.1} s)",
        terminal::thousands(meta.train.num_tokens),
        terminal::thousands(meta.train.num_documents),
        terminal::thousands(meta.validation.num_tokens),
        terminal::thousands(meta.validation.num_documents),
        dir.display(),
        (data.tokenizer_time + data.prepare_time).as_secs_f64(),
    ));
    Ok(data)
}

/// An environment variable.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Terminal lines, kept in `log` too.
struct Log {
    file: RefCell<File>,
}

impl Log {
    fn open(folder: &RunFolder, _reused: bool) -> Result<Self> {
        let path = folder.log_path();
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .with_context(|| format!("opening {}", path.display()))?;
        Ok(Self {
            file: RefCell::new(file),
        })
    }

    fn line(&self, text: &str) {
        terminal::line(text);
        // The log repeats the terminal; losing a line of it is no reason to stop a run.
        let _ = writeln!(self.file.borrow_mut(), "{text}");
    }
}

fn describe(recipe: &Recipe, trainer: &Trainer<Autodiff<Flex>>, peak: f64) -> String {
    let shape = trainer.shape();
    let parameters = shape.parameters();
    let training = &recipe.training;
    let kind = match recipe.attention {
        sieve_core::recipe::AttentionSection::Mha => "mha".to_owned(),
        sieve_core::recipe::AttentionSection::Swa { sliding_window } => {
            format!("swa, {sliding_window} keys a query")
        }
        sieve_core::recipe::AttentionSection::Dma {
            keep_window_size, ..
        } => {
            format!("dma, {keep_window_size} keys a query")
        }
    };
    format!(
        "model: {} parameters ({} without embedding), {} layers x {}, attention {kind}\n\
         run: {} steps x {} rows x {} tokens on the CPU, {} threads, {:.0} GFLOP/s measured in f32 products",
        terminal::thousands(parameters.total()),
        terminal::thousands(parameters.non_embedding()),
        shape.num_layers,
        shape.d_model,
        training.steps,
        training.global_batch_size,
        training.seq_len,
        rayon_threads(),
        peak / 1e9,
    )
}

fn rayon_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn show(log: &Log, bar: &ProgressBar, event: &TrainEvent<'_>) {
    bar.suspend(|| match event {
        TrainEvent::Step(report) => log.line(&step_line(report)),
        TrainEvent::Validation(report) => log.line(&validation_line(report)),
        TrainEvent::Checkpoint(path) => log.line(&format!("checkpoint: {}", path.display())),
        TrainEvent::Notice(text) => log.line(text),
    });
    if let TrainEvent::Step(report) = event {
        bar.set_position(report.step);
        bar.set_message(format!("{} left", terminal::duration(report.eta_seconds)));
    }
}

/// torchtitan's line, then density, percent done and time left.
fn step_line(report: &StepReport) -> String {
    let gib = report.memory_bytes as f64 / (1u64 << 30) as f64;
    let share = 100.0 * report.memory_bytes as f64 / report.memory_total_bytes.max(1) as f64;
    let percent = |value: Option<f64>| value.map_or("n/a".to_owned(), |v| format!("{v:.2}%"));
    format!(
        "step: {:>5}  loss: {:>8.5}  grad_norm: {:>7.4}  memory: {gib:>5.2}GiB({share:.2}%)  tps: {}  tflops: {:.3}  \
         mfu: {} (dense equivalent {})  density: {:.3} ({:.1} keys)  {:.0}% done, {} left",
        report.step,
        report.loss,
        report.grad_norm,
        terminal::thousands(report.tokens_per_second as u64),
        report.tflops,
        percent(report.mfu_percent),
        percent(report.dense_mfu_percent),
        report.attention.density,
        report.attention.mean_active_keys,
        100.0 * report.step as f64 / report.num_steps as f64,
        terminal::duration(report.eta_seconds),
    )
}

fn validation_line(report: &ValidationReport) -> String {
    format!(
        "validate step: {:>5}  loss: {:>8.5}  perplexity: {:.2}  bits per byte: {:.4}  (unigram: {:.4}; {} tokens)",
        report.step,
        report.loss,
        report.perplexity,
        report.bits_per_byte,
        report.unigram_bits_per_byte,
        terminal::thousands(report.num_labels),
    )
}

fn finish(
    log: &Log,
    recipe: &Recipe,
    trainer: &Trainer<Autodiff<Flex>>,
    summary: &TrainSummary,
    folder: &std::path::Path,
    elapsed: f64,
) -> Result<()> {
    let checkpoint = summary.checkpoint.as_deref().unwrap_or(folder);
    if summary.interrupted {
        log.line(&format!(
            "stopped at step {} of {}; the state is in {}\n  to go on: the same command with --resume",
            summary.step,
            recipe.training.steps,
            checkpoint.display()
        ));
        return Ok(());
    }
    log.line(&format!(
        "trained {} steps in {}",
        summary.step,
        terminal::duration(elapsed)
    ));
    if let (Some(first), Some(last)) = (&summary.first_validation, &summary.last_validation) {
        log.line(&format!(
            "             loss   perplexity   bits per byte\n\
             start    {:>8.4}   {:>10.2}   {:>13.4}\n\
             end      {:>8.4}   {:>10.2}   {:>13.4}\n\
             unigram                          {:>10.4}   (end / unigram = {:.3})",
            first.loss,
            first.perplexity,
            first.bits_per_byte,
            last.loss,
            last.perplexity,
            last.bits_per_byte,
            last.unigram_bits_per_byte,
            last.bits_per_byte / last.unigram_bits_per_byte,
        ));
    }
    if let Some(step) = &summary.last_step {
        let attention = &step.attention;
        log.line(&format!(
            "mask: density {:.3}, {:.1} keys a query, {:.1} % of keys never seen, {:.1} % of queries without their own key",
            attention.density,
            attention.mean_active_keys,
            100.0 * attention.never_active,
            100.0 * attention.not_self_visible,
        ));
    }
    let _ = trainer;
    let checkpoint = checkpoint.display();
    log.line(&format!(
        "next:\n  sieve generate --checkpoint {checkpoint} --prompt \"fn main() {{\"\n  \
         sieve eval ppl --checkpoint {checkpoint} --data README.md\n  \
         sieve export --checkpoint {checkpoint} --out exported\n  \
         (sieve is target/release/sieve, or cargo run --release --)"
    ));
    Ok(())
}
