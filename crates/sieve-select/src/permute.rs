//! Orders of keys and queries inside segments of a sequence, and the blocks they make. A slot is a position in such an
//! order.

use std::ops::Range;
use std::time::Instant;

use sieve_core::KeyMask;

use crate::keep::falling;
use crate::pool::scores;
use crate::prelude::*;
use crate::vector::norm;

/// Segments `[g * segment, (g + 1) * segment)` of absolute positions, each cut into blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segments {
    /// Tokens of a segment, a multiple of the block.
    pub(crate) segment: usize,
    /// Query and key tiles of one block each.
    pub(crate) tiles: Tiles,
}

impl Segments {
    pub(crate) fn new(call: &Call<'_>, segment: usize, block: usize) -> Self {
        let tiles = Tiles::new(call.shape, block, block);
        Self { segment, tiles }
    }

    /// The number of key tiles in the segments before the first segment of query tile `i`.
    pub(crate) fn earlier(self, i: usize) -> usize {
        self.tiles.first(i) / self.segment * (self.segment / self.tiles.key_tile)
    }

    /// Key tiles of the segments that query tile `i` overlaps.
    pub(crate) fn own(self, i: usize) -> Range<usize> {
        let end = (self.tiles.last(i) / self.segment + 1) * (self.segment / self.tiles.key_tile);
        self.earlier(i)..end.min(self.tiles.num_key_tiles())
    }

    /// Positions of each whole segment of a sequence; a short last segment has no range.
    pub(crate) fn whole(self, num_keys: usize) -> impl Iterator<Item = Range<usize>> {
        (0..num_keys / self.segment).map(move |g| g * self.segment..(g + 1) * self.segment)
    }

    /// Rows of the call in each segment that the call overlaps.
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

/// The token of each slot, `[len]`: inside each range the tokens are sorted by falling score (a stable sort), all other
/// slots hold the token of their own index.
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

/// The row of the call that each slot of a head holds: the queries of a segment are sorted by the key block that they
/// are assigned to (arXiv:2510.21270, key-aware query permutation). `means` are the key blocks' means, `[blocks,
/// head_dim]`.
///
/// Pairs of a query and a block are visited by falling cosine. A query goes to the first block of its pairs that has
/// taken fewer than a block's length of queries of the segment.
pub(crate) fn order_queries(call: &Call<'_>, head: usize, segments: Segments, means: &[f32]) -> Vec<i32> {
    let d = call.shape.head_dim;
    let directions: Vec<f32> = means.chunks_exact(d).flat_map(unit).collect();
    let mut order = Vec::with_capacity(call.shape.num_queries);
    for rows in segments.rows(call) {
        if rows.is_empty() {
            continue;
        }
        let block_len = segments.tiles.key_tile;
        let last_position = call.shape.context() + rows.end - 1;
        let blocks = last_position / block_len + 1;
        let queries: Vec<f32> = rows.clone().flat_map(|row| unit(call.query(head, row))).collect();
        let cosine = scores(&queries, &directions[..blocks * d], d, 1.0);
        // The block of each query, usize::MAX before it has a block.
        let mut block_of = vec![usize::MAX; rows.len()];
        let mut taken = vec![0; blocks];
        for pair in falling(&cosine) {
            let (query, block) = (pair / blocks, pair % blocks);
            if block_of[query] == usize::MAX && taken[block] < block_len {
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

/// A vector divided by its norm.
fn unit(x: &[f32]) -> impl Iterator<Item = f32> {
    let factor = 1.0 / norm(x).max(f32::MIN_POSITIVE);
    x.iter().map(move |x| x * factor)
}

/// The selection of a method that permutes tokens. `orders` computes the permutations, `rows` the key tiles that some
/// heads keep, in terms of slots; `rows` gives `None` where a score is NaN.
pub(crate) fn select(
    call: &Call<'_>,
    segments: Segments,
    gqa: GqaPolicy,
    causal: bool,
    orders: impl FnOnce() -> Orders,
    rows: impl Fn(&[usize], &Orders) -> Option<KeptRows> + Sync,
) -> Selected {
    let tiles = segments.tiles;
    let started = Instant::now();
    let orders = orders();
    let permute_seconds = started.elapsed().as_secs_f64();
    // A row that runs dense because of a NaN keeps all tiles up to the end of its own segment. Keys are permuted inside
    // a segment, so that a key of its past may be in any of them.
    let end = |i| if causal { segments.own(i).end } else { tiles.num_key_tiles() };
    let lists = gqa::mask_as_selected(call, tiles, gqa, |heads| rows(heads, &orders), |i| (0..end(i)).collect());
    let mut chosen = orders.mask(lists, causal);
    chosen.stats.permute_seconds = permute_seconds;
    chosen
}

/// The permutations of the tokens, for all heads.
pub(crate) struct Orders {
    /// The key of each slot, `[num_kv_heads or num_heads][num_keys]`.
    pub(crate) keys: Vec<Vec<i32>>,
    /// The row of the call in each slot, `[num_heads][num_queries]`; empty when queries keep their order.
    pub(crate) queries: Vec<Vec<i32>>,
}

impl Orders {
    /// The key of each slot for one of `num_heads` query heads.
    pub(crate) fn keys_of(&self, head: usize, num_heads: usize) -> &[i32] {
        &self.keys[head * self.keys.len() / num_heads]
    }

    /// The row of the call that a query slot holds.
    pub(crate) fn query_row(&self, head: usize, slot: usize) -> usize {
        self.queries.get(head).map_or(slot, |order| order[slot] as usize)
    }

    /// The selection, whose tiles count slots, as a mask with these permutations. Permutations that move nothing are
    /// omitted. In a causal mask so are tiles with only keys after the last row of the query tile.
    pub(crate) fn mask(&self, mut selected: Selected, causal: bool) -> Selected {
        let lists = &selected.mask;
        let last_position = |list: usize, i: usize| {
            let rows = |head| lists.tiles.rows(i).map(move |slot| self.query_row(head, slot));
            lists.heads_of(list).flat_map(rows).max().map_or(0, |row| lists.shape.context() + row)
        };
        let kept = |list: usize, i: usize| {
            let order = self.keys_of(lists.heads_of(list).start, lists.shape.num_heads);
            let last = last_position(list, i);
            let first_key = |j: i32| order[lists.tiles.keys(j as usize)].iter().copied().min();
            let seen = |&j: &i32| !causal || first_key(j).is_some_and(|key| key as usize <= last);
            [lists.row(list, i).iter().copied().filter(seen).collect(), Vec::new()]
        };
        let tiles = (0..lists.num_lists()).flat_map(|list| (0..lists.tiles.num_query_tiles()).map(move |i| (list, i)));
        let rows = tiles.map(|(list, i)| kept(list, i));
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
