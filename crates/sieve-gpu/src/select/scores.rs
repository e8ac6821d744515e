//! Scores of pairs of query and key blocks: dot products of block means, or of cells of consecutive tokens.
use super::call::{CELL_SIDE, Call};
use super::order::Orders;
use crate::KernelError;
use crate::attention::{Heads, KernelFamily, KeySource};
use crate::runtime::{CudaTensor, SourceKernel, params};
use sieve_core::BlockScores;
use std::ops::Range;

/// Bytes of shared memory that select_cells takes.
const CELL_SHARED_BYTES: usize = 98_304;

/// Query blocks, and key blocks, of a tile of select_scores.
const SCORE_SIDE: usize = 64;

/// Means, and optionally variances, of query blocks and of key blocks.
pub(super) struct Means {
    means: [CudaTensor; 2],
    /// `None` if the method scores means alone.
    variances: Option<[CudaTensor; 2]>,
}

/// Operands of select_pool: tokens that are divided into blocks.
pub(super) struct Pooled<'a> {
    pub(super) heads: &'a Heads,
    /// Offset, token stride and batch stride of the heads, in elements.
    pub(super) at: [usize; 3],
    pub(super) num_heads: usize,
    pub(super) first_token: usize,
    pub(super) num_tokens: usize,
    /// Tokens of a pooled block.
    pub(super) block: usize,
    /// Tokens that the first block lacks at its beginning.
    pub(super) offset: usize,
    /// The permutation of the tokens, if they have one.
    pub(super) order: Option<&'a CudaTensor>,
}

/// How queries and keys are divided into blocks for scores by means.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    pub(super) num_queries: usize,
    /// Tokens of a key block.
    pub(super) block: usize,
    /// Tokens of a query block.
    pub(super) query_block: usize,
    /// Queries that the first block lacks at its beginning.
    pub(super) offset: usize,
}

/// Operands of select_cells: dot products of query cells with key cells. A cell is `cell` consecutive tokens.
pub(super) struct Cells<'a> {
    /// Position of the first query cell.
    pub(super) first: usize,
    /// Tokens between the starts of two query cells.
    pub(super) step: usize,
    pub(super) cell: usize,
    /// Key cells of a block of keys.
    pub(super) per_block: usize,
    /// Whether the tokens of a query cell are paired with the tokens of a key cell in reverse order.
    pub(super) reversed: bool,
    /// Factor on the dot products of cells.
    pub(super) scale: f32,
    /// Whether a score is the log-sum-exp of a query cell's products with a key block; otherwise it is the largest
    /// product of a query block with a key block.
    pub(super) is_lse: bool,
    /// Rows of the scores: query cells or query blocks.
    pub(super) rows: usize,
    /// The permutation of the keys, if they have one.
    pub(super) order: Option<&'a CudaTensor>,
}

impl Call<'_> {
    /// Whether scores are log-sum-exps of cells, see [`Cells::is_lse`].
    pub(super) fn is_lse(&self) -> bool {
        matches!(self.selection.scores.by, BlockScores::Cells { .. })
    }

    /// Position of the first query cell. With segments, blocks of queries begin at the call's first row.
    fn first_query(&self) -> usize {
        let context = self.selection.shape.context();
        match self.selection.scores.by {
            BlockScores::Cells { stride, .. } if self.segment() == 0 => context / stride * stride,
            _ => context,
        }
    }

    /// Rows of the scores that select_cells writes.
    pub(super) fn score_rows(&self) -> usize {
        match self.selection.scores.by {
            BlockScores::Cells { stride, .. } => (self.selection.shape.num_keys - self.first_query()).div_ceil(stride),
            _ => self.selection.blocks()[0],
        }
    }

    /// Means and variances of blocks, each f32 `[heads, blocks, head_dim]`; without variances the means twice.
    pub(super) fn pool(&self, pooled: &Pooled<'_>, has_variance: bool) -> Result<[CudaTensor; 2], KernelError> {
        let p = pooled;
        let blocks = (p.num_tokens + p.offset).div_ceil(p.block);
        let head_dim = self.shape.head_dim;
        let means = self.new_f32(&[p.num_heads, blocks, head_dim]);
        let variances = if has_variance { self.new_f32(&[p.num_heads, blocks, head_dim]) } else { means.clone() };
        let params = params!(SelectPoolParams {
            [x_offset, token_stride]: p.at,
            head_dim,
            { first_token, num_tokens, block, offset }: p,
            has_order: p.order.is_some(),
            has_variance,
        });
        let tensors = [p.heads.tensor(), p.order.unwrap_or(&means), &means, &variances];
        // SAFETY: tokens, heads and strides are the tensor's own, and `order` is a permutation of them; every mean is
        // written.
        unsafe { SELECT_POOL.launch([blocks, p.num_heads, 1], &tensors, &params) }?;
        Ok([means, variances])
    }

    /// Operands of select_pool for the keys of all KV heads.
    pub(super) fn pooled_keys<'a>(&'a self, order: Option<&'a CudaTensor>) -> Pooled<'a> {
        let s = self.selection;
        Pooled {
            heads: &self.qkv.k,
            at: self.k,
            num_heads: s.shape.num_kv_heads,
            first_token: 0,
            num_tokens: s.shape.num_keys,
            block: s.scores.block,
            offset: 0,
            order,
        }
    }

    /// Means of the query blocks and key blocks of all heads.
    pub(super) fn means(&self, orders: &Orders) -> Result<Means, KernelError> {
        let s = self.selection;
        let has_variance = matches!(s.scores.by, BlockScores::Means { variances } if variances != 0.0);
        let queries = Pooled {
            heads: &self.qkv.q,
            at: self.q,
            num_heads: s.shape.num_heads,
            first_token: s.shape.context(),
            num_tokens: s.shape.num_queries,
            block: s.scores.query_block,
            offset: s.scores.offset,
            order: orders.queries.as_ref(),
        };
        let [q, q_variance] = self.pool(&queries, has_variance)?;
        let [k, k_variance] = self.pool(&self.pooled_keys(orders.keys.as_ref()), has_variance)?;
        Ok(Means { means: [q, k], variances: has_variance.then_some([q_variance, k_variance]) })
    }

    /// Scores of each query block with each key block, f32 `[heads, rows, columns]`: the scaled dot product of their
    /// means, plus the dot product of their variances where the method has them.
    pub(super) fn scores_by_means(&self, means: &Means, heads: Range<usize>) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let [rows, columns] = s.blocks();
        let scores = self.new_f32(&[heads.len(), rows, columns]);
        let cut = Cut {
            num_queries: s.shape.num_queries,
            block: s.scores.block,
            query_block: s.scores.query_block,
            offset: s.scores.offset,
        };
        let adds = false;
        self.dot_products(&means.means, &scores, cut, heads.clone(), s.scores.softmax_scale, adds)?;
        if let (Some(block_variances), BlockScores::Means { variances: scale }) = (&means.variances, s.scores.by) {
            self.dot_products(block_variances, &scores, cut, heads, scale, !adds)?;
        }
        Ok(scores)
    }

    /// Scaled dot products of each query block's vector with each key block's, written to `scores`, or added with
    /// `adds`.
    pub(super) fn dot_products(
        &self,
        [q, k]: &[CudaTensor; 2],
        scores: &CudaTensor,
        cut: Cut,
        heads: Range<usize>,
        scale: f32,
        adds: bool,
    ) -> Result<(), KernelError> {
        let s = self.selection;
        let params = params!(SelectScoresParams {
            { num_queries, block, offset, query_block }: cut,
            { num_keys, num_heads, num_kv_heads }: s.shape,
            head_dim: self.shape.head_dim,
            first_head: heads.start,
            scale,
            adds,
        });
        let rows = (cut.num_queries + cut.offset).div_ceil(cut.query_block);
        let grid = [s.shape.num_keys.div_ceil(cut.block).div_ceil(SCORE_SIDE), rows.div_ceil(SCORE_SIDE), heads.len()];
        // SAFETY: the means have these sizes; writes within the scores.
        unsafe { SELECT_SCORES.launch(grid, &[q, k, scores], &params) }
    }

    /// Launches select_cells; returns f32 `[heads, cells.rows, key blocks]`.
    pub(super) fn launch_cells(&self, cells: &Cells<'_>, heads: Range<usize>) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let columns = s.shape.num_keys.div_ceil(cells.cell * cells.per_block);
        let scores = self.new_f32(&[heads.len(), cells.rows, columns]);
        let params = params!(SelectCellsParams {
            { num_queries, num_keys, num_heads, num_kv_heads }: s.shape,
            first_head: heads.start,
            [q_offset, q_token_stride]: self.q,
            [k_offset, k_token_stride]: self.k,
            first_query: cells.first,
            { cell, per_block, reversed, scale }: cells,
            query_step: cells.step,
            out_rows: cells.rows,
            out_columns: columns,
        });
        // Query cells that the rows of scores need; a row is a query cell, or a block of `per_block` of them.
        let most = cells.rows * if cells.is_lse { 1 } else { cells.per_block };
        let query_cells = (s.shape.num_keys - cells.first).div_ceil(cells.step).min(most);
        let grid =
            [s.shape.num_keys.div_ceil(cells.cell).div_ceil(CELL_SIDE), query_cells.div_ceil(CELL_SIDE), heads.len()];
        let [q, k] = [self.qkv.q.tensor(), self.qkv.k.tensor()];
        // Keys that do not move have no order: `k` stands in for it, and is not read as an order.
        let tensors = [q, k, cells.order.unwrap_or(k), &scores];
        let family = KernelFamily::of(&self.shape, KeySource::Dense, self.qkv.q.tensor());
        let kernel = select_cells_kernel(self.shape.head_dim, [cells.is_lse, cells.order.is_some()], family);
        // SAFETY: sizes and strides checked in `new`; tokens outside the row are not read; writes within `scores`.
        unsafe { kernel.launch(grid, &tensors, &params) }?;
        Ok(scores)
    }

    /// Logits of the queries at some positions, f32 `[heads, positions, num_keys]`.
    pub(super) fn logits(&self, positions: Range<usize>, heads: Range<usize>) -> Result<CudaTensor, KernelError> {
        let cells = Cells {
            first: positions.start,
            step: 1,
            cell: 1,
            per_block: 1,
            reversed: false,
            scale: self.selection.scores.softmax_scale,
            is_lse: false,
            rows: positions.len(),
            order: None,
        };
        self.launch_cells(&cells, heads)
    }

    /// Scores of blocks by cells, f32 `[heads, rows, columns]`.
    pub(super) fn scores_by_cells(&self, orders: &Orders, heads: Range<usize>) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let [rows, columns] = s.blocks();
        let (cell, scale, reversed) = match s.scores.by {
            BlockScores::Cells { stride, reversed, norm } => {
                let scale = s.scores.softmax_scale / (stride as f64 * norm) as f32;
                (stride, scale, reversed)
            }
            BlockScores::LargestOfGroups(group) => (group, s.scores.softmax_scale, false),
            _ => (s.scores.block, s.scores.softmax_scale, false),
        };
        let cells = Cells {
            first: self.first_query(),
            step: cell,
            cell,
            per_block: s.scores.block / cell,
            reversed,
            scale,
            is_lse: self.is_lse(),
            rows: self.score_rows(),
            order: orders.keys.as_ref(),
        };
        let scores = self.launch_cells(&cells, heads.clone())?;
        if !self.is_lse() {
            return Ok(scores);
        }
        let masses = self.new_f32(&[heads.len(), rows, columns]);
        let params = params!(SelectCellSumsParams {
            { num_queries, num_keys }: s.shape,
            { block, offset, query_block }: s.scores,
            segment: self.segment(),
            first_query: cells.first,
            cell,
            query_cells: cells.rows,
        });
        let grid = [rows, heads.len(), 1];
        // SAFETY: reads what select_cells wrote, writes the masses that select_choose reads.
        unsafe { SELECT_CELL_SUMS.launch(grid, &[&scores, &masses], &params) }?;
        Ok(masses)
    }
}

const SELECT_POOL: SourceKernel = SourceKernel::new("select_pool").threads(128);
const SELECT_SCORES: SourceKernel = SourceKernel::new("select_scores").threads(256);

/// The kernel that multiplies cells of queries and keys. `is_lse`: scores are log-sum-exps; otherwise largest products.
/// `is_ordered`: keys are permuted.
fn select_cells_kernel(head_dim: usize, [is_lse, is_ordered]: [bool; 2], family: KernelFamily) -> SourceKernel {
    let (name, room_to_align) = match family {
        KernelFamily::Portable => ("select_cells", 0),
        KernelFamily::Hopper => ("hopper_select_cells", 1024),
    };
    SourceKernel::new(name)
        .define("HEAD_DIM", head_dim)
        .define("LSE", u8::from(is_lse))
        .define("ORDERED", u8::from(is_ordered))
        .threads(256)
        .shared_bytes(CELL_SHARED_BYTES + room_to_align)
}

const SELECT_CELL_SUMS: SourceKernel = SourceKernel::new("select_cell_sums").threads(128);
