//! The forward pass: tiles of queries, blocks of gathered keys, online softmax (`softmax.rs`).
//!
//! Scores are stored transposed, `[keys, query rows]`, so that running maxima and sums of rows are whole vectors.
//!
//! A query's sums are added key by key in the order of the keys, and hidden keys add 0. So its output is the same to
//! the bit in every tile and block, and in [`attention_decode`](super::decode::attention_decode).

use pulp::Simd;
use rayon::prelude::*;

use super::keys::{Keys, ReadKey};
use super::panel::{Aligned, BLOCK_KEYS, LANES, SIDE, multiply, multiply_transposed, scale_rows};
use super::scratch::Pool;
use super::shape::{Documents, Mask, ScaledShape};
use super::softmax::{NO_POWER, Powers, log_sum_exp, probability, rescaling, within_range};
use super::tile::{KeyBlock, Pairs, RowPanels, Tile, row_positions};
use crate::simd::on_arch;

/// The queries of a tile in panels of W columns, the block of keys that is read next, the running softmax and output.
pub(crate) struct TileState<const W: usize> {
    q: RowPanels<W>,
    /// Positions of each panel's rows, -1 for unused rows.
    positions: Vec<[i32; LANES]>,
    softmax: Vec<Softmax>,
    pub(crate) block: KeyBlock<W>,
    scores: Aligned<[[f32; LANES]; BLOCK_KEYS]>,
    /// Number of column panels of the output.
    columns_v: usize,
    /// Output without the softmax denominator, `[row panels, column panels, LANES, W]`.
    o: Vec<Aligned<[[f32; W]; LANES]>>,
}

impl<const W: usize> TileState<W> {
    /// An empty tile for heads of this width; [`load`](Self::load) gives it its rows.
    pub(crate) fn new(head_dim: usize) -> Self {
        Self {
            q: RowPanels::new(),
            positions: Vec::new(),
            softmax: Vec::new(),
            block: KeyBlock::new(head_dim),
            scores: Aligned([[0.0; LANES]; BLOCK_KEYS]),
            columns_v: 0,
            o: Vec::new(),
        }
    }

    /// Starts a tile of these query rows; row r is at `position(r)`, and keys and values are `[d, d_v]` wide.
    #[inline(always)]
    pub(crate) fn load<'r>(
        &mut self,
        rows: impl ExactSizeIterator<Item = &'r [f32]>,
        position: impl Fn(usize) -> i32,
        [d, d_v]: [usize; 2],
        softmax_scale: f32,
    ) {
        row_positions(rows.len(), position, &mut self.positions);
        self.q.load(rows, d, softmax_scale);
        self.q.transpose();
        self.softmax.clear();
        let before_the_first_key = Softmax { power: Aligned([NO_POWER; LANES]), sum: Aligned([0.0; LANES]) };
        self.softmax.resize(self.positions.len(), before_the_first_key);
        self.columns_v = d_v.div_ceil(W);
        self.o.clear();
        self.o.resize(self.positions.len() * self.columns_v, Aligned([[0.0; W]; LANES]));
    }

    /// Accumulates the attention of all rows over the block of keys. From a panel's positions, `readers` gives the same
    /// with -1 for rows that see no key of the block, and `bases` what is subtracted from the keys' biases (`None`:
    /// there are no biases). A key has `columns` column panels.
    #[inline(always)]
    pub(crate) fn add_block<S: Simd>(
        &mut self,
        simd: S,
        columns: usize,
        readers: impl Fn(&[i32; LANES]) -> [i32; LANES],
        bases: Option<impl Fn(&[i32; LANES]) -> Aligned<[f32; LANES]>>,
    ) {
        let (block, columns_v) = (&self.block, self.columns_v);
        for (index, (positions, softmax)) in self.positions.iter().zip(&mut self.softmax).enumerate() {
            let positions = readers(positions);
            let Some(seen) = block.seen_by(&positions) else {
                // No row of this panel sees a key of the block.
                continue;
            };
            let slots = || seen.slots.clone();
            let scores = &mut self.scores[slots()];
            for c in 0..columns {
                // The first column panel overwrites the scores, the later ones add to them.
                let (q, accumulate) = (&self.q.transposed[index * columns + c], c > 0);
                multiply(simd, &block.k[c][slots()], q, scores, accumulate);
            }
            let base = bases.as_ref().map_or(Aligned([0.0; LANES]), |bases| bases(&positions));
            let pairs = block.pairs(&positions, &seen, &base, bases.is_some());
            let o = &mut self.o[index * columns_v..(index + 1) * columns_v];
            let mut rescale = Aligned([1.0; LANES]);
            if online_softmax(simd, &pairs, scores, softmax, &mut rescale) {
                for o in o.iter_mut() {
                    scale_rows(simd, o, &rescale);
                }
            }
            for (o, v) in o.iter_mut().zip(&block.v) {
                multiply_transposed(simd, scores, &v[slots()], o);
            }
        }
    }

    /// Writes the normalised output of a row and returns the log-sum-exp of its logits, -inf when it saw no key. In the
    /// logits, the biases are relative to the row's base.
    #[inline(always)]
    pub(crate) fn finish(&self, row: usize, o: &mut [f32]) -> f32 {
        let (panel, lane) = (row / LANES, row % LANES);
        let (power, sum) = (self.softmax[panel].power[lane], self.softmax[panel].sum[lane]);
        let factor = if sum == 0.0 { 0.0 } else { 1.0 / sum };
        for (c, o) in o.chunks_mut(W).enumerate() {
            for (o, &x) in o.iter_mut().zip(&self.o[panel * self.columns_v + c][lane]) {
                *o = x * factor;
            }
        }
        log_sum_exp(power, sum)
    }
}

/// Running power and sum of the online softmax of one panel's rows; `softmax.rs` says what the power is.
#[derive(Clone)]
struct Softmax {
    power: Aligned<[f32; LANES]>,
    sum: Aligned<[f32; LANES]>,
}

/// One tile of tokens with all heads, and where its results are written.
struct Task<'t> {
    /// Index of the sequence in the batch.
    row: usize,
    /// First token of the task's tile.
    first: usize,
    /// Output of the tile, `[tokens, num_heads, head_dim_v]`.
    o: &'t mut [f32],
    /// Log-sum-exp of the tile, `[tokens]` for each head.
    lse: Vec<&'t mut [f32]>,
}

/// Runs [`attention_from`](super::attention_from) with panels of W columns, one task for each tile of tokens. A tile of
/// tokens before `first` is left out.
pub(crate) fn run<const W: usize>(
    first: usize,
    shape: ScaledShape,
    qkv: &[f32],
    documents: Documents<'_>,
    mask: Mask<'_>,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let keys = Keys::new(*shape, documents, mask);
    let o_len = shape.num_heads * shape.head_dim_v;
    let mut tasks = Vec::new();
    let rows = o.chunks_exact_mut(shape.seq_len * o_len).zip(lse.chunks_exact_mut(shape.num_heads * shape.seq_len));
    for (row, (o, lse)) in rows.enumerate() {
        let mut lse: Vec<_> =
            lse.chunks_exact_mut(shape.seq_len).map(|head| head.chunks_mut(keys.tile_tokens())).collect();
        for (tile, o) in o.chunks_mut(keys.tile_tokens() * o_len).enumerate() {
            let lse = lse.iter_mut().filter_map(Iterator::next).collect();
            if (tile + 1) * keys.tile_tokens() > first {
                tasks.push(Task { row, first: tile * keys.tile_tokens(), o, lse });
            }
        }
    }
    let pool = Pool::new(|head_dim| (TileState::<W>::new(head_dim), Vec::new()), shape.head_dim);
    tasks.into_par_iter().with_max_len(1).for_each(|task| {
        pool.lend(|(state, list)| forward_tile(shape, qkv, &keys, task, state, list));
    });
}

on_arch! {
    fn forward_tile<'t, 's; const W>(
        shape: ScaledShape, qkv: &'s [f32], keys: &'s Keys<'s>, task: Task<'t>, state: &'s mut TileState<W>,
        list: &'s mut Vec<ReadKey>,
    ) -> () = forward_tile_simd;
}

/// Computes a task: o and lse of all its heads. `state` and `list`, the keys of a tile, are working memory.
#[inline(always)]
fn forward_tile_simd<S: Simd, const W: usize>(
    simd: S,
    shape: ScaledShape,
    qkv: &[f32],
    keys: &Keys<'_>,
    task: Task<'_>,
    state: &mut TileState<W>,
    list: &mut Vec<ReadKey>,
) {
    let Task { row, first, o, mut lse } = task;
    let end = first + o.len() / (shape.num_heads * shape.head_dim_v);
    let row_len = shape.seq_len * shape.token_len();
    let qkv_row = &qkv[row * row_len..(row + 1) * row_len];
    for kv_head in 0..shape.num_kv_heads {
        let tile = Tile { row, kv_head, first, end };
        attend(simd, shape, qkv_row, keys, tile, state, list);
        for query_row in 0..tile.num_rows(*shape) {
            let (token, head) = tile.token_and_head(*shape, query_row);
            let at = ((token - first) * shape.num_heads + head) * shape.head_dim_v;
            lse[head][token - first] = state.finish(query_row, &mut o[at..at + shape.head_dim_v]);
        }
    }
}

/// Accumulates the attention of one tile in `state`.
#[inline(always)]
fn attend<S: Simd, const W: usize>(
    simd: S,
    shape: ScaledShape,
    qkv_row: &[f32],
    keys: &Keys<'_>,
    tile: Tile,
    state: &mut TileState<W>,
    list: &mut Vec<ReadKey>,
) {
    let d = shape.head_dim;
    let queries = (0..tile.num_rows(*shape)).map(|query_row| {
        let (token, head) = tile.token_and_head(*shape, query_row);
        &qkv_row[token * shape.token_len() + head * d..][..d]
    });
    let position = |query_row: usize| tile.token_and_head(*shape, query_row).0 as i32;
    state.load(queries, position, [d, shape.head_dim_v], shape.softmax_scale);
    keys.of_tile(tile.row, tile.kv_head, tile.first, tile.end - 1, list);
    let has_bias = keys.delta(tile.row, tile.kv_head).is_some();
    for block_keys in keys.chunks(tile.row, list) {
        state.block.gather(qkv_row, *shape, keys, tile, block_keys);
        let readers =
            |positions: &[i32; LANES]| keys.readers(tile.row, tile.kv_head, block_keys[0].position, positions);
        let bases = |positions: &[i32; LANES]| keys.bases(tile.row, tile.kv_head, positions);
        state.add_block(simd, d.div_ceil(W), readers, has_bias.then_some(bases));
    }
}

/// Turns the scores of a block of keys (a row of `scores` for each key, a column for each query) into unnormalised
/// probabilities, and updates each query's running power and sum in `state`. First it adds the keys' biases, less
/// what [`Pairs::base`] subtracts, and hides the pairs that the mask hides. Fills `rescale` with the factor on each
/// query's earlier output; returns whether any factor is not 1.
#[inline(always)]
fn online_softmax<S: Simd>(
    simd: S,
    pairs: &Pairs<'_>,
    scores: &mut [[f32; LANES]],
    state: &mut Softmax,
    rescale: &mut [f32; LANES],
) -> bool {
    let positions = S::as_simd_i32s(pairs.positions).0;
    let base = S::as_simd_f32s(pairs.base).0;
    let old_power = S::as_mut_simd_f32s(&mut *state.power).0;
    let sum = S::as_mut_simd_f32s(&mut *state.sum).0;
    let rescale = S::as_mut_simd_f32s(rescale).0;
    let low = simd.splat_f32s(f32::NEG_INFINITY);
    let mut changed = false;
    for col in (0..LANES / S::F32_LANES).step_by(SIDE) {
        let mut max = [low; SIDE];
        if pairs.masked {
            for (s, row) in scores.iter_mut().enumerate() {
                let row = S::as_mut_simd_f32s(row).0;
                let delta = simd.splat_f32s(pairs.delta.map_or(0.0, |delta| delta[s]));
                for v in 0..SIDE {
                    let seen = pairs.visible(simd, s, positions[col + v]);
                    let bias = simd.sub_f32s(delta, base[col + v]);
                    let x = simd.select_f32s(seen, simd.add_f32s(row[col + v], bias), low);
                    row[col + v] = x;
                    max[v] = simd.max_f32s(max[v], x);
                }
            }
        } else if let Some(delta) = pairs.delta {
            for (row, &delta) in scores.iter_mut().zip(delta) {
                let row = S::as_mut_simd_f32s(row).0;
                let delta = simd.splat_f32s(delta);
                for v in 0..SIDE {
                    let bias = simd.sub_f32s(delta, base[col + v]);
                    row[col + v] = simd.add_f32s(row[col + v], bias);
                    max[v] = simd.max_f32s(max[v], row[col + v]);
                }
            }
        } else {
            for row in scores.iter() {
                let row = S::as_simd_f32s(row).0;
                for v in 0..SIDE {
                    max[v] = simd.max_f32s(max[v], row[col + v]);
                }
            }
        }
        let mut powers = [Powers::of(simd, low); SIDE];
        let mut total = [simd.splat_f32s(0.0); SIDE];
        for v in 0..SIDE {
            let (largest, is_too_large) = within_range(simd, max[v]);
            if is_too_large {
                for row in scores.iter_mut() {
                    let row = S::as_mut_simd_f32s(row).0;
                    row[col + v] = within_range(simd, row[col + v]).0;
                }
            }
            let powers_of_block = Powers::of(simd, largest);
            powers[v] = powers_of_block.or_larger(simd, old_power[col + v]);
            let (factor, same) = rescaling(simd, old_power[col + v], powers[v]);
            changed |= !same;
            rescale[col + v] = factor;
            total[v] = simd.mul_f32s(sum[col + v], factor);
            old_power[col + v] = powers[v].power;
        }
        for row in scores.iter_mut() {
            let row = S::as_mut_simd_f32s(row).0;
            for v in 0..SIDE {
                let p = probability(simd, row[col + v], powers[v]);
                row[col + v] = p;
                total[v] = simd.add_f32s(total[v], p);
            }
        }
        sum[col..col + SIDE].copy_from_slice(&total);
    }
    changed
}
