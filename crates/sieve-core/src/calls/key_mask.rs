//! Which keys each query of a call sees: the mask of every selector, on the host or on a device.
//!
//! All arrays lie in one buffer of 32-bit words, which block-sparse kernels read: the kept key tiles of each (list,
//! query tile) in CSR form, and a few arrays that only some methods need. A *list* holds the tiles of one query head,
//! or of the heads that share a KV head.
use super::call_shape::{CallShape, Tiles};
use std::ops::Range;
use thiserror::Error;

/// A mask of one call of one request. `W` holds its words: a vector on the host, an i32 tensor on a device, or `()` if
/// only the layout is known.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyMask<W = Vec<i32>> {
    /// Sizes of the attention call.
    pub shape: CallShape,
    /// How query slots and key slots are divided into tiles. Slot i holds row or key i, unless `query_order` or
    /// `key_order` names another. `num_queries` is the number of query slots: fewer than the call's rows if
    /// `query_order` names only some rows.
    pub tiles: Tiles,
    /// Query heads that share a list: 1, or a KV head's whole group.
    pub heads_per_list: usize,
    /// Query heads that share a row of `key_order`, if there is one.
    pub heads_per_order: usize,
    /// Whether a query sees no later keys; false for bidirectional models.
    pub causal: bool,
    /// Ranges of rows that see every key up to their own, in all heads; ascending and disjoint.
    pub dense_rows: Vec<Range<usize>>,
    /// Where each array lies in `words`.
    pub places: MaskPlaces,
    /// All arrays in one buffer. Word 0 is unused.
    pub words: W,
    /// Numbers of entries of the lists, if a device made them.
    pub counts: Option<MaskCounts<W>>,
}

/// Where the arrays of a mask are among its words; an absent array has an empty range. On a device an array may have
/// spare room after its last entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaskPlaces {
    /// Query tiles of each list, those with the most keys first, so that long tiles start early. If absent, kernels
    /// start with the last tile.
    pub tile_order: Range<usize>,
    /// Where the key tiles of (list, query tile) start in `tile_idx`, `[num_lists * num_query_tiles + 1]`; absent if
    /// every key up to the query is visible.
    pub row_ptr: Range<usize>,
    /// Indices of kept key tiles, ascending in each row.
    pub tile_idx: Range<usize>,
    /// Index in `col_idx` of the first single key of each (list, query tile).
    pub col_ptr: Range<usize>,
    /// Single key slots outside the kept tiles, ascending per row.
    pub col_idx: Range<usize>,
    /// Which key each slot holds, `[num_heads / heads_per_order, num_keys]`.
    pub key_order: Range<usize>,
    /// Which row of the call each query slot holds, `[num_heads, slots]`.
    pub query_order: Range<usize>,
    /// A [`TokenWindow`] of each list, `[num_lists, 2]`.
    pub windows: Range<usize>,
}

impl MaskPlaces {
    /// Number of 32-bit words of the buffer.
    pub fn num_words(&self) -> usize {
        let ends = [
            &self.tile_order,
            &self.row_ptr,
            &self.tile_idx,
            &self.col_ptr,
            &self.col_idx,
            &self.key_order,
            &self.query_order,
            &self.windows,
        ];
        ends.map(|place| place.end).into_iter().fold(1, usize::max)
    }
}

/// Counts that a device made with the lists, i32.
#[derive(Clone, Debug, PartialEq)]
pub struct MaskCounts<W> {
    /// Number of kept key tiles, `[num_lists, num_query_tiles]`.
    pub tiles: W,
    /// Number of visible (query, key) pairs, `[num_lists, num_query_tiles]`.
    pub pairs: W,
    /// Number of rows with a NaN score, `[num_heads]`; a head with such a row is dense.
    pub nan_rows: W,
}

/// A mask that a device chose.
#[derive(Clone, Debug)]
pub struct ChosenKeys<W, O = W> {
    /// The mask.
    pub mask: KeyMask<W>,
    /// Output of dense attention for the probe rows, the query rows whose scores chose the blocks, `[1, num_queries,
    /// num_heads, head_dim]`; other rows are not written. `None` if there are no probes.
    pub probe_o: Option<O>,
}

/// A rule that hides keys inside the kept tiles of one list: key `j` is visible to position `a` only if `j < init` or
/// `j > a - local`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenWindow {
    /// Number of first keys, which all queries see.
    pub init: i32,
    /// Number of last keys that a query sees, its own included; `i32::MAX` for all.
    pub local: i32,
}

/// For each query tile of a list, the kept key tiles and the kept single key slots, each in any order.
pub type KeptRows = Vec<[Vec<i32>; 2]>;

/// An array of a mask that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("key mask: {array}: {problem}\n  hint: masks come from a selector; one built by hand must pass KeyMask::check")]
pub struct MaskError {
    /// Name of the invalid array.
    pub array: &'static str,
    /// The rule that the array breaks, and where.
    pub problem: String,
}

impl<W> KeyMask<W> {
    /// The same mask with its words moved by `put`, for example to a device.
    ///
    /// # Errors
    /// The error of `put`.
    pub fn try_map<V, E>(self, mut put: impl FnMut(W) -> Result<V, E>) -> Result<KeyMask<V>, E> {
        let counts = self.counts.map(|counts| {
            Ok(MaskCounts { tiles: put(counts.tiles)?, pairs: put(counts.pairs)?, nan_rows: put(counts.nan_rows)? })
        });
        Ok(KeyMask {
            counts: counts.transpose()?,
            words: put(self.words)?,
            shape: self.shape,
            tiles: self.tiles,
            heads_per_list: self.heads_per_list,
            heads_per_order: self.heads_per_order,
            causal: self.causal,
            dense_rows: self.dense_rows,
            places: self.places,
        })
    }

    /// Like [`try_map`](Self::try_map), with a `put` that cannot fail.
    pub fn map<V>(self, mut put: impl FnMut(W) -> V) -> KeyMask<V> {
        let Ok(mask) = self.try_map(|words| Ok::<V, std::convert::Infallible>(put(words)));
        mask
    }

    /// Number of the mask's lists of key tiles.
    pub fn num_lists(&self) -> usize {
        self.shape.num_heads / self.heads_per_list
    }

    /// The query heads that use a list.
    pub fn heads_of(&self, list: usize) -> Range<usize> {
        list * self.heads_per_list..(list + 1) * self.heads_per_list
    }

    /// The list that a query head uses.
    pub fn list_of(&self, head: usize) -> usize {
        head / self.heads_per_list
    }

    /// Whether a query row is computed with all keys.
    pub fn is_dense_row(&self, row: usize) -> bool {
        self.dense_rows.iter().any(|range| range.contains(&row))
    }

    /// Adds a range of dense rows, and joins ranges that touch.
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
}

impl KeyMask {
    /// A mask from the kept key tiles and single key slots of each query tile, list by list. Sorts the entries, and
    /// removes duplicates and single slots inside kept tiles.
    pub fn new(
        shape: CallShape,
        tiles: Tiles,
        heads_per_list: usize,
        rows: impl IntoIterator<Item = [Vec<i32>; 2]>,
    ) -> Self {
        let (mut row_ptr, mut tile_idx) = (vec![0], Vec::new());
        let (mut col_ptr, mut col_idx) = (vec![0], Vec::new());
        for mut row in rows {
            for entries in &mut row {
                entries.sort_unstable();
                entries.dedup();
            }
            let [kept_tiles, mut slots] = row;
            slots.retain(|slot| kept_tiles.binary_search(&(slot / tiles.key_tile as i32)).is_err());
            tile_idx.extend(kept_tiles);
            col_idx.extend(slots);
            row_ptr.push(tile_idx.len() as i32);
            col_ptr.push(col_idx.len() as i32);
        }
        if col_idx.is_empty() {
            // Without single keys both arrays are absent.
            col_ptr.clear();
        }
        let mut mask = Self {
            shape,
            tiles,
            heads_per_list,
            heads_per_order: shape.num_heads,
            causal: true,
            dense_rows: Vec::new(),
            places: MaskPlaces::default(),
            words: vec![0],
            counts: None,
        };
        mask.places = MaskPlaces {
            tile_order: mask.put(&tile_order(tiles, &row_ptr, &col_ptr)),
            row_ptr: mask.put(&row_ptr),
            tile_idx: mask.put(&tile_idx),
            col_ptr: mask.put(&col_ptr),
            col_idx: mask.put(&col_idx),
            ..MaskPlaces::default()
        };
        mask
    }

    /// The mask of dense causal attention, with one list per KV head.
    pub fn dense(shape: CallShape) -> Self {
        let tile = 128;
        let tiles = Tiles::new(shape, tile, tile);
        let row = |i: usize| [(0..tiles.admissible(i) as i32).collect(), Vec::new()];
        let rows = (0..shape.num_kv_heads).flat_map(|_| (0..tiles.num_query_tiles()).map(row));
        Self::new(shape, tiles, shape.group_size(), rows)
    }

    /// Sets which key each slot holds: `[num_kv_heads, num_keys]` or `[num_heads, num_keys]`.
    pub fn set_key_order(&mut self, order: &[i32]) {
        let num_orders = (order.len() / self.shape.num_keys.max(1)).max(1);
        self.heads_per_order = self.shape.num_heads / num_orders;
        self.places.key_order = self.put(order);
    }

    /// Sets which row of the call each query slot holds, `[num_heads, num_queries]`.
    pub fn set_query_order(&mut self, order: &[i32]) {
        self.places.query_order = self.put(order);
    }

    /// Sets the [`TokenWindow`] of each list.
    pub fn set_windows(&mut self, windows: &[TokenWindow]) {
        let words: Vec<i32> = windows.iter().flat_map(|window| [window.init, window.local]).collect();
        self.places.windows = self.put(&words);
    }

    /// Appends an array to the words and returns its place; an empty array is absent.
    fn put(&mut self, array: &[i32]) -> Range<usize> {
        if array.is_empty() {
            return 0..0;
        }
        let first = self.words.len();
        self.words.extend_from_slice(array);
        first..self.words.len()
    }

    fn array(&self, place: &Range<usize>) -> &[i32] {
        &self.words[place.clone()]
    }

    /// Kept key tiles of a query tile, ascending.
    pub fn row(&self, list: usize, query_tile: usize) -> &[i32] {
        self.entries(&self.places.row_ptr, &self.places.tile_idx, list, query_tile)
    }

    /// Single key slots of a query tile, ascending.
    pub fn columns(&self, list: usize, query_tile: usize) -> &[i32] {
        self.entries(&self.places.col_ptr, &self.places.col_idx, list, query_tile)
    }

    /// Entries of one (list, query tile) of a CSR array; none if the array is absent.
    fn entries(&self, ptr: &Range<usize>, idx: &Range<usize>, list: usize, query_tile: usize) -> &[i32] {
        if ptr.is_empty() {
            return &[];
        }
        let at = ptr.start + list * self.tiles.num_query_tiles() + query_tile;
        let bound = |at: usize| idx.start + self.words[at] as usize;
        &self.words[bound(at)..bound(at + 1)]
    }

    /// Number of kept key tiles of all rows of all lists.
    pub fn num_tiles(&self) -> usize {
        self.array(&self.places.row_ptr).last().map_or(0, |&end| end as usize)
    }

    /// Which key each slot holds, `[num_heads / heads_per_order, num_keys]`; empty if slot i holds key i.
    pub fn key_order(&self) -> &[i32] {
        self.array(&self.places.key_order)
    }

    /// Which row each query slot holds, `[num_heads, num_slots]`; empty if slot i holds row i.
    pub fn query_order(&self) -> &[i32] {
        self.array(&self.places.query_order)
    }

    /// Which key each slot of a list holds; `None` if slot i holds key i.
    pub fn key_order_of(&self, list: usize) -> Option<&[i32]> {
        let at = self.heads_of(list).start / self.heads_per_order;
        self.key_order().chunks_exact(self.shape.num_keys.max(1)).nth(at)
    }

    /// The row that a query slot of a head holds.
    pub fn query_row(&self, head: usize, slot: usize) -> usize {
        match self.query_order().get(head * self.tiles.num_queries + slot) {
            Some(&row) => row as usize,
            None => slot,
        }
    }

    /// The [`TokenWindow`] of a list; `None` if the mask has no windows.
    pub fn window_of(&self, list: usize) -> Option<TokenWindow> {
        let words = self.array(&self.places.windows).as_chunks::<2>().0;
        words.get(list).map(|&[init, local]| TokenWindow { init, local })
    }

    /// Whether position `a` sees key `j`, which a kept tile or single slot holds.
    pub fn visible(&self, list: usize, a: usize, j: usize) -> bool {
        if !self.causal {
            return true;
        }
        j <= a && (a as i64) < i64::from(self.expire(list, j))
    }

    /// First position that no longer sees key `j`; `i32::MAX` if every later position sees it.
    pub fn expire(&self, list: usize, j: usize) -> i32 {
        match self.window_of(list) {
            Some(window) if j as i64 >= i64::from(window.init) => (j as i32).saturating_add(window.local),
            _ => i32::MAX,
        }
    }

    /// Whether every admissible tile is kept, so that attention under the mask is dense attention.
    pub fn keeps_everything(&self) -> bool {
        let hides = |list| self.window_of(list).is_some_and(|window| (window.local as usize) < self.shape.num_keys);
        let in_order = self.places.key_order.is_empty() && self.places.query_order.is_empty();
        // A row is ascending, so it holds all admissible tiles if it has their number and its last one is admissible.
        let is_whole = |list: usize, i: usize| {
            let (row, admissible) = (self.row(list, i), self.tiles.admissible(i));
            row.len() == admissible && row.last().is_some_and(|&j| (j as usize) < admissible)
        };
        let rows = 0..self.tiles.num_query_tiles();
        self.causal
            && in_order
            && (0..self.num_lists()).all(|list| !hides(list) && rows.clone().all(|i| is_whole(list, i)))
    }

    /// The mask as kernels take it: a mask that keeps everything has no lists.
    ///
    /// # Errors
    /// A mask that is not causal, which no kernel supports; a call without queries; a broken rule
    /// ([`check`](Self::check)).
    pub fn for_kernels(&self) -> Result<Self, MaskError> {
        require(self.causal, "causal", || "no kernel takes a bidirectional mask".to_owned())?;
        require(self.shape.num_queries > 0, "sizes", || "a call without queries".to_owned())?;
        self.check()?;
        if !self.keeps_everything() {
            return Ok(self.clone());
        }
        Ok(Self { places: MaskPlaces::default(), words: vec![0], ..self.clone() })
    }

    /// Checks that every array fits the call, that every index is inside its array, and that no query tile holds a key
    /// twice.
    ///
    /// # Errors
    /// The first broken rule, and where it is broken.
    pub fn check(&self) -> Result<(), MaskError> {
        let (shape, tiles) = (self.shape, self.tiles);
        let fits = shape.num_queries <= shape.num_keys
            && (tiles.num_queries, tiles.num_keys) == (shape.num_queries, shape.num_keys)
            && tiles.query_offset < tiles.query_tile
            && tiles.key_tile > 0
            && [1, shape.group_size()].contains(&self.heads_per_list)
            && shape.num_keys < i32::MAX as usize / 2;
        require(fits, "sizes", || format!("{shape:?}, {tiles:?}, {} heads a list", self.heads_per_list))?;
        let places = &self.places;
        let rows = self.num_lists() * tiles.num_query_tiles();
        self.check_rows("row_ptr", [&places.row_ptr, &places.tile_idx], rows, tiles.num_key_tiles())?;
        if !(places.col_ptr.is_empty() && places.col_idx.is_empty()) {
            self.check_rows("col_ptr", [&places.col_ptr, &places.col_idx], rows, shape.num_keys)?;
        }
        for list in 0..self.num_lists() {
            for i in 0..tiles.num_query_tiles() {
                let (row, columns) = (self.row(list, i), self.columns(list, i));
                let in_kept_tile = |slot: &&i32| row.binary_search(&(**slot / tiles.key_tile as i32)).is_ok();
                require(columns.iter().find(in_kept_tile).is_none(), "col_idx", || {
                    format!("list {list}, query tile {i}: a slot inside a kept tile: {columns:?}, tiles {row:?}")
                })?;
            }
        }
        let heads = [shape.num_kv_heads, shape.num_heads];
        check_orders("key_order", self.key_order(), shape.num_keys, &heads)?;
        check_orders("query_order", self.query_order(), shape.num_queries, &heads[1..])?;
        require([0, 2 * self.num_lists()].contains(&places.windows.len()), "windows", || {
            format!("{} words, not two of each of {} lists", places.windows.len(), self.num_lists())
        })?;
        for range in &self.dense_rows {
            let is_valid = range.start < range.end && range.end <= shape.num_queries;
            require(is_valid, "dense_rows", || format!("{range:?} is not a range of rows"))?;
        }
        Ok(())
    }

    /// Checks a CSR array: `ptr` divides the entries of `idx` into `rows` ascending rows of indices below `limit`.
    fn check_rows(
        &self,
        array: &'static str,
        [ptr, idx]: [&Range<usize>; 2],
        rows: usize,
        limit: usize,
    ) -> Result<(), MaskError> {
        let (ptr, idx) = (self.array(ptr), self.array(idx));
        let is_cut = ptr.len() == rows + 1
            && ptr[0] == 0
            && ptr[rows] as usize == idx.len()
            && ptr.windows(2).all(|w| w[0] <= w[1]);
        require(is_cut, array, || format!("it does not cut {} entries into {rows} rows", idx.len()))?;
        for row in 0..rows {
            let entries = &idx[ptr[row] as usize..ptr[row + 1] as usize];
            let inside = |&x: &i32| x >= 0 && (x as usize) < limit;
            let fits = entries.iter().all(inside) && entries.is_sorted_by(|a, b| a < b);
            require(fits, array, || {
                let (list, tile) = (row / self.tiles.num_query_tiles(), row % self.tiles.num_query_tiles());
                format!("list {list}, query tile {tile}: not ascending below {limit}: {entries:?}")
            })?;
        }
        Ok(())
    }
}

/// Query tiles of each list, those with the most keys first; of tiles with equally many keys, the later first.
fn tile_order(tiles: Tiles, row_ptr: &[i32], col_ptr: &[i32]) -> Vec<i32> {
    let num_tiles = tiles.num_query_tiles();
    let count = |ptr: &[i32], row: usize| ptr.get(row + 1).map_or(0, |end| end - ptr[row]) as usize;
    let mut all = Vec::with_capacity(row_ptr.len());
    for first in (0..row_ptr.len() - 1).step_by(num_tiles.max(1)) {
        let keys = |tile: usize| count(row_ptr, first + tile) * tiles.key_tile + count(col_ptr, first + tile);
        let mut order: Vec<i32> = (0..num_tiles as i32).rev().collect();
        order.sort_by_key(|&tile| std::cmp::Reverse(keys(tile as usize)));
        all.extend(order);
    }
    all
}

/// Unless `fits`, the error that `array` breaks the rule that `problem` tells.
fn require(fits: bool, array: &'static str, problem: impl FnOnce() -> String) -> Result<(), MaskError> {
    if fits { Ok(()) } else { Err(MaskError { array, problem: problem() }) }
}

/// Checks that `order` is empty, or has a permutation of `0..len` for each head, with one of the numbers of heads in
/// `heads`.
fn check_orders(array: &'static str, order: &[i32], len: usize, heads: &[usize]) -> Result<(), MaskError> {
    let fits = order.is_empty() || heads.iter().any(|heads| order.len() == heads * len);
    require(fits, array, || {
        let counts = heads.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ");
        format!("{} entries, where {counts} heads have {len} each", order.len())
    })?;
    for (head, order) in order.chunks(len.max(1)).enumerate() {
        let mut named = vec![false; len];
        for &x in order {
            let named = usize::try_from(x).ok().and_then(|x| named.get_mut(x));
            let is_fresh = named.is_some_and(|named| !std::mem::replace(named, true));
            require(is_fresh, array, || {
                format!("of head {head} is not a permutation: {x} is named twice or outside it")
            })?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: CallShape = CallShape::new([5, 7], [4, 2], 8);

    /// A mask of two lists, one for each KV head, with two query tiles each; one row is unsorted and has a tile twice.
    fn mask() -> KeyMask {
        let rows: [&[i32]; 4] = [&[2], &[3, 1, 0, 1], &[1, 2], &[3]];
        let rows = rows.map(|row| [row.to_vec(), Vec::new()]);
        KeyMask::new(SHAPE, Tiles::new(SHAPE, 4, 2), 2, rows)
    }

    #[test]
    fn arrays_lie_end_to_end_and_long_tiles_come_first() {
        let mask = mask();
        let places = &mask.places;
        assert_eq!(
            [&places.tile_order, &places.row_ptr, &places.tile_idx, &places.col_ptr],
            [&(1..5), &(5..10), &(10..17), &(0..0)]
        );
        assert_eq!(mask.words[1..], [1, 0, 0, 1, 0, 1, 4, 6, 7, 2, 0, 1, 3, 1, 2, 3]);
        assert_eq!((mask.num_lists(), mask.row(0, 1), mask.row(1, 0)), (2, &[0, 1, 3][..], &[1, 2][..]));
        assert_eq!((places.num_words(), mask.num_tiles()), (mask.words.len(), 7));
        assert_eq!(mask.for_kernels().expect("it fits"), mask);
    }

    #[test]
    fn single_slots_inside_kept_tiles_are_removed() {
        let rows = [[vec![1], vec![6, 2, 0, 0]], [vec![], vec![]]];
        let one = CallShape { num_heads: 1, num_kv_heads: 1, ..SHAPE };
        let mask = KeyMask::new(one, Tiles::new(one, 4, 2), 1, rows);
        assert_eq!((mask.columns(0, 0), mask.columns(0, 1)), (&[0, 6][..], &[][..]));
        mask.check().expect("it fits");
    }

    #[test]
    fn a_mask_that_keeps_everything_goes_to_kernels_without_lists() {
        let mask = KeyMask::dense(SHAPE).for_kernels().expect("it fits");
        assert_eq!((mask.words.len(), mask.places.num_words()), (1, 1));
        let mut both = KeyMask::dense(SHAPE);
        both.causal = false;
        let error = both.for_kernels().expect_err("bidirectional");
        assert!(error.to_string().contains("no kernel takes a bidirectional mask"), "{error}");
    }

    #[test]
    fn indices_outside_their_array_and_repeated_keys_are_refused() {
        type Change = fn(&mut KeyMask);
        // Words 10 to 16 are `tile_idx`: 12 is in the row of (list 0, query tile 1), 16 the last one, of list 1.
        let wrong: [(&str, &str, Change); 9] = [
            ("row_ptr", "does not cut 7 entries into 4 rows", |m| m.words[m.places.row_ptr.start + 4] = 6),
            ("row_ptr", "list 1, query tile 1: not ascending below 4", |m| m.words[16] = 4),
            ("row_ptr", "list 0, query tile 1: not ascending", |m| m.words[12] = 0),
            ("col_ptr", "not ascending below 7", |m| {
                m.places.col_ptr = m.put(&[0, 0, 0, 0, 1]);
                m.places.col_idx = m.put(&[7]);
            }),
            ("col_idx", "list 0, query tile 0: a slot inside a kept tile", |m| {
                m.places.col_ptr = m.put(&[0, 2, 2, 2, 2]);
                m.places.col_idx = m.put(&[0, 5]);
            }),
            ("key_order", "13 entries, where 2 or 4 heads have 7 each", |m| m.set_key_order(&[0; 13])),
            ("key_order", "of head 1 is not a permutation: 3", |m| {
                m.set_key_order(&[0, 1, 2, 3, 4, 5, 6, 0, 1, 3, 2, 3, 4, 5]);
            }),
            ("query_order", "of head 0 is not a permutation: 5", |m| m.set_query_order(&[5; 20])),
            ("sizes", "3 heads a list", |m| m.heads_per_list = 3),
        ];
        for (array, told, change) in wrong {
            let mut mask = mask();
            change(&mut mask);
            let error = mask.for_kernels().expect_err(array);
            assert!(error.array == array && error.problem.contains(told), "{error}");
        }
    }
}
