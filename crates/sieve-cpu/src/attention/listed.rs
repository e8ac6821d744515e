//! Attention of one tile of query rows over any list of keys, which block-sparse attention is built from. Queries and
//! keys come with their positions, so both may be in any order.

use pulp::Simd;

use super::forward::TileState;
use super::panel::{Aligned, BLOCK_KEYS, LANES};
use super::scratch::Pool;
use super::tile::{KeyBlock, copy_columns, panel_width};
use crate::simd::on_arch;

/// Query rows and the keys they read. A key is visible where `key_position <= query_position < key_expire`.
///
/// Every listed key must be visible to some row: a hidden key costs time, and a NaN in its value would spread.
#[derive(Clone, Copy, Debug)]
pub struct ListedTile<'a> {
    /// Slice that holds the query vectors.
    pub q: &'a [f32],
    /// Index in `q` where each row's vector starts, `[rows]`.
    pub query_at: &'a [usize],
    /// Position of each row, not negative, `[rows]`.
    pub query_position: &'a [i32],
    /// Slice that holds the key vectors.
    pub k: &'a [f32],
    /// Slice that holds the value vectors, laid out as `k`.
    pub v: &'a [f32],
    /// Index in `k` and `v` where each key's vector starts, `[keys]`.
    pub key_at: &'a [usize],
    /// Position of each key; `i32::MIN` for one that all rows see, `[keys]`.
    pub key_position: &'a [i32],
    /// First position that no longer sees the key, `i32::MAX` for never, `[keys]`.
    pub key_expire: &'a [i32],
}

/// Attention of [`ListedTile`]s: the head's sizes, and buffers that all threads share.
pub struct ListedAttention {
    head_dim: usize,
    softmax_scale: f32,
    pools: Pools,
}

/// Buffers by the columns of a panel, which depend on the head's width.
enum Pools {
    Of16(Pool<TileState<16>>),
    Of32(Pool<TileState<32>>),
    Of64(Pool<TileState<64>>),
}

impl ListedAttention {
    /// Attention with heads of width `head_dim`; `softmax_scale` is the factor on `q . k`.
    pub fn new(head_dim: usize, softmax_scale: f32) -> Self {
        let pools = match panel_width(head_dim) {
            16 => Pools::Of16(Pool::new(TileState::new, head_dim)),
            32 => Pools::Of32(Pool::new(TileState::new, head_dim)),
            _ => Pools::Of64(Pool::new(TileState::new, head_dim)),
        };
        Self { head_dim, softmax_scale, pools }
    }

    /// Attention of one tile on the calling thread. A row that sees nothing has `o = 0` and `lse = -inf`.
    ///
    /// # Shapes
    /// - o: `[rows, head_dim]`, lse: `[rows]` (natural logarithm); written whole
    ///
    /// # Panics
    /// When lengths do not fit or a vector leaves its slice.
    pub fn run(&self, tile: ListedTile<'_>, o: &mut [f32], lse: &mut [f32]) {
        let (rows, keys) = (tile.query_at.len(), tile.key_at.len());
        let lengths = [tile.query_position.len(), lse.len(), tile.key_position.len(), tile.key_expire.len()];
        assert_eq!(lengths, [rows, rows, keys, keys], "listed_attention: lengths differ");
        let o_len = rows * self.head_dim;
        assert_eq!(o.len(), o_len, "listed_attention: o is not [rows, head_dim]");
        match &self.pools {
            Pools::Of16(pool) => self.dispatch(pool, tile, o, lse),
            Pools::Of32(pool) => self.dispatch(pool, tile, o, lse),
            Pools::Of64(pool) => self.dispatch(pool, tile, o, lse),
        }
    }

    /// Computes the tile with a buffer of the pool.
    fn dispatch<const W: usize>(
        &self,
        pool: &Pool<TileState<W>>,
        tile: ListedTile<'_>,
        o: &mut [f32],
        lse: &mut [f32],
    ) {
        pool.lend(|state| attend_tile(self.head_dim, self.softmax_scale, tile, state, o, lse));
    }
}

impl std::fmt::Debug for ListedAttention {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("ListedAttention")
            .field("head_dim", &self.head_dim)
            .field("softmax_scale", &self.softmax_scale)
            .finish_non_exhaustive()
    }
}

on_arch! {
    fn attend_tile<'a, 's; const W>(
        head_dim: usize, softmax_scale: f32, tile: ListedTile<'a>, state: &'s mut TileState<W>,
        o: &'a mut [f32], lse: &'a mut [f32],
    ) -> () = attend_tile_simd;
}

/// Computes [`ListedAttention::run`] for the rows of `tile`, block of keys by block of keys; `state` is working memory.
#[inline(always)]
fn attend_tile_simd<S: Simd, const W: usize>(
    simd: S,
    head_dim: usize,
    softmax_scale: f32,
    tile: ListedTile<'_>,
    state: &mut TileState<W>,
    output: &mut [f32],
    lse: &mut [f32],
) {
    let query_rows = tile.query_at.iter().map(|&at| &tile.q[at..at + head_dim]);
    let position = |row: usize| tile.query_position[row];
    state.load(query_rows, position, [head_dim, head_dim], softmax_scale);
    let (column_panels, num_keys) = (head_dim.div_ceil(W), tile.key_at.len());
    for first_key in (0..num_keys).step_by(BLOCK_KEYS) {
        let block_keys = first_key..(first_key + BLOCK_KEYS).min(num_keys);
        state.block.gather_listed(&tile, block_keys, head_dim);
        // Every row reads the block, and keys have no biases.
        let readers = |positions: &[i32; LANES]| *positions;
        let bases = None::<fn(&[i32; LANES]) -> Aligned<[f32; LANES]>>;
        state.add_block(simd, column_panels, readers, bases);
    }
    for (row, (output, lse)) in output.chunks_exact_mut(head_dim).zip(lse).enumerate() {
        *lse = state.finish(row, output);
    }
}

impl<const W: usize> KeyBlock<W> {
    /// Gathers the listed keys `range`, at most [`BLOCK_KEYS`].
    #[inline(always)]
    fn gather_listed(&mut self, tile: &ListedTile<'_>, range: std::ops::Range<usize>, head_dim: usize) {
        let used = range.len();
        for (slot, key) in range.enumerate() {
            let at = tile.key_at[key];
            copy_columns(&tile.k[at..at + head_dim], slot, &mut self.k);
            copy_columns(&tile.v[at..at + head_dim], slot, &mut self.v);
            self.begin[slot] = tile.key_position[key];
            self.expire[slot] = tile.key_expire[key];
        }
        self.finish_gather(used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{Key, Rounding, attend};
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative, assert_lse_close};

    /// Softmax over the visible keys in f64.
    fn expected(tile: &ListedTile<'_>, d: usize, scale: f32) -> (Vec<f64>, Vec<f64>) {
        let (mut o, mut lse) = (vec![0.0; tile.query_at.len() * d], Vec::new());
        for ((&at, &position), o) in tile.query_at.iter().zip(tile.query_position).zip(o.chunks_mut(d)) {
            let seen = |&s: &usize| tile.key_position[s] <= position && position < tile.key_expire[s];
            let of = |s: usize| {
                let at = tile.key_at[s]..tile.key_at[s] + d;
                let (k, v) = (&tile.k[at.clone()], &tile.v[at]);
                Key { k, v, bias: 0.0 }
            };
            let keys: Vec<_> = (0..tile.key_at.len()).filter(seen).map(of).collect();
            lse.push(attend(&tile.q[at..at + d], &keys, f64::from(scale), Rounding::None, o).lse);
        }
        (o, lse)
    }

    #[test]
    fn any_list_in_any_order_equals_the_definition() {
        on_every_arch(|| {
            let mut random = Random(7);
            for (d, rows, keys, tokens) in
                [(16, 1, 1, 5), (40, 63, 97, 130), (64, 65, 8, 200), (96, 130, 205, 300), (128, 64, 96, 96)]
            {
                let (q, k) = (random.vector(rows * d), random.vector(tokens * d));
                let v = random.vector(tokens * d);
                let query_at: Vec<usize> = (0..rows).rev().map(|r| r * d).collect();
                let query_position: Vec<i32> = (0..rows).map(|_| random.below(tokens) as i32).collect();
                let mut order: Vec<usize> = (0..tokens).collect();
                for i in (1..tokens).rev() {
                    order.swap(i, random.below(i + 1));
                }
                order.truncate(keys);
                let key_at: Vec<usize> = order.iter().map(|j| j * d).collect();
                let key_position: Vec<i32> = order.iter().map(|&j| j as i32).collect();
                let key_expire: Vec<i32> =
                    order.iter().map(|&j| if j % 3 == 0 { (j + 1 + j % 50) as i32 } else { i32::MAX }).collect();
                let tile = ListedTile {
                    q: &q,
                    query_at: &query_at,
                    query_position: &query_position,
                    k: &k,
                    v: &v,
                    key_at: &key_at,
                    key_position: &key_position,
                    key_expire: &key_expire,
                };
                let (mut o, mut lse) = (vec![f32::NAN; rows * d], vec![f32::NAN; rows]);
                let attention = ListedAttention::new(d, 0.2);
                for _ in 0..2 {
                    attention.run(tile, &mut o, &mut lse);
                    let (o64, lse64) = expected(&tile, d, 0.2);
                    assert_close_relative("o", &o, &o64, 2e-6);
                    assert_lse_close("lse", &lse, &lse64, 2e-6);
                }
            }
        });
    }
}
