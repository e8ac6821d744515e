//! Launches of `kernels/select_*.cu`: a selector's choice of blocks, from queries and keys to the lists that attention reads.
use crate::attention::heads::{AttentionShape, Heads, Qkv};
use crate::attention::hopper_tiling::{KernelFamily, attention_family};
use crate::attention::tiling::KeySource;
use crate::error::KernelError;
use crate::runtime::cuda_tensor::CudaTensor;
use crate::runtime::params::params;
use crate::runtime::source_kernel::SourceKernel;
use burn::tensor::DType;
use sieve_core::{BlockScores, BlockSelection, KeepBlocks, MaskLayout};

const NAME: &str = "select_blocks";

/// Bytes of scores that are held at a time.
const SCORE_BYTES: usize = 1 << 30;

/// Cells of a tile of select_cells, its columns a step, and its shared memory.
const CELL_SIDE: usize = 128;
const CELL_STEP: usize = 64;
const CELL_SHARED_BYTES: usize = 98_304;

/// Side of a tile of select_scores.
const SCORE_SIDE: usize = 64;

/// The lists of a selection, on the device.
#[derive(Debug, Clone)]
pub struct SelectedBlocks {
    /// Where the arrays are in `data`.
    pub layout: MaskLayout,
    /// What attention reads, i32.
    pub data: CudaTensor,
    /// Kept tiles of each row of each list, i32 `[lists, query tiles]`.
    pub counts: CudaTensor,
    /// Pairs of a query and a kept key not after it, likewise.
    pub pairs: CudaTensor,
    /// Rows of each head with a score that is no number: such heads are dense. i32 `[num_heads]`.
    pub nan_rows: CudaTensor,
}

/// Chooses the blocks of keys that each block of the last `selection.num_queries` tokens keeps. Nothing is read back.
///
/// # Shapes
/// - q, k: bf16 `[1, num_keys, heads, head_dim]`
///
/// # Errors
/// Sizes that do not fit the selection; cells of heads whose width is no multiple of 64, or that do not fit blocks.
pub fn select_blocks(qkv: &Qkv, selection: &BlockSelection) -> Result<SelectedBlocks, KernelError> {
    let call = Call::new(qkv, selection)?;
    let [block_rows, columns] = selection.blocks();
    let like = call.qkv.q.tensor();
    let heads = selection.num_heads;
    let kept = like.empty_contiguous(
        &[heads, block_rows, columns.div_ceil(u32::BITS as usize)],
        DType::I32,
    );
    let nan_rows = like.zeros_contiguous(&[heads], DType::I32);
    let means = match selection.scores {
        BlockScores::Means => Some(call.means()?),
        _ => None,
    };
    let row_bytes = call.score_rows() * columns * DType::F32.size();
    let slab = (SCORE_BYTES / row_bytes.max(1)).clamp(1, heads);
    for first in (0..heads).step_by(slab) {
        let count = slab.min(heads - first);
        let scores = match &means {
            Some(means) => call.products(means, first, count)?,
            None => call.cells(first, count)?,
        };
        call.choose(&scores, &kept, &nan_rows, first, count)?;
    }
    call.lists(&kept, nan_rows)
}

/// A selection with its checked operands.
struct Call<'a> {
    selection: &'a BlockSelection,
    shape: AttentionShape,
    qkv: Qkv,
    q: [u64; 3],
    k: [u64; 3],
}

impl<'a> Call<'a> {
    fn new(qkv: &Qkv, selection: &'a BlockSelection) -> Result<Self, KernelError> {
        let shape = qkv.shape(NAME)?;
        let s = selection;
        let sizes = [
            shape.batch,
            shape.seq_len,
            shape.num_heads,
            shape.num_kv_heads,
        ];
        let fits = sizes == [1, s.num_keys, s.num_heads, s.num_kv_heads]
            && (1..=s.num_keys).contains(&s.num_queries)
            && s.offset < s.block
            && s.block.is_multiple_of(s.tile)
            && (s.tile == s.block || s.offset == 0)
            && s.num_heads.is_multiple_of(s.heads_per_list)
            && s.keep != KeepBlocks::Top(0);
        let unsupported = |what, got, supported: &str| {
            Err(KernelError::Unsupported {
                kernel: NAME,
                what,
                got,
                supported: supported.to_owned(),
            })
        };
        if !fits {
            return unsupported(
                "selection",
                format!("{shape:?} with {s:?}"),
                "one row as long as the selection says, tiles that divide blocks",
            );
        }
        if let Some(cell) = cell_of(s.scores) {
            if !shape.head_dim.is_multiple_of(CELL_STEP) {
                let supported = "multiples of 64, for products of cells";
                return unsupported("head_dim", shape.head_dim.to_string(), supported);
            }
            let per_block = s.block / cell.max(1);
            let fits = s.block.is_multiple_of(cell) && per_block.is_power_of_two();
            if !fits || per_block > CELL_SIDE {
                let got = format!("{cell} tokens of {}", s.block);
                let supported = "blocks of 1, 2, 4, ... 128 cells";
                return unsupported("cell", got, supported);
            }
        }
        let qkv = qkv.walkable();
        let [q, k, _] = qkv.head_words(NAME)?;
        Ok(Self {
            selection,
            shape,
            qkv,
            q,
            k,
        })
    }

    fn is_lse(&self) -> bool {
        matches!(self.selection.scores, BlockScores::Cells { .. })
    }

    /// Position of the first cell of queries.
    fn first_query(&self) -> usize {
        let context = self.selection.num_keys - self.selection.num_queries;
        match self.selection.scores {
            BlockScores::Cells { stride, .. } => context / stride * stride,
            _ => context,
        }
    }

    /// Rows of the largest array of scores.
    fn score_rows(&self) -> usize {
        match self.selection.scores {
            BlockScores::Cells { stride, .. } => {
                (self.selection.num_keys - self.first_query()).div_ceil(stride)
            }
            _ => self.selection.blocks()[0],
        }
    }

    fn new_f32(&self, shape: &[usize]) -> CudaTensor {
        self.qkv.q.tensor().empty_contiguous(shape, DType::F32)
    }

    /// Means of the blocks of all heads of q and of k.
    fn means(&self) -> Result<[CudaTensor; 2], KernelError> {
        let s = self.selection;
        let [rows, columns] = s.blocks();
        let d = self.shape.head_dim;
        let pool = |heads: &Heads, at: [u64; 3], count, blocks, tokens: [usize; 3]| {
            let means = self.new_f32(&[count, blocks, d]);
            let [first_token, num_tokens, offset] = tokens;
            let params = params!(SelectPoolParams {
                x_offset: at[0],
                token_stride: at[1],
                head_dim: d,
                first_token,
                num_tokens,
                block: s.block,
                offset,
            });
            // SAFETY: tokens, heads and strides are the tensor's own; every mean is written.
            unsafe {
                select_pool_kernel().launch([blocks, count, 1], &[heads.tensor(), &means], &params)
            }?;
            Ok::<_, KernelError>(means)
        };
        let context = s.num_keys - s.num_queries;
        let queries = [context, s.num_queries, s.offset];
        Ok([
            pool(&self.qkv.q, self.q, s.num_heads, rows, queries)?,
            pool(
                &self.qkv.k,
                self.k,
                s.num_kv_heads,
                columns,
                [0, s.num_keys, 0],
            )?,
        ])
    }

    /// Products of means, f32 `[count, rows, columns]`.
    fn products(
        &self,
        [q, k]: &[CudaTensor; 2],
        first: usize,
        count: usize,
    ) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let [rows, columns] = s.blocks();
        let scores = self.new_f32(&[count, rows, columns]);
        let params = params!(SelectScoresParams {
            num_queries: s.num_queries,
            num_keys: s.num_keys,
            block: s.block,
            offset: s.offset,
            num_heads: s.num_heads,
            num_kv_heads: s.num_kv_heads,
            head_dim: self.shape.head_dim,
            first_head: first,
            scale: s.softmax_scale,
        });
        let grid = [
            columns.div_ceil(SCORE_SIDE),
            rows.div_ceil(SCORE_SIDE),
            count,
        ];
        // SAFETY: the means have these sizes; writes the scores that select_choose reads.
        unsafe { select_scores_kernel().launch(grid, &[q, k, &scores], &params) }?;
        Ok(scores)
    }

    /// Scores of blocks by cells, f32 `[count, rows, columns]`.
    fn cells(&self, first: usize, count: usize) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let [rows, columns] = s.blocks();
        let (cell, scale, reversed) = match s.scores {
            BlockScores::Cells {
                stride,
                reversed,
                norm,
            } => {
                let scale = s.softmax_scale / (stride as f64 * norm) as f32;
                (stride, scale, reversed)
            }
            BlockScores::LargestOfGroups(group) => (group, s.softmax_scale, false),
            BlockScores::Means => (s.block, s.softmax_scale, false),
        };
        let (query_cells, key_cells) = (
            (s.num_keys - self.first_query()).div_ceil(cell),
            s.num_keys.div_ceil(cell),
        );
        let score_rows = self.score_rows();
        let scores = self.new_f32(&[count, score_rows, columns]);
        let params = params!(SelectCellsParams {
            num_queries: s.num_queries,
            num_keys: s.num_keys,
            num_heads: s.num_heads,
            num_kv_heads: s.num_kv_heads,
            first_head: first,
            q_offset: self.q[0],
            k_offset: self.k[0],
            q_token_stride: self.q[1],
            k_token_stride: self.k[1],
            first_query: self.first_query(),
            cell,
            per_block: s.block / cell,
            reversed,
            out_rows: score_rows,
            out_columns: columns,
            scale,
        });
        let grid = [
            key_cells.div_ceil(CELL_SIDE),
            query_cells.div_ceil(CELL_SIDE),
            count,
        ];
        let tensors = [self.qkv.q.tensor(), self.qkv.k.tensor(), &scores];
        let family = attention_family(&self.shape, KeySource::Dense, self.qkv.q.tensor());
        let kernel = select_cells_kernel(self.shape.head_dim, self.is_lse(), family);
        // SAFETY: sizes and strides checked in `new`; tokens outside the row are not read; writes within `scores`.
        unsafe { kernel.launch(grid, &tensors, &params) }?;
        if !self.is_lse() {
            return Ok(scores);
        }
        let masses = self.new_f32(&[count, rows, columns]);
        let params = params!(SelectCellSumsParams {
            num_queries: s.num_queries,
            num_keys: s.num_keys,
            block: s.block,
            offset: s.offset,
            first_query: self.first_query(),
            cell,
            query_cells,
        });
        // SAFETY: reads what select_cells wrote, writes the masses that select_choose reads.
        unsafe {
            select_cell_sums_kernel().launch([rows, count, 1], &[&scores, &masses], &params)
        }?;
        Ok(masses)
    }

    /// Marks the blocks that rows of some heads keep.
    fn choose(
        &self,
        scores: &CudaTensor,
        kept: &CudaTensor,
        nan_rows: &CudaTensor,
        first: usize,
        count: usize,
    ) -> Result<(), KernelError> {
        let [rows, columns] = self.selection.blocks();
        let (top, goal) = match self.selection.keep {
            KeepBlocks::Mass(share) => (0, share as f32),
            KeepBlocks::Top(top) => (top, 0.0),
        };
        let s = self.selection;
        let params = params!(SelectChooseParams {
            num_queries: s.num_queries,
            num_keys: s.num_keys,
            block: s.block,
            offset: s.offset,
            first_head: first,
            top,
            goal,
        });
        let kernel = select_choose_kernel(self.is_lse(), self.selection.counts_own)
            .shared_bytes(columns * DType::F32.size());
        // SAFETY: reads admitted scores, writes every word of these heads' rows.
        unsafe { kernel.launch([rows, count, 1], &[scores, kept, nan_rows], &params) }
    }

    /// The lists that attention reads.
    fn lists(
        &self,
        kept: &CudaTensor,
        nan_rows: CudaTensor,
    ) -> Result<SelectedBlocks, KernelError> {
        let s = self.selection;
        let [rows, columns] = s.tiles();
        let (lists, num_words) = (s.num_lists(), columns.div_ceil(u32::BITS as usize));
        let new = |shape: &[usize]| kept.empty_contiguous(shape, DType::I32);
        let bits = new(&[lists, rows, num_words]);
        let (counts, pairs) = (new(&[lists, rows]), new(&[lists, rows]));
        let params = params!(SelectListsParams {
            num_queries: s.num_queries,
            num_keys: s.num_keys,
            block: s.block,
            offset: s.offset,
            tile: s.tile,
            heads_per_list: s.heads_per_list,
            local: s.local_tokens,
            sinks: s.first_tiles,
        });
        let tensors = [kept, &nan_rows, &bits, &counts, &pairs];
        // SAFETY: reads what select_choose wrote, writes every element of bits, counts and pairs.
        unsafe { select_lists_kernel().launch([rows.div_ceil(4), lists, 1], &tensors, &params) }?;
        let layout = s.layout();
        let data = new(&[layout.words]);
        let [_, row_ptr_at, tile_idx_at, ..] = layout.places;
        let all_rows = lists * rows;
        let params = params!(SelectOffsetsParams {
            rows: all_rows,
            row_ptr_at,
        });
        // SAFETY: row_ptr has one word more than there are rows.
        unsafe { select_offsets_kernel().launch([1, 1, 1], &[&counts, &data], &params) }?;
        let params = params!(SelectFillParams {
            rows: all_rows,
            words: num_words,
            row_ptr_at,
            tile_idx_at,
        });
        let grid = [all_rows.div_ceil(4), 1, 1];
        // SAFETY: tile_idx has room for every tile that rows may keep.
        unsafe { select_fill_kernel().launch(grid, &[&bits, &data], &params) }?;
        Ok(SelectedBlocks {
            layout,
            data,
            counts,
            pairs,
            nan_rows,
        })
    }
}

/// Tokens of a cell, where blocks are compared by cells.
fn cell_of(scores: BlockScores) -> Option<usize> {
    match scores {
        BlockScores::Means => None,
        BlockScores::LargestOfGroups(cell) | BlockScores::Cells { stride: cell, .. } => Some(cell),
    }
}

fn select_pool_kernel() -> SourceKernel {
    SourceKernel::new("select_pool").threads(128)
}

fn select_scores_kernel() -> SourceKernel {
    SourceKernel::new("select_scores").threads(256)
}

fn select_cells_kernel(head_dim: usize, is_lse: bool, family: KernelFamily) -> SourceKernel {
    let (name, room_to_align) = match family {
        KernelFamily::Portable => ("select_cells", 0),
        KernelFamily::Hopper => ("hopper_select_cells", 1024),
    };
    SourceKernel::new(name)
        .define("HEAD_DIM", head_dim)
        .define("LSE", u8::from(is_lse))
        .threads(256)
        .shared_bytes(CELL_SHARED_BYTES + room_to_align)
}

fn select_cell_sums_kernel() -> SourceKernel {
    SourceKernel::new("select_cell_sums").threads(128)
}

fn select_choose_kernel(is_mass: bool, is_forced: bool) -> SourceKernel {
    SourceKernel::new("select_choose")
        .define("IS_MASS", u8::from(is_mass))
        .define("FORCED", u8::from(is_forced))
        .threads(128)
}

fn select_lists_kernel() -> SourceKernel {
    SourceKernel::new("select_lists").threads(128)
}

fn select_offsets_kernel() -> SourceKernel {
    SourceKernel::new("select_offsets").threads(1024)
}

fn select_fill_kernel() -> SourceKernel {
    SourceKernel::new("select_fill").threads(128)
}

/// The Hopper family's specialisations for heads of these widths.
pub(crate) fn hopper_select_blocks_kernels(head_dims: &[usize]) -> Vec<SourceKernel> {
    cells_kernels(head_dims, KernelFamily::Hopper)
}

fn cells_kernels(head_dims: &[usize], family: KernelFamily) -> Vec<SourceKernel> {
    let widths = head_dims.iter().filter(|dim| dim.is_multiple_of(CELL_STEP));
    let of = |&dim| [true, false].map(|is_lse| select_cells_kernel(dim, is_lse, family));
    widths.flat_map(of).collect()
}

/// Every portable specialisation for heads of these widths.
pub(crate) fn select_blocks_kernels(head_dims: &[usize]) -> Vec<SourceKernel> {
    let mut kernels = vec![
        select_pool_kernel(),
        select_scores_kernel(),
        select_cell_sums_kernel(),
        select_lists_kernel(),
        select_offsets_kernel(),
        select_fill_kernel(),
        select_choose_kernel(false, false),
        select_choose_kernel(true, true),
    ];
    kernels.extend(cells_kernels(head_dims, KernelFamily::Portable));
    kernels
}
