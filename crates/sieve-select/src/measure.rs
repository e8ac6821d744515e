//! How much a mask computes and how much of the dense attention it keeps.

use crate::attention::{AttentionOutput, block_sparse_attention};
use crate::call::Call;
use crate::error::SelectError;
use crate::mask::{Selected, kept_keys, key_of};
use sieve_core::KeyMask;

/// Shares of the causal work, over all query heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Density {
    /// Visible (row, key) pairs of the mask over causal pairs; dense rows count whole.
    pub token: f64,
    /// Kept tiles divided by causally visible tiles.
    pub tile: f64,
    /// Pairs that the probe rows of a correction compute in addition, over causal pairs.
    pub probes: f64,
}

/// Counts the tiles and pairs that a selection computes.
pub fn density(selected: &Selected) -> Density {
    let (mask, shape) = (&selected.mask, selected.mask.shape);
    let row_pairs = |row: usize| if mask.causal { shape.context() + row + 1 } else { shape.num_keys };
    let of_rows = |rows: &mut dyn Iterator<Item = usize>| (shape.num_heads * rows.map(row_pairs).sum::<usize>()) as f64;
    let total = of_rows(&mut (0..shape.num_queries));
    if total == 0.0 {
        return Density { token: 1.0, tile: 1.0, probes: 0.0 };
    }
    let (mut pairs, mut kept, mut admissible) = (0, 0, 0);
    for list in 0..mask.num_lists() {
        let heads = mask.heads_of(list).len();
        let first_key = |j| mask.tiles.keys(j).map(|slot| key_of(mask, list, slot)).min();
        let first_keys: Vec<_> = (0..mask.tiles.num_key_tiles()).map(first_key).collect();
        for i in 0..mask.tiles.num_query_tiles() {
            let (row, last) = (mask.row(list, i), mask.tiles.last(i));
            let is_later = |j: usize| mask.causal && first_keys[j].is_some_and(|key| key > last);
            let possible = (0..first_keys.len()).filter(|&j| !is_later(j)).count();
            kept += heads * row.len();
            // Where queries are permuted, a tile's rows may come after `last`: a later tile that is kept counts too.
            admissible += heads * (possible + row.iter().filter(|&&j| is_later(j as usize)).count());
            pairs += pairs_of_tile(mask, list, i);
        }
    }
    let correction = selected.correction.iter();
    let mut probes = correction.flat_map(|correction| correction.probe_rows.iter().map(|&row| row as usize));
    let dense = of_rows(&mut mask.dense_rows.iter().cloned().flatten());
    Density {
        token: (pairs as f64 + dense) / total,
        tile: kept as f64 / admissible as f64,
        probes: of_rows(&mut probes) / total,
    }
}

/// Visible pairs of the rows of one query tile that are not dense rows, over all heads of the list.
fn pairs_of_tile(mask: &KeyMask, list: usize, i: usize) -> usize {
    let heads = mask.heads_of(list);
    // Unless queries are permuted, all heads of the list have the same rows in a tile: one is counted for all.
    let (factor, counted_heads) = if mask.query_order().is_empty() { (heads.len(), 1) } else { (1, heads.len()) };
    let pairs_of_head = |head: usize| -> usize {
        let rows = mask.tiles.rows(i).map(|slot| mask.query_row(head, slot));
        let rows = rows.filter(|&row| !mask.is_dense_row(row));
        let mut positions: Vec<i64> = rows.map(|row| (mask.shape.context() + row) as i64).collect();
        positions.sort_unstable();
        let before = |end: i64| positions.partition_point(|&a| a < end);
        let rows_that_see = |key: usize| {
            if mask.causal {
                before(mask.expire(list, key).into()).saturating_sub(before(key as i64))
            } else {
                positions.len()
            }
        };
        kept_keys(mask, list, i).map(rows_that_see).sum()
    };
    factor * heads.take(counted_heads).map(pairs_of_head).sum::<usize>()
}

/// Mean over rows and heads of the dense softmax mass on the kept pairs, from the log-sum-exps of both.
pub fn recall(sparse_lse: &[f32], dense_lse: &[f32]) -> f64 {
    if dense_lse.is_empty() {
        return 1.0;
    }
    let mass = |(&sparse, &dense): (&f32, &f32)| (f64::from(sparse) - f64::from(dense)).exp().min(1.0);
    sparse_lse.iter().zip(dense_lse).map(mass).sum::<f64>() / dense_lse.len() as f64
}

/// Dense causal attention through the same block-sparse path, with every tile kept.
///
/// # Errors
/// None for a call that passed [`Call::new`].
pub fn dense_attention(call: &Call<'_>) -> Result<AttentionOutput, SelectError> {
    block_sparse_attention(call, &Selected::dense(call.shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::select_of;

    /// The cases have windows that end inside tiles, among the first tokens, and before a chunk's first row.
    #[test]
    fn density_counts_the_pairs_that_a_window_lets_see() {
        for (num_queries, num_keys) in [(200, 200), (70, 333), (1, 130)] {
            let shape = sieve_core::CallShape::new([num_queries, num_keys], [4, 2], 8);
            for (init, local) in [(0, 1), (4, 64), (4, 65), (100, 40), (3, 500)] {
                let text = format!("a_shape:n_init={init},n_local={local}");
                let chosen = select_of(&text, &Call::of_shape(shape).expect("sizes fit"));
                let seen = |a: usize| (0..=a).filter(|&j| j < init || j + local > a).count();
                let pairs: usize = (num_keys - num_queries..num_keys).map(seen).sum();
                let expected = pairs as f64 / shape.causal_pairs() as f64;
                let found = density(&chosen).token;
                assert!((found - expected).abs() < 1e-12, "{text}: {found}, {expected}");
            }
        }
    }
}
