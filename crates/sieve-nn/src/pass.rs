//! What the layers of a pass share: what a layer needs, what it gives back, and what it hands on to later layers.
//!
//! A layer reads its `LayerContext`, which does not change during a pass: operands, and `PassSettings`, which are
//! handed on whole. A layer without a choice of its own (`"shared"`) reads `PassState::last_choice`, where each
//! layer that chooses writes its blocks; a recomputed block gets the choice of its first pass. In
//! `training.dense_steps` (`LayerContext::reads_all`) queries read all keys.
use crate::{Linear, SharedPrompts};
use burn::module::ParamId;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorPrimitive};
use sieve_core::{Keeping, ModelShape};
use sieve_ops::{
    AttentionSpec, ContextParallel, DocumentBounds, Documents, GemmPrecision, KeptAttention, KernelPolicy, LayerTokens,
    PassFor, RotaryEmbedding, SieveBackend, WeightSums,
};
use std::collections::HashMap;

/// How the layers of a pass compute. It is one value, so that a copy of a pass's context copies all of it: a setting
/// that is added here reaches every pass, also the second pass of a recomputed block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassSettings {
    /// Data type of the GEMMs with the projections, in layers that are one op: feed-forward layers and the attention
    /// layers of the kinds of [one op](sieve_core::kinds::KindFacts::is_one_op).
    pub precision: GemmPrecision,
    /// What layers that are one op keep for the backward pass beyond the minimum.
    pub keeping: Keeping,
    /// Whether the pass over a layer is for its output, or for its backward pass alone.
    pub pass: PassFor,
    /// Which kernels attention may use on a GPU, and in which order backward kernels sum.
    pub policy: KernelPolicy,
    /// Weight of one token in an indexer's loss, whose gradient the indexer's backward pass computes: 1 / the number of
    /// tokens in an optimizer step, without padding. 0: no such loss.
    pub token_share: f64,
    /// Whether layers with an indexer return its statistics, [`LayerOutput::indexer`].
    pub measures_indexers: bool,
    /// Whether queries of kinds that choose blocks read all earlier keys in this pass instead.
    pub reads_all: bool,
    /// Whether the pass is for indexers alone: attention has no gradient but theirs, [`PassState::indexed`].
    pub indexers_alone: bool,
}

/// Operands and settings that all layers of a forward pass share.
#[derive(Clone, Debug)]
pub struct LayerContext<'a, B: Backend> {
    /// Document bounds and positions of the tokens.
    pub documents: &'a Documents<B>,
    /// Positions to rotate by, `[batch, seq_len]`: positions in the documents, plus the cache's length when decoding.
    pub positions: Tensor<B, 2, Int>,
    /// Cosine and sine tables of RoPE.
    pub rope: &'a RotaryEmbedding<B>,
    /// With context parallelism: how whole rows are divided among ranks; this pass has one rank's part of each row.
    pub parts: Option<&'a ContextParallel>,
    /// With prompts that several endings share: the rows and documents that attention sees in place of `documents`.
    pub shared: Option<&'a SharedPrompts<B>>,
    /// How the layers compute.
    pub settings: PassSettings,
}

impl<'a, B: Backend> LayerContext<'a, B> {
    /// The context of a pass without cache, with default settings.
    pub fn new(documents: &'a Documents<B>, rope: &'a RotaryEmbedding<B>) -> Self {
        Self {
            documents,
            positions: documents.positions.clone(),
            rope,
            parts: None,
            shared: None,
            settings: PassSettings::default(),
        }
    }
}

impl<B: Backend> LayerContext<'_, B> {
    /// The context for a layer that rotates queries and keys (`rotates`), or for one that does not.
    pub(crate) fn of_layer(&self, rotates: bool) -> Self {
        Self { rope: self.rope.of_layer(rotates), ..self.clone() }
    }

    /// Positions, RoPE tables and documents for [`sieve_ops::attention_layer`].
    pub(crate) fn tokens(&self) -> LayerTokens<'_, B> {
        LayerTokens { positions: self.positions.clone(), rope: self.rope, documents: self.documents, parts: self.parts }
    }

    /// A copy of `spec` with this pass's kernel policy.
    pub(crate) fn under_policy(&self, spec: AttentionSpec) -> AttentionSpec {
        AttentionSpec { policy: self.settings.policy, ..spec }
    }
}

/// What the layers of a pass hand on: to later layers, and to the caller. It begins empty, and every layer gets it as
/// `&mut`.
#[derive(Clone, Debug)]
pub struct PassState<B: Backend> {
    /// Sums of earlier micro-batches' gradients, by weight. A layer takes the sums of its projections out, and its
    /// backward pass adds its gradients to them.
    pub sums: HashMap<ParamId, Tensor<B, 2>>,
    /// The blocks that layers chose in this pass, for later layers that read the same blocks.
    pub last_choice: LastChoice<B>,
    /// Of indexers, for later layers that read their choice and train them too.
    pub index: HandedIndex<B>,
    /// For a block that is recomputed: what its first pass has kept of its attention.
    pub attention: Option<KeptAttention<B>>,
    /// With `indexers_alone`: outputs of attention, `[batch, seq_len, num_heads, head_dim]`. Their backward passes give
    /// the gradients of the indexers, whatever the gradient of an output is.
    pub indexed: Vec<Tensor<B, 4>>,
    /// Bounds of the rows of cached and new tokens, by their `[batch, tokens]` and the first new token.
    pub rows_behind: Vec<([usize; 3], DocumentBounds<B>)>,
}

impl<B: Backend> Default for PassState<B> {
    fn default() -> Self {
        Self {
            sums: HashMap::new(),
            last_choice: LastChoice::default(),
            index: HandedIndex::default(),
            attention: None,
            indexed: Vec::new(),
            rows_behind: Vec::new(),
        }
    }
}

impl<B: SieveBackend> PassState<B> {
    /// The bounds that [`sieve_ops::attention_of_last`] takes for rows of these sizes, the same for all layers.
    pub(crate) fn rows_behind(&mut self, dims: [usize; 2], first: usize, device: &B::Device) -> DocumentBounds<B> {
        let size = [dims[0], dims[1], first];
        if let Some((_, bounds)) = self.rows_behind.iter().find(|(of, _)| *of == size) {
            return bounds.clone();
        }
        let bounds = sieve_ops::bounds_of_last::<B::Inner>(dims, first, device);
        self.rows_behind.push((size, bounds.clone()));
        bounds
    }
}

impl<B: Backend> PassState<B> {
    /// Takes the gradient sums of two projections out of `sums`.
    pub(crate) fn take_sums(&mut self, projections: [&Linear<B>; 2]) -> WeightSums<B> {
        projections.map(|linear| self.sums.remove(&linear.weight.id))
    }
}

/// Output of an attention layer, or of a whole block.
#[derive(Clone, Debug)]
pub struct LayerOutput<B: SieveBackend> {
    /// The residual stream with the layer's output added, `[batch, seq_len, d_model]`.
    pub x: Tensor<B, 3>,
    /// DMA's mask, `[batch, num_kv_heads, seq_len]`: the first query that no longer sees the key. `None` for other
    /// kinds and with shared prompts.
    pub expire: Option<Tensor<B, 3, Int>>,
    /// DMA's scores, `[batch, num_kv_heads, seq_len]`, without gradient; `None` where `expire` is, and with a bias that
    /// does not clamp large scores, unlike [`DmaBias::Exp`](sieve_core::DmaBias::Exp).
    pub clamped_scores: Option<Tensor<B, 3>>,
    /// Statistics of an indexer, see [`sieve_ops::index_statistics`]; only with `measures_indexers` in the context.
    pub indexer: Option<Tensor<B::Inner, 1>>,
    /// What the pass that recomputes the block need not compute again; see [`KeptAttention`].
    pub attention: Option<KeptAttention<B>>,
}

impl<B: SieveBackend> LayerOutput<B> {
    /// The output of a kind without further results.
    pub(crate) fn of(x: Tensor<B, 3>) -> Self {
        Self { x, expire: None, clamped_scores: None, indexer: None, attention: None }
    }
}

/// The blocks that the queries of a layer chose. A chooser is a head that chooses for itself: a KV head, or by mean
/// keys a query head.
#[derive(Clone, Debug)]
pub(crate) enum LayerChoice<B: Backend> {
    /// Block indices for all tokens of the rows, `[batch, seq_len, choosers, attended blocks]`.
    Rows(Tensor<B, 4, Int>),
    /// For one new token per row: one list per row and chooser, ascending, then -1.
    Token(Vec<Vec<i32>>),
}

/// The blocks that the last choosing layer of a pass chose. Each cache has an entry, by its first row in the batch;
/// without caches the only entry is 0.
#[derive(Clone, Debug)]
pub struct LastChoice<B: Backend>(HashMap<usize, LayerChoice<B>>);

impl<B: Backend> Default for LastChoice<B> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<B: Backend> LastChoice<B> {
    /// The same choice on another backend; `change` converts the tensors.
    pub fn map<I: Backend>(self, change: impl Fn(Tensor<B, 4, Int>) -> Tensor<I, 4, Int>) -> LastChoice<I> {
        let change = |choice| match choice {
            LayerChoice::Rows(rows) => LayerChoice::Rows(change(rows)),
            LayerChoice::Token(blocks) => LayerChoice::Token(blocks),
        };
        LastChoice(self.0.into_iter().map(|(row, choice)| (row, change(choice))).collect())
    }

    pub(crate) fn set(&mut self, first_row: usize, choice: LayerChoice<B>) {
        self.0.insert(first_row, choice);
    }

    /// The choice for all tokens of the rows from `first_row` on. Panics without one.
    pub(crate) fn rows(&self, first_row: usize) -> Tensor<B, 4, Int> {
        match self.0.get(&first_row) {
            Some(LayerChoice::Rows(rows)) => rows.clone(),
            _ => panic!("no earlier layer chose blocks for the same tokens"),
        }
    }

    /// The choice for one new token of the rows from `first_row` on. Panics without one.
    pub(crate) fn token(&self, first_row: usize) -> Vec<Vec<i32>> {
        match self.0.get(&first_row) {
            Some(LayerChoice::Token(blocks)) => blocks.clone(),
            _ => panic!("no earlier layer chose blocks for one token"),
        }
    }
}

/// The tensors of an indexer from which its loss is computed.
#[derive(Clone, Debug)]
pub struct IndexTensors<B: Backend> {
    /// Its packed queries and keys, `[batch, seq_len, num_kv_heads + 2, head_dim]`.
    pub packed: Tensor<B, 4>,
    /// With QSA's scores: the keys of blocks, `[batch, num_slots, head_dim]`.
    pub block_keys: Option<Tensor<B, 3>>,
}

impl<B: AutodiffBackend> IndexTensors<B> {
    /// The values without their graph.
    pub fn inner(self) -> IndexTensors<B::InnerBackend> {
        IndexTensors { packed: self.packed.inner(), block_keys: self.block_keys.map(Tensor::inner) }
    }

    /// Values as the beginning of a graph, which receives gradients.
    pub fn leaves(values: IndexTensors<B::InnerBackend>) -> Self {
        let IndexTensors { packed, block_keys } = values;
        Self {
            packed: Tensor::from_inner(packed).require_grad(),
            block_keys: block_keys.map(|keys| Tensor::from_inner(keys).require_grad()),
        }
    }
}

/// What indexers hand on in a pass: to the layers that read their choice, whose attention they learn too.
#[derive(Clone, Debug)]
pub struct HandedIndex<B: Backend> {
    /// Of an indexer before this part of the pass. Training cuts the graph between blocks, so there these are leaves.
    pub given: Option<IndexTensors<B>>,
    /// Of the last indexer in this part of the pass.
    pub made: Option<IndexTensors<B>>,
}

impl<B: Backend> Default for HandedIndex<B> {
    fn default() -> Self {
        Self { given: None, made: None }
    }
}

impl<B: Backend> HandedIndex<B> {
    /// Of the last indexer of the pass.
    pub(crate) fn last(&self) -> Option<IndexTensors<B>> {
        self.made.as_ref().or(self.given.as_ref()).cloned()
    }
}

/// Width of the rotary tables that the layers of `shape` read: `head_dim`, or MLA's `qk_rope_head_dim`.
pub(crate) fn rope_dim(shape: &ModelShape) -> usize {
    shape.latent().map_or(shape.head_dim, |latent| latent.rope_width)
}

/// The values of a tensor, without the autodiff graph that it may be part of.
pub(crate) fn on_device<B: SieveBackend, const D: usize>(x: Tensor<B, D>) -> Tensor<B::Inner, D> {
    Tensor::from_primitive(TensorPrimitive::Float(B::value(x.into_primitive().tensor())))
}

/// A tensor of the device as a constant; the reverse of [`on_device`].
pub(crate) fn from_device<B: SieveBackend, const D: usize>(x: Tensor<B::Inner, D>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(B::constant(x.into_primitive().tensor())))
}
