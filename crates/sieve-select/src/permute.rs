//! Orders of keys and queries inside segments of a sequence, and the blocks they make.

use std::ops::Range;
use std::time::Instant;

use sieve_core::KeyMask;

use crate::keep::falling;
use crate::pool::{mean_pool, scores};
use crate::prelude::*;
use crate::vector::norm;

/// Segments `[g * segment, (g + 1) * segment)` of absolute positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segments {
    pub(crate) segment: usize,
    pub(crate) block: usize,
}

impl Segments {
    /// Blocks of segments before those of a query tile: `0..earlier`.
    pub(crate) fn earlier(self, tiles: Tiles, i: usize) -> usize {
        tiles.first(i) / self.segment * (self.segment / self.block)
    }

    /// Blocks of the segments that a query tile meets.
    pub(crate) fn own(self, tiles: Tiles, i: usize) -> Range<usize> {
        let end = (tiles.last(i) / self.segment + 1) * (self.segment / self.block);
        self.earlier(tiles, i)..end.min(tiles.num_key_tiles())
    }

    /// Positions of whole segments of a sequence, one range each.
    pub(crate) fn whole(self, num_keys: usize) -> impl Iterator<Item = Range<usize>> {
        (0..num_keys / self.segment).map(move |g| g * self.segment..(g + 1) * self.segment)
    }

    /// Rows of the call in each segment it meets.
    pub(crate) fn rows(self, call: &Call<'_>) -> Vec<Range<usize>> {
        let (context, n) = (call.shape.context(), call.shape.num_keys);
        (context / self.segment..n.div_ceil(self.segment))
            .map(|g| {
                let end = ((g + 1) * self.segment).min(n);
                (g * self.segment).max(context) - context..end - context
            })
            .collect()
    }
}

/// Sorts slots of each range by falling score, stable; the rest keeps its order.
pub(crate) fn sort_ranges(len: usize, ranges: impl Iterator<Item = Range<usize>>, score: &[f32]) -> Vec<i32> {
    let mut order: Vec<i32> = (0..len as i32).collect();
    for range in ranges {
        let by_score = falling(&score[range.clone()]);
        for (slot, from) in range.clone().zip(by_score) {
            order[slot] = (range.start + from) as i32;
        }
    }
    order
}

/// Means of the blocks of permuted keys, `[key tiles, head_dim]`.
pub(crate) fn key_means(call: &Call<'_>, kv_head: usize, tiles: Tiles, order: &[i32]) -> Vec<f32> {
    let key = |slot: usize| call.key(kv_head, order[slot] as usize);
    mean_pool(
        (0..tiles.num_key_tiles()).map(|j| tiles.keys(j).map(key)),
        call.shape.head_dim,
    )
}

/// Order of a head's queries by the block of keys each resembles most (arXiv:2510.21270, key-aware query
/// permutation).
///
/// Pairs of a query and a block are visited by falling cosine; a block takes at most `segments.block` queries of a
/// segment.
pub(crate) fn order_queries(call: &Call<'_>, head: usize, segments: Segments, means: &[f32]) -> Vec<i32> {
    let d = call.shape.head_dim;
    let norm = |x: &[f32]| norm(x).max(f32::MIN_POSITIVE);
    let directions: Vec<f32> = means
        .chunks_exact(d)
        .flat_map(|mean| {
            let factor = 1.0 / norm(mean);
            mean.iter().map(move |x| x * factor)
        })
        .collect();
    let mut order = Vec::with_capacity(call.shape.num_queries);
    for rows in segments.rows(call) {
        if rows.is_empty() {
            continue;
        }
        let last = call.shape.context() + rows.end - 1;
        let blocks = last / segments.block + 1;
        let queries: Vec<f32> = rows
            .clone()
            .flat_map(|row| {
                let q = call.query(head, row);
                let factor = 1.0 / norm(q);
                q.iter().map(move |x| x * factor)
            })
            .collect();
        let cosine = scores(&queries, &directions[..blocks * d], d, 1.0);
        let mut block_of = vec![usize::MAX; rows.len()];
        let mut taken = vec![0; blocks];
        for pair in falling(&cosine) {
            let (query, block) = (pair / blocks, pair % blocks);
            if block_of[query] == usize::MAX && taken[block] < segments.block {
                block_of[query] = block;
                taken[block] += 1;
            }
        }
        let mut sorted: Vec<usize> = (0..rows.len()).collect();
        sorted.sort_by_key(|&query| block_of[query]);
        order.extend(sorted.into_iter().map(|query| (rows.start + query) as i32));
    }
    order
}

/// The selection of a method that moves tokens: their orders, the lists over the slots, and both as a mask.
pub(crate) fn select(
    call: &Call<'_>,
    segments: Segments,
    gqa: GqaPolicy,
    causal: bool,
    orders: impl FnOnce(Tiles) -> Orders,
    rows: impl Fn(Tiles, &[usize], &Orders) -> Option<KeptRows> + Sync,
) -> Selected {
    let tiles = Tiles::new(call.shape, segments.block, segments.block);
    let started = Instant::now();
    let orders = orders(tiles);
    let permute_seconds = started.elapsed().as_secs_f64();
    // The dense fallback of other methods knows nothing of segments.
    let end = |i| match causal {
        true => segments.own(tiles, i).end,
        false => tiles.num_key_tiles(),
    };
    let rows = |heads: &[usize]| rows(tiles, heads, &orders);
    let lists = gqa::mask_as_selected(call, tiles, gqa, rows, |i| (0..end(i)).collect());
    let mut chosen = orders.mask(lists, causal);
    chosen.stats.permute_seconds = permute_seconds;
    chosen
}

/// Orders of all heads.
pub(crate) struct Orders {
    /// Which key a slot holds, per KV head or per query head.
    pub(crate) keys: Vec<Vec<i32>>,
    /// Which row a slot holds, per query head; empty when in order.
    pub(crate) queries: Vec<Vec<i32>>,
}

impl Orders {
    /// The row of the call that a query slot holds.
    pub(crate) fn query_row(&self, head: usize, slot: usize) -> usize {
        self.queries.get(head).map_or(slot, |order| order[slot] as usize)
    }

    /// The lists over these slots as a mask. Identity orders are omitted, and in a causal mask also tiles that hold
    /// only keys after the last row of a query tile.
    pub(crate) fn mask(&self, mut selected: Selected, causal: bool) -> Selected {
        let lists = &selected.mask;
        let of_list = |list: usize| &self.keys[lists.heads_of(list).start * self.keys.len() / lists.shape.num_heads];
        let last_of = |list: usize, i: usize| {
            let rows = |head| lists.tiles.rows(i).map(move |slot| self.query_row(head, slot));
            lists
                .heads_of(list)
                .flat_map(rows)
                .max()
                .map_or(0, |row| lists.shape.context() + row)
        };
        let kept = |list: usize, i: usize| {
            let (order, last) = (of_list(list), last_of(list, i));
            let first_key = |j: i32| order[lists.tiles.keys(j as usize)].iter().copied().min();
            let seen = |&j: &i32| !causal || first_key(j).is_some_and(|key| key as usize <= last);
            [lists.row(list, i).iter().copied().filter(seen).collect(), Vec::new()]
        };
        let places = (0..lists.num_lists()).flat_map(|list| (0..lists.tiles.num_query_tiles()).map(move |i| (list, i)));
        let rows = places.map(|(list, i)| kept(list, i));
        let mut mask = KeyMask::new(lists.shape, lists.tiles, lists.heads_per_list, rows);
        let moves = |order: &Vec<i32>| (0..).zip(order).any(|(slot, &x)| slot != x);
        if self.keys.iter().any(moves) {
            mask.set_key_order(&self.keys.concat());
        }
        if self.queries.iter().any(moves) {
            mask.set_query_order(&self.queries.concat());
        }
        mask.causal = causal;
        selected.mask = mask;
        selected
    }
}
