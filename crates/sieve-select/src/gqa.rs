//! How the query heads of a group come to their lists, and how lists become a mask.

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
    /// Each query head has its own list.
    PerQuery,
    /// One list: the union of the heads' lists.
    Union,
    /// One list, by scores averaged over the group.
    Mean,
}

/// Runs `select` for each query head (or each group, with [`GqaPolicy::Mean`]: it then averages the scores of the heads
/// it is given). Where it returns `None` (a NaN), the head is dense. Diagonal tiles are added to every row.
pub(crate) fn mask(
    call: &Call<'_>,
    tiles: Tiles,
    policy: GqaPolicy,
    select: impl Fn(&[usize]) -> Option<KeptRows> + Sync,
) -> Selected {
    let select = |heads: &[usize]| {
        let mut rows = select(heads)?;
        for (i, [row, _]) in rows.iter_mut().enumerate() {
            row.extend(tiles.diagonal(i).map(|j| j as i32));
        }
        Some(rows)
    };
    mask_as_selected(call, tiles, policy, select, |i| (0..tiles.admissible(i)).collect())
}

/// As [`mask`], without adding diagonal tiles and with a given fallback, for methods that have their own.
pub(crate) fn mask_as_selected(
    call: &Call<'_>,
    tiles: Tiles,
    policy: GqaPolicy,
    select: impl Fn(&[usize]) -> Option<KeptRows> + Sync,
    otherwise: impl Fn(usize) -> Vec<usize> + Sync,
) -> Selected {
    let nan_lists = AtomicUsize::new(0);
    let select = |heads: &[usize]| {
        select(heads).unwrap_or_else(|| {
            nan_lists.fetch_add(1, Ordering::Relaxed);
            rows(tiles, &otherwise)
        })
    };
    let (all, group): (Vec<usize>, usize) = ((0..call.shape.num_heads).collect(), call.shape.group_size());
    let (heads_at_once, lists_at_once) = match policy {
        GqaPolicy::PerQuery => (1, 1),
        GqaPolicy::Union => (1, group),
        GqaPolicy::Mean => (group, 1),
    };
    let lists: Vec<KeptRows> = all.par_chunks(heads_at_once).map(select).collect();
    let union = |lists: &[KeptRows]| -> KeptRows {
        let of_row = |i: usize| [0, 1].map(|part| lists.iter().flat_map(|list| list[i][part].clone()).collect());
        (0..tiles.num_query_tiles()).map(of_row).collect()
    };
    let rows = lists.chunks(lists_at_once).flat_map(union);
    let mut chosen = Selected::from(KeyMask::new(call.shape, tiles, heads_at_once * lists_at_once, rows));
    chosen.stats.nan_lists = nan_lists.into_inner();
    chosen
}

/// Rows from a function of the query tile.
pub(crate) fn rows(tiles: Tiles, row: impl Fn(usize) -> Vec<usize> + Sync) -> KeptRows {
    let query_tiles = (0..tiles.num_query_tiles()).into_par_iter();
    query_tiles.map(|i| tiles_alone(row(i))).collect()
}

/// Rows from a function of the query tile that may meet a NaN.
pub(crate) fn rows_or_nan(tiles: Tiles, row: impl Fn(usize) -> Option<Vec<usize>> + Sync) -> Option<KeptRows> {
    let query_tiles = (0..tiles.num_query_tiles()).into_par_iter();
    query_tiles.map(|i| row(i).map(tiles_alone)).collect()
}

fn tiles_alone(row: Vec<usize>) -> [Vec<i32>; 2] {
    [row.into_iter().map(|j| j as i32).collect(), Vec::new()]
}
