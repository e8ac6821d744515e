//! The tasks of the backward pass: each batch row and KV head is one group, whose tokens are cut into segments; dk and
//! dv of the segments are summed in order.

use std::ops::Range;

use pulp::Simd;
use sieve_core::AttentionShape;

use super::keys::Keys;
use crate::simd::on_arch;

/// Minimum number of tasks to aim for: where there are fewer groups than this, each is cut into several segments. A
/// constant, because the order of the sums must not depend on the number of threads.
pub(crate) const TARGET_TASKS: usize = 16;

/// Where the gradients of one batch row and KV head are written: vectors of the packed tensor, token by token.
#[derive(Default)]
pub(crate) struct GroupRows<'g> {
    pub(crate) dq: Vec<&'g mut [f32]>,
    pub(crate) dk: Vec<&'g mut [f32]>,
    pub(crate) dv: Vec<&'g mut [f32]>,
    /// Gradient of each key's bias; `None` without biases.
    pub(crate) d_delta: Option<&'g mut [f32]>,
}

/// Gradients of keys and values, summed over the queries of one segment.
pub(crate) struct KeySums {
    /// Position of the first key that has sums.
    pub(crate) first: usize,
    /// Gradient of the keys, `[keys, head_dim]`.
    pub(crate) dk: Vec<f32>,
    /// Gradient of the values, `[keys, head_dim_v]`.
    pub(crate) dv: Vec<f32>,
    /// Gradient of the bias, `[keys]`.
    pub(crate) d_delta: Vec<f32>,
}

/// Gives each group, `[batch * num_kv_heads]`, the slices of the gradients that it writes.
pub(crate) fn split_by_group<'g>(
    shape: AttentionShape,
    d_qkv: &'g mut [f32],
    d_delta: Option<&'g mut [f32]>,
) -> Vec<GroupRows<'g>> {
    let mut groups: Vec<GroupRows<'g>> = Vec::new();
    groups.resize_with(shape.batch * shape.num_kv_heads, GroupRows::default);
    for (token, packed) in d_qkv.chunks_exact_mut(shape.token_len()).enumerate() {
        let groups = &mut groups[token / shape.seq_len * shape.num_kv_heads..][..shape.num_kv_heads];
        let (q, kv) = packed.split_at_mut(shape.num_heads * shape.head_dim);
        let (k, v) = kv.split_at_mut(shape.num_kv_heads * shape.head_dim);
        for (head, x) in q.chunks_exact_mut(shape.head_dim).enumerate() {
            groups[head / shape.group_size()].dq.push(x);
        }
        for (x, group) in k.chunks_exact_mut(shape.head_dim).zip(groups.iter_mut()) {
            group.dk.push(x);
        }
        for (x, group) in v.chunks_exact_mut(shape.head_dim_v).zip(groups.iter_mut()) {
            group.dv.push(x);
        }
    }
    if let Some(d_delta) = d_delta {
        for (group, d_delta) in groups.iter_mut().zip(d_delta.chunks_exact_mut(shape.seq_len)) {
            group.d_delta = Some(d_delta);
        }
    }
    groups
}

/// Cuts the tokens of a group, at tile borders, into segments that read about equally many keys.
pub(crate) fn segments_of(shape: AttentionShape, keys: &Keys<'_>, row: usize, kv_head: usize) -> Vec<Range<usize>> {
    let (n, tile_tokens) = (shape.seq_len, keys.tile_tokens());
    let count = TARGET_TASKS.div_ceil(shape.batch * shape.num_kv_heads);
    let cost = |first: usize| keys.estimate(row, kv_head, first, (first + tile_tokens).min(n) - 1) as u64;
    let total: u64 = (0..n).step_by(tile_tokens).map(cost).sum();
    let mut segments = Vec::with_capacity(count);
    let (mut start, mut done) = (0, 0);
    for first in (0..n).step_by(tile_tokens) {
        done += cost(first);
        let end = (first + tile_tokens).min(n);
        // Segment s ends at the first tile border that reaches (s + 1) / count of the total cost.
        if end == n || done * count as u64 >= total * (segments.len() as u64 + 1) {
            segments.push(start..end);
            start = end;
        }
    }
    segments
}

on_arch! {
    pub(crate) fn write_sums<'s, 'g>(
        shape: AttentionShape, sums: &'s [KeySums], rows: &'s mut GroupRows<'g>,
    ) -> () = write_sums_simd;
}

/// Adds the sums of a group's segments, ranges of a row's tokens, in order, and writes dk, dv and d_delta of its keys.
#[inline(always)]
fn write_sums_simd<S: Simd>(_simd: S, shape: AttentionShape, sums: &[KeySums], rows: &mut GroupRows<'_>) {
    let (d, d_v) = (shape.head_dim, shape.head_dim_v);
    for (j, (dk, dv)) in rows.dk.iter_mut().zip(&mut rows.dv).enumerate() {
        dk.fill(0.0);
        dv.fill(0.0);
        // A segment has sums from key `sums.first` to its last token; other keys get nothing from it.
        for sums in sums {
            let Some(slot) = j.checked_sub(sums.first) else {
                continue;
            };
            let Some(x) = sums.dk.get(slot * d..(slot + 1) * d) else {
                continue;
            };
            add(dk, x);
            add(dv, &sums.dv[slot * d_v..(slot + 1) * d_v]);
        }
    }
    if let Some(d_delta) = &mut rows.d_delta {
        d_delta.fill(0.0);
        for sums in sums {
            add(&mut d_delta[sums.first..], &sums.d_delta);
        }
    }
}

#[inline(always)]
fn add(target: &mut [f32], x: &[f32]) {
    for (target, &x) in target.iter_mut().zip(x) {
        *target += x;
    }
}
