//! The one form of all selections: lists of key tiles per query tile, and the few extras that some methods need.
//!
//! The arrays are what a block-sparse kernel reads, on any device: 32-bit CSR over (list, query tile).

use std::ops::Range;

use crate::call::{Call, CallShape, Tiles};
use crate::error::SelectError;

/// Which heads have a list of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListsPer {
    /// Each query head.
    QueryHead,
    /// Each KV head; its query heads share the list and are computed as rows of one tile.
    KvHead,
}

/// A rule on top of the tiles of one list: key `j` is visible to position `a` only where `j < init` or `j > a - local`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct TokenWindow {
    /// First keys that all queries see.
    pub init: i32,
    /// Last keys a query sees, its own included; `i32::MAX` for all.
    pub local: i32,
}

/// What to do with dense outputs of some rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionMode {
    /// Add their difference to the sparse output to all rows up to the next probe (MOMO, eq. 3).
    Correct,
    /// Replace these rows only.
    Recompute,
    /// Nothing.
    SparseOnly,
}

/// Dense outputs of probe rows, by which the sparse output is corrected.
#[derive(Clone, Debug, PartialEq)]
pub struct Correction {
    /// How.
    pub mode: CorrectionMode,
    /// Rows of the call, ascending, `[num_probes]`; a probe serves the rows up to the next one.
    pub probe_rows: Vec<i32>,
    /// Dense attention of these rows, `[num_probes, num_heads, head_dim]`.
    pub probe_o: Vec<f32>,
}

/// What a selection did, for reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SelectStats {
    /// Lists that run dense because a score was NaN.
    pub nan_lists: usize,
    /// The whole call runs dense (short, or a dense layer).
    pub dense_call: bool,
    /// Seconds between q, k, v and the ready mask.
    pub select_seconds: f64,
    /// Part of them that went into permutations.
    pub permute_seconds: f64,
    /// Patterns the heads took, where a method chooses among several: name and number of heads.
    pub patterns: Vec<(&'static str, usize)>,
}

/// A selection of one call. Everything is per request; lists are `num_heads` or `num_kv_heads`.
#[derive(Clone, Debug, PartialEq)]
pub struct SparseMask {
    /// The call's sizes.
    pub shape: CallShape,
    /// How rows and keys are cut. With permutations, tiles cut the permuted sequences.
    pub tiles: Tiles,
    /// Which heads have lists.
    pub lists: ListsPer,
    /// Whether a key is visible only to positions not before it; false for bidirectional models.
    pub causal: bool,
    /// Where the tiles of (list, query tile) start in `tile_idx`, `[num_lists * num_query_tiles + 1]`.
    pub row_ptr: Vec<i32>,
    /// Kept key tiles, ascending per row, no duplicates.
    pub tile_idx: Vec<i32>,
    /// Where the columns of (list, query tile) start in `col_idx`; empty when the mask has no single keys.
    pub col_ptr: Vec<i32>,
    /// Single keys, ascending per row, none of them in a kept tile.
    pub col_idx: Vec<i32>,
    /// Which key each slot holds, `[num_kv_heads or num_heads, num_keys]`; empty when in order.
    pub key_order: Vec<i32>,
    /// Which row of the call each query slot holds, `[num_heads, num_queries]`; empty when in order.
    pub query_order: Vec<i32>,
    /// A rule on top of the tiles, `[num_lists]`; empty when there is none.
    pub windows: Vec<TokenWindow>,
    /// Ranges of rows that are computed densely, ascending and apart, for all heads.
    pub dense_rows: Vec<Range<usize>>,
    /// Dense outputs that correct the sparse ones.
    pub correction: Option<Correction>,
    /// How it was made.
    pub stats: SelectStats,
}

/// Key tiles and columns of one list, per query tile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ListRows {
    /// Kept key tiles of each query tile, ascending.
    pub tiles: Vec<Vec<i32>>,
    /// Single keys of each query tile, ascending; empty when the mask has no single keys.
    pub columns: Vec<Vec<i32>>,
}

impl ListRows {
    /// Lists without single keys.
    pub fn of_tiles(tiles: Vec<Vec<i32>>) -> Self {
        let columns = Vec::new();
        Self { tiles, columns }
    }

    /// Every admissible tile.
    pub fn dense(tiles: Tiles) -> Self {
        let row = |i| (0..tiles.admissible(i) as i32).collect();
        Self::of_tiles((0..tiles.num_query_tiles()).map(row).collect())
    }
}

impl SparseMask {
    /// Every admissible tile, one list per KV head.
    pub fn dense(shape: CallShape) -> Self {
        let tiles = Tiles::new(shape, 128, 128);
        let lists = vec![ListRows::dense(tiles); shape.num_kv_heads];
        let mut mask = Self::from_lists(shape, tiles, ListsPer::KvHead, &lists);
        mask.stats.dense_call = true;
        mask
    }

    /// Packs lists into the arrays.
    pub fn from_lists(shape: CallShape, tiles: Tiles, lists: ListsPer, rows: &[ListRows]) -> Self {
        let mut mask = Self {
            shape,
            tiles,
            lists,
            causal: true,
            row_ptr: vec![0],
            tile_idx: Vec::new(),
            col_ptr: Vec::new(),
            col_idx: Vec::new(),
            key_order: Vec::new(),
            query_order: Vec::new(),
            windows: Vec::new(),
            dense_rows: Vec::new(),
            correction: None,
            stats: SelectStats::default(),
        };
        for list in rows {
            for row in &list.tiles {
                mask.tile_idx.extend(row);
                mask.row_ptr.push(mask.tile_idx.len() as i32);
            }
        }
        if rows.iter().any(|list| list.columns.iter().any(|c| !c.is_empty())) {
            mask.col_ptr.push(0);
            for list in rows {
                for i in 0..list.tiles.len() {
                    mask.col_idx.extend(list.columns.get(i).into_iter().flatten());
                    mask.col_ptr.push(mask.col_idx.len() as i32);
                }
            }
        }
        mask
    }

    /// Lists of the mask.
    pub fn num_lists(&self) -> usize {
        match self.lists {
            ListsPer::QueryHead => self.shape.num_heads,
            ListsPer::KvHead => self.shape.num_kv_heads,
        }
    }

    /// Query heads a list is for.
    pub fn heads_of(&self, list: usize) -> Range<usize> {
        match self.lists {
            ListsPer::QueryHead => list..list + 1,
            ListsPer::KvHead => {
                let m = self.shape.group_size();
                list * m..(list + 1) * m
            }
        }
    }

    /// List of a query head.
    pub fn list_of(&self, head: usize) -> usize {
        match self.lists {
            ListsPer::QueryHead => head,
            ListsPer::KvHead => head / self.shape.group_size(),
        }
    }

    /// Kept key tiles of a query tile.
    pub fn row(&self, list: usize, query_tile: usize) -> &[i32] {
        let at = list * self.tiles.num_query_tiles() + query_tile;
        &self.tile_idx[self.row_ptr[at] as usize..self.row_ptr[at + 1] as usize]
    }

    /// Single keys of a query tile.
    pub fn columns(&self, list: usize, query_tile: usize) -> &[i32] {
        if self.col_ptr.is_empty() {
            return &[];
        }
        let at = list * self.tiles.num_query_tiles() + query_tile;
        &self.col_idx[self.col_ptr[at] as usize..self.col_ptr[at + 1] as usize]
    }

    /// The permutation of a list's keys, `None` when in order.
    pub fn key_order_of(&self, list: usize) -> Option<&[i32]> {
        if self.key_order.is_empty() {
            return None;
        }
        let n = self.shape.num_keys;
        let orders = self.key_order.len() / n.max(1);
        let head = self.heads_of(list).start;
        let at = if orders == self.shape.num_heads {
            head
        } else {
            head / self.shape.group_size()
        };
        Some(&self.key_order[at * n..(at + 1) * n])
    }

    /// Row of the call in a query slot of a head.
    pub fn query_row(&self, head: usize, slot: usize) -> usize {
        match self.query_order.get(head * self.shape.num_queries + slot) {
            Some(&row) => row as usize,
            None => slot,
        }
    }

    /// The token rule of a list.
    pub fn window_of(&self, list: usize) -> Option<TokenWindow> {
        self.windows.get(list).copied()
    }

    /// Whether position `a` sees key `j` of a kept tile or column.
    pub fn visible(&self, list: usize, a: usize, j: usize) -> bool {
        if !self.causal {
            return true;
        }
        j <= a && (a as i64) < i64::from(self.expire(list, j))
    }

    /// First position that no longer sees key `j`, `i32::MAX` for never.
    pub(crate) fn expire(&self, list: usize, j: usize) -> i32 {
        match self.window_of(list) {
            Some(window) if j as i64 >= i64::from(window.init) => (j as i32).saturating_add(window.local),
            _ => i32::MAX,
        }
    }

    /// Whether a row is computed densely.
    pub fn is_dense_row(&self, row: usize) -> bool {
        self.dense_rows.iter().any(|range| range.contains(&row))
    }

    /// Whether every admissible tile is kept, so that attention under the mask is dense attention.
    pub fn keeps_everything(&self) -> bool {
        let hides = |window: &TokenWindow| (window.local as usize) < self.shape.num_keys;
        let in_order = self.key_order.is_empty() && self.query_order.is_empty();
        // Ascending, so that as many as there are, none of them later, are all.
        let is_whole = |list: usize, i: usize| {
            let (row, admissible) = (self.row(list, i), self.tiles.admissible(i));
            row.len() == admissible && row.last().is_some_and(|&j| (j as usize) < admissible)
        };
        let rows = 0..self.tiles.num_query_tiles();
        self.causal
            && in_order
            && !self.windows.iter().any(hides)
            && (0..self.num_lists()).all(|list| rows.clone().all(|i| is_whole(list, i)))
    }

    /// Adds a range of dense rows.
    pub fn add_dense_rows(&mut self, range: Range<usize>) {
        let range = range.start..range.end.min(self.shape.num_queries);
        if range.is_empty() {
            return;
        }
        self.dense_rows.push(range);
        self.dense_rows.sort_by_key(|range| range.start);
        let mut joined: Vec<Range<usize>> = Vec::new();
        for range in self.dense_rows.drain(..) {
            match joined.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        self.dense_rows = joined;
    }

    /// The smallest and the largest key of each tile of a list.
    pub(crate) fn key_bounds(&self, list: usize) -> Vec<(usize, usize)> {
        let order = self.key_order_of(list);
        (0..self.tiles.num_key_tiles())
            .map(|j| {
                let slots = self.tiles.keys(j);
                match order {
                    None => (slots.start, slots.end - 1),
                    Some(order) => order[slots].iter().fold((usize::MAX, 0), |(low, high), &key| {
                        (low.min(key as usize), high.max(key as usize))
                    }),
                }
            })
            .collect()
    }

    /// Checks every rule of the form against a call.
    ///
    /// # Errors
    /// The first broken rule and where it is broken.
    pub fn check(&self, call: &Call<'_>) -> Result<(), SelectError> {
        let wrong = |problem: String| Err(SelectError::Mask { problem });
        if self.shape != call.shape {
            return wrong(format!("made for {:?}, used for {:?}", self.shape, call.shape));
        }
        let (num_queries, num_keys) = (self.shape.num_queries, self.shape.num_keys);
        if (self.tiles.num_queries, self.tiles.num_keys) != (num_queries, num_keys) {
            return wrong("the tiles are of another call".to_owned());
        }
        let rows = self.num_lists() * self.tiles.num_query_tiles();
        check_csr("row_ptr", &self.row_ptr, self.tile_idx.len(), rows)?;
        if !(self.col_ptr.is_empty() && self.col_idx.is_empty()) {
            check_csr("col_ptr", &self.col_ptr, self.col_idx.len(), rows)?;
        }
        if !self.windows.is_empty() && self.windows.len() != self.num_lists() {
            return wrong("windows is not [num_lists]".to_owned());
        }
        for window in &self.windows {
            if window.init < 0 || window.local < 1 {
                return wrong(format!("{window:?} hides a query's own key"));
            }
        }
        let kv_len = self.shape.num_kv_heads * num_keys;
        let orders = [0, kv_len, self.shape.num_heads * num_keys];
        if !orders.contains(&self.key_order.len()) {
            return wrong("key_order is not [heads, num_keys]".to_owned());
        }
        check_order("key_order", &self.key_order, num_keys)?;
        if ![0, self.shape.num_heads * num_queries].contains(&self.query_order.len()) {
            return wrong("query_order is not [num_heads, num_queries]".to_owned());
        }
        check_order("query_order", &self.query_order, num_queries)?;
        if let Some(correction) = &self.correction {
            let expected = correction.probe_rows.len() * self.shape.num_heads * self.shape.head_dim;
            if correction.probe_o.len() != expected {
                return wrong("probe_o is not [num_probes, num_heads, head_dim]".to_owned());
            }
            let ascending = correction.probe_rows.windows(2).all(|w| w[0] < w[1]);
            let inside = correction
                .probe_rows
                .iter()
                .all(|&row| (0..num_queries as i32).contains(&row));
            if !ascending || !inside {
                return wrong("probe_rows are not ascending rows of the call".to_owned());
            }
        }
        for list in 0..self.num_lists() {
            for i in 0..self.tiles.num_query_tiles() {
                self.check_row(list, i)?;
            }
        }
        Ok(())
    }

    fn check_row(&self, list: usize, i: usize) -> Result<(), SelectError> {
        let (row, columns) = (self.row(list, i), self.columns(list, i));
        let wrong = |what: &str| {
            Err(SelectError::Mask {
                problem: format!("list {list}, query tile {i}: {what}: {row:?}, columns {columns:?}"),
            })
        };
        if !row.windows(2).all(|w| w[0] < w[1]) || !columns.windows(2).all(|w| w[0] < w[1]) {
            return wrong("not ascending");
        }
        let tiles = self.tiles.num_key_tiles() as i32;
        if row.iter().any(|&j| j < 0 || j >= tiles) {
            return wrong("a tile that does not exist");
        }
        let kept = |j: usize| row.binary_search(&(j as i32)).is_ok();
        for &key in columns {
            if key < 0 || key as usize >= self.shape.num_keys {
                return wrong("a column that does not exist");
            }
            if kept(key as usize / self.tiles.key_tile) {
                return wrong("a column inside a kept tile");
            }
        }
        if self.causal {
            if !self.key_order.is_empty() || !self.query_order.is_empty() {
                return self.check_own_keys(list, i);
            }
            if !self.tiles.diagonal(i).all(kept) {
                return wrong("a diagonal tile is missing");
            }
            if row.last().is_some_and(|&j| j as usize >= self.tiles.admissible(i)) {
                return wrong("a tile after the last row");
            }
        }
        Ok(())
    }

    /// With permutations a query's own key may lie in any tile; it must be kept.
    fn check_own_keys(&self, list: usize, i: usize) -> Result<(), SelectError> {
        let slots = self.row(list, i).iter().flat_map(|&j| self.tiles.keys(j as usize));
        let order = self.key_order_of(list);
        let kept: std::collections::HashSet<usize> = slots
            .map(|slot| order.map_or(slot, |order| order[slot] as usize))
            .collect();
        for head in self.heads_of(list) {
            for slot in self.tiles.rows(i) {
                let a = self.shape.context() + self.query_row(head, slot);
                if !kept.contains(&a) {
                    return Err(SelectError::Mask {
                        problem: format!("list {list}, query tile {i}: position {a} does not see itself"),
                    });
                }
            }
        }
        Ok(())
    }
}

fn check_csr(what: &str, ptr: &[i32], len: usize, rows: usize) -> Result<(), SelectError> {
    let whole = ptr.len() == rows + 1
        && ptr.first() == Some(&0)
        && ptr.last() == Some(&(len as i32))
        && ptr.windows(2).all(|w| w[0] <= w[1]);
    if whole {
        return Ok(());
    }
    Err(SelectError::Mask {
        problem: format!("{what} does not cut {len} entries into {rows} rows"),
    })
}

fn check_order(what: &str, order: &[i32], len: usize) -> Result<(), SelectError> {
    for (head, order) in order.chunks(len.max(1)).enumerate() {
        let mut seen = vec![false; len];
        for &x in order {
            let fresh = seen
                .get_mut(x as usize)
                .is_some_and(|seen| !std::mem::replace(seen, true));
            if !fresh {
                return Err(SelectError::Mask {
                    problem: format!("{what} of head {head} is no permutation: {x}"),
                });
            }
        }
    }
    Ok(())
}
