//! MoBA (arXiv:2502.13189): each query head reads the blocks whose mean keys fit it best; no parameter of its own.

use super::chosen_blocks::{ChoosesBlocks, MAX_CHOSEN_BLOCKS, MOST_BLOCKS, block_sizes, check_pieces};
use super::settings::{AttentionPreset, Settings, Sizes};
use super::{HasFacts, KindFacts};
use crate::NsaBlocks;
use crate::keys::{MAX_SEQ_LEN, keys};
use crate::recipe::{ModelSection, Rules};
use crate::{BlockChoice, ChoiceRule, ForcedBlocks};
use toml::Table;

keys! {
    /// Sizes of MoBA, mixture of block attention (arXiv:2502.13189): every query head reads its own block and those
    /// before it whose mean key has the largest product with the query. Without a parameter of its own.
    #[derive(Copy, Eq, Hash)]
    pub struct MobaShape {
        /// Sets the keys below to the values of arXiv:2502.13189, section 3.1: 3 blocks of 512. As an override it
        /// replaces the recipe's values, and `model.layer_types`.
        text preset: Option<AttentionPreset>,
        /// Tokens of a block: up to 64, or a multiple of it.
        #[key(filled("16; 64 for rows of 2048 tokens or more"), optional, size(MAX_SEQ_LEN))]
        pub select_block_size: usize,
        /// Blocks a query head selects, its own included.
        #[key(
            filled("as many as hold a quarter of `training.seq_len`, 4 to 16"),
            optional,
            within(1, MAX_CHOSEN_BLOCKS, MOST_BLOCKS)
        )]
        pub num_selected_blocks: usize,
    }
}

impl MobaShape {
    /// The sizes of arXiv:2502.13189, section 3.1.
    pub fn published() -> Self {
        Self { select_block_size: 512, num_selected_blocks: 3 }
    }

    /// How a query chooses blocks.
    pub fn choice(&self) -> BlockChoice {
        BlockChoice {
            blocks: NsaBlocks {
                num_selected_blocks: self.num_selected_blocks,
                ..NsaBlocks::of([self.select_block_size; 4])
            },
            rule: ChoiceRule::MeanKey,
            forced: ForcedBlocks { first: false, local: 1 },
        }
    }
}

impl Settings for MobaShape {
    fn example(_head_dim: usize) -> Self {
        Self::published()
    }

    fn resolve(attention: &mut Table, sizes: Sizes) {
        block_sizes(attention, sizes);
    }

    fn check(&self, _model: Option<&ModelSection>, rules: &mut Rules<'_>) {
        check_pieces(self.select_block_size, rules);
    }
}

impl HasFacts for MobaShape {
    const FACTS: KindFacts = KindFacts { has_one_order: true, ..KindFacts::CHOSEN_BLOCKS };
}

impl ChoosesBlocks for MobaShape {
    const NAME: &'static str = "moba";

    fn choice(&self) -> BlockChoice {
        MobaShape::choice(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Attention;
    use crate::model::mean_active_keys;

    #[test]
    fn chosen_blocks_count_their_tokens_and_half_of_each_pooled_key() {
        let moba = MobaShape { select_block_size: 4, num_selected_blocks: 2 };
        for seq_len in 1..40usize {
            let mut pairs = 0.0;
            for t in 0..seq_len {
                // Query t reads one whole earlier block, and its own up to t; it scores each complete block's mean key.
                let earlier = (t / 4).min(1) * 4;
                pairs += (earlier + t % 4 + 1) as f64 + ((t + 1) / 4) as f64 / 2.0;
            }
            let mean = mean_active_keys(Attention::Moba(moba), seq_len);
            assert!((mean * seq_len as f64 - pairs).abs() < 1e-9, "{seq_len}: {mean}");
        }
    }
}
