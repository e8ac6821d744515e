//! Launches of `kernels/nsa_importance.cu` and `kernels/nsa_choose.cu`: the blocks that each query chooses.
use super::{Bounds, PooledStep, hopper, rule_number};
use crate::KernelError;
use crate::attention::{AttentionShape, Heads};
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, ranges, require, require_non_empty};
use sieve_core::{BlockChoice, ChoiceRule, ForcedBlocks};
use std::ops::{Range, RangeInclusive};

const NAME: &str = "nsa_choose";

/// Most bytes of block importances, which nsa_importance writes and nsa_choose reads. Longer rows take several
/// launches.
const IMPORTANCE_BYTES: usize = 256 << 20;

/// Rows of a tile of the portable nsa_importance: the heads of a query are consecutive rows.
const TILE_ROWS: usize = 64;
/// Columns of nsa_importance's table of probabilities in shared memory, padded.
const TILE_PITCH: usize = 64 + 32 + 1;

/// Queries of a thread block of nsa_choose that gives each a warp.
const CHOOSE_QUERIES: usize = 8;
/// Threads of a block of nsa_choose that has one query.
const BLOCK_THREADS: usize = 1024;
/// Numbers of blocks from which a single query gets a thread block: more than a warp keeps in registers, and at most
/// as many as radix_select.cuh can number.
const LONG_ROW: RangeInclusive<usize> = 1025..=1 << 22;

/// The blocks that each query chooses, i32 `[batch, seq_len, choosers, num_selected_blocks]`, by its logits with pooled
/// keys, the first half of `pooled`. A chooser is a group of query heads with a choice of its own. `lse` is the
/// log-sum-exp of these logits; rules that compare scores instead of probabilities do not read it. `shape` are the
/// sizes of attention of these queries over the pooled keys. Queries before `first` of each row choose nothing: their
/// part of the result is not written.
pub(super) fn nsa_choose(
    queries: &Heads,
    shape: &AttentionShape,
    [pooled, lse]: [&CudaTensor; 2],
    [start, end]: Bounds,
    (choice, first): (BlockChoice, usize),
    softmax_scale: f32,
) -> Result<CudaTensor, KernelError> {
    let q = queries.with_kernel_strides();
    let BlockChoice { blocks, forced, .. } = choice;
    let (batch, seq_len) = (shape.batch, shape.seq_len);
    let choosers = choice.num_choosers(shape.num_heads, shape.num_kv_heads);
    let (num_blocks, k) = (seq_len.div_ceil(blocks.select_block_size), blocks.num_selected_blocks);
    let indices = lse.empty_contiguous(&[batch, seq_len, choosers, k], DType::I32);
    let most = IMPORTANCE_BYTES / (batch * choosers * num_blocks * DType::F32.size());
    let queries_per_launch = most.clamp(1, seq_len - first);
    let importance = lse.empty_contiguous(&[batch, choosers, queries_per_launch, num_blocks], DType::F32);
    for queries in ranges(seq_len - first, queries_per_launch) {
        let queries = first + queries.start..first + queries.end;
        let scored = Scored {
            shape,
            choice,
            softmax_scale,
            num_slots: blocks.num_slots(seq_len),
            queries: queries.clone(),
            rows: Rows::Whole,
        };
        scored.launch(&q, [pooled, lse, start, end, &importance])?;
        take_largest(&importance, start, &indices, blocks.select_block_size, forced, queries)?;
    }
    Ok(indices)
}

/// The rows that a launch of nsa_importance scores.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// Whole rows, whose documents begin and end at their bounds.
    Whole,
    /// One query a row behind a cache, the keys of its document.
    BehindCache,
}

/// What a launch of nsa_importance scores.
struct Scored<'a> {
    /// Sizes of attention of the queries over the pooled keys.
    shape: &'a AttentionShape,
    choice: BlockChoice,
    softmax_scale: f32,
    /// Pooled keys of a row.
    num_slots: usize,
    queries: Range<usize>,
    rows: Rows,
}

impl Scored<'_> {
    /// Writes the importance of each block, f32 `[batch, choosers, queries, num_blocks]`, the last of the tensors.
    fn launch(&self, q: &Heads, [pooled, lse, start, end, importance]: [&CudaTensor; 5]) -> Result<(), KernelError> {
        let Self { shape, choice, softmax_scale, num_slots, queries, rows } = self;
        let BlockChoice { blocks, rule, .. } = *choice;
        let choosers = choice.num_choosers(shape.num_heads, shape.num_kv_heads);
        let [_, _, _, num_blocks] = importance.dims(NAME, "importance")?;
        let params = params!(NsaImportanceParams {
            seq_len: shape.seq_len,
            num_heads: shape.num_heads,
            choosers,
            [q_offset, q_token_stride, q_batch_stride]: q.require_words(NAME, "q")?,
            softmax_scale: *softmax_scale,
            compress_size: blocks.compress_block_size,
            stride: blocks.compress_stride,
            select_size: blocks.select_block_size,
            num_slots: *num_slots,
            first_query: queries.start,
            num_queries: queries.len(),
            num_blocks,
            key_group: choosers / shape.num_kv_heads,
        });
        let (group, is_one) = (shape.num_heads / choosers, *rows == Rows::BehindCache);
        let hopper_tile = hopper::is_hopper(shape, q.tensor()).then(|| hopper::importance_tile(*choice, group));
        let (kernel, tiles) = match hopper_tile.flatten() {
            Some(tile) => {
                let of_slots = num_slots.div_ceil(blocks.select_block_size.max(hopper::IMPORTANCE_SLOTS));
                let tiles = if is_one { of_slots } else { queries.len().div_ceil(tile) };
                (hopper::nsa_importance_kernel(shape.head_dim, rule), tiles)
            }
            None => (nsa_importance_kernel(shape.head_dim, rule), queries.len().div_ceil(TILE_ROWS / group)),
        };
        let kernel = if is_one { kernel.define("ONE_QUERY", 1) } else { kernel };
        let grid = [tiles, choosers, shape.batch];
        // SAFETY: the caller checked sizes and types; writes within `importance`, which has room for these queries.
        unsafe { kernel.launch(grid, &[q.tensor(), pooled, lse, start, end, importance], &params) }
    }
}

/// The blocks that one query a row chooses, i32 `[batch, 1, choosers, num_selected_blocks]`, as in a pass over whole
/// rows, by a rule that takes scores. `q` are the layer's queries or those of an indexer, one for each chooser; their
/// keys are those of `pooled`, the query's own included. `capacity`: tokens of the cache.
pub(super) fn choose_in_order(q: &Heads, pooled: PooledStep<'_>, capacity: usize) -> Result<CudaTensor, KernelError> {
    let PooledStep { pooled: keys, start, choice } = pooled;
    let (blocks, [_, num_key_heads, num_slots, head_dim]) = (choice.blocks, keys.dims(NAME, "cache of keys")?);
    let shape = &q.as_queries(NAME, num_key_heads, head_dim)?;
    let (batch, choosers) = (shape.batch, choice.num_choosers(shape.num_heads, num_key_heads));
    operands!(only NAME, start: I32[batch, 1] contiguous);
    let num_blocks = capacity.div_ceil(blocks.select_block_size);
    let importance = keys.empty_contiguous(&[batch, choosers, 1, num_blocks], DType::F32);
    // Scores are compared unscaled.
    let (softmax_scale, queries) = (1.0, 0..1);
    let scored = Scored { shape, choice, softmax_scale, num_slots, queries, rows: Rows::BehindCache };
    // Without a log-sum-exp and documents' ends, which are not read, other tensors stand in for them.
    scored.launch(q, [keys, &importance, start, start, &importance])?;
    let chosen = keys.empty_contiguous(&[batch, 1, choosers, blocks.num_selected_blocks], DType::I32);
    take_largest(&importance, start, &chosen, blocks.select_block_size, choice.forced, 0..1)?;
    Ok(chosen)
}

/// Chooses blocks of `block_size` tokens for the queries of one row from query `first` on: the blocks that are `forced`
/// and those of the largest `importance`, f32 `[1, 1, count, num_blocks]`. Writes them into `indices`, i32
/// `[1, seq_len, 1, number of blocks to choose]`. `start`, i32 `[1, seq_len]`, is the first token of each token's
/// document.
///
/// # Errors
/// Another type, or sizes that do not fit.
pub fn choose_by_scores(
    importance: &CudaTensor,
    start: &CudaTensor,
    indices: &CudaTensor,
    block_size: usize,
    forced: ForcedBlocks,
    first: usize,
) -> Result<(), KernelError> {
    let [_, seq_len, _, num_selected] = indices.dims(NAME, "block_indices")?;
    require_non_empty(NAME, "block_size", block_size)?;
    let [_, _, count, num_blocks] = importance.dims(NAME, "importance")?;
    operands!(NAME,
        importance: F32[1, 1, count, num_blocks] = importance,
        start: I32[1, seq_len] = start,
    );
    operands!(only NAME, block_indices: I32[1, seq_len, 1, num_selected] contiguous = indices);
    let fits = first + count <= seq_len && num_blocks >= seq_len.div_ceil(block_size);
    let got = || format!("{count} queries from {first} on and {num_blocks} blocks");
    require!(fits, NAME, "importance:": got(), "queries of the row and as many blocks as it has");
    take_largest(&importance, &start, indices, block_size, forced, first..first + count)
}

/// Writes the choice of `queries` among blocks of `block_size` keys into `indices`, i32
/// `[batch, seq_len, choosers, number of blocks to choose]`: the `forced` blocks, then those of the largest importance,
/// f32 `[batch, choosers, at least as many queries, num_blocks]`.
pub(crate) fn take_largest(
    importance: &CudaTensor,
    start: &CudaTensor,
    indices: &CudaTensor,
    block_size: usize,
    forced: ForcedBlocks,
    queries: Range<usize>,
) -> Result<(), KernelError> {
    let [batch, seq_len, choosers, num_selected] = indices.dims(NAME, "block_indices")?;
    let [_, _, _, num_blocks] = importance.dims(NAME, "importance")?;
    let params = params!(NsaChooseParams {
        seq_len,
        choosers,
        select_size: block_size,
        num_selected,
        first_query: queries.start,
        num_queries: queries.len(),
        num_blocks,
        num_first: forced.first,
        num_local: forced.local,
    });
    let has_block = queries.len() == 1 && LONG_ROW.contains(&num_blocks);
    let grid = [queries.len().div_ceil(CHOOSE_QUERIES), choosers, batch];
    // SAFETY: reads importances that were written, writes every index of these queries.
    unsafe { nsa_choose_kernel(has_block).launch(grid, &[importance, start, indices], &params) }
}

/// The kernel that computes the importance of each block. Its shared memory holds a tile of queries and two of keys in
/// bf16, and the f32 probabilities.
pub(super) fn nsa_importance_kernel(head_dim: usize, rule: ChoiceRule) -> SourceKernel {
    SourceKernel::new("nsa_importance")
        .define("HEAD_DIM", head_dim)
        .define("RULE", rule_number(rule))
        .threads(128)
        .shared_bytes(3 * TILE_ROWS * head_dim * 2 + TILE_ROWS * TILE_PITCH * 4)
}

/// The kernel that takes the most important blocks; `has_block`: a thread block for each query instead of a warp.
fn nsa_choose_kernel(has_block: bool) -> SourceKernel {
    let kernel = SourceKernel::new(NAME).starts_early();
    if has_block {
        kernel.define("QUERY_THREADS", BLOCK_THREADS).threads(BLOCK_THREADS)
    } else {
        kernel.threads(32 * CHOOSE_QUERIES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, NeededKernels, Recorder, Step};

    #[test]
    fn one_query_of_a_long_row_has_a_thread_block() {
        let (gpu, shipped) = (Recorder::new(Hardware::AMPERE), NeededKernels::shipped_for("sm_80"));
        for (count, num_blocks, threads) in [(1, 1024, 256), (1, 1025, 1024), (2, 1025, 256), (1, (1 << 22) + 1, 256)] {
            let [importance, start, indices] = [
                (vec![1, 1, count, num_blocks], DType::F32),
                (vec![1, count], DType::I32),
                (vec![1, count, 1, 4], DType::I32),
            ]
            .map(|(sizes, dtype)| gpu.tensor(&sizes, dtype));
            gpu.take_steps();
            choose_by_scores(&importance, &start, &indices, 16, ForcedBlocks::NSA, 0).expect("sizes fit");
            let steps = gpu.take_steps();
            let [Step::Launch(launch)] = &steps[..] else {
                panic!("{steps:?}");
            };
            let kernel = &launch.kernel;
            assert_eq!(kernel.block_threads(), threads, "{count} queries, {num_blocks} blocks");
            let is_shipped = |shipped: &SourceKernel| shipped.is_same_code(kernel);
            assert!(shipped.kernels.iter().any(is_shipped));
        }
    }
}
