//! `sieve eval needle`: a number hidden in a long text, asked for at its end.

mod by_phase;

use crate::draw::grid::{Map, MapCell, Picture};
use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};
use sieve_core::{ShownPath, attention_label};
use sieve_data::Tokenizer;
use sieve_eval::{Haystack, NUM_DISTRACTORS, NeedleCell, NeedleConfig, NeedleReport, linear_grid, needle};
use sieve_hf::{Kept, LoadedModel};
use sieve_host::evaluation::{output, so_far, text};
use sieve_host::loaded::{PlaceArgs, on_device};
use sieve_host::out_file::PictureFile;
use sieve_host::{hub, loaded, selector, terminal};
use sieve_infer::{Selection, TaskModel, text_documents};
use sieve_ops::DeviceBackend;
use std::path::PathBuf;

/// Name under which `--save` keeps the result.
const COMMAND: &str = "needle";

/// Lengths of a grid at most; the same limit for depths.
const MOST_STEPS: usize = 1000;
/// Lengths and depths where neither they nor `--grid` are given.
const USUAL_STEPS: usize = 35;
/// A mean rank this many standard errors from a guess's is called better or worse than chance.
const CLEAR_SIGMAS: f64 = 3.0;
/// Needles of all lengths and depths together, at most.
const MOST_NEEDLES: usize = 1_000_000;

/// Arguments of `sieve eval needle`.
#[derive(Args, Debug)]
pub struct NeedleArgs {
    /// A checkpoint (step-N) of any kind, or a run folder: then its latest; or hf://OWNER/NAME
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Text, JSONL or Parquet files, folders or globs to hide the needle in; made-up English sentences when absent
    #[arg(long, num_args = 1.., value_name = "PATH")]
    data: Vec<String>,
    /// Tokens of the whole sample, question and answer included; --grid even steps up to the model's context when
    /// absent
    #[arg(long, value_delimiter = ',', value_name = "N,…")]
    lengths: Vec<usize>,
    /// Percent of the haystack before the needle; --grid even steps from 0 to 100 when absent
    #[arg(long, value_delimiter = ',', value_name = "P,…", allow_negative_numbers = true)]
    depths: Vec<f64>,
    /// Number of lengths, and of depths, if they are not listed; 35 when absent
    #[arg(long, value_name = "N")]
    grid: Option<usize>,
    /// Needles of each length and depth; 1 when absent, 16 with --phases
    #[arg(long, value_name = "N")]
    needles: Option<usize>,
    /// Ask each needle at every position modulo P, one length (1024 tokens) and depth (50) unless listed: does finding
    /// it depend on where in a block it lies? Without P, the size of the blocks of model and selectors, else 64
    #[arg(long, value_name = "P", num_args = 0..=1, conflicts_with = "grid", value_parser = super::phases::parse)]
    phases: Option<Option<usize>>,
    /// Tokens of each length kept for needle, question and answer
    #[arg(long, default_value_t = 200, value_name = "N")]
    buffer: usize,
    /// Draws the needles
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    #[command(flatten)]
    sparse: selector::SelectorsArgs,
    #[command(flatten)]
    result: output::ResultArgs,
    /// Also write an SVG: a heat map of each score, by length and depth; with --phases each score by phase
    #[arg(long, value_name = "FILE")]
    plot: Option<PictureFile>,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Runs `sieve eval needle`: how many inserted sentences a model finds, by length and depth.
pub(crate) fn run(mut args: NeedleArgs) -> Result<()> {
    args.checkpoint = hub::folder(&args.checkpoint)?;
    if args.lengths.contains(&0) {
        bail!("--lengths must be positive\n  hint: a sample also has to be longer than --buffer");
    }
    let grid = args.grid.unwrap_or(USUAL_STEPS);
    if args.grid.is_some() && !args.lengths.is_empty() && !args.depths.is_empty() {
        bail!("--grid has no effect beside --lengths and --depths\n  hint: leave one of them out");
    }
    if !(1..=MOST_STEPS).contains(&grid) {
        bail!("--grid is {grid}\n  hint: ask for 1 to {MOST_STEPS} lengths and depths");
    }
    let command = if args.phases.is_some() { by_phase::COMMAND } else { COMMAND };
    args.result.check(&args.checkpoint, command, args.plot.is_some())?;
    let place = (args.place).for_checkpoint(&args.checkpoint, |_, shape| {
        let unlisted = args.phases.map_or(shape.max_seq_len, |_| by_phase::LENGTH.min(shape.max_seq_len));
        let longest = args.lengths.iter().max().copied();
        text::size_with_endings(shape, longest.unwrap_or(unlisted), NUM_DISTRACTORS + 1)
    })?;
    on_device!(place, run_on(&args))
}

/// Asks for all needles with the model's own attention and with each selector; prints the result and draws it.
fn run_on<B: DeviceBackend>(args: &NeedleArgs, device: &B::Device, kept: Kept) -> Result<()> {
    let read = loaded::load::<B>(&args.checkpoint, device, kept)?;
    if let Some(period) = args.phases {
        return by_phase::run_on(args, period, &read, device);
    }
    let (loaded, tokenizer) = read;
    let config = config(args, loaded.shape.max_seq_len)?;
    config.check(loaded.shape.max_seq_len)?;
    let selections = args.sparse.own_and_each(&loaded.shape)?;
    let haystack = haystack(args, config.haystack_tokens(), &tokenizer)?;
    let model =
        TaskModel { model: &loaded.model, tokenizer: &tokenizer, ends: &loaded.end_ids(tokenizer.eos_id()?)?, device };
    let per_method = config.lengths.len() * config.depths.len() * config.num_needles;
    let total = (per_method * selections.len()) as u64;
    let reports = so_far::with_bar(total, "needles", |bar| {
        let ask = |(n, selection): (usize, &Option<Selection>)| {
            let mut observe = |asked: usize, cells: &[NeedleCell]| {
                bar.set_position((n * per_method + asked) as u64);
                found_so_far(selection.as_ref(), cells);
            };
            needle(&model, &haystack, &config, selection.as_ref(), &mut observe)
        };
        selections.iter().enumerate().map(ask).collect::<Result<Vec<_>, _>>()
    })?;
    print(args, &loaded, &config, &reports)?;
    if let Some(path) = &args.plot {
        let own = attention_label(&loaded.shape);
        let picture = Picture {
            title: format!("Needle in a haystack: {}", output::model_name(&loaded)),
            trained_len: loaded.trained_len(),
            maps: reports.iter().map(|report| map(&config, report, &own)).collect(),
        };
        path.write_text(&picture.svg())?;
        if !args.result.json {
            terminal::line(&format!("wrote {}", path.shown()));
        }
    }
    Ok(())
}

/// Keeps how many of the needles at the lengths and depths that are done were found.
fn found_so_far(selection: Option<&Selection>, cells: &[NeedleCell]) {
    let count = |of: fn(&NeedleCell) -> usize| cells.iter().map(of).sum::<usize>();
    let (found, asked) = (count(|cell| cell.num_found), count(|cell| cell.num_needles));
    if asked > 0 {
        let method = selection.map_or(String::new(), |selection| format!("{}: ", selection.selectors()));
        so_far::now(format!("{method}{found} of {asked} needles found"));
    }
}

/// One method's report as a heat map by length and depth.
fn map(config: &NeedleConfig, report: &NeedleReport, own: &str) -> Map {
    let num_depths = config.depths.len();
    // Cells are ordered by length, then by depth.
    let cells = report.cells.iter().enumerate().map(|(n, cell)| MapCell {
        column: n / num_depths,
        row: n % num_depths,
        score: cell.num_found as f64 / cell.num_needles as f64,
        mean_rank: cell.mean_rank,
        title: format!(
            "{} tokens, {:.0} %: {} of {} found, mean rank {:.2}",
            cell.length, cell.depth, cell.num_found, cell.num_needles, cell.mean_rank
        ),
    });
    let (found, rank) = (100.0 * report.found, report.mean_rank);
    let name = report.selector.as_deref();
    let rows = config.depths.iter().map(|depth| format!("{depth:.0} %"));
    Map {
        name: name.map_or_else(|| own.to_owned(), selector::short),
        summary: format!("{found:.1} % found, mean rank {rank:.2}"),
        lengths: config.lengths.clone(),
        rows: rows.collect(),
        about_rows: "depth of the needle",
        cells: cells.collect(),
    }
}

/// Lengths and depths: the listed ones, or `--grid` even steps.
fn config(args: &NeedleArgs, context: usize) -> Result<NeedleConfig> {
    let grid = args.grid.unwrap_or(USUAL_STEPS);
    let mut lengths = args.lengths.clone();
    if lengths.is_empty() {
        // The shortest text is twice the buffer, so half of it is haystack.
        let first = args.buffer.saturating_mul(2).max(context / grid).min(context);
        let even = linear_grid(first as f64, context as f64, grid);
        lengths = even.iter().map(|x| x.round() as usize).collect();
    }
    let mut depths = args.depths.clone();
    if depths.is_empty() {
        depths = linear_grid(0.0, 100.0, grid);
    }
    let num_needles = args.needles.unwrap_or(1);
    let config = NeedleConfig { lengths, depths, num_needles, buffer: args.buffer, seed: args.seed }.sorted();
    let num_cells = config.lengths.len() * config.depths.len();
    if num_needles.saturating_mul(num_cells) > MOST_NEEDLES {
        bail!(
            "--needles is {num_needles}, for each of {num_cells} lengths and depths\n  \
             hint: ask for {MOST_NEEDLES} in all at most"
        );
    }
    Ok(config)
}

/// `wanted` tokens of text for the needles: of `--data`, else made up.
fn haystack(args: &NeedleArgs, wanted: usize, tokenizer: &Tokenizer) -> Result<Haystack> {
    if args.data.is_empty() {
        return Ok(Haystack::made_up(wanted, tokenizer)?);
    }
    let corpus = text::corpus(&args.data)?;
    let documents = text_documents(corpus.documents(), tokenizer, tokenizer.eos_id()?);
    Ok(Haystack::of_documents(documents, wanted, tokenizer)?)
}

/// The first keys of the JSON object: which model was asked, and how.
fn head<B: DeviceBackend>(args: &NeedleArgs, loaded: &LoadedModel<B>) -> Value {
    json!({
        "attention": attention_label(&loaded.shape),
        "trained_length": loaded.trained_len(),
        "data": args.data,
        "chunk": args.sparse.chunk,
        "stream": args.sparse.stream,
        "seed": args.seed,
        "buffer": args.buffer,
    })
}

/// Prints, for each method, how many needles it found and its mean rank; or one JSON object.
fn print<B: DeviceBackend>(
    args: &NeedleArgs,
    loaded: &LoadedModel<B>,
    config: &NeedleConfig,
    reports: &[NeedleReport],
) -> Result<()> {
    let mut json = head(args, loaded);
    json["methods"] = json!(reports);
    if args.result.report(loaded, COMMAND, json)? {
        return Ok(());
    }
    terminal::line(&format!(
        "{}, {}; {} by {}, {} of each\n\
         found: the number is in the greedy continuation; rank: of its likelihood among {} others, 1 is best, a \
         guess {}",
        output::heading(loaded),
        output::trained_words(loaded),
        terminal::counted(config.lengths.len() as u64, "length"),
        terminal::counted(config.depths.len() as u64, "depth"),
        terminal::counted(config.num_needles as u64, "needle"),
        NUM_DISTRACTORS,
        reports.first().map_or(0.0, |report| report.chance_rank),
    ));
    if let Some(report) = reports.first() {
        let example = &report.example;
        terminal::line(&format!("the first one: \"{}\" hidden, \"{} …\" asked", example.statement, example.question));
    }
    for report in reports {
        let name = selector::method(report.selector.as_deref(), &loaded.shape);
        let density = report.density.map_or(String::new(), |x| format!(", {:.1} % of the pairs", 100.0 * x));
        terminal::line(&format!(
            "\n{name}{density}\n{}: {:.1} % found, mean rank {:.2} ({}), {:.1} % first",
            terminal::counted(report.num_needles as u64, "needle"),
            100.0 * report.found,
            report.mean_rank,
            verdict(report),
            100.0 * report.first,
        ));
        by_length(config, report);
        if !report.paths.is_empty() {
            terminal::line(&selector::paths(&report.paths));
        }
    }
    Ok(())
}

/// Whether the mean rank differs from guessing, by [`CLEAR_SIGMAS`].
fn verdict(report: &NeedleReport) -> String {
    let (sigmas, best) = (report.sigmas, report.best_sigmas());
    let what = match sigmas {
        x if x > CLEAR_SIGMAS => "better than chance",
        x if x < -CLEAR_SIGMAS => "worse than chance",
        _ if best <= CLEAR_SIGMAS => {
            return format!("within chance, {sigmas:+.1} standard errors: so few needles reach {best:+.1} at most");
        }
        _ => return format!("within chance, {sigmas:+.1} standard errors: {CLEAR_SIGMAS} would be clear"),
    };
    format!("{what}, {sigmas:+.1} standard errors")
}

/// Prints a line for each length, with the mean over all depths.
fn by_length(config: &NeedleConfig, report: &NeedleReport) {
    terminal::line("length    found  mean rank");
    for cells in report.cells.chunks(config.depths.len()) {
        let needles: usize = cells.iter().map(|cell| cell.num_needles).sum();
        let found: usize = cells.iter().map(|cell| cell.num_found).sum();
        let rank: f64 = cells.iter().map(|cell| cell.mean_rank).sum::<f64>() / cells.len() as f64;
        terminal::line(&format!(
            "{:>6}  {:>5.1} %  {rank:>9.2}",
            cells[0].length,
            100.0 * found as f64 / needles as f64,
        ));
    }
}
