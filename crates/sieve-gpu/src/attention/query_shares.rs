//! How many blocks of threads of a backward pass share a tile of keys.
//!
//! A block holds 128 keys and walks the queries of all query heads of their KV head. With few KV heads or short rows
//! there are too few blocks, or too long ones, to keep all multiprocessors busy; then several blocks share a key tile
//! and divide its query heads and, where these do not suffice, the queries of a head. How many is found by simulating
//! the launch: blocks start in the kernels' order (`block_order.cuh`) on whichever multiprocessor is free.
//! notes/experiments.md has measured times of the choices (Head shapes).
use crate::attention::{AttentionShape, BACKWARD_BLOCK_KV, padded_len};
use crate::dma::oracle::SUPER_BLOCK;
use crate::runtime::{DType, SourceKernel};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Blocks that share a key tile: the number of shares of the KV head's query heads, and of each head's queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueryShares {
    /// At most the query heads of a KV head, which it need not divide.
    pub(crate) heads: usize,
    /// More than one only where each block has one head.
    pub(crate) queries: usize,
}

/// The blocks of a backward pass that keeps keys in place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyTiles {
    /// Keys of a block.
    pub(crate) block_kv: usize,
    /// Blocks that run at a time.
    pub(crate) at_once: usize,
}

/// Queries of a step.
const STEP: usize = 64;

/// Steps' time that a block needs beside its steps: it starts, and stores dk and dv.
const BLOCK_STEPS: usize = 4;
/// The same of a block of listed keys, which adds to dk and dv in memory.
const LISTED_BLOCK_STEPS: usize = 8;

/// Cost of writing and reading a block's partial dk and dv once, and of the launches that sum them, both in 1/1024 of a
/// step of the whole GPU.
const PART_COST: usize = 46;
const JOIN_COST: usize = 4096;

/// Queries and output gradients of the heads in work at a time, in bytes: `SECTION_BYTES` of the Hopper kernel.
const SECTION_BYTES: usize = 32 << 20;

/// With more blocks than this for each that runs, a launch is even whatever its order: nothing is shared.
const MOST_BLOCKS: usize = 8;

impl QueryShares {
    /// Each tile has one block.
    pub(crate) const ONE: Self = Self { heads: 1, queries: 1 };

    /// Blocks of a tile.
    pub(crate) fn count(self) -> usize {
        self.heads * self.queries
    }

    /// The form of a kernel whose blocks share tiles, where they do.
    pub(crate) fn define(self, kernel: SourceKernel) -> SourceKernel {
        match self {
            Self::ONE => kernel,
            _ => sharing(kernel),
        }
    }

    /// So many blocks a tile, or a few more where they cannot be had; at least one.
    pub(crate) fn of_count(count: usize, group_size: usize) -> Self {
        let heads = count.clamp(1, group_size);
        Self {
            heads,
            queries: count.div_ceil(heads).max(1),
        }
    }

    /// The shares with which a pass over neighbouring keys ends first, where queries see `window` keys at most.
    pub(crate) fn of_neighbours(shape: &AttentionShape, window: usize, tiles: KeyTiles) -> Self {
        let num_tiles = shape.seq_len.div_ceil(tiles.block_kv) * shape.num_kv_heads * shape.batch;
        first_to_end(shape.group_size(), usize::MAX, num_tiles, tiles, |shares| {
            let end = makespan(tiles.at_once, neighbour_blocks(shape, window, tiles.block_kv, shares));
            let join = if shares == Self::ONE {
                0
            } else {
                JOIN_COST + PART_COST * num_tiles * shares.count()
            };
            1024 * end + join
        })
    }

    /// The same for key lists of at most `capacity` keys, one for each KV head and each of the launch's `super_blocks`;
    /// only query heads are divided. The extra adds to dk and dv count as part of each block's time.
    pub(crate) fn of_lists(shape: &AttentionShape, super_blocks: usize, capacity: usize, tiles: KeyTiles) -> Self {
        let (group, chunks) = (shape.group_size(), capacity.div_ceil(tiles.block_kv));
        let lists = super_blocks * shape.num_kv_heads * shape.batch;
        first_to_end(group, group, lists * chunks, tiles, |shares| {
            // Keys enter and leave one by one: a list's middle is seen by most of its queries.
            let seen = |chunk: usize| {
                SUPER_BLOCK
                    .min(tiles.block_kv * (chunk + 1).min(chunks - chunk))
                    .div_ceil(STEP)
            };
            let share = |at: usize| shares.share_of_heads(at % shares.heads, group);
            let lists = (0..lists * shares.heads).flat_map(|at| (0..chunks).map(move |chunk| (at, chunk)));
            makespan(
                tiles.at_once,
                lists.map(|(at, chunk)| LISTED_BLOCK_STEPS + share(at) * seen(chunk)),
            )
        })
    }

    /// Query heads of one share.
    fn share_of_heads(self, at: usize, group_size: usize) -> usize {
        (at + 1) * group_size / self.heads - at * group_size / self.heads
    }
}

impl AttentionShape {
    /// Bytes of the partial dk and dv of blocks that share key tiles, in a backward pass with `window` neighbouring
    /// keys a query on a Hopper GPU.
    pub fn key_part_bytes(&self, window: usize, num_multiprocessors: usize) -> usize {
        let tiles = KeyTiles {
            block_kv: BACKWARD_BLOCK_KV,
            at_once: num_multiprocessors,
        };
        match QueryShares::of_neighbours(self, window.min(self.seq_len), tiles) {
            QueryShares::ONE => 0,
            shares => {
                let rows = self.batch * self.num_kv_heads * shares.count() * padded_len(self.seq_len);
                rows * (self.head_dim + self.head_dim_v) * DType::F32.size()
            }
        }
    }
}

/// The form of a backward kernel whose blocks share tiles of keys.
pub(crate) fn sharing(kernel: SourceKernel) -> SourceKernel {
    kernel.define("SHARES", 1)
}

/// Of the ways to share, none first, the one with the smallest cost; at most `most` shares.
fn first_to_end(
    group_size: usize,
    most: usize,
    num_tiles: usize,
    tiles: KeyTiles,
    cost: impl Fn(QueryShares) -> usize,
) -> QueryShares {
    let halves = (0..usize::BITS).map(|power| group_size.div_ceil(group_size.div_ceil(1 << power)));
    let mut counts: Vec<usize> = halves.take_while(|&count| count < group_size).collect();
    counts.extend([1, 2, 4, 8].map(|parts| group_size * parts));
    let ways = counts.into_iter().filter(|&count| count <= most);
    let ways = ways.take_while(|count| count * num_tiles <= MOST_BLOCKS * tiles.at_once);
    let ways: Vec<QueryShares> = ways.map(|count| QueryShares::of_count(count, group_size)).collect();
    match ways[..] {
        [] | [_] => QueryShares::ONE,
        _ => ways
            .into_iter()
            .min_by_key(|&shares| cost(shares))
            .unwrap_or(QueryShares::ONE),
    }
}

/// Steps' time of the blocks of a pass over neighbouring keys, in the order in which they start.
fn neighbour_blocks(
    shape: &AttentionShape,
    window: usize,
    block_kv: usize,
    shares: QueryShares,
) -> impl Iterator<Item = usize> {
    let (seq_len, group_size) = (shape.seq_len, shape.group_size());
    let units = shape.batch * shape.num_kv_heads * shares.heads;
    let unit_bytes = seq_len * group_size.div_ceil(shares.heads) * (shape.head_dim + shape.head_dim_v) * 2;
    let sections = units.div_ceil((SECTION_BYTES / unit_bytes).max(1));
    let of_section = units.div_ceil(sections);
    let tiles = seq_len.div_ceil(block_kv);
    (0..units).step_by(of_section).flat_map(move |first| {
        (0..tiles).flat_map(move |tile| {
            let end = seq_len.min((tile + 1) * block_kv - 1 + window).div_ceil(STEP);
            let seen = end - tile * block_kv / STEP;
            (first..units.min(first + of_section)).flat_map(move |unit| {
                let heads = shares.share_of_heads(unit % shares.heads, group_size);
                let part = move |at: usize| seen * (at + 1) / shares.queries - seen * at / shares.queries;
                (0..shares.queries).map(move |at| BLOCK_STEPS + heads * part(at))
            })
        })
    })
}

/// When the last of these blocks ends if `at_once` run at a time.
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

    const H200: KeyTiles = KeyTiles {
        block_kv: 128,
        at_once: 132,
    };

    fn neighbours(batch: usize, seq_len: usize, heads: [usize; 2], width: usize, window: usize) -> [usize; 2] {
        let shape = AttentionShape::new(batch, seq_len, heads, [width, width]);
        let QueryShares { heads, queries } = QueryShares::of_neighbours(&shape, window, H200);
        [heads, queries]
    }

    #[test]
    fn blocks_share_tiles_where_multiprocessors_would_have_no_work() {
        for (batch, seq_len, heads, width, window, expected) in [
            // As many as are needed, and no more.
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
        assert_eq!(
            neighbours(1, 1, [2, 1], 64, 1),
            [1, 1],
            "a join costs more than one step"
        );
    }

    #[test]
    fn every_head_and_query_is_in_one_share() {
        for (group, count) in [(1, 1), (1, 4), (7, 1), (7, 4), (7, 14), (16, 5), (3, 2)] {
            let shares = QueryShares::of_count(count, group);
            let heads = (0..shares.heads).map(|at| shares.share_of_heads(at, group));
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
    fn the_longest_block_bounds_the_end() {
        assert_eq!(makespan(2, [5, 4, 3, 2].into_iter()), 7);
        assert_eq!(makespan(132, std::iter::empty()), 0);
    }
}
