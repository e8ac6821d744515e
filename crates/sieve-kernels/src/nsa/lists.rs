//! Launches of `kernels/nsa_list_counts.cu` and `kernels/nsa_lists.cu`: the queries that chose each block.
use crate::error::KernelError;
use crate::runtime::cuda_tensor::CudaTensor;
use crate::runtime::params::params;
use crate::runtime::source_kernel::SourceKernel;
use burn::tensor::DType;
use sieve_core::NsaBlocks;

/// Queries of a block of threads.
const PART_QUERIES: usize = 256;

/// The lists of some queries' choices.
#[derive(Debug, Clone)]
pub struct ChoiceLists {
    /// `{query, choice}`, i32 `[batch, num_kv_heads, choices, 2]`.
    pub entries: CudaTensor,
    /// Pieces of lists, i32 `[batch, num_kv_heads, max_items, 4]`.
    pub items: CudaTensor,
    /// Of each list, then how many of all are taken, 0 before and after a pass; i32 `[batch * num_kv_heads + 1]`.
    pub num_items: CudaTensor,
}

impl ChoiceLists {
    /// Of the queries `first .. first + count`, in pieces of at most `item_queries`.
    pub(super) fn new(
        indices: &CudaTensor,
        doc_start: &CudaTensor,
        blocks: NsaBlocks,
        (first, count): (usize, usize),
        item_queries: usize,
    ) -> Result<Self, KernelError> {
        let [batch, seq_len, heads, k] = indices.dims("nsa_lists", "block_indices")?;
        let cells = seq_len.div_ceil(blocks.select_block_size);
        let parts = count.div_ceil(PART_QUERIES);
        let choices = count * k;
        let max_items = choices.div_ceil(item_queries) + cells;
        let new = |sizes: &[usize]| indices.empty_contiguous(sizes, DType::I32);
        let counts = new(&[batch, heads, parts, cells]);
        let lists = Self {
            entries: new(&[batch, heads, choices, 2]),
            items: new(&[batch, heads, max_items, 4]),
            num_items: new(&[batch * heads + 1]),
        };
        let params = params!(NsaCellsParams {
            seq_len,
            num_kv_heads: heads,
            num_selected: k,
            select_size: blocks.select_block_size,
            num_cells: cells,
            first_query: first,
            num_queries: count,
            item_queries,
            max_items,
        });
        let grid = [parts, heads, batch];
        let tensors = [indices, doc_start, &counts];
        // SAFETY: indices name blocks of the query's document at or before it, whose cells are below `cells`; writes
        // all counts.
        unsafe { nsa_list_counts_kernel(cells).launch(grid, &tensors, &params) }?;
        let tensors = [
            indices,
            doc_start,
            &counts,
            &lists.entries,
            &lists.items,
            &lists.num_items,
        ];
        // SAFETY: as above; there is room for every choice and for every piece of a list.
        unsafe { nsa_lists_kernel(cells).launch(grid, &tensors, &params) }?;
        Ok(lists)
    }

    /// Choices a KV head has room for, and pieces of lists.
    pub(super) fn capacity(&self) -> [usize; 2] {
        [&self.entries, &self.items].map(|x| x.shape()[2])
    }
}

/// Cells (of `select_block_size` positions each, see `kernels/common/nsa_cells.cuh`) that a launch has shared memory
/// for: rounded up, because the kernel cache compiles one specialisation for each size.
fn cells_with_room(num_cells: usize) -> usize {
    num_cells.next_power_of_two().max(1024)
}

/// The kernel that counts, for rows of `num_cells` cells.
pub(super) fn nsa_list_counts_kernel(num_cells: usize) -> SourceKernel {
    SourceKernel::new("nsa_list_counts")
        .threads(256)
        .shared_bytes(cells_with_room(num_cells) * 4)
}

/// The kernel that makes the lists, for rows of `num_cells` cells.
pub(super) fn nsa_lists_kernel(num_cells: usize) -> SourceKernel {
    SourceKernel::new("nsa_lists")
        .threads(512)
        .shared_bytes(cells_with_room(num_cells) * 8)
}
