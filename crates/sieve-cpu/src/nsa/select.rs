//! The choice of blocks: each query scores pooled keys, and a block's importance comes from the scores of the pooled
//! keys that overlap it.

use std::ops::Range;

use rayon::prelude::*;
use sieve_core::{BlockChoice, ChoiceRule, ForcedBlocks};

use super::NsaBlocks;
use crate::attention::{Documents, ScaledShape};
use crate::reference::dot;

#[cfg(test)]
mod tests;

/// The number of strides that compressed block c and selected block J share. In NSA's eq. 9 this is the number of terms
/// (a, b), `0 <= a < l'/s`, `0 <= b < l/s`, with `J l'/s + a - b = c`.
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

/// Chooses `chosen.len()` of the blocks `0..=own`, where `own` is the query's own block: first the forced blocks, the
/// latest first, then the most important ones (of equally important blocks the later). Writes them in ascending order,
/// followed by -1 where there are fewer blocks.
///
/// # Panics
/// When `importance` does not hold `own + 1` values.
pub fn choose_blocks(importance: &[f32], own: usize, forced: ForcedBlocks, chosen: &mut [i32]) {
    assert!(importance.len() > own, "choose_blocks: importance is not [own + 1]");
    let count = chosen.len().min(own + 1);
    // The blocks that are not forced and compete by their importance.
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

/// The blocks that each query chooses by the pooled keys, in f64; see [`BlockChoice`].
///
/// # Shapes
/// - q: `[batch, seq_len, num_heads, head_dim]`
/// - keys: `[batch * num_slots * num_kv_heads, head_dim]`, each the mean of its block's keys
/// - block_indices: `[batch, seq_len, choosers, num_selected_blocks]` with [`BlockChoice::num_choosers`] choosers:
///   blocks counted from the document's first token, ascending, then -1 where there are fewer; written whole
///
/// # Panics
/// When lengths do not fit.
pub fn choose_key_blocks(
    shape: ScaledShape,
    choice: BlockChoice,
    q: &[f64],
    documents: Documents<'_>,
    keys: &[f64],
    block_indices: &mut [i32],
) {
    let blocks = choice.blocks;
    blocks.check();
    documents.check(shape.batch, shape.seq_len);
    let tokens = shape.batch * shape.seq_len;
    let rows = shape.batch * blocks.num_slots(shape.seq_len) * shape.num_kv_heads;
    assert_eq!(
        (q.len(), keys.len()),
        (tokens * shape.num_heads * shape.head_dim, rows * shape.head_dim),
        "choose_key_blocks: q is not [batch, seq_len, num_heads, head_dim] or keys are not [rows, head_dim]"
    );
    let choosers = choice.num_choosers(shape.num_heads, shape.num_kv_heads);
    let k = blocks.num_selected_blocks;
    assert_eq!(
        block_indices.len(),
        tokens * choosers * k,
        "choose_key_blocks: block_indices is not [batch, seq_len, choosers, num_selected_blocks]"
    );
    block_indices.par_chunks_exact_mut(k).enumerate().for_each(|(at, chosen)| {
        let (token, chooser) = (at / choosers, at % choosers);
        let start = documents.start[token] as usize;
        let position = token % shape.seq_len - start;
        let first_slot = token / shape.seq_len * blocks.num_slots(shape.seq_len) + blocks.first_slot(start);
        let scores = |head: usize| -> Vec<f64> {
            let q = &q[(token * shape.num_heads + head) * shape.head_dim..][..shape.head_dim];
            let kv_head = head / shape.group_size();
            let key = |c: usize| &keys[((first_slot + c) * shape.num_kv_heads + kv_head) * shape.head_dim..];
            let seen = 0..blocks.num_compressed_blocks(position + 1);
            seen.map(|c| dot(q, &key(c)[..shape.head_dim])).collect()
        };
        let own = position / blocks.select_block_size;
        let importance = importance(shape, choice, own, chooser, scores);
        choose_blocks(&importance, own, choice.forced, chosen);
    });
}

/// The blocks that the last token of each row's text chooses by pooled keys: the same as [`choose_key_blocks`] gives
/// that token among the others, because scores are the same f64 sums.
///
/// # Shapes
/// - q: `[batch, num_heads, head_dim]`
/// - keys: `[batch, num_kv_heads, keys, head_dim]` with a key for each pooled block of `num_tokens` tokens; where the
///   rule is [`ChoiceRule::SumOfHeads`], the last one may be missing, because a token always reads its own block
/// - returns: a list for each row and chooser, as [`choose_key_blocks`] writes it
///
/// # Panics
/// When lengths do not fit or there is no token.
pub fn choose_token_blocks(
    shape: ScaledShape,
    choice: BlockChoice,
    q: &[f32],
    keys: &[f32],
    num_tokens: usize,
) -> Vec<Vec<i32>> {
    let blocks = choice.blocks;
    blocks.check();
    let (d, lists) = (shape.head_dim, shape.batch * shape.num_kv_heads);
    let seen = blocks.num_compressed_blocks(num_tokens);
    let fits = q.len() == shape.batch * shape.num_heads * d && keys.len().is_multiple_of(lists * d);
    assert!(fits && num_tokens > 0, "choose_token_blocks: q or keys has the wrong size");
    let stored = keys.len() / (lists * d);
    let missing = usize::from(choice.rule == ChoiceRule::SumOfHeads);
    assert!(seen <= stored + missing, "choose_token_blocks: there are {stored} pooled keys, not {seen}");
    let choosers = choice.num_choosers(shape.num_heads, shape.num_kv_heads);
    let own = (num_tokens - 1) / blocks.select_block_size;
    let of_chooser = |at: usize| {
        let (row, chooser) = (at / choosers, at % choosers);
        let scores = |head: usize| -> Vec<f64> {
            let q = &q[(row * shape.num_heads + head) * d..][..d];
            let list = row * shape.num_kv_heads + head / shape.group_size();
            keys[list * stored * d..].chunks_exact(d).take(seen.min(stored)).map(|key| dot(q, key)).collect()
        };
        let mut chosen = vec![-1; blocks.num_selected_blocks];
        choose_blocks(&importance(shape, choice, own, chooser, scores), own, choice.forced, &mut chosen);
        chosen
    };
    (0..shape.batch * choosers).into_par_iter().map(of_chooser).collect()
}

/// Importance of the blocks `0..=own` for one chooser of a query: a query head, or by some rules a KV head, whose query
/// heads choose together. `scores(head)` is `q . k` of a query head with each pooled key whose tokens all come before
/// the query or end with it.
fn importance(
    shape: ScaledShape,
    choice: BlockChoice,
    own: usize,
    chooser: usize,
    scores: impl Fn(usize) -> Vec<f64>,
) -> Vec<f32> {
    let largest = |scores: &[f64]| scores.iter().fold(f64::NEG_INFINITY, |most, &x| x.max(most));
    let BlockChoice { blocks, rule, .. } = choice;
    if let ChoiceRule::MeanKey | ChoiceRule::LargestScore = rule {
        // One pooled key per block, its mean, or one per token. The own block is always chosen.
        let scores = scores(chooser);
        let of_block = scores.chunks_exact(blocks.select_block_size / blocks.compress_stride);
        return of_block.take(own).map(|scores| largest(scores) as f32).chain([0.0]).collect();
    }
    let group = shape.group_size();
    if rule == ChoiceRule::SumOfHeads {
        // One key per complete block. The own block is always chosen.
        let mut sums = vec![0.0; own + 1];
        for head in chooser * group..(chooser + 1) * group {
            sums.iter_mut().zip(scores(head)).for_each(|(sum, score)| *sum += score.max(0.0));
        }
        return sums.into_iter().map(|sum| sum as f32).collect();
    }
    let mut p = Vec::new();
    for head in chooser * group..(chooser + 1) * group {
        let scores = scores(head);
        p.resize(scores.len(), 0.0);
        let largest = largest(&scores);
        let exp = |x: &f64| ((x - largest) * f64::from(shape.softmax_scale)).exp();
        let sum: f64 = scores.iter().map(exp).sum();
        p.iter_mut().zip(&scores).for_each(|(p, x)| *p += exp(x) / sum);
    }
    let mut of_blocks = vec![0.0; own + 1];
    for (c, &p) in p.iter().enumerate() {
        for block in overlapped(blocks, c).take_while(|block| *block <= own) {
            of_blocks[block] = match rule {
                ChoiceRule::WeightedProbability => of_blocks[block] + overlap_weight(blocks, c, block) as f64 * p,
                _ => p.max(of_blocks[block]),
            };
        }
    }
    of_blocks.into_iter().map(|x| x as f32).collect()
}
