//! What plans and kinds tell each other: sizes of kernels' buffers, activations, exchanges between processes.

use crate::KeepOLow;
use crate::keys::choices;
use crate::model::ModelShape;

/// Bytes of an f32, and of an i32.
pub(super) const F32: u64 = 4;
/// More bytes than any machine has. Products saturate here, so that their sums fit into a u64.
const MOST_BYTES: u64 = 1 << 58;

/// The product `count * bytes`, at most 2^58, so that sums of products fit into a u64.
pub fn times(count: u64, bytes: u64) -> u64 {
    count.saturating_mul(bytes).min(MOST_BYTES)
}

choices! {
    /// How a DMA key's score z enters the logit.
    #[derive(Hash)]
    pub enum DmaBias {
        /// `q.k / sqrt(head_dim) + exp(min(z, 60))`
        Exp = "exp",
        /// `q.k / sqrt(head_dim) + z`
        Linear = "linear",
    }
}

choices! {
    /// How MSA's indexer scores a block.
    #[derive(Hash)]
    pub enum IndexScores {
        /// By the largest score of its tokens, for each KV head apart, as published.
        Msa = "msa",
        /// As QSA (Qwen3.8-Flash-Next): by the mean of its keys, for all KV heads together. Blocks of up to 64 tokens.
        Qsa = "qsa",
    }
}

/// How attention's kernels find the keys of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyReads {
    /// The keys before it, all or a window's.
    Neighbours,
    /// A window's keys, its document's first ones, and a band of distances for each KV head.
    Bands,
    /// Keys gathered by list, whose score enters the logit by this bias.
    Listed(DmaBias),
    /// The keys of chosen blocks.
    Blocks,
}

/// What the kernels of latent attention depend on beside the width of a head.
#[derive(Clone, Copy, Debug)]
pub struct LatentSizes {
    /// Columns of the latent that keys and values are made from.
    pub rank: usize,
    /// Columns of a key that are rotated.
    pub rope_width: usize,
    /// Whether queries and keys have norms.
    pub has_norm: bool,
}

/// Widths of heads that the attention kernels take.
#[derive(Clone, Copy, Debug)]
pub struct HeadWidths {
    /// A width is a multiple of this.
    pub step: usize,
    /// The largest width.
    pub most: usize,
}

impl HeadWidths {
    /// Whether kernels take heads of this width.
    pub fn takes(self, width: usize) -> bool {
        (1..=self.most).contains(&width) && width.is_multiple_of(self.step)
    }

    /// Why kernels do not take heads of this width; `None` if they do.
    pub(super) fn gap(self, width: usize) -> Option<String> {
        let Self { step, most } = self;
        (!self.takes(width)).then(|| format!("heads of {width} are not a multiple of {step} up to {most}"))
    }
}

/// Sizes of GPU buffers that follow from the kernels' tilings, which sieve-core does not know.
pub trait KernelSizes {
    /// Bytes per token of a layer's key lists, if a query keeps `kept` keys in rows of `seq_len` tokens.
    fn key_list_bytes(&self, layer: &ModelShape, seq_len: usize, kept: usize) -> u64;
    /// Whether the forward pass over gathered keys stores the 16 bits of each output that bf16 lacks.
    fn keeps_o_low(&self, layer: &ModelShape, seq_len: usize, o_low: KeepOLow) -> bool;
    /// Bytes of the partial dk and dv where thread blocks share a tile of keys. `rows` is the number of rows and the
    /// tokens of each; a query sees `window` keys. Queries and keys are `rope_width` wider than values.
    fn key_part_bytes(&self, layer: &ModelShape, rope_width: usize, rows: [usize; 2], window: usize) -> u64;
    /// Bytes of the partial dk and dv of the first `sink_tokens` keys of documents, which all later queries see. `rows`
    /// as in [`key_part_bytes`](Self::key_part_bytes).
    fn sink_sum_bytes(&self, layer: &ModelShape, rows: [usize; 2], sink_tokens: usize) -> u64;
    /// Number of queries of a row whose f32 sums of dq are in memory at a time, in a pass over gathered keys.
    fn dq_sum_queries(&self, seq_len: usize) -> u64;
    /// Bytes of the partial dq, one for each block that a query chose, that exist at a time.
    fn choice_part_bytes(&self) -> u64;
    /// Queries that share a list of keys.
    fn queries_of_list(&self) -> u64;
}

/// A forward pass whose activations are kept.
#[derive(Clone, Copy)]
pub struct KeptCall<'a> {
    /// The layer.
    pub layer: &'a ModelShape,
    /// Tokens of a row, as attention sees it.
    pub seq_len: usize,
    /// When the lower bits of outputs are kept.
    pub o_low: KeepOLow,
    /// The kernels' sizes; `None` on a CPU.
    pub sizes: Option<&'a dyn KernelSizes>,
    /// Whether lists of the queries that chose each block are kept: on a GPU with kernels for the choice.
    pub keeps_choice_lists: bool,
}

/// What a layer's attention keeps for its backward pass, per token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activations {
    /// Values in the type of activations.
    pub values: u64,
    /// Bytes of what is f32 or i32 whatever that type: log-sum-exp, scores, lists, choices.
    pub bytes: u64,
}

/// A backward pass of attention on a GPU.
#[derive(Clone, Copy)]
pub struct BackwardCall<'a> {
    /// The layer.
    pub layer: &'a ModelShape,
    /// Rows of the call.
    pub num_rows: usize,
    /// Tokens of a row, as attention sees it.
    pub seq_len: usize,
    /// Bytes of an activation.
    pub value_bytes: u64,
    /// The kernels' sizes.
    pub sizes: &'a dyn KernelSizes,
}

impl BackwardCall<'_> {
    /// Tokens of the call.
    pub fn tokens(&self) -> u64 {
        (self.num_rows * self.seq_len) as u64
    }

    /// Bytes of two f32 numbers for each query and head: log-sum-exp and `sum(o do)`.
    pub(super) fn row_stats(&self) -> u64 {
        times(self.tokens(), 2 * F32 * self.layer.num_heads as u64)
    }

    /// Bytes for a pass over the last `window` keys: f32 sums of dq, and partial dk and dv. Queries and keys are
    /// `rope_width` wider than values.
    pub(super) fn of_neighbours(&self, rope_width: usize, window: usize) -> u64 {
        let rows = [self.num_rows, self.seq_len];
        self.of_queries(rope_width) + self.sizes.key_part_bytes(self.layer, rope_width, rows, window)
    }

    /// Bytes for a pass over a window and keys beyond it: f32 sums of dq, and partial dk and dv of first keys.
    pub(super) fn of_bands(&self, sink_tokens: usize) -> u64 {
        let rows = [self.num_rows, self.seq_len];
        self.of_queries(0) + self.sizes.sink_sum_bytes(self.layer, rows, sink_tokens)
    }

    /// Bytes of the statistics of queries and of the f32 sums of dq, `rope_width` wider than values.
    fn of_queries(&self, rope_width: usize) -> u64 {
        let queries = (self.layer.q_width() + self.layer.num_heads * rope_width) as u64;
        self.row_stats() + times(self.tokens(), F32 * queries)
    }

    /// Bytes of a partial dq for each block that a query chose, and of lists of these choices, for as many queries as
    /// the kernels take at a time, at least one in each row of the batch.
    pub(super) fn choice_parts(&self, num_blocks: usize, num_choices: u64) -> u64 {
        let q = self.layer.q_width() as u64;
        let a_query = num_blocks as u64 * self.value_bytes * q + 2 * F32 * num_choices;
        times(self.tokens(), a_query).min(self.sizes.choice_part_bytes().max(self.num_rows as u64 * a_query))
    }
}

/// The keys before a process's own part of a row that its queries may see, under context parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Halo {
    /// Number of earlier keys.
    pub reach: usize,
    /// Whether every earlier process sends keys, since kept keys may lie anywhere; else only processes within the reach
    /// send keys.
    pub from_all: bool,
}

/// Values per token that the processes (ranks) that share a row exchange before a layer's attention, so that each has
/// the whole row for some of the heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchanged {
    /// Values that are divided among the processes by heads.
    pub split: u64,
    /// Values that go to every process.
    pub shared: u64,
    /// Values of attention's output, for the whole row of a process's heads, that are kept in addition to the
    /// activations of its own tokens.
    pub kept_outputs: u64,
    /// Values of `shared` that the activations of a process's own tokens count already.
    pub kept_shared: u64,
    /// Values of `split` that are exchanged again in the backward pass: of a layer that is one op, which recomputes
    /// them.
    pub again: u64,
}

impl Exchanged {
    /// Packed q, k and v of grouped heads.
    pub(super) fn packed(layer: &ModelShape) -> Self {
        let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
        Self { split: q + 2 * kv, shared: 0, kept_outputs: q, kept_shared: 0, again: 0 }
    }

    /// As [`packed`](Self::packed), for a layer that is one op.
    pub(super) fn of_one_op(layer: &ModelShape) -> Self {
        let packed = Self::packed(layer);
        Self { again: packed.split, ..packed }
    }
}
