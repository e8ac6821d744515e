//! Arguments of `sieve eval selectors`, and what one run of the command has at hand.
use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use sieve_hf::LoadedModel;
use sieve_host::evaluation::output;
use sieve_host::loaded::PlaceArgs;
use sieve_host::out_file::PictureFile;
use sieve_host::{selector, terminal};
use sieve_ops::DeviceBackend;
use sieve_select::LayerSelectors;
use std::path::PathBuf;

/// Name under which `--save` keeps the result.
pub(super) const COMMAND: &str = "selectors";

/// Arguments of `sieve eval selectors`.
#[derive(Args, Debug)]
pub struct SelectorsArgs {
    /// A checkpoint (step-N) of a dense model, or a run folder: then its latest; or hf://OWNER/NAME
    #[arg(long, value_name = "DIR")]
    pub(super) checkpoint: PathBuf,
    /// Text, JSONL or Parquet files, folders or globs; documents are read one after the other
    #[arg(long, required = true, num_args = 1.., value_name = "PATH")]
    pub(super) data: Vec<String>,
    /// Tokens of the prompts; when absent 1024, or the model's context where that is shorter
    #[arg(long, value_delimiter = ',', value_name = "N,…")]
    pub(super) lengths: Vec<usize>,
    /// Prompts of each length
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub(super) windows: usize,
    /// A method to measure, once for each; all prefill methods when absent
    #[arg(long, value_name = "NAME:…", value_parser = selector::parse)]
    pub(super) selector: Vec<LayerSelectors>,
    /// Also measure the settings of a TOML file, every combination of their values, or of a grid that comes with the
    /// program: all, ba_att, bfla_table5, momo_k, momo_probes, pbs
    #[arg(long, value_name = "FILE")]
    pub(super) grid: Option<PathBuf>,
    #[arg(long, value_name = "N", conflicts_with = "maps", help = selector::ABOUT_CHUNK)]
    pub(super) chunk: Option<usize>,
    /// Also measure a model with its own kind of attention (swa, dma, nsa, …) on the same prompts, once for each; it
    /// must have the same tokenizer
    #[arg(long, value_name = "DIR")]
    pub(super) compare: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) result: output::ResultArgs,
    /// Also write an SVG of density against recall, a line for each method and setting, at the longest length
    #[arg(long, value_name = "FILE")]
    pub(super) plot: Option<PictureFile>,
    /// Also write an SVG of the measured rows at the longest length: the loss they add against density, and against
    /// the prompt's time
    #[arg(long, value_name = "FILE")]
    pub(super) scores: Option<PictureFile>,
    /// Also write one SVG for each prefill method and setting into this folder: its kept blocks by layer and head, at
    /// the longest length
    #[arg(long, value_name = "DIR", value_parser = sieve_host::out_file::on_this_machine())]
    pub(super) maps: Option<PathBuf>,
    /// Also print, for each ba_att, how its block scores agree with attention on the first prompt of the longest
    /// length: correlations of its bound U with the error of the blocks' means, and of blocks' shares
    #[arg(long)]
    pub(super) agreement: bool,
    #[command(flatten)]
    pub(super) place: PlaceArgs,
}

impl SelectorsArgs {
    /// Whether pictures are to be written.
    pub(super) fn draws(&self) -> bool {
        self.plot.is_some() || self.scores.is_some() || self.maps.is_some()
    }
}

/// Model, prompts and flags of one run of the command.
pub(super) struct Run<'a, B: DeviceBackend> {
    pub(super) args: &'a SelectorsArgs,
    pub(super) loaded: &'a LoadedModel<B>,
    /// The first prompt of the longest length, and the token after it.
    pub(super) tokens: &'a [u32],
    pub(super) selectors: &'a [LayerSelectors],
    /// Each selector's name in the table and in file names.
    pub(super) labels: &'a [String],
    pub(super) device: &'a B::Device,
}

impl<B: DeviceBackend> Run<'_, B> {
    /// Prints a line, unless the command prints JSON.
    pub(super) fn say(&self, text: &str) {
        if !self.args.result.json {
            terminal::line(text);
        }
    }
}

/// Selectors and pictures that failed. The command still measures the others, and fails at its end.
#[derive(Debug, Default, Serialize)]
#[serde(transparent)]
pub(super) struct Failures(Vec<Failure>);

#[derive(Debug, Serialize)]
struct Failure {
    label: String,
    /// What was being done: the prompt's length, "map" or "curve".
    wanted: String,
    error: String,
}

impl Failures {
    /// Notes that `wanted`, a measure, failed for the selector `label`; the first line of the error is kept.
    pub(super) fn add(&mut self, label: &str, wanted: &str, error: &anyhow::Error) {
        let text = terminal::error_text(error);
        self.0.push(Failure {
            label: label.to_owned(),
            wanted: wanted.to_owned(),
            error: text.lines().next().unwrap_or_default().replacen("error: ", "", 1),
        });
    }

    /// Returns an error that lists the failures, if there are any.
    pub(super) fn end(&self, json: bool) -> Result<()> {
        let lines = self.0.iter().map(|failure| format!("{} ({}): {}", failure.label, failure.wanted, failure.error));
        let lines: Vec<String> = lines.collect();
        match lines.first() {
            None => Ok(()),
            Some(_) => bail!(
                "{}\n  hint: everything else is {}; leave this out, or change its settings",
                lines.join("\n  "),
                if json { "in the JSON object" } else { "above" }
            ),
        }
    }
}
