//! Arguments of `sieve kernels`.
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use sieve_bench::{BenchHeads, BenchRows, CaseBlocks, CaseShape, CheckPart, NsaForm, Op, Scores};
use sieve_core::model::NsaCompression;
use sieve_host::device::DeviceChoice;
use sieve_host::out_file::OutFile;
use sieve_host::selector;
use sieve_select::{Phase, Selector};
use std::path::PathBuf;

/// Subcommands of `sieve kernels` that check, time and record the kernels.
#[derive(Subcommand)]
pub enum KernelsCommand {
    /// Compare every kernel, and small models of every kind, on this device with references on the host
    #[command(after_help = "Example: sieve kernels check --cases 50")]
    Check(CheckArgs),
    /// Time the kernels on this GPU, after a short check of their results
    #[command(after_help = "Example: sieve kernels bench --dma --lengths 8192,32768")]
    Bench(BenchArgs),
    /// Write the inputs of a trained model's attention for a text: DMA's scores, or q, k and v of a dense model
    #[command(after_help = "Example: sieve kernels capture --checkpoint out/quickstart --out captured.safetensors")]
    Capture(CaptureArgs),
    /// Write one op's inputs, outputs and gradients, for other programs to check
    #[command(after_help = "Example: sieve kernels run swa --window 64 --out swa.safetensors \
                      --shape batch=2,seq_len=300,heads=4,kv_heads=2,head_dim=64")]
    Run(Box<RunArgs>),
}

/// Arguments of `sieve kernels check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Random calls of attention's kernels on a GPU, and a fifth as many of other kernels; the CPU checks only models
    #[arg(long, default_value_t = 200)]
    pub(super) cases: usize,
    /// Longest usual sequence; some of DMA's are longer than 1024 in any case, some of NSA's where it is over 200
    #[arg(long, default_value_t = 700)]
    pub(super) longest: usize,
    /// Reach every family with few calls of short rows, for the first look at a GPU: some two minutes on
    /// an H200
    #[arg(long, conflicts_with_all = ["cases", "longest"])]
    pub(super) short: bool,
    /// Seed of the random shapes and inputs of calls
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// Factor on the queries and keys of all calls; small, usual and large ones in turn when absent
    #[arg(long, value_name = "FACTOR", value_parser = magnitude)]
    pub(super) magnitude: Option<f32>,
    /// Check only the portable kernels, even if the device has its own family
    #[arg(long)]
    pub(super) portable: bool,
    /// Check only dense, windowed and dynamic mask attention, in every family of this GPU
    #[arg(long, group = "part")]
    pub(super) attention: bool,
    /// Check only attention over a window, first keys and bands, in every family of this GPU
    #[arg(long, group = "part")]
    pub(super) bands: bool,
    /// Check only attention under selectors' masks, in every family of this GPU
    #[arg(long, group = "part")]
    pub(super) sparse: bool,
    /// Check only native sparse attention, in every family of this GPU
    #[arg(long, group = "part")]
    pub(super) nsa: bool,
    /// Check only latent attention, in every family of this GPU
    #[arg(long, group = "part")]
    pub(super) mla: bool,
    /// Check only attention with sinks: their kernels, decoding, and models with sinks
    #[arg(long, group = "part")]
    pub(super) sinks: bool,
    /// Check only the order of keys of dynamic mask attention: in whole rows, behind a cache and in decoding steps
    #[arg(long, group = "part")]
    pub(super) key_order: bool,
    /// Check only that decoding steps over chosen blocks have the choice and the bits of whole rows
    #[arg(long, group = "part")]
    pub(super) block_order: bool,
    /// Let each lane of Hopper's backward kernels arrive at barriers, not one a warp, for compute-sanitizer's racecheck
    #[arg(long, hide = true)]
    pub(super) every_lane_arrives: bool,
    /// Leave out cuBLAS's GEMMs on a GPU, and models, which run them: compute-sanitizer's initcheck does not follow
    /// what they write by TMA, and its racecheck takes more memory for them than the host has
    #[arg(long, hide = true)]
    pub(super) without_gemms: bool,
    /// Also write the rows as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<OutFile>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub(super) device: DeviceChoice,
}

/// Calls, and tokens of the longest row, of a short check.
const SHORT: (usize, usize) = (5, 150);

impl CheckArgs {
    /// The number of random calls, and the tokens of the longest row.
    pub(super) fn extent(&self) -> (usize, usize) {
        if self.short { SHORT } else { (self.cases, self.longest) }
    }

    /// The part of the check that the flags choose.
    pub(super) fn part(&self) -> CheckPart {
        let parts = [
            (self.attention, CheckPart::Attention),
            (self.bands, CheckPart::Bands),
            (self.sparse, CheckPart::Sparse),
            (self.nsa, CheckPart::Nsa),
            (self.mla, CheckPart::Mla),
            (self.sinks, CheckPart::Sinks),
            (self.key_order, CheckPart::KeyOrder),
            (self.block_order, CheckPart::BlockOrder),
        ];
        let asked = parts.into_iter().find_map(|(is_asked, part)| is_asked.then_some(part));
        asked.unwrap_or(CheckPart::All)
    }
}

/// Flags of benchmarks whose sizes cannot be chosen.
const NO_SIZES: [&str; 5] = ["table2", "scaling", "step", "sparse", "decode"];

/// Arguments of `sieve kernels bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(flatten)]
    rows: BenchRowsArgs,
    /// DMA's scores: independent, rising, falling, tied, few-values, signed-zeros, narrow, steps, drifting or
    /// captured:FILE (`sieve kernels capture` of a DMA model); may be repeated (independent, rising and tied when
    /// absent)
    #[arg(long)]
    pub(super) scores: Vec<Scores>,
    /// Time the portable kernels, even if the device has its own family
    #[arg(long)]
    pub(super) portable: bool,
    /// Also time selectors on q, k and v of this file (`sieve kernels capture` of a dense model), and fit the generated
    /// operands to them
    #[arg(long, value_name = "FILE", requires = "selectors", conflicts_with = "scores")]
    pub(super) operands: Option<PathBuf>,
    /// A prefill method to time instead of the usual ones, NAME:key=value,…; may be repeated
    #[arg(long, value_name = "NAME:…", requires = "selectors", value_parser = prefill)]
    pub(super) selector: Vec<Selector>,
    /// Tokens of each row: of the usual rows, which are then dense attention, a window and DMA, of --dma, --nsa and
    /// --mla; with --selectors of the generated operands, rounded up to multiples of 1024
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = positive, conflicts_with_all = NO_SIZES)]
    pub(super) lengths: Vec<usize>,
    /// Query and KV heads of those rows, for example 32/4,64/4; latent attention takes the first number
    #[arg(long, value_name = "Q/KV,…", value_delimiter = ',', conflicts_with_all = NO_SIZES)]
    #[arg(conflicts_with = "selectors")]
    pub(super) heads: Vec<BenchHeads>,
    /// Width of those rows' heads (latent attention's is 192 and 128)
    #[arg(long, value_name = "N", value_parser = positive, conflicts_with_all = NO_SIZES)]
    #[arg(conflicts_with_all = ["selectors", "mla"])]
    pub(super) width: Option<usize>,
    /// Also time backward passes of dense attention, windows and DMA with about so many blocks of threads for each tile
    /// of keys, where calls choose the number by themselves
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = positive)]
    pub(super) blocks_per_tile: Vec<usize>,
    /// Timed repetitions of a row
    #[arg(long, default_value_t = 30)]
    pub(super) repetitions: usize,
    /// Also write the rows as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<OutFile>,
    /// auto, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub(super) device: DeviceChoice,
}

/// Which rows are timed instead of the usual ones.
#[derive(Args, Debug)]
#[group(multiple = false)]
struct BenchRowsArgs {
    /// The shapes of Table 2 of arXiv:2508.02124 instead of the usual ones
    #[arg(long)]
    table2: bool,
    /// How time and memory grow: dense, window, DMA, NSA and MLA from 512 to 131072 tokens, DMA from 256 to 4096 kept
    /// keys
    #[arg(long, conflicts_with = "scores")]
    scaling: bool,
    /// The kernels around attention, at the sizes of a training step, instead of attention
    #[arg(long, conflicts_with = "scores")]
    step: bool,
    /// Attention under random masks of tiles, compared with dense attention
    #[arg(long, conflicts_with = "scores")]
    sparse: bool,
    /// Whole selectors, selection included, compared with dense attention
    #[arg(long, conflicts_with = "scores")]
    selectors: bool,
    /// One new token after 131072 cached ones: dense, DMA, and each selector that decodes on the GPU
    #[arg(long, conflicts_with = "scores")]
    decode: bool,
    /// Native sparse attention, compared with dense attention
    #[arg(long, conflicts_with = "scores")]
    nsa: bool,
    /// Only DMA: as published, and with the recipes' slope and local window
    #[arg(long)]
    dma: bool,
    /// A window, first keys and bands, compared with dense attention
    #[arg(long, conflicts_with = "scores")]
    bands: bool,
    /// Latent attention, its tensors and its decoding
    #[arg(long, conflicts_with = "scores")]
    mla: bool,
}

impl BenchArgs {
    /// Which kernels the flags say to time.
    pub(super) fn rows(&self) -> BenchRows {
        let of = &self.rows;
        let rows = [
            (of.table2, BenchRows::Table2),
            (of.scaling, BenchRows::Scaling),
            (of.step, BenchRows::Step),
            (of.sparse, BenchRows::Sparse),
            (of.selectors, BenchRows::Selectors),
            (of.decode, BenchRows::Decode),
            (of.nsa, BenchRows::Nsa),
            (of.dma, BenchRows::Dma),
            (of.bands, BenchRows::Bands),
            (of.mla, BenchRows::Latent),
        ];
        let asked = rows.into_iter().find(|(is_asked, _)| *is_asked);
        asked.map_or(BenchRows::Standard, |(_, rows)| rows)
    }
}

/// Arguments of `sieve kernels capture`.
#[derive(Args, Debug)]
pub struct CaptureArgs {
    /// A checkpoint (step-N) of a DMA or dense model, or a run folder: then its latest; or hf://OWNER/NAME
    #[arg(long, value_name = "DIR")]
    pub(super) checkpoint: PathBuf,
    /// The text to read; the kernels' own sources when absent
    #[arg(long, value_name = "FILE")]
    pub(super) text: Option<PathBuf>,
    /// The safetensors file to write: "z", f32 [layers * kv_heads, tokens]; of a dense model "q", "k" and "v", f32
    /// [tokens, heads, head_dim] of some layers
    #[arg(long, value_name = "FILE")]
    pub(super) out: OutFile,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub(super) device: DeviceChoice,
}

/// Arguments of `sieve kernels run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// What to compute
    #[arg(value_name = "OP", value_parser = ops())]
    pub(super) op: Op,
    /// Sizes, for example batch=2,seq_len=300,heads=4,kv_heads=2,head_dim=64
    #[arg(long, value_name = "SIZES")]
    pub(super) shape: CaseShape,
    /// Keys a query sees (swa, decode; nsa's window) or keeps (dma, dma_select, dma_decode)
    #[arg(long, value_name = "KEYS")]
    pub(super) window: Option<usize>,
    /// How many of the keys that DMA keeps are the last ones, kept whatever their rank
    #[arg(long, value_name = "KEYS", default_value_t = 0)]
    pub(super) local_window: usize,
    /// Period of each KV head's slope, in tokens, separated by commas: later keys rank higher, and the rank itself is
    /// the bias (dma, dma_select)
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    pub(super) periods: Vec<f64>,
    /// Documents a row is cut into, at random places
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub(super) documents: usize,
    /// DMA's scores: independent, rising, falling, tied, few-values, signed-zeros, narrow, steps, drifting or
    /// captured:FILE
    #[arg(long)]
    pub(super) scores: Option<Scores>,
    /// Seed of all inputs
    #[arg(long, default_value_t = 0)]
    pub(super) seed: u64,
    /// Factor on queries and keys
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = magnitude)]
    pub(super) magnitude: f32,
    /// Sum in a fixed order, as training.deterministic does
    #[arg(long)]
    pub(super) deterministic: bool,
    /// What chooses the keys of block_sparse, NAME:key=value,…
    #[arg(long, value_name = "NAME:…", value_parser = selector::parse_one)]
    pub(super) selector: Option<Selector>,
    /// Parts that the rows of dma and swa are cut into, one for each rank of context parallelism (threads here): the
    /// file has each part's halo, output and gradients
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub(super) parts: usize,
    /// Blocks of nsa, in tokens: compressed block, stride, selected block, then the number that a query selects;
    /// 32,16,64,16 when absent
    #[arg(long, value_name = "L,S,L',K")]
    pub(super) blocks: Option<CaseBlocks>,
    /// How nsa makes one key, and one value, of a block
    #[arg(long, value_name = "POOL", value_parser = ["mean", "mlp"])]
    pub(super) pool: Option<String>,
    /// The safetensors file to write
    #[arg(long, value_name = "FILE")]
    pub(super) out: OutFile,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub(super) device: DeviceChoice,
}

impl RunArgs {
    /// The form of native sparse attention; `None` without `--blocks` and `--pool`.
    pub(super) fn nsa(&self) -> Option<NsaForm> {
        let usual = NsaForm::default();
        (self.blocks.is_some() || self.pool.is_some()).then(|| NsaForm {
            blocks: self.blocks.map_or(usual.blocks, |CaseBlocks(blocks)| blocks),
            pool: match self.pool.as_deref() {
                Some("mlp") => NsaCompression::Mlp,
                _ => NsaCompression::Mean,
            },
        })
    }
}

/// Parses an integer above 0.
fn positive(text: &str) -> Result<usize, String> {
    let number = text.trim().parse().ok().filter(|&number| number > 0);
    number.ok_or_else(|| "a whole number above 0 is needed".to_owned())
}

/// Parses a selector that acts on prompts.
fn prefill(text: &str) -> Result<Selector, String> {
    let selector = selector::parse_one(text)?;
    match selector.phase() {
        Phase::Decode => {
            Err(format!("{} acts while decoding\n  hint: kernels bench --decode times those methods", selector.name()))
        }
        _ => Ok(selector),
    }
}

/// Parses a factor on queries and keys. Its range keeps their dot products within f32.
fn magnitude(text: &str) -> Result<f32, String> {
    let factor = text.parse::<f32>().ok().filter(|x| (1e-6..=1e6).contains(x));
    factor.ok_or_else(|| "a number from 1e-6 to 1e6 is needed".to_owned())
}

/// A parser of the ops' names, whose help has a line about each.
fn ops() -> impl TypedValueParser<Value = Op> {
    let named = Op::ALL.map(|(_, name, about)| PossibleValue::new(name).help(about));
    PossibleValuesParser::new(named).map(|given| {
        let found = Op::ALL.into_iter().find(|(_, name, _)| *name == given);
        found.expect("clap takes the names above alone").0
    })
}
