//! Attention of every query over the blocks it chose.
//!
//! Work goes block by block, not query by query: within a tile of tokens, the rows that chose a block are put side by
//! side and multiplied with it as one panel, so the arithmetic is that of dense attention and a block that no row chose
//! costs nothing. Each row keeps its own running softmax.

use std::ops::Range;

use pulp::Simd;
use rayon::prelude::*;

use super::NsaBlocks;
use super::compressed::document_tiles;
use crate::attention::forward::{Shown, Softmax, online_softmax};
use crate::attention::panel::{Aligned, KEY_STEP, LANES, multiply, multiply_transposed};
use crate::attention::tile::{BLOCK_KEYS, RowPanels, copy_columns, panel_width};
use crate::attention::{AttentionShape, Documents, scratch::Pool};
use crate::simd::on_arch;

/// Tokens of a tile: the longer the document, the more blocks, and the more tokens it takes to fill a block's panel.
pub(super) fn tile_tokens(document_len: usize) -> usize {
    (document_len / 8).clamp(128, 1024)
}

/// The tokens of a tile that chose each block.
#[derive(Default)]
pub(super) struct Choosers {
    /// Per block, where its tokens begin; one more at the end.
    first: Vec<u32>,
    /// Tokens of the tile, ascending within a block.
    tokens: Vec<u32>,
}

impl Choosers {
    /// Reads the choices of a tile: `chosen(token)` gives the blocks of one of its `num_tokens` tokens, whose own
    /// blocks are below `num_blocks`.
    ///
    /// Panics on a block that no token of the tile can see.
    #[inline(always)]
    pub(super) fn read<'c>(&mut self, num_tokens: usize, num_blocks: usize, chosen: impl Fn(usize) -> &'c [i32]) {
        self.first.clear();
        self.first.resize(num_blocks + 1, 0);
        let blocks = |token| chosen(token).iter().filter(|&&block| block >= 0);
        for token in 0..num_tokens {
            for &block in blocks(token) {
                assert!(
                    (block as usize) < num_blocks,
                    "nsa_selected: block {block} lies after its query"
                );
                self.first[block as usize + 1] += 1;
            }
        }
        for block in 0..num_blocks {
            self.first[block + 1] += self.first[block];
        }
        self.tokens.clear();
        self.tokens.resize(self.first[num_blocks] as usize, 0);
        // `first` serves as the cursor and is shifted back by one block afterwards.
        for token in 0..num_tokens {
            for &block in blocks(token) {
                let at = &mut self.first[block as usize];
                self.tokens[*at as usize] = token as u32;
                *at += 1;
            }
        }
        self.first.rotate_right(1);
        self.first[0] = 0;
    }

    /// Tokens that chose `block`.
    #[inline(always)]
    pub(super) fn of(&self, block: usize) -> &[u32] {
        &self.tokens[self.first[block] as usize..self.first[block + 1] as usize]
    }
}

/// Keys and values of consecutive tokens as panels.
pub(super) struct BlockKeys<const W: usize> {
    pub(super) k: Vec<Aligned<[[f32; W]; BLOCK_KEYS]>>,
    pub(super) v: Vec<Aligned<[[f32; W]; BLOCK_KEYS]>>,
    /// Positions; `i32::MAX` past the tokens.
    pub(super) position: [i32; BLOCK_KEYS],
    /// Slots in use, a multiple of [`KEY_STEP`]; those past the tokens are zero.
    pub(super) used: usize,
}

impl<const W: usize> BlockKeys<W> {
    pub(super) fn new(head_dim: usize) -> Self {
        let panels = || vec![Aligned([[0.0; W]; BLOCK_KEYS]); head_dim.div_ceil(W)];
        Self {
            k: panels(),
            v: panels(),
            position: [i32::MAX; BLOCK_KEYS],
            used: 0,
        }
    }

    /// Reads some tokens of a row.
    #[inline(always)]
    pub(super) fn load(
        &mut self,
        qkv: &[f32],
        shape: AttentionShape,
        row: usize,
        kv_head: usize,
        tokens: &Range<usize>,
    ) {
        let (d, heads) = (shape.head_dim, shape.num_heads);
        self.used = tokens.len().next_multiple_of(KEY_STEP);
        self.position.fill(i32::MAX);
        for (slot, token) in tokens.clone().enumerate() {
            self.position[slot] = token as i32;
        }
        let heads = [heads + kv_head, heads + shape.num_kv_heads + kv_head];
        for (head, panels) in heads.into_iter().zip([&mut self.k, &mut self.v]) {
            for (slot, token) in tokens.clone().enumerate() {
                let at = (row * shape.seq_len + token) * shape.token_len() + head * d;
                copy_columns(&qkv[at..at + d], slot, panels);
            }
            for slot in tokens.len()..self.used {
                copy_columns(&[], slot, panels);
            }
        }
    }
}

/// What one thread needs for one tile.
struct Scratch<const W: usize> {
    choosers: Choosers,
    q: RowPanels<W>,
    keys: BlockKeys<W>,
    scores: Aligned<[[f32; LANES]; BLOCK_KEYS]>,
    part: Vec<Aligned<[[f32; W]; LANES]>>,
    /// Per row of the tile.
    max: Vec<f32>,
    sum: Vec<f32>,
    /// `[rows, head_dim]`.
    o: Vec<f32>,
}

impl<const W: usize> Scratch<W> {
    fn new(head_dim: usize) -> Self {
        let columns = head_dim.div_ceil(W);
        Self {
            choosers: Choosers::default(),
            q: RowPanels::new(),
            keys: BlockKeys::new(head_dim),
            scores: Aligned([[0.0; LANES]; BLOCK_KEYS]),
            part: vec![Aligned([[0.0; W]; LANES]); columns],
            max: Vec::new(),
            sum: Vec::new(),
            o: Vec::new(),
        }
    }
}

/// Exact causal attention of each query over the tokens of its blocks.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - block_indices: `[batch, seq_len, num_kv_heads, num_selected_blocks]`, blocks counted from the document's first
///   token, none after the query's own, none twice; -1 for none
/// - o: `[batch, seq_len, num_heads, head_dim]`, lse: `[batch, num_heads, seq_len]`; written whole
///
/// # Panics
/// When lengths do not fit or a block lies after its query's tile.
pub fn nsa_selected_attention_forward(
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    documents: Documents<'_>,
    block_indices: &[i32],
    o: &mut [f32],
    lse: &mut [f32],
) {
    check(shape, blocks, qkv, documents, block_indices, o, lse);
    match panel_width(shape.head_dim) {
        16 => run::<16>(shape, blocks, qkv, documents, block_indices, o, lse),
        32 => run::<32>(shape, blocks, qkv, documents, block_indices, o, lse),
        _ => run::<64>(shape, blocks, qkv, documents, block_indices, o, lse),
    }
}

pub(super) fn check(
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    documents: Documents<'_>,
    block_indices: &[i32],
    o: &[f32],
    lse: &[f32],
) {
    blocks.check();
    documents.check(shape.batch, shape.seq_len);
    let tokens = shape.batch * shape.seq_len;
    assert_eq!(
        (qkv.len(), o.len(), lse.len()),
        (
            tokens * shape.token_len(),
            tokens * shape.num_heads * shape.head_dim,
            tokens * shape.num_heads
        ),
        "nsa_selected: qkv, o or lse has another size"
    );
    assert_eq!(
        block_indices.len(),
        tokens * shape.num_kv_heads * blocks.num_selected_blocks,
        "nsa_selected: block_indices is not [batch, seq_len, num_kv_heads, num_selected_blocks]"
    );
}

fn run<const W: usize>(
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    documents: Documents<'_>,
    block_indices: &[i32],
    mut o: &mut [f32],
    lse: &mut [f32],
) {
    let mut lse: Vec<&mut [f32]> = lse.chunks_exact_mut(shape.seq_len.max(1)).collect();
    let mut tasks = Vec::new();
    for (row, document, tokens) in document_tiles(shape, documents, tile_tokens) {
        let (o_tile, rest) = o.split_at_mut(tokens.len() * shape.num_heads * shape.head_dim);
        o = rest;
        let heads = &mut lse[row * shape.num_heads..(row + 1) * shape.num_heads];
        let lse_tile: Vec<&mut [f32]> = heads
            .iter_mut()
            .map(|head| {
                let (tile, rest) = std::mem::take(head).split_at_mut(tokens.len());
                *head = rest;
                tile
            })
            .collect();
        tasks.push(Task {
            row,
            document,
            tokens,
            o: o_tile,
            lse: lse_tile,
        });
    }
    let pool = Pool::new(Scratch::<W>::new, shape.head_dim);
    tasks.into_par_iter().with_max_len(1).for_each(|task| {
        pool.lend(|scratch| selected_tile(shape, blocks, qkv, block_indices, task, scratch));
    });
}

/// All heads of one tile, and the places for its results.
struct Task<'t> {
    row: usize,
    document: Range<usize>,
    tokens: Range<usize>,
    /// `[tokens, num_heads, head_dim]`.
    o: &'t mut [f32],
    /// Per head, `[tokens]`.
    lse: Vec<&'t mut [f32]>,
}

on_arch! {
    fn selected_tile<'t, 's; const W>(
        shape: AttentionShape, blocks: NsaBlocks, qkv: &'s [f32], block_indices: &'s [i32], task: Task<'t>,
        scratch: &'s mut Scratch<W>,
    ) -> () = selected_tile_simd;
}

#[inline(always)]
fn selected_tile_simd<S: Simd, const W: usize>(
    simd: S,
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    block_indices: &[i32],
    mut task: Task<'_>,
    scratch: &mut Scratch<W>,
) {
    for kv_head in 0..shape.num_kv_heads {
        one_head(simd, shape, blocks, qkv, block_indices, &task, kv_head, scratch);
        store(shape, kv_head, scratch, &mut task);
    }
}

/// Leaves the unnormalised output and the softmax state of one KV head's rows in the scratch.
#[inline(always)]
#[allow(
    clippy::too_many_arguments,
    reason = "what the tile is, what it reads, where it works"
)]
fn one_head<S: Simd, const W: usize>(
    simd: S,
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    block_indices: &[i32],
    task: &Task<'_>,
    kv_head: usize,
    scratch: &mut Scratch<W>,
) {
    let Task {
        row, document, tokens, ..
    } = task;
    let (n, d, m) = (shape.seq_len, shape.head_dim, shape.group_size());
    let block_len = blocks.select_block_size;
    let Scratch {
        choosers,
        q,
        keys: block_keys,
        scores,
        part,
        max,
        sum,
        o,
    } = scratch;
    let num_rows = tokens.len() * m;
    let num_blocks = (tokens.end - 1 - document.start) / block_len + 1;
    let first_token = row * n + tokens.start;
    choosers.read(tokens.len(), num_blocks, |token| {
        let at = (first_token + token) * shape.num_kv_heads + kv_head;
        &block_indices[at * blocks.num_selected_blocks..(at + 1) * blocks.num_selected_blocks]
    });
    max.clear();
    max.resize(num_rows, f32::NEG_INFINITY);
    sum.clear();
    sum.resize(num_rows, 0.0);
    o.clear();
    o.resize(num_rows * d, 0.0);

    for block in 0..num_blocks {
        let choosers = choosers.of(block);
        if choosers.is_empty() {
            continue;
        }
        let first = document.start + block * block_len;
        let end = (first + block_len).min(tokens.end);
        for first in (first..end).step_by(BLOCK_KEYS) {
            let keys = first..(first + BLOCK_KEYS).min(end);
            block_keys.load(qkv, shape, *row, kv_head, &keys);
            let BlockKeys { k, v, position, used } = &*block_keys;
            let used = *used;
            // Rows of the panel: token `choosers[i / m]`, head `i % m` of the group.
            let count = choosers.len() * m;
            for panel in (0..count).step_by(LANES) {
                let lanes = panel..(panel + LANES).min(count);
                let row_of = |i: usize| choosers[i / m] as usize * m + i % m;
                let q_rows = (0..lanes.len()).map(|lane| {
                    let i = panel + lane;
                    let token = first_token + choosers[i / m] as usize;
                    let at = token * shape.token_len() + (kv_head * m + i % m) * d;
                    &qkv[at..at + d]
                });
                q.load(q_rows, d, shape.softmax_scale);
                q.transpose();
                let mut positions = [-1; LANES];
                let mut state = Softmax::new();
                for (lane, i) in lanes.clone().enumerate() {
                    positions[lane] = (tokens.start + choosers[i / m] as usize) as i32;
                    state.max[lane] = max[row_of(i)];
                    state.sum[lane] = sum[row_of(i)];
                }
                // Tokens ascend, so the first row is the earliest.
                let masked = positions[0] < keys.end as i32 - 1 || used > keys.len();
                for (c, k) in k.iter().enumerate() {
                    multiply(simd, &k[..used], &q.transposed[c], &mut scores[..used], c > 0);
                }
                let shown = Shown {
                    positions: &positions,
                    key: &position[..used],
                    expire: &[i32::MAX; BLOCK_KEYS][..used],
                    delta: None,
                    base: &[0.0; LANES],
                    masked: masked || lanes.len() < LANES,
                };
                let mut rescale = Aligned([1.0; LANES]);
                online_softmax(simd, &shown, &mut scores[..used], &mut state, &mut rescale);
                for (part, v) in part.iter_mut().zip(v) {
                    *part = Aligned([[0.0; W]; LANES]);
                    multiply_transposed(simd, &scores[..used], &v[..used], part);
                }
                for (lane, i) in lanes.enumerate() {
                    let r = row_of(i);
                    max[r] = state.max[lane];
                    sum[r] = state.sum[lane];
                    let factor = rescale[lane];
                    for (o, part) in o[r * d..(r + 1) * d].chunks_mut(W).zip(&*part) {
                        for (o, part) in o.iter_mut().zip(&part[lane]) {
                            *o = *o * factor + part;
                        }
                    }
                }
            }
        }
    }
}

/// Normalises and writes the rows of one KV head.
#[inline(always)]
fn store<const W: usize>(shape: AttentionShape, kv_head: usize, scratch: &Scratch<W>, task: &mut Task<'_>) {
    let (d, m) = (shape.head_dim, shape.group_size());
    for (r, o) in scratch.o.chunks_exact(d).enumerate() {
        let (token, head) = (r / m, kv_head * m + r % m);
        let sum = scratch.sum[r];
        let empty = sum == 0.0;
        task.lse[head][token] = if empty {
            f32::NEG_INFINITY
        } else {
            scratch.max[r] + sum.ln()
        };
        let factor = if empty { 0.0 } else { 1.0 / sum };
        let at = (token * shape.num_heads + head) * d;
        for (to, x) in task.o[at..at + d].iter_mut().zip(o) {
            *to = x * factor;
        }
    }
}
