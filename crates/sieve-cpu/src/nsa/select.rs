//! Which blocks each query attends to: scores of the pooled keys, or probabilities, per selected block.

use std::ops::Range;

use pulp::Simd;
use rayon::prelude::*;
use sieve_core::{BlockChoice, ChoiceRule, ForcedBlocks};

use super::NsaBlocks;
use super::compressed::document_tiles;
use crate::attention::panel::{Aligned, LANES, multiply};
use crate::attention::tile::{BLOCK_KEYS, RowPanels, copy_columns, panel_width};
use crate::attention::{AttentionShape, Documents, scratch::Pool};
use crate::simd::{exp, on_arch};

#[cfg(test)]
mod tests;

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

/// The blocks of a query whose own block is `own`, given the importance of the blocks `0..=own`: the forced ones, the
/// last first, then those of the largest importance, of equal ones the later. Ascending, then -1.
///
/// # Panics
/// When `importance` does not hold `own + 1` values.
pub fn choose_blocks(importance: &[f32], own: usize, forced: ForcedBlocks, chosen: &mut [i32]) {
    assert!(importance.len() > own, "choose_blocks: importance is not [own + 1]");
    let count = chosen.len().min(own + 1);
    let free = forced.free(own);
    let mut num = 0;
    for block in (free.end..=own).rev().chain(0..free.start.min(free.end)).take(count) {
        chosen[num] = block as i32;
        num += 1;
    }
    if num < count {
        let mut others: Vec<u32> = (free.start as u32..free.end as u32).collect();
        let best_first = |a: &u32, b: &u32| {
            // -0 is as large as +0.
            let [x, y] = [a, b].map(|block| importance[*block as usize] + 0.0);
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
    /// `[num_panels, blocks, LANES]`; of another rule than NSA's `[num_panels, pooled keys, LANES]`.
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

/// Blocks that each query chooses by its pooled keys; see [`BlockChoice`].
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`; only its queries are read
/// - keys: `[batch * num_slots * num_kv_heads, head_dim]`, pooled as [`super::nsa_mean_pool_forward`] does
/// - lse: the log-sum-exp of each query over the pooled keys, `[batch, num_heads, seq_len]`, where it is known; NSA's
///   rule needs it
/// - block_indices: `[batch, seq_len, choosers, num_selected_blocks]`, choosers of
///   [`BlockChoice::num_choosers`]: blocks counted from the document's first token, ascending, then -1 where fewer
///   exist; written whole
///
/// # Panics
/// When lengths do not fit.
pub fn choose_key_blocks(
    shape: AttentionShape,
    choice: BlockChoice,
    qkv: &[f32],
    documents: Documents<'_>,
    keys: &[f32],
    lse: Option<&[f32]>,
    block_indices: &mut [i32],
) {
    let blocks = choice.blocks;
    blocks.check();
    documents.check(shape.batch, shape.seq_len);
    let rows = shape.batch * blocks.num_slots(shape.seq_len) * shape.num_kv_heads;
    assert_eq!(
        keys.len(),
        rows * shape.head_dim,
        "choose_key_blocks: keys are not [rows, head_dim]"
    );
    let choosers = choice.num_choosers(shape.num_heads, shape.num_kv_heads);
    assert_eq!(
        block_indices.len(),
        shape.batch * shape.seq_len * choosers * blocks.num_selected_blocks,
        "choose_key_blocks: block_indices is not [batch, seq_len, choosers, num_selected_blocks]"
    );
    assert!(
        lse.is_some() || choice.rule != ChoiceRule::WeightedProbability,
        "choose_key_blocks: no log-sum-exp"
    );
    match panel_width(shape.head_dim) {
        16 => run::<16>(shape, choice, qkv, documents, keys, lse, block_indices),
        32 => run::<32>(shape, choice, qkv, documents, keys, lse, block_indices),
        _ => run::<64>(shape, choice, qkv, documents, keys, lse, block_indices),
    }
}

fn run<const W: usize>(
    shape: AttentionShape,
    choice: BlockChoice,
    qkv: &[f32],
    documents: Documents<'_>,
    keys: &[f32],
    lse: Option<&[f32]>,
    mut block_indices: &mut [i32],
) {
    let tile_tokens = (TILE_ROWS / shape.group_size()).max(1);
    let choosers = choice.num_choosers(shape.num_heads, shape.num_kv_heads);
    let per_token = choosers * choice.blocks.num_selected_blocks;
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
            pool.lend(|scratch| select_tile(shape, choice, qkv, keys, lse, row, document, tokens, chosen, scratch));
        });
}

on_arch! {
    fn select_tile<'t, 's; const W>(
        shape: AttentionShape, choice: BlockChoice, qkv: &'s [f32], keys: &'s [f32], lse: Option<&'s [f32]>,
        row: usize, document: Range<usize>, tokens: Range<usize>, chosen: &'t mut [i32],
        scratch: &'s mut Scratch<W>,
    ) -> () = select_tile_simd;
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn select_tile_simd<S: Simd, const W: usize>(
    simd: S,
    shape: AttentionShape,
    choice: BlockChoice,
    qkv: &[f32],
    keys: &[f32],
    lse: Option<&[f32]>,
    row: usize,
    document: Range<usize>,
    tokens: Range<usize>,
    chosen: &mut [i32],
    scratch: &mut Scratch<W>,
) {
    let (n, d, m) = (shape.seq_len, shape.head_dim, shape.group_size());
    let BlockChoice { blocks, rule, forced } = choice;
    let (l, s) = (blocks.compress_block_size, blocks.compress_stride);
    let scale = match rule {
        ChoiceRule::MeanKey | ChoiceRule::LargestScore => 1.0,
        ChoiceRule::WeightedProbability | ChoiceRule::LargestProbability => shape.softmax_scale,
    };
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
        q.load(rows, d, scale);
        q.transpose();
        let num_panels = num_rows.div_ceil(LANES);
        positions.clear();
        positions.resize(num_panels, [-1; LANES]);
        lse_panels.clear();
        lse_panels.resize(num_panels, Aligned([0.0; LANES]));
        for r in 0..num_rows {
            let (token, head) = (tokens.start + r / m, kv_head * m + r % m);
            positions[r / LANES][r % LANES] = (token - document.start) as i32;
            let lse = lse.map_or(0.0, |lse| lse[(row * shape.num_heads + head) * n + token]);
            // A row that sees nothing has no visible pair; 0 keeps its masked lanes finite.
            lse_panels[r / LANES][r % LANES] = if lse == f32::NEG_INFINITY { 0.0 } else { lse };
        }
        let per_panel = match rule {
            ChoiceRule::WeightedProbability => num_blocks,
            ChoiceRule::LargestProbability | ChoiceRule::MeanKey | ChoiceRule::LargestScore => num_keys,
        };
        importance.clear();
        importance.resize(num_panels * per_panel, Aligned([0.0; LANES]));
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
                let sums = &mut importance[panel * per_panel..(panel + 1) * per_panel];
                if rule != ChoiceRule::WeightedProbability {
                    for (slot, score) in scores[..count].iter().enumerate() {
                        *sums[first + slot] = *score;
                    }
                    continue;
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
        if rule == ChoiceRule::LargestProbability && num_keys > 0 {
            for (keys, positions) in importance.chunks_exact_mut(num_keys).zip(&*positions) {
                softmax_of_seen(simd, keys, positions, (l - 1) as i32, s as i32);
            }
        }
        let k = blocks.num_selected_blocks;
        let choosers = choice.num_choosers(shape.num_heads, shape.num_kv_heads);
        for token in 0..tokens.len() {
            let position = tokens.start + token - document.start;
            let own = position / blocks.select_block_size;
            let rows = token * m..(token + 1) * m;
            let at = |r: usize, column: usize| importance[r / LANES * per_panel + column][r % LANES];
            let at_token = |chooser: usize| (token * choosers + chooser) * k;
            of_query.clear();
            match rule {
                ChoiceRule::WeightedProbability => {
                    of_query.extend((0..=own).map(|block| rows.clone().map(|r| at(r, block)).sum::<f32>()));
                }
                ChoiceRule::LargestProbability => {
                    of_query.resize(own + 1, 0.0);
                    for c in 0..blocks.num_compressed_blocks(position + 1) {
                        let p = rows.clone().map(|r| at(r, c)).sum::<f32>();
                        for block in overlapped(blocks, c) {
                            if block <= own {
                                of_query[block] = of_query[block].max(p);
                            }
                        }
                    }
                }
                ChoiceRule::MeanKey | ChoiceRule::LargestScore => {
                    // One vector a block, its mean key, or one a token.
                    let per_block = blocks.select_block_size / s;
                    for (head, r) in rows.enumerate() {
                        let of_block = |block: usize| {
                            let keys = block * per_block..(block + 1) * per_block;
                            keys.fold(f32::NEG_INFINITY, |most, c| most.max(at(r, c)))
                        };
                        of_query.clear();
                        of_query.extend((0..own).map(of_block));
                        of_query.push(0.0);
                        let to = at_token(kv_head * m + head);
                        choose_blocks(of_query, own, forced, &mut chosen[to..to + k]);
                    }
                    continue;
                }
            }
            let to = at_token(kv_head);
            choose_blocks(of_query, own, forced, &mut chosen[to..to + k]);
        }
    }
}

/// Scores of all pooled keys of a panel to probabilities over those that a row has seen the end of; 0 for the others.
#[inline(always)]
fn softmax_of_seen<S: Simd>(
    simd: S,
    scores: &mut [Aligned<[f32; LANES]>],
    positions: &[i32; LANES],
    seen_from: i32,
    step: i32,
) {
    let at = S::as_simd_i32s(positions).0;
    let (none, zero) = (simd.splat_f32s(f32::NEG_INFINITY), simd.splat_f32s(0.0));
    let (mut largest, mut sum) = (Aligned([f32::NEG_INFINITY; LANES]), Aligned([0.0; LANES]));
    for (slot, row) in scores.iter().enumerate() {
        let key = simd.splat_i32s(seen_from + slot as i32 * step);
        let largest = S::as_mut_simd_f32s(&mut *largest).0;
        for ((largest, &x), &at) in largest.iter_mut().zip(S::as_simd_f32s(&**row).0).zip(at) {
            let seen = simd.less_than_or_equal_i32s(key, at);
            *largest = simd.max_f32s(*largest, simd.select_f32s(seen, x, none));
        }
    }
    // A row that has seen none keeps its masked lanes finite.
    largest
        .iter_mut()
        .filter(|x| **x == f32::NEG_INFINITY)
        .for_each(|x| *x = 0.0);
    for (slot, row) in scores.iter_mut().enumerate() {
        let key = simd.splat_i32s(seen_from + slot as i32 * step);
        let (row, sum) = (S::as_mut_simd_f32s(&mut **row).0, S::as_mut_simd_f32s(&mut *sum).0);
        for (((x, sum), &largest), &at) in row.iter_mut().zip(sum).zip(S::as_simd_f32s(&*largest).0).zip(at) {
            let seen = simd.less_than_or_equal_i32s(key, at);
            *x = simd.select_f32s(seen, exp(simd, simd.sub_f32s(*x, largest)), zero);
            *sum = simd.add_f32s(*sum, *x);
        }
    }
    let mut factor = Aligned([0.0; LANES]);
    for (factor, &sum) in factor.iter_mut().zip(sum.iter()) {
        *factor = if sum > 0.0 { 1.0 / sum } else { 0.0 };
    }
    for row in scores {
        let factor = S::as_simd_f32s(&*factor).0;
        for (x, &factor) in S::as_mut_simd_f32s(&mut **row).0.iter_mut().zip(factor) {
            *x = simd.mul_f32s(*x, factor);
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
