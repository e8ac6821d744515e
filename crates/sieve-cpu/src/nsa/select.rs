//! Which blocks each query attends to: probabilities of the compressed branch, added up per selected block.

use std::ops::Range;

use pulp::Simd;
use rayon::prelude::*;

use super::NsaBlocks;
use super::compressed::document_tiles;
use crate::attention::panel::{Aligned, LANES, multiply};
use crate::attention::tile::{BLOCK_KEYS, RowPanels, copy_columns, panel_width};
use crate::attention::{AttentionShape, Documents, scratch::Pool};
use crate::simd::{exp, on_arch};

/// Query rows (token and head of the group) of one tile.
const TILE_ROWS: usize = 192;

/// How often compressed block c counts for selected block J: the (a, b) with `0 <= a < l'/s`, `0 <= b < l/s` and
/// `J l'/s + a - b = c`, which is the number of strides the two share.
pub fn overlap_weight(blocks: NsaBlocks, c: usize, block: usize) -> usize {
    let per_select = (blocks.select_block_size / blocks.compress_stride) as i64;
    let per_compress = (blocks.compress_block_size / blocks.compress_stride) as i64;
    let offset = c as i64 - block as i64 * per_select;
    let high = (per_select - 1).min(offset + per_compress - 1);
    let low = offset.max(0);
    (high - low + 1).max(0) as usize
}

/// The selected blocks that share a stride with compressed block c.
fn overlapped(blocks: NsaBlocks, c: usize) -> Range<usize> {
    let per_select = blocks.select_block_size / blocks.compress_stride;
    let per_compress = blocks.compress_block_size / blocks.compress_stride;
    c / per_select..(c + per_compress - 1) / per_select + 1
}

/// The blocks of a query whose own block is `own`, given the importance of the blocks `0..=own`: its own, the one
/// before, block 0, then the largest, of equal ones the later. Ascending, then -1.
///
/// # Panics
/// When `importance` does not hold `own + 1` values.
pub fn choose_blocks(importance: &[f32], own: usize, chosen: &mut [i32]) {
    assert!(importance.len() > own, "choose_blocks: importance is not [own + 1]");
    let count = chosen.len().min(own + 1);
    let forced = [own, own.saturating_sub(1), 0];
    let mut num = 0;
    for (n, &block) in forced.iter().enumerate() {
        if num < count && !forced[..n].contains(&block) {
            chosen[num] = block as i32;
            num += 1;
        }
    }
    if num < count {
        let mut others: Vec<u32> = (1..own.saturating_sub(1) as u32).collect();
        let best_first = |a: &u32, b: &u32| {
            let (x, y) = (importance[*a as usize], importance[*b as usize]);
            y.total_cmp(&x).then(b.cmp(a))
        };
        let needed = count - num;
        if needed < others.len() {
            others.select_nth_unstable_by(needed - 1, best_first);
        }
        for (chosen, block) in chosen[num..count].iter_mut().zip(others) {
            *chosen = block as i32;
        }
    }
    chosen[..count].sort_unstable();
    chosen[count..].fill(-1);
}

/// What one thread needs for one tile.
struct Scratch<const W: usize> {
    q: RowPanels<W>,
    k: Vec<Aligned<[[f32; W]; BLOCK_KEYS]>>,
    scores: Aligned<[[f32; LANES]; BLOCK_KEYS]>,
    positions: Vec<[i32; LANES]>,
    lse: Vec<Aligned<[f32; LANES]>>,
    /// `[num_panels, blocks, LANES]`.
    importance: Vec<Aligned<[f32; LANES]>>,
    of_query: Vec<f32>,
}

impl<const W: usize> Scratch<W> {
    fn new(head_dim: usize) -> Self {
        Self {
            q: RowPanels::new(),
            k: vec![Aligned([[0.0; W]; BLOCK_KEYS]); head_dim.div_ceil(W)],
            scores: Aligned([[0.0; LANES]; BLOCK_KEYS]),
            positions: Vec::new(),
            lse: Vec::new(),
            importance: Vec::new(),
            of_query: Vec::new(),
        }
    }
}

/// Writes `block_indices` from the queries, the compressed keys and the branch's log-sum-exp.
pub(super) fn select(
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    documents: Documents<'_>,
    keys: &[f32],
    lse: &[f32],
    block_indices: &mut [i32],
) {
    assert_eq!(
        block_indices.len(),
        shape.batch * shape.seq_len * shape.num_kv_heads * blocks.num_selected_blocks,
        "nsa: block_indices is not [batch, seq_len, num_kv_heads, num_selected_blocks]"
    );
    match panel_width(shape.head_dim) {
        16 => run::<16>(shape, blocks, qkv, documents, keys, lse, block_indices),
        32 => run::<32>(shape, blocks, qkv, documents, keys, lse, block_indices),
        _ => run::<64>(shape, blocks, qkv, documents, keys, lse, block_indices),
    }
}

fn run<const W: usize>(
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    documents: Documents<'_>,
    keys: &[f32],
    lse: &[f32],
    mut block_indices: &mut [i32],
) {
    let tile_tokens = (TILE_ROWS / shape.group_size()).max(1);
    let per_token = shape.num_kv_heads * blocks.num_selected_blocks;
    let mut tasks = Vec::new();
    for (row, document, tokens) in document_tiles(shape, documents, |_| tile_tokens) {
        let (chosen, rest) = block_indices.split_at_mut(tokens.len() * per_token);
        block_indices = rest;
        tasks.push((row, document, tokens, chosen));
    }
    let pool = Pool::new(Scratch::<W>::new, shape.head_dim);
    tasks
        .into_par_iter()
        .with_max_len(1)
        .for_each(|(row, document, tokens, chosen)| {
            pool.lend(|scratch| select_tile(shape, blocks, qkv, keys, lse, row, document, tokens, chosen, scratch));
        });
}

on_arch! {
    fn select_tile<'t, 's; const W>(
        shape: AttentionShape, blocks: NsaBlocks, qkv: &'s [f32], keys: &'s [f32], lse: &'s [f32],
        row: usize, document: Range<usize>, tokens: Range<usize>, chosen: &'t mut [i32],
        scratch: &'s mut Scratch<W>,
    ) -> () = select_tile_simd;
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn select_tile_simd<S: Simd, const W: usize>(
    simd: S,
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    keys: &[f32],
    lse: &[f32],
    row: usize,
    document: Range<usize>,
    tokens: Range<usize>,
    chosen: &mut [i32],
    scratch: &mut Scratch<W>,
) {
    let (n, d, m) = (shape.seq_len, shape.head_dim, shape.group_size());
    let (l, s) = (blocks.compress_block_size, blocks.compress_stride);
    let first_slot = row * blocks.num_slots(n) + blocks.first_slot(document.start);
    // Positions below count from the document's first token.
    let last = tokens.end - 1 - document.start;
    let num_keys = blocks.num_compressed_blocks(last + 1);
    let num_blocks = last / blocks.select_block_size + 1;
    let columns = d.div_ceil(W);
    for kv_head in 0..shape.num_kv_heads {
        let Scratch {
            q,
            k,
            scores,
            positions,
            lse: lse_panels,
            importance,
            of_query,
        } = &mut *scratch;
        let rows = (0..tokens.len() * m).map(|r| {
            let token = row * n + tokens.start + r / m;
            let at = token * shape.token_len() + (kv_head * m + r % m) * d;
            &qkv[at..at + d]
        });
        let num_rows = rows.len();
        q.load(rows, d, shape.softmax_scale);
        q.transpose();
        let num_panels = num_rows.div_ceil(LANES);
        positions.clear();
        positions.resize(num_panels, [-1; LANES]);
        lse_panels.clear();
        lse_panels.resize(num_panels, Aligned([0.0; LANES]));
        for r in 0..num_rows {
            let (token, head) = (tokens.start + r / m, kv_head * m + r % m);
            positions[r / LANES][r % LANES] = (token - document.start) as i32;
            let lse = lse[(row * shape.num_heads + head) * n + token];
            // A row that sees nothing has no visible pair; 0 keeps its masked lanes finite.
            lse_panels[r / LANES][r % LANES] = if lse == f32::NEG_INFINITY { 0.0 } else { lse };
        }
        importance.clear();
        importance.resize(num_panels * num_blocks, Aligned([0.0; LANES]));
        for first in (0..num_keys).step_by(BLOCK_KEYS) {
            let count = (num_keys - first).min(BLOCK_KEYS);
            for slot in 0..count {
                let at = ((first_slot + first + slot) * shape.num_kv_heads + kv_head) * d;
                copy_columns(&keys[at..at + d], slot, k);
            }
            // Slots beyond `count` hold earlier keys; nothing below reads their scores.
            let used = count.next_multiple_of(crate::attention::panel::KEY_STEP);
            for panel in 0..num_panels {
                for (c, k) in k.iter().enumerate() {
                    let q = &q.transposed[panel * columns + c];
                    multiply(simd, &k[..used], q, &mut scores[..used], c > 0);
                }
                let seen_from = (first * s + l - 1) as i32;
                probabilities(
                    simd,
                    &mut scores[..count],
                    &positions[panel],
                    &lse_panels[panel],
                    seen_from,
                    s as i32,
                );
                let sums = &mut importance[panel * num_blocks..(panel + 1) * num_blocks];
                for (slot, p) in scores[..count].iter().enumerate() {
                    let c = first + slot;
                    for block in overlapped(blocks, c) {
                        if block < num_blocks {
                            let weight = overlap_weight(blocks, c, block) as f32;
                            add_scaled(simd, &mut sums[block], p, weight);
                        }
                    }
                }
            }
        }
        for token in 0..tokens.len() {
            let own = (tokens.start + token - document.start) / blocks.select_block_size;
            of_query.clear();
            of_query.extend((0..=own).map(|block| {
                (token * m..(token + 1) * m)
                    .map(|r| importance[r / LANES * num_blocks + block][r % LANES])
                    .sum::<f32>()
            }));
            let k = blocks.num_selected_blocks;
            let at = (token * shape.num_kv_heads + kv_head) * k;
            choose_blocks(of_query, own, &mut chosen[at..at + k]);
        }
    }
}

/// Scores to probabilities: `exp(score - lse)` where the key's last token, `seen_from + slot * step`, is not after the
/// row, else 0.
#[inline(always)]
fn probabilities<S: Simd>(
    simd: S,
    scores: &mut [[f32; LANES]],
    positions: &[i32; LANES],
    lse: &[f32; LANES],
    seen_from: i32,
    step: i32,
) {
    let positions = S::as_simd_i32s(positions).0;
    let lse = S::as_simd_f32s(lse).0;
    let zero = simd.splat_f32s(0.0);
    for (slot, row) in scores.iter_mut().enumerate() {
        let key = simd.splat_i32s(seen_from + slot as i32 * step);
        let row = S::as_mut_simd_f32s(row).0;
        for ((x, &at), &lse) in row.iter_mut().zip(positions).zip(lse) {
            let seen = simd.less_than_or_equal_i32s(key, at);
            let p = exp(simd, simd.sub_f32s(*x, lse));
            *x = simd.select_f32s(seen, p, zero);
        }
    }
}

#[inline(always)]
fn add_scaled<S: Simd>(simd: S, sum: &mut [f32; LANES], p: &[f32; LANES], weight: f32) {
    let weight = simd.splat_f32s(weight);
    let sum = S::as_mut_simd_f32s(sum).0;
    for (sum, &p) in sum.iter_mut().zip(S::as_simd_f32s(p).0) {
        *sum = simd.mul_add_e_f32s(weight, p, *sum);
    }
}
