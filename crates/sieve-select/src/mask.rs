//! The selection of one call: which keys each query sees, how the output is corrected, and statistics.

use sieve_core::{CallShape, KeyMask, MaskError};

use crate::call::Call;
use crate::error::SelectError;

/// What to do with the dense outputs of probe rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionMode {
    /// Add the difference between a probe's dense and sparse output to all rows up to the next probe (MOMO, eq. 3).
    Correct,
    /// Replace the sparse output of the probe rows only.
    Recompute,
    /// Ignore the dense outputs of the probes.
    SparseOnly,
}

/// Dense outputs of probe rows, by which the sparse output is corrected.
#[derive(Clone, Debug, PartialEq)]
pub struct Correction {
    /// How a row is corrected by its probe.
    pub mode: CorrectionMode,
    /// Rows of the call, ascending, `[num_probes]`; a probe serves the rows up to the next one.
    pub probe_rows: Vec<i32>,
    /// Dense attention of these rows, `[num_probes, num_heads, head_dim]`.
    pub probe_o: Vec<f32>,
}

/// What a selection did and how long it took.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SelectStats {
    /// Query heads (with `gqa=mean`, groups of them) whose choice became dense because a score was NaN.
    pub nan_lists: usize,
    /// The whole call runs dense (it is short, or its layer is dense).
    pub dense_call: bool,
    /// Seconds from q, k and v to the mask.
    pub select_seconds: f64,
    /// Part of `select_seconds` spent on permuting tokens.
    pub permute_seconds: f64,
    /// For methods that choose a pattern per head: each pattern's name and number of heads.
    pub patterns: Vec<(&'static str, usize)>,
}

/// The result of a selector for one call.
#[derive(Clone, Debug, PartialEq)]
pub struct Selected {
    /// The keys that each query sees.
    pub mask: KeyMask,
    /// Dense outputs that correct the sparse ones; `None` in methods without a correction.
    pub correction: Option<Correction>,
    /// What the selection did and how long it took.
    pub stats: SelectStats,
}

impl From<KeyMask> for Selected {
    fn from(mask: KeyMask) -> Self {
        Self { mask, correction: None, stats: SelectStats::default() }
    }
}

impl Selected {
    /// A selection in which a query sees every key that is not after it.
    pub fn dense(shape: CallShape) -> Self {
        let mut all = Self::from(KeyMask::dense(shape));
        all.stats.dense_call = true;
        all
    }

    /// Checks the mask's arrays, and that the selection fits the call: every query sees its own key and no key tile
    /// after it, and probes are rows of the call.
    ///
    /// # Errors
    /// The first broken rule and where it is broken.
    pub fn check(&self, call: &Call<'_>) -> Result<(), SelectError> {
        let mask = &self.mask;
        let wrong = |array, problem: String| Err(SelectError::Mask(MaskError { array, problem }));
        if mask.shape != call.shape {
            return wrong("sizes", format!("made for {:?}, used for {:?}", mask.shape, call.shape));
        }
        mask.check()?;
        for window in (0..mask.num_lists()).filter_map(|list| mask.window_of(list)) {
            if window.init < 0 || window.local < 1 {
                return wrong("windows", format!("{window:?} hides a query's own key"));
            }
        }
        if let Some(correction) = &self.correction {
            let rows = &correction.probe_rows;
            if correction.probe_o.len() != rows.len() * mask.shape.num_heads * mask.shape.head_dim {
                return wrong("probe_o", "it is not [num_probes, num_heads, head_dim]".to_owned());
            }
            let inside = rows.iter().all(|row| (0..mask.shape.num_queries as i32).contains(row));
            if !inside || !rows.is_sorted_by(|a, b| a < b) {
                return wrong("probe_rows", "not ascending rows of the call".to_owned());
            }
        }
        for list in 0..mask.num_lists() {
            for i in (0..mask.tiles.num_query_tiles()).filter(|_| mask.causal) {
                if let Err(problem) = self.check_own_keys(list, i) {
                    return wrong("tile_idx", format!("list {list}, query tile {i}: {problem}"));
                }
            }
        }
        Ok(())
    }

    /// Checks query tile `i` of a list of a causal mask: each query sees its own key, and no kept tile lies after the
    /// last query. Where queries or keys are permuted, a query's own key may lie in any tile.
    fn check_own_keys(&self, list: usize, i: usize) -> Result<(), String> {
        let (mask, tiles) = (&self.mask, self.mask.tiles);
        let row = mask.row(list, i);
        if mask.key_order().is_empty() && mask.query_order().is_empty() {
            if !tiles.diagonal(i).all(|j| row.binary_search(&(j as i32)).is_ok()) {
                return Err(format!("a diagonal tile is missing: {row:?}"));
            }
            return if row.last().is_some_and(|&j| j as usize >= tiles.admissible(i)) {
                Err(format!("a tile after the last row: {row:?}"))
            } else {
                Ok(())
            };
        }
        let kept: std::collections::HashSet<usize> = kept_keys(mask, list, i).collect();
        for (head, slot) in mask.heads_of(list).flat_map(|head| tiles.rows(i).map(move |slot| (head, slot))) {
            let position = mask.shape.context() + mask.query_row(head, slot);
            if !kept.contains(&position) {
                return Err(format!("position {position} does not see itself"));
            }
        }
        Ok(())
    }
}

/// The key in a slot of a list, which is a position in the list's order of keys.
pub(crate) fn key_of(mask: &KeyMask, list: usize, slot: usize) -> usize {
    mask.key_order_of(list).map_or(slot, |order| order[slot] as usize)
}

/// The keys in the tiles, then in the columns, that a list keeps for query tile `i`.
pub(crate) fn kept_keys(mask: &KeyMask, list: usize, i: usize) -> impl Iterator<Item = usize> {
    let tiles = mask.row(list, i).iter().flat_map(|&j| mask.tiles.keys(j as usize));
    let slots = tiles.chain(mask.columns(list, i).iter().map(|&slot| slot as usize));
    slots.map(move |slot| key_of(mask, list, slot))
}
