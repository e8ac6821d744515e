//! A-shape: the first tokens and a window (as in MInference, arXiv:2407.02490).

use sieve_core::{KeyMask, TokenWindow};

use crate::prelude::*;

/// Tile size in query rows and in keys.
const TILE: usize = 64;

settings! {
    /// Settings of the prefill method `a_shape`.
    pub struct AShapeConfig {
        /// First tokens that all queries see.
        pub n_init: usize = 128,
        /// Last tokens a query sees, its own included.
        pub n_local: usize = 3968,
    }
    small "a_shape:n_init=5,n_local=20";
    everything "a_shape:n_init=5,n_local=100000";
}

impl PrefillMethod for AShapeConfig {
    fn check(&self, _: GqaPolicy) -> Result<(), SelectError> {
        Rules("a_shape").positive("n_local", self.n_local)
    }

    fn select(&self, call: &Call<'_>, _: GqaPolicy) -> Selected {
        ranges(call, self.n_init, self.n_local).into()
    }

    fn reads(&self) -> Reads {
        Reads::Nothing
    }

    fn is_causal_map(&self) -> bool {
        true
    }

    fn knob(&self) -> Option<Knob> {
        Some(("n_local", TOKENS))
    }
}

/// A mask in which a query at position `i` sees the keys `j < n_init` and `i - n_local < j <= i`; one list per KV head.
pub(crate) fn ranges(call: &Call<'_>, n_init: usize, n_local: usize) -> KeyMask {
    let tiles = Tiles::new(call.shape, TILE, TILE);
    let lists = vec![tiles_of_ranges(tiles, n_init, n_local); call.shape.num_kv_heads];
    let mut mask = KeyMask::new(call.shape, tiles, call.shape.group_size(), lists.concat());
    mask.set_windows(&vec![window(n_init, n_local); call.shape.num_kv_heads]);
    mask
}

/// The two ranges as the rule by which a query sees single keys of the kept tiles.
pub(crate) fn window(n_init: usize, n_local: usize) -> TokenWindow {
    let word = |tokens: usize| i32::try_from(tokens).unwrap_or(i32::MAX);
    TokenWindow { init: word(n_init), local: word(n_local) }
}

/// For each query tile, the key tiles that hold the first `n_init` keys or the last `n_local` keys of one of its rows.
pub(crate) fn tiles_of_ranges(tiles: Tiles, n_init: usize, n_local: usize) -> KeptRows {
    gqa::rows(tiles, |i| {
        let init = n_init.div_ceil(tiles.key_tile).min(tiles.admissible(i));
        let local = (tiles.first(i) + 1).saturating_sub(n_local) / tiles.key_tile;
        (0..init).chain(local.max(init)..tiles.admissible(i)).collect()
    })
}
