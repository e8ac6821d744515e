//! A selector's mask of one call, as GPU kernels read it: every array in one buffer.
use std::ops::Range;
use thiserror::Error;

/// The arrays of a mask and how they cut the call. An empty array is absent; `row_ptr` and `tile_idx` may be absent
/// together, for every key up to a query tile's last query.
///
/// Queries are the last `num_queries` of `num_keys` tokens. A query tile has `query_tile` slots; the first one is
/// `query_offset` slots shorter. Slots are tokens in order, unless `key_order` or `query_order` says which token each
/// one holds.
#[derive(Clone, Debug, Default)]
pub struct MaskArrays<'a> {
    /// Query rows of the call.
    pub num_queries: usize,
    /// Keys, the call's own included.
    pub num_keys: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Slots of a query tile.
    pub query_tile: usize,
    /// Slots missing in front of the first query tile.
    pub query_offset: usize,
    /// Slots of a key tile.
    pub key_tile: usize,
    /// Lists: as many as query heads or as KV heads.
    pub num_lists: usize,
    /// Where the key tiles of (list, query tile) start in `tile_idx`, and its length.
    pub row_ptr: &'a [i32],
    /// Key tiles.
    pub tile_idx: &'a [i32],
    /// Where the single slots of (list, query tile) start in `col_idx`, and its length.
    pub col_ptr: &'a [i32],
    /// Single slots.
    pub col_idx: &'a [i32],
    /// The key in each slot, `[num_kv_heads or num_heads, num_keys]`.
    pub key_order: &'a [i32],
    /// The row of the call in each query slot, `[num_heads, num_queries]`.
    pub query_order: &'a [i32],
    /// First keys that all queries see, and positions that see any other key, `[num_lists]`.
    pub windows: Vec<[i32; 2]>,
    /// Rows of the call that see every key not after them, in all heads.
    pub dense_rows: Vec<Range<usize>>,
}

/// The sizes of a mask, and where its arrays are in one buffer of i32.
#[derive(Clone, Debug, PartialEq)]
pub struct MaskLayout {
    /// Query rows.
    pub num_queries: usize,
    /// Keys.
    pub num_keys: usize,
    /// Query heads and KV heads.
    pub heads: [usize; 2],
    /// `query_tile`, `query_offset`, `key_tile` and the number of query tiles.
    pub cuts: [usize; 4],
    /// Slots of queries: `num_queries`, or fewer where `query_order` names some rows, the same of all heads.
    pub query_slots: usize,
    /// Query heads that share a list, and query heads that share an order of keys.
    pub heads_per: [usize; 2],
    /// Where `tile_order`, `row_ptr`, `tile_idx`, `col_ptr`, `col_idx`, `key_order`, `query_order` and `windows` begin;
    /// 0 for an absent one. Without `tile_order` later tiles have more keys.
    pub places: [usize; 8],
    /// Words of the buffer.
    pub words: usize,
    /// Rows that see every key not after them.
    pub dense_rows: Vec<Range<usize>>,
}

/// A mask whose every index is inside its array.
#[derive(Clone, Debug, PartialEq)]
pub struct PackedMask {
    layout: MaskLayout,
    data: Vec<i32>,
}

/// An array of a mask that does not fit its call.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("packed mask: {array}: {problem}")]
pub struct MaskError {
    /// The array.
    pub array: &'static str,
    /// What does not fit.
    pub problem: String,
}

impl PackedMask {
    /// Checks the arrays and lays them end to end. Query tiles with the most keys come first in `tile_order`, which is
    /// made here.
    ///
    /// # Errors
    /// A size of 0, an array of another length than the call asks for, an index outside its array, a key that a query
    /// tile would count twice: one listed tile or slot twice, a single slot inside a listed tile, an order that names
    /// one token in two slots.
    pub fn new(arrays: &MaskArrays<'_>) -> Result<Self, MaskError> {
        let a = arrays;
        let fits = a.num_queries > 0
            && a.num_queries <= a.num_keys
            && a.num_kv_heads > 0
            && a.num_heads.is_multiple_of(a.num_kv_heads)
            && a.query_offset < a.query_tile
            && a.key_tile > 0
            && [a.num_heads, a.num_kv_heads].contains(&a.num_lists)
            && a.num_keys < i32::MAX as usize / 2;
        let problem = format!("{a:?}");
        require(fits, "sizes", || problem.chars().take(200).collect())?;
        let num_tiles = (a.num_queries + a.query_offset).div_ceil(a.query_tile);
        let key_tiles = a.num_keys.div_ceil(a.key_tile);
        let rows = a.num_lists * num_tiles;
        require_csr("row_ptr", a.row_ptr, a.tile_idx, rows, key_tiles)?;
        require_csr("col_ptr", a.col_ptr, a.col_idx, rows, a.num_keys)?;
        let [heads, kv_heads] = [a.num_heads, a.num_kv_heads];
        require_orders("key_order", a.key_order, a.num_keys, &[kv_heads, heads])?;
        require_orders("query_order", a.query_order, a.num_queries, &[heads])?;
        require_each_key_once(a, num_tiles)?;
        let windows = a.windows.len();
        require([0, a.num_lists].contains(&windows), "windows", || {
            format!("{windows} of {} lists", a.num_lists)
        })?;
        for range in &a.dense_rows {
            let inside = range.start < range.end && range.end <= a.num_queries;
            require(inside, "dense_rows", || format!("{range:?} is no range of rows"))?;
        }
        let windows: Vec<i32> = a.windows.iter().flatten().copied().collect();
        let tile_order = tile_order(a, num_tiles);
        // A place of 0 says that an array is absent.
        let mut data = vec![0];
        let places = [
            &tile_order,
            a.row_ptr,
            a.tile_idx,
            a.col_ptr,
            a.col_idx,
            a.key_order,
            a.query_order,
            &windows,
        ];
        let places = places.map(|array| {
            let place = data.len();
            data.extend_from_slice(array);
            if array.is_empty() { 0 } else { place }
        });
        let orders = (a.key_order.len() / a.num_keys).max(1);
        let layout = MaskLayout {
            num_queries: a.num_queries,
            num_keys: a.num_keys,
            heads: [a.num_heads, a.num_kv_heads],
            cuts: [a.query_tile, a.query_offset, a.key_tile, num_tiles],
            query_slots: a.num_queries,
            heads_per: [a.num_heads / a.num_lists, a.num_heads / orders],
            places,
            words: data.len(),
            dense_rows: a.dense_rows.clone(),
        };
        Ok(Self { layout, data })
    }

    /// Sizes and places.
    pub fn layout(&self) -> &MaskLayout {
        &self.layout
    }

    /// The arrays.
    pub fn data(&self) -> &[i32] {
        &self.data
    }
}

/// Query tiles of each list by falling number of keys; of equal ones the later first, as all of them where there are no
/// lists.
fn tile_order(a: &MaskArrays<'_>, num_tiles: usize) -> Vec<i32> {
    if a.row_ptr.is_empty() {
        return Vec::new();
    }
    let count = |ptr: &[i32], row: usize| ptr.get(row + 1).map_or(0, |end| end - ptr[row]) as usize;
    let mut all = Vec::with_capacity(a.num_lists * num_tiles);
    for list in 0..a.num_lists {
        let keys = |tile: usize| {
            let row = list * num_tiles + tile;
            count(a.row_ptr, row) * a.key_tile + count(a.col_ptr, row)
        };
        let mut order: Vec<i32> = (0..num_tiles as i32).rev().collect();
        order.sort_by_key(|&tile| std::cmp::Reverse(keys(tile as usize)));
        all.extend(order);
    }
    all
}

fn require(fits: bool, array: &'static str, problem: impl FnOnce() -> String) -> Result<(), MaskError> {
    match fits {
        true => Ok(()),
        false => Err(MaskError {
            array,
            problem: problem(),
        }),
    }
}

fn require_below(array: &'static str, indices: &[i32], limit: usize) -> Result<(), MaskError> {
    let bad = indices.iter().find(|&&x| x < 0 || x as usize >= limit);
    require(bad.is_none(), array, || {
        format!("{} is not below {limit}", bad.unwrap_or(&0))
    })
}

/// Attention adds a key as often as a tile of queries lists it.
fn require_each_key_once(a: &MaskArrays<'_>, num_tiles: usize) -> Result<(), MaskError> {
    let row_of = |ptr: &[i32], indices: &[i32], row: usize| -> Vec<i32> {
        let bounds = ptr.get(row).zip(ptr.get(row + 1));
        let listed = bounds.map_or(&[][..], |(&first, &end)| &indices[first as usize..end as usize]);
        let mut sorted = listed.to_vec();
        sorted.sort_unstable();
        sorted
    };
    let twice = |array: &'static str, what: &str, sorted: &[i32], row: usize| {
        let pair = sorted.windows(2).find(|pair| pair[0] == pair[1]);
        require(pair.is_none(), array, || {
            let (list, tile) = (row / num_tiles, row % num_tiles);
            format!(
                "list {list}, query tile {tile}: {what} {} is listed twice",
                pair.map_or(0, |pair| pair[0])
            )
        })
    };
    for row in 0..a.num_lists * num_tiles {
        let tiles = row_of(a.row_ptr, a.tile_idx, row);
        let slots = row_of(a.col_ptr, a.col_idx, row);
        twice("tile_idx", "key tile", &tiles, row)?;
        twice("col_idx", "slot", &slots, row)?;
        let inside = |slot: &&i32| tiles.binary_search(&(**slot / a.key_tile as i32)).is_ok();
        let both = slots.iter().find(inside);
        require(both.is_none(), "col_idx", || {
            let (list, tile) = (row / num_tiles, row % num_tiles);
            format!(
                "list {list}, query tile {tile}: slot {} lies in a key tile that is listed too",
                both.unwrap_or(&0)
            )
        })?;
    }
    for (array, order, len) in [
        ("key_order", a.key_order, a.num_keys),
        ("query_order", a.query_order, a.num_queries),
    ] {
        for (head, order) in order.chunks_exact(len).enumerate() {
            let mut named = vec![false; len];
            let twice = order
                .iter()
                .find(|&&token| std::mem::replace(&mut named[token as usize], true));
            require(twice.is_none(), array, || {
                format!("order {head} names token {} twice", twice.unwrap_or(&0))
            })?;
        }
    }
    Ok(())
}

fn require_csr(array: &'static str, ptr: &[i32], indices: &[i32], rows: usize, limit: usize) -> Result<(), MaskError> {
    let absent = ptr.is_empty() && indices.is_empty();
    let whole = ptr.len() == rows + 1
        && ptr[0] == 0
        && ptr[rows] as usize == indices.len()
        && ptr.windows(2).all(|w| w[0] <= w[1]);
    require(absent || whole, array, || {
        format!("it does not cut {} entries into {rows} rows", indices.len())
    })?;
    require_below(array, indices, limit)
}

fn require_orders(array: &'static str, order: &[i32], len: usize, heads: &[usize]) -> Result<(), MaskError> {
    let fits = order.is_empty() || heads.iter().any(|heads| order.len() == heads * len);
    require(fits, array, || {
        format!("{} entries for {heads:?} heads of {len}", order.len())
    })?;
    require_below(array, order, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrays<'a>() -> MaskArrays<'a> {
        MaskArrays {
            num_queries: 5,
            num_keys: 7,
            num_heads: 4,
            num_kv_heads: 2,
            query_tile: 4,
            key_tile: 2,
            num_lists: 2,
            row_ptr: &[0, 1, 4, 6, 7],
            tile_idx: &[2, 0, 1, 3, 1, 2, 3],
            ..MaskArrays::default()
        }
    }

    #[test]
    fn arrays_lie_end_to_end_and_long_tiles_come_first() {
        let mask = PackedMask::new(&arrays()).expect("it fits");
        let layout = mask.layout();
        let [order, row_ptr, tile_idx, col_ptr, ..] = layout.places;
        assert_eq!([order, row_ptr, tile_idx, col_ptr], [1, 5, 10, 0]);
        assert_eq!(mask.data()[order..row_ptr], [1, 0, 0, 1]);
        assert_eq!(mask.data()[tile_idx..], [2, 0, 1, 3, 1, 2, 3]);
        assert_eq!((layout.heads_per, layout.cuts), ([2, 4], [4, 0, 2, 2]));
        assert_eq!(layout.words, mask.data().len());
    }

    #[test]
    fn no_key_counts_twice() {
        type Change = fn(&mut MaskArrays<'_>);
        let wrong: [(&str, &str, Change); 5] = [
            ("tile_idx", "list 0, query tile 1: key tile 1", |a| {
                a.tile_idx = &[2, 1, 0, 1, 1, 2, 3];
            }),
            ("col_idx", "list 1, query tile 0: slot 6", |a| {
                (a.col_ptr, a.col_idx) = (&[0, 0, 0, 2, 2], &[6, 6]);
            }),
            ("col_idx", "list 0, query tile 0: slot 5", |a| {
                (a.col_ptr, a.col_idx) = (&[0, 2, 2, 2, 2], &[0, 5]);
            }),
            ("key_order", "order 1 names token 3", |a| {
                a.key_order = &[0, 1, 2, 3, 4, 5, 6, 0, 1, 3, 2, 3, 4, 5];
            }),
            ("query_order", "order 0 names token 1", |a| a.query_order = &[1; 20]),
        ];
        for (array, told, change) in wrong {
            let mut arrays = arrays();
            change(&mut arrays);
            let error = PackedMask::new(&arrays).expect_err(array);
            assert!(error.array == array && error.problem.contains(told), "{error}");
        }
    }

    #[test]
    fn no_index_leaves_its_array() {
        type Change = fn(&mut MaskArrays<'_>);
        let wrong: [(&str, Change); 6] = [
            ("row_ptr", |a| a.row_ptr = &[0, 1, 4, 7]),
            ("row_ptr", |a| a.tile_idx = &[2, 0, 1, 3, 1, 2, 4]),
            ("col_ptr", |a| {
                (a.col_ptr, a.col_idx) = (&[0, 0, 0, 0, 1], &[7]);
            }),
            ("key_order", |a| a.key_order = &[0; 13]),
            ("query_order", |a| a.query_order = &[5; 20]),
            ("sizes", |a| a.num_lists = 3),
        ];
        for (array, change) in wrong {
            let mut arrays = arrays();
            change(&mut arrays);
            let error = PackedMask::new(&arrays).expect_err(array);
            assert_eq!(error.array, array, "{error}");
        }
    }
}
