//! Attention over blocks of keys that each query chooses: the layer and the cache of `infllm.rs`, `msa.rs` and the
//! other kinds that choose blocks.
//!
//! Queries choose by pooled keys (means of several tokens' keys), without parameters of their own, or by an indexer, a
//! projection to further queries and one further key per token. A layer may also read the blocks that an earlier layer
//! chose.
//!
//! A block of more than 64 tokens is read in pieces of 64. Where each query head chooses for itself, the keys and
//! values of its KV head are repeated for it; the backward pass repeats them anew, so that no copy is kept.
//!
//! How blocks are scored is a `ChoiceRule` of sieve-core, which is all in which kinds without an indexer differ. A new
//! rule is written in sieve-ops, behind `choose_key_blocks`, and in `cache.rs`, for one token.
mod cache;

pub use cache::ChosenCache;
pub(super) use cache::{chosen_blocks, keys_of_blocks};

use super::msa::Indexer;
use super::{KindLayer, LayerCache};
use crate::attention_weights::{self, by_key, with_values};
use crate::layer::{Cached, KindAttention, PerToken, Rows};
use crate::pass::{IndexTensors, LayerChoice, LayerContext, LayerOutput, PassState, from_device, on_device};
use crate::{Linear, QkvProjection, WeightInit};
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::{BlockChoice, ChoiceRule, ModelShape};
use sieve_ops::{
    AttentionSpec, ContextParallel, DeviceBackend, Documents, Heads, IndexedCall, RotaryEmbedding, SieveBackend,
    SumOrder, TokenAttention, TokenExtra, indexer_spec,
};

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
    /// Factor on the loss of the indexer, or of the one whose choice the layer reads.
    #[module(skip)]
    loss_weight: f64,
    /// Whether queries read all earlier keys while the indexer learns.
    #[module(skip)]
    is_warmup: bool,
}

/// The packed queries, keys and values of a layer: `qkv` for the attention, `index` for the indexer if there is one.
#[derive(Clone)]
pub(crate) struct Packed<B: Backend> {
    qkv: Tensor<B, 4>,
    index: Option<Tensor<B, 4>>,
}

impl<S: Backend> PerToken<S> for Packed<S> {
    type On<T: Backend> = Packed<T>;

    fn change<T: Backend>(self, change: &dyn Fn(Tensor<S, 4>) -> Tensor<T, 4>) -> Packed<T> {
        Packed { qkv: change(self.qkv), index: self.index.map(change) }
    }
}

impl<B: Backend> ChosenBlocksAttention<B> {
    /// A layer without an indexer, with normal random weights from `init`.
    pub fn new(shape: &ModelShape, choice: BlockChoice, init: &mut WeightInit, device: &B::Device) -> Self {
        // `shape` is one layer's, so its only layer has index 0.
        let shares = shape.is_shared_layer(0);
        Self {
            qkv: QkvProjection::new(shape, init, device),
            o_proj: Linear::new(shape.num_heads * shape.head_dim, shape.d_model, init, device),
            indexer: None,
            choice,
            shares,
            loss_weight: 0.0,
            is_warmup: false,
        }
    }

    /// The layer with this indexer, if any, and the weight of its loss. While `is_warmup` is set, queries read all
    /// earlier keys.
    pub(super) fn with_indexer(self, indexer: Option<Indexer<B>>, loss_weight: f64, is_warmup: bool) -> Self {
        Self { indexer, loss_weight, is_warmup, ..self }
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
    /// Whether queries read all earlier keys in this pass, whatever blocks they would choose.
    fn reads_all(&self, context: &LayerContext<'_, B>) -> bool {
        self.is_warmup || context.settings.reads_all
    }

    /// One key per complete block, by which an indexer of QSA's kind ([`ChoiceRule::SumOfHeads`]) scores blocks; `None`
    /// where the layer has none, because other indexers score each token's key.
    fn block_keys(
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

    /// The indexer's tensors with which attention computes its loss: this layer's own, which later layers get in
    /// training, or those of the layer whose choice it reads. `None` where there is no indexer or, in a layer without
    /// one, no loss.
    fn learning_index(
        &self,
        packed: &Packed<B>,
        block_keys: Option<Tensor<B, 3>>,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
    ) -> Option<IndexTensors<B>> {
        let learns = self.loss_weight * context.settings.token_share != 0.0;
        let Some(index) = &packed.index else {
            return if self.shares && learns { state.index.last() } else { None };
        };
        let own = IndexTensors { packed: index.clone(), block_keys };
        // Whoever trains indexers alone looks here for the layer that has one.
        state.index.made = (learns || context.settings.indexers_alone).then(|| own.clone());
        Some(own)
    }

    /// Chooses blocks by `block_keys` (QSA), else by the indexer's queries and keys, or without an indexer by the
    /// attention's own. The first `cached` tokens of a row choose none.
    fn choose(
        &self,
        packed: &Packed<B>,
        block_keys: Option<&Tensor<B, 3>>,
        (documents, cached): (&Documents<B>, usize),
        spec: AttentionSpec,
    ) -> Tensor<B, 4, Int> {
        if let (Some(index), Some(keys)) = (&packed.index, block_keys) {
            let all = sieve_ops::choose_scored_blocks(index.clone(), keys.clone(), documents, spec, self.choice);
            return sieve_ops::chosen_by_last(all, cached);
        }
        let (scored, spec) = match &packed.index {
            Some(index) => (index, indexer_spec(spec)),
            None => (&packed.qkv, spec),
        };
        sieve_ops::choose_key_blocks_of_last(scored.clone(), documents, spec, self.choice, cached)
    }
}

impl<B: SieveBackend> KindAttention<B> for ChosenBlocksAttention<B> {
    type Packed = Packed<B>;
    /// The indexer's statistics where `measures_indexers` is set in the pass's settings.
    type Found = Option<Tensor<B::Inner, 1>>;

    fn num_heads(&self) -> usize {
        self.spec().num_heads
    }

    /// Projects x for the attention and for the indexer.
    fn project(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Packed<B> {
        Packed {
            index: self.indexer.as_ref().map(|indexer| indexer.forward(x.clone(), context)),
            qkv: self.qkv.forward(x, context),
        }
    }

    /// Blocks are chosen per KV head. An indexer has one query per KV head. Every process gets its key, and the key
    /// before its norm, which has the place of a value.
    fn project_own_heads(&self, x: Tensor<B, 3>, parts: &ContextParallel, rows: &Rows<'_, B>) -> Packed<B> {
        let Packed { qkv, index } = self.project(x, rows.context);
        let of_indexer = [Heads::Split(self.spec().num_kv_heads), Heads::Shared(2)];
        Packed { qkv: self.qkv.own_heads(qkv, parts), index: index.map(|index| parts.to_heads(index, &of_indexer)) }
    }

    /// Chooses blocks, or takes the last choosing layer's blocks of the same rows, and attends.
    fn attend(
        &self,
        packed: Packed<B>,
        &Rows { documents, first, cached, context, .. }: &Rows<'_, B>,
        state: &mut PassState<B>,
    ) -> (Tensor<B, 4>, Option<Tensor<B::Inner, 1>>) {
        let spec = context.under_policy(self.spec());
        let all_kv_heads = spec.num_kv_heads;
        let spec = spec.of_packed_heads(packed.qkv.dims()[2]);
        let block_keys = self.block_keys(&packed, documents, context.rope);
        let chosen = match (self.reads_all(context), self.shares) {
            (true, _) => None,
            (false, true) => Some(state.last_choice.rows(first)),
            (false, false) => {
                let chosen = self.choose(&packed, block_keys.as_ref(), (documents, cached), spec);
                state.last_choice.set(first, LayerChoice::Rows(chosen.clone()));
                Some(chosen)
            }
        };
        let Some(index) = self.learning_index(&packed, block_keys, context, state) else {
            let qkv = packed.qkv;
            let o = match chosen {
                Some(chosen) => {
                    let last = (self.choice, cached);
                    sieve_ops::chosen_attention_of_last(qkv, chosen, documents, spec, last)
                }
                None => sieve_ops::attention(qkv, documents, spec),
            };
            return (o, None);
        };
        let IndexTensors { packed: index, block_keys } = index;
        let packed = Packed { index: Some(index.clone()), ..packed };
        let qkv = packed.qkv.clone();
        let call = IndexedCall {
            documents,
            spec,
            choice: self.choice,
            chosen,
            // The loss is a mean over tokens. It is one over KV heads too, unless they share the indexer's scores
            // (QSA).
            loss_weight: self.loss_weight * context.settings.token_share
                / if block_keys.is_some() { 1 } else { all_kv_heads } as f64,
            block_keys,
        };
        let statistics = context.settings.measures_indexers.then(|| {
            let chooses = || self.choose(&packed, call.block_keys.as_ref(), (documents, cached), spec);
            let chosen = call.chosen.clone().unwrap_or_else(chooses);
            sieve_ops::index_statistics(qkv.clone(), index.clone(), chosen, &call)
        });
        if context.settings.indexers_alone {
            let o = sieve_ops::indexed_attention(qkv.detach(), index, &call);
            state.indexed.push(o.clone());
            return (o.detach(), statistics);
        }
        (sieve_ops::indexed_attention(qkv, index, &call), statistics)
    }

    fn fill(&self, packed: Packed<B::Inner>, _statistics: Self::Found) -> LayerCache<B::Inner> {
        // A layer that reads another layer's blocks needs no pooled keys.
        let pools = !self.shares;
        LayerCache::Chosen(ChosenCache::of_prompt(&packed, self.spec(), self.choice, pools))
    }

    /// A single new token reads the cache; several new tokens attend in one row with all cached tokens, and so does a
    /// single one whose sums have a fixed order.
    fn attend_cached(&self, packed: Packed<B::Inner>, cached: Cached<'_, '_, B>) -> Tensor<B::Inner, 4> {
        let Cached { rows: cached, context, state } = cached;
        let ([first, _], spec) = (cached.rows, self.spec());
        let LayerCache::Chosen(cache) = cached.cache else {
            panic!("a layer that chooses blocks decodes after a prompt");
        };
        let [batch, new, _, _] = packed.qkv.dims();
        if new == 1 && self.reads_all(context) {
            return cache.attend_to_all(packed, context.under_policy(spec), cached.scratch);
        }
        // With sums in a fixed order a single token takes the kernels of whole rows, too; a host's have one order.
        let in_order = context.settings.policy.sums == SumOrder::Fixed && !<B::Inner as DeviceBackend>::ON_HOST;
        if new == 1 && !in_order {
            let others_choice = self.shares.then(|| state.last_choice.token(first));
            let qsa_indexer = self.indexer.as_ref().filter(|_| self.choice.rule == ChoiceRule::SumOfHeads);
            let block_keys = qsa_indexer.and_then(|indexer| {
                let (means, positions) = cache.block_means()?;
                let positions = Tensor::from_primitive(positions.into_primitive());
                let keys = indexer.keys_of(from_device(means), positions, context.rope);
                Some(on_device(keys).unsqueeze_dim::<4>(1))
            });
            let (o, chosen) = cache.attend(packed, spec, (others_choice, block_keys), cached.scratch);
            state.last_choice.set(first, LayerChoice::Token(chosen));
            return o;
        }
        // The cached tokens have queries of zero, whose outputs are not read. On a CPU no query of zero is computed.
        let row = cache.row(&packed);
        let earlier = cache.num_tokens();
        cache.append(&packed, spec);
        let documents = Documents::whole_rows([batch, earlier + new], &row.qkv.device());
        let cached = if <B::Inner as DeviceBackend>::ON_HOST { 0 } else { earlier };
        let rows = Rows { documents: &documents, first, cached, heads: 0..spec.num_heads, context };
        let (o, _) = self.attend(row.change(&|x| from_device(x)), &rows, state);
        on_device(o).narrow(1, earlier, new)
    }

    fn project_out(&self, o: Tensor<B, 3>, residual: Tensor<B, 3>, _context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        self.o_proj.forward_add(o, residual)
    }

    fn report(&self, statistics: Self::Found, output: &mut LayerOutput<B>) {
        output.indexer = statistics;
    }
}

impl<B: SieveBackend> KindLayer<B> for ChosenBlocksAttention<B> {
    /// `None` where the layer reads blocks that another layer chose, has a QSA indexer, or reads all keys while its
    /// indexer learns.
    fn for_token_step(&self) -> Option<TokenAttention<B>> {
        if self.shares || self.is_warmup || self.choice.rule == ChoiceRule::SumOfHeads {
            return None;
        }
        let extra = match &self.indexer {
            Some(indexer) => TokenExtra::Indexer { proj: indexer.proj.weight.val(), norm: indexer.qk_norm() },
            None => TokenExtra::None,
        };
        Some(TokenAttention { extra, ..self.qkv.for_token_step(&self.o_proj, self.spec()) })
    }

    /// The weight of each key. It is an output of attention itself, with one-hot values in place of the values, see
    /// `attention_weights::by_key`.
    fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>, state: &PassState<B>) -> Tensor<B, 3> {
        let chosen = self.block_indices(&|| x.clone(), context, state);
        let (qkv, spec, documents) = (self.qkv.forward(x.clone(), context), self.spec(), context.documents);
        by_key(&qkv.clone(), |one_hot| {
            let qkv = with_values(&qkv, one_hot, spec.num_kv_heads);
            match &chosen {
                Some(chosen) => sieve_ops::chosen_attention(qkv, chosen.clone(), documents, spec, self.choice),
                None => sieve_ops::attention(qkv, documents, spec),
            }
        })
    }

    fn dense_weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Option<Tensor<B, 3>> {
        Some(attention_weights::dense(&self.qkv, self.spec(), x, context))
    }

    /// The blocks that `forward` chooses, as `sieve_ops::choose_key_blocks` returns them.
    fn block_indices(
        &self,
        x: &dyn Fn() -> Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        state: &PassState<B>,
    ) -> Option<Tensor<B, 4, Int>> {
        match (self.reads_all(context), self.shares) {
            (true, _) => None,
            (false, true) => Some(state.last_choice.rows(0)),
            (false, false) => {
                let (packed, documents) = (self.project(x(), context), context.documents);
                let keys = self.block_keys(&packed, documents, context.rope);
                Some(self.choose(&packed, keys.as_ref(), (documents, 0), self.spec()))
            }
        }
    }
}
