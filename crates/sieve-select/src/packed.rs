//! A mask as GPU kernels read it.

use sieve_core::{MaskArrays, PackedMask};

use crate::error::SelectError;
use crate::mask::SparseMask;

impl SparseMask {
    /// Every array in one buffer. A correction is not part of it: it acts on the attention's output.
    ///
    /// # Errors
    /// A mask of a model that is not causal, which no kernel computes; arrays that do not fit the call.
    pub fn packed(&self) -> Result<PackedMask, SelectError> {
        let problem = |problem: String| SelectError::Mask { problem };
        if !self.causal {
            return Err(problem("no kernel takes a bidirectional mask".to_owned()));
        }
        let shape = self.shape;
        // All keys need no list of their tiles.
        let all = self.keeps_everything();
        let [row_ptr, tile_idx, col_ptr, col_idx] = match all {
            true => [&[][..]; 4],
            false => [&self.row_ptr[..], &self.tile_idx, &self.col_ptr, &self.col_idx],
        };
        let windows = self.windows.iter().filter(|_| !all);
        PackedMask::new(&MaskArrays {
            num_queries: shape.num_queries,
            num_keys: shape.num_keys,
            num_heads: shape.num_heads,
            num_kv_heads: shape.num_kv_heads,
            query_tile: self.tiles.query_tile,
            query_offset: self.tiles.query_offset,
            key_tile: self.tiles.key_tile,
            num_lists: self.num_lists(),
            row_ptr,
            tile_idx,
            col_ptr,
            col_idx,
            key_order: &self.key_order,
            query_order: &self.query_order,
            windows: windows.map(|w| [w.init, w.local]).collect(),
            dense_rows: self.dense_rows.clone(),
        })
        .map_err(|error| problem(error.to_string()))
    }
}
