//! Columns and diagonals that the last queries look at: vertical-slash (arXiv:2407.02490).

use crate::call::{Call, Tiles};
use crate::error::SelectError;
use crate::gqa::{self, GqaPolicy};
use crate::keep::top_k_forced;
use crate::mask::{ListRows, SparseMask};
use crate::pool::{last_rows, probe_sums};
use crate::prefill::{Knob, PrefillMethod, TOKENS};
use crate::range::Rules;
use crate::settings::settings;

/// Rows and keys of a tile.
pub(crate) const TILE: usize = 64;
/// Queries of the probe.
pub(crate) const PROBE: usize = 64;
/// First columns that always stay, and the fewest that stay.
pub(crate) const FORCED_COLUMNS: usize = 30;
/// First offsets that always stay, as far as their number allows.
pub(crate) const FORCED_OFFSETS: usize = 100;
/// Fewest offsets that stay.
pub(crate) const MIN_OFFSETS: usize = 50;

settings! {
    /// Settings of `vertical_slash`.
    pub struct VerticalSlashConfig {
        /// Columns that stay, at least 30.
        pub vertical: usize = 1000,
        /// Diagonals that stay, at least 50.
        pub slash: usize = 6096,
    }
    small "vertical_slash:vertical=30,slash=50", "vertical_slash:vertical=40,slash=50,gqa=union";
    everything "vertical_slash:vertical=30,slash=100000";
}

impl PrefillMethod for VerticalSlashConfig {
    fn check(&self, _: GqaPolicy) -> Result<(), SelectError> {
        Rules("vertical_slash").positive("vertical", self.vertical)?;
        Rules("vertical_slash").positive("slash", self.slash)
    }

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> SparseMask {
        let tiles = Tiles::new(call.shape, TILE, TILE);
        gqa::mask(call, tiles, gqa, |heads| self.rows(call, tiles, heads))
    }

    fn knob(&self) -> Option<Knob> {
        Some(("slash", TOKENS))
    }
}

impl VerticalSlashConfig {
    /// Tiles and columns of one list; `None` on NaN.
    pub(crate) fn rows(&self, call: &Call<'_>, tiles: Tiles, heads: &[usize]) -> Option<ListRows> {
        let sums = probe_sums(call, heads, last_rows(call, PROBE))?;
        let columns = top_k_forced(&sums.column, self.vertical.max(FORCED_COLUMNS), |j| j < FORCED_COLUMNS);
        let offsets = top_k_forced(&sums.diagonal, self.slash.max(MIN_OFFSETS), |o| o < FORCED_OFFSETS);
        let mut list = ListRows::default();
        for i in 0..tiles.num_query_tiles() {
            let (first, last) = (tiles.first(i), tiles.last(i));
            let mut kept = vec![false; tiles.admissible(i)];
            for &offset in offsets.iter().take_while(|&&offset| offset <= last) {
                let (low, high) = (first.saturating_sub(offset), last - offset);
                kept[low / tiles.key_tile..=high / tiles.key_tile].fill(true);
            }
            let single = |&&key: &&usize| key <= last && !kept[key / tiles.key_tile];
            list.columns
                .push(columns.iter().filter(single).map(|&key| key as i32).collect());
            list.tiles
                .push((0..kept.len()).filter(|&j| kept[j]).map(|j| j as i32).collect());
        }
        Some(list)
    }
}
