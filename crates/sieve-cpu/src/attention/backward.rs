//! The backward pass: probabilities are recomputed from the log-sum-exp, all five GEMMs run on the forward's panels,
//! and every sum has an order fixed by sizes and mask alone.

use std::ops::Range;

use pulp::Simd;
use rayon::prelude::*;

use super::keys::Keys;
use super::panel::{Aligned, LANES, multiply, multiply_transposed};
use super::scratch::Pool;
use super::segments::{KeySums, segments_of, split_by_group, write_sums};
use super::tile::{BLOCK_KEYS, KeyBlock, RowPanels, Tile, row_positions};
use super::{Documents, Mask, Packed};
use crate::simd::{dot, exp, on_arch};

/// Vectors handled side by side, so that their chains of dependent operations overlap.
const SIDE: usize = 4;

/// What the backward pass reads.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    shape: Packed,
    qkv: &'a [f32],
    o: &'a [f32],
    lse: &'a [f32],
    d_o: &'a [f32],
    keys: &'a Keys<'a>,
}

/// What one thread needs for one segment.
struct Scratch<const W: usize> {
    q: RowPanels<W>,
    d_o: RowPanels<W>,
    dq: Vec<Aligned<[[f32; W]; LANES]>>,
    positions: Vec<[i32; LANES]>,
    statistics: Vec<RowStatistics>,
    block: KeyBlock<W>,
    list: Vec<u32>,
    p: Aligned<[[f32; LANES]; BLOCK_KEYS]>,
    ds: Aligned<[[f32; LANES]; BLOCK_KEYS]>,
    dk: Vec<Aligned<[[f32; W]; BLOCK_KEYS]>>,
    dv: Vec<Aligned<[[f32; W]; BLOCK_KEYS]>>,
    d_delta: [f32; BLOCK_KEYS],
}

/// Per row of a panel: log-sum-exp and the dot product of o and d_o.
#[derive(Clone)]
pub(crate) struct RowStatistics {
    pub(crate) lse: Aligned<[f32; LANES]>,
    pub(crate) correction: Aligned<[f32; LANES]>,
}

#[allow(clippy::too_many_arguments, reason = "the operands of the public function")]
pub(super) fn run<const W: usize>(
    shape: Packed,
    qkv: &[f32],
    documents: Documents<'_>,
    mask: Mask<'_>,
    o: &[f32],
    lse: &[f32],
    d_o: &[f32],
    d_qkv: &mut [f32],
    d_delta: Option<&mut [f32]>,
) {
    let keys = Keys::new(shape, documents, mask);
    let inputs = Inputs {
        shape,
        qkv,
        o,
        lse,
        d_o,
        keys: &keys,
    };
    let mut groups = split_by_group(shape, d_qkv, d_delta);
    let pool = Pool::new(Scratch::<W>::new, shape.head_dim);
    groups
        .par_iter_mut()
        .enumerate()
        .with_max_len(1)
        .for_each(|(group, rows)| {
            let (row, kv_head) = (group / shape.num_kv_heads, group % shape.num_kv_heads);
            let segments = segments_of(shape, &keys, row, kv_head);
            let mut dq = rows.dq.as_mut_slice();
            let mut work = Vec::with_capacity(segments.len());
            for tokens in segments {
                let (part, rest) = dq.split_at_mut(tokens.len() * shape.group_size());
                dq = rest;
                work.push((tokens, part));
            }
            let sums: Vec<KeySums> = work
                .into_par_iter()
                .with_max_len(1)
                .map(|(tokens, dq)| pool.lend(|scratch| segment(inputs, row, kv_head, tokens, dq, scratch)))
                .collect();
            write_sums(shape, &sums, rows);
        });
}

impl<const W: usize> Scratch<W> {
    fn new(head_dim: usize) -> Self {
        let columns = head_dim.div_ceil(W);
        Self {
            q: RowPanels::new(),
            d_o: RowPanels::new(),
            dq: Vec::new(),
            positions: Vec::new(),
            statistics: Vec::new(),
            block: KeyBlock::new(head_dim),
            list: Vec::new(),
            p: Aligned([[0.0; LANES]; BLOCK_KEYS]),
            ds: Aligned([[0.0; LANES]; BLOCK_KEYS]),
            dk: vec![Aligned([[0.0; W]; BLOCK_KEYS]); columns],
            dv: vec![Aligned([[0.0; W]; BLOCK_KEYS]); columns],
            d_delta: [0.0; BLOCK_KEYS],
        }
    }
}

on_arch! {
    fn segment<'s, 'g; const W>(
        inputs: Inputs<'s>, row: usize, kv_head: usize, tokens: Range<usize>, dq: &'s mut [&'g mut [f32]],
        scratch: &'s mut Scratch<W>,
    ) -> KeySums = segment_simd;
}

/// Consecutive tiles of one (row, KV head): writes their dq, returns their sums over keys.
#[inline(always)]
fn segment_simd<S: Simd, const W: usize>(
    simd: S,
    inputs: Inputs<'_>,
    row: usize,
    kv_head: usize,
    tokens: Range<usize>,
    dq: &mut [&mut [f32]],
    scratch: &mut Scratch<W>,
) -> KeySums {
    let Inputs { shape, keys, .. } = inputs;
    let (d, d_v, group_size) = (shape.head_dim, shape.head_dim_v, shape.group_size());
    let first_tile_end = (tokens.start + keys.tile_tokens()).min(tokens.end);
    let first_key = keys.first_of_segment(row, kv_head, [tokens.start, first_tile_end - 1]);
    let len = tokens.end - first_key;
    let mut sums = KeySums {
        first: first_key,
        dk: vec![0.0; len * d],
        dv: vec![0.0; len * d_v],
        d_delta: vec![0.0; len],
    };
    let tiles = tokens
        .clone()
        .step_by(keys.tile_tokens())
        .zip(dq.chunks_mut(keys.tile_tokens() * group_size));
    for (first, dq) in tiles {
        let end = (first + keys.tile_tokens()).min(tokens.end);
        one_tile(
            simd,
            inputs,
            Tile {
                row,
                kv_head,
                first,
                end,
            },
            scratch,
            &mut sums,
        );
        let columns = d.div_ceil(W);
        for (r, dq) in dq.iter_mut().enumerate() {
            for (c, dq) in dq.chunks_mut(W).enumerate() {
                for (dq, &x) in dq.iter_mut().zip(&scratch.dq[r / LANES * columns + c][r % LANES]) {
                    *dq = x * shape.softmax_scale;
                }
            }
        }
    }
    sums
}

/// Leaves dq (without the scale) in the scratch and adds to the sums over keys.
#[inline(always)]
fn one_tile<S: Simd, const W: usize>(
    simd: S,
    inputs: Inputs<'_>,
    tile: Tile,
    scratch: &mut Scratch<W>,
    sums: &mut KeySums,
) {
    let Inputs { shape, qkv, keys, .. } = inputs;
    let (d, d_v) = (shape.head_dim, shape.head_dim_v);
    let (columns, columns_v) = (d.div_ceil(W), d_v.div_ceil(W));
    load_rows(simd, inputs, tile, scratch);
    let Scratch {
        q,
        d_o,
        dq,
        positions,
        statistics,
        block,
        list,
        p,
        ds,
        dk,
        dv,
        d_delta,
    } = scratch;
    let row_len = shape.seq_len * shape.token_len();
    let qkv_row = &qkv[tile.row * row_len..(tile.row + 1) * row_len];
    dq.clear();
    dq.resize(positions.len() * columns, Aligned([[0.0; W]; LANES]));

    keys.of_tile(tile.row, tile.kv_head, tile.first, tile.end - 1, list);
    for list in keys.parts(tile.row, list) {
        block.gather(qkv_row, shape, keys, tile, list);
        dk.fill(Aligned([[0.0; W]; BLOCK_KEYS]));
        dv.fill(Aligned([[0.0; W]; BLOCK_KEYS]));
        d_delta.fill(0.0);
        for (panel, positions) in positions.iter().enumerate() {
            let positions = &keys.readers(tile.row, tile.kv_head, list[0], positions);
            let Some(meeting) = block.meeting(positions) else {
                continue;
            };
            let range = meeting.keys;
            for c in 0..columns {
                multiply(
                    simd,
                    &block.k[c][range.clone()],
                    &q.transposed[panel * columns + c],
                    &mut p[range.clone()],
                    c > 0,
                );
            }
            for c in 0..columns_v {
                multiply(
                    simd,
                    &block.v[c][range.clone()],
                    &d_o.transposed[panel * columns_v + c],
                    &mut ds[range.clone()],
                    c > 0,
                );
            }
            let bases = keys.bases(tile.row, tile.kv_head, positions);
            let shown = Shown {
                positions,
                key: &block.position[range.clone()],
                expire: &block.expire[range.clone()],
                delta: keys.delta(tile.row, tile.kv_head).map(|_| &block.delta[range.clone()]),
                base: &bases,
                masked: meeting.masked,
                statistics: &statistics[panel],
            };
            let d_delta = &mut d_delta[range.clone()];
            probabilities_and_gradients(simd, &shown, &mut p[range.clone()], &mut ds[range.clone()], d_delta);
            for (c, dv) in dv.iter_mut().enumerate().take(columns_v) {
                multiply(
                    simd,
                    &p[range.clone()],
                    &d_o.natural[panel * columns_v + c],
                    &mut dv[range.clone()],
                    true,
                );
            }
            for (c, dk) in dk.iter_mut().enumerate() {
                let at = panel * columns + c;
                multiply(simd, &ds[range.clone()], &q.natural[at], &mut dk[range.clone()], true);
                multiply_transposed(simd, &ds[range.clone()], &block.k[c][range.clone()], &mut dq[at]);
            }
        }
        for (slot, &j) in list.iter().enumerate() {
            let at = j as usize - sums.first;
            add_columns(&mut sums.dk[at * d..(at + 1) * d], slot, dk);
            add_columns(&mut sums.dv[at * d_v..(at + 1) * d_v], slot, dv);
            sums.d_delta[at] += d_delta[slot];
        }
    }
}

/// Fills the panels of q (times the scale) and d_o and the statistics of their rows.
#[inline(always)]
fn load_rows<S: Simd, const W: usize>(simd: S, inputs: Inputs<'_>, tile: Tile, scratch: &mut Scratch<W>) {
    let Inputs {
        shape,
        qkv,
        o,
        lse,
        d_o,
        ..
    } = inputs;
    let (d, d_v) = (shape.head_dim, shape.head_dim_v);
    let (group_size, n) = (shape.group_size(), shape.seq_len);
    let place = |r: usize| (tile.first + r / group_size, tile.kv_head * group_size + r % group_size);
    let q_rows = (0..tile.num_rows(shape)).map(|r| {
        let (token, head) = place(r);
        let at = (tile.row * n + token) * shape.token_len() + head * d;
        &qkv[at..at + d]
    });
    let o_at = |r: usize| {
        let (token, head) = place(r);
        let at = ((tile.row * n + token) * shape.num_heads + head) * d_v;
        at..at + d_v
    };
    scratch.q.load(q_rows, d, shape.softmax_scale);
    scratch.q.transpose();
    scratch
        .d_o
        .load((0..tile.num_rows(shape)).map(|r| &d_o[o_at(r)]), d_v, 1.0);
    scratch.d_o.transpose();
    row_positions(tile, shape, &mut scratch.positions);
    scratch.statistics.clear();
    scratch.statistics.resize(
        scratch.positions.len(),
        RowStatistics {
            lse: Aligned([0.0; LANES]),
            correction: Aligned([0.0; LANES]),
        },
    );
    for r in 0..tile.num_rows(shape) {
        let (token, head) = place(r);
        let statistics = &mut scratch.statistics[r / LANES];
        let lse = lse[(tile.row * shape.num_heads + head) * n + token];
        // A row that sees nothing has no visible pair; 0 keeps its masked lanes finite.
        statistics.lse[r % LANES] = if lse == f32::NEG_INFINITY { 0.0 } else { lse };
        statistics.correction[r % LANES] = dot(simd, &o[o_at(r)], &d_o[o_at(r)]);
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
    pub(crate) statistics: &'s RowStatistics,
}

/// In: `p` holds scores, `ds` holds d_o . v. Out: probabilities and gradients of the logits, summed into `d_delta`.
#[inline(always)]
pub(crate) fn probabilities_and_gradients<S: Simd>(
    simd: S,
    shown: &Shown<'_>,
    p: &mut [[f32; LANES]],
    ds: &mut [[f32; LANES]],
    d_delta: &mut [f32],
) {
    let positions = S::as_simd_i32s(shown.positions).0;
    let base = S::as_simd_f32s(shown.base).0;
    let lse = S::as_simd_f32s(&*shown.statistics.lse).0;
    let correction = S::as_simd_f32s(&*shown.statistics.correction).0;
    let zero = simd.splat_f32s(0.0);
    for (s, (p, ds)) in p.iter_mut().zip(ds).enumerate() {
        let p = S::as_mut_simd_f32s(p).0;
        let ds = S::as_mut_simd_f32s(ds).0;
        let delta = simd.splat_f32s(shown.delta.map_or(0.0, |delta| delta[s]));
        let (key, expire) = (simd.splat_i32s(shown.key[s]), simd.splat_i32s(shown.expire[s]));
        let mut total = [zero; SIDE];
        for col in (0..LANES / S::F32_LANES).step_by(SIDE) {
            for v in 0..SIDE {
                let x = simd.add_f32s(p[col + v], simd.sub_f32s(delta, base[col + v]));
                let mut probability = exp(simd, simd.sub_f32s(x, lse[col + v]));
                if shown.masked {
                    let at = positions[col + v];
                    let seen = simd.and_m32s(simd.less_than_or_equal_i32s(key, at), simd.less_than_i32s(at, expire));
                    probability = simd.select_f32s(seen, probability, zero);
                }
                let gradient = simd.mul_f32s(probability, simd.sub_f32s(ds[col + v], correction[col + v]));
                p[col + v] = probability;
                ds[col + v] = gradient;
                total[v] = simd.add_f32s(total[v], gradient);
            }
        }
        if shown.delta.is_some() {
            let total = simd.add_f32s(simd.add_f32s(total[0], total[1]), simd.add_f32s(total[2], total[3]));
            d_delta[s] += simd.reduce_sum_f32s(total);
        }
    }
}

#[inline(always)]
pub(crate) fn add_columns<const W: usize>(target: &mut [f32], slot: usize, panels: &[Aligned<[[f32; W]; BLOCK_KEYS]>]) {
    for (target, panel) in target.chunks_mut(W).zip(panels) {
        for (target, &x) in target.iter_mut().zip(&panel[slot]) {
            *target += x;
        }
    }
}
