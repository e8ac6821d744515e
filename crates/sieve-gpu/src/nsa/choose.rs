//! Launches of `kernels/nsa_importance.cu` and `kernels/nsa_choose.cu`: the blocks that each query chooses; and of
//! `kernels/nsa_compressed_output.cu`, the output of attention over the pooled keys in one order.
use super::{Bounds, PooledStep, hopper, rule_number};
use crate::KernelError;
use crate::attention::{AttentionResult, AttentionShape, Heads, require_scale};
use crate::runtime::{
    CudaTensor, DType, NsaImportanceParams, SourceKernel, operands, params, ranges, require, require_non_empty,
};
use sieve_core::{BlockChoice, ForcedBlocks};
use std::ops::{Range, RangeInclusive};

const NAME: &str = "nsa_choose";
const OUTPUT: &str = "nsa_compressed_output";

/// Most bytes of block importances, which nsa_importance writes and nsa_choose reads. Longer rows take several
/// launches.
const IMPORTANCE_BYTES: usize = 256 << 20;

/// The number of nsa_importance's `RULE` that writes log-sum-exps; the rules of [`rule_number`] have smaller ones.
const LOG_SUMS: u8 = 4;

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

/// What a launch of nsa_importance computes.
#[derive(Clone, Copy)]
enum Computed {
    /// The importance of each block.
    Importance,
    /// Log-sum-exps over the pooled keys that a query sees, in an order that no later token changes.
    LogSums,
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

impl<'a> Scored<'a> {
    /// The queries from `first` on of whole rows.
    fn of_rows(shape: &'a AttentionShape, (choice, first): (BlockChoice, usize), softmax_scale: f32) -> Self {
        let (num_slots, queries) = (choice.blocks.num_slots(shape.seq_len), first..shape.seq_len);
        Self { shape, choice, softmax_scale, num_slots, queries, rows: Rows::Whole }
    }

    /// Writes the importance of each block, f32 `[batch, choosers, queries, num_blocks]`, the last of the tensors.
    fn launch(&self, q: &Heads, tensors: [&CudaTensor; 5]) -> Result<(), KernelError> {
        let [_, _, _, num_blocks] = tensors[4].dims(NAME, "importance")?;
        self.compute(Computed::Importance, q, tensors, num_blocks)
    }

    /// The log-sum-exp of each query over the pooled keys that it sees, f32 `[batch, num_heads, seq_len]`; queries that
    /// are not scored have none.
    fn log_sums(&self, q: &Heads, [pooled, start, end]: [&CudaTensor; 3]) -> Result<CudaTensor, KernelError> {
        require_scale(NAME, self.softmax_scale)?;
        let lse = pooled.empty_contiguous(&self.shape.lse(), DType::F32);
        let num_blocks = 0;
        self.compute(Computed::LogSums, q, [pooled, &lse, start, end, &lse], num_blocks)?;
        Ok(lse)
    }

    /// Writes the last of the tensors.
    fn compute(
        &self,
        computed: Computed,
        q: &Heads,
        [pooled, lse, start, end, written]: [&CudaTensor; 5],
        num_blocks: usize,
    ) -> Result<(), KernelError> {
        let Self { shape, choice, num_slots, queries, rows, .. } = self;
        let (rule, choosers) = (choice.rule, self.choosers());
        let params = self.params(q, num_blocks)?;
        let (group, is_one) = (shape.num_heads / choosers, *rows == Rows::BehindCache);
        let (number, hopper_tile) = match computed {
            Computed::Importance => (rule_number(rule), hopper::importance_tile(*choice, group)),
            Computed::LogSums => (LOG_SUMS, hopper::log_sums_tile(group)),
        };
        let (kernel, tiles) = match hopper_tile.filter(|_| hopper::is_hopper(shape, q.tensor())) {
            Some(tile) => {
                let of_one = || match computed {
                    Computed::LogSums => 1,
                    Computed::Importance => hopper::thread_blocks_of_one(*choice, *num_slots, num_blocks),
                };
                let tiles = if is_one { of_one() } else { queries.len().div_ceil(tile) };
                (hopper::nsa_importance_kernel(shape.head_dim, number), tiles)
            }
            None => (nsa_importance_kernel(shape.head_dim, number), queries.len().div_ceil(TILE_ROWS / group)),
        };
        let kernel = if is_one { kernel.define("ONE_QUERY", 1) } else { kernel };
        let grid = [tiles, choosers, shape.batch];
        // SAFETY: the caller checked sizes and types; writes within the last tensor, which has room for these queries.
        unsafe { kernel.launch(grid, &[q.tensor(), pooled, lse, start, end, written], &params) }
    }

    /// Attention over pooled keys and values of one layout, in an order that no later token changes. Queries that are
    /// not scored get neither an output nor a log-sum-exp.
    fn attend(&self, q: &Heads, [keys, values, start, end]: [&CudaTensor; 4]) -> Result<AttentionResult, KernelError> {
        let Self { shape, queries, rows, .. } = self;
        let lse = self.log_sums(q, [keys, start, end])?;
        let o = keys.empty_contiguous(&shape.output(), DType::BF16);
        let (num_blocks, group) = (0, shape.num_heads / self.choosers());
        let params = self.params(q, num_blocks)?;
        let kernel = nsa_compressed_output_kernel(shape.head_dim);
        let kernel = if *rows == Rows::BehindCache { kernel.define("ONE_QUERY", 1) } else { kernel };
        let grid = [queries.len().div_ceil(TILE_ROWS / group), self.choosers(), shape.batch];
        // SAFETY: the caller checked sizes and types; writes the outputs of these queries.
        unsafe { kernel.launch(grid, &[q.tensor(), keys, values, &lse, start, end, &o], &params) }?;
        Ok(AttentionResult { o, lse, o_low: None, base: None })
    }

    fn choosers(&self) -> usize {
        self.choice.num_choosers(self.shape.num_heads, self.shape.num_kv_heads)
    }

    /// The params of all launches; `num_blocks`: blocks whose importance one of them writes.
    fn params(&self, q: &Heads, num_blocks: usize) -> Result<NsaImportanceParams, KernelError> {
        let Self { shape, choice, softmax_scale, num_slots, queries, .. } = self;
        let (blocks, choosers) = (choice.blocks, self.choosers());
        Ok(params!(NsaImportanceParams {
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
        }))
    }
}

/// Attention of the queries from `first` on of each row over the pooled keys and values that they see, as
/// [`log_sums_of_rows`]: outputs and log-sum-exps in an order that a query behind a cache can have, too. `pooled` are
/// the keys, then the values, bf16 `[2, batch * num_slots * num_kv_heads, head_dim]`.
pub(super) fn attention_of_rows(
    queries: &Heads,
    shape: &AttentionShape,
    pooled: &CudaTensor,
    [start, end]: Bounds,
    (choice, first): (BlockChoice, usize),
    softmax_scale: f32,
) -> Result<AttentionResult, KernelError> {
    let [_, rows, head_dim] = pooled.dims(OUTPUT, "pooled keys and values")?;
    let values = pooled.reshaped(OUTPUT, "pooled keys and values", &[2 * rows, head_dim])?;
    let values = values.row_range(OUTPUT, "pooled values", rows, rows)?;
    let scored = Scored::of_rows(shape, (choice, first), softmax_scale);
    scored.attend(&queries.with_kernel_strides(), [pooled, &values, start, end])
}

/// The log-sum-exps of the queries from `first` on of each row over the pooled keys that they see, f32
/// `[batch, num_heads, seq_len]`, in an order that a query behind a cache can have, too. `shape` are the sizes of
/// attention over the pooled keys. The log-sum-exps of earlier queries are not written.
pub(super) fn log_sums_of_rows(
    queries: &Heads,
    shape: &AttentionShape,
    pooled: &CudaTensor,
    [start, end]: Bounds,
    (choice, first): (BlockChoice, usize),
    softmax_scale: f32,
) -> Result<CudaTensor, KernelError> {
    let scored = Scored::of_rows(shape, (choice, first), softmax_scale);
    scored.log_sums(&queries.with_kernel_strides(), [pooled, start, end])
}

impl PooledStep<'_> {
    /// The log-sum-exps of one query a row over the pooled keys that have ended, the query's own included, f32
    /// `[batch, num_heads, 1]`: with the bits of that row of [`Heads::pooled_log_sums`].
    ///
    /// # Errors
    /// Types or sizes that do not fit or have no kernel.
    pub fn log_sums(&self, q: &Heads, softmax_scale: f32) -> Result<CudaTensor, KernelError> {
        let (q, shape) = (q.with_kernel_strides(), self.shape(q)?);
        self.scored(&shape, softmax_scale)?.log_sums(&q, [self.pooled, self.start, self.start])
    }

    /// The blocks that one query a row chooses, i32 `[batch, 1, choosers, num_selected_blocks]`, as in a pass over
    /// whole rows. `q` are the layer's queries, or an indexer's, one for each chooser. They are scored with the pooled
    /// keys, of which the token itself may have ended one. `capacity`: tokens of the cache.
    pub(super) fn choose_in_order(
        self,
        q: &Heads,
        capacity: usize,
        softmax_scale: f32,
    ) -> Result<CudaTensor, KernelError> {
        // Where scores are compared, unscaled, no log-sum-exp is read.
        let takes_scores = self.choice.rule.takes_scores();
        let log_sums = if takes_scores { None } else { Some(self.log_sums(q, softmax_scale)?) };
        let scale = if takes_scores { 1.0 } else { softmax_scale };
        self.choose_by(q, log_sums.as_ref(), capacity, scale)
    }

    /// As [`choose_in_order`](Self::choose_in_order), by log-sum-exps that are known, f32 `[batch, num_heads, 1]`.
    fn choose_by(
        self,
        q: &Heads,
        log_sums: Option<&CudaTensor>,
        capacity: usize,
        scale: f32,
    ) -> Result<CudaTensor, KernelError> {
        let Self { pooled: keys, start, choice } = self;
        let (blocks, shape) = (choice.blocks, self.shape(q)?);
        let (batch, choosers) = (shape.batch, choice.num_choosers(shape.num_heads, shape.num_kv_heads));
        let num_blocks = capacity.div_ceil(blocks.select_block_size);
        let importance = keys.empty_contiguous(&[batch, choosers, 1, num_blocks], DType::F32);
        // Another tensor stands in for a log-sum-exp and for documents' ends, which are not read.
        let lse = log_sums.unwrap_or(&importance);
        self.scored(&shape, scale)?.launch(q, [keys, lse, start, start, &importance])?;
        let chosen = keys.empty_contiguous(&[batch, 1, choosers, blocks.num_selected_blocks], DType::I32);
        take_largest(&importance, start, &chosen, blocks.select_block_size, choice.forced, 0..1)?;
        Ok(chosen)
    }

    /// Attention of one query a row over the pooled keys, the query's own included, and `values` of their layout, and
    /// the blocks that it chooses by its probabilities: o, bf16 `[batch, 1, num_heads, head_dim]`, and the blocks as
    /// [`choose_in_order`](Self::choose_in_order) has them, both with the bits of whole rows with
    /// [`KeyOrder::Epochs`](sieve_core::KeyOrder::Epochs).
    pub(super) fn attend_in_order(
        self,
        q: &Heads,
        values: &CudaTensor,
        capacity: usize,
        softmax_scale: f32,
    ) -> Result<[CudaTensor; 2], KernelError> {
        let (q, shape) = (q.with_kernel_strides(), self.shape(q)?);
        let [batch, num_key_heads, num_slots, head_dim] = self.pooled.dims(NAME, "cache of keys")?;
        operands!(only OUTPUT, values: BF16[batch, num_key_heads, num_slots, head_dim] contiguous);
        let scored = self.scored(&shape, softmax_scale)?;
        let AttentionResult { o, lse, .. } = scored.attend(&q, [self.pooled, values, self.start, self.start])?;
        Ok([o, self.choose_by(&q, Some(&lse), capacity, softmax_scale)?])
    }

    /// Sizes of attention of the queries over the pooled keys.
    fn shape(&self, q: &Heads) -> Result<AttentionShape, KernelError> {
        let [batch, num_key_heads, num_slots, head_dim] = self.pooled.dims(NAME, "cache of keys")?;
        let start = self.start;
        operands!(only NAME,
            pooled: BF16[batch, num_key_heads, num_slots, head_dim] contiguous = self.pooled,
            start: I32[batch, 1] contiguous,
        );
        let shape = q.as_queries(NAME, num_key_heads, head_dim)?;
        let [rows, tokens] = [shape.batch, shape.seq_len];
        require!([rows, tokens] == [batch, 1], NAME, "queries of": format!("{rows} rows of {tokens} tokens"),
            "one token in each of the {batch} rows");
        Ok(shape)
    }

    fn scored<'a>(&self, shape: &'a AttentionShape, softmax_scale: f32) -> Result<Scored<'a>, KernelError> {
        let [_, _, num_slots, _] = self.pooled.dims(NAME, "cache of keys")?;
        let choice = self.choice;
        Ok(Scored { shape, choice, softmax_scale, num_slots, queries: 0..1, rows: Rows::BehindCache })
    }
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

/// The kernel that computes the importance of each block by the rule of this number, or log-sum-exps by [`LOG_SUMS`].
/// Its shared memory holds a tile of queries and two of keys in bf16, and the f32 probabilities.
fn nsa_importance_kernel(head_dim: usize, number: u8) -> SourceKernel {
    SourceKernel::new("nsa_importance")
        .define("HEAD_DIM", head_dim)
        .define("RULE", number)
        .threads(128)
        .shared_bytes(3 * TILE_ROWS * head_dim * 2 + TILE_ROWS * TILE_PITCH * 4)
}

/// The kernel that computes the output of attention over pooled keys and values. Its shared memory holds a tile of
/// queries, and two of keys and of values, in bf16.
fn nsa_compressed_output_kernel(head_dim: usize) -> SourceKernel {
    SourceKernel::new(OUTPUT).define("HEAD_DIM", head_dim).threads(128).shared_bytes(5 * TILE_ROWS * head_dim * 2)
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
    use sieve_core::{ChoiceRule, NsaBlocks};

    #[test]
    fn a_step_scores_its_own_block_where_no_pooled_key_of_it_has_ended() {
        // Token 2048 begins block 32, which a second thread block has; 127 pooled keys have ended.
        let (gpu, rule) = (Recorder::new(Hardware::HOPPER), ChoiceRule::LargestProbability);
        let (pooled, start) = (gpu.tensor(&[3, 2, 127, 64], DType::BF16), gpu.tensor(&[3, 1], DType::I32));
        let choice = BlockChoice { blocks: NsaBlocks::PUBLISHED, rule, forced: ForcedBlocks::NSA };
        let (step, q) =
            (PooledStep { pooled: &pooled, start: &start, choice }, gpu.tensor(&[3, 1, 8, 64], DType::BF16));
        gpu.take_steps();
        step.choose_in_order(&Heads::all(&q), 2049, 0.125).expect("sizes fit");
        let steps = gpu.take_steps();
        let launches = steps.iter().filter_map(|step| match step {
            Step::Launch(launch) => Some((launch.kernel.name(), launch.grid)),
            _ => None,
        });
        let expected = [("hopper_nsa_importance", [1, 2, 3]), ("hopper_nsa_importance", [2, 2, 3]), (NAME, [1, 2, 3])];
        assert_eq!(launches.collect::<Vec<_>>(), expected);
        let other = gpu.tensor(&[2, 1, 8, 64], DType::BF16);
        let error = step.choose_in_order(&Heads::all(&other), 2049, 0.125).map(drop).expect_err("rows").to_string();
        assert!(error.contains("queries of 2 rows of 1 tokens"), "{error}");
    }

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
