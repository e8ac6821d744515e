//! Dynamic mask attention: scores of keys, their choice, attention over lists of keys, halo keys, and decoding.
use super::{Calls, ROW, SCALE};
use crate::attention::AttentionShape;
use crate::dma::oracle::SUPER_BLOCK;
use crate::runtime::SumOrder;
use crate::{
    AfterCache, DmaSlots, KeyLists, MOST_ORDERED, PositionOrigin, Recency, ScoreBias, ScoresBackward, Selection,
    dma_halo_keys_backward, dma_halo_keys_forward, dma_last_kept, dma_select,
};
use sieve_core::{DmaWindow, KeepOLow, KernelPolicy, KeyOrder};

/// Keys that each query keeps.
const KEPT: usize = 1024;

/// Tokens of a long row: its keys are chosen in two passes, the first over the keys before each 8192nd token.
const LONG_ROW: usize = 32_768;

/// Scores of keys, with the slopes of their recency where there are any, and the scores' gradient.
pub(in crate::specialisations) fn scores(calls: &mut Calls, shape: &AttentionShape, slopes: &[f32]) {
    let row = calls.row(shape, ROW);
    let kv_heads = shape.num_kv_heads;
    let (w_dt, a) = (calls.f32(&[kv_heads, kv_heads * shape.head_dim_v]), calls.f32(&[kv_heads]));
    let origin = PositionOrigin::DocumentStart(&row.documents[0]);
    let recency = (!slopes.is_empty()).then_some(Recency { slopes, origin });
    let Some(scores) = calls.note(row.qkv.v.dma_ranks(&w_dt, &a, recency.as_ref())) else {
        return;
    };
    let backward = ScoresBackward { values: &row.qkv.v, w_dt: &w_dt, a: &a, x: &scores.x, dz: &scores.z };
    calls.note(backward.dma_scores_backward(&row.grads.v));
}

/// Scores with the biases of logits beside them, as callers of the C interface ask for them.
pub(in crate::specialisations) fn scores_with_bias(calls: &mut Calls, shape: &AttentionShape) {
    let row = calls.row(shape, ROW);
    let kv_heads = shape.num_kv_heads;
    let (w_dt, a) = (calls.f32(&[kv_heads, kv_heads * shape.head_dim_v]), calls.f32(&[kv_heads]));
    let recency = None;
    calls.note(row.qkv.v.dma_ranks_and_bias(&w_dt, &a, recency, ScoreBias::Exp));
}

/// The choice of keys in short and long rows, with a local window and without, and the keys that context parallelism
/// sends to later GPUs.
pub(in crate::specialisations) fn choice(calls: &mut Calls, shape: &AttentionShape) {
    for (seq_len, local_window_size) in [(ROW, 0), (LONG_ROW, 0), (LONG_ROW, KEPT / 2)] {
        let row = calls.row(shape, seq_len);
        let [start, end] = &row.documents;
        let rank = calls.f32(&row.shape.per_key());
        let window = DmaWindow { keep_window_size: KEPT, local_window_size };
        let Some(selection) = calls.note(dma_select(&rank, start, end, window)) else {
            continue;
        };
        calls.note(selection.dma_lists(start, end, KeyLists::TILE_QUERIES));
        // Under context parallelism: lists from an `expire` that other kernels made, and the keys that later GPUs see.
        calls.note(Selection::of_expire(&selection.expire, start, KEPT));
        let Some(kept) = calls.note(dma_last_kept(&selection.expire, KEPT)) else {
            continue;
        };
        let heads = row.shape.num_heads + 2 * row.shape.num_kv_heads;
        let packed = calls.bf16(&[1, seq_len, heads, row.shape.head_dim]);
        if let Some([keys, ranks]) = calls.note(dma_halo_keys_forward(&packed, &rank, &kept)) {
            calls.note(dma_halo_keys_backward([&packed, &rank], &kept, [&keys, &ranks]));
        }
    }
}

/// A forward pass over lists, with and without the low bits of the output.
pub(in crate::specialisations) fn forward(calls: &mut Calls, shape: &AttentionShape) {
    for o_low in [KeepOLow::Never, KeepOLow::Always] {
        let row = calls.row(shape, ROW);
        let delta = calls.f32(&row.shape.per_key());
        let lists = key_lists(calls, &row.shape);
        calls.note(row.qkv.dma_attention_forward(&delta, &lists, SCALE, o_low));
    }
}

/// Records the launches of training over key lists: forward and backward passes, with and without the low bits of the
/// output, with one thread block for each tile of keys and with two, where `sums` allows it.
pub(in crate::specialisations) fn training(calls: &mut Calls, shape: &AttentionShape, sums: SumOrder) {
    calls.with_shares(sums, |calls| {
        for o_low in [KeepOLow::Never, KeepOLow::Always] {
            let row = calls.row(shape, ROW);
            let delta = calls.f32(&row.shape.per_key());
            let lists = key_lists(calls, &row.shape);
            let Some(result) = calls.note(row.qkv.dma_attention_forward(&delta, &lists, SCALE, o_low)) else {
                continue;
            };
            calls.note(row.gradients(&result).dma_attention_backward(&delta, &lists));
        }
    });
}

/// Key lists of the sizes that the choice of keys makes.
fn key_lists(calls: &Calls, shape: &AttentionShape) -> KeyLists {
    let [batch, heads, seq_len] = shape.per_key();
    let [blocks, capacity, pair] = KeyLists::shape(seq_len, KEPT);
    let tile_queries = KeyLists::TILE_QUERIES;
    KeyLists {
        list: calls.i32(&[batch, heads, blocks, capacity, pair]),
        list_len: calls.i32(&[batch, heads, blocks]),
        tile_window: calls.i32(&[batch, heads, seq_len.div_ceil(tile_queries), 2]),
        tile_queries,
        queries: SUPER_BLOCK,
    }
}

/// Passes over whole rows, and a decoding step, that go through keys in one order: lists of a row and of new tokens
/// behind a cache, attention over them, and the step.
pub(in crate::specialisations) fn in_order(calls: &mut Calls, shape: &AttentionShape, bias: ScoreBias) {
    for kept in [KEPT, MOST_ORDERED] {
        let Some(token) = calls.token(shape, kept) else {
            return;
        };
        let qkv = token.qkv.under(KernelPolicy { keys: KeyOrder::Epochs, ..token.qkv.policy() });
        let slots = DmaSlots::new(qkv.q.tensor(), &token.shape, kept);
        let z = calls.f32(&[1, token.shape.num_kv_heads]);
        calls.note(slots.join_token(&qkv, &z, &token.length, bias));
        let has_attention = slots.has_one_order(&qkv);
        if has_attention {
            calls.note(slots.dma_decode_in_order(&qkv, &z, &token.length, SCALE, bias));
        }
        let row = calls.row(shape, 2 * kept);
        let [start, end] = &row.documents;
        let (rank, positions) = (calls.f32(&row.shape.per_key()), calls.i32(&row.shape.per_key()));
        let window = DmaWindow { keep_window_size: kept, local_window_size: kept / 8 };
        let Some(selection) = calls.note(dma_select(&rank, start, end, window)) else {
            return;
        };
        let after = AfterCache { positions: &positions, first_query: kept, first_position: kept };
        for after in [None, Some(after)] {
            let lists = calls.note(selection.dma_ordered_lists(&rank, start, window, after));
            if let Some(lists) = lists.filter(|_| has_attention) {
                calls.note(row.qkv.dma_attention_forward(&rank, &lists, SCALE, KeepOLow::Never));
            }
        }
    }
}

/// Decoding from a cache of a fixed size.
pub(in crate::specialisations) fn decoding(calls: &mut Calls, shape: &AttentionShape, bias: ScoreBias) {
    let Some(token) = calls.token(shape, KEPT) else {
        return;
    };
    let slots = DmaSlots::new(token.qkv.q.tensor(), &token.shape, KEPT);
    let z = calls.f32(&[1, token.shape.num_kv_heads]);
    calls.note(slots.dma_decode(&token.qkv, &z, &token.length, SCALE, bias, &token.scratch));
}
