//! The forward pass: tiles of queries, blocks of gathered keys, online softmax.
//!
//! Scores are kept transposed, keys by query rows, so that running maxima and sums are whole vectors.

use pulp::Simd;
use rayon::prelude::*;

use super::keys::Keys;
use super::panel::{Aligned, LANES, multiply, multiply_transposed, scale_rows};
use super::scratch::Pool;
use super::tile::{BLOCK_KEYS, KeyBlock, RowPanels, Tile};
use super::{Documents, Mask, Packed};
use crate::simd::{exp_below, on_arch};

/// Vectors handled side by side, so that their chains of dependent operations overlap.
const SIDE: usize = 4;

/// What one thread needs for one tile.
struct Scratch<const W: usize> {
    rows: Rows<W>,
    list: Vec<u32>,
}

/// Queries of a tile in panels, the block of keys that they meet next, and what they have summed up.
pub(crate) struct Rows<const W: usize> {
    q: RowPanels<W>,
    panels: Vec<Panel>,
    pub(crate) block: KeyBlock<W>,
    scores: Aligned<[[f32; LANES]; BLOCK_KEYS]>,
    /// Panels of the output's width.
    columns_v: usize,
    /// `[num_panels, head_dim panels, LANES, W]`.
    o: Vec<Aligned<[[f32; W]; LANES]>>,
}

/// Positions of a panel's rows, -1 for unused rows, and the running state of their softmax.
struct Panel {
    positions: [i32; LANES],
    softmax: Softmax,
}

impl<const W: usize> Rows<W> {
    pub(crate) fn new(head_dim: usize) -> Self {
        Self {
            q: RowPanels::new(),
            panels: Vec::new(),
            block: KeyBlock::new(head_dim),
            scores: Aligned([[0.0; LANES]; BLOCK_KEYS]),
            columns_v: 0,
            o: Vec::new(),
        }
    }

    /// Begins with these queries, whose keys and values are `[d, d_v]` wide.
    #[inline(always)]
    pub(crate) fn load<'r>(
        &mut self,
        rows: impl ExactSizeIterator<Item = &'r [f32]>,
        position: impl Fn(usize) -> i32,
        [d, d_v]: [usize; 2],
        softmax_scale: f32,
    ) {
        let num_rows = rows.len();
        self.q.load(rows, d, softmax_scale);
        self.q.transpose();
        self.panels.clear();
        self.panels.extend((0..num_rows).step_by(LANES).map(|start| {
            let used = (num_rows - start).min(LANES);
            let mut positions = [-1; LANES];
            (0..used).for_each(|lane| positions[lane] = position(start + lane));
            Panel {
                positions,
                softmax: Softmax::new(),
            }
        }));
        self.columns_v = d_v.div_ceil(W);
        self.o.clear();
        self.o
            .resize(self.panels.len() * self.columns_v, Aligned([[0.0; W]; LANES]));
    }

    /// Accumulates attention of the panel's rows over one block of keys: `readers` holds the rows' positions, -1 for
    /// rows that see no key of the block. `bases` are subtracted from the keys' biases, if any.
    #[inline(always)]
    pub(crate) fn add_block<S: Simd>(
        &mut self,
        simd: S,
        columns: usize,
        readers: impl Fn(&[i32; LANES]) -> [i32; LANES],
        bases: Option<impl Fn(&[i32; LANES]) -> Aligned<[f32; LANES]>>,
    ) {
        let (block, scores, columns_v) = (&self.block, &mut self.scores, self.columns_v);
        for (index, panel) in self.panels.iter_mut().enumerate() {
            let positions = readers(&panel.positions);
            let Some(meeting) = block.meeting(&positions) else {
                continue;
            };
            let range = meeting.keys.clone();
            for c in 0..columns {
                let (k, q) = (&block.k[c][range.clone()], &self.q.transposed[index * columns + c]);
                multiply(simd, k, q, &mut scores[range.clone()], c > 0);
            }
            let base = bases.as_ref().map_or(Aligned([0.0; LANES]), |bases| bases(&positions));
            let shown = Shown {
                positions: &positions,
                key: &block.position[range.clone()],
                expire: &block.expire[range.clone()],
                delta: bases.as_ref().map(|_| &block.delta[range.clone()]),
                base: &base,
                masked: meeting.masked,
            };
            let o = &mut self.o[index * columns_v..(index + 1) * columns_v];
            let mut rescale = Aligned([1.0; LANES]);
            let softmax = &mut panel.softmax;
            if online_softmax(simd, &shown, &mut scores[range.clone()], softmax, &mut rescale) {
                for o in o.iter_mut() {
                    scale_rows(simd, o, &rescale);
                }
            }
            for (o, v) in o.iter_mut().zip(&block.v) {
                multiply_transposed(simd, &scores[range.clone()], &v[range.clone()], o);
            }
        }
    }

    /// Writes the output of a row, normalised; returns its log-sum-exp.
    #[inline(always)]
    pub(crate) fn finish(&self, r: usize, o: &mut [f32]) -> f32 {
        let (panel, lane) = (r / LANES, r % LANES);
        let (lse, sum) = self.panels[panel].softmax.finish(lane);
        let factor = if sum == 0.0 { 0.0 } else { 1.0 / sum };
        for (c, o) in o.chunks_mut(W).enumerate() {
            for (o, &x) in o.iter_mut().zip(&self.o[panel * self.columns_v + c][lane]) {
                *o = x * factor;
            }
        }
        lse
    }
}

/// Running state of the online softmax of one panel.
#[derive(Clone)]
pub(crate) struct Softmax {
    pub(crate) max: Aligned<[f32; LANES]>,
    pub(crate) sum: Aligned<[f32; LANES]>,
}

impl Softmax {
    /// Nothing seen yet.
    pub(crate) fn new() -> Self {
        Self {
            max: Aligned([f32::NEG_INFINITY; LANES]),
            sum: Aligned([0.0; LANES]),
        }
    }

    /// Log-sum-exp of a row's logits, with its base subtracted from the biases (-inf when it saw nothing), and the
    /// softmax denominator.
    pub(crate) fn finish(&self, lane: usize) -> (f32, f32) {
        let sum = self.sum[lane];
        let lse = if sum == 0.0 {
            f32::NEG_INFINITY
        } else {
            self.max[lane] + sum.ln()
        };
        (lse, sum)
    }
}

/// All heads of one tile of tokens, and the places for its results.
struct Task<'t> {
    row: usize,
    first: usize,
    /// `[tokens, num_heads, head_dim]`.
    o: &'t mut [f32],
    /// Per head, `[tokens]`.
    lse: Vec<&'t mut [f32]>,
}

pub(crate) fn run<const W: usize>(
    shape: Packed,
    qkv: &[f32],
    documents: Documents<'_>,
    mask: Mask<'_>,
    o: &mut [f32],
    lse: &mut [f32],
) {
    let keys = Keys::new(shape, documents, mask);
    let o_len = shape.num_heads * shape.head_dim_v;
    let mut tasks = Vec::new();
    let rows = o
        .chunks_exact_mut(shape.seq_len * o_len)
        .zip(lse.chunks_exact_mut(shape.num_heads * shape.seq_len));
    for (row, (o, lse)) in rows.enumerate() {
        let mut lse: Vec<_> = lse
            .chunks_exact_mut(shape.seq_len)
            .map(|head| head.chunks_mut(keys.tile_tokens()))
            .collect();
        for (tile, o) in o.chunks_mut(keys.tile_tokens() * o_len).enumerate() {
            let lse = lse.iter_mut().filter_map(Iterator::next).collect();
            tasks.push(Task {
                row,
                first: tile * keys.tile_tokens(),
                o,
                lse,
            });
        }
    }
    let pool = Pool::new(Scratch::<W>::new, shape.head_dim);
    tasks.into_par_iter().with_max_len(1).for_each(|task| {
        pool.lend(|scratch| forward_tile(shape, qkv, &keys, task, scratch));
    });
}

impl<const W: usize> Scratch<W> {
    fn new(head_dim: usize) -> Self {
        let (rows, list) = (Rows::new(head_dim), Vec::new());
        Self { rows, list }
    }
}

on_arch! {
    fn forward_tile<'t, 's; const W>(
        shape: Packed, qkv: &'s [f32], keys: &'s Keys<'s>, task: Task<'t>, scratch: &'s mut Scratch<W>,
    ) -> () = forward_tile_simd;
}

#[inline(always)]
fn forward_tile_simd<S: Simd, const W: usize>(
    simd: S,
    shape: Packed,
    qkv: &[f32],
    keys: &Keys<'_>,
    mut task: Task<'_>,
    scratch: &mut Scratch<W>,
) {
    let o_len = shape.num_heads * shape.head_dim_v;
    let end = task.first + task.o.len() / o_len;
    let row_len = shape.seq_len * shape.token_len();
    let qkv_row = &qkv[task.row * row_len..(task.row + 1) * row_len];
    for kv_head in 0..shape.num_kv_heads {
        let tile = Tile {
            row: task.row,
            kv_head,
            first: task.first,
            end,
        };
        one_tile(simd, shape, qkv_row, keys, tile, scratch);
        store(shape, tile, scratch, &mut task);
    }
}

/// Leaves the unnormalised output and the softmax state of a tile in the scratch.
#[inline(always)]
fn one_tile<S: Simd, const W: usize>(
    simd: S,
    shape: Packed,
    qkv_row: &[f32],
    keys: &Keys<'_>,
    tile: Tile,
    scratch: &mut Scratch<W>,
) {
    let (d, group_size) = (shape.head_dim, shape.group_size());
    let Scratch { rows, list } = scratch;
    let queries = (0..tile.num_rows(shape)).map(|r| {
        let at = (tile.first + r / group_size) * shape.token_len() + (tile.kv_head * group_size + r % group_size) * d;
        &qkv_row[at..at + d]
    });
    let position = |r: usize| (tile.first + r / group_size) as i32;
    rows.load(queries, position, [d, shape.head_dim_v], shape.softmax_scale);
    keys.of_tile(tile.row, tile.kv_head, tile.first, tile.end - 1, list);
    let has_bias = keys.delta(tile.row, tile.kv_head).is_some();
    for list in keys.parts(tile.row, list) {
        rows.block.gather(qkv_row, shape, keys, tile, list);
        let readers = |positions: &[i32; LANES]| keys.readers(tile.row, tile.kv_head, list[0], positions);
        let bases = |positions: &[i32; LANES]| keys.bases(tile.row, tile.kv_head, positions);
        rows.add_block(simd, d.div_ceil(W), readers, has_bias.then_some(bases));
    }
}

/// A rectangle of keys and query rows.
pub(crate) struct Shown<'s> {
    pub(crate) positions: &'s [i32; LANES],
    pub(crate) key: &'s [i32],
    pub(crate) expire: &'s [i32],
    pub(crate) delta: Option<&'s [f32]>,
    /// Taken from `delta`, per query.
    pub(crate) base: &'s [f32; LANES],
    pub(crate) masked: bool,
}

/// Turns scores into unnormalised probabilities; true when earlier output must be multiplied by `rescale`.
#[inline(always)]
pub(crate) fn online_softmax<S: Simd>(
    simd: S,
    shown: &Shown<'_>,
    scores: &mut [[f32; LANES]],
    state: &mut Softmax,
    rescale: &mut [f32; LANES],
) -> bool {
    let positions = S::as_simd_i32s(shown.positions).0;
    let base = S::as_simd_f32s(shown.base).0;
    let old_max = S::as_mut_simd_f32s(&mut *state.max).0;
    let sum = S::as_mut_simd_f32s(&mut *state.sum).0;
    let rescale = S::as_mut_simd_f32s(rescale).0;
    let low = simd.splat_f32s(f32::NEG_INFINITY);
    let zero = simd.splat_f32s(0.0);
    let mut changed = false;
    for col in (0..LANES / S::F32_LANES).step_by(SIDE) {
        let mut max = [low; SIDE];
        max.copy_from_slice(&old_max[col..col + SIDE]);
        if shown.masked {
            for (s, row) in scores.iter_mut().enumerate() {
                let row = S::as_mut_simd_f32s(row).0;
                let delta = simd.splat_f32s(shown.delta.map_or(0.0, |delta| delta[s]));
                let (key, expire) = (simd.splat_i32s(shown.key[s]), simd.splat_i32s(shown.expire[s]));
                for v in 0..SIDE {
                    let at = positions[col + v];
                    let seen = simd.and_m32s(simd.less_than_or_equal_i32s(key, at), simd.less_than_i32s(at, expire));
                    let bias = simd.sub_f32s(delta, base[col + v]);
                    let x = simd.select_f32s(seen, simd.add_f32s(row[col + v], bias), low);
                    row[col + v] = x;
                    max[v] = simd.max_f32s(max[v], x);
                }
            }
        } else if let Some(delta) = shown.delta {
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
        // A row that has seen nothing yet keeps its maximum of -inf; its probabilities are then exp(-inf - 0) = 0.
        let mut shift = [zero; SIDE];
        let mut total = [zero; SIDE];
        for v in 0..SIDE {
            let empty = simd.equal_f32s(max[v], low);
            shift[v] = simd.select_f32s(empty, zero, max[v]);
            let factor = exp_below(simd, simd.sub_f32s(old_max[col + v], shift[v]));
            let same = simd.equal_f32s(max[v], old_max[col + v]);
            changed |= simd.first_true_m32s(simd.not_m32s(same)) < S::F32_LANES;
            let factor = simd.select_f32s(same, simd.splat_f32s(1.0), factor);
            rescale[col + v] = factor;
            total[v] = simd.mul_f32s(sum[col + v], factor);
            old_max[col + v] = max[v];
        }
        for row in scores.iter_mut() {
            let row = S::as_mut_simd_f32s(row).0;
            for v in 0..SIDE {
                let p = exp_below(simd, simd.sub_f32s(row[col + v], shift[v]));
                row[col + v] = p;
                total[v] = simd.add_f32s(total[v], p);
            }
        }
        sum[col..col + SIDE].copy_from_slice(&total);
    }
    changed
}

/// Normalises and writes a finished tile.
#[inline(always)]
fn store<const W: usize>(shape: Packed, tile: Tile, scratch: &Scratch<W>, task: &mut Task<'_>) {
    let (d, group_size) = (shape.head_dim_v, shape.group_size());
    for r in 0..tile.num_rows(shape) {
        let (token, head) = (r / group_size, tile.kv_head * group_size + r % group_size);
        let at = (token * shape.num_heads + head) * d;
        task.lse[head][token] = scratch.rows.finish(r, &mut task.o[at..at + d]);
    }
}
