//! `sieve eval mqar`: accuracy on multi-query associative recall.

use super::phases::{Scored, parse, period, print_legend};
use crate::draw::phases::{self, Column, Row};
use anyhow::{Result, anyhow, bail};
use clap::{Args, ValueEnum};
use sieve_core::recipe::{MqarNoise as RecipeNoise, MqarSection};
use sieve_core::{Recipe, ShownPath};
use sieve_data::{MqarConfig, MqarNoise};
use sieve_eval::{RecallByPhase, RecallOfKind, RecallReport, RecallRun, recall};
use sieve_hf::{Kept, LoadedModel};
use sieve_host::evaluation::{output, so_far};
use sieve_host::line_chart::{self, Axis, Curve, Plot};
use sieve_host::loaded::{PlaceArgs, on_device};
use sieve_host::once::once;
use sieve_host::out_file::PictureFile;
use sieve_host::{loaded, terminal};
use sieve_ops::DeviceBackend;
use sieve_plan::InferenceSize;
use std::path::PathBuf;

/// Tokens of one forward pass; more would take memory and gain no time.
const BATCH_TOKENS: usize = 16_384;

/// Samples of a kind where neither the command nor the recipe sets a number.
const NUM_SAMPLES: u64 = 1000;

/// The default of `data.mqar.power`.
const DEFAULT_POWER: f64 = 0.01;
/// What accuracies by phase are means of.
const ROWS: &str = "samples";
/// Name under which `--save` keeps the result.
const COMMAND: &str = "mqar";

/// Arguments of `sieve eval mqar`.
#[derive(Args, Debug)]
pub struct MqarArgs {
    /// A checkpoint (step-N), or a run folder: then its latest
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Kinds of samples, LENGTH:PAIRS, separated by commas; those the run was trained on when absent
    #[arg(long, value_delimiter = ',', value_name = "L:D", value_parser = kind)]
    kinds: Vec<(usize, usize)>,
    /// Samples of each kind; the recipe's num_test_samples when absent
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    samples: Option<u64>,
    /// Tokens at the places without a key or a value; as in training when absent
    #[arg(long, value_enum)]
    noise: Option<NoiseArg>,
    /// Also group the answers by the key's position modulo P: does a right answer depend on where in a block the key
    /// lies? Without P, the size of the model's blocks, else 64
    #[arg(long, value_name = "P", num_args = 0..=1, value_parser = parse)]
    phases: Option<Option<usize>>,
    #[command(flatten)]
    result: output::ResultArgs,
    /// Draw accuracy by distance, one line a kind; with --phases accuracy by phase
    #[arg(long, value_name = "FILE")]
    plot: Option<PictureFile>,
    #[command(flatten)]
    place: PlaceArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum NoiseArg {
    /// Token 0
    Zeros,
    /// Any token
    Uniform,
    /// Any token that is not a key of the sample
    Disjoint,
}

/// Parses one `LENGTH:PAIRS`.
fn kind(text: &str) -> Result<(usize, usize), String> {
    let parts = text.split_once(':').map(|(a, b)| (a.parse(), b.parse()));
    match parts {
        Some((Ok(seq_len), Ok(num_pairs))) => Ok((seq_len, num_pairs)),
        _ => Err("write LENGTH:PAIRS, for example 64:4".to_owned()),
    }
}

/// Runs `sieve eval mqar`: a model's accuracy on multi-query associative recall.
pub(crate) fn run(args: MqarArgs) -> Result<()> {
    // Refuses a --save that cannot name its file, before the work begins.
    args.result.check(&args.checkpoint, COMMAND, args.plot.is_some())?;
    let place = (args.place).for_checkpoint(&args.checkpoint, |recipe, _| {
        let longest = args.kinds.iter().map(|(seq_len, _)| *seq_len).max();
        InferenceSize::rows_of(longest.unwrap_or(recipe.training.seq_len), BATCH_TOKENS)
    })?;
    on_device!(place, run_on(&args))
}

/// Asks the samples of every kind; prints the accuracies and draws them by distance.
fn run_on<B: DeviceBackend>(args: &MqarArgs, device: &B::Device, kept: Kept) -> Result<()> {
    let (loaded, _tokenizer) = loaded::load::<B>(&args.checkpoint, device, kept)?;
    let kinds = kinds(args, &loaded.recipe, loaded.model.shape().vocab_size)?;
    let trained = loaded.recipe.data.mqar.as_ref();
    if trained.is_none() {
        terminal::remark(
            "note: this model has not been trained on the task (its recipe has no [data] mqar), so it can only guess",
        );
    }
    let of_recipe = trained.map(|mqar| mqar.num_test_samples as u64);
    let num_samples = args.samples.or(of_recipe).unwrap_or(NUM_SAMPLES);
    let period = args.phases.map(|asked| period(asked, loaded.model.shape(), &[])).transpose()?;
    if let Some(period) = period {
        check_period(period, &kinds)?;
    }
    let run = RecallRun { num_samples, batch_tokens: BATCH_TOKENS, period };
    let total = num_samples * kinds.len() as u64;
    let report = so_far::with_bar(total, "samples", |bar| {
        let mut observe = |done| bar.set_position(done);
        let model = &loaded.model;
        recall(model, &kinds, run, device, &mut observe)
    })?;
    print(args, &loaded, &report)?;
    if let Some(path) = &args.plot {
        let title = format!("MQAR accuracy: {}", output::model_name(&loaded));
        let picture = match period {
            Some(period) => accuracy_by_phase(&title, period, &report),
            None => accuracy_by_distance(&title, &report),
        };
        path.write_text(&picture)?;
        if !args.result.json {
            terminal::line(&format!("wrote {}", path.shown()));
        }
    }
    Ok(())
}

/// Fails where no kind of samples has pairs for a period, or keys at two phases.
fn check_period(period: usize, kinds: &[MqarConfig]) -> Result<()> {
    if period == 2 {
        bail!("--phases 2: keys are at even positions, so all have one phase\n  hint: use --phases 4 or more");
    }
    // Keys are at every other position: the phases of an odd period repeat after two of it.
    let repeat = if period.is_multiple_of(2) { period } else { 2 * period };
    let most = kinds.iter().map(|kind| 2 * kind.num_pairs).max().unwrap_or(0);
    if most < repeat {
        bail!(
            "--phases {period}: the pairs of a sample take {most} tokens at most, and {repeat} are needed\n  hint: ask \
             samples with more pairs with --kinds, or fewer phases"
        );
    }
    Ok(())
}

/// Accuracy by phase, as it is written.
fn scored(by_phase: &RecallByPhase) -> Scored<'_> {
    Scored { name: "accuracy", gap: &by_phase.accuracy, factor: 100.0, unit: " %", digits: 1 }
}

/// An SVG of accuracy by phase, with a row for each kind of sample that has whole periods.
fn accuracy_by_phase<'r>(title: &str, period: usize, report: &'r RecallReport) -> String {
    let row = |kind: &'r RecallOfKind| {
        let by_phase = kind.by_phase.as_ref()?;
        Some(Row {
            name: format!("{} tokens, {} pairs", kind.seq_len, kind.num_pairs),
            gaps: vec![&by_phase.accuracy],
            says: vec![scored(by_phase).in_short()],
        })
    };
    let rows: Vec<Row<'_>> = report.kinds.iter().filter_map(row).collect();
    phases::svg(title, ROWS, period, &[Column { name: "accuracy, %", range: 0.0..1.0, factor: 100.0 }], &rows)
}

/// Whether kinds of samples are drawn from vocabularies of different sizes.
fn differ_in_vocabulary(report: &RecallReport) -> bool {
    report.kinds.windows(2).any(|pair| pair[0].vocab_size != pair[1].vocab_size)
}

/// An SVG of accuracy over the distance from value to question, with one line for each kind of sample.
fn accuracy_by_distance(title: &str, report: &RecallReport) -> String {
    let curve = |kind: &RecallOfKind| Curve {
        name: if differ_in_vocabulary(report) {
            format!("{} tokens, {} pairs of {}", kind.seq_len, kind.num_pairs, kind.vocab_size)
        } else {
            format!("{} tokens, {} pairs", kind.seq_len, kind.num_pairs)
        },
        points: (kind.by_distance.iter()).map(|bin| (bin.from.ilog2().into(), bin.accuracy)).collect(),
        errors: Vec::new(),
    };
    let curves: Vec<Curve> = report.kinds.iter().map(curve).collect();
    line_chart::svg(&Plot {
        title,
        x: Axis::powers_of_two("tokens between value and question, at least", &curves),
        y: Axis {
            label: "accuracy",
            range: 0.0..1.0,
            most_numbers: 6,
            text: &|accuracy| format!("{:.0} %", 100.0 * accuracy),
        },
        curves,
    })
}

/// The kinds of samples to measure: those of `--kinds`, otherwise of the recipe. What neither names is as in training,
/// or without `[data] mqar` the recipe key's default.
fn kinds(args: &MqarArgs, recipe: &Recipe, model_vocab_size: usize) -> Result<Vec<MqarConfig>> {
    let trained = recipe.data.mqar.as_ref();
    let of_sizes = |kind: SampleKind| MqarConfig {
        vocab_size: kind.vocab_size,
        power: trained.map_or(DEFAULT_POWER, |mqar| mqar.power),
        noise: noise(args, trained),
        ..MqarConfig::new(kind.seq_len, kind.num_pairs, trained.map_or(0, |mqar| mqar.seed))
    };
    let source = if args.kinds.is_empty() { "the recipe's [data] mqar" } else { "--kinds" };
    let checked = |kind: SampleKind| {
        let config = of_sizes(kind);
        let named = || format!("{source} {}:{}", kind.seq_len, kind.num_pairs);
        config.validate().map_err(|error| anyhow!(error).context(named()))?;
        Ok(config)
    };
    sample_kinds(args, trained, model_vocab_size)?.into_iter().map(checked).collect()
}

/// The sizes of a kind of samples.
#[derive(Clone, Copy)]
struct SampleKind {
    seq_len: usize,
    num_pairs: usize,
    vocab_size: usize,
}

/// The sizes of `--kinds` with one vocabulary for all, or the recipe's, each with its own.
fn sample_kinds(args: &MqarArgs, trained: Option<&MqarSection>, model_vocab_size: usize) -> Result<Vec<SampleKind>> {
    if !args.kinds.is_empty() {
        // MQAR needs an even vocabulary: half of it are keys, half values. Without [data] mqar it is the model's.
        let vocab_size = trained.map_or(model_vocab_size / 2 * 2, |mqar| mqar.vocab_size);
        once("--kinds", &args.kinds.iter().map(|(len, pairs)| format!("{len}:{pairs}")).collect::<Vec<_>>())?;
        for (seq_len, num_pairs) in &args.kinds {
            if *seq_len >= vocab_size {
                bail!(
                    "--kinds {seq_len}:{num_pairs}: samples of {seq_len} tokens need a vocabulary of more, and it has \
                     {vocab_size}\n  hint: ask for shorter samples"
                );
            }
        }
        let kinds = args.kinds.iter().map(|&(seq_len, num_pairs)| SampleKind { seq_len, num_pairs, vocab_size });
        return Ok(kinds.collect());
    }
    let Some(mqar) = trained else {
        bail!(
            "the recipe of this checkpoint has no [data] mqar\n  \
             hint: name what to ask with --kinds, for example 64:4,128:8"
        );
    };
    let sizes = mqar.seq_lens.iter().zip(&mqar.num_pairs).zip(mqar.vocab_size_of_kinds());
    let kind = |((&seq_len, &num_pairs), vocab_size)| SampleKind { seq_len, num_pairs, vocab_size };
    Ok(sizes.map(kind).collect())
}

/// What stands between the pairs: as `--noise` says, else as in training, else zeros.
fn noise(args: &MqarArgs, trained: Option<&MqarSection>) -> MqarNoise {
    match (args.noise, trained.map(|mqar| mqar.noise)) {
        (Some(NoiseArg::Zeros), _) | (None, None | Some(RecipeNoise::Zeros)) => MqarNoise::Zeros,
        (Some(NoiseArg::Uniform), _) | (None, Some(RecipeNoise::Uniform)) => MqarNoise::Uniform,
        (Some(NoiseArg::Disjoint), _) | (None, Some(RecipeNoise::Disjoint)) => MqarNoise::Disjoint,
    }
}

/// Prints the report: a line for each kind of sample or, with `--json`, an object.
fn print<B: DeviceBackend>(args: &MqarArgs, loaded: &LoadedModel<B>, report: &RecallReport) -> Result<()> {
    if args.result.report(loaded, COMMAND, serde_json::to_value(report)?)? {
        return Ok(());
    }
    let has_vocabulary = differ_in_vocabulary(report);
    let column = |text: &str| {
        if has_vocabulary { format!("  {text:>10}") } else { String::new() }
    };
    terminal::line(&format!(
        "{}\nlength  pairs{}  questions  accuracy  by distance",
        output::heading(loaded),
        column("vocabulary")
    ));
    for kind in &report.kinds {
        let bins = kind.by_distance.iter();
        let bins = bins.map(|bin| format!("{}: {:.1} %", bin.from, 100.0 * bin.accuracy));
        let bins: Vec<String> = bins.collect();
        terminal::line(&format!(
            "{:>6}  {:>5}{}  {:>9}  {:>6.2} %  {}",
            kind.seq_len,
            kind.num_pairs,
            column(&kind.vocab_size.to_string()),
            terminal::thousands(kind.answers.num_queries),
            100.0 * kind.accuracy,
            bins.join("  ")
        ));
    }
    if report.kinds.len() > 1 {
        terminal::line(&format!(
            "   all       {}  {:>9}  {:>6.2} %",
            column(""),
            terminal::thousands(report.all.num_queries),
            100.0 * report.accuracy
        ));
    }
    by_phase(report);
    if report.kinds.iter().any(|kind| !kind.reads.is_empty()) {
        terminal::line(
            "\nwhat the questions read\nlength  pairs  layer  values among keys read  among all keys  own value read",
        );
    }
    for kind in &report.kinds {
        for read in &kind.reads {
            let [values, of_all, answers] = [read.values, read.values_of_all, read.answers].map(|share| 100.0 * share);
            terminal::line(&format!(
                "{:>6}  {:>5}  {:>5}  {values:>20.1} %  {of_all:>12.1} %  {answers:>12.1} %",
                kind.seq_len, kind.num_pairs, read.layer
            ));
        }
    }
    Ok(())
}

/// Prints accuracy by phase, of each kind of sample that has whole periods.
fn by_phase(report: &RecallReport) {
    let phased: Vec<(&RecallOfKind, &RecallByPhase)> =
        report.kinds.iter().filter_map(|kind| Some((kind, kind.by_phase.as_ref()?))).collect();
    let Some((_, first)) = phased.first() else {
        return;
    };
    let period = first.period;
    terminal::line(&format!("\nphase: position of the asked key modulo {period}; keys are at even positions"));
    print_legend(ROWS);
    for (kind, by_phase) in &phased {
        terminal::line(&format!(
            "\n{} tokens, a vocabulary of {}, the first {} of {} pairs",
            kind.seq_len,
            terminal::thousands(kind.vocab_size as u64),
            by_phase.num_pairs,
            kind.num_pairs
        ));
        scored(by_phase).print();
        let distance = |phase: usize| {
            let mut all = by_phase.accuracy.phases.iter().zip(&by_phase.distances);
            all.find(|(score, _)| score.phase == phase).map_or(0.0, |(_, &distance)| distance)
        };
        let gap = &by_phase.accuracy;
        terminal::line(&format!(
            "{:16}mean distance to the question: {:.1} tokens at phase {}, {:.1} at phase {}",
            "",
            distance(gap.best),
            gap.best,
            distance(gap.worst),
            gap.worst
        ));
    }
    if phased.len() < report.kinds.len() {
        let left_out = report.kinds.len() - phased.len();
        terminal::line(&format!(
            "{} without phases: the pairs take less than a period",
            terminal::counted(left_out as u64, "kind")
        ));
    }
}
