//! How the query heads of a GQA group choose their lists of kept keys, and how the lists become a mask.

use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sieve_core::{KeptRows, KeyMask, Tiles};

use crate::call::Call;
use crate::mask::Selected;

/// How the query heads that share a KV head choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GqaPolicy {
    /// Each query head has a list of keys of its own.
    PerQuery,
    /// One list for the group: the union of its query heads' lists.
    Union,
    /// One list for the group, by scores averaged over its query heads.
    Mean,
}

/// The mask of what `select` keeps for each query head: key tiles and single keys of each query tile. With
/// [`GqaPolicy::Mean`] `select` gets all heads of a group and averages their scores. Heads for which it returns `None`
/// (a score was NaN) are dense. Every query tile also keeps its diagonal tiles.
pub(crate) fn mask(
    call: &Call<'_>,
    tiles: Tiles,
    policy: GqaPolicy,
    select: impl Fn(&[usize]) -> Option<KeptRows> + Sync,
) -> Selected {
    let select_with_diagonal = |heads: &[usize]| {
        let mut rows = select(heads)?;
        for (i, [row, _]) in rows.iter_mut().enumerate() {
            row.extend(tiles.diagonal(i).map(|j| j as i32));
        }
        Some(rows)
    };
    mask_as_selected(call, tiles, policy, select_with_diagonal, |i| (0..tiles.admissible(i)).collect())
}

/// As [`mask`], without adding diagonal tiles. `otherwise(i)` gives the key tiles of query tile `i` where `select`
/// returns `None`.
pub(crate) fn mask_as_selected(
    call: &Call<'_>,
    tiles: Tiles,
    policy: GqaPolicy,
    select: impl Fn(&[usize]) -> Option<KeptRows> + Sync,
    otherwise: impl Fn(usize) -> Vec<usize> + Sync,
) -> Selected {
    let nan_lists = AtomicUsize::new(0);
    let select_or_otherwise = |heads: &[usize]| {
        select(heads).unwrap_or_else(|| {
            nan_lists.fetch_add(1, Ordering::Relaxed);
            rows(tiles, &otherwise)
        })
    };
    let (all, group): (Vec<usize>, usize) = ((0..call.shape.num_heads).collect(), call.shape.group_size());
    // How many heads one call of `select` gets, and how many lists are united to one.
    let (heads_at_once, lists_at_once) = match policy {
        GqaPolicy::PerQuery => (1, 1),
        GqaPolicy::Union => (1, group),
        GqaPolicy::Mean => (group, 1),
    };
    let lists: Vec<KeptRows> = all.par_chunks(heads_at_once).map(select_or_otherwise).collect();
    let union = |lists: &[KeptRows]| -> KeptRows {
        let of_row = |i: usize| [0, 1].map(|part| lists.iter().flat_map(|list| list[i][part].clone()).collect());
        (0..tiles.num_query_tiles()).map(of_row).collect()
    };
    let rows = lists.chunks(lists_at_once).flat_map(union);
    let mut chosen = Selected::from(KeyMask::new(call.shape, tiles, heads_at_once * lists_at_once, rows));
    chosen.stats.nan_lists = nan_lists.into_inner();
    chosen
}

/// A list in which query tile `i` keeps the key tiles `row(i)`.
pub(crate) fn rows(tiles: Tiles, row: impl Fn(usize) -> Vec<usize> + Sync) -> KeptRows {
    let query_tiles = (0..tiles.num_query_tiles()).into_par_iter();
    query_tiles.map(|i| tiles_alone(row(i))).collect()
}

/// As [`rows`], for a `row` that returns `None` where a score is NaN; the list is then `None`.
pub(crate) fn rows_or_nan(tiles: Tiles, row: impl Fn(usize) -> Option<Vec<usize>> + Sync) -> Option<KeptRows> {
    let query_tiles = (0..tiles.num_query_tiles()).into_par_iter();
    query_tiles.map(|i| row(i).map(tiles_alone)).collect()
}

/// A row of key tiles without single keys.
fn tiles_alone(row: Vec<usize>) -> [Vec<i32>; 2] {
    [row.into_iter().map(|j| j as i32).collect(), Vec::new()]
}
