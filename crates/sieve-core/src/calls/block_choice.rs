//! How queries choose the blocks of keys that they attend to, for all kinds of attention that choose blocks.
//!
//! A kind that chooses blocks by pooled keys and one exact softmax (InfLLM-V2, MoBA) gives its sizes as a
//! `BlockChoice`; layer, cache, attention, plan and checks take any. The score of a `ChoiceRule` is computed in
//! `sieve-cpu/src/nsa/select.rs` (the definition, which CPUs run too), `kernels/nsa_importance.cu` and
//! `sieve-nn/src/kinds/chosen_blocks/cache.rs`.

use std::ops::Range;

use crate::NsaBlocks;

/// How the importance of a block to a query is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChoiceRule {
    /// NSA (arXiv:2502.11089, eq. 9, 10): the sum, over pooled keys that overlap the block, of the pooled key's
    /// probability times the number of strides in the overlap; then summed over the heads of the group.
    WeightedProbability,
    /// InfLLM-V2 (arXiv:2509.24663, section 3.2): probabilities of the pooled keys summed over the heads of the group,
    /// then the largest probability among pooled keys that overlap the block.
    LargestProbability,
    /// MoBA (arXiv:2502.13189, eq. 5, 6): `q . mean of the block's keys` without a scale; each query head chooses.
    MeanKey,
    /// MSA (arXiv:2606.13392): the largest `q . k`, without a scale, over the block's tokens up to the query. q and k
    /// are an indexer's, which has one query head for each KV head and one key head; each query head chooses for its KV
    /// head.
    LargestScore,
    /// QSA (Qwen3.8-Flash-Next): `max(0, q . k)` with the block's pooled key k, summed over the indexer's query heads;
    /// all KV heads read the same choice. The pooled key is the mean of the block's raw keys, normed and rotated. An
    /// incomplete block has no score.
    SumOfHeads,
}

impl ChoiceRule {
    /// Whether blocks are compared by `q . k` instead of probabilities, separately for each query head.
    pub fn takes_scores(self) -> bool {
        matches!(self, Self::MeanKey | Self::LargestScore)
    }
}

/// Blocks that every query chooses, whatever their scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForcedBlocks {
    /// Whether the document's first block is forced.
    pub first: bool,
    /// Number of forced blocks that end with the query's own, at least 1.
    pub local: usize,
}

impl ForcedBlocks {
    /// NSA forces the first block, the query's own and the one before.
    pub const NSA: Self = Self { first: true, local: 2 };

    /// The blocks that compete by their scores, for a query in block `own`.
    pub fn free(self, own: usize) -> Range<usize> {
        let first = usize::from(self.first);
        first..(own + 1).saturating_sub(self.local).max(first)
    }

    /// Number of forced blocks for a query late enough to see all of them.
    pub fn count(self) -> usize {
        self.local + usize::from(self.first)
    }
}

/// The blocks that end with a query's own, where every query reads as many of them: its latest keys, in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LocalBlocks {
    /// Tokens of a block as it was chosen.
    pub size: usize,
    /// Number of local blocks of a query late enough to see all of them.
    pub count: usize,
}

impl LocalBlocks {
    /// The most keys of a query in its local blocks.
    pub fn tokens(self) -> usize {
        self.size * self.count
    }
}

/// Fewest keys in the local blocks of a query for which [`BlockChoice::local`] has attention read them as a run.
const FEWEST_LOCAL_KEYS: usize = 512;

/// How queries choose blocks: the forced ones, then those with the highest scores; of equal scores the later block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockChoice {
    /// Sizes of pooled keys and of the chosen blocks. `num_selected_blocks` includes the forced ones.
    pub blocks: NsaBlocks,
    /// How a block's score is computed.
    pub rule: ChoiceRule,
    /// The blocks that are chosen whatever their scores.
    pub forced: ForcedBlocks,
}

/// The most f32 scores in memory at a time, where no kernel computes them in registers: 64 MiB.
pub const SCORES_AT_ONCE: usize = 1 << 24;

/// The largest block, in tokens, that the attention kernels read at a time.
const ATTENDED_BLOCK: usize = 64;

/// Sizes, in tokens, of blocks that a caller selects for each query.
pub const SELECTED_SIZES: [usize; 4] = [16, 32, 64, 128];

/// Number of pieces in which attention reads a block of `size` tokens: see [`BlockChoice::pieces`].
pub fn selected_pieces(size: usize) -> usize {
    match size {
        size if size > ATTENDED_BLOCK && size.is_multiple_of(ATTENDED_BLOCK) => size / ATTENDED_BLOCK,
        _ => 1,
    }
}

/// Whether the pieces of a block of `size` tokens make pairs of neighbours, which a kernel may read as one block of 128
/// tokens.
pub fn selected_in_pairs(size: usize) -> bool {
    selected_pieces(size).is_multiple_of(2)
}

impl BlockChoice {
    /// How NSA's queries choose blocks.
    pub fn nsa(blocks: NsaBlocks) -> Self {
        Self { blocks, rule: ChoiceRule::WeightedProbability, forced: ForcedBlocks::NSA }
    }

    /// Whether scores are computed with an indexer's queries and keys instead of the attention's.
    pub fn has_indexer(&self) -> bool {
        matches!(self.rule, ChoiceRule::LargestScore | ChoiceRule::SumOfHeads)
    }

    /// Whether all KV heads read one choice, by an indexer's pooled keys (QSA).
    pub fn pools_for_all_heads(&self) -> bool {
        self.rule == ChoiceRule::SumOfHeads
    }

    /// Query and key heads that scores are computed with: the layer's own `[num_heads, num_kv_heads]`, or an indexer's.
    pub fn scored_heads(&self, [num_heads, num_kv_heads]: [usize; 2]) -> [usize; 2] {
        if self.has_indexer() { [num_kv_heads, 1] } else { [num_heads, num_kv_heads] }
    }

    /// Number of separate choices that these scored heads make: one for each query head or for each KV head.
    pub fn num_choosers(&self, num_heads: usize, num_kv_heads: usize) -> usize {
        if self.rule.takes_scores() { num_heads } else { num_kv_heads }
    }

    /// Number of choices per token that attention reads, in a layer of `heads`, `[num_heads, num_kv_heads]`. A choice
    /// that all KV heads share is repeated for each KV head.
    pub fn choices_per_token(&self, heads: [usize; 2]) -> usize {
        let [num_heads, num_kv_heads] = self.scored_heads(heads);
        match self.rule {
            ChoiceRule::SumOfHeads => heads[1],
            _ => self.num_choosers(num_heads, num_kv_heads),
        }
    }

    /// The forced local blocks, where attention reads them faster as a run of neighbours, by the kernels of dense
    /// attention, than block by block: where they are half of a query's blocks at least, and enough keys. MoBA's, a
    /// third, cost its backward pass more than its forward pass gains.
    pub fn local(&self) -> Option<LocalBlocks> {
        let local = LocalBlocks { size: self.blocks.select_block_size, count: self.forced.local };
        let chosen = self.blocks.num_selected_blocks;
        let pays = local.tokens() >= FEWEST_LOCAL_KEYS && (chosen.div_ceil(2)..chosen).contains(&local.count);
        pays.then_some(local)
    }

    /// Number of pieces in which attention reads a chosen block: a multiple of 64 tokens is cut into pieces of 64, and
    /// any other block is one piece.
    pub fn pieces(&self) -> usize {
        selected_pieces(self.blocks.select_block_size)
    }

    /// Whether the pieces of a chosen block make pairs: see [`selected_in_pairs`].
    pub fn in_pairs(&self) -> bool {
        selected_in_pairs(self.blocks.select_block_size)
    }

    /// Sizes of the blocks as attention reads them, with the pieces of a chosen block as blocks.
    pub fn attended(&self) -> NsaBlocks {
        let pieces = self.pieces();
        let size = self.blocks.select_block_size / pieces;
        NsaBlocks {
            num_selected_blocks: self.blocks.num_selected_blocks * pieces,
            // Pooled keys have scores alone: attention does not read them.
            ..NsaBlocks::of([size; 4])
        }
    }

    /// (Query, key) pairs of one query head in a document of `seq_len` tokens. A pooled key has a score and no value,
    /// so it counts half. An indexer's pairs are not counted here.
    pub fn pairs(&self, seq_len: usize) -> f64 {
        let scored = if self.has_indexer() { 0.0 } else { self.blocks.compressed_pairs(seq_len) / 2.0 };
        self.blocks.selected_pairs(seq_len) + scored
    }

    /// Why no CUDA kernel takes this choice: the size that does not fit, and the sizes that kernels support. `None` if
    /// kernels take it: those that attend to the chosen blocks, and those that score blocks.
    pub fn cuda_gap(&self, head_dim: usize, group_size: usize) -> Option<(String, &'static str)> {
        // By mean keys each query head chooses for itself, so its group has one head.
        let group_size = if self.rule == ChoiceRule::MeanKey { 1 } else { group_size };
        let stride = self.blocks.compress_stride;
        // The kernels that score blocks count in strides instead of tokens, so a block may have any number of tokens.
        let scored = NsaBlocks {
            compress_block_size: self.blocks.compress_block_size / stride,
            compress_stride: 1,
            select_block_size: self.blocks.select_block_size / stride,
            ..self.blocks
        };
        let gap = self.attended().cuda_gap(head_dim, group_size);
        if self.has_indexer() {
            // An indexer's kernels score blocks of any size.
            gap
        } else {
            gap.or_else(|| scored.cuda_gap(head_dim, group_size))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(select_block_size: usize, forced: ForcedBlocks) -> BlockChoice {
        BlockChoice {
            blocks: NsaBlocks::of([32, 16, select_block_size, 4]),
            rule: ChoiceRule::LargestProbability,
            forced,
        }
    }

    #[test]
    fn local_blocks_are_a_run_where_they_are_many_keys_and_half_of_the_blocks() {
        let local = |size, count, chosen| {
            let choice = choice(size, ForcedBlocks { first: true, local: count });
            let blocks = NsaBlocks { num_selected_blocks: chosen, ..choice.blocks };
            BlockChoice { blocks, ..choice }.local().map(LocalBlocks::tokens)
        };
        assert_eq!(local(64, 32, 64), Some(2048), "InfLLM-V2 as published");
        assert_eq!(local(64, 8, 16), Some(512), "InfLLM-V2 in recipes");
        assert_eq!(local(512, 1, 3), None, "MoBA as published");
        assert_eq!(local(64, 7, 14), None, "too few keys");
        assert_eq!(local(64, 8, 8), None, "nothing is chosen beside them");
    }

    #[test]
    fn forced_blocks_do_not_compete() {
        let forced = ForcedBlocks { first: true, local: 3 };
        assert_eq!(forced.count(), 4);
        let free: Vec<_> = [0, 1, 2, 3, 4, 9].map(|own| forced.free(own)).into();
        assert_eq!(free, [1..1, 1..1, 1..1, 1..1, 1..2, 1..7]);
        let own_alone = ForcedBlocks { first: false, local: 1 };
        assert_eq!([0, 1, 5].map(|own| own_alone.free(own)), [0..0, 0..1, 0..5]);
    }

    #[test]
    fn blocks_beyond_64_tokens_are_read_in_pieces_of_64() {
        for (size, pieces) in [(16, 1), (64, 1), (96, 1), (128, 2), (192, 3), (512, 8)] {
            let choice = choice(size, ForcedBlocks::NSA);
            assert_eq!(choice.pieces(), pieces, "{size}");
            assert_eq!(choice.in_pairs(), size == 128 || size == 512, "{size}");
            let attended = choice.attended();
            assert_eq!(attended.select_block_size * pieces, size);
            assert_eq!(attended.num_selected_blocks, 4 * pieces);
            attended.check();
            // The pieces hold as many tokens as the blocks.
            let tokens = |blocks: NsaBlocks| blocks.num_selected_blocks * blocks.select_block_size;
            assert_eq!(tokens(attended), tokens(choice.blocks));
        }
    }

    #[test]
    fn each_head_chooses_by_mean_keys_and_each_group_by_probabilities() {
        let by_group = choice(64, ForcedBlocks::NSA);
        assert_eq!(by_group.num_choosers(8, 2), 2);
        let by_head = BlockChoice { rule: ChoiceRule::MeanKey, ..by_group };
        assert_eq!(by_head.num_choosers(8, 2), 8);
        assert_eq!(by_head.cuda_gap(128, 100), None);
        assert!(by_group.cuda_gap(128, 100).is_some());
        assert!(by_head.cuda_gap(96, 1).is_some());
        // Where a choice has kernels, attention over the blocks as it is launched has kernels too.
        for choice in [64, 128, 512].map(|size| crate::model::test_shapes::msa(size, 16)) {
            assert_eq!(choice.cuda_gap(128, 16), None, "{choice:?}");
            assert_eq!(choice.attended().cuda_gap(128, 16), None, "{choice:?}");
            assert_eq!(choice.choices_per_token([16, 4]), 4);
        }
    }
}
