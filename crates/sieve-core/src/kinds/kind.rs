//! What a kind of attention is: the trait of the files beside this one, and what its methods return.

use serde_json::Value;

use super::op::AttentionOp;
use super::param::ParamSpec;
use super::sizes::{Activations, BackwardCall, Exchanged, Halo, HeadWidths, KeptCall, KeyReads, LatentSizes};
use crate::model::{BranchDensity, ModelShape};
use crate::{BlockChoice, NsaBlocks};

/// Multiply-adds of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerFlops {
    /// Weights that a token is multiplied with.
    pub weights: f64,
    /// Multiply-adds of `Q K^T` and `P V` for a pair of a query and a key, over all heads.
    pub per_pair: f64,
    /// Multiply-adds of an indexer's scores for a key of the document up to the query; 0 without an indexer.
    pub per_scored_key: f64,
}

/// A key of an export's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigKey<'a> {
    /// Name of the key.
    pub name: &'a str,
    /// Whether an export that lacks the key is refused; else a recipe's default holds.
    pub is_needed: bool,
}

impl<'a> ConfigKey<'a> {
    /// The key of this name, which an export may lack.
    pub fn named(name: &'a str) -> Self {
        Self { name, is_needed: false }
    }
}

/// What a kind of attention is.
pub trait Kind: std::fmt::Debug {
    /// The parameters of a layer's attention, in the order of the forward pass.
    fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec>;

    /// (Query, key) pairs of one query head in a document of `seq_len` tokens; see
    /// [`mean_active_keys`](crate::model::mean_active_keys).
    fn pairs(&self, seq_len: usize) -> f64;

    /// The densities of the branches in a row of `seq_len` tokens, at least 1: one, or NSA's. See
    /// [`Attention::densities`](super::Attention::densities).
    fn densities(&self, seq_len: usize) -> Vec<BranchDensity> {
        vec![BranchDensity::of_keys(None, self.pairs(seq_len), seq_len)]
    }

    /// The window that a stage of a run may change, in tokens; `None` for kinds without one.
    fn window(&self) -> Option<usize> {
        None
    }

    /// Sets the window, for kinds with one.
    fn set_window(&mut self, _window: usize) {}

    /// Takes heads of another width, of which the recipe's default follows; nothing where no size of the kind does.
    fn set_head_width(&mut self, _head_dim: usize) {}

    /// Number of latest keys that every query sees whatever their scores, where a window holds others too.
    fn local_window(&self) -> usize {
        0
    }

    /// Whether queries read all keys while an indexer learns to choose; `None` for kinds without one.
    fn index_warmup(&self) -> Option<bool> {
        None
    }

    /// Sets [`index_warmup`](Self::index_warmup), for kinds with an indexer.
    fn set_index_warmup(&mut self, _warms_up: bool) {}

    /// Whether keys and values are made from a latent, one for each query head. A model cannot mix such layers with
    /// layers of other kinds.
    fn is_latent(&self) -> bool {
        false
    }

    /// What the kernels of latent attention depend on, in layers of this head width; `None` where keys and values are
    /// not made from a latent.
    fn latent(&self, _head_dim: usize) -> Option<LatentSizes> {
        None
    }

    /// How much the rank of each KV head's keys grows per token of their position; `None` where keys have no ranks, or
    /// ranks no recency.
    fn rank_slopes(&self, _num_kv_heads: usize) -> Option<Vec<f64>> {
        None
    }

    /// Whether this is dense causal attention with grouped queries, on which selectors act at inference.
    fn is_dense(&self) -> bool {
        false
    }

    /// Whether the kind is meant to hide keys from queries. While an indexer warms up, none is hidden on purpose.
    fn hides_keys(&self) -> bool {
        true
    }

    /// The recipe's keys that say how many tokens a query reads whatever their scores, in words; `None` for a kind that
    /// reads all.
    fn reads_words(&self) -> Option<String>;

    /// The settings of the kind that its [label](Self::label) does not say.
    fn form_words(&self, _layer: &ModelShape) -> Vec<String> {
        Vec::new()
    }

    /// Weights that a token meets, and multiply-adds per pair.
    fn flops(&self, layer: &ModelShape) -> LayerFlops;

    /// The sizes in a few words; `None` for dense attention.
    fn label(&self) -> Option<String>;

    /// Whether a layer has exactly a dense layer's parameters and reads them alike, so that any dense model can begin a
    /// run of this kind.
    fn has_dense_parameters(&self) -> bool {
        false
    }

    /// Whether queries choose keys or blocks by content in layers whose attention weights show what was chosen.
    fn chooses(&self) -> bool {
        self.chooses_blocks()
    }

    /// Whether queries choose blocks in a step of its own, so that layers can share a choice and `training.dense_steps`
    /// can read all keys instead.
    fn chooses_blocks(&self) -> bool {
        false
    }

    /// Why layers cannot share a choice, for kinds that choose no blocks in a step of its own.
    fn no_shared_choice(&self) -> &'static str {
        "do not choose blocks that could be shared"
    }

    /// What a query computes over blocks, to count it from the chosen ones; `None` for kinds without blocks.
    fn block_pairs(&self) -> Option<BlockPairs> {
        None
    }

    /// Whether blocks are scored by an indexer, which has parameters and a loss of its own.
    fn has_indexer(&self) -> bool {
        false
    }

    /// Whether the kind has an indexer that scores a block by one pooled key.
    fn has_pooled_indexer(&self) -> bool {
        false
    }

    /// The most keys of a head that a query reads and a cache holds; `None` if both grow with the text.
    fn num_kept(&self) -> Option<usize> {
        None
    }

    /// Whether training computes the norm, the projections, attention and the residual addition of a layer as one op.
    fn is_one_op(&self) -> bool {
        false
    }

    /// Whether the softmax of a layer can have a learned logit of each query head, `model.attention_sinks`.
    fn takes_sinks(&self) -> bool {
        false
    }

    /// How queries choose blocks; `None` for kinds that only read them beside other keys, and for kinds without blocks.
    fn block_choice(&self) -> Option<BlockChoice> {
        None
    }

    /// The chosen blocks as attention's kernels read them; `None` for kinds without blocks.
    fn attended_blocks(&self) -> Option<NsaBlocks> {
        None
    }

    /// Width of the part of queries and keys that is rotated and that values do not have; 0 for most kinds.
    fn rope_width(&self) -> usize {
        0
    }

    /// How kernels find the keys that a query reads, one for each launch of attention.
    fn reads(&self) -> &'static [KeyReads];

    /// The ops of a layer that are not the model's common ones, in the order of the forward pass.
    fn ops(&self, layer: &ModelShape) -> &'static [AttentionOp];

    /// KV heads that attention is launched with, in a layer of `[num_heads, num_kv_heads]`: one for each choice of
    /// blocks.
    fn attended_kv_heads(&self, heads: [usize; 2]) -> usize {
        heads[1]
    }

    /// Why no CUDA kernel takes the kind's blocks for heads of `head_dim` and `group_size` query heads a KV head: the
    /// size that does not fit, and the sizes that kernels take. `None` if kernels take them, or without blocks.
    fn block_gap(&self, _head_dim: usize, _group_size: usize) -> Option<(String, &'static str)> {
        None
    }

    /// Why the attention has no kernel on any GPU, so that its reference would run; `None` if there is a kernel.
    fn gpu_gap(&self, layer: &ModelShape, widths: HeadWidths) -> Option<String> {
        widths.gap(layer.head_dim)
    }

    /// Share of the peak FLOP/s that attention's kernels reach over the pairs that they compute, in rows of `seq_len`
    /// tokens, measured on an H200 (lab/docs/benchmarks.md). Traffic around attention is counted apart.
    fn pairs_rate(&self, seq_len: usize) -> f64;

    /// Values per token that a layer reads and writes, forward and backward, beyond a dense layer's.
    fn extra_traffic(&self, _layer: &ModelShape) -> f64 {
        0.0
    }

    /// Whether training may be faster than with dense attention in long rows only; a plan then says from which length
    /// on.
    fn pays_late(&self) -> bool {
        false
    }

    /// By how much the estimated speeds of processes that share rows exceeded the measured ones on two H200s, with rows
    /// of 65,536 and 131,072 tokens (lab/docs/scale.md); `None` if by at most 6 %.
    fn shared_rows_too_fast(&self) -> Option<&'static str> {
        None
    }

    /// What a layer keeps for its backward pass, per token.
    fn activations(&self, call: &KeptCall<'_>) -> Activations;

    /// Width of the packed q, k and v.
    fn packed_width(&self, layer: &ModelShape) -> u64 {
        (layer.q_width() + 2 * layer.kv_width()) as u64
    }

    /// Bytes of f32 sums and other buffers of attention's backward pass on a GPU.
    fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64;

    /// The KV cache of one layer: bytes that one more token adds while it grows, and bytes at `seq_len` tokens.
    fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2];

    /// Size of a window if the cache of a single text holds only its keys; a cache of several texts holds all tokens.
    fn cached_window(&self) -> Option<usize> {
        None
    }

    /// The earlier keys that a query may see, if context parallelism computes attention over a process's own tokens
    /// with these keys before them; `None` if a query may see all keys, so that processes exchange heads instead.
    fn halo(&self) -> Option<Halo> {
        None
    }

    /// What processes that share a row exchange for one layer when they exchange heads.
    fn exchanged(&self, layer: &ModelShape) -> Exchanged {
        Exchanged::packed(layer)
    }

    /// The sizes of the kind as keys of `config.json`, for the exported `modeling_sieve.py`.
    fn config_keys(&self, layer: &ModelShape) -> Value;

    /// Where an export's `config.json` has a recipe's key of `[attention]`.
    fn config_key<'a>(&self, key: &'a str) -> ConfigKey<'a> {
        ConfigKey::named(key)
    }

    /// The kind's name in `layer_types` of the `transformers` classes of grouped-query attention; `None` for kinds that
    /// no such class has.
    fn stock_layer_type(&self) -> Option<&'static str> {
        None
    }

    /// The class of `transformers` that computes a model of this kind in its layers, and its keys of `config.json`.
    ///
    /// # Errors
    /// `None` without such a class; else why the kind's class does not compute this model.
    fn stock(&self, _model: &ModelShape) -> Result<Stock, Option<&'static str>> {
        Err(None)
    }
}

/// What a query computes over blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPairs {
    /// The chosen blocks as attention reads them.
    pub chosen: NsaBlocks,
    /// The pooled blocks that are scored.
    pub pooled: NsaBlocks,
    /// Keys of a window beside the blocks; 0 without one.
    pub window_size: usize,
    /// How much a pooled key counts, in halves of a (query, key) pair: 2 with a value, 1 with a score alone, 0 where an
    /// indexer has its own scores, which are counted apart.
    pub halves_of_pooled: u32,
}

/// A class of `transformers` for a kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Stock {
    /// The class, or family of classes.
    pub class: StockClass,
    /// Its keys of `config.json` that describe the attention.
    pub keys: Value,
}

/// Classes of `transformers`, by what their attention computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StockClass {
    /// Qwen3, Llama, Mistral or Qwen2: grouped-query attention, with a window where `windowed`.
    Grouped {
        /// Whether layers have a window.
        windowed: bool,
    },
    /// `DogeForCausalLM`.
    Doge,
    /// `DeepseekV3ForCausalLM`.
    DeepseekV3,
}

/// The name of a dense layer in `layer_types` of `transformers`.
pub const FULL_ATTENTION: &str = "full_attention";

/// The name of a layer with a sliding window in `layer_types` of `transformers`.
pub const SLIDING_ATTENTION: &str = "sliding_attention";
