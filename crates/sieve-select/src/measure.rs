//! How much a mask computes and how much of the dense attention it keeps.

use crate::attention::{AttentionOutput, block_sparse_attention};
use crate::call::Call;
use crate::error::SelectError;
use crate::mask::Selected;
use sieve_core::{KeyMask, TokenWindow};
use std::ops::Range;

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

/// Counts what a selection computes.
pub fn density(selected: &Selected) -> Density {
    let mask = &selected.mask;
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
            let row = mask.row(list, i);
            let starts_later = |j: usize| mask.causal && bounds[j].0 > last;
            // In order, tiles that start later are the last ones.
            let possible = match mask.key_order_of(list) {
                None => bounds.partition_point(|(low, _)| !mask.causal || *low <= last),
                Some(_) => (0..bounds.len()).filter(|&j| !starts_later(j)).count(),
            };
            let besides = row.iter().filter(|&&j| starts_later(j as usize)).count();
            admissible += heads * (possible + besides) as u64;
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
    let dense: u64 = mask.dense_rows.iter().cloned().flatten().map(row_pairs).sum();
    let probes: u64 = selected
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
fn pairs_of_tile(mask: &KeyMask, list: usize, i: usize, bounds: &[(usize, usize)]) -> u64 {
    let context = mask.shape.context();
    let order = mask.key_order_of(list);
    let heads = mask.heads_of(list);
    // Rows in order are those of every head.
    let (same, distinct) = match mask.query_order().is_empty() {
        true => (heads.len() as u64, 1),
        false => (1, heads.len()),
    };
    let mut pairs = 0;
    for head in heads.take(distinct) {
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
            keys.map(|key| positions.iter().filter(|&&a| mask.visible(list, a, key)).count() as u64)
                .sum()
        };
        for &j in mask.row(list, i) {
            let (low, high) = bounds[j as usize];
            let slots = mask.tiles.keys(j as usize);
            let expire = |key| mask.expire(list, key) as i64;
            // The key that expires first is the smallest one outside the window's first keys.
            let whole = !mask.causal || (high <= first && expire(high).min(expire(low)) > last as i64);
            pairs += if whole
                && mask
                    .window_of(list)
                    .is_none_or(|w| low as i64 >= i64::from(w.init) || (high as i64) < i64::from(w.init))
            {
                (slots.len() * positions.len()) as u64
            } else if let Some(order) = order {
                count(&mut slots.map(|slot| order[slot] as usize))
            } else {
                let seen = |&a: &usize| keys_in_order(&slots, a, mask.window_of(list));
                positions.iter().map(seen).sum()
            };
        }
        let columns = mask.columns(list, i).iter();
        pairs += count(&mut columns.map(|&slot| order.map_or(slot as usize, |order| order[slot as usize] as usize)));
    }
    same * pairs
}

/// Those of a range of keys that a position sees under causality and a window.
fn keys_in_order(keys: &Range<usize>, a: usize, window: Option<TokenWindow>) -> u64 {
    let end = keys.end.min(a + 1);
    let gone = window.map_or(0, |window| {
        let past = (a + 1).saturating_sub(window.local.max(0) as usize);
        past.min(end)
            .saturating_sub(keys.start.max(window.init.max(0) as usize))
    });
    (end.saturating_sub(keys.start) - gone.min(end.saturating_sub(keys.start))) as u64
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
    use crate::selector::Selector;

    /// Windows end inside tiles, before the first tokens' end, and before a chunk's first row.
    #[test]
    fn pairs_of_a_window_are_those_that_its_rule_lets_see() {
        for (num_queries, num_keys) in [(200, 200), (70, 333), (1, 130)] {
            let shape = crate::test_data::shape([num_queries, num_keys], [4, 2], 8);
            for (init, local) in [(0, 1), (4, 64), (4, 65), (100, 40), (3, 500)] {
                let text = format!("a_shape:n_init={init},n_local={local},min_prefill_tokens=0");
                let selector = Selector::parse(&text).expect("valid");
                let call = Call::of_shape(shape).expect("sizes fit");
                let chosen = selector.select(&call).expect("it reads nothing");
                let seen = |a: usize| (0..=a).filter(|&j| j < init || j + local > a).count();
                let pairs: usize = (num_keys - num_queries..num_keys).map(seen).sum();
                let expected = pairs as f64 / shape.causal_pairs() as f64;
                let found = density(&chosen).token;
                assert!((found - expected).abs() < 1e-12, "{text}: {found}, {expected}");
            }
        }
    }
}
