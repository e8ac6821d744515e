//! A-shape and tri-shape: the first tokens, a window, and for the second a dense end of the prompt (as in MInference).

use crate::call::{Call, Tiles};
use crate::error::SelectError;
use crate::gqa;
use crate::mask::{ListRows, ListsPer, SparseMask, TokenWindow};
use crate::range::Rules;
use crate::settings::settings;

/// Rows and keys of a tile.
const TILE: usize = 64;

settings! {
    /// Settings of `a_shape`.
    pub struct AShapeConfig {
        /// First tokens that all queries see.
        pub n_init: usize = 128,
        /// Last tokens a query sees, its own included.
        pub n_local: usize = 3968,
    }
}

settings! {
    /// Settings of `tri_shape`.
    pub struct TriShapeConfig {
        /// First tokens that all queries see.
        pub n_init: usize = 128,
        /// Last tokens a query sees, its own included.
        pub n_local: usize = 3968,
        /// Last rows of the call, which are dense.
        pub n_last: usize = 100,
    }
}

impl AShapeConfig {
    pub(crate) fn check(&self) -> Result<(), SelectError> {
        Rules("a_shape").positive("n_local", self.n_local)
    }

    pub(crate) fn select(&self, call: &Call<'_>) -> SparseMask {
        ranges(call, self.n_init, self.n_local)
    }
}

impl TriShapeConfig {
    pub(crate) fn check(&self) -> Result<(), SelectError> {
        Rules("tri_shape").positive("n_local", self.n_local)
    }

    pub(crate) fn select(&self, call: &Call<'_>) -> SparseMask {
        let mut mask = ranges(call, self.n_init, self.n_local);
        let rows = call.shape.num_queries;
        mask.add_dense_rows(rows.saturating_sub(self.n_last)..rows);
        mask
    }
}

/// Keys `j < n_init` or `j > a - n_local`, token by token; one list per KV head.
pub(crate) fn ranges(call: &Call<'_>, n_init: usize, n_local: usize) -> SparseMask {
    let tiles = Tiles::new(call.shape, TILE, TILE);
    let list = tiles_of_ranges(tiles, n_init, n_local);
    let lists = vec![list; call.shape.num_kv_heads];
    let mut mask = SparseMask::from_lists(call.shape, tiles, ListsPer::KvHead, &lists);
    mask.windows = vec![window(n_init, n_local); call.shape.num_kv_heads];
    mask
}

/// The token rule of the two ranges.
pub(crate) fn window(n_init: usize, n_local: usize) -> TokenWindow {
    let word = |tokens: usize| i32::try_from(tokens).unwrap_or(i32::MAX);
    TokenWindow {
        init: word(n_init),
        local: word(n_local),
    }
}

/// Tiles that the two ranges meet.
pub(crate) fn tiles_of_ranges(tiles: Tiles, n_init: usize, n_local: usize) -> ListRows {
    gqa::rows(tiles, |i| {
        let init = n_init.div_ceil(tiles.key_tile).min(tiles.admissible(i));
        let local = (tiles.first(i) + 1).saturating_sub(n_local) / tiles.key_tile;
        (0..init)
            .chain(local.max(init)..tiles.admissible(i))
            .collect()
    })
}
