//! Launches of `kernels/nsa_selected_*.cu`: attention over the chosen blocks, block by block.
use super::lists::{ChoiceLists, Listed};
use super::local_blocks::{BlocksWithLocal, Divided};
use super::{BLOCK_KEYS, Bounds, hopper, no_gap, require_bounds, require_row};
use crate::KernelError;
use crate::attention::{
    AttentionGradients, AttentionResult, AttentionShape, Heads, Qkv, arriving, padded_len, require_gradients,
    require_scale, row_stats,
};
use crate::dma::{ConvertedSums, convert_rows};
use crate::runtime::{
    CudaTensor, DType, NsaSelectedAttentionForwardParams, Params, SourceKernel, SumOrder, operands, params, ranges,
    require, require_non_empty,
};
use crate::step::empty_zero;
use sieve_core::{KeyOrder, selected_gap};
use std::ops::Range;

const NAME: &str = "nsa_selected_attention";

impl ChoiceLists {
    /// Most bytes of partial results that a launch writes for nsa_selected_combine.
    pub const PART_BYTES: usize = 1 << 30;
}

/// About how many rows (queries x heads of a group) a work item has. An item is a part of a block's list of queries:
/// long enough to amortise loading the block's keys, short enough to spread the longest lists over thread blocks.
const ITEM_ROWS: usize = 2048;

/// Rows of a tile of the forward pass.
const FORWARD_ROWS: usize = 128;

/// The blocks that each query reads.
#[derive(Debug, Clone, Copy)]
pub struct AttendedBlocks<'a> {
    /// Blocks of `size` tokens, i32 `[batch, seq_len, num_kv_heads, number of blocks]`, counted from the document's
    /// first token: each at most once and none after the query's own block, then -1.
    pub indices: &'a CudaTensor,
    /// Tokens of a block.
    pub size: usize,
    /// Whether blocks are halves of larger ones: at even places an even block, and behind it the next one, or -1 where
    /// that begins after the query. Hopper's kernels then read two blocks of 64 as one, unless keys have the order of a
    /// step that decodes one token ([`KeyOrder::Epochs`]).
    pub in_pairs: bool,
}

impl<'a> AttendedBlocks<'a> {
    /// Blocks that need not be neighbours.
    pub fn single(indices: &'a CudaTensor, size: usize) -> Self {
        Self { indices, size, in_pairs: false }
    }
}

/// Most partial results of a launch: the kernels number them in 23 bits.
const MOST_PARTS: usize = 1 << 23;

/// The checked operands that all passes over chosen blocks read.
#[derive(Clone)]
pub(super) struct Work {
    pub(super) shape: AttentionShape,
    pub(super) qkv: Qkv,
    /// The first token of each token's document, and its end.
    pub(super) documents: [CudaTensor; 2],
    /// The blocks that each query chose, i32 `[batch, seq_len, num_kv_heads, num_selected]`.
    pub(super) indices: CudaTensor,
    /// Tokens of a block, and how many blocks are read as one.
    pub(super) listed: Listed,
    /// Blocks of a query.
    pub(super) num_selected: usize,
    pub(super) softmax_scale: f32,
    /// Whether the results hold a part already, that of the local blocks, to which these blocks' parts are added.
    pub(super) onto: bool,
}

impl Work {
    /// Checks the operands, and copies tensors whose layout the kernels do not take.
    pub(super) fn new(
        qkv: &Qkv,
        documents: Bounds,
        blocks: AttendedBlocks,
        softmax_scale: f32,
    ) -> Result<Self, KernelError> {
        let shape = qkv.shape(NAME)?;
        require!(shape.head_dim == shape.head_dim_v, NAME, "call:": "values of a different width", "one width");
        Self::of(shape, qkv, documents, blocks, softmax_scale)
    }

    /// [`new`](Self::new) for heads whose sizes, those of q and k, were checked: they are `shape`.
    pub(super) fn of(
        shape: AttentionShape,
        qkv: &Qkv,
        documents: Bounds,
        blocks: AttendedBlocks,
        softmax_scale: f32,
    ) -> Result<Self, KernelError> {
        let AttendedBlocks { indices, size: block_size, in_pairs } = blocks;
        require_row(NAME, &shape, &[&qkv.q, &qkv.k, &qkv.v])?;
        require_non_empty(NAME, "block size", block_size)?;
        no_gap(NAME, selected_gap(block_size, shape.head_dim, shape.group_size()))?;
        require_scale(NAME, softmax_scale)?;
        let (batch, seq_len) = (shape.batch, shape.seq_len);
        let [.., num_selected] = indices.dims::<4>(NAME, "block_indices")?;
        require_non_empty(NAME, "number of chosen blocks", num_selected)?;
        let of_query = batch * shape.num_heads * num_selected;
        require!(of_query < MOST_PARTS, NAME, "blocks of all rows' heads": of_query, "fewer than {MOST_PARTS}");
        let even = !in_pairs || num_selected.is_multiple_of(2);
        require!(even, NAME, "number of blocks in pairs": num_selected, "even numbers");
        let reads_pairs = in_pairs
            && block_size == BLOCK_KEYS
            && qkv.policy().keys == KeyOrder::Leaving
            && hopper::is_hopper(&shape, qkv.q.tensor());
        operands!(NAME, block_indices: I32[batch, seq_len, shape.num_kv_heads, num_selected] = indices);
        Ok(Self {
            qkv: qkv.with_kernel_strides(),
            documents: require_bounds(NAME, documents, [batch, seq_len])?,
            indices: block_indices,
            shape,
            listed: Listed { block_size, per_list: if reads_pairs { 2 } else { 1 } },
            num_selected,
            softmax_scale,
            onto: false,
        })
    }

    /// Ranges of queries; a launch takes one, so that its partial results fit [`ChoiceLists::PART_BYTES`].
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let AttentionShape { batch, seq_len, num_heads, head_dim, .. } = self.shape;
        // A query has a bf16 partial result for each head and choice.
        let query_bytes = batch * num_heads * self.num_selected * head_dim * 2;
        ranges(seq_len, ChoiceLists::PART_BYTES / query_bytes)
    }

    /// Whether passes take the Hopper family.
    pub(super) fn is_hopper(&self) -> bool {
        hopper::is_hopper(&self.shape, self.qkv.q.tensor())
    }

    /// The lists of a range of queries: for each block the queries that chose it, in items of `item_queries` queries.
    fn lists(&self, range: &Range<usize>, item_queries: usize) -> Result<ChoiceLists, KernelError> {
        let [start, _] = &self.documents;
        ChoiceLists::new(&self.indices, start, self.listed, range, item_queries)
    }

    /// Refuses lists of other queries or blocks than a forward pass with these operands makes for `range`.
    pub(super) fn require_own(&self, lists: &ChoiceLists, range: &Range<usize>) -> Result<(), KernelError> {
        let ([choices, _], wanted) = (lists.capacity(), range.len() * self.num_selected / self.listed.per_list);
        require!(choices == wanted, NAME, "lists of": format!("{choices} choices"), "the {wanted} of these blocks");
        Ok(())
    }

    /// Queries of a work item.
    fn item_queries(&self) -> usize {
        (ITEM_ROWS / self.shape.group_size()).max(1)
    }

    /// A tensor for partial results, `[batch, num_kv_heads, parts, group_size, width]`.
    pub(super) fn parts(&self, lists: &ChoiceLists, joined: Joined, width: usize, dtype: DType) -> CudaTensor {
        let AttentionShape { batch, num_kv_heads, .. } = self.shape;
        let [choices, _] = lists.capacity();
        let parts = choices * self.listed.per_list / self.blocks_of_part(joined);
        self.indices.empty_contiguous(&[batch, num_kv_heads, parts, self.shape.group_size(), width], dtype)
    }

    /// Blocks that have one partial result: those of a list, but where a kernel of gradients reads a pair block by
    /// block, each has its own.
    pub(super) fn blocks_of_part(&self, joined: Joined) -> usize {
        match joined {
            Joined::Output | Joined::LogSumExp => self.listed.per_list,
            Joined::QueryGradient if hopper::gradients_of_pairs(self.shape.head_dim) => self.listed.per_list,
            Joined::QueryGradient | Joined::IndexGradient => 1,
        }
    }

    /// The first fields of both attention kernels' params structs.
    pub(super) fn params(&self, lists: &ChoiceLists) -> Result<NsaSelectedAttentionForwardParams, KernelError> {
        let [q, k, v] = self.qkv.head_words(NAME)?;
        let [choices, max_items] = lists.capacity();
        Ok(params!(NsaSelectedAttentionForwardParams {
            { seq_len, num_heads, num_kv_heads, batch }: self.shape,
            [q_offset, q_token_stride, q_batch_stride]: q,
            [k_offset, k_token_stride, k_batch_stride]: k,
            [v_offset, v_token_stride, v_batch_stride]: v,
            softmax_scale: self.softmax_scale,
            select_size: self.listed.size(),
            choices,
            max_items,
        }))
    }

    /// Launches a pass over the lists of a range. `operands` are the kernel's tensors before the documents' bounds,
    /// `results` the tensors after the lists. The portable kernels have a thread block for each possible item, the
    /// Hopper kernels one for each multiprocessor.
    ///
    /// # Safety
    /// The conditions of [`SourceKernel::launch`]; each choice has a partial result of its own, and the sums were
    /// zeroed.
    pub(super) unsafe fn launch(
        &self,
        kernel: &SourceKernel,
        lists: &ChoiceLists,
        operands: &[&CudaTensor],
        results: &[&CudaTensor],
        params: &impl Params,
    ) -> Result<(), KernelError> {
        let [start, end] = &self.documents;
        let bounds_and_lists = [start, end, &lists.entries, &lists.items, &lists.num_items];
        let [_, max_items] = lists.capacity();
        let grid = if self.is_hopper() {
            [self.indices.hardware().num_multiprocessors, 1, 1]
        } else {
            [max_items, self.shape.num_kv_heads, self.shape.batch]
        };
        // SAFETY: the caller checked the operands; lists name queries of the range.
        unsafe { kernel.launch(grid, &[operands, &bounds_and_lists, results].concat(), params) }
    }

    /// Joins the partial results of a range: `tensors` are the kernel's, from `parts` on, and `layout` is the offset,
    /// token stride and batch stride of o or dq. It also resets the lists' counter of fetched items for the next pass.
    pub(super) fn combine(
        &self,
        lists: &ChoiceLists,
        (joined, tensors): (Joined, &[&CudaTensor]),
        layout: [usize; 3],
        queries: Range<usize>,
    ) -> Result<(), KernelError> {
        let shape = &self.shape;
        let params = params!(NsaSelectedCombineParams {
            { seq_len, num_heads, num_kv_heads }: shape,
            num_selected: self.num_selected / self.blocks_of_part(joined),
            first_query: queries.start,
            num_queries: queries.len(),
            [offset, token_stride, batch_stride]: layout,
            softmax_scale: self.softmax_scale,
            num_lists: shape.batch * shape.num_kv_heads,
            per_part: self.blocks_of_part(joined),
        });
        let tensors = [&[&self.indices, &lists.num_items], tensors].concat();
        let rows = queries.len() * shape.num_heads;
        // A thread block of 256 threads joins 2048 columns, 8 a thread.
        let grid = [rows.div_ceil(2048 / shape.head_dim), shape.batch, 1];
        let kernel = nsa_selected_combine_kernel(shape.head_dim, joined, self.onto);
        // SAFETY: every choice of these queries has a partial result; writes the range's rows of the outputs.
        unsafe { kernel.launch(grid, &tensors, &params) }
    }
}

/// What nsa_selected_combine joins of a query's choices.
#[derive(Clone, Copy)]
pub(super) enum Joined {
    /// The partial outputs, weighted by their log-sum-exps, and the log-sum-exps.
    Output,
    /// The partial log-sum-exps alone.
    LogSumExp,
    /// The partial gradients of the query.
    QueryGradient,
    /// The partial gradients of the indexer's query.
    IndexGradient,
}

impl Qkv {
    /// Causal attention of each query over the tokens of its blocks. A block that no query has is not read. Also
    /// returns the lists of each range of queries for the backward pass.
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit or have no kernel.
    pub fn nsa_selected_attention_forward(
        &self,
        documents: Bounds,
        blocks: AttendedBlocks,
        softmax_scale: f32,
    ) -> Result<(AttentionResult, Vec<ChoiceLists>), KernelError> {
        let work = Work::new(self, documents, blocks, softmax_scale)?;
        work.forward(|_| Ok(()))
    }

    /// [`nsa_selected_attention_forward`](Self::nsa_selected_attention_forward) where each query's blocks hold its
    /// local ones. These are read as a run of neighbours by the kernels of dense attention, and lists hold the other
    /// blocks alone; so sums have another order.
    ///
    /// # Errors
    /// Those of [`nsa_selected_attention_forward`](Self::nsa_selected_attention_forward); local blocks that are not
    /// whole blocks, or are all that a query has.
    pub fn local_and_selected_attention_forward(
        &self,
        documents: Bounds,
        blocks: BlocksWithLocal,
        softmax_scale: f32,
    ) -> Result<(AttentionResult, Vec<ChoiceLists>), KernelError> {
        let (bias, window) = (None, Some(blocks.local.tokens()));
        let Divided { far, first_key, .. } = blocks.divided(documents)?;
        let work = Work::new(self, documents, AttendedBlocks::single(&far, blocks.size), softmax_scale)?;
        let local = self.attention_forward(&first_key, window, softmax_scale, bias)?;
        Work { onto: true, ..work }.forward_into(local, |_| Ok(()))
    }
}

/// The log-sum-exps of a range of queries whose results were joined.
pub(super) struct JoinedRange<'a> {
    pub(super) queries: Range<usize>,
    /// Log-sum-exp of each part, to base 2, f32 `[batch, num_kv_heads, parts, group_size, 1]`.
    pub(super) part_lse: &'a CudaTensor,
    /// Blocks that have one part.
    pub(super) per_part: usize,
    /// Log-sum-exp of each query, f32 `[batch, num_heads, seq_len]`.
    pub(super) lse: &'a CudaTensor,
}

impl Work {
    /// The forward pass, one range of queries after the other; `behind` is called when a range's kernels are queued.
    /// Returns the output and the choices of each range.
    pub(super) fn forward(
        &self,
        behind: impl Fn(JoinedRange<'_>) -> Result<(), KernelError>,
    ) -> Result<(AttentionResult, Vec<ChoiceLists>), KernelError> {
        let q = self.qkv.q.tensor();
        let o = q.empty_contiguous(&self.shape.output(), DType::BF16);
        let lse = q.empty_contiguous(&self.shape.lse(), DType::F32);
        self.forward_into(AttentionResult { o, lse, o_low: None, base: None }, behind)
    }

    /// [`forward`](Self::forward), written into these results.
    fn forward_into(
        &self,
        result: AttentionResult,
        behind: impl Fn(JoinedRange<'_>) -> Result<(), KernelError>,
    ) -> Result<(AttentionResult, Vec<ChoiceLists>), KernelError> {
        let (work, shape, AttentionResult { o, lse, .. }) = (self, &self.shape, &result);
        let token = shape.num_heads * shape.head_dim;
        // Offset, token stride and batch stride of o.
        let layout = [0, token, token * shape.seq_len];
        let mut all_lists = Vec::new();
        for range in work.ranges() {
            let lists = work.lists(&range, work.item_queries())?;
            // SAFETY: sizes, strides and types were checked; the lists name queries of the range.
            let part_lse = unsafe { work.attend(&lists, &work.params(&lists)?, ([o, lse], layout), range.clone()) }?;
            let per_part = work.blocks_of_part(Joined::Output);
            behind(JoinedRange { queries: range, part_lse: &part_lse, per_part, lse })?;
            all_lists.push(lists);
        }
        Ok((result, all_lists))
    }

    /// Attention of a range of queries over the blocks of their lists, written into o and its log-sum-exps; `layout`:
    /// offset, token stride and batch stride of o. Returns the log-sum-exp of each part.
    ///
    /// # Safety
    /// `params` and the lists must fit the operands.
    pub(super) unsafe fn attend(
        &self,
        lists: &ChoiceLists,
        params: &NsaSelectedAttentionForwardParams,
        ([o, lse], layout): ([&CudaTensor; 2], [usize; 3]),
        queries: Range<usize>,
    ) -> Result<CudaTensor, KernelError> {
        let (q, head_dim) = (self.qkv.q.tensor(), self.shape.head_dim);
        let kernel = if self.is_hopper() {
            arriving(hopper::selected_forward_kernel(head_dim, self.listed), q.policy())
        } else {
            nsa_selected_attention_forward_kernel(head_dim)
        };
        let parts = self.parts(lists, Joined::Output, head_dim, DType::BF16);
        let part_lse = self.parts(lists, Joined::Output, 1, DType::F32);
        let operands = [q, self.qkv.k.tensor(), self.qkv.v.tensor()];
        // SAFETY: the caller's promise.
        unsafe { self.launch(&kernel, lists, &operands, &[&parts, &part_lse], params) }?;
        self.combine(lists, (Joined::Output, &[&parts, &part_lse, o, lse]), layout, queries)?;
        Ok(part_lse)
    }
}

impl AttentionGradients<'_> {
    /// Gradients of [`nsa_selected_attention_forward`](crate::Qkv::nsa_selected_attention_forward). Writes every
    /// element of `self.grads`; keys and values that no query chose get 0. `lists`, which the forward pass
    /// returned, are used again. Where there are none they are built here, as where the portable kernel adds in a fixed
    /// order, which takes one work item a list.
    ///
    /// # Errors
    /// The errors of the forward pass.
    pub fn nsa_selected_attention_backward(
        self,
        documents: Bounds,
        blocks: AttendedBlocks,
        lists: &[ChoiceLists],
    ) -> Result<(), KernelError> {
        let work = Work::new(self.qkv, documents, blocks, self.softmax_scale)?;
        require_gradients(NAME, &self, &work.shape)?;
        let d_o = self.d_o.contiguous();
        let stats = row_stats(&self, &d_o, &work.shape)?;
        work.backward(self, [&d_o, &stats], lists)
    }

    /// Gradients of [`local_and_selected_attention_forward`](crate::Qkv::local_and_selected_attention_forward), which
    /// returned `lists`; otherwise as [`nsa_selected_attention_backward`](Self::nsa_selected_attention_backward).
    ///
    /// # Errors
    /// The errors of the forward pass.
    pub fn local_and_selected_attention_backward(
        self,
        documents: Bounds,
        blocks: BlocksWithLocal,
        lists: &[ChoiceLists],
    ) -> Result<(), KernelError> {
        let Divided { far, first_key, end_query } = blocks.divided(documents)?;
        let work = Work::new(self.qkv, documents, AttendedBlocks::single(&far, blocks.size), self.softmax_scale)?;
        require_gradients(NAME, &self, &work.shape)?;
        let d_o = self.d_o.contiguous();
        let stats = row_stats(&self, &d_o, &work.shape)?;
        self.part_backward([&first_key, &end_query], blocks.local.tokens(), &stats)?;
        Work { onto: true, ..work }.backward(self, [&d_o, &stats], lists)
    }
}

impl Work {
    /// The gradients of a forward pass, which returned `lists`; `d_o` has no gaps, and `stats` are [`row_stats`].
    fn backward(
        &self,
        call: AttentionGradients,
        [d_o, stats]: [&CudaTensor; 2],
        lists: &[ChoiceLists],
    ) -> Result<(), KernelError> {
        let (work, shape) = (self, &self.shape);
        let [batch, heads, seq_len] = shape.per_key();
        let sums = empty_zero(d_o, &[2 * batch, heads, seq_len, shape.head_dim])?;
        let [dk_sum, dv_sum] = [0, batch].map(|first| sums.row_range(NAME, "sums", first, batch));
        let (dk_sum, dv_sum) = (dk_sum?, dv_sum?);
        let [dq, dk, dv] = call.grads.head_words(NAME)?;
        let policy = call.qkv.policy();
        let is_hopper = work.is_hopper();
        let kernel = if is_hopper {
            arriving(hopper::selected_backward_kernel(shape.head_dim, work.listed, policy.sums), policy)
        } else {
            nsa_selected_attention_backward_kernel(shape.head_dim)
        };
        for (index, range) in work.ranges().enumerate() {
            let lists = match (policy.sums, is_hopper, lists.get(index)) {
                // One item for each list, so that no other thread block of a launch adds to the same keys.
                (SumOrder::Fixed, false, _) => work.lists(&range, range.len())?,
                (_, _, Some(lists)) => lists.clone(),
                (_, _, None) => work.lists(&range, work.item_queries())?,
            };
            // Semaphores that order the adds to dk and dv of each key and quarter of its columns.
            let semaphores = match (policy.sums, is_hopper) {
                (SumOrder::Fixed, true) => Some(empty_zero(d_o, &[batch, heads, seq_len, 4])?),
                _ => None,
            };
            work.require_own(&lists, &range)?;
            let parts = work.parts(&lists, Joined::QueryGradient, shape.head_dim, DType::BF16);
            let [q, k, v] = [&work.qkv.q, &work.qkv.k, &work.qkv.v].map(Heads::tensor);
            let (operands, mut results) = ([q, k, v, d_o, stats], vec![&parts, &dk_sum, &dv_sum]);
            results.extend(&semaphores);
            let params = params!(NsaSelectedAttentionBackwardParams {
                base: work.params(&lists)?,
                padded_len: padded_len(seq_len),
            });
            // SAFETY: as in the forward pass; the sums were cleared.
            unsafe { work.launch(&kernel, &lists, &operands, &results, &params) }?;
            let grad = call.grads.q.tensor();
            work.combine(&lists, (Joined::QueryGradient, &[&parts, grad]), dq, range)?;
        }
        // The softmax scale is a factor of dk, not of dv.
        let converted = if work.onto { ConvertedSums::Onto } else { ConvertedSums::All };
        convert_rows(&dk_sum, converted, &call.grads.k, dk, self.softmax_scale)?;
        convert_rows(&dv_sum, converted, &call.grads.v, dv, 1.0)
    }
}

/// The forward kernel for a head width. Its shared memory holds a block's keys and values and two tiles of rows.
fn nsa_selected_attention_forward_kernel(head_dim: usize) -> SourceKernel {
    SourceKernel::new("nsa_selected_attention_forward")
        .define("HEAD_DIM", head_dim)
        .threads(128)
        .shared_bytes((2 * BLOCK_KEYS + 2 * FORWARD_ROWS) * head_dim * 2)
}

/// The backward kernel for a head width. Its steps have so few rows that two thread blocks fit on a multiprocessor.
fn nsa_selected_attention_backward_kernel(head_dim: usize) -> SourceKernel {
    let rows = if head_dim > 64 { 32 } else { 64 };
    // K, V and two steps of q and d_o; P and two steps of dS; statistics of queries, entries of keys, the work item,
    // and the query and head of each row.
    let shared = (BLOCK_KEYS + 2 * rows) * head_dim * 4
        + 3 * BLOCK_KEYS * rows * 2
        + 16 * rows
        + BLOCK_KEYS * 8
        + 192
        + 64 * rows;
    SourceKernel::new("nsa_selected_attention_backward")
        .define("HEAD_DIM", head_dim)
        .define("NUM_WARPS", 4)
        .define("BLOCK_Q", rows)
        .define("MIN_BLOCKS", 2)
        .threads(128)
        .shared_bytes(shared)
}

/// The kernel that joins the partial results of each query; `onto` the part that its results hold.
fn nsa_selected_combine_kernel(head_dim: usize, joined: Joined, onto: bool) -> SourceKernel {
    let kernel = SourceKernel::new("nsa_selected_combine")
        .define("HEAD_DIM", head_dim)
        .define("GRADIENT", u8::from(matches!(joined, Joined::QueryGradient | Joined::IndexGradient)))
        .threads(256);
    let kernel = if onto { kernel.define("ONTO", 1) } else { kernel };
    match joined {
        Joined::LogSumExp => kernel.define("LSE_ONLY", 1),
        Joined::Output | Joined::QueryGradient | Joined::IndexGradient => kernel,
    }
}
