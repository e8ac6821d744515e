//! How many thread blocks of a backward pass share a tile of keys.
//!
//! A thread block holds 128 keys and loops over the queries of all query heads of their KV head. With few KV heads or
//! short rows there are too few blocks, or too long ones, to keep all multiprocessors busy. Then several blocks share a
//! key tile: they divide its query heads and, where these do not suffice, the queries of a head. The number of shares
//! is found by simulating the launch: blocks start in the kernels' order (`block_order.cuh`) on whichever
//! multiprocessor is free. Long rows of dense attention have blocks enough, and share tiles for the L2 cache: a block
//! that walks many heads falls behind others, until all heads are read from memory at the same time.
//! lab/notes/experiments.md has measured times of the choices (Head shapes).
use crate::attention::{AttentionShape, BLOCK_KV, padded_len};
use crate::dma::oracle::SUPER_BLOCK;
use crate::runtime::{DType, SourceKernel};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Into how many shares the work of a key tile is divided; each share has a thread block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueryShares {
    /// Shares of the query heads of a KV head. The shares may differ in size by one head.
    pub(crate) heads: usize,
    /// Shares of a head's queries, which are more than one only where each share of heads has one head; or shares of a
    /// list of query tiles.
    pub(crate) queries: usize,
}

/// The thread blocks of a key-stationary backward pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyTiles {
    /// Keys of a thread block's tile.
    pub(crate) block_kv: usize,
    /// Thread blocks that the GPU runs at the same time.
    pub(crate) at_once: usize,
}

/// Queries of one step of a thread block; times below are in steps.
const STEP: usize = 64;

/// Time of a thread block beside its steps, in steps: its start, and the store of dk and dv.
const BLOCK_STEPS: usize = 4;
/// Time of a thread block of listed keys beside its steps: it adds to dk and dv in memory.
const LISTED_BLOCK_STEPS: usize = 8;

/// Costs in 1/1024 of the time in which every multiprocessor does one step: `PART_COST` to write and read the partial
/// dk and dv of a thread block, `JOIN_COST` for the launches that sum them.
const PART_COST: usize = 46;
const JOIN_COST: usize = 4096;

/// Bytes of queries and output gradients that thread blocks read at the same time, so that they stay in the L2 cache:
/// `SECTION_BYTES` of the Hopper kernel.
const SECTION_BYTES: usize = 32 << 20;

/// Bytes of queries and output gradients that a thread block may loop over, so that blocks which are at different heads
/// at a time find them in an L2 cache of 50 MB.
const L2_BYTES: usize = 40 << 20;

/// The most shares for the L2 cache: more were 1 % faster at most, and each has partial dk and dv in memory.
const MOST_L2_SHARES: usize = 8;

/// The most shares of a list of query tiles: in short rows, which would get more shares, a list has few tiles.
const MOST_LIST_SHARES: usize = 8;

/// With more waves of thread blocks than this, all multiprocessors end at about the same time, and shares gain nothing.
const MOST_WAVES: usize = 8;

impl QueryShares {
    /// One thread block for each key tile.
    pub(crate) const ONE: Self = Self { heads: 1, queries: 1 };

    /// Number of thread blocks that share one key tile.
    pub(crate) fn count(self) -> usize {
        self.heads * self.queries
    }

    /// Adds the `#define`s of a backward kernel for these shares.
    pub(crate) fn define(self, kernel: SourceKernel) -> SourceKernel {
        match self {
            Self::ONE => kernel,
            _ => with_shares(kernel),
        }
    }

    /// At least `count` shares, and at least one. More where heads and queries cannot be divided into exactly `count`.
    pub(crate) fn of_count(count: usize, group_size: usize) -> Self {
        let heads = count.clamp(1, group_size);
        Self { heads, queries: count.div_ceil(heads).max(1) }
    }

    /// The shares with which a pass over consecutive keys takes the least time, where queries see at most `window`
    /// keys.
    pub(crate) fn of_neighbours(shape: &AttentionShape, window: usize, tiles: KeyTiles) -> Self {
        let num_tiles = shape.seq_len.div_ceil(tiles.block_kv) * shape.num_kv_heads * shape.batch;
        let most_shares = usize::MAX;
        let simulated = cheapest_shares(shape.group_size(), most_shares, num_tiles, tiles, |shares| {
            let end = makespan(tiles.at_once, block_times_over_consecutive_keys(shape, window, tiles.block_kv, shares));
            let join = if shares == Self::ONE { 0 } else { JOIN_COST + PART_COST * num_tiles * shares.count() };
            1024 * end + join
        });
        let for_l2 = Self::for_l2(shape, window);
        if for_l2.heads > simulated.heads { for_l2 } else { simulated }
    }

    /// The fewest shares whose queries stay in the L2 cache. Only for dense attention over long rows, where a KV head's
    /// queries are several times that cache: a window's blocks read neighbouring queries of all heads, and with two or
    /// four query heads a KV head shares gained nothing, or lost 4 %.
    fn for_l2(shape: &AttentionShape, window: usize) -> Self {
        let group_size = shape.group_size();
        if window < shape.seq_len || group_size < 8 || query_bytes(shape, group_size) < 3 * L2_BYTES {
            return Self::ONE;
        }
        let heads_in_l2 = (L2_BYTES / query_bytes(shape, 1)).clamp(1, group_size);
        Self::of_count(group_size.div_ceil(heads_in_l2).min(MOST_L2_SHARES), group_size)
    }

    /// The shares of a pass over lists of query tiles: one for each of a KV head's `head_shares`, and of each list
    /// `count` parts, whatever heads they name, or so many that each multiprocessor has one. Where blocks `wait` for
    /// each other they are at most as many as multiprocessors: a block has a part or goes through whole lists, and none
    /// waits for a part that follows its own.
    pub(crate) fn of_tile_lists(
        head_shares: usize,
        count: Option<usize>,
        shape: &AttentionShape,
        tiles: KeyTiles,
        wait: bool,
    ) -> Self {
        let num_lists = shape.seq_len.div_ceil(tiles.block_kv) * shape.num_kv_heads * head_shares;
        let most = if wait { tiles.at_once / num_lists } else { tiles.at_once.div_ceil(num_lists) };
        let most = most.clamp(1, MOST_LIST_SHARES);
        let parts = count.map_or(most, |count| if wait { count.min(most) } else { count });
        Self { heads: head_shares, queries: parts.max(1) }
    }

    /// The shares with which a pass over key lists takes the least time. Each row of the batch, KV head and super-block
    /// (1024 queries that share a list) has a list of at most `capacity` keys; the launch has `super_blocks`
    /// super-blocks of each row. Only query heads are divided.
    pub(crate) fn of_lists(shape: &AttentionShape, super_blocks: usize, capacity: usize, tiles: KeyTiles) -> Self {
        let (group, chunks) = (shape.group_size(), capacity.div_ceil(tiles.block_kv));
        let lists = super_blocks * shape.num_kv_heads * shape.batch;
        let most_shares = group;
        cheapest_shares(group, most_shares, lists * chunks, tiles, |shares| {
            // Steps of a chunk, the listed keys of a thread block. Keys enter and leave the list one by one, so most
            // queries of the super-block see the middle of the list, and few see its ends.
            let steps_of =
                |chunk: usize| SUPER_BLOCK.min(tiles.block_kv * (chunk + 1).min(chunks - chunk)).div_ceil(STEP);
            let blocks =
                (0..lists * shares.heads).flat_map(|list_share| (0..chunks).map(move |chunk| (list_share, chunk)));
            let times = blocks.map(|(list_share, chunk)| {
                let heads = shares.heads_of_share(list_share % shares.heads, group);
                LISTED_BLOCK_STEPS + heads * steps_of(chunk)
            });
            makespan(tiles.at_once, times)
        })
    }

    /// Number of query heads of share `at`.
    fn heads_of_share(self, at: usize, group_size: usize) -> usize {
        even_part(group_size, at, self.heads)
    }
}

/// Bytes of the partial dk and dv of blocks that share key tiles, in a backward pass with `window` consecutive keys a
/// query on a Hopper GPU.
pub fn key_part_bytes(shape: &AttentionShape, window: usize, num_multiprocessors: usize) -> usize {
    let tiles = KeyTiles { block_kv: BLOCK_KV, at_once: num_multiprocessors };
    match QueryShares::of_neighbours(shape, window.min(shape.seq_len), tiles) {
        QueryShares::ONE => 0,
        shares => {
            let rows = shape.batch * shape.num_kv_heads * shares.count() * padded_len(shape.seq_len);
            rows * (shape.head_dim + shape.head_dim_v) * DType::F32.size()
        }
    }
}

/// Makes the thread blocks of a backward kernel share key tiles.
fn with_shares(kernel: SourceKernel) -> SourceKernel {
    kernel.define("SHARES", 1)
}

/// The shares of each of `num_tiles` key tiles with the smallest cost, at most `most` of them; of equal costs the
/// fewest shares.
fn cheapest_shares(
    group_size: usize,
    most: usize,
    num_tiles: usize,
    tiles: KeyTiles,
    cost: impl Fn(QueryShares) -> usize,
) -> QueryShares {
    // Heads are halved again and again, then each head's queries.
    let halves = (0..usize::BITS).map(|power| group_size.div_ceil(group_size.div_ceil(1 << power)));
    let mut counts: Vec<usize> = halves.take_while(|&count| count < group_size).collect();
    counts.extend([1, 2, 4, 8].map(|parts| group_size * parts));
    let ways = counts.into_iter().filter(|&count| count <= most);
    let ways = ways.take_while(|count| count * num_tiles <= MOST_WAVES * tiles.at_once);
    let ways: Vec<QueryShares> = ways.map(|count| QueryShares::of_count(count, group_size)).collect();
    // A single way is one share for each tile, which needs no slow simulation.
    match ways[..] {
        [] | [_] => QueryShares::ONE,
        _ => ways.into_iter().min_by_key(|&shares| cost(shares)).unwrap_or(QueryShares::ONE),
    }
}

/// Time of each thread block of a pass over consecutive keys, in steps, in the order in which blocks start: sections
/// of KV heads whose queries fit the L2 cache; in a section key tiles from the first on; for a key tile all its shares.
fn block_times_over_consecutive_keys(
    shape: &AttentionShape,
    window: usize,
    block_kv: usize,
    shares: QueryShares,
) -> impl Iterator<Item = usize> {
    let (seq_len, group_size) = (shape.seq_len, shape.group_size());
    let num_head_shares = shape.batch * shape.num_kv_heads * shares.heads;
    let share_bytes = query_bytes(shape, group_size.div_ceil(shares.heads));
    let num_sections = num_head_shares.div_ceil((SECTION_BYTES / share_bytes).max(1));
    let section_len = num_head_shares.div_ceil(num_sections);
    // Steps from a tile's first key to the last query that sees its last key.
    let steps_of_tile = move |tile: usize| {
        let end = seq_len.min((tile + 1) * block_kv - 1 + window).div_ceil(STEP);
        end - tile * block_kv / STEP
    };
    // Each thread block of a share of heads walks an even part of the tile's steps, once for each head.
    let block_times = move |tile: usize, head_share: usize| {
        let (steps, heads) = (steps_of_tile(tile), shares.heads_of_share(head_share % shares.heads, group_size));
        (0..shares.queries).map(move |at| BLOCK_STEPS + heads * even_part(steps, at, shares.queries))
    };
    let tiles = seq_len.div_ceil(block_kv);
    (0..num_head_shares).step_by(section_len).flat_map(move |first| {
        let section = first..num_head_shares.min(first + section_len);
        let blocks = (0..tiles).flat_map(move |tile| section.clone().map(move |head_share| (tile, head_share)));
        blocks.flat_map(move |(tile, head_share)| block_times(tile, head_share))
    })
}

/// Size of part `at` where `count` things are divided into `parts` parts that differ by one at most.
fn even_part(count: usize, at: usize, parts: usize) -> usize {
    count * (at + 1) / parts - count * at / parts
}

/// Bytes of a row's queries and output gradients of `heads` heads, in bf16.
fn query_bytes(shape: &AttentionShape, heads: usize) -> usize {
    shape.seq_len * heads * (shape.head_dim + shape.head_dim_v) * DType::BF16.size()
}

/// End time of the last thread block, if `at_once` blocks run at a time and each starts as soon as another ends.
fn makespan(at_once: usize, blocks: impl Iterator<Item = usize>) -> usize {
    let mut free = BinaryHeap::from(vec![Reverse(0); at_once.max(1)]);
    let mut last = 0;
    for block in blocks {
        if let Some(mut next) = free.peek_mut() {
            next.0 += block;
            last = last.max(next.0);
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: KeyTiles = KeyTiles { block_kv: 128, at_once: 132 };

    /// The shares of query heads and of queries in a pass over consecutive keys.
    fn neighbours(batch: usize, seq_len: usize, heads: [usize; 2], width: usize, window: usize) -> [usize; 2] {
        let shape = AttentionShape::new(batch, seq_len, heads, [width, width]);
        let QueryShares { heads, queries } = QueryShares::of_neighbours(&shape, window, H200);
        [heads, queries]
    }

    #[test]
    fn blocks_share_tiles_where_multiprocessors_would_have_no_work() {
        for (batch, seq_len, heads, width, window, expected) in [
            (1, 4096, [16, 8], 128, 4096, [1, 1]),
            (1, 32768, [16, 8], 128, 32768, [1, 1]),
            (8, 2048, [16, 8], 128, 2048, [1, 1]),
            (1, 4096, [32, 4], 128, 4096, [2, 1]),
            (1, 4096, [64, 8], 128, 4096, [2, 1]),
            (1, 8192, [64, 4], 128, 8192, [4, 1]),
            (1, 4096, [16, 1], 128, 4096, [8, 1]),
            (1, 8192, [9, 3], 64, 8192, [2, 1]),
            (1, 4096, [2, 2], 128, 4096, [1, 4]),
        ] {
            let got = neighbours(batch, seq_len, heads, width, window);
            assert_eq!(got, expected, "{batch} x {seq_len} {heads:?}");
        }
        assert_eq!(neighbours(1, 1, [2, 1], 64, 1), [1, 1], "a join costs more than one step");
    }

    #[test]
    fn blocks_of_long_rows_walk_no_more_heads_than_the_l2_cache_holds() {
        for (seq_len, heads, window, expected) in [
            (32768, [64, 4], 32768, [8, 1]),
            (32768, [16, 2], 32768, [4, 1]),
            (32768, [32, 8], 32768, [1, 1]),
            (65536, [64, 4], 65536, [8, 1]),
            (65536, [16, 8], 65536, [1, 1]),
            (32768, [16, 8], 32768, [1, 1]),
            (32768, [16, 16], 32768, [1, 1]),
            (32768, [64, 4], 1024, [1, 1]),
            (131072, [64, 1], 131072, [8, 1]),
        ] {
            assert_eq!(neighbours(1, seq_len, heads, 128, window), expected, "{seq_len} {heads:?} {window}");
        }
    }

    #[test]
    fn every_head_and_query_is_in_one_share() {
        for (group, count) in [(1, 1), (1, 4), (7, 1), (7, 4), (7, 14), (16, 5), (3, 2)] {
            let shares = QueryShares::of_count(count, group);
            let heads = (0..shares.heads).map(|at| shares.heads_of_share(at, group));
            assert_eq!(heads.clone().sum::<usize>(), group, "{group} {count}");
            assert!(shares.count() >= count && heads.min() > Some(0), "{shares:?}");
            assert!(shares.queries == 1 || shares.heads == group, "{shares:?}");
        }
    }

    #[test]
    fn lists_of_one_kv_head_are_shared() {
        let shape = |heads| AttentionShape::new(1, 8192, heads, [128, 128]);
        let of = |heads| QueryShares::of_lists(&shape(heads), 8, 2048, H200);
        assert_eq!(of([16, 8]), QueryShares::ONE);
        let shared = of([16, 1]);
        assert!(shared.heads > 1 && shared.queries == 1, "{shared:?}");
    }

    #[test]
    fn lists_of_tiles_are_shared_where_multiprocessors_would_have_no_work() {
        for (seq_len, heads, head_shares, count, [waiting, expected]) in [
            (32768, [16, 8], 1, None, [1, 1]),
            (8192, [32, 2], 1, None, [1, 2]),
            (8192, [32, 2], 4, None, [1, 1]),
            (8192, [16, 1], 1, None, [2, 3]),
            (300, [2, 1], 1, None, [8, 8]),
            (300, [2, 1], 2, Some(3), [3, 3]),
            (8192, [16, 8], 1, Some(3), [1, 3]),
        ] {
            let shape = AttentionShape::new(1, seq_len, heads, [128, 128]);
            let of = |wait| QueryShares::of_tile_lists(head_shares, count, &shape, H200, wait);
            let shares = of(false);
            assert_eq!(of(true).queries, waiting, "{seq_len} {heads:?}");
            assert_eq!((shares.heads, shares.queries), (head_shares, expected), "{seq_len} {heads:?}");
        }
    }

    #[test]
    fn each_block_starts_where_another_ends_first() {
        assert_eq!(makespan(2, [5, 4, 3, 2].into_iter()), 7);
        assert_eq!(makespan(132, std::iter::empty()), 0);
    }
}
