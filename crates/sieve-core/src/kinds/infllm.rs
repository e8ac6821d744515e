//! InfLLM-V2 (arXiv:2509.24663): queries read the blocks whose pooled keys are most probable; no parameter of its own.

use super::chosen_blocks::{ChoosesBlocks, MAX_CHOSEN_BLOCKS, MOST_BLOCKS, check_pieces, check_strides, pooled_words};
use super::settings::{AttentionPreset, Settings, Sizes, derived, number, pooled_sizes};
use super::{HasFacts, KindFacts};
use crate::NsaBlocks;
use crate::keys::{MAX_SEQ_LEN, keys};
use crate::recipe::{ModelSection, Rules};
use crate::{BlockChoice, ChoiceRule, ForcedBlocks};
use toml::Table;

keys! {
    /// Sizes of InfLLM-V2 (arXiv:2509.24663): one exact attention over the tokens of a few blocks, without a parameter
    /// of its own, so a dense model's weights fit this kind unchanged.
    ///
    /// `c_m` is the mean of the keys `[s m, s m + l)` of a document; `p_m = softmax_m(q . c_m / sqrt(head_dim))` over
    /// the pooled keys that have ended, summed over the heads of a group; a block's score is the largest `p_m` of the
    /// pooled keys that overlap it. A query of KV head g reads the document's first block, its own and those before it
    /// up to `num_local_blocks`, and those with the largest scores, `num_selected_blocks` in all. The probabilities are
    /// exact, where the paper takes their sum from a coarser pooling.
    #[derive(Copy, Eq, Hash)]
    pub struct InfllmV2Shape {
        /// Sets the keys below to the values of arXiv:2509.24663: means of 32 every 16 tokens, 64 blocks of 64, 32 of
        /// them local. (Published inference code reads the local ones beside 64 others.) As an override it replaces the
        /// recipe's values, and `model.layer_types`.
        text preset: Option<AttentionPreset>,
        /// Tokens that a pooled key is the mean of (l).
        #[key(filled("twice `compress_stride`"), optional, size(MAX_SEQ_LEN))]
        pub compress_block_size: usize,
        /// Tokens between the starts of two pooled keys (s); divides both block sizes.
        #[key(filled("8; 16 for rows of 2048 tokens or more"), optional, size(MAX_SEQ_LEN))]
        pub compress_stride: usize,
        /// Tokens of a selected block: up to 64, or a multiple of it.
        #[key(
            filled("twice `compress_stride`; four times for rows of 2048 tokens or more"),
            optional,
            size(MAX_SEQ_LEN)
        )]
        pub select_block_size: usize,
        /// Blocks a query selects per KV head, forced ones included.
        #[key(
            filled("as many as hold a quarter of `training.seq_len`, 4 to 64"),
            optional,
            within(1, MAX_CHOSEN_BLOCKS, MOST_BLOCKS)
        )]
        pub num_selected_blocks: usize,
        /// Of these, the last ones up to the query's own, which are selected whatever their scores.
        #[key(filled("half of `num_selected_blocks`"), optional, within(1, MAX_CHOSEN_BLOCKS, MOST_BLOCKS))]
        pub num_local_blocks: usize,
    }
}

impl InfllmV2Shape {
    /// The sizes of arXiv:2509.24663.
    pub fn published() -> Self {
        Self {
            compress_block_size: 32,
            compress_stride: 16,
            select_block_size: 64,
            num_selected_blocks: 64,
            num_local_blocks: 32,
        }
    }

    /// How a query chooses blocks.
    pub fn choice(&self) -> BlockChoice {
        let Self { compress_block_size, compress_stride, select_block_size, num_selected_blocks, .. } = *self;
        BlockChoice {
            blocks: NsaBlocks { compress_block_size, compress_stride, select_block_size, num_selected_blocks },
            rule: ChoiceRule::LargestProbability,
            forced: ForcedBlocks { first: true, local: self.num_local_blocks },
        }
    }
}

impl Settings for InfllmV2Shape {
    fn example(_head_dim: usize) -> Self {
        Self::published()
    }

    fn resolve(attention: &mut Table, sizes: Sizes) {
        pooled_sizes(attention, sizes, MAX_CHOSEN_BLOCKS);
        let selected = number(attention, "num_selected_blocks");
        derived(attention, "num_local_blocks", || Some((selected? / 2).max(1)));
    }

    fn check(&self, _model: Option<&ModelSection>, rules: &mut Rules<'_>) {
        let InfllmV2Shape { num_selected_blocks: selected, num_local_blocks: local, .. } = *self;
        check_strides(self.compress_stride, self.compress_block_size, self.select_block_size, rules);
        check_pieces(self.select_block_size, rules);
        rules.require(
            local < selected,
            "attention.num_local_blocks",
            format!("is {local}, and with the document's first block more than num_selected_blocks = {selected}"),
            "half of num_selected_blocks is usual; the first block is one of them, too",
        );
    }
}

impl HasFacts for InfllmV2Shape {
    const FACTS: KindFacts = KindFacts { has_one_order: true, ..KindFacts::CHOSEN_BLOCKS };
}

impl ChoosesBlocks for InfllmV2Shape {
    const NAME: &'static str = "infllm_v2";

    fn choice(&self) -> BlockChoice {
        InfllmV2Shape::choice(self)
    }

    fn form_words(&self) -> Vec<String> {
        let pooled = pooled_words(self.compress_block_size, self.compress_stride, "mean");
        vec![format!("{} of them local", self.num_local_blocks), pooled]
    }
}
