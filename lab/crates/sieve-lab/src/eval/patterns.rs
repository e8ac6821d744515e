//! `sieve eval patterns`: searches, on a dense checkpoint, the patterns file of `minference` or the maps file of `dam`.
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use sieve_core::{ModelShape, ShownPath};
use sieve_eval::{PatternSearch, calibrate_dam, search_minference};
use sieve_hf::{Kept, LoadedModel};
use sieve_host::evaluation::{output, so_far, text};
use sieve_host::loaded::{PlaceArgs, on_device};
use sieve_host::out_file::OutFile;
use sieve_host::{hub, loaded, terminal};
use sieve_infer::InferError;
use sieve_ops::DeviceBackend;
use sieve_plan::InferenceSize;
use sieve_select::decode::dam::{DamConfig, DamMap, DamMaps};
use sieve_select::prefill::minference::Pattern;
use sieve_select::{Method, Selector};
use std::path::PathBuf;

/// Prompts of a calibration, unless `--windows` is given.
const DAM_PROMPTS: usize = 8;

/// Name under which `--save` keeps the result.
const COMMAND: &str = "patterns";

/// Arguments of `sieve eval patterns`.
#[derive(Args, Debug)]
pub struct PatternsArgs {
    /// A checkpoint (step-N) of a model with dense layers, or a run folder: then its latest; or hf://OWNER/NAME
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Text, JSONL or Parquet files, folders or globs; documents are read one after the other
    #[arg(long, required = true, num_args = 1.., value_name = "PATH")]
    data: Vec<String>,
    /// The file to write, JSON; an existing file is replaced
    #[arg(long, value_name = "FILE")]
    out: OutFile,
    /// minference: the pattern that keeps most of each head's attention on one prompt; dam: a map of each head's mean
    /// attention over several, with settings after a colon: dam:capture=512,density=0.25
    #[arg(long, default_value = "minference", value_name = "NAME", value_parser = search)]
    method: Search,
    /// Tokens of a prompt; when absent the length the model was trained with, and of dam its capture if the context has
    /// room
    #[arg(long, value_name = "N")]
    length: Option<usize>,
    /// Prompts of dam, 8 when absent; minference searches one
    #[arg(long, value_name = "N")]
    windows: Option<usize>,
    #[command(flatten)]
    result: output::ResultArgs,
    // The model runs on this device; the search itself runs on the CPU.
    #[command(flatten)]
    place: PlaceArgs,
}

/// The pattern that the command searches for.
#[derive(Clone, Debug)]
enum Search {
    Minference,
    Dam(DamConfig),
}

impl Search {
    fn name(&self) -> &'static str {
        match self {
            Self::Minference => "minference",
            Self::Dam(_) => "dam",
        }
    }
}

/// Parses the value of `--method`.
fn search(text: &str) -> std::result::Result<Search, String> {
    let name = text.split(':').next().unwrap_or_default();
    if !["minference", "dam"].contains(&name) {
        return Err(format!(
            "nothing is searched ahead of time for {name:?}\n  hint: the methods are minference and dam"
        ));
    }
    let selector = Selector::parse(text).map_err(|error| error.to_string())?;
    let defaults = Selector::parse(name).map_err(|error| error.to_string())?;
    match selector.method {
        Method::Dam(dam) if dam.map.is_empty() && selector.common == defaults.common => Ok(Search::Dam(dam)),
        Method::Minference(_) if !text.contains('=') => Ok(Search::Minference),
        Method::Minference(_) => Err("minference's search has no settings\n  hint: use --method minference".to_owned()),
        _ => Err("a calibration has the settings capture, density, lambda, floor, matching and sink\n  \
             hint: leave the others out"
            .to_owned()),
    }
}

/// Runs `sieve eval patterns`: calibrates a selector that needs patterns by layer and head, and writes them.
pub(crate) fn run(mut args: PatternsArgs) -> Result<()> {
    args.checkpoint = hub::folder(&args.checkpoint)?;
    let flag = flag(&args)?;
    args.result.check(&args.checkpoint, COMMAND, true)?;
    let place = (args.place).for_checkpoint(&args.checkpoint, |recipe, _| {
        let length = args.length.unwrap_or(recipe.training.seq_len);
        InferenceSize::rows_of(length, length)
    })?;
    on_device!(place, run_on(&args, &flag))
}

/// Searches the patterns or maps on the first tokens of the text, writes the file and prints what was found.
fn run_on<B: DeviceBackend>(args: &PatternsArgs, flag: &str, device: &B::Device, kept: Kept) -> Result<()> {
    let (loaded, tokenizer) = loaded::load::<B>(&args.checkpoint, device, kept)?;
    let length = length(args, &loaded.shape, loaded.recipe.training.seq_len)?;
    let windows = match args.method {
        Search::Minference => 1,
        Search::Dam(_) => args.windows.unwrap_or(DAM_PROMPTS),
    };
    let tokens = text::tokens(&args.data, &tokenizer, length, windows)?;
    let windows = text::windows(&tokens, length, windows);
    let (total, what) = match args.method {
        Search::Minference => (loaded.shape.num_layers_of_dense_attention(), "layers"),
        Search::Dam(_) => (windows.len(), "prompts"),
    };
    let (file, report) = so_far::with_bar(total as u64, what, |bar| -> Result<_> {
        let (model, mut observe) = (&loaded.model, |done| bar.set_position(done));
        Ok(match &args.method {
            Search::Minference => {
                let found = search_minference(model, &windows[0], device, &mut observe)?;
                (found.file().to_json(), minference_report(&found, length))
            }
            Search::Dam(calibration) => {
                let maps = calibrate_dam(model, &windows, calibration, device, &mut observe)?;
                (serde_json::to_string(&maps)?, dam_report(&maps, length))
            }
        })
    })?;
    args.out.write_text(&file)?;
    print(args, &loaded, [windows.len(), length], report, flag)
}

/// Checks the flags. Returns the `--selector` flag by which other commands read the written file.
fn flag(args: &PatternsArgs) -> Result<String> {
    let path = args.out.shown();
    if args.out.to_str().is_none_or(|path| path.contains(',')) {
        bail!(
            "--selector could not name {path}: a comma ends a setting there, and the rest must be UTF-8\n  \
             hint: choose a different name for --out"
        );
    }
    if matches!(args.method, Search::Minference) && args.windows.is_some_and(|windows| windows != 1) {
        bail!(
            "--windows is for dam; minference searches one prompt\n  \
             hint: leave --windows out, or give a longer --length"
        );
    }
    if args.windows == Some(0) || args.length == Some(0) {
        bail!("--length and --windows must be positive\n  hint: leave them out for the defaults");
    }
    let selector = match &args.method {
        Search::Minference => format!("minference:pattern={path}"),
        // The map holds all of a calibration's settings but `sink`, which also acts outside the map.
        Search::Dam(dam) if dam.sink != DamConfig::default().sink => {
            format!("dam:map={path},sink={}", dam.sink)
        }
        Search::Dam(_) => format!("dam:map={path}"),
    };
    Ok(format!("--selector {}", terminal::shell_word(&selector)))
}

/// Tokens of a prompt. Fails, before any text is read, if the model has no dense layer, sinks, or too short a context.
fn length(args: &PatternsArgs, shape: &ModelShape, trained: usize) -> Result<usize> {
    InferError::require_dense(args.method.name(), shape)?;
    let context = shape.max_seq_len;
    let length = match (&args.method, args.length) {
        (_, Some(length)) => length,
        (Search::Minference, None) => trained.min(context),
        (Search::Dam(dam), None) => dam.capture.min(context),
    };
    if length > context {
        let error = InferError::TooLong { num_tokens: length, context };
        return Err(error).context("--length");
    }
    if let Search::Dam(dam) = &args.method
        && length > dam.capture
    {
        bail!(
            "--length {length} is longer than the maps, which take the first {} tokens of a prompt\n  \
             hint: use --method dam:capture={length}",
            dam.capture
        );
    }
    Ok(length)
}

/// The result as printed lines and as JSON.
struct Report {
    lines: Vec<String>,
    json: Value,
}

/// A pattern and its settings, as the report names it.
fn label(pattern: &Pattern) -> String {
    match *pattern {
        Pattern::AShape { n_init, n_local } => format!("a_shape {n_init} + {n_local}"),
        Pattern::VerticalSlash { vertical, slash } => {
            format!("vertical_slash {vertical} + {slash}")
        }
        Pattern::BlockSparse { topk } => format!("block_sparse {topk}"),
        Pattern::BlockSparseEighth => "block_sparse, an eighth".to_owned(),
    }
}

/// For each pattern, how many heads take it and how much of dense attention's weight it keeps.
fn minference_report(found: &PatternSearch, length: usize) -> Report {
    let mut counts: Vec<(String, Vec<f64>)> = Vec::new();
    for (pattern, mass) in found.heads.iter().flatten() {
        let label = label(pattern);
        match counts.iter_mut().find(|(known, _)| *known == label) {
            Some((_, masses)) => masses.push(*mass),
            None => counts.push((label, vec![*mass])),
        }
    }
    counts.sort_by_key(|(_, masses)| std::cmp::Reverse(masses.len()));
    let mut lines = vec![format!("{:26} {:>5}  {:>19} {:>8}", "pattern", "heads", "dense mass it keeps", "at least")];
    let mut patterns = Vec::new();
    let mut all = 0.0;
    for (label, masses) in &counts {
        let sum: f64 = masses.iter().sum();
        let mean = sum / masses.len() as f64;
        let least = masses.iter().copied().fold(f64::INFINITY, f64::min);
        all += sum;
        lines.push(format!("{label:26} {:>5}  {:>17.2} % {:>6.2} %", masses.len(), 100.0 * mean, 100.0 * least));
        patterns.push(json!({"pattern": label, "heads": masses.len(), "recall": mean, "least_recall": least}));
    }
    let heads: usize = counts.iter().map(|(_, masses)| masses.len()).sum();
    let recall = all / heads.max(1) as f64;
    lines.push(format!(
        "all {heads} heads keep {:.2} % of the dense mass with {:.2} % of the pairs of this prompt",
        100.0 * recall,
        100.0 * found.density
    ));
    if found.density > 0.99 {
        lines.push(format!(
            "on {length} tokens these patterns keep everything, so the choice means little: search on a longer prompt \
             (--length)"
        ));
    }
    Report { lines, json: json!({"patterns": patterns, "recall": recall, "density": found.density}) }
}

/// For each layer, the density of its maps, and how many columns and distances continue beyond them.
fn dam_report(maps: &DamMaps, length: usize) -> Report {
    let mut lines = vec![format!(
        "{:5} {:>5}  {:>12} {:>22} {:>24}",
        "layer", "heads", "pairs on", "columns that go beyond", "distances that go beyond"
    )];
    let mut layers = Vec::new();
    let causal = (length * (length + 1) / 2) as f64;
    for (layer, heads) in maps.layers.iter().enumerate().filter(|(_, heads)| !heads.is_empty()) {
        let mean = |count: &dyn Fn(&DamMap) -> usize| {
            heads.iter().map(count).sum::<usize>() as f64 / heads.len().max(1) as f64
        };
        let density = mean(&|map| map.rows.iter().map(Vec::len).sum()) / causal;
        let [columns, offsets] = [mean(&|map| map.columns.len()), mean(&|map| map.offsets.len())];
        lines.push(format!(
            "{layer:5} {:>5}  {:>10.2} % {columns:>22.1} {offsets:>24.1}",
            heads.len(),
            100.0 * density
        ));
        layers.push(
            json!({"layer": layer, "heads": heads.len(), "density": density, "columns": columns, "offsets": offsets}),
        );
    }
    lines.push("means over the heads of a layer".to_owned());
    Report { lines, json: json!({"layers": layers}) }
}

/// Prints what was found, and the `flag` by which other commands read the written file.
fn print<B: DeviceBackend>(
    args: &PatternsArgs,
    loaded: &LoadedModel<B>,
    [count, length]: [usize; 2],
    report: Report,
    flag: &str,
) -> Result<()> {
    let json = json!({
        "method": args.method.name(),
        "data": args.data,
        "num_windows": count,
        "num_tokens": length,
        "found": report.json,
        "out": args.out.to_string_lossy().into_owned(),
        "flag": flag,
    });
    if args.result.report(loaded, COMMAND, json)? {
        return Ok(());
    }
    terminal::line(&format!(
        "{}, {}: {} of {length} tokens",
        output::heading(loaded),
        args.method.name(),
        terminal::counted(count as u64, "prompt"),
    ));
    terminal::lines(&report.lines);
    terminal::line(&format!("wrote {}; use it with {flag}", args.out.shown()));
    Ok(())
}
