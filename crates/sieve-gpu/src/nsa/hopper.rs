//! The Hopper family (`sm_90a`) of the kernels around chosen blocks: which calls take it, and its specialisations.
//!
//! Buffers and params are the same as for the portable kernels: a launch differs in kernel and grid alone. Thread
//! blocks are persistent and fetch work items of all lists.
//!
//! | call on compute capability 9.0, widths 64 and 128 | kernel |
//! |---|---|
//! | importance by probabilities; blocks of four strides, compressed blocks of two, groups 1, 2, 4, 8, 16 | `hopper_nsa_importance.cu` |
//! | log-sum-exps over pooled keys in one order; groups 1, 2, 4, 8, 16 | `hopper_nsa_importance.cu` |
//! | importance by each token's score; blocks of 16, 32, 64 or a multiple of 128 tokens | `hopper_nsa_importance.cu` |
//! | selected attention | `hopper_nsa_selected_attention_forward.cu`, with blocks in pairs 128 keys at a time |
//! | its gradients | `hopper_nsa_selected_attention_backward.cu`, with blocks in pairs and width 128 128 keys at a time |
//! | log-sum-exps of an indexer's scores | `hopper_nsa_selected_attention_forward.cu`, keys alone |
//! | the gradient of an indexer's loss | `hopper_index_gradient.cu` |
//! | everything else | the portable kernels |
//!
//! A counter behind the lists hands out the work items. Lists of compressed blocks have no bias here.
use super::BLOCK_KEYS;
use super::lists::Listed;
use crate::attention::{AttentionShape, KernelFamily, KeySource};
use crate::runtime::{CudaTensor, SourceKernel, SumOrder};
use sieve_core::{BlockChoice, ChoiceRule};

/// Rows (queries x heads) of a tile, over all warpgroups.
const TILE_ROWS: usize = 128;
/// Pooled keys of a step of the importance kernel.
const IMPORTANCE_SLOTS: usize = 128;
/// Strides of a block that the importance kernel scores by probabilities.
const BLOCK_STRIDES: usize = 4;
/// Blocks of keys and values in shared memory at a time: the current one and the next.
const KEY_SLOTS: usize = 2;
/// Bytes of shared memory for the place of a row.
const PLACE_BYTES: usize = 4;
/// Bytes of shared memory for the two statistics of a row, which kernels of gradients read.
const STATISTICS_BYTES: usize = 8;
/// Bytes of shared memory for the barriers and work items of a thread block, and for alignment.
const DESCRIPTIONS: usize = 80 + 1024;

/// Whether attention over chosen blocks takes the Hopper family on the tensor's device.
pub(super) fn is_hopper(shape: &AttentionShape, queries: &CudaTensor) -> bool {
    KernelFamily::of(shape, KeySource::Gathered, queries) == KernelFamily::Hopper
}

/// Queries of a tile of [`nsa_importance_kernel`]; `None` where the kernel does not take this choice and group size.
pub(super) fn importance_tile(choice: BlockChoice, group: usize) -> Option<usize> {
    let (blocks, stride) = (choice.blocks, choice.blocks.compress_stride);
    let size = blocks.select_block_size;
    let fits = match choice.rule {
        ChoiceRule::WeightedProbability | ChoiceRule::LargestProbability => {
            [blocks.compress_block_size, size] == [2 * stride, BLOCK_STRIDES * stride] && fits_group(group)
        }
        ChoiceRule::LargestScore => [16, 32, 64].contains(&size) || size.is_multiple_of(TILE_ROWS),
        ChoiceRule::MeanKey | ChoiceRule::SumOfHeads => false,
    };
    fits.then(|| TILE_ROWS / group)
}

/// Queries of a tile of [`nsa_importance_kernel`] that writes log-sum-exps; `None` where it does not take this group
/// size.
pub(super) fn log_sums_tile(group: usize) -> Option<usize> {
    fits_group(group).then(|| TILE_ROWS / group)
}

fn fits_group(group: usize) -> bool {
    group <= 16 && group.is_power_of_two()
}

/// Thread blocks that share the blocks of one query behind a cache: a thread block has the blocks of a step of pooled
/// keys, or one larger block.
pub(super) fn thread_blocks_of_one(choice: BlockChoice, num_slots: usize, num_blocks: usize) -> usize {
    match choice.rule {
        ChoiceRule::LargestScore => num_slots.div_ceil(choice.blocks.select_block_size.max(IMPORTANCE_SLOTS)),
        _ => num_blocks.div_ceil(IMPORTANCE_SLOTS / BLOCK_STRIDES),
    }
}

/// The kernel that computes the importance of each block by the rule of this number, or log-sum-exps. Its shared memory
/// holds a tile of queries and two of keys in bf16.
pub(super) fn nsa_importance_kernel(head_dim: usize, number: u8) -> SourceKernel {
    SourceKernel::new("hopper_nsa_importance")
        .define("HEAD_DIM", head_dim)
        .define("RULE", number)
        .threads(256)
        .shared_bytes(3 * TILE_ROWS * head_dim * 2 + 1024)
}

/// The forward kernel of the selected branch. A stage of its shared memory holds a tile of queries in bf16, a place for
/// each row, and two barriers.
pub(super) fn selected_forward_kernel(head_dim: usize, listed: Listed) -> SourceKernel {
    let is_pair = listed.size() > BLOCK_KEYS;
    let keys = if is_pair { 2 * BLOCK_KEYS } else { BLOCK_KEYS };
    let (stages, tile_bytes) = (if is_pair { 3 } else { 4 }, TILE_ROWS * head_dim * 2);
    let kernel = base_kernel("hopper_nsa_selected_attention_forward", head_dim, stages, [216, 72])
        .shared_bytes(keys_bytes(head_dim, keys) + stages * (tile_bytes + PLACE_BYTES * TILE_ROWS + 16) + DESCRIPTIONS);
    if is_pair { kernel.define("BLOCK_KEYS", keys) } else { kernel }
}

/// The kernel that computes the log-sum-exps of an indexer's scores. An indexer has one key head, and its values are
/// not read.
pub(super) fn index_lse_kernel(head_dim: usize, listed: Listed) -> SourceKernel {
    selected_forward_kernel(head_dim, listed).define("KEYS_ONLY", 1)
}

/// Whether the backward kernel of the selected branch reads a pair of blocks at once.
pub(super) fn gradients_of_pairs(head_dim: usize) -> bool {
    head_dim == 128
}

/// The backward kernel of the selected branch. It also holds dS of 64 rows for each warpgroup in shared memory. Of a
/// pair's 128 keys each warpgroup has 64 and all 64 rows of a tile, and dS has two places.
pub(super) fn selected_backward_kernel(head_dim: usize, listed: Listed, order: SumOrder) -> SourceKernel {
    let is_pair = listed.size() > BLOCK_KEYS && gradients_of_pairs(head_dim);
    let [keys, rows] = if is_pair { [2 * BLOCK_KEYS, TILE_ROWS / 2] } else { [BLOCK_KEYS, TILE_ROWS] };
    let (stages, tile_bytes) = (2, 2 * rows * head_dim * 2);
    let kernel = base_kernel("hopper_nsa_selected_attention_backward", head_dim, stages, [224, 56])
        .shared_bytes(gradient_bytes(head_dim, [keys, rows], stages, tile_bytes));
    in_order(if is_pair { kernel.define("BLOCK_KEYS", keys) } else { kernel }, order)
}

fn in_order(kernel: SourceKernel, order: SumOrder) -> SourceKernel {
    match order {
        SumOrder::Any => kernel,
        SumOrder::Fixed => kernel.define("ORDERED", 1),
    }
}

/// The kernel of the gradient of an indexer's loss. A tile has the queries of one head.
pub(super) fn index_gradient_kernel(head_dim: usize, order: SumOrder) -> SourceKernel {
    let (stages, tile_bytes) = (4, TILE_ROWS * head_dim * 2);
    let kernel = base_kernel("hopper_index_gradient", head_dim, stages, [216, 72]).shared_bytes(gradient_bytes(
        head_dim,
        [BLOCK_KEYS, TILE_ROWS],
        stages,
        tile_bytes,
    ));
    in_order(kernel, order)
}

/// Bytes of shared memory for the keys and values of [`KEY_SLOTS`] blocks of `keys` keys in bf16.
fn keys_bytes(head_dim: usize, keys: usize) -> usize {
    KEY_SLOTS * 2 * keys * head_dim * 2
}

/// Bytes of shared memory of a kernel of gradients: two blocks of `keys` keys, `stages` stages of `tile_bytes` with
/// `rows` rows each, and dS, for pairs of blocks twice.
fn gradient_bytes(head_dim: usize, [keys, rows]: [usize; 2], stages: usize, tile_bytes: usize) -> usize {
    let scores = TILE_ROWS * keys * 2;
    let stage = tile_bytes + (PLACE_BYTES + STATISTICS_BYTES) * rows + 16;
    keys_bytes(head_dim, keys) + stages * stage + scores + DESCRIPTIONS
}

/// What the three kernels of chosen blocks share. `consumer` and `producer`: registers per thread of these warpgroups.
fn base_kernel(name: &'static str, head_dim: usize, stages: usize, [consumer, producer]: [usize; 2]) -> SourceKernel {
    SourceKernel::new(name)
        .define("HEAD_DIM", head_dim)
        .define("ROW_STAGES", stages)
        .define("CONSUMER_REGISTERS", consumer)
        .define("PRODUCER_REGISTERS", producer)
        .threads(384)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nsa::rule_number;
    use sieve_core::NsaBlocks;
    use sieve_core::model::test_shapes::msa;

    #[test]
    fn two_thread_blocks_of_the_importance_kernel_fit_a_multiprocessor() {
        for head_dim in [64, 128] {
            let number = rule_number(ChoiceRule::LargestProbability);
            let importance = nsa_importance_kernel(head_dim, number).dynamic_shared_bytes();
            // A multiprocessor has 228 KiB, of which CUDA reserves 1 KiB for each thread block.
            assert!(2 * (importance + 1024) <= 228 * 1024);
        }
    }

    #[test]
    fn the_importance_kernel_takes_the_paper_s_blocks_and_groups_of_powers_of_two() {
        let choice = |sizes| BlockChoice::nsa(NsaBlocks::of(sizes));
        let tiles = [1, 2, 3, 4, 8, 16, 32].map(|group| importance_tile(choice([32, 16, 64, 16]), group));
        let expected = [Some(128), Some(64), None, Some(32), Some(16), Some(8), None];
        assert_eq!(tiles, expected);
        assert_eq!(importance_tile(choice([8, 4, 16, 16]), 2), Some(64));
        for other in [[32, 8, 64, 16], [16, 16, 64, 16], [32, 16, 32, 16]] {
            assert_eq!(importance_tile(choice(other), 2), None, "{other:?}");
        }
        let tiles = [8, 16, 64, 96, 128, 512].map(|size| importance_tile(msa(size, 4), 1));
        assert_eq!(tiles, [None, Some(128), Some(128), None, Some(128), Some(128)]);
    }
}
