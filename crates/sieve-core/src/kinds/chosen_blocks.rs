//! The common part of the kinds of attention that read all keys of chosen blocks.

use super::dense::{Dense, grouped_flops, grouped_projections, head_norms, key_and_value, output_projection};
use super::settings::{self, Sizes, derived, num_blocks};
use super::sizes::F32;
use super::{
    Activations, AttentionOp, BackwardCall, BlockPairs, Cost, Exchanged, Exported, HeadWidths, Indexer, KeptCall,
    KeyReads, Kind, Launched, LayerFlops, ParamSpec, Part, times,
};
use crate::NsaBlocks;
use crate::model::{BranchDensity, ModelShape};
use crate::recipe::Rules;
use crate::{BlockChoice, SCORES_AT_ONCE};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Debug;
use toml::Table;

pub(super) const MOST_BLOCKS: &str = "a query chooses 64 blocks at most; larger blocks hold more tokens";
/// The most blocks that a query chooses.
pub(crate) const MAX_CHOSEN_BLOCKS: usize = 64;

/// Sets missing sizes of blocks without pooled keys.
pub(super) fn block_sizes(attention: &mut Table, sizes: Sizes) {
    derived(attention, "select_block_size", || Some(if sizes.is_long() { 64 } else { 16 }));
    num_blocks(attention, sizes, settings::MOST_DEFAULT_BLOCKS);
}

/// Checks that attention can read a block in equal pieces of at most 64 tokens.
pub(super) fn check_pieces(select_block_size: usize, rules: &mut Rules<'_>) {
    rules.require(
        select_block_size <= 64 || select_block_size.is_multiple_of(64),
        "attention.select_block_size",
        format!("is {select_block_size}, more than 64 and no multiple of it"),
        format!("{} is; larger blocks are read 64 tokens at a time", select_block_size / 64 * 64),
    );
}

/// Checks that block sizes are multiples of the stride of pooled keys.
pub(super) fn check_strides(
    stride: usize,
    compress_block_size: usize,
    select_block_size: usize,
    rules: &mut Rules<'_>,
) {
    for (key, size) in
        [("attention.compress_block_size", compress_block_size), ("attention.select_block_size", select_block_size)]
    {
        rules.require(
            stride == 0 || size.is_multiple_of(stride),
            key,
            format!("is {size}, not a multiple of compress_stride = {stride}"),
            format!(
                "{} is; block sizes are multiples of the stride so that compressed blocks map onto selected ones",
                size.div_ceil(stride.max(1)).saturating_mul(stride)
            ),
        );
    }
}

/// A kind whose queries read all keys of the blocks that they choose: what differs between such kinds. All else,
/// [`Kind`], [`Cost`], [`Launched`] and [`Exported`], follows from it below.
pub(super) trait ChoosesBlocks: Copy + Debug + Serialize {
    /// Name of the kind in recipes.
    const NAME: &'static str;

    /// How queries choose blocks.
    fn choice(&self) -> BlockChoice;

    /// [`Kind::indexer`].
    fn indexer(&self) -> Option<Indexer> {
        None
    }

    /// [`Kind::set_index_warmup`].
    fn set_index_warmup(&mut self, _warms_up: bool) {}

    /// [`Kind::form_words`].
    fn form_words(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The choice of a kind whose queries choose blocks.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    /// How they choose.
    choice: BlockChoice,
    /// Whether queries read all keys while an indexer learns.
    reads_all: bool,
    /// Whether layers that read its choice train an indexer too.
    learns_from_shared: bool,
}

impl<K: ChoosesBlocks> From<&K> for Chosen {
    fn from(kind: &K) -> Self {
        let indexer = kind.indexer();
        Self {
            choice: kind.choice(),
            reads_all: indexer.is_some_and(|indexer| indexer.warms_up),
            learns_from_shared: indexer.is_some_and(|indexer| indexer.learns_from_shared),
        }
    }
}

impl Chosen {
    /// Whether this layer has an indexer: one that reads an earlier layer's choice has none.
    fn has_indexer(&self, layer: &ModelShape) -> bool {
        self.choice.has_indexer() && !layer.is_shared_layer(0)
    }

    /// Whether the layer has the loss of an indexer, its own or the one whose choice it reads.
    fn has_index_loss(&self, layer: &ModelShape) -> bool {
        self.has_indexer(layer) || self.learns_from_shared
    }

    /// The projections of queries, keys and values, the indexer's if the layer has one, and the output's.
    fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec> {
        let mut all = grouped_projections(layer);
        if self.has_indexer(layer) {
            let parts = [
                ("self_attn.index_q_proj.weight", layer.kv_width()),
                ("self_attn.index_k_proj.weight", layer.head_dim),
            ];
            all.push(ParamSpec::packed("self_attn.indexer.proj.weight", &parts, layer.d_model, Part::Indexer));
            let norms = head_norms("index_", "indexer", layer.head_dim);
            all.extend(norms.map(|norm| ParamSpec { part: Part::Indexer, ..norm }));
        }
        all.push(output_projection(layer));
        all
    }

    fn pairs(&self, seq_len: usize) -> f64 {
        if self.reads_all { Dense.pairs(seq_len) } else { self.choice.pairs(seq_len) }
    }

    /// Pairs whose values are read: without the pooled keys, which have a score alone.
    fn read_pairs(&self, seq_len: usize) -> f64 {
        if self.reads_all { Dense.pairs(seq_len) } else { self.choice.blocks.selected_pairs(seq_len) }
    }

    /// A dense layer's and, if the layer has an indexer, the indexer's: its projections of an index query for each KV
    /// head and of one index key, and their products for each scored key.
    fn flops(&self, layer: &ModelShape) -> LayerFlops {
        let grouped = grouped_flops(layer);
        let (kv_width, head_dim) = (layer.kv_width() as f64, layer.head_dim as f64);
        // QSA's stride is its block, which has one score; MSA's is 1.
        let per_key = kv_width / self.choice.blocks.compress_stride as f64;
        let per_learned_key = if self.has_index_loss(layer) { per_key } else { 0.0 };
        if !self.has_indexer(layer) {
            return LayerFlops { per_learned_key, ..grouped };
        }
        let weights = grouped.weights + layer.d_model as f64 * (kv_width + head_dim);
        LayerFlops { weights, per_scored_key: per_key, per_learned_key, ..grouped }
    }

    /// The ops of a layer; none for one that uses an earlier layer's choice, because that layer has named the same ops.
    fn ops(&self, layer: &ModelShape) -> &'static [AttentionOp] {
        if layer.is_shared_layer(0) {
            return &[];
        }
        if self.choice.pools_for_all_heads() {
            &[AttentionOp::PooledChoice, AttentionOp::ChosenAttention]
        } else {
            &[AttentionOp::Choice, AttentionOp::ChosenAttention]
        }
    }

    /// Number of blocks chosen for a token, summed over its choices: one for each head, or for each group of heads.
    fn num_choices(&self, layer: &ModelShape) -> u64 {
        let choosers = self.choice.choices_per_token([layer.num_heads, layer.num_kv_heads]);
        (choosers * self.choice.attended().num_selected_blocks) as u64
    }

    /// Packed q, k, v before and after norm and rotation, and the output; the chosen blocks, and on a GPU lists of
    /// them. For an indexer also its projection and two packed tensors.
    fn activations(&self, call: &KeptCall<'_>) -> Activations {
        let layer = call.layer;
        let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
        let choices = self.num_choices(layer);
        let indexer = if self.has_indexer(layer) { 3 * (kv + 2 * layer.head_dim as u64) } else { 0 };
        let lists = if call.keeps_choice_lists { 2 * choices } else { 0 };
        Activations {
            values: 2 * (q + 2 * kv) + indexer + q,
            bytes: F32 * layer.num_heads as u64 + F32 * (choices + lists),
        }
    }

    /// Row statistics, f32 sums of dk and dv, K and V where they are repeated, the indexer's loss, and partial dq.
    fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64 {
        let (layer, choice) = (call.layer, self.choice);
        let q = layer.q_width() as u64;
        let (tokens, value_bytes) = (call.tokens(), call.value_bytes);
        // `repeated`: K and V repeated for each choice, and f32 sums of their gradients.
        let choosers = choice.choices_per_token([layer.num_heads, layer.num_kv_heads]);
        let kv = (choosers * layer.head_dim) as u64;
        let repeated =
            if choosers == layer.num_kv_heads { 0 } else { times(tokens, 2 * (q + 2 * kv) * value_bytes + F32 * kv) };
        let parts = call.choice_parts(choice.attended().num_selected_blocks, self.num_choices(layer));
        // The indexer's loss runs attention twice, with the model's heads and with the indexer's: q, k, v, the output
        // in f32, and the gradients.
        let indexer = match self.has_index_loss(layer) {
            // With one pooled key a block (QSA), the loss takes some queries at a time: so many that the logits of one
            // KV head's query heads are at most SCORES_AT_ONCE. Six f32 tensors of that size are counted: the logits,
            // the probabilities and temporaries.
            true if choice.pools_for_all_heads() => times(6 * SCORES_AT_ONCE as u64, F32),
            true => {
                let (model_qkv, indexer_qkv) = (q + 2 * kv, 3 * kv);
                times(tokens, (2 * value_bytes + F32) * (model_qkv + indexer_qkv))
            }
            false => 0,
        };
        let dk_and_dv_sums = times(tokens, 2 * F32 * kv);
        call.row_stats() + dk_and_dv_sums + repeated + indexer + parts
    }

    /// K and V of every token, and the pooled keys; an indexer's key of each token.
    fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        let (kv, tokens) = (key_and_value(layer, value_bytes), seq_len as u64);
        // This layer uses an earlier layer's choice, so it has no pooled keys.
        if layer.is_shared_layer(0) {
            return [kv, kv * tokens];
        }
        let choice = self.choice;
        let (stride, num_pooled) = if choice.has_indexer() {
            (1, seq_len)
        } else {
            (choice.blocks.compress_stride, choice.blocks.num_compressed_blocks(seq_len))
        };
        let [_query_heads, key_heads] = choice.scored_heads([layer.num_heads, layer.num_kv_heads]);
        let pooled_key = (key_heads * layer.head_dim) as u64 * value_bytes;
        [kv + pooled_key / stride as u64, kv * tokens + num_pooled as u64 * pooled_key]
    }

    /// The packed heads; and of an indexer its queries, one head for each KV head, and its one key head and value head,
    /// which all processes get.
    fn exchanged(&self, layer: &ModelShape) -> Exchanged {
        let packed = Exchanged::packed(layer);
        if self.choice.has_indexer() {
            let shared = 2 * layer.head_dim as u64;
            Exchanged { split: packed.split + layer.kv_width() as u64, shared, kept_shared: shared, ..packed }
        } else {
            packed
        }
    }
}

/// Words for the recipe's keys of chosen blocks that hold `tokens` tokens.
pub(super) fn chosen_words(tokens: usize) -> String {
    format!("attention.num_selected_blocks of attention.select_block_size hold {tokens} tokens")
}

/// Words for pooled keys of `size` tokens every `stride`, made by a mean or an MLP.
pub(super) fn pooled_words(size: usize, stride: usize, by: &str) -> String {
    format!("{size} tokens compressed by {by} every {stride}")
}

impl<K: ChoosesBlocks> Kind for K {
    fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec> {
        Chosen::from(self).parameters(layer)
    }

    fn pairs(&self, seq_len: usize) -> f64 {
        Chosen::from(self).pairs(seq_len)
    }

    fn densities(&self, seq_len: usize) -> Vec<BranchDensity> {
        vec![BranchDensity::of_keys(None, Chosen::from(self).read_pairs(seq_len), seq_len)]
    }

    fn indexer(&self) -> Option<Indexer> {
        ChoosesBlocks::indexer(self)
    }

    fn set_index_warmup(&mut self, warms_up: bool) {
        ChoosesBlocks::set_index_warmup(self, warms_up);
    }

    fn block_choice(&self) -> Option<BlockChoice> {
        Some(self.choice())
    }

    fn block_pairs(&self) -> Option<BlockPairs> {
        let choice = self.choice();
        Some(BlockPairs {
            chosen: choice.attended(),
            pooled: choice.blocks,
            window_size: 0,
            halves_of_pooled: if choice.has_indexer() { 0 } else { 1 },
        })
    }

    fn label(&self) -> Option<String> {
        let blocks = self.choice().blocks;
        Some(format!("{} x {} selected", blocks.num_selected_blocks, blocks.select_block_size))
    }

    fn form_words(&self, _layer: &ModelShape) -> Vec<String> {
        ChoosesBlocks::form_words(self)
    }

    fn reads_words(&self) -> Option<String> {
        let blocks = self.choice().blocks;
        Some(chosen_words(blocks.num_selected_blocks.saturating_mul(blocks.select_block_size)))
    }
}

impl<K: ChoosesBlocks> Cost for K {
    fn flops(&self, layer: &ModelShape) -> LayerFlops {
        Chosen::from(self).flops(layer)
    }

    fn activations(&self, call: &KeptCall<'_>) -> Activations {
        Chosen::from(self).activations(call)
    }

    fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64 {
        Chosen::from(self).backward_buffers(call)
    }

    fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        Chosen::from(self).cache(layer, seq_len, value_bytes)
    }

    fn exchanged(&self, layer: &ModelShape) -> Exchanged {
        Chosen::from(self).exchanged(layer)
    }
}

impl<K: ChoosesBlocks> Launched for K {
    fn reads(&self) -> &'static [KeyReads] {
        &[KeyReads::Blocks]
    }

    fn ops(&self, layer: &ModelShape) -> &'static [AttentionOp] {
        Chosen::from(self).ops(layer)
    }

    fn attended_kv_heads(&self, heads: [usize; 2]) -> usize {
        self.choice().choices_per_token(heads)
    }

    fn attended_blocks(&self) -> Option<NsaBlocks> {
        Some(self.choice().attended())
    }

    fn block_gap(&self, head_dim: usize, group_size: usize) -> Option<(String, &'static str)> {
        self.choice().cuda_gap(head_dim, group_size)
    }

    fn gpu_gap(&self, layer: &ModelShape, _widths: HeadWidths) -> Option<String> {
        let gap = self.block_gap(layer.head_dim, layer.group_size());
        gap.map(|(got, supported)| format!("{got}, the kernels of {} take {supported}", K::NAME))
    }
}

impl<K: ChoosesBlocks> Exported for K {
    fn config_keys(&self, _layer: &ModelShape) -> Value {
        let mut keys = json!(self);
        if let Some(keys) = keys.as_object_mut() {
            // Only training uses these.
            let of_training = ["index_loss_weight", "index_warmup", "index_loss_of_shared"];
            keys.retain(|key, _| !of_training.contains(&key.as_str()));
        }
        keys
    }
}
