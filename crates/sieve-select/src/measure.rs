//! How much a mask computes and how much of the dense attention it keeps.

use crate::attention::{AttentionOutput, block_sparse_attention};
use crate::call::Call;
use crate::error::SelectError;
use crate::mask::SparseMask;

/// Shares of the causal work, over all query heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Density {
    /// Visible (row, key) pairs of the mask over causal pairs; dense rows count whole.
    pub token: f64,
    /// Kept tiles over admissible tiles.
    pub tile: f64,
    /// Pairs of the probe rows of a correction over causal pairs, computed besides.
    pub probes: f64,
}

/// Counts what a mask computes.
pub fn density(mask: &SparseMask) -> Density {
    let shape = mask.shape;
    let all_pairs = |rows: u64, per_row: u64| rows as f64 * per_row as f64;
    let total = if mask.causal {
        shape.causal_pairs() as f64
    } else {
        all_pairs(shape.num_queries as u64, shape.num_keys as u64)
    } * shape.num_heads as f64;
    if total == 0.0 {
        return Density {
            token: 1.0,
            tile: 1.0,
            probes: 0.0,
        };
    }
    let (mut pairs, mut kept, mut admissible) = (0_u64, 0_u64, 0_u64);
    for list in 0..mask.num_lists() {
        let bounds = mask.key_bounds(list);
        let heads = mask.heads_of(list).len() as u64;
        for i in 0..mask.tiles.num_query_tiles() {
            let last = mask.tiles.last(i);
            kept += heads * mask.row(list, i).len() as u64;
            let possible = |j: &usize| {
                !mask.causal
                    || bounds[*j].0 <= last
                    || mask.row(list, i).binary_search(&(*j as i32)).is_ok()
            };
            admissible += heads * (0..bounds.len()).filter(possible).count() as u64;
            pairs += pairs_of_tile(mask, list, i, &bounds);
        }
    }
    let row_pairs = |row: usize| {
        if mask.causal {
            (shape.context() + row + 1) as u64
        } else {
            shape.num_keys as u64
        }
    };
    let heads = shape.num_heads as u64;
    let dense: u64 = mask
        .dense_rows
        .iter()
        .cloned()
        .flatten()
        .map(row_pairs)
        .sum();
    let probes: u64 = mask
        .correction
        .iter()
        .flat_map(|correction| &correction.probe_rows)
        .map(|&row| row_pairs(row as usize))
        .sum();
    Density {
        token: (pairs + heads * dense) as f64 / total,
        tile: kept as f64 / admissible as f64,
        probes: (heads * probes) as f64 / total,
    }
}

/// Visible pairs of the rows of one query tile that are not dense rows, over all heads of the list.
fn pairs_of_tile(mask: &SparseMask, list: usize, i: usize, bounds: &[(usize, usize)]) -> u64 {
    let context = mask.shape.context();
    let order = mask.key_order_of(list);
    let mut pairs = 0;
    for head in mask.heads_of(list) {
        let positions: Vec<usize> = mask
            .tiles
            .rows(i)
            .map(|slot| mask.query_row(head, slot))
            .filter(|&row| !mask.is_dense_row(row))
            .map(|row| context + row)
            .collect();
        let (Some(&first), Some(&last)) = (positions.iter().min(), positions.iter().max()) else {
            continue;
        };
        let count = |keys: &mut dyn Iterator<Item = usize>| -> u64 {
            keys.map(|key| {
                positions
                    .iter()
                    .filter(|&&a| mask.visible(list, a, key))
                    .count() as u64
            })
            .sum()
        };
        for &j in mask.row(list, i) {
            let (low, high) = bounds[j as usize];
            let slots = mask.tiles.keys(j as usize);
            let expire = |key| mask.expire(list, key) as i64;
            // The key that expires first is the smallest one outside the window's first keys.
            let whole =
                !mask.causal || (high <= first && expire(high).min(expire(low)) > last as i64);
            pairs += if whole
                && mask.window_of(list).is_none_or(|w| {
                    low as i64 >= i64::from(w.init) || (high as i64) < i64::from(w.init)
                }) {
                (slots.len() * positions.len()) as u64
            } else {
                count(&mut slots.map(|slot| order.map_or(slot, |order| order[slot] as usize)))
            };
        }
        let columns = mask.columns(list, i).iter();
        pairs += count(
            &mut columns
                .map(|&slot| order.map_or(slot as usize, |order| order[slot as usize] as usize)),
        );
    }
    pairs
}

/// Mean over rows and heads of the dense softmax mass on the kept pairs, from the log-sum-exps of both.
pub fn recall(sparse_lse: &[f32], dense_lse: &[f32]) -> f64 {
    if dense_lse.is_empty() {
        return 1.0;
    }
    let mass =
        |(&sparse, &dense): (&f32, &f32)| (f64::from(sparse) - f64::from(dense)).exp().min(1.0);
    sparse_lse.iter().zip(dense_lse).map(mass).sum::<f64>() / dense_lse.len() as f64
}

/// Dense causal attention through the same block-sparse path, with every tile kept.
///
/// # Errors
/// None for a call that passed [`Call::new`].
pub fn dense_attention(call: &Call<'_>) -> Result<AttentionOutput, SelectError> {
    block_sparse_attention(call, &SparseMask::dense(call.shape))
}
