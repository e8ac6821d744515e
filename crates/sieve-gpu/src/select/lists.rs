//! The lists of key tiles and columns that attention reads, from the bits of kept blocks.
use super::call::{Call, NAME};
use super::choose::KeptBits;
use super::order::Orders;
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params};
use sieve_core::{KeyMask, MaskCounts};

impl Call<'_> {
    /// Builds the lists of key tiles and columns that attention reads. `single` has a bit for each kept column.
    pub(super) fn lists(
        &self,
        [kept, nan_rows]: KeptBits<'_>,
        mask: KeyMask<CudaTensor>,
        orders: &Orders,
        single: Option<&CudaTensor>,
    ) -> Result<KeyMask<CudaTensor>, KernelError> {
        let (s, data, tiles) = (self.selection, &mask.words, mask.tiles);
        let (rows, columns) = (tiles.num_query_tiles(), tiles.num_key_tiles());
        let (lists, num_words) = (s.num_lists(), columns.div_ceil(u32::BITS as usize));
        let new = |shape: &[usize]| kept.empty_contiguous(shape, DType::I32);
        let bits = new(&[lists, rows, num_words]);
        let (counts, pairs) = (new(&[lists, rows]), new(&[lists, rows]));
        let params = params!(SelectListsParams {
            { num_queries, num_keys }: s.shape,
            { block, offset, query_block }: s.scores,
            { tile, heads_per_list, first_tiles }: s.keep,
            num_lists_per_order: lists / s.shape.num_kv_heads,
            local: s.keep.local_tokens,
            segment: self.segment(),
            keeps_first: s.order.is_some_and(|order| order.keeps_first),
            moves_keys: orders.keys.is_some(),
            moves_queries: orders.queries.is_some(),
            { stride, limit, seed, is_linear, by_block }: s.keep.rescue,
        });
        // Tokens that do not move have no order: `data` stands in for it, and is not read as an order.
        let [keys, queries] = [&orders.keys, &orders.queries].map(|x| x.as_ref().unwrap_or(data));
        let tensors = [kept, nan_rows, keys, queries, &bits, &counts, &pairs];
        // SAFETY: reads what select_choose wrote, writes every element of bits, counts and pairs.
        unsafe { SELECT_LISTS.launch([rows.div_ceil(4), lists, 1], &tensors, &params) }?;
        let places = &mask.places;
        let [row_ptr_at, tile_idx_at] = [places.row_ptr.start, places.tile_idx.start];
        write_offsets(&counts, data, row_ptr_at)?;
        let all_rows = lists * rows;
        let params = params!(SelectFillParams { rows: all_rows, words: num_words, row_ptr_at, tile_idx_at });
        let grid = [all_rows.div_ceil(4), 1, 1];
        // SAFETY: tile_idx has room for every tile that rows may keep.
        unsafe { SELECT_FILL.launch(grid, &[&bits, data], &params) }?;
        if let Some(single) = single {
            self.single_columns(single, &bits, &pairs, &mask)?;
        }
        Ok(KeyMask { counts: Some(MaskCounts { tiles: counts, pairs, nan_rows: nan_rows.clone() }), ..mask })
    }

    /// Writes the columns in `single` that are in no kept tile (`bits`) of their row into the mask, and adds their
    /// pairs of a query and a key to `pairs`.
    fn single_columns(
        &self,
        single: &CudaTensor,
        bits: &CudaTensor,
        pairs: &CudaTensor,
        mask: &KeyMask<CudaTensor>,
    ) -> Result<(), KernelError> {
        let s = self.selection;
        let [lists, rows, _] = bits.dims(NAME, "bits")?;
        let [col_ptr_at, col_idx_at] = [mask.places.col_ptr.start, mask.places.col_idx.start];
        let counts = bits.empty_contiguous(&[lists, rows], DType::I32);
        let tensors = [single, bits, &counts, pairs, &mask.words];
        let launch = |fills: bool| {
            let params = params!(SelectColumnsParams {
                { num_queries, num_keys }: s.shape,
                { tile }: s.keep,
                { offset }: s.scores,
                { query_tile }: mask.tiles,
                fills,
                col_ptr_at,
                col_idx_at,
            });
            // SAFETY: col_idx has room for every column that rows may keep.
            unsafe { SELECT_COLUMNS.launch([rows.div_ceil(4), lists, 1], &tensors, &params) }
        };
        // The first launch counts the columns of each row, the second writes them.
        launch(false)?;
        write_offsets(&counts, &mask.words, col_ptr_at)?;
        launch(true)
    }
}

/// Writes where the list of each row begins, and where the last ends, into the mask's `words` from `row_ptr_at` on;
/// `counts` has the length of each row's list.
fn write_offsets(counts: &CudaTensor, words: &CudaTensor, row_ptr_at: usize) -> Result<(), KernelError> {
    let params = params!(SelectOffsetsParams { rows: counts.num_elements(), row_ptr_at });
    // SAFETY: the array has one word more than there are rows.
    unsafe { SELECT_OFFSETS.launch([1, 1, 1], &[counts, words], &params) }
}

const SELECT_COLUMNS: SourceKernel = SourceKernel::new("select_columns").threads(128);
const SELECT_LISTS: SourceKernel = SourceKernel::new("select_lists").threads(128);
const SELECT_OFFSETS: SourceKernel = SourceKernel::new("select_offsets").threads(1024);
const SELECT_FILL: SourceKernel = SourceKernel::new("select_fill").threads(128);
