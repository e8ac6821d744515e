//! Launches of `kernels/nsa_list_counts.cu` and `kernels/nsa_lists.cu`: the queries that chose each block.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, require};
use std::ops::Range;

/// Queries that one thread block reads.
const PART_QUERIES: usize = 256;

/// For each KV head and block of keys, the list of the queries that chose the block. Long lists are divided into items,
/// the work of one thread block.
#[derive(Debug, Clone)]
pub struct ChoiceLists {
    /// `{query, number of its choice}`, i32 `[batch, num_kv_heads, choices, 2]`.
    pub entries: CudaTensor,
    /// Items of work, each a part of one block's entries: `{first entry, number of entries, block, index among the
    /// block's items}`, i32 `[batch, num_kv_heads, max_items, 4]`.
    pub items: CudaTensor,
    /// Number of items of each row and KV head, then a counter of the items that thread blocks have fetched, which is 0
    /// before and after a pass; i32 `[batch * num_kv_heads + 1]`.
    pub num_items: CudaTensor,
}

/// What has a list of its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Listed {
    /// Tokens of a block that `block_indices` name.
    pub(super) block_size: usize,
    /// Neighbouring blocks of `block_indices` that have one list: 1, or 2 where they come in pairs.
    pub(super) per_list: usize,
}

impl Listed {
    /// Tokens of what a list is of.
    pub(super) fn size(self) -> usize {
        self.block_size * self.per_list
    }
}

impl ChoiceLists {
    /// Lists of the choices of `queries`, in items of at most `item_queries` queries.
    pub(super) fn new(
        indices: &CudaTensor,
        doc_start: &CudaTensor,
        listed: Listed,
        queries: &Range<usize>,
        item_queries: usize,
    ) -> Result<Self, KernelError> {
        let [batch, seq_len, heads, num_indices] = indices.dims("nsa_lists", "block_indices")?;
        let shared_bytes = indices.hardware().max_shared_bytes;
        require_cells("nsa_lists", seq_len, listed.size(), shared_bytes)?;
        // A cell is a run of as many positions of the row as a list is of. A block counts in the cell where it begins.
        let cells = seq_len.div_ceil(listed.size());
        let num_selected = num_indices / listed.per_list;
        let parts = queries.len().div_ceil(PART_QUERIES);
        let choices = queries.len() * num_selected;
        // Full items, and for each block's list a last one that is not full.
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
            num_selected,
            select_size: listed.size(),
            num_cells: cells,
            first_query: queries.start,
            num_queries: queries.len(),
            item_queries,
            max_items,
            per_cell: listed.per_list,
        });
        let grid = [parts, heads, batch];
        let tensors = [indices, doc_start, &counts];
        // SAFETY: indices name blocks of the query's document at or before it, whose cells are below `cells`; writes
        // all counts.
        unsafe { nsa_list_counts_kernel(cells, shared_bytes).launch(grid, &tensors, &params) }?;
        let tensors = [indices, doc_start, &counts, &lists.entries, &lists.items, &lists.num_items];
        // SAFETY: as above; there is room for every choice and every item.
        unsafe { nsa_lists_kernel(cells, shared_bytes).launch(grid, &tensors, &params) }?;
        Ok(lists)
    }

    /// The longest row, in tokens, for which one list counter for each block of `block_size` tokens fits into
    /// `shared_bytes` of shared memory.
    pub fn most_tokens(block_size: usize, shared_bytes: usize) -> usize {
        most_cells(shared_bytes) * block_size
    }

    /// Capacity of the lists of a KV head: number of (query, block) choices, and number of work items.
    pub(super) fn capacity(&self) -> [usize; 2] {
        [&self.entries, &self.items].map(|x| x.shape()[2])
    }
}

/// Refuses rows with more blocks of `size` tokens than lists can be made of.
pub(super) fn require_cells(
    kernel: &'static str,
    seq_len: usize,
    size: usize,
    shared_bytes: usize,
) -> Result<(), KernelError> {
    let most = ChoiceLists::most_tokens(size, shared_bytes);
    let got = || format!("{seq_len} tokens in selected blocks of {size}");
    require!(seq_len <= most, kernel, "rows of": got(),
        "up to {most} tokens, by this GPU's shared memory; larger blocks take longer rows");
    Ok(())
}

/// Bytes of shared memory that nsa_lists uses for each cell.
const CELL_BYTES: usize = 8;
/// Most bytes of shared memory that nsa_lists uses beside its cells.
const STATIC_BYTES: usize = 1024;

/// The most cells of a row, by the shared memory of a thread block.
fn most_cells(shared_bytes: usize) -> usize {
    shared_bytes.saturating_sub(STATIC_BYTES) / CELL_BYTES
}

/// Number of cells for which a launch reserves shared memory: a power of two, so that few different launches exist, but
/// never more than fit the shared memory of a thread block.
fn cells_with_room(num_cells: usize, shared_bytes: usize) -> usize {
    let rounded = num_cells.next_power_of_two().max(1024);
    rounded.min(most_cells(shared_bytes)).max(num_cells)
}

/// The kernel that counts the choices of each cell, for rows of `num_cells` cells, on a device whose thread blocks have
/// at most `shared_bytes` of shared memory.
fn nsa_list_counts_kernel(num_cells: usize, shared_bytes: usize) -> SourceKernel {
    SourceKernel::new("nsa_list_counts").threads(256).shared_bytes(cells_with_room(num_cells, shared_bytes) * 4)
}

/// The kernel that builds the lists, with the same arguments.
fn nsa_lists_kernel(num_cells: usize, shared_bytes: usize) -> SourceKernel {
    SourceKernel::new("nsa_lists").threads(512).shared_bytes(cells_with_room(num_cells, shared_bytes) * CELL_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Recorder};

    /// The lists of the last query of a row.
    fn lists(hardware: Hardware, seq_len: usize) -> Result<ChoiceLists, KernelError> {
        let gpu = Recorder::new(hardware);
        let tensor = |shape: &[usize]| gpu.tensor(shape, DType::I32);
        let (listed, num_selected) = (Listed { block_size: 64, per_list: 1 }, 16);
        let last = seq_len - 1..seq_len;
        ChoiceLists::new(&tensor(&[1, seq_len, 1, num_selected]), &tensor(&[1, seq_len]), listed, &last, 64)
    }

    #[test]
    fn rows_of_more_than_a_million_tokens_have_lists_and_longer_ones_are_refused_by_name() {
        for (hardware, fits) in
            [(Hardware::HOPPER, 1 << 20), (Hardware::HOPPER, 1_800_000), (Hardware::AMPERE, 1 << 20)]
        {
            lists(hardware, fits).expect("room for every cell");
        }
        let most = ChoiceLists::most_tokens(64, Hardware::HOPPER.max_shared_bytes);
        lists(Hardware::HOPPER, most).expect("exactly");
        let error = lists(Hardware::HOPPER, most + 1).expect_err("one cell more").to_string();
        assert!(error.contains(&format!("up to {most} tokens")), "{error}");
    }
}
