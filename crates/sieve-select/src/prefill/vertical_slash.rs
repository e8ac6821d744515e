//! The columns and diagonals with the most attention of the last queries: vertical-slash (arXiv:2407.02490).

use crate::keep::top_k_forced;
use crate::pool::{last_rows, probe_sums};
use crate::prelude::*;

/// Tile size in query rows and in keys.
pub(crate) const TILE: usize = 64;
/// Last queries whose attention chooses columns and diagonals.
const PROBE: usize = 64;
/// The first columns, which are always kept; a smaller `vertical` is raised to their number.
const FORCED_COLUMNS: usize = 30;
/// The first offsets (distances), which are kept before others.
const FORCED_OFFSETS: usize = 100;
/// Fewest diagonals (distances from query to key) that stay.
const MIN_OFFSETS: usize = 50;

settings! {
    /// Settings of the prefill method `vertical_slash`.
    pub struct VerticalSlashConfig {
        /// Key columns that stay, at least 30.
        pub vertical: usize = 1000,
        /// Diagonals (distances from query to key) that stay, at least 50.
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

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected {
        let tiles = Tiles::new(call.shape, TILE, TILE);
        gqa::mask(call, tiles, gqa, |heads| self.rows(call, tiles, heads))
    }

    fn steps(&self, call: &Call<'_>, gqa: GqaPolicy) -> Option<BlockSelection> {
        (gqa == GqaPolicy::PerQuery).then(|| self.lines(call.shape))
    }

    fn knob(&self) -> Option<Knob> {
        Some(("slash", TOKENS))
    }
}

impl VerticalSlashConfig {
    /// Tiles and columns of one list; `None` on NaN.
    pub(crate) fn rows(&self, call: &Call<'_>, tiles: Tiles, heads: &[usize]) -> Option<KeptRows> {
        let sums = probe_sums(call, heads, last_rows(call, PROBE))?;
        let columns = top_k_forced(&sums.column, self.vertical.max(FORCED_COLUMNS), |j| j < FORCED_COLUMNS);
        let offsets = top_k_forced(&sums.diagonal, self.slash.max(MIN_OFFSETS), |o| o < FORCED_OFFSETS);
        let row = |i| {
            let (first, last) = (tiles.first(i), tiles.last(i));
            let mut kept = vec![false; tiles.admissible(i)];
            for &offset in offsets.iter().take_while(|&&offset| offset <= last) {
                let (low, high) = (first.saturating_sub(offset), last - offset);
                kept[low / tiles.key_tile..=high / tiles.key_tile].fill(true);
            }
            let kept = (0..kept.len()).filter(|&j| kept[j]).map(|j| j as i32).collect();
            let seen = columns.iter().filter(|&&key| key <= last);
            [kept, seen.map(|&key| key as i32).collect()]
        };
        Some((0..tiles.num_query_tiles()).map(row).collect())
    }

    /// The selection as device steps. Numbers are pairs: how many lines are kept, and how many of these are forced.
    pub(crate) fn lines(&self, shape: CallShape) -> BlockSelection {
        let scores = BlockScores::Lines {
            rows: PROBE,
            columns: [self.vertical.max(FORCED_COLUMNS), FORCED_COLUMNS],
            diagonals: [self.slash.max(MIN_OFFSETS), FORCED_OFFSETS],
        };
        let ignored = KeepBlocks::Mass(1.0);
        BlockSelection::new(shape, TILE, scores, ignored)
    }
}
