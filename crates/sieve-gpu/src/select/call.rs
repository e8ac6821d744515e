//! A selector's call: its checked operands, and what of a selection the kernels take.
use crate::KernelError;
use crate::attention::{AttentionShape, Qkv};
use crate::runtime::{CudaTensor, DType, ranges, require};
use sieve_core::{BlockScores, BlockSelection, KeepBlocks, KeyScores, SlotOrder};
use std::ops::Range;

pub(super) const NAME: &str = "select_blocks";

/// Most bytes of scores in memory at a time; more heads take several launches.
pub(super) const SCORE_BYTES: usize = 1 << 30;

/// Columns of q and k that select_cells multiplies in a step.
const CELL_STEP: usize = 64;
/// Query cells, and key cells, of a tile of select_cells.
pub(super) const CELL_SIDE: usize = 128;

/// Most tokens of a segment: a thread block sorts a segment.
pub(super) const MOST_IN_SEGMENT: usize = 512;

/// A row of blocks overlaps one segment or two, runs of tokens that may be reordered. These have at most so many
/// blocks, since select_lists marks them in a 64-bit mask.
const MOST_OWN_BLOCKS: usize = 64;

/// Most blocks that select_gate chooses exactly for a probe: shared memory holds as many on every card.
const MOST_EXACT: usize = 128;

/// A selector's call with its checked operands.
pub(super) struct Call<'a> {
    pub(super) selection: &'a BlockSelection,
    pub(super) shape: AttentionShape,
    pub(super) qkv: Qkv,
    /// Offset, token stride and batch stride of q, in elements.
    pub(super) q: [usize; 3],
    /// The same of k.
    pub(super) k: [usize; 3],
}

impl<'a> Call<'a> {
    /// Checks the heads against the selection, and copies heads whose strides the kernels do not take.
    pub(super) fn new(qkv: &Qkv, selection: &'a BlockSelection) -> Result<Self, KernelError> {
        let shape = qkv.shape(NAME)?;
        let s = selection;
        let sizes = [shape.batch, shape.seq_len, shape.num_heads, shape.num_kv_heads];
        let fits = sizes == [1, s.shape.num_keys, s.shape.num_heads, s.shape.num_kv_heads]
            && (1..=s.shape.num_keys).contains(&s.shape.num_queries)
            && s.scores.offset < s.scores.query_block
            && s.scores.block.is_multiple_of(s.keep.tile)
            && (s.keep.tile == s.scores.block || s.scores.offset == 0)
            && s.scores.query_block.is_multiple_of(s.scores.block / s.keep.tile)
            && s.shape.num_heads.is_multiple_of(s.keep.heads_per_list)
            && s.keep.by != KeepBlocks::Top(0);
        require!(fits, NAME, "selection": format!("{shape:?} with {s:?}"),
            "one row as long as the selection says, tiles that divide blocks");
        require_order(s)?;
        require_probes(s)?;
        require_cells(s, shape.head_dim)?;
        let qkv = qkv.with_kernel_strides();
        let [q, k, _] = qkv.head_words(NAME)?;
        Ok(Self { selection, shape, qkv, q, k })
    }

    /// Tokens of a segment, inside which tokens may be reordered; 0 if there are no segments.
    pub(super) fn segment(&self) -> usize {
        self.selection.order.map_or(0, |order| order.segment)
    }

    /// Splits `heads` into ranges whose scores are in memory at the same time; a head has `head_bytes` of scores.
    pub(super) fn slabs(&self, heads: Range<usize>, head_bytes: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let at_once = ranges(heads.len(), SCORE_BYTES / head_bytes.max(1));
        at_once.map(move |at| heads.start + at.start..heads.start + at.end)
    }

    /// All query heads.
    pub(super) fn heads(&self) -> Range<usize> {
        0..self.selection.shape.num_heads
    }

    /// A new f32 tensor on the call's GPU, contents undefined.
    pub(super) fn new_f32(&self, shape: &[usize]) -> CudaTensor {
        self.qkv.q.tensor().empty_contiguous(shape, DType::F32)
    }
}

/// Refuses orders of tokens whose segments the kernels do not take.
fn require_order(s: &BlockSelection) -> Result<(), KernelError> {
    let Some(order) = s.order else {
        return Ok(());
    };
    let moves = order.keys.is_some() || order.moves_queries;
    let fits = order.segment.is_multiple_of(s.scores.block)
        && (!moves || order.segment <= MOST_IN_SEGMENT)
        && s.keep.tile == s.scores.block
        && s.scores.query_block == s.scores.block
        && s.scores.offset == 0;
    require!(fits, NAME, "order": format!("{s:?}"),
        "square blocks that divide a segment, of at most 512 tokens where they move");
    // A row of blocks that straddles two segments meets the blocks of both.
    let context = s.shape.context();
    let segments = if context.is_multiple_of(s.scores.block) { 1 } else { 2 };
    let blocks = segments * order.segment / s.scores.block;
    require!(blocks <= MOST_OWN_BLOCKS, NAME, "number of blocks in a row's own segments": blocks, "at most 64");
    Ok(())
}

/// Refuses probe rows that do not fit the call's tiles.
fn require_probes(s: &BlockSelection) -> Result<(), KernelError> {
    let BlockScores::Probes { gamma, chosen } = s.scores.by else {
        return Ok(());
    };
    let context = s.shape.context();
    let [_, num_exact] = chosen;
    let fits = num_exact <= MOST_EXACT
        && s.scores.query_block.is_multiple_of(gamma)
        && context.is_multiple_of(gamma)
        && s.scores.offset == 0;
    require!(fits, NAME, "probes": format!("{s:?}"),
        "calls and tiles of whole distances, at most {MOST_EXACT} blocks that are surely the best");
    Ok(())
}

/// Refuses heads and blocks that select_cells does not take.
fn require_cells(s: &BlockSelection, head_dim: usize) -> Result<(), KernelError> {
    let cell = s.rules().iter().find_map(|rule| cell_of(rule.scores));
    let is_by_attention = |order: SlotOrder| matches!(order.keys, Some(KeyScores::Attention(_)));
    if cell.is_some() || s.order.is_some_and(is_by_attention) {
        let fits = head_dim.is_multiple_of(CELL_STEP);
        require!(fits, NAME, "head_dim": head_dim, "multiples of {CELL_STEP}, for products of cells");
    }
    if let Some(cell) = cell {
        let per_block = s.scores.block / cell.max(1);
        let fits = s.scores.block.is_multiple_of(cell) && per_block.is_power_of_two();
        let has_lines = s.rules().iter().any(|rule| matches!(rule.scores, BlockScores::Lines { .. }));
        let is_one_by_one = has_lines || matches!(s.scores.by, BlockScores::Patterns { .. });
        let fits = is_one_by_one || fits && per_block <= CELL_SIDE;
        let got = || format!("{cell} tokens of {}", s.scores.block);
        require!(fits, NAME, "cell": got(), "blocks of 1, 2, 4, ... 128 cells");
    }
    Ok(())
}

/// Tokens of a cell; `None` where blocks are not scored by cells.
fn cell_of(scores: BlockScores) -> Option<usize> {
    match scores {
        BlockScores::Means { .. } => None,
        BlockScores::Logits | BlockScores::Lines { .. } | BlockScores::Patterns { .. } | BlockScores::Probes { .. } => {
            Some(1)
        }
        BlockScores::LargestOfGroups(cell) | BlockScores::Cells { stride: cell, .. } => Some(cell),
    }
}
