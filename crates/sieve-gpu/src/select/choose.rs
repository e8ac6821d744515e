//! Launches of `kernels/select_choose.cu`: which blocks of a row of scores are kept.
use super::call::Call;
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params};
use sieve_core::KeepBlocks;
use std::ops::Range;

/// Output of a selection, before lists are built from it: one bit for each kept block,
/// `[num_heads, rows, ceil(columns / 32)]`, and the number of rows of each head with a NaN score, `[num_heads]`.
pub(super) type KeptBits<'a> = [&'a CudaTensor; 2];

/// Operands of a launch of select_choose.
pub(super) struct Choice<'a> {
    /// Scores of `heads`, f32 `[heads, rows, columns]`.
    pub(super) scores: &'a CudaTensor,
    pub(super) bits: KeptBits<'a>,
    pub(super) heads: Range<usize>,
    pub(super) keep: KeepBlocks,
    /// Whether scores are probability masses already; otherwise the kernel takes their softmax.
    pub(super) is_mass: bool,
    /// Whether blocks that are kept whatever their scores count towards the number or mass to keep.
    pub(super) forced: bool,
    /// Whether blocks with a score of minus infinity are never kept.
    pub(super) drops_absent: bool,
}

/// A choice of the largest entries of a long row of scores for each head; of equal entries the first is chosen.
#[derive(Clone, Copy, Debug)]
pub struct LongChoice<'a> {
    /// f32 `[heads, length]` of the heads in `heads`.
    pub scores: &'a CudaTensor,
    /// One bit for each chosen entry, i32 `[all heads, length / 32 rounded up]`; the rows of `heads` are written.
    pub kept: &'a CudaTensor,
    /// i32 `[all heads]`: 1 is added for a head with a NaN score; such a head chooses nothing.
    pub nan_rows: &'a CudaTensor,
    /// The first head, and the number of heads.
    pub heads: [usize; 2],
    /// Scores of a row.
    pub length: usize,
    /// How many entries of a row are chosen.
    pub amount: Amount<'a>,
    /// Whether entries of minus infinity are never chosen.
    pub drops_absent: bool,
}

/// How many entries of each row a [`LongChoice`] chooses.
#[derive(Clone, Copy, Debug)]
pub enum Amount<'a> {
    /// The `top` largest, among them the first `num_first` entries, whatever their scores.
    Count {
        /// Number of entries.
        top: usize,
        /// Number of first entries that are always chosen.
        num_first: usize,
    },
    /// As many of the largest as it takes for their sum to reach a goal.
    Sum {
        /// The sum to reach; infinity chooses all entries.
        goal: f32,
        /// Whether the sum must exceed `goal` rather than reach it.
        strict: bool,
    },
    /// An amount for each head, which an earlier kernel has computed.
    OfHead {
        /// i32 `[all heads]`: above 0 as [`Count`](Self::Count) with this `top`, 0 as [`Sum`](Self::Sum), below 0 none.
        tops: &'a CudaTensor,
        /// Number of first entries that are always chosen, in heads with a count.
        num_first: usize,
        /// The sum to reach in heads without a count.
        goal: f32,
    },
}

impl<'a> LongChoice<'a> {
    /// A choice of this amount in the rows of some heads, given by the first head and the number of heads.
    pub fn new(
        [scores, kept, nan_rows]: [&'a CudaTensor; 3],
        heads: [usize; 2],
        length: usize,
        amount: Amount<'a>,
    ) -> Self {
        Self { scores, kept, nan_rows, heads, length, amount, drops_absent: false }
    }

    /// Writes `kept`.
    ///
    /// # Errors
    /// A launch that is refused.
    pub fn choose(&self) -> Result<(), KernelError> {
        let [first_head, num_heads] = self.heads;
        // To the kernel a `top` of 0 means that the amount is a sum.
        let (top, num_first, goal, strict) = match self.amount {
            Amount::Count { top, num_first } => (top, num_first, 0.0, false),
            Amount::Sum { goal, strict } => (0, 0, goal, strict),
            Amount::OfHead { num_first, goal, .. } => (0, num_first, goal, false),
        };
        // Without a count for each head `nan_rows` stands in for `tops`, which the kernel then does not read.
        let (has_tops, tops) = match self.amount {
            Amount::OfHead { tops, .. } => (true, tops),
            _ => (false, self.nan_rows),
        };
        // To the kernel the row is one query's scores of blocks of one key.
        let num_keys = self.length;
        let params = params!(SelectChooseParams {
            num_queries: 1usize,
            num_keys,
            block: 1usize,
            offset: 0usize,
            query_block: 1usize,
            first_head,
            top,
            num_first,
            goal,
            strict,
            drops_absent: self.drops_absent,
            has_tops,
            segment: 0usize,
            share: 0u64,
            absolute: true,
        });
        let [is_mass, is_forced, is_long] = [true, false, true];
        let tensors = [self.scores, self.kept, self.nan_rows, tops];
        // SAFETY: reads `length` scores a head, writes every word of these heads' rows.
        unsafe { select_choose_kernel(is_mass, is_forced, is_long).launch([1, num_heads, 1], &tensors, &params) }
    }
}

impl Call<'_> {
    /// Chooses the blocks that the rows of some heads keep, and sets their bits.
    pub(super) fn choose(&self, choice: &Choice<'_>) -> Result<(), KernelError> {
        let s = self.selection;
        let [rows, columns] = s.blocks();
        let (top, share, goal) = match choice.keep {
            KeepBlocks::Mass(share) => (0, 0.0, share as f32),
            KeepBlocks::Top(top) => (top, 0.0, 0.0),
            KeepBlocks::Share(share) => (0, share, 0.0),
        };
        let params = params!(SelectChooseParams {
            { num_queries, num_keys }: s.shape,
            { block, offset, query_block }: s.scores,
            first_head: choice.heads.start,
            drops_absent: choice.drops_absent,
            top,
            has_tops: false,
            segment: self.segment(),
            num_first: 0usize,
            share: share.to_bits(),
            goal,
            absolute: false,
            strict: false,
        });
        let is_long = false;
        let kernel = select_choose_kernel(choice.is_mass, choice.forced, is_long);
        let kernel = kernel.shared_bytes(columns * DType::F32.size());
        let [kept, nan_rows] = choice.bits;
        let tensors = [choice.scores, kept, nan_rows, nan_rows];
        // SAFETY: reads scores of competing blocks, writes every word of these heads' rows.
        unsafe { kernel.launch([rows, choice.heads.len(), 1], &tensors, &params) }
    }
}

/// The kernel that chooses blocks. `is_mass`: scores are probability masses already; `is_forced`: blocks that are kept
/// whatever their scores count; `is_long`: one long row of scores in global memory for each head.
fn select_choose_kernel(is_mass: bool, is_forced: bool, is_long: bool) -> SourceKernel {
    SourceKernel::new("select_choose")
        .define("IS_MASS", u8::from(is_mass))
        .define("FORCED", u8::from(is_forced))
        .define("LONG", u8::from(is_long))
        .threads(if is_long { 1024 } else { 128 })
}
