//! `sieve eval selectors`: sparse methods side by side on one dense checkpoint.
mod compare;
mod heat_map;
mod plot;
mod table;

use super::{output, text};
use crate::device::{Device, DeviceChoice};
use crate::out_of_memory::MemoryArgs;
use crate::{loaded, selector, terminal};
use anyhow::{Context, Result, bail};
use burn::tensor::DType;
use burn_cuda::CudaDevice;
use burn_flex::{Flex, FlexDevice};
use clap::Args;
use sieve_core::ModelShape;
use sieve_eval::{Selection, measure_selectors, selector_masks, sweep_selectors};
use sieve_hf::LoadedModel;
use sieve_ops::{Cuda, SieveBackend};
use sieve_plan::InferenceSize;
use sieve_select::{ENTRIES, Phase, Selector};
use std::path::PathBuf;

/// Arguments of `sieve eval selectors`.
#[derive(Args, Debug)]
pub(crate) struct SelectorsArgs {
    /// A checkpoint (step-N) of a dense model, or a run folder: then its latest
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Text, JSONL or Parquet files, folders or globs; documents are read one after the other
    #[arg(long, required = true, num_args = 1.., value_name = "PATH")]
    data: Vec<String>,
    /// Tokens of the prompts
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N,…",
        default_value = "1024"
    )]
    lengths: Vec<usize>,
    /// Prompts of each length
    #[arg(long, default_value_t = 2, value_name = "N")]
    windows: usize,
    /// A method to measure, once for each; all prefill methods when absent
    #[arg(long, value_name = "NAME:…", value_parser = selector::parse)]
    selector: Vec<Selector>,
    #[arg(long, value_name = "N", conflicts_with = "maps", help = selector::ABOUT_CHUNK)]
    chunk: Option<usize>,
    /// Also measure a model with an attention of its own (swa, dma, nsa, …) on the same prompts, once for each; it must have the
    /// same tokenizer
    #[arg(long, value_name = "DIR")]
    compare: Vec<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Also write an SVG of density against recall over each method's setting, at the longest length
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Also write one PNG for each prefill method into this folder: its kept blocks by layer and head, at the longest length
    #[arg(long, value_name = "DIR")]
    maps: Option<PathBuf>,
    /// auto, cpu, cuda or cuda:N; the attention itself runs on the CPU
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    #[command(flatten)]
    memory: MemoryArgs,
}

/// Settings that trade density for recall, with the values of the picture.
const KNOBS: &[(&str, &str, &[&str])] = &[
    ("bfla", "keep_mass", &["0.5", "0.8", "0.9", "0.99", "0.999"]),
    ("momo", "k", &["2", "4", "8", "16", "32"]),
    ("ba_att", "sparsity", &["0.9", "0.75", "0.5", "0.25"]),
    ("pbs", "tau", &["0.5", "0.7", "0.9", "0.95", "0.99"]),
    ("xattention", "tau", &["0.5", "0.7", "0.9", "0.95", "0.99"]),
    (
        "vertical_slash",
        "slash",
        &["64", "128", "256", "512", "1024"],
    ),
    ("block_sparse", "topk", &["2", "4", "8", "16"]),
    ("a_shape", "n_local", &["64", "128", "256", "512", "1024"]),
    (
        "flexprefill",
        "gamma",
        &["0.5", "0.7", "0.9", "0.95", "0.99"],
    ),
    ("meanpool", "tau", &["0.5", "0.7", "0.9", "0.95", "0.99"]),
    (
        "streamingllm",
        "n_local",
        &["64", "128", "256", "512", "1024"],
    ),
    ("infinitehip", "budget", &["64", "128", "256", "512"]),
    ("oracle_topk", "k", &["4", "8", "16", "32", "64"]),
];

/// Runs the command.
pub(crate) fn run(args: SelectorsArgs) -> Result<()> {
    let device = loaded::device(args.device, &args.checkpoint)?;
    (args.memory).check_inference(&args.checkpoint, &device, |_, _| {
        let longest = args.lengths.iter().max().copied().unwrap_or(0);
        InferenceSize::rows_of(longest, longest)
    })?;
    match device {
        Device::Cpu => run_on::<Flex>(&args, &FlexDevice, DType::F32),
        Device::Cuda(gpu) => run_on::<Cuda>(&args, &CudaDevice::new(gpu.index), DType::BF16),
    }
}

fn run_on<B: SieveBackend>(args: &SelectorsArgs, device: &B::Device, dtype: DType) -> Result<()> {
    if args.lengths.iter().any(|&length| length < 2) || args.windows == 0 {
        bail!("--lengths and --windows must be positive\n  hint: prompts need at least 2 tokens");
    }
    output::check(args.plot.as_deref())?;
    let (loaded, tokenizer) = loaded::load::<B>(&args.checkpoint, device, dtype)?;
    let (selections, left_out) = selections(args, &loaded.shape)?;
    let longest = args.lengths.iter().max().copied().unwrap_or(0);
    let compared = compare::load::<B>(&args.compare, &tokenizer, longest, device, dtype)?;
    let tokens = text::tokens(&args.data, &tokenizer, longest, args.windows)?;
    let (mut measures, mut trained) = (Vec::new(), Vec::new());
    for &length in &args.lengths {
        let windows = text::windows(&tokens, length, args.windows);
        let bar = terminal::progress_bar(
            (selections.len() * windows.len()) as u64,
            "{bar:30} {pos}/{len} {msg}",
        );
        let mut observe = |name: &str| {
            bar.set_message(format!("{name}, {length} tokens"));
            bar.inc(1);
        };
        let found = measure_selectors(&loaded.model, &windows, &selections, device, &mut observe);
        bar.finish_and_clear();
        measures.extend(found?);
        trained.extend(compare::measure(&compared, &windows, device)?);
    }
    table::print(args, &loaded, &measures, &trained, &left_out)?;
    let selectors = selections
        .iter()
        .map(|selection| selection.selector().clone());
    let selectors: Vec<Selector> = selectors.collect();
    if let Some(path) = &args.plot {
        draw(args, &loaded, &tokens, &selectors, device, path)?;
    }
    match &args.maps {
        Some(dir) => draw_maps(args, &loaded, &tokens, &selectors, device, dir),
        None => Ok(()),
    }
}

/// The methods asked for; or all that this model's context has room for, and why others are left out.
fn selections(
    args: &SelectorsArgs,
    shape: &ModelShape,
) -> Result<(Vec<Selection>, Vec<anyhow::Error>)> {
    let of = |selector: &Selector| selector::selection(selector, args.chunk, shape);
    if !args.selector.is_empty() {
        let asked = args.selector.iter().map(of).collect::<Result<_>>()?;
        return Ok((asked, Vec::new()));
    }
    let (mut selections, mut left_out) = (Vec::new(), Vec::new());
    for selector in all_prefill(args.chunk)? {
        match of(&selector) {
            Ok(selection) => selections.push(selection),
            Err(error) => left_out.push(error),
        }
    }
    if selections.is_empty()
        && let Some(error) = left_out.pop()
    {
        return Err(error);
    }
    Ok((selections, left_out))
}

/// Every prefill method with its defaults, but dense layers at the start off, so that small models show something, and
/// calls as short as the chunks not dense.
fn all_prefill(chunk: Option<usize>) -> Result<Vec<Selector>> {
    let prefill = ENTRIES.iter().filter(|entry| entry.phase != Phase::Decode);
    prefill
        .map(|entry| {
            let mut selector = Selector::parse(entry.name)?;
            selector.common.first_dense_layers = 0;
            let shortest = &mut selector.common.min_prefill_tokens;
            *shortest = chunk.map_or(*shortest, |chunk| chunk.min(*shortest));
            Ok(selector)
        })
        .collect()
}

fn draw_maps<B: SieveBackend>(
    args: &SelectorsArgs,
    loaded: &LoadedModel<B>,
    tokens: &[u32],
    selectors: &[Selector],
    device: &B::Device,
    dir: &std::path::Path,
) -> Result<()> {
    let length = args.lengths.iter().max().copied().unwrap_or(0);
    let prefill = selectors.iter().filter(|s| s.phase() != Phase::Decode);
    let prefill: Vec<Selector> = prefill.cloned().collect();
    let masks = selector_masks(&loaded.model, &tokens[..=length], &prefill, device)?;
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    for (selector, masks) in prefill.iter().zip(&masks) {
        let path = dir.join(format!("{}.png", selector.name()));
        std::fs::write(&path, heat_map::png(masks))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    if !args.json {
        terminal::line(&format!(
            "wrote {} maps into {}",
            prefill.len(),
            dir.display()
        ));
    }
    Ok(())
}

fn draw<B: SieveBackend>(
    args: &SelectorsArgs,
    loaded: &LoadedModel<B>,
    tokens: &[u32],
    selectors: &[Selector],
    device: &B::Device,
    path: &std::path::Path,
) -> Result<()> {
    let length = args.lengths.iter().max().copied().unwrap_or(0);
    let mut curves = Vec::new();
    for (name, key, values) in KNOBS {
        // The settings the user gave stay; the knob is moved.
        let Some(selector) = selectors.iter().find(|selector| selector.name() == *name) else {
            continue;
        };
        let moved: Vec<Selection> = values
            .iter()
            .map(|value| {
                selector::selection(&selector.with(key, value)?, args.chunk, &loaded.shape)
            })
            .collect::<Result<_>>()?;
        let points = sweep_selectors(&loaded.model, &tokens[..=length], &moved, device)?;
        curves.push(plot::Curve {
            name: format!("{name} ({key})"),
            points,
        });
    }
    let title = format!(
        "{length} tokens, {}, step {}",
        loaded.path.display(),
        loaded.state.step
    );
    std::fs::write(path, plot::svg(&title, &curves))
        .with_context(|| format!("cannot write {}", path.display()))?;
    if !args.json {
        terminal::line(&format!("wrote {}", path.display()));
    }
    Ok(())
}
