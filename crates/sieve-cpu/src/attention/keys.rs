//! Which keys a tile of queries reads.

use rayon::prelude::*;

use sieve_core::AttentionShape;

use super::panel::{Aligned, BLOCK_KEYS, LANES};
use super::shape::{Documents, Mask};

/// Approximate number of query rows (tokens times heads of the group) in a tile, so that its panels fit the L2 cache.
const TILE_ROWS: usize = 192;

/// Consecutive tiles of queries that share one stored list of candidate keys.
const TILES_PER_LIST: usize = 8;

/// A key that some query of a tile reads. A tile may read a key twice, at different distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadKey {
    /// Position of the key in the row.
    pub(super) position: u32,
    /// The first position that sees the key, and the first one after it that no longer does.
    pub(super) seen: [i32; 2],
}

/// A mask prepared for the tiles: when each key expires and, for [`Mask::Expire`], lists of the keys that may be
/// visible.
pub(crate) struct Keys<'a> {
    shape: AttentionShape,
    documents: Documents<'a>,
    mask: Mask<'a>,
    /// `[batch, seq_len]` for masks that are the same for all heads, else `[batch, num_kv_heads, seq_len]`.
    expire: Vec<i32>,
    /// The largest bias that each query sees, `[batch, num_kv_heads, seq_len]`; empty for masks without biases.
    bases: Vec<f32>,
    /// Keys that some query of [`TILES_PER_LIST`] tiles sees, ascending, for each batch row, KV head and such group of
    /// tiles; empty unless the mask is [`Mask::Expire`].
    lists: Vec<Vec<u32>>,
    tile_tokens: usize,
}

impl<'a> Keys<'a> {
    /// Prepares a mask: the expiry of every key and, for [`Mask::Expire`], the queries' bases and the candidate keys.
    pub(super) fn new(shape: AttentionShape, documents: Documents<'a>, mask: Mask<'a>) -> Self {
        let tile_tokens = (TILE_ROWS / shape.group_size()).max(1);
        let seq_len = shape.seq_len;
        let expire = match mask {
            Mask::Causal | Mask::Far(..) | Mask::Chosen(_) => documents.end.to_vec(),
            Mask::Window(window_size) => {
                let window_size = i32::try_from(window_size).unwrap_or(i32::MAX);
                let positions = (0..shape.batch).flat_map(|_| 0..seq_len as i32);
                let last = |(end, j): (&i32, i32)| (*end).min(j.saturating_add(window_size));
                documents.end.iter().zip(positions).map(last).collect()
            }
            // A caller's expiry may reach past the document: no query there may see the key.
            Mask::Expire { expire, .. } => expire
                .chunks_exact(seq_len.max(1))
                .enumerate()
                .flat_map(|(row_and_head, expire)| {
                    let row = row_and_head / shape.num_kv_heads;
                    let end = &documents.end[row * seq_len..(row + 1) * seq_len];
                    expire.iter().zip(end).map(|(&expire, &end)| expire.min(end))
                })
                .collect(),
        };
        let mut keys = Self { shape, documents, mask, expire, bases: Vec::new(), lists: Vec::new(), tile_tokens };
        if let Mask::Expire { delta, .. } = mask {
            keys.bases = keys
                .expire
                .par_chunks_exact(seq_len.max(1))
                .zip(delta.par_chunks_exact(seq_len.max(1)))
                .flat_map_iter(|(expire, delta)| largest_biases(expire, delta))
                .collect();
            keys.lists = (0..shape.batch * shape.num_kv_heads)
                .into_par_iter()
                .flat_map_iter(|row_and_head| keys.lists_of(row_and_head))
                .collect();
        }
        keys
    }

    /// Tokens of a tile; the last tile of a row may be shorter.
    pub(super) fn tile_tokens(&self) -> usize {
        self.tile_tokens
    }

    /// First position that no longer sees each key; with [`Mask::Far`] the end of its document.
    fn expire(&self, row: usize, kv_head: usize) -> &[i32] {
        let n = self.shape.seq_len;
        let at = if matches!(self.mask, Mask::Expire { .. }) { row * self.shape.num_kv_heads + kv_head } else { row };
        &self.expire[at * n..(at + 1) * n]
    }

    /// Biases of a KV head's keys; `None` if the mask has no biases.
    pub(super) fn delta(&self, row: usize, kv_head: usize) -> Option<&'a [f32]> {
        let n = self.shape.seq_len;
        let at = row * self.shape.num_kv_heads + kv_head;
        match self.mask {
            Mask::Expire { delta, .. } => Some(&delta[at * n..(at + 1) * n]),
            Mask::Causal | Mask::Window(_) | Mask::Far(..) | Mask::Chosen(_) => None,
        }
    }

    /// The largest bias that the query of each lane sees, 0 in lanes without a query. Subtracting it from all biases of
    /// the row leaves the softmax unchanged and keeps logits small, so that `q . k` loses no digits beside a large
    /// bias.
    pub(super) fn bases(&self, row: usize, kv_head: usize, positions: &[i32; LANES]) -> Aligned<[f32; LANES]> {
        let at = (row * self.shape.num_kv_heads + kv_head) * self.shape.seq_len;
        let base = |position: i32| match usize::try_from(position) {
            Ok(position) => self.bases.get(at + position).copied().unwrap_or(0.0),
            Err(_) => 0.0,
        };
        Aligned(positions.map(base))
    }

    /// Writes the keys that some query of `first..=last` sees. Each query's own keys come in ascending order.
    ///
    /// Panics when a query chose a block that begins after it.
    pub(super) fn of_tile(&self, row: usize, kv_head: usize, first: usize, last: usize, keys: &mut Vec<ReadKey>) {
        keys.clear();
        let expire = self.expire(row, kv_head);
        let from_its_own_query = |j: u32| ReadKey { position: j, seen: [j as i32, expire[j as usize]] };
        match self.mask {
            Mask::Expire { .. } => {
                let sees = |&&j: &&u32| j as usize <= last && expire[j as usize] > (j as i32).max(first as i32);
                let list = self.list(row, kv_head, first).iter().filter(sees);
                keys.extend(list.map(|&j| from_its_own_query(j)));
            }
            Mask::Chosen(chosen) => {
                let (n, heads) = (self.shape.seq_len, self.shape.num_kv_heads);
                let blocks = (first..=last).flat_map(|query| {
                    let blocks = chosen.of(row * n + query, heads, kv_head).iter();
                    blocks.filter(|block| **block >= 0).map(move |&block| {
                        let start = self.first_key(row, query) as usize + block as usize * chosen.block_size;
                        assert!(start <= query, "attention: block {block} comes after its query");
                        start
                    })
                });
                let mut blocks: Vec<usize> = blocks.collect();
                blocks.sort_unstable();
                blocks.dedup();
                for start in blocks {
                    let document_end = self.documents.end[row * n + start] as usize;
                    let end = (start + chosen.block_size).min(document_end).min(last + 1);
                    keys.extend((start as u32..end as u32).map(from_its_own_query));
                }
            }
            Mask::Causal | Mask::Window(_) => {
                keys.extend((self.first_key(row, first)..=last as u32).map(from_its_own_query));
            }
            Mask::Far(window_size, far) => {
                let ends = &self.documents.end[row * self.shape.seq_len..];
                let mut query = first;
                while query <= last {
                    let (start, end) = (self.first_key(row, query) as usize, ends[query] as usize);
                    let sinks = (start + far.sink_tokens).min(end);
                    keys.extend((start..sinks.min(last + 1)).map(|j| from_its_own_query(j as u32)));
                    // The band before the window: the keys of the one are farther away.
                    for distances in [far.band(kv_head), 0..window_size] {
                        let farthest = (query + 1).saturating_sub(distances.end).max(sinks);
                        let nearest = (last.min(end - 1) + 1).saturating_sub(distances.start);
                        keys.extend((farthest..nearest).map(|j| ReadKey {
                            position: j as u32,
                            seen: [j + distances.start, j.saturating_add(distances.end).min(end)].map(|at| at as i32),
                        }));
                    }
                    query = end;
                }
            }
        }
    }

    /// Splits a tile's keys into lists of at most [`BLOCK_KEYS`]; with [`Mask::Chosen`] each list stays inside one
    /// chosen block, because queries differ in the blocks that they read.
    pub(super) fn chunks<'l>(&self, row: usize, list: &'l [ReadKey]) -> impl Iterator<Item = &'l [ReadKey]> {
        let blocks = list.chunk_by(move |a, b| self.block_of(row, a.position) == self.block_of(row, b.position));
        blocks.flat_map(|block| block.chunks(BLOCK_KEYS))
    }

    /// With [`Mask::Chosen`]: the first token of a key's document and the number of the key's block there. `None` with
    /// the other masks.
    fn block_of(&self, row: usize, key: u32) -> Option<(i32, i32)> {
        let Mask::Chosen(chosen) = self.mask else {
            return None;
        };
        let start = self.documents.start[row * self.shape.seq_len + key as usize];
        Some((start, (key as i32 - start) / chosen.block_size as i32))
    }

    /// Positions of a panel's rows, with -1 for rows that did not choose the block of `key`; unchanged unless the mask
    /// is [`Mask::Chosen`].
    #[inline(always)]
    pub(super) fn readers(&self, row: usize, kv_head: usize, key: u32, positions: &[i32; LANES]) -> [i32; LANES] {
        let (Mask::Chosen(chosen), Some((start, block))) = (self.mask, self.block_of(row, key)) else {
            return *positions;
        };
        let reads = |position: usize| {
            let token = row * self.shape.seq_len + position;
            let blocks = chosen.of(token, self.shape.num_kv_heads, kv_head);
            self.documents.start[token] == start && blocks.contains(&block)
        };
        positions.map(|position| match usize::try_from(position) {
            Ok(at) if reads(at) => position,
            _ => -1,
        })
    }

    /// The first key that may be read by a query from `first` on; `last` is the last query of that query's tile.
    pub(super) fn first_of_segment(&self, row: usize, kv_head: usize, [first, last]: [usize; 2]) -> usize {
        if let Mask::Expire { .. } = self.mask {
            // A key that expired never returns, so later tiles read no key before the first one that this tile reads.
            let mut keys = Vec::new();
            self.of_tile(row, kv_head, first, last, &mut keys);
            return keys.first().map_or(first, |key| key.position as usize);
        }
        self.first_key(row, first) as usize
    }

    /// An estimate of the number of keys that [`of_tile`](Self::of_tile) writes.
    pub(super) fn estimate(&self, row: usize, kv_head: usize, first: usize, last: usize) -> usize {
        match self.mask {
            Mask::Expire { .. } => self.list(row, kv_head, first).len(),
            Mask::Causal | Mask::Window(_) | Mask::Chosen(_) => last + 1 - self.first_key(row, first) as usize,
            Mask::Far(window_size, far) => {
                let (earlier, band) = (last - self.first_key(row, first) as usize, far.band(kv_head));
                let of_band = (earlier + 1).min(band.end).saturating_sub(band.start);
                ((window_size + last - first).saturating_add(far.sink_tokens) + of_band).min(earlier + 1)
            }
        }
    }

    /// The first key that query `first` may see whatever it chose; later queries see none before it.
    fn first_key(&self, row: usize, first: usize) -> u32 {
        let start = self.documents.start[row * self.shape.seq_len + first] as usize;
        match self.mask {
            Mask::Window(window_size) => start.max((first + 1).saturating_sub(window_size)) as u32,
            Mask::Causal | Mask::Far(..) | Mask::Expire { .. } | Mask::Chosen(_) => start as u32,
        }
    }

    /// The stored list of candidate keys of the tile that begins at token `first`; only [`Mask::Expire`] has lists.
    fn list(&self, row: usize, kv_head: usize, first: usize) -> &[u32] {
        let list_tokens = self.tile_tokens * TILES_PER_LIST;
        let per_head = self.shape.seq_len.div_ceil(list_tokens);
        &self.lists[(row * self.shape.num_kv_heads + kv_head) * per_head + first / list_tokens]
    }

    /// All lists of one batch row and KV head: each holds the keys of the one before that have not expired, and the
    /// keys of its own tiles that some query sees.
    fn lists_of(&self, row_and_head: usize) -> Vec<Vec<u32>> {
        let (n, heads) = (self.shape.seq_len, self.shape.num_kv_heads);
        let expire = self.expire(row_and_head / heads, row_and_head % heads);
        let list_tokens = self.tile_tokens * TILES_PER_LIST;
        let mut lists: Vec<Vec<u32>> = Vec::with_capacity(n.div_ceil(list_tokens));
        for first in (0..n).step_by(list_tokens) {
            let alive = |&j: &u32| expire[j as usize] > first as i32;
            let mut list: Vec<u32> = lists.last().into_iter().flatten().copied().filter(alive).collect();
            let end = (first + list_tokens).min(n);
            list.extend((first as u32..end as u32).filter(|&j| expire[j as usize] > j as i32));
            lists.push(list);
        }
        lists
    }
}

/// The largest bias that each query sees, 0 where it sees nothing. Keys in descending order of bias set the base of
/// every query that sees them and has no base yet.
fn largest_biases(expire: &[i32], delta: &[f32]) -> Vec<f32> {
    let mut keys: Vec<usize> = (0..delta.len()).collect();
    keys.sort_by(|&a, &b| delta[b].total_cmp(&delta[a]));
    let mut bases = vec![0.0; delta.len()];
    // Union-find: following `next` from a query leads to the first query from there on that has no base.
    let mut next: Vec<usize> = (0..=delta.len()).collect();
    for key in keys {
        let mut query = key;
        while query < delta.len().min(expire[key].max(0) as usize) {
            if next[query] == query {
                bases[query] = delta[key];
                next[query] = query + 1;
            }
            next[query] = next[next[query]];
            query = next[query];
        }
    }
    bases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bases_are_the_largest_biases_that_queries_see() {
        let expire = [7, 1, 2, 5, 4, 7, 7];
        let delta = [-3.0, 9.0, -4.0, 1e26, 2.0, -8192.0, 1.0];
        let seen = |i: usize| {
            let keys = (0..=i).filter(|&j| expire[j] > i as i32);
            keys.map(|j| delta[j]).fold(f32::NEG_INFINITY, f32::max)
        };
        let expected: Vec<f32> = (0..7).map(seen).collect();
        assert_eq!(largest_biases(&expire, &delta), expected);
        assert_eq!(largest_biases(&[0, 2], &[5.0, -1.0]), [0.0, -1.0]);
    }
}
