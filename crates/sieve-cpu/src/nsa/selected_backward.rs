//! Gradients of attention over the chosen blocks; the order of every sum is fixed by sizes and choices alone.

use std::ops::Range;

use pulp::Simd;
use rayon::prelude::*;

use super::NsaBlocks;
use super::documents_of;
use super::selected::{BlockKeys, Choosers, check, tile_tokens};
use crate::attention::backward::{RowStatistics, Shown, add_columns, probabilities_and_gradients};
use crate::attention::panel::{Aligned, LANES, multiply, multiply_transposed};
use crate::attention::segments::{KeySums, TARGET_TASKS, split_by_group, write_sums};
use crate::attention::tile::{BLOCK_KEYS, RowPanels, panel_width};
use crate::attention::{AttentionShape, Documents, scratch::Pool};
use crate::simd::{dot, on_arch};

/// Gradients of [`nsa_selected_attention_forward`](super::nsa_selected_attention_forward), from its outputs.
///
/// # Shapes
/// - qkv, block_indices, o, lse: as there; d_o: as o; d_qkv: as qkv, written whole
///
/// # Panics
/// When lengths do not fit or a block lies after its query's tile.
#[allow(clippy::too_many_arguments, reason = "the operands of one op, all slices")]
pub fn nsa_selected_attention_backward(
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    documents: Documents<'_>,
    block_indices: &[i32],
    o: &[f32],
    lse: &[f32],
    d_o: &[f32],
    d_qkv: &mut [f32],
) {
    check(shape, blocks, qkv, documents, block_indices, o, lse);
    assert_eq!(
        (d_o.len(), d_qkv.len()),
        (o.len(), qkv.len()),
        "nsa_selected_attention_backward: gradients have other sizes"
    );
    if shape.batch * shape.seq_len == 0 {
        return;
    }
    let inputs = Inputs {
        shape,
        blocks,
        qkv,
        documents,
        block_indices,
        o,
        lse,
        d_o,
    };
    match panel_width(shape.head_dim) {
        16 => run::<16>(inputs, d_qkv),
        32 => run::<32>(inputs, d_qkv),
        _ => run::<64>(inputs, d_qkv),
    }
}

#[derive(Clone, Copy)]
struct Inputs<'a> {
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &'a [f32],
    documents: Documents<'a>,
    block_indices: &'a [i32],
    o: &'a [f32],
    lse: &'a [f32],
    d_o: &'a [f32],
}

/// What one thread needs for one segment.
struct Scratch<const W: usize> {
    choosers: Choosers,
    q: RowPanels<W>,
    d_o: RowPanels<W>,
    keys: BlockKeys<W>,
    p: Aligned<[[f32; LANES]; BLOCK_KEYS]>,
    ds: Aligned<[[f32; LANES]; BLOCK_KEYS]>,
    dk: Vec<Aligned<[[f32; W]; BLOCK_KEYS]>>,
    dv: Vec<Aligned<[[f32; W]; BLOCK_KEYS]>>,
    part: Vec<Aligned<[[f32; W]; LANES]>>,
    /// Per row of the tile: log-sum-exp and the dot product of o and d_o.
    lse: Vec<f32>,
    correction: Vec<f32>,
    /// `[rows, head_dim]`.
    dq: Vec<f32>,
}

impl<const W: usize> Scratch<W> {
    fn new(head_dim: usize) -> Self {
        let columns = head_dim.div_ceil(W);
        let keys = || vec![Aligned([[0.0; W]; BLOCK_KEYS]); columns];
        Self {
            choosers: Choosers::default(),
            q: RowPanels::new(),
            d_o: RowPanels::new(),
            keys: BlockKeys::new(head_dim),
            p: Aligned([[0.0; LANES]; BLOCK_KEYS]),
            ds: Aligned([[0.0; LANES]; BLOCK_KEYS]),
            dk: keys(),
            dv: keys(),
            part: vec![Aligned([[0.0; W]; LANES]); columns],
            lse: Vec::new(),
            correction: Vec::new(),
            dq: Vec::new(),
        }
    }
}

/// A tile of tokens inside its document.
struct Tile {
    document: Range<usize>,
    tokens: Range<usize>,
}

fn run<const W: usize>(inputs: Inputs<'_>, d_qkv: &mut [f32]) {
    let shape = inputs.shape;
    let mut groups = split_by_group(shape.into(), d_qkv, None);
    let pool = Pool::new(Scratch::<W>::new, shape.head_dim);
    groups
        .par_iter_mut()
        .enumerate()
        .with_max_len(1)
        .for_each(|(group, rows)| {
            let (row, kv_head) = (group / shape.num_kv_heads, group % shape.num_kv_heads);
            let mut dq = rows.dq.as_mut_slice();
            let mut work = Vec::new();
            for tiles in segments(inputs, row) {
                let len: usize = tiles.iter().map(|tile| tile.tokens.len()).sum();
                let (part, rest) = dq.split_at_mut(len * shape.group_size());
                dq = rest;
                work.push((tiles, part));
            }
            let sums: Vec<KeySums> = work
                .into_par_iter()
                .with_max_len(1)
                .map(|(tiles, dq)| pool.lend(|scratch| segment(inputs, row, kv_head, tiles, dq, scratch)))
                .collect();
            write_sums(shape.into(), &sums, rows);
        });
}

/// The tiles of a row in as many parts as give enough tasks, about equally many tokens each.
fn segments(inputs: Inputs<'_>, row: usize) -> Vec<Vec<Tile>> {
    let Inputs { shape, documents, .. } = inputs;
    let n = shape.seq_len;
    let count = TARGET_TASKS.div_ceil(shape.batch * shape.num_kv_heads);
    let mut parts: Vec<Vec<Tile>> = vec![Vec::new()];
    for document in documents_of(documents, row, n) {
        let step = tile_tokens(document.len());
        for first in document.clone().step_by(step) {
            let tokens = first..(first + step).min(document.end);
            if first * count >= n * parts.len() {
                parts.push(Vec::new());
            }
            let last = parts.len() - 1;
            parts[last].push(Tile {
                document: document.clone(),
                tokens,
            });
        }
    }
    parts
}

on_arch! {
    fn segment<'s, 'g; const W>(
        inputs: Inputs<'s>, row: usize, kv_head: usize, tiles: Vec<Tile>, dq: &'s mut [&'g mut [f32]],
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
    tiles: Vec<Tile>,
    dq: &mut [&mut [f32]],
    scratch: &mut Scratch<W>,
) -> KeySums {
    let shape = inputs.shape;
    let (d, m) = (shape.head_dim, shape.group_size());
    let first = tiles.first().map_or(0, |tile| tile.document.start);
    let end = tiles.last().map_or(first, |tile| tile.tokens.end);
    let mut sums = KeySums {
        first,
        dk: vec![0.0; (end - first) * d],
        dv: vec![0.0; (end - first) * d],
        d_delta: Vec::new(),
    };
    let mut done = 0;
    for tile in &tiles {
        one_tile(simd, inputs, row, kv_head, tile, scratch, &mut sums);
        let rows = tile.tokens.len() * m;
        let from = scratch.dq.chunks_exact(d);
        for (dq, from) in dq[done..done + rows].iter_mut().zip(from) {
            for (dq, x) in dq.iter_mut().zip(from) {
                *dq = x * shape.softmax_scale;
            }
        }
        done += rows;
    }
    sums
}

/// Leaves dq (without the scale) in the scratch and adds to the sums over keys.
#[inline(always)]
fn one_tile<S: Simd, const W: usize>(
    simd: S,
    inputs: Inputs<'_>,
    row: usize,
    kv_head: usize,
    tile: &Tile,
    scratch: &mut Scratch<W>,
    sums: &mut KeySums,
) {
    let Inputs {
        shape,
        blocks,
        qkv,
        block_indices,
        o: o_all,
        lse: lse_all,
        d_o: d_o_all,
        ..
    } = inputs;
    let (n, d, m) = (shape.seq_len, shape.head_dim, shape.group_size());
    let (columns, block_len) = (d.div_ceil(W), blocks.select_block_size);
    let Tile { document, tokens } = tile;
    let Scratch {
        choosers,
        q,
        d_o,
        keys: block_keys,
        p,
        ds,
        dk,
        dv,
        part,
        lse,
        correction,
        dq,
    } = scratch;
    let num_rows = tokens.len() * m;
    let num_blocks = (tokens.end - 1 - document.start) / block_len + 1;
    let first_token = row * n + tokens.start;
    choosers.read(tokens.len(), num_blocks, |token| {
        let at = (first_token + token) * shape.num_kv_heads + kv_head;
        &block_indices[at * blocks.num_selected_blocks..(at + 1) * blocks.num_selected_blocks]
    });
    dq.clear();
    dq.resize(num_rows * d, 0.0);
    lse.clear();
    correction.clear();
    let o_at = |token: usize, head: usize| {
        let at = ((first_token + token) * shape.num_heads + kv_head * m + head) * d;
        at..at + d
    };
    for r in 0..num_rows {
        let (token, head) = (r / m, r % m);
        let x = lse_all[(row * shape.num_heads + kv_head * m + head) * n + tokens.start + token];
        // A row that sees nothing has no visible pair; 0 keeps its masked lanes finite.
        lse.push(if x == f32::NEG_INFINITY { 0.0 } else { x });
        let at = o_at(token, head);
        correction.push(dot(simd, &o_all[at.clone()], &d_o_all[at]));
    }

    for block in 0..num_blocks {
        let choosers = choosers.of(block);
        if choosers.is_empty() {
            continue;
        }
        let first = document.start + block * block_len;
        let end = (first + block_len).min(tokens.end);
        for first in (first..end).step_by(BLOCK_KEYS) {
            let keys = first..(first + BLOCK_KEYS).min(end);
            block_keys.load(qkv, shape, row, kv_head, &keys);
            let BlockKeys { k, v, position, used } = &*block_keys;
            let used = *used;
            dk.fill(Aligned([[0.0; W]; BLOCK_KEYS]));
            dv.fill(Aligned([[0.0; W]; BLOCK_KEYS]));
            let count = choosers.len() * m;
            for panel in (0..count).step_by(LANES) {
                let lanes = panel..(panel + LANES).min(count);
                let place = |i: usize| (choosers[i / m] as usize, i % m);
                let q_rows = (0..lanes.len()).map(|lane| {
                    let (token, head) = place(panel + lane);
                    let at = (first_token + token) * shape.token_len() + (kv_head * m + head) * d;
                    &qkv[at..at + d]
                });
                q.load(q_rows, d, shape.softmax_scale);
                q.transpose();
                let d_o_rows = (0..lanes.len()).map(|lane| {
                    let (token, head) = place(panel + lane);
                    &d_o_all[o_at(token, head)]
                });
                d_o.load(d_o_rows, d, 1.0);
                d_o.transpose();
                let mut positions = [-1; LANES];
                let mut statistics = RowStatistics {
                    lse: Aligned([0.0; LANES]),
                    correction: Aligned([0.0; LANES]),
                };
                for (lane, i) in lanes.clone().enumerate() {
                    let (token, head) = place(i);
                    positions[lane] = (tokens.start + token) as i32;
                    statistics.lse[lane] = lse[token * m + head];
                    statistics.correction[lane] = correction[token * m + head];
                }
                for c in 0..columns {
                    let (q, d_o) = (&q.transposed[c], &d_o.transposed[c]);
                    multiply(simd, &k[c][..used], q, &mut p[..used], c > 0);
                    multiply(simd, &v[c][..used], d_o, &mut ds[..used], c > 0);
                }
                let shown = Shown {
                    positions: &positions,
                    key: &position[..used],
                    expire: &[i32::MAX; BLOCK_KEYS][..used],
                    delta: None,
                    base: &[0.0; LANES],
                    masked: positions[0] < keys.end as i32 - 1 || used > keys.len() || lanes.len() < LANES,
                    statistics: &statistics,
                };
                probabilities_and_gradients(simd, &shown, &mut p[..used], &mut ds[..used], &mut []);
                for c in 0..columns {
                    let (q, d_o) = (&q.natural[c], &d_o.natural[c]);
                    multiply(simd, &p[..used], d_o, &mut dv[c][..used], true);
                    multiply(simd, &ds[..used], q, &mut dk[c][..used], true);
                    part[c] = Aligned([[0.0; W]; LANES]);
                    multiply_transposed(simd, &ds[..used], &k[c][..used], &mut part[c]);
                }
                for (lane, i) in lanes.enumerate() {
                    let (token, head) = place(i);
                    let at = (token * m + head) * d;
                    for (dq, part) in dq[at..at + d].chunks_mut(W).zip(&*part) {
                        for (dq, x) in dq.iter_mut().zip(&part[lane]) {
                            *dq += x;
                        }
                    }
                }
            }
            for (slot, token) in keys.enumerate() {
                let at = (token - sums.first) * d;
                add_columns(&mut sums.dk[at..at + d], slot, dk);
                add_columns(&mut sums.dv[at..at + d], slot, dv);
            }
        }
    }
}
