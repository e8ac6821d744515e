//! Attention over blocks of keys that each query chooses. InfLLM-V2 (arXiv:2509.24663) and MoBA (arXiv:2502.13189)
//! choose by pooled keys, without parameters of their own. MSA (arXiv:2606.13392) chooses by an indexer, which may
//! score blocks as QSA (Qwen3.8-Flash-Next) does. A layer may also read the blocks that an earlier layer chose.
use super::indexer::Indexer;
use super::weights::{by_key, with_values};
use super::{LayerContext, LayerOutput};
use crate::kv_cache::ChosenCache;
use crate::{LayerCache, LayerCaches, Linear, QkvProjection, WeightInit};
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::model::Attention;
use sieve_core::{BlockChoice, ChoiceRule, ModelShape};
use sieve_ops::{
    AttentionSpec, ContextParallel, DeviceBackend, Documents, Heads, IndexedCall, RotaryEmbedding, SieveBackend,
    TokenAttention, TokenExtra, indexer_spec,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The blocks that the queries of a layer chose. A chooser is a head that chooses for itself: a KV head, or with MoBA a
/// query head.
#[derive(Clone, Debug)]
pub(crate) enum LayerChoice<B: Backend> {
    /// Block indices for all tokens of the rows, `[batch, seq_len, choosers, attended blocks]`.
    Rows(Tensor<B, 4, Int>),
    /// For one new token per row: one list per row and chooser, ascending, then -1.
    Token(Vec<Vec<i32>>),
}

/// The blocks that the last choosing layer of a pass chose, by the first of the rows that share a cache (0 without
/// caches). Clones share the value.
#[derive(Clone, Debug, Default)]
pub struct LastChoice<B: Backend>(Rc<RefCell<HashMap<usize, LayerChoice<B>>>>);

impl<B: Backend> LastChoice<B> {
    /// A copy that later choices of this pass do not change, for recomputing a layer in the backward pass.
    pub fn kept(&self) -> Self {
        Self(Rc::new(RefCell::new(self.0.borrow().clone())))
    }

    /// A copy on another backend; `change` converts the tensors.
    pub fn map<I: Backend>(&self, change: impl Fn(Tensor<B, 4, Int>) -> Tensor<I, 4, Int>) -> LastChoice<I> {
        let change = |choice: &LayerChoice<B>| match choice {
            LayerChoice::Rows(rows) => LayerChoice::Rows(change(rows.clone())),
            LayerChoice::Token(blocks) => LayerChoice::Token(blocks.clone()),
        };
        let all = self.0.borrow();
        let all = all.iter().map(|(&row, choice)| (row, change(choice))).collect();
        LastChoice(Rc::new(RefCell::new(all)))
    }

    /// Replaces the choice by another pass's, which is left empty.
    pub fn take_over(&self, other: Self) {
        *self.0.borrow_mut() = other.0.take();
    }

    fn set(&self, first_row: usize, choice: LayerChoice<B>) {
        self.0.borrow_mut().insert(first_row, choice);
    }

    /// The choice for all tokens of the rows from `first_row` on. Panics without one.
    fn rows(&self, first_row: usize) -> Tensor<B, 4, Int> {
        match self.0.borrow().get(&first_row) {
            Some(LayerChoice::Rows(rows)) => rows.clone(),
            _ => panic!("no earlier layer chose blocks for the same tokens"),
        }
    }

    /// The choice for one new token of the rows from `first_row` on. Panics without one.
    fn token(&self, first_row: usize) -> Vec<Vec<i32>> {
        match self.0.borrow().get(&first_row) {
            Some(LayerChoice::Token(blocks)) => blocks.clone(),
            _ => panic!("no earlier layer chose blocks for one token"),
        }
    }
}

/// Each query attends to the tokens of the blocks that it chooses, with one exact softmax. The parameters are the same
/// as in dense attention, plus an indexer's, so that dense and sparse models can exchange weights.
#[derive(Module, Debug)]
pub struct ChosenBlocksAttention<B: Backend> {
    /// Packed projection to q, k and v, with q/k-norm and RoPE.
    pub qkv: QkvProjection<B>,
    /// Output projection, `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    /// Chooses the blocks; `None`: the queries choose by pooled keys.
    pub indexer: Option<Indexer<B>>,
    #[module(skip)]
    choice: BlockChoice,
    /// Whether queries read the blocks that the last choosing layer before this one chose.
    #[module(skip)]
    shares: bool,
    /// Factor on the indexer's loss.
    #[module(skip)]
    loss_weight: f64,
    /// Whether queries read all earlier keys while the indexer learns.
    #[module(skip)]
    is_warmup: bool,
}

/// The packed queries, keys and values of a layer: `qkv` for the attention, `index` for the indexer if there is one.
#[derive(Clone)]
pub(crate) struct Packed<B: Backend> {
    pub(crate) qkv: Tensor<B, 4>,
    pub(crate) index: Option<Tensor<B, 4>>,
}

impl<B: Backend> Packed<B> {
    fn map(self, change: impl Fn(Tensor<B, 4>) -> Tensor<B, 4>) -> Self {
        Self { qkv: change(self.qkv), index: self.index.map(&change) }
    }
}

impl<B: Backend> ChosenBlocksAttention<B> {
    /// A layer with normal random weights from `init`.
    pub fn new(shape: &ModelShape, choice: BlockChoice, init: &mut WeightInit, device: &B::Device) -> Self {
        let (loss_weight, is_warmup) = match shape.attention {
            Attention::Msa(msa) => (msa.index_loss_weight, msa.index_warmup),
            _ => (0.0, false),
        };
        // `shape` is one layer's, so its only layer has index 0.
        let shares = shape.is_shared_layer(0);
        Self {
            qkv: QkvProjection::new(shape, init, device),
            o_proj: Linear::new(shape.num_heads * shape.head_dim, shape.d_model, init, device),
            indexer: shape.has_indexer().then(|| Indexer::new(shape, init, device)),
            choice,
            shares,
            loss_weight,
            is_warmup,
        }
    }

    /// Rule and sizes of the choice of blocks.
    pub fn choice(&self) -> BlockChoice {
        self.choice
    }

    pub(crate) fn spec(&self) -> AttentionSpec {
        self.qkv.spec(None)
    }
}

impl<B: SieveBackend> ChosenBlocksAttention<B> {
    /// `residual` plus the attention's output; both `[batch, seq_len, d_model]`.
    pub fn forward(&self, x: Tensor<B, 3>, residual: Tensor<B, 3>, context: &LayerContext<'_, B>) -> LayerOutput<B> {
        let packed = self.packed(x, context);
        let first_row = 0;
        let (o, statistics) = match (context.parts, context.shared) {
            (Some(parts), _) => self.attend_of_part(packed, parts, context),
            (None, None) => self.attend(packed, context.documents, context, first_row),
            (None, Some(shared)) => {
                let packed = packed.map(|x| shared.repeat(x));
                let (o, statistics) = self.attend(packed, shared.documents(), context, first_row);
                (shared.once(o), statistics)
            }
        };
        LayerOutput { indexer: statistics, ..LayerOutput::of(self.o_proj.forward_add(o.flatten(2, 3), residual)) }
    }

    /// The blocks whose tokens each query reads, `[batch, seq_len, choosers, attended blocks]`, as
    /// [`sieve_ops::choose_key_blocks`] returns them; [`forward`](Self::forward) chooses the same blocks. `context`
    /// must be the one of the whole pass, because an earlier layer may have chosen the blocks. `None` where queries
    /// read all keys.
    pub fn block_indices(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Option<Tensor<B, 4, Int>> {
        match (self.reads_all(context), self.shares) {
            (true, _) => None,
            (false, true) => Some(context.last_choice.rows(0)),
            (false, false) => {
                let (packed, documents) = (self.packed(x, context), context.documents);
                let keys = self.block_keys(&packed, documents, context.rope);
                Some(self.choose(&packed, keys.as_ref(), documents, self.spec()))
            }
        }
    }

    fn reads_all(&self, context: &LayerContext<'_, B>) -> bool {
        self.is_warmup || context.reads_all
    }

    /// One key per complete block, by which a QSA indexer scores blocks; `None` without such an indexer.
    pub(crate) fn block_keys(
        &self,
        packed: &Packed<B>,
        documents: &Documents<B>,
        rope: &RotaryEmbedding<B>,
    ) -> Option<Tensor<B, 3>> {
        let (indexer, index) = self.indexer.as_ref().zip(packed.index.clone())?;
        let sizes = (indexer_spec(self.spec()), self.choice.blocks);
        let pools = self.choice.rule == ChoiceRule::SumOfHeads;
        pools.then(|| indexer.block_keys(index, documents, sizes, rope))
    }

    /// The layer's operands for [`sieve_ops::token_step`]; `None` where the layer reads blocks that another layer
    /// chose, has a QSA indexer, or reads all keys while its indexer learns.
    pub(super) fn for_token_step(&self) -> Option<TokenAttention<B>> {
        if self.shares || self.is_warmup || self.choice.rule == ChoiceRule::SumOfHeads {
            return None;
        }
        let extra = match &self.indexer {
            Some(indexer) => TokenExtra::Indexer { proj: indexer.proj.weight.val(), norm: indexer.qk_norm() },
            None => TokenExtra::None,
        };
        Some(TokenAttention { extra, ..self.qkv.for_token_step(&self.o_proj, self.spec()) })
    }

    /// The weight of each key for each query of one document, `[num_heads, seq_len, seq_len]`.
    pub(super) fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let chosen = self.block_indices(x.clone(), context);
        let (qkv, spec, documents) = (self.qkv.forward(x, context), self.spec(), context.documents);
        by_key(&qkv.clone(), |one_hot| {
            let qkv = with_values(&qkv, one_hot, spec.num_kv_heads);
            match &chosen {
                Some(chosen) => sieve_ops::chosen_attention(qkv, chosen.clone(), documents, spec, self.choice),
                None => sieve_ops::attention(qkv, documents, spec),
            }
        })
    }

    pub(crate) fn packed(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Packed<B> {
        Packed {
            index: self.indexer.as_ref().map(|indexer| indexer.forward(x.clone(), context)),
            qkv: self.qkv.forward(x, context),
        }
    }

    /// Chooses blocks by `block_keys` (QSA), else by the indexer's queries and keys, or without an indexer by the
    /// attention's own.
    pub(crate) fn choose(
        &self,
        packed: &Packed<B>,
        block_keys: Option<&Tensor<B, 3>>,
        documents: &Documents<B>,
        spec: AttentionSpec,
    ) -> Tensor<B, 4, Int> {
        if let (Some(index), Some(keys)) = (&packed.index, block_keys) {
            return sieve_ops::choose_scored_blocks(index.clone(), keys.clone(), documents, spec, self.choice);
        }
        let (scored, spec) = match &packed.index {
            Some(index) => (index, indexer_spec(spec)),
            None => (&packed.qkv, spec),
        };
        sieve_ops::choose_key_blocks(scored.clone(), documents, spec, self.choice)
    }

    /// As [`attend`](Self::attend) with context parallelism: this rank chooses blocks and attends over whole rows, with
    /// its share of the KV heads and their queries. An indexer has one query per KV head, and one key and one value
    /// that every rank gets.
    fn attend_of_part(
        &self,
        packed: Packed<B>,
        parts: &ContextParallel,
        context: &LayerContext<'_, B>,
    ) -> (Tensor<B, 4>, Option<Tensor<B::Inner, 1>>) {
        let spec = self.spec();
        let kinds = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads].map(Heads::Split);
        let rows = parts.whole_rows(&packed.qkv.device());
        let of_indexer = [Heads::Split(spec.num_kv_heads), Heads::Shared(2)];
        let packed = Packed {
            qkv: parts.to_heads(packed.qkv, &kinds),
            index: packed.index.map(|index| parts.to_heads(index, &of_indexer)),
        };
        let first_row = 0;
        let (o, statistics) = self.attend(packed, &rows, context, first_row);
        (parts.to_tokens(o, spec.num_heads), statistics)
    }

    /// Chooses blocks, or takes the last choosing layer's blocks of the rows from `first_row` on, and attends with the
    /// heads in `packed`, all or some. Also returns the indexer's statistics where `context.measures_indexers` is set.
    fn attend(
        &self,
        packed: Packed<B>,
        documents: &Documents<B>,
        context: &LayerContext<'_, B>,
        first_row: usize,
    ) -> (Tensor<B, 4>, Option<Tensor<B::Inner, 1>>) {
        let spec = context.under_policy(self.spec());
        let all_kv_heads = spec.num_kv_heads;
        let spec = spec.of_packed_heads(packed.qkv.dims()[2]);
        let block_keys = self.block_keys(&packed, documents, context.rope);
        let chosen = match (self.reads_all(context), self.shares) {
            (true, _) => None,
            (false, true) => Some(context.last_choice.rows(first_row)),
            (false, false) => {
                let chosen = self.choose(&packed, block_keys.as_ref(), documents, spec);
                context.last_choice.set(first_row, LayerChoice::Rows(chosen.clone()));
                Some(chosen)
            }
        };
        let Packed { qkv, index: Some(index) } = packed.clone() else {
            let qkv = packed.qkv;
            let o = match chosen {
                Some(chosen) => sieve_ops::chosen_attention(qkv, chosen, documents, spec, self.choice),
                None => sieve_ops::attention(qkv, documents, spec),
            };
            return (o, None);
        };
        let call = IndexedCall {
            documents,
            spec,
            choice: self.choice,
            chosen,
            // The loss is a mean over tokens. It is one over KV heads too, unless they share the indexer's scores
            // (QSA).
            loss_weight: self.loss_weight * context.token_share
                / if block_keys.is_some() { 1 } else { all_kv_heads } as f64,
            block_keys,
        };
        let statistics = context.measures_indexers.then(|| {
            let chooses = || self.choose(&packed, call.block_keys.as_ref(), documents, spec);
            let chosen = call.chosen.clone().unwrap_or_else(chooses);
            sieve_ops::index_statistics(qkv.clone(), index.clone(), chosen, &call)
        });
        (sieve_ops::indexed_attention(qkv, index, &call), statistics)
    }

    /// The output of new tokens without the residual; reads and extends the caches.
    pub fn forward_cached(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        caches: &mut LayerCaches<'_, B>,
    ) -> Tensor<B, 3>
    where
        B: DeviceBackend,
    {
        let (spec, choice) = (self.spec(), self.choice);
        let Packed { qkv, index } = self.packed(x, context);
        let o = caches.attend(qkv, |cached, qkv| {
            let [first, count] = cached.rows;
            let packed = Packed { qkv, index: index.as_ref().map(|index| index.clone().narrow(0, first, count)) };
            let LayerCache::Chosen(cache) = cached.cache else {
                // A layer that reads another layer's blocks needs no pooled keys.
                let pools = !self.shares;
                *cached.cache = LayerCache::Chosen(ChosenCache::of_prompt(&packed, spec, choice, pools));
                return self.attend(packed, context.documents, context, first).0;
            };
            let [batch, new, _, _] = packed.qkv.dims();
            if new == 1 && self.reads_all(context) {
                return cache.attend_to_all(packed, spec, cached.scratch);
            }
            if new == 1 {
                let others_choice = self.shares.then(|| context.last_choice.token(first));
                let qsa_indexer = self.indexer.as_ref().filter(|_| choice.rule == ChoiceRule::SumOfHeads);
                let block_keys = qsa_indexer.and_then(|indexer| {
                    let (means, positions) = cache.block_means()?;
                    let keys = indexer.keys_of(means, positions, context.rope);
                    Some(keys.unsqueeze_dim::<4>(1))
                });
                let (o, chosen) = cache.attend(packed, spec, (others_choice, block_keys), cached.scratch);
                context.last_choice.set(first, LayerChoice::Token(chosen));
                return o;
            }
            // Several tokens after cached tokens attend in a row of all tokens; the cached tokens' queries are zeros.
            let row = cache.row(&packed);
            let earlier = cache.num_tokens();
            cache.append(&packed, spec);
            let documents = Documents::whole_rows([batch, earlier + new], &row.qkv.device());
            self.attend(row, &documents, context, first).0.narrow(1, earlier, new)
        });
        self.o_proj.forward(o.flatten(2, 3))
    }
}
