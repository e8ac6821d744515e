//! Native sparse attention (NSA, arXiv:2502.11089): compressed, selected and window branches, gated.

use super::chosen_blocks::{check_strides, chosen_words, pooled_words};
use super::dense::{grouped_flops, grouped_projections, key_and_value, output_projection};
use super::settings::{AttentionPreset, MOST_DEFAULT_BLOCKS, Settings, Sizes, choice, derived, pooled_sizes, whole};
use super::sizes::F32;
use super::{
    Activations, AttentionOp, BackwardCall, BlockPairs, Cost, Exchanged, Exported, HasFacts, HeadWidths, KeptCall,
    KeyReads, Kind, KindFacts, Launched, LayerFlops, ParamSpec, Part, times,
};
use crate::NsaBlocks;
use crate::keys::{MAX_SEQ_LEN, MAX_WIDTH, choices, keys};
use crate::model::{BranchDensity, ModelShape, window_pairs};
use crate::recipe::{ModelSection, Rules};
use serde_json::{Value, json};
use toml::Table;

choices! {
    /// How NSA makes one key (and one value) of a block.
    #[derive(Hash)]
    pub enum NsaCompression {
        /// A learned vector per position is added, then `block * head_dim -> compress_hidden_size -> ReLU -> head_dim`.
        Mlp = "mlp",
        /// The mean over the block.
        Mean = "mean",
    }
}

keys! {
    /// Sizes of native sparse attention (arXiv:2502.11089): compressed, selected and window branches, gated.
    ///
    /// Parameters of a layer, besides the projections and per-head q/k norms of grouped-query attention: the gate
    /// `[num_heads * 3, d_model]` and its bias `[num_heads * 3]`; with `shared_kv = false` two more pairs of key and
    /// value projections (the key norm is shared); with `compress = "mlp"`, once for keys and once for values, shared
    /// by all heads and without biases: positions `[compress_block_size, head_dim]`, first matrix
    /// `[compress_hidden_size, compress_block_size * head_dim]`, second matrix `[head_dim, compress_hidden_size]`.
    #[derive(Copy, Eq, Hash)]
    pub struct NsaShape {
        /// Sets the keys below but `compress_hidden_size` to the values of arXiv:2502.11089, section 4.1: blocks of 32
        /// every 16 tokens, an MLP, 16 blocks of 64, a window of 512, keys and values of each branch's own. As an
        /// override it replaces the recipe's values, and `model.layer_types`.
        text preset: Option<AttentionPreset>,
        /// Tokens of a compressed block (l).
        #[key(filled("twice `compress_stride`"), optional, size(MAX_SEQ_LEN))]
        pub compress_block_size: usize,
        /// Tokens between the starts of two compressed blocks (s); divides both block sizes.
        #[key(filled("8; 16 for rows of 2048 tokens or more"), optional, size(MAX_SEQ_LEN))]
        pub compress_stride: usize,
        /// How a block is compressed.
        #[key(filled("`\"mean\"`; `\"mlp\"` where `compress_hidden_size` is given"), optional)]
        pub compress: NsaCompression,
        /// Hidden width of the compression MLP; absent for `compress = "mean"`.
        #[key(filled("with `\"mlp\"`, twice `model.head_dim`"), size(MAX_WIDTH))]
        pub compress_hidden_size: Option<usize>,
        /// Tokens of a selected block (l').
        #[key(
            filled("twice `compress_stride`; four times for rows of 2048 tokens or more"),
            optional,
            size(MAX_SEQ_LEN)
        )]
        pub select_block_size: usize,
        /// Blocks a query selects per KV head, forced ones included (k).
        #[key(
            filled("as many as hold a quarter of `training.seq_len`, 4 to 16"),
            optional,
            within(NUM_FORCED_BLOCKS, MAX_SEQ_LEN, FORCED_BLOCKS)
        )]
        pub num_selected_blocks: usize,
        /// Keys of the window branch, in tokens.
        #[key(filled("an eighth of `training.seq_len`, at most 512"), optional, size(MAX_SEQ_LEN))]
        pub window_size: usize,
        /// Whether the three branches read the same keys and values.
        pub shared_kv: bool = true,
    }
}

/// Number of blocks that every query selects.
const NUM_FORCED_BLOCKS: usize = 3;
const FORCED_BLOCKS: &str = "the first block, the query's own and the one before are always selected";

/// Number of NSA's branches: compressed, selected, window.
pub const NUM_NSA_BRANCHES: usize = 3;

impl NsaShape {
    /// The sizes of arXiv:2502.11089, section 4.1, which does not say how wide its MLP is.
    pub fn published(compress_hidden_size: Option<usize>) -> Self {
        Self {
            compress_block_size: 32,
            compress_stride: 16,
            compress: NsaCompression::Mlp,
            compress_hidden_size,
            select_block_size: 64,
            num_selected_blocks: 16,
            window_size: 512,
            shared_kv: false,
        }
    }

    /// Sizes of the compressed and the selected blocks.
    pub fn blocks(&self) -> NsaBlocks {
        let Self { compress_block_size, compress_stride, select_block_size, num_selected_blocks, .. } = *self;
        NsaBlocks { compress_block_size, compress_stride, select_block_size, num_selected_blocks }
    }

    /// Number of key and value projections: one, or one for each branch.
    pub fn num_kv_copies(&self) -> usize {
        if self.shared_kv { 1 } else { NUM_NSA_BRANCHES }
    }

    /// Number of (query, key) pairs of one query head in a document of `seq_len` tokens, by branch: compressed,
    /// selected, window.
    ///
    /// Query t sees the compressed blocks that end at or before t; its own block up to t and `num_selected_blocks - 1`
    /// whole blocks before it; and the window.
    pub fn pairs(&self, seq_len: usize) -> [f64; NUM_NSA_BRANCHES] {
        let blocks = self.blocks();
        [blocks.compressed_pairs(seq_len), blocks.selected_pairs(seq_len), window_pairs(self.window_size, seq_len)]
    }
}

/// The largest default of the window, in tokens.
const MOST_WINDOW: i64 = 512;

impl Settings for NsaShape {
    fn example(_head_dim: usize) -> Self {
        Self::published(None)
    }

    /// Writes out the sizes that follow from others; blocks are compressed by an MLP if its width is given.
    fn resolve(attention: &mut Table, sizes: Sizes) {
        pooled_sizes(attention, sizes, MOST_DEFAULT_BLOCKS);
        derived(attention, "window_size", || Some(sizes.part_of_row(8)?.min(MOST_WINDOW)));
        let compress =
            if attention.contains_key("compress_hidden_size") { NsaCompression::Mlp } else { NsaCompression::Mean };
        choice(attention, "compress", compress);
        if attention.get("compress").and_then(toml::Value::as_str) == Some("mlp") {
            derived(attention, "compress_hidden_size", || whole(sizes.head_dim?.checked_mul(2)?));
        }
    }

    /// The strides divide the blocks, and `compress_hidden_size` goes with `compress = "mlp"` alone.
    fn check(&self, _model: Option<&ModelSection>, rules: &mut Rules<'_>) {
        check_strides(self.compress_stride, self.compress_block_size, self.select_block_size, rules);
        match (self.compress, self.compress_hidden_size) {
            (NsaCompression::Mlp, hidden) => rules.require(
                hidden.is_some(),
                "attention.compress_hidden_size",
                "is missing; compress = \"mlp\" needs it",
                "give the hidden width, like 192, or set compress = \"mean\"",
            ),
            (NsaCompression::Mean, hidden) => rules.require(
                hidden.is_none(),
                "attention.compress_hidden_size",
                "does not go with compress = \"mean\"",
                "leave it out, or set compress = \"mlp\"",
            ),
        }
    }
}

impl HasFacts for NsaShape {
    const FACTS: KindFacts = KindFacts {
        no_shared_choice: "choose blocks by the scores of their own compressed branch, which they need anyway",
        has_one_order: true,
        ..KindFacts::GROUPED
    };
}

impl Kind for NsaShape {
    /// A dense layer's projections, two further pairs of K and V unless shared, compressing MLPs, and gates.
    fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec> {
        let (d_model, kv) = (layer.d_model, layer.kv_width());
        let mut all = grouped_projections(layer);
        if !self.shared_kv {
            for branch in ["compress", "select"] {
                let [k, v] = ["k", "v"].map(|part| format!("self_attn.{branch}_{part}_proj.weight"));
                let ours = format!("self_attn.{branch}_kv_proj.weight");
                all.push(ParamSpec::packed(&ours, &[(&k, kv), (&v, kv)], d_model, Part::Attention));
            }
        }
        if let Some(hidden) = self.compress_hidden_size {
            let (block, head_dim) = (self.compress_block_size, layer.head_dim);
            for part in ["k_compress", "v_compress"] {
                let name = |name: &str| format!("self_attn.{part}.{name}");
                let gemm = |ours: &str, dims| ParamSpec::gemm(&name(ours), &name(ours), dims, Part::Branches);
                let positions = name("positions");
                all.push(ParamSpec::vectors(&positions, &positions, &[block, head_dim], Part::Branches));
                all.push(gemm("up_proj.weight", [hidden, block * head_dim]));
                all.push(gemm("down_proj.weight", [head_dim, hidden]));
            }
        }
        let num_gates = layer.num_heads * NUM_NSA_BRANCHES;
        let (weight, bias) = ("self_attn.gate_proj.weight", "self_attn.gate_proj.bias");
        all.push(ParamSpec::gemm(weight, weight, [num_gates, d_model], Part::Branches));
        all.push(ParamSpec::vectors("self_attn.gate_bias", bias, &[num_gates], Part::Branches));
        all.push(output_projection(layer));
        all
    }

    fn window(&self) -> Option<usize> {
        Some(self.window_size)
    }

    fn set_window(&mut self, window_size: usize) {
        self.window_size = window_size;
    }

    fn pairs(&self, seq_len: usize) -> f64 {
        NsaShape::pairs(self, seq_len).iter().sum()
    }

    fn label(&self) -> Option<String> {
        let (count, size) = (self.num_selected_blocks, self.select_block_size);
        Some(format!("{count} x {size} selected, window {}", self.window_size))
    }

    fn block_pairs(&self) -> Option<BlockPairs> {
        let blocks = self.blocks();
        Some(BlockPairs { chosen: blocks, pooled: blocks, window_size: self.window_size, halves_of_pooled: 2 })
    }

    fn densities(&self, seq_len: usize) -> Vec<BranchDensity> {
        let [compressed, selected, window] = NsaShape::pairs(self, seq_len);
        let of_keys = |branch, pairs| BranchDensity::of_keys(Some(branch), pairs, seq_len);
        // Compressed blocks are means of keys: reading all of them is not reading every key.
        let compressed = BranchDensity { reads_every_key: false, ..of_keys("compressed", compressed) };
        vec![of_keys("selected", selected), of_keys("window", window), compressed]
    }

    fn reads_words(&self) -> Option<String> {
        let blocks = self.num_selected_blocks.saturating_mul(self.select_block_size);
        Some(if self.window_size >= blocks {
            format!("attention.window_size is {}", self.window_size)
        } else {
            chosen_words(blocks)
        })
    }

    fn form_words(&self, _layer: &ModelShape) -> Vec<String> {
        let by = match self.compress {
            NsaCompression::Mean => "mean",
            NsaCompression::Mlp => "mlp",
        };
        let own = (!self.shared_kv).then(|| "each branch has keys of its own".to_owned());
        let pooled = pooled_words(self.compress_block_size, self.compress_stride, by);
        std::iter::once(pooled).chain(own).collect()
    }
}

impl Cost for NsaShape {
    /// A dense layer's, with further projections of K and V, the gates, and the MLPs that compress blocks.
    fn flops(&self, layer: &ModelShape) -> LayerFlops {
        let (d_model, kv_width, head_dim) = (layer.d_model as f64, layer.kv_width() as f64, layer.head_dim as f64);
        let grouped = grouped_flops(layer);
        let more_copies = (self.num_kv_copies() - 1) as f64;
        let gates = d_model * (NUM_NSA_BRANCHES * layer.num_heads) as f64;
        // A block begins every `compress_stride` tokens; each KV head compresses its keys and its values.
        let compress = self.compress_hidden_size.unwrap_or(0) as f64
            * (self.compress_block_size as f64 * head_dim + head_dim)
            * 2.0
            * layer.num_kv_heads as f64
            / self.compress_stride as f64;
        LayerFlops { weights: grouped.weights + 2.0 * more_copies * d_model * kv_width + gates + compress, ..grouped }
    }

    /// K and V before and after RoPE, the sum of their three gradients, compressed blocks, three branches and their
    /// gates.
    fn extra_traffic(&self, layer: &ModelShape) -> f64 {
        let (q, kv) = (layer.q_width() as f64, layer.kv_width() as f64);
        14.0 * (q + 2.0 * kv) + 22.0 * q + 12.0 * kv
    }

    /// Per token. Packed q, k, v before and after norm and rotation: one pair for all branches, or one for each. The
    /// normed but unrotated tensor, from which blocks are compressed, is not kept.
    fn activations(&self, call: &KeptCall<'_>) -> Activations {
        let layer = call.layer;
        let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
        let (heads, kv_heads) = (layer.num_heads as u64, layer.num_kv_heads as u64);
        let branches = NUM_NSA_BRANCHES as u64;
        let stride = self.compress_stride as u64;
        let kept_by_mlps = match self.compress_hidden_size {
            // The two MLPs keep their inputs, the concatenated keys and values of each block, and their hidden layers
            // before and after the ReLU.
            Some(hidden) => {
                let inputs = 4 * kv * self.compress_block_size as u64;
                let hidden = 4 * kv_heads * hidden as u64;
                (inputs + hidden) / stride
            }
            None => 0,
        };
        // For each stride of tokens a compressed key and value, in two copies.
        let compressed = 4 * kv / stride + kept_by_mlps;
        let packs = 2 * self.num_kv_copies() as u64 * (q + 2 * kv);
        let lists = if call.keeps_choice_lists { 2 * F32 * kv_heads * self.num_selected_blocks as u64 } else { 0 };
        let (outputs_and_gates, mixed_output) = (branches * (q + heads), q);
        let log_sum_exps = branches * F32 * heads;
        Activations { values: packs + outputs_and_gates + mixed_output + compressed, bytes: log_sum_exps + lists }
    }

    /// Row statistics, f32 sums of dk and dv, and the larger need of the compressed and the selected branch.
    fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64 {
        let (q, kv) = (call.layer.q_width() as u64, call.layer.kv_width() as u64);
        let kv_heads = call.layer.num_kv_heads;
        let tokens = call.tokens();
        let dk_and_dv_sums = times(tokens, 2 * F32 * kv);
        // The compressed branch needs K, V and their gradients with a row per token, f32 sums of dq, and key lists.
        let queries_with_sums = call.num_rows as u64 * call.sizes.dq_sum_queries(call.seq_len);
        let slots = self.blocks().num_slots(call.seq_len) as u64;
        let lists = 2 * F32 * slots * kv_heads as u64 / call.sizes.queries_of_list();
        let compressed = times(tokens, 4 * call.value_bytes * kv + lists) + times(queries_with_sums, F32 * q);
        let num_blocks = self.num_selected_blocks;
        let selected = call.choice_parts(num_blocks, (num_blocks * kv_heads) as u64);
        // The two branches run one after the other.
        call.row_stats() + dk_and_dv_sums + compressed.max(selected)
    }

    /// K and V of every token, of every compressed block, and the un-rotated keys of the block that is not full.
    fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        let kv = key_and_value(layer, value_bytes);
        // K and V of the compressed and selected branches grow; the window branch's own copy does not.
        let growing_copies = if self.shared_kv { 1 } else { NUM_NSA_BRANCHES as u64 - 1 };
        let window_copies = self.num_kv_copies() as u64 - growing_copies;
        let window = window_copies * kv * self.window_size.min(seq_len) as u64;
        let blocks = self.blocks().num_compressed_blocks(seq_len) as u64 * kv;
        // Only keys, half of `kv`.
        let open_block = kv / 2 * self.compress_block_size as u64;
        let growing = growing_copies * kv;
        [growing + kv / self.compress_stride as u64, growing * seq_len as u64 + window + blocks + open_block]
    }

    /// K and V of every token in the selected and the window branch, those before compression, and of every block.
    fn cache_in_row(&self, layer: &ModelShape, tokens: usize, value_bytes: u64) -> u64 {
        let blocks = self.blocks().num_compressed_blocks(tokens);
        key_and_value(layer, value_bytes) * (3 * tokens + blocks) as u64
    }

    /// One packed q, k, v for all branches, or one for each branch with its own keys; and the gates. The activations
    /// count the branches' outputs already.
    fn exchanged(&self, layer: &ModelShape) -> Exchanged {
        let is_mean = self.compress == NsaCompression::Mean;
        let tensors = match (self.shared_kv, is_mean) {
            (true, true) => 1,
            (true, false) => 2,
            (false, _) => NUM_NSA_BRANCHES as u64,
        };
        let packed = Exchanged::packed(layer);
        let gates = (NUM_NSA_BRANCHES * layer.num_heads) as u64;
        Exchanged { split: tensors * packed.split + gates, kept_outputs: 0, ..packed }
    }

    fn cached_window(&self) -> Option<usize> {
        Some(self.window_size)
    }
}

impl Launched for NsaShape {
    fn attended_blocks(&self) -> Option<NsaBlocks> {
        Some(self.blocks())
    }

    fn reads(&self) -> &'static [KeyReads] {
        &[KeyReads::Blocks, KeyReads::Neighbours]
    }

    fn ops(&self, _layer: &ModelShape) -> &'static [AttentionOp] {
        &[AttentionOp::Compression, AttentionOp::Selection, AttentionOp::SelectedAndWindow]
    }

    fn block_gap(&self, head_dim: usize, group_size: usize) -> Option<(String, &'static str)> {
        self.blocks().cuda_gap(head_dim, group_size)
    }

    fn gpu_gap(&self, layer: &ModelShape, _widths: HeadWidths) -> Option<String> {
        let gap = self.block_gap(layer.head_dim, layer.group_size());
        gap.map(|(got, supported)| format!("{got}, the kernels of nsa take {supported}"))
    }
}

impl Exported for NsaShape {
    fn config_keys(&self, _layer: &ModelShape) -> Value {
        json!(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nsa_pairs_equal_the_count_query_by_query() {
        for (l, s, select, k, w) in [(4, 2, 4, 3, 5), (8, 4, 4, 3, 1), (4, 4, 8, 4, 9)] {
            let shape = NsaShape {
                compress_block_size: l,
                compress_stride: s,
                compress: NsaCompression::Mean,
                compress_hidden_size: None,
                select_block_size: select,
                num_selected_blocks: k,
                window_size: w,
                shared_kv: true,
            };
            for seq_len in 0..90usize {
                // Compressed blocks that have ended, tokens of the last `k` blocks, and the window, up to token `t`.
                let mut counted = [0usize; 3];
                for t in 0..seq_len {
                    let blocks = shape.blocks().num_compressed_blocks(seq_len);
                    counted[0] += (0..blocks).filter(|c| c * s + l - 1 <= t).count();
                    let own = t / select;
                    let first = (own + 1).saturating_sub(k);
                    counted[1] += (own - first) * select + t % select + 1;
                    counted[2] += (t + 1).min(w);
                }
                assert_eq!(shape.pairs(seq_len), counted.map(|count| count as f64), "{shape:?} {seq_len}");
            }
        }
    }
}
