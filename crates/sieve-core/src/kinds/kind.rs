//! What a kind of attention is: its parameters, the keys that queries read, its window, its choice, its indexer. What
//! it costs, how it is exported and which kernels it takes are traits of their own, [`Cost`], [`Exported`] and
//! [`Launched`], because others ask for these.

use super::cost::Cost;
use super::exported::Exported;
use super::launched::Launched;
use super::param::ParamSpec;
use super::sizes::{IndexScores, LatentSizes};
use crate::model::{BranchDensity, ModelShape};
use crate::{BlockChoice, NsaBlocks};

/// What a kind of attention is, with its sizes. What holds whatever the sizes is among its
/// [`KindFacts`](super::KindFacts).
pub trait Kind: Cost + Exported + Launched + std::fmt::Debug {
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

    /// The indexer that scores blocks, which has parameters and a loss of its own; `None` for kinds without one.
    fn indexer(&self) -> Option<Indexer> {
        None
    }

    /// Sets [`Indexer::warms_up`], for kinds with an indexer.
    fn set_index_warmup(&mut self, _warms_up: bool) {}

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

    /// The recipe's keys that say how many tokens a query reads whatever their scores, in words; `None` for a kind that
    /// reads all.
    fn reads_words(&self) -> Option<String>;

    /// The settings of the kind that its [label](Self::label) does not say.
    fn form_words(&self, _layer: &ModelShape) -> Vec<String> {
        Vec::new()
    }

    /// The sizes in a few words; `None` for dense attention.
    fn label(&self) -> Option<String>;

    /// What a query computes over blocks, to count it from the chosen ones; `None` for kinds without blocks.
    fn block_pairs(&self) -> Option<BlockPairs> {
        None
    }

    /// The most keys of a head that a query reads and a cache holds; `None` if both grow with the text.
    fn num_kept(&self) -> Option<usize> {
        None
    }

    /// How queries choose blocks; `None` for kinds that only read them beside other keys, and for kinds without blocks.
    fn block_choice(&self) -> Option<BlockChoice> {
        None
    }
}

/// The indexer of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Indexer {
    /// How it scores a block: by each token's key, or by one pooled key.
    pub scores: IndexScores,
    /// Whether queries read all keys while it learns.
    pub warms_up: bool,
    /// Whether its loss has a weight, so that it learns at all.
    pub learns: bool,
    /// Whether layers that read its choice train it too.
    pub learns_from_shared: bool,
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
