//! How the query heads of a group come to their lists, and how lists become a mask.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::call::{Call, Tiles};
use crate::keep::union;
use crate::mask::{ListRows, ListsPer, SparseMask};

/// What the query heads that share a KV head keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GqaPolicy {
    /// Each its own list.
    PerQuery,
    /// What any of them keeps.
    Union,
    /// One list, of scores averaged over the group.
    Mean,
}

/// Lists of all heads, and how many of them are dense because of a NaN.
pub(crate) struct Lists {
    pub(crate) per: ListsPer,
    pub(crate) rows: Vec<ListRows>,
    pub(crate) nan_lists: usize,
}

/// Runs `select` for each query head (or each group, with [`GqaPolicy::Mean`]: it then averages the scores of the heads
/// it is given). Where it returns `None` (a NaN), the head is dense. Diagonal tiles are added to every row.
pub(crate) fn lists(
    call: &Call<'_>,
    tiles: Tiles,
    policy: GqaPolicy,
    select: impl Fn(&[usize]) -> Option<ListRows> + Sync,
) -> Lists {
    let select = |heads: &[usize]| select(heads).map(|list| with_diagonals(list, tiles));
    lists_as_selected(call, tiles, policy, select, || ListRows::dense(tiles))
}

/// As [`lists`], without diagonal tiles and with a fallback of its own: for selections that bring their own.
pub(crate) fn lists_as_selected(
    call: &Call<'_>,
    tiles: Tiles,
    policy: GqaPolicy,
    select: impl Fn(&[usize]) -> Option<ListRows> + Sync,
    otherwise: impl Fn() -> ListRows + Sync,
) -> Lists {
    let nan_lists = AtomicUsize::new(0);
    let select = |heads: &[usize]| {
        select(heads).unwrap_or_else(|| {
            nan_lists.fetch_add(1, Ordering::Relaxed);
            otherwise()
        })
    };
    let all: Vec<usize> = (0..call.shape.num_heads).collect();
    let heads_at_once = match policy {
        GqaPolicy::Mean => call.shape.group_size(),
        GqaPolicy::PerQuery | GqaPolicy::Union => 1,
    };
    let rows: Vec<ListRows> = all.par_chunks(heads_at_once).map(&select).collect();
    let union = |group: &[ListRows]| union_of(group, tiles);
    let (per, rows) = match policy {
        GqaPolicy::PerQuery => (ListsPer::QueryHead, rows),
        GqaPolicy::Mean => (ListsPer::KvHead, rows),
        GqaPolicy::Union => (
            ListsPer::KvHead,
            rows.chunks(call.shape.group_size()).map(union).collect(),
        ),
    };
    Lists {
        per,
        rows,
        nan_lists: nan_lists.into_inner(),
    }
}

/// As [`lists`], packed into a mask.
pub(crate) fn mask(
    call: &Call<'_>,
    tiles: Tiles,
    policy: GqaPolicy,
    select: impl Fn(&[usize]) -> Option<ListRows> + Sync,
) -> SparseMask {
    let lists = lists(call, tiles, policy, select);
    let mut mask = SparseMask::from_lists(call.shape, tiles, lists.per, &lists.rows);
    mask.stats.nan_lists = lists.nan_lists;
    mask
}

/// Rows from a function of the query tile.
pub(crate) fn rows(tiles: Tiles, row: impl Fn(usize) -> Vec<usize> + Sync) -> ListRows {
    let row = |i| row(i).into_iter().map(|j| j as i32).collect();
    let query_tiles = (0..tiles.num_query_tiles()).into_par_iter();
    ListRows::of_tiles(query_tiles.map(row).collect())
}

fn with_diagonals(mut list: ListRows, tiles: Tiles) -> ListRows {
    for (i, row) in list.tiles.iter_mut().enumerate() {
        *row = union(row, tiles.diagonal(i).map(|j| j as i32));
    }
    without_covered_columns(list, tiles)
}

fn union_of(group: &[ListRows], tiles: Tiles) -> ListRows {
    let mut all = group[0].clone();
    for list in &group[1..] {
        for (row, other) in all.tiles.iter_mut().zip(&list.tiles) {
            *row = union(row, other.iter().copied());
        }
        if all.columns.is_empty() {
            all.columns = list.columns.clone();
        } else {
            for (row, other) in all.columns.iter_mut().zip(&list.columns) {
                *row = union(row, other.iter().copied());
            }
        }
    }
    without_covered_columns(all, tiles)
}

/// Columns inside kept tiles go.
fn without_covered_columns(mut list: ListRows, tiles: Tiles) -> ListRows {
    for (row, columns) in list.tiles.iter().zip(&mut list.columns) {
        columns.retain(|key| row.binary_search(&(key / tiles.key_tile as i32)).is_err());
    }
    list
}
