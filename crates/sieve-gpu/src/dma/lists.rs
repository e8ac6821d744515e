//! Launches of `kernels/dma_lists.cu` and `kernels/dma_lists_prefix.cu`: the list of keys that each super-block of 1024
//! queries gathers.
use crate::KernelError;
use crate::dma::oracle::SUPER_BLOCK;
use crate::dma::{PREFIX_BLOCK, Selection, require_sequence, survivors_shape};
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require, require_non_empty};

const NAME: &str = "dma_lists";

/// Lists are padded to whole tiles of this many entries.
pub(crate) const LIST_ALIGNMENT: usize = 128;

/// The ordered key lists of a selection, which DMA's forward and backward passes read.
#[derive(Debug, Clone)]
pub struct KeyLists {
    /// `{j, expire[j]}` of each listed key: its position, and the first query that no longer sees it; i32
    /// `[batch, num_kv_heads, num_super_blocks, capacity, 2]`.
    pub list: CudaTensor,
    /// Entries in use, i32 `[batch, num_kv_heads, num_super_blocks]`.
    pub list_len: CudaTensor,
    /// `{begin, end}` of the list entries that a tile of queries may see, i32 `[batch, num_kv_heads, tiles, 2]`.
    pub tile_window: CudaTensor,
    /// Queries of an attention kernel's tile.
    pub tile_queries: usize,
    /// Queries that share a list: 1024, or 128 in [ordered lists](crate::Selection::dma_ordered_lists).
    pub queries: usize,
}

impl KeyLists {
    /// The usual number of queries of a tile in [`tile_window`](Self::tile_window); a divisor of 1024.
    pub const TILE_QUERIES: usize = 64;

    /// Shape of the lists of one row and KV head: `[num_super_blocks, capacity, 2]`.
    pub fn shape(seq_len: usize, keep_window_size: usize) -> [usize; 3] {
        let blocks = seq_len.div_ceil(SUPER_BLOCK);
        [blocks, list_capacity(seq_len, keep_window_size), 2]
    }

    /// Entries that one key list has room for.
    pub fn capacity(&self) -> usize {
        self.list.shape()[3]
    }

    /// Super-blocks of 1024 queries in a sequence.
    pub fn num_super_blocks(&self) -> usize {
        self.list.shape()[2]
    }
}

/// The most entries of a list, padded: the keys that are kept when its super-block begins, and the keys of the
/// super-block.
fn list_capacity(seq_len: usize, keep_window_size: usize) -> usize {
    (keep_window_size + SUPER_BLOCK).min(seq_len).next_multiple_of(LIST_ALIGNMENT)
}

impl Selection {
    /// Lists the kept keys of each super-block of 1024 queries: first the keys of the super-block itself, from the last
    /// to the first, then older keys by descending `expire`. `tile_queries` divides 1024.
    ///
    /// # Errors
    /// Shapes that do not fit the selection, a `tile_queries` that does not divide 1024.
    pub fn dma_lists(
        &self,
        doc_start: &CudaTensor,
        doc_end: &CudaTensor,
        tile_queries: usize,
    ) -> Result<KeyLists, KernelError> {
        let expire = &self.expire;
        let [batch, num_kv_heads, seq_len] = expire.dims(NAME, "expire")?;
        operands!(only NAME, expire: I32[batch, num_kv_heads, seq_len] contiguous);
        require_sequence(NAME, batch, seq_len)?;
        require_non_empty(NAME, "tile_queries", tile_queries)?;
        let divides = SUPER_BLOCK.is_multiple_of(tile_queries);
        require!(divides, NAME, "tile_queries": tile_queries, "divisors of {SUPER_BLOCK}");
        operands!(NAME, doc_start: I32[batch, seq_len], doc_end: I32[batch, seq_len]);
        let window = self.keep_window_size;
        let shape = survivors_shape(batch, num_kv_heads, seq_len, window);
        operands!(only NAME, survivors: I64 shape strided = &self.survivors);

        let [blocks, capacity, pair] = KeyLists::shape(seq_len, window);
        let tiles = seq_len.div_ceil(tile_queries);
        let new = |shape: &[usize]| expire.empty_contiguous(shape, DType::I32);
        let list = new(&[batch, num_kv_heads, blocks, capacity, pair]);
        let list_len = new(&[batch, num_kv_heads, blocks]);
        let tile_window = new(&[batch, num_kv_heads, tiles, 2]);
        let tensors = [expire, &doc_start, &doc_end, &self.survivors, &list, &list_len, &tile_window];
        let params =
            params!(DmaListsParams { seq_len, num_kv_heads, keep_window_size: window, capacity, tile_queries });
        // SAFETY: reads the selection and the bounds, writes the three new tensors within their shapes; entries past a
        // list's padding stay undefined, and no kernel reads them.
        unsafe { dma_lists_kernel().launch([blocks, num_kv_heads, batch], &tensors, &params) }?;
        Ok(KeyLists { list, list_len, tile_window, tile_queries, queries: SUPER_BLOCK })
    }

    /// A [`Selection`] from an `expire`, i32 `[batch, num_kv_heads, seq_len]`, that did not come from
    /// [`dma_select`](crate::dma_select()). At most one key may expire at a position, and at most `keep_window_size`
    /// keys may be seen by a query. These two conditions are not checked: an `expire` that breaks them gives wrong
    /// results, and a backward pass in a fixed order may never end.
    ///
    /// # Errors
    /// Other types or shapes.
    pub fn of_expire(
        expire: &CudaTensor,
        doc_start: &CudaTensor,
        keep_window_size: usize,
    ) -> Result<Selection, KernelError> {
        const PREFIX: &str = "dma_lists_prefix";
        let [batch, num_kv_heads, seq_len] = expire.dims(PREFIX, "expire")?;
        operands!(PREFIX, expire: I32[batch, num_kv_heads, seq_len]);
        require_sequence(PREFIX, batch, seq_len)?;
        require_non_empty(PREFIX, "keep_window_size", keep_window_size)?;
        operands!(PREFIX, doc_start: I32[batch, seq_len]);
        let window = keep_window_size.min(seq_len);
        let shape = survivors_shape(batch, num_kv_heads, seq_len, window);
        let survivors = expire.empty_contiguous(&shape, DType::I64);
        let params = params!(DmaListsPrefixParams { seq_len, num_kv_heads, keep_window_size: window });
        let [_, _, boundaries, _] = shape;
        let grid = [boundaries, num_kv_heads, batch];
        // SAFETY: reads expire and the bounds, writes within survivors.
        unsafe { dma_lists_prefix_kernel().launch(grid, &[&expire, &doc_start, &survivors], &params) }?;
        Ok(Selection { expire, survivors, keep_window_size: window })
    }
}

/// The kernel that builds the key lists.
fn dma_lists_kernel() -> SourceKernel {
    SourceKernel::new(NAME).define("PREFIX_BLOCK", PREFIX_BLOCK).threads(SUPER_BLOCK)
}

/// The kernel that finds the survivors, the keys that are kept at each multiple of 8192 tokens, in a given `expire`.
fn dma_lists_prefix_kernel() -> SourceKernel {
    SourceKernel::new("dma_lists_prefix").define("PREFIX_BLOCK", PREFIX_BLOCK).threads(1024)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::oracle;

    /// `expire` of one row and KV head, computed by sieve-cpu.
    pub(crate) fn expire_of_one_document(scores: &[f32], keep_window_size: usize) -> Vec<i32> {
        let len = scores.len();
        let documents = sieve_cpu::Documents { start: &vec![0; len], end: &vec![len as i32; len] };
        let mut expire = vec![0; len];
        sieve_cpu::dma_select(scores, documents, 1, 1, len, keep_window_size, &mut expire);
        expire
    }

    #[test]
    fn a_list_fits_its_capacity() {
        // Rising scores: every key is kept until `window` later keys came, so as many keys as possible are kept.
        let (seq_len, window) = (3000, 200);
        let scores: Vec<f32> = (0..seq_len).map(|i| i as f32).collect();
        let expire = expire_of_one_document(&scores, window);
        let longest = (0..3).map(|block| oracle::key_list(&expire, block).entries.len()).max();
        let capacity = list_capacity(seq_len, window);
        assert!(longest.is_some_and(|longest| longest <= capacity), "{longest:?} entries, room for {capacity}");
        assert_eq!(capacity, 1280);
        assert_eq!(list_capacity(100, 4096), 128);
    }
}
