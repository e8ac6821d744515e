//! The common part of the kinds of attention that read all keys of chosen blocks.

use super::dense::{
    Dense, dense_pairs_rate, grouped_flops, grouped_projections, head_norms, key_and_value, output_projection,
};
use super::settings::{self, Sizes, derived, num_blocks};
use super::sizes::F32;
use super::{Activations, AttentionOp, BackwardCall, Exchanged, KeptCall, Kind, LayerFlops, ParamSpec, Part, times};
use crate::block_choice::{BlockChoice, SCORES_AT_ONCE};
use crate::model::ModelShape;
use crate::recipe::Rules;
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

/// Share of the GPU's peak FLOP/s that attention over chosen blocks reaches, with the time of choosing blocks, making
/// key lists and joining partial results: with one choice for each group of heads.
pub(super) const CHOSEN_BY_GROUP: f64 = 0.22;
/// The share of [`CHOSEN_BY_GROUP`], but with one choice for each head.
pub(super) const CHOSEN_BY_HEAD: f64 = 0.14;

/// A kind whose queries choose blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chosen {
    /// How they choose.
    pub(super) choice: BlockChoice,
    /// Whether queries read all keys while an indexer learns.
    pub(super) reads_all: bool,
    /// Name of the kind in recipes.
    pub(super) name: &'static str,
    /// Share of the GPU's peak FLOP/s that attention over chosen blocks reaches.
    pub(super) rate: f64,
}

impl Chosen {
    /// Whether this layer has an indexer: one that reads an earlier layer's choice has none.
    fn has_indexer(&self, layer: &ModelShape) -> bool {
        self.choice.has_indexer() && !layer.is_shared_layer(0)
    }

    /// The projections of queries, keys and values, the indexer's if the layer has one, and the output's.
    pub(super) fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec> {
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

    pub(super) fn pairs(&self, seq_len: usize) -> f64 {
        if self.reads_all { Dense.pairs(seq_len) } else { self.choice.pairs(seq_len) }
    }

    /// Pairs whose values are read: without the pooled keys, which have a score alone.
    pub(super) fn read_pairs(&self, seq_len: usize) -> f64 {
        if self.reads_all { Dense.pairs(seq_len) } else { self.choice.blocks.selected_pairs(seq_len) }
    }

    /// A dense layer's and, if the layer has an indexer, the indexer's: its projections of an index query for each KV
    /// head and of one index key, and their products for each scored key.
    pub(super) fn flops(&self, layer: &ModelShape) -> LayerFlops {
        let grouped = grouped_flops(layer);
        if !self.has_indexer(layer) {
            return grouped;
        }
        let (kv_width, head_dim) = (layer.kv_width() as f64, layer.head_dim as f64);
        LayerFlops {
            weights: grouped.weights + layer.d_model as f64 * (kv_width + head_dim),
            // QSA's stride is its block, which has one score; MSA's is 1.
            per_scored_key: kv_width / self.choice.blocks.compress_stride as f64,
            ..grouped
        }
    }

    /// The ops of a layer; none for one that uses an earlier layer's choice, because that layer has named the same ops.
    pub(super) fn ops(&self, layer: &ModelShape) -> &'static [AttentionOp] {
        if layer.is_shared_layer(0) {
            return &[];
        }
        match self.choice.pools_for_all_heads() {
            true => &[AttentionOp::PooledChoice, AttentionOp::ChosenAttention],
            false => &[AttentionOp::Choice, AttentionOp::ChosenAttention],
        }
    }

    pub(super) fn gpu_gap(&self, layer: &ModelShape) -> Option<String> {
        let name = self.name;
        let gap = self.choice.cuda_gap(layer.head_dim, layer.group_size());
        gap.map(|(got, supported)| format!("{got}, the kernels of {name} take {supported}"))
    }

    pub(super) fn pairs_rate(&self, seq_len: usize) -> f64 {
        if self.reads_all { dense_pairs_rate(seq_len) } else { self.rate }
    }

    /// Number of blocks chosen for a token, summed over its choices: one for each head, or for each group of heads.
    fn num_choices(&self, layer: &ModelShape) -> u64 {
        let choosers = self.choice.choices_per_token([layer.num_heads, layer.num_kv_heads]);
        (choosers * self.choice.attended().num_selected_blocks) as u64
    }

    /// Packed q, k, v before and after norm and rotation, and the output; the chosen blocks, and on a GPU lists of
    /// them. For an indexer also its projection and two packed tensors.
    pub(super) fn activations(&self, call: &KeptCall<'_>) -> Activations {
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
    pub(super) fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64 {
        let (layer, choice) = (call.layer, self.choice);
        let q = layer.q_width() as u64;
        let (tokens, value_bytes) = (call.tokens(), call.value_bytes);
        // `repeated`: K and V repeated for each choice, and f32 sums of their gradients.
        let choosers = choice.choices_per_token([layer.num_heads, layer.num_kv_heads]);
        let kv = (choosers * layer.head_dim) as u64;
        let repeated = match choosers == layer.num_kv_heads {
            true => 0,
            false => times(tokens, 2 * (q + 2 * kv) * value_bytes + F32 * kv),
        };
        let parts = call.choice_parts(choice.attended().num_selected_blocks, self.num_choices(layer));
        // The indexer's loss runs attention twice, with the model's heads and with the indexer's: q, k, v, the output
        // in f32, and the gradients.
        let indexer = match self.has_indexer(layer) {
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
    pub(super) fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        let (kv, tokens) = (key_and_value(layer, value_bytes), seq_len as u64);
        // This layer uses an earlier layer's choice, so it has no pooled keys.
        if layer.is_shared_layer(0) {
            return [kv, kv * tokens];
        }
        let choice = self.choice;
        let (stride, num_pooled) = match choice.has_indexer() {
            true => (1, seq_len),
            false => (choice.blocks.compress_stride, choice.blocks.num_compressed_blocks(seq_len)),
        };
        let [_query_heads, key_heads] = choice.scored_heads([layer.num_heads, layer.num_kv_heads]);
        let pooled_key = (key_heads * layer.head_dim) as u64 * value_bytes;
        [kv + pooled_key / stride as u64, kv * tokens + num_pooled as u64 * pooled_key]
    }

    pub(super) fn exchanged(&self, layer: &ModelShape) -> Exchanged {
        let packed = Exchanged::packed(layer);
        match self.choice.has_indexer() {
            true => {
                let shared = 2 * layer.head_dim as u64;
                Exchanged { split: packed.split + layer.kv_width() as u64, shared, kept_shared: shared, ..packed }
            }
            false => packed,
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

/// The methods of [`Kind`] that a kind of chosen blocks takes from its [`Chosen`].
macro_rules! as_chosen_blocks {
    () => {
        fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec> {
            self.chosen().parameters(layer)
        }

        fn pairs(&self, seq_len: usize) -> f64 {
            self.chosen().pairs(seq_len)
        }

        fn flops(&self, layer: &ModelShape) -> LayerFlops {
            self.chosen().flops(layer)
        }

        fn block_choice(&self) -> Option<BlockChoice> {
            Some(self.choice())
        }

        fn label(&self) -> Option<String> {
            let blocks = self.choice().blocks;
            Some(format!("{} x {} selected", blocks.num_selected_blocks, blocks.select_block_size))
        }

        fn densities(&self, seq_len: usize) -> Vec<BranchDensity> {
            vec![BranchDensity::of_keys(None, self.chosen().read_pairs(seq_len), seq_len)]
        }

        fn hides_keys(&self) -> bool {
            !self.chosen().reads_all
        }

        fn reads_words(&self) -> Option<String> {
            Some(chosen_words(self.num_selected_blocks.saturating_mul(self.select_block_size)))
        }

        fn chooses_blocks(&self) -> bool {
            true
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

        fn attended_blocks(&self) -> Option<NsaBlocks> {
            Some(self.choice().attended())
        }

        fn reads(&self) -> &'static [KeyReads] {
            &[KeyReads::Blocks]
        }

        fn ops(&self, layer: &ModelShape) -> &'static [AttentionOp] {
            self.chosen().ops(layer)
        }

        fn attended_kv_heads(&self, heads: [usize; 2]) -> usize {
            self.choice().choices_per_token(heads)
        }

        fn block_gap(&self, head_dim: usize, group_size: usize) -> Option<(String, &'static str)> {
            self.choice().cuda_gap(head_dim, group_size)
        }

        fn gpu_gap(&self, layer: &ModelShape, _widths: HeadWidths) -> Option<String> {
            self.chosen().gpu_gap(layer)
        }

        fn pairs_rate(&self, seq_len: usize) -> f64 {
            self.chosen().pairs_rate(seq_len)
        }

        fn activations(&self, call: &KeptCall<'_>) -> Activations {
            self.chosen().activations(call)
        }

        fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64 {
            self.chosen().backward_buffers(call)
        }

        fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
            self.chosen().cache(layer, seq_len, value_bytes)
        }

        fn exchanged(&self, layer: &ModelShape) -> Exchanged {
            self.chosen().exchanged(layer)
        }

        fn config_keys(&self, _layer: &ModelShape) -> Value {
            let mut keys = json!(self);
            if let Some(keys) = keys.as_object_mut() {
                // Only training uses these two.
                keys.retain(|key, _| !["index_loss_weight", "index_warmup"].contains(&key.as_str()));
            }
            keys
        }
    };
}
pub(super) use as_chosen_blocks;
