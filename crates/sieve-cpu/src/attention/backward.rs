//! The backward pass: probabilities are recomputed from the log-sum-exp, and all five GEMMs run on panels, as in the
//! forward pass. Sizes and mask alone fix the order of every sum, whatever the number of threads.

use std::ops::Range;

use pulp::Simd;
use rayon::prelude::*;

use super::keys::{Keys, ReadKey};
use super::panel::{Aligned, BLOCK_KEYS, LANES, SIDE, multiply, multiply_transposed};
use super::scratch::Pool;
use super::segments::{KeySums, segments_of, split_by_group, write_sums};
use super::shape::{Documents, Mask, ScaledShape};
use super::tile::{KeyBlock, Pairs, RowPanels, Tile, row_positions};
use crate::simd::{dot, exp, on_arch, reduce_sum};

/// Tensors that the backward pass reads.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    shape: ScaledShape,
    qkv: &'a [f32],
    o: &'a [f32],
    lse: &'a [f32],
    d_o: &'a [f32],
    keys: &'a Keys<'a>,
}

/// Working memory of one thread; a panel has W columns of a head.
struct Scratch<const W: usize> {
    q: RowPanels<W>,
    d_o: RowPanels<W>,
    /// Gradient of q without the softmax scale, `[row panels, column panels, LANES, W]`.
    dq: Vec<Aligned<[[f32; W]; LANES]>>,
    /// Positions of each panel's query rows, -1 for unused rows.
    positions: Vec<[i32; LANES]>,
    statistics: Vec<RowStatistics>,
    block: KeyBlock<W>,
    /// The keys that the present tile reads.
    list: Vec<ReadKey>,
    /// Scores, then probabilities, of one panel of query rows and one block of keys, `[keys, query rows]`.
    p: Aligned<[[f32; LANES]; BLOCK_KEYS]>,
    /// Products d_o . v, then gradients of the logits, laid out as `p`.
    ds: Aligned<[[f32; LANES]; BLOCK_KEYS]>,
    /// Gradients of the block's keys, from one tile: `[column panels, BLOCK_KEYS, W]`.
    dk: Vec<Aligned<[[f32; W]; BLOCK_KEYS]>>,
    dv: Vec<Aligned<[[f32; W]; BLOCK_KEYS]>>,
    d_delta: [f32; BLOCK_KEYS],
}

/// For each row of a panel, its log-sum-exp and the dot product of o and d_o.
#[derive(Clone)]
struct RowStatistics {
    lse: Aligned<[f32; LANES]>,
    o_dot_d_o: Aligned<[f32; LANES]>,
}

/// Runs [`attention_backward`](super::attention_backward) with panels of W columns. A group is one batch row and
/// KV head; its segments (runs of tiles) are tasks, whose sums of dk and dv are added in order.
#[allow(clippy::too_many_arguments, reason = "the operands of the public function")]
pub(super) fn run<const W: usize>(
    shape: ScaledShape,
    qkv: &[f32],
    documents: Documents<'_>,
    mask: Mask<'_>,
    o: &[f32],
    lse: &[f32],
    d_o: &[f32],
    d_qkv: &mut [f32],
    d_delta: Option<&mut [f32]>,
) {
    let keys = Keys::new(*shape, documents, mask);
    let inputs = Inputs { shape, qkv, o, lse, d_o, keys: &keys };
    let mut groups = split_by_group(*shape, d_qkv, d_delta);
    let pool = Pool::new(Scratch::<W>::new, shape.head_dim);
    groups.par_iter_mut().enumerate().with_max_len(1).for_each(|(group, rows)| {
        let (row, kv_head) = (group / shape.num_kv_heads, group % shape.num_kv_heads);
        let segments = segments_of(*shape, &keys, row, kv_head);
        let mut dq = rows.dq.as_mut_slice();
        let mut work = Vec::with_capacity(segments.len());
        for tokens in segments {
            let (segment_dq, rest) = dq.split_at_mut(tokens.len() * shape.group_size());
            dq = rest;
            work.push((tokens, segment_dq));
        }
        let sums: Vec<KeySums> = work
            .into_par_iter()
            .with_max_len(1)
            .map(|(tokens, dq)| pool.lend(|scratch| segment(inputs, row, kv_head, tokens, dq, scratch)))
            .collect();
        write_sums(*shape, &sums, rows);
    });
}

impl<const W: usize> Scratch<W> {
    /// Buffers for heads of this width, in panels of W columns; those that depend on the tile are empty.
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

/// The backward pass of the tiles that hold `tokens`, for one batch row and KV head: writes dq, and returns the
/// segment's sums of dk, dv and d_delta.
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
    let num_keys = tokens.end - first_key;
    let mut sums = KeySums {
        first: first_key,
        dk: vec![0.0; num_keys * d],
        dv: vec![0.0; num_keys * d_v],
        d_delta: vec![0.0; num_keys],
    };
    let tiles = tokens.clone().step_by(keys.tile_tokens()).zip(dq.chunks_mut(keys.tile_tokens() * group_size));
    for (first, dq) in tiles {
        let end = (first + keys.tile_tokens()).min(tokens.end);
        let tile = Tile { row, kv_head, first, end };
        one_tile(simd, inputs, tile, scratch, &mut sums);
        let column_panels = d.div_ceil(W);
        for (query_row, dq) in dq.iter_mut().enumerate() {
            for (c, dq) in dq.chunks_mut(W).enumerate() {
                let unscaled = &scratch.dq[query_row / LANES * column_panels + c][query_row % LANES];
                for (dq, &x) in dq.iter_mut().zip(unscaled) {
                    *dq = x * shape.softmax_scale;
                }
            }
        }
    }
    sums
}

/// The backward pass of one tile: leaves dq, without the softmax scale, in the scratch, and adds dk, dv and the
/// gradients of the keys' biases to `sums`.
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
    load_rows(simd, inputs, tile, scratch);
    let row_len = shape.seq_len * shape.token_len();
    let qkv_row = &qkv[tile.row * row_len..(tile.row + 1) * row_len];
    scratch.dq.clear();
    let dq_panels = scratch.positions.len() * d.div_ceil(W);
    scratch.dq.resize(dq_panels, Aligned([[0.0; W]; LANES]));

    // Taken out, because the scratch is borrowed mutably while the list is read.
    let mut list = std::mem::take(&mut scratch.list);
    keys.of_tile(tile.row, tile.kv_head, tile.first, tile.end - 1, &mut list);
    for block_keys in keys.chunks(tile.row, &list) {
        scratch.block.gather(qkv_row, *shape, keys, tile, block_keys);
        scratch.dk.fill(Aligned([[0.0; W]; BLOCK_KEYS]));
        scratch.dv.fill(Aligned([[0.0; W]; BLOCK_KEYS]));
        scratch.d_delta.fill(0.0);
        for panel in 0..scratch.positions.len() {
            let readers = keys.readers(tile.row, tile.kv_head, block_keys[0].position, &scratch.positions[panel]);
            one_panel(simd, inputs, tile, panel, &readers, scratch);
        }
        for (slot, key) in block_keys.iter().enumerate() {
            let at = key.position as usize - sums.first;
            add_columns(&mut sums.dk[at * d..(at + 1) * d], slot, &scratch.dk);
            add_columns(&mut sums.dv[at * d_v..(at + 1) * d_v], slot, &scratch.dv);
            sums.d_delta[at] += scratch.d_delta[slot];
        }
    }
    scratch.list = list;
}

/// Adds the gradients of one panel of query rows and the gathered block of keys to dq, dk, dv and d_delta in the
/// scratch. `positions` has the position of each row of the panel, -1 for a row that sees none of the keys.
#[inline(always)]
fn one_panel<S: Simd, const W: usize>(
    simd: S,
    inputs: Inputs<'_>,
    tile: Tile,
    panel: usize,
    positions: &[i32; LANES],
    scratch: &mut Scratch<W>,
) {
    let Inputs { shape, keys, .. } = inputs;
    let (columns, columns_v) = (shape.head_dim.div_ceil(W), shape.head_dim_v.div_ceil(W));
    let Scratch { q, d_o, dq, block, dk, dv, .. } = scratch;
    let Some(seen) = block.seen_by(positions) else {
        // No row sees a key of the block, so all its gradients are 0.
        return;
    };
    let slots = || seen.slots.clone();
    let (p, ds) = (&mut scratch.p[slots()], &mut scratch.ds[slots()]);
    // The first column panel overwrites p and ds, the later ones add to them.
    for c in 0..columns {
        let (q, accumulate) = (&q.transposed[panel * columns + c], c > 0);
        multiply(simd, &block.k[c][slots()], q, p, accumulate);
    }
    for c in 0..columns_v {
        let (d_o, accumulate) = (&d_o.transposed[panel * columns_v + c], c > 0);
        multiply(simd, &block.v[c][slots()], d_o, ds, accumulate);
    }
    let base = keys.bases(tile.row, tile.kv_head, positions);
    let has_bias = keys.delta(tile.row, tile.kv_head).is_some();
    let pairs = block.pairs(positions, &seen, &base, has_bias);
    let d_delta = &mut scratch.d_delta[slots()];
    probabilities_and_gradients(simd, &pairs, &scratch.statistics[panel], p, ds, d_delta);
    let accumulate = true;
    for (c, dv) in dv.iter_mut().enumerate().take(columns_v) {
        let d_o = &d_o.natural[panel * columns_v + c];
        multiply(simd, p, d_o, &mut dv[slots()], accumulate);
    }
    for (c, dk) in dk.iter_mut().enumerate() {
        let at = panel * columns + c;
        multiply(simd, ds, &q.natural[at], &mut dk[slots()], accumulate);
        multiply_transposed(simd, ds, &block.k[c][slots()], &mut dq[at]);
    }
}

/// Fills the panels of q (times the softmax scale) and d_o, and the positions and statistics of their rows.
#[inline(always)]
fn load_rows<S: Simd, const W: usize>(simd: S, inputs: Inputs<'_>, tile: Tile, scratch: &mut Scratch<W>) {
    let Inputs { shape, qkv, o, lse, d_o, .. } = inputs;
    let (d, d_v) = (shape.head_dim, shape.head_dim_v);
    let num_rows = tile.num_rows(*shape);
    let token_idx = |token: usize| tile.row * shape.seq_len + token;
    let q_rows = (0..num_rows).map(|query_row| {
        let (token, head) = tile.token_and_head(*shape, query_row);
        &qkv[token_idx(token) * shape.token_len() + head * d..][..d]
    });
    let o_range = |query_row: usize| {
        let (token, head) = tile.token_and_head(*shape, query_row);
        let at = (token_idx(token) * shape.num_heads + head) * d_v;
        at..at + d_v
    };
    scratch.q.load(q_rows, d, shape.softmax_scale);
    scratch.q.transpose();
    let d_o_rows = (0..num_rows).map(|query_row| &d_o[o_range(query_row)]);
    let unscaled = 1.0;
    scratch.d_o.load(d_o_rows, d_v, unscaled);
    scratch.d_o.transpose();
    let position = |query_row: usize| tile.token_and_head(*shape, query_row).0 as i32;
    row_positions(num_rows, position, &mut scratch.positions);
    scratch.statistics.clear();
    scratch.statistics.resize(
        scratch.positions.len(),
        RowStatistics { lse: Aligned([0.0; LANES]), o_dot_d_o: Aligned([0.0; LANES]) },
    );
    for query_row in 0..num_rows {
        let (token, head) = tile.token_and_head(*shape, query_row);
        let lse = lse[(tile.row * shape.num_heads + head) * shape.seq_len + token];
        let statistics = &mut scratch.statistics[query_row / LANES];
        let lane = query_row % LANES;
        // A row that sees nothing has no visible pair; 0 keeps its masked lanes finite.
        statistics.lse[lane] = if lse == f32::NEG_INFINITY { 0.0 } else { lse };
        statistics.o_dot_d_o[lane] = dot(simd, &o[o_range(query_row)], &d_o[o_range(query_row)]);
    }
}

/// On entry `p` holds scores and `ds` the products d_o . v. On return `p` holds probabilities and `ds` gradients of the
/// logits; if keys have biases, each key's sum of these over the rows is added to `d_delta`.
#[inline(always)]
fn probabilities_and_gradients<S: Simd>(
    simd: S,
    pairs: &Pairs<'_>,
    statistics: &RowStatistics,
    p: &mut [[f32; LANES]],
    ds: &mut [[f32; LANES]],
    d_delta: &mut [f32],
) {
    let positions = S::as_simd_i32s(pairs.positions).0;
    let base = S::as_simd_f32s(pairs.base).0;
    let lse = S::as_simd_f32s(&*statistics.lse).0;
    let o_dot_d_o = S::as_simd_f32s(&*statistics.o_dot_d_o).0;
    let zero = simd.splat_f32s(0.0);
    for (key, (p, ds)) in p.iter_mut().zip(ds).enumerate() {
        let p = S::as_mut_simd_f32s(p).0;
        let ds = S::as_mut_simd_f32s(ds).0;
        let delta = simd.splat_f32s(pairs.delta.map_or(0.0, |delta| delta[key]));
        let mut total = [zero; SIDE];
        for col in (0..LANES / S::F32_LANES).step_by(SIDE) {
            for v in 0..SIDE {
                let x = simd.add_f32s(p[col + v], simd.sub_f32s(delta, base[col + v]));
                let mut probability = exp(simd, simd.sub_f32s(x, lse[col + v]));
                if pairs.masked {
                    let visible = pairs.visible(simd, key, positions[col + v]);
                    probability = simd.select_f32s(visible, probability, zero);
                }
                let gradient = simd.mul_f32s(probability, simd.sub_f32s(ds[col + v], o_dot_d_o[col + v]));
                p[col + v] = probability;
                ds[col + v] = gradient;
                total[v] = simd.add_f32s(total[v], gradient);
            }
        }
        if pairs.delta.is_some() {
            d_delta[key] += reduce_sum(simd, total);
        }
    }
}

/// Adds row `slot` of the panels to a vector.
#[inline(always)]
fn add_columns<const W: usize>(target: &mut [f32], slot: usize, panels: &[Aligned<[[f32; W]; BLOCK_KEYS]>]) {
    for (target, panel) in target.chunks_mut(W).zip(panels) {
        for (target, &x) in target.iter_mut().zip(&panel[slot]) {
            *target += x;
        }
    }
}
