//! Attention over consecutive keys: dense, sliding windows, a bias on each key, sinks, and decoding.
use super::{Calls, EPSILON, ROW, SCALE, Token};
use crate::runtime::{DType, SumOrder};
use crate::{AttentionResult, AttentionShape, DecodeStep, TokenRotation};
use sieve_core::{FarKeys, KeepOLow};

/// A forward pass without a bias.
pub(in crate::specialisations) fn forward(calls: &mut Calls, shape: &AttentionShape) {
    let row = calls.row(shape, ROW);
    calls.note(row.qkv.attention_forward(&row.documents[0], None, SCALE, None));
}

/// Forward and backward passes without a bias, over whole documents and windows of them.
pub(in crate::specialisations) fn training(calls: &mut Calls, shape: &AttentionShape, sums: SumOrder) {
    calls.with_shares(sums, |calls| {
        for window in [None, Some(ROW / 4)] {
            let row = calls.row(shape, ROW);
            let [start, end] = &row.documents;
            let Some(result) = calls.note(row.qkv.attention_forward(start, window, SCALE, None)) else {
                continue;
            };
            calls.note(row.gradients(&result).attention_backward([start, end], window, None));
        }
    });
}

/// Any keys beyond a window of [`WINDOW`].
const FAR: FarKeys = FarKeys { sink_tokens: 64, distances: [WINDOW, ROW], num_bands: 1, first_band: 0 };
const WINDOW: usize = ROW / 4;

/// A forward pass over a window and keys beyond it.
pub(in crate::specialisations) fn far_forward(calls: &mut Calls, shape: &AttentionShape) {
    let row = calls.row(shape, ROW);
    calls.note(row.qkv.far_attention_forward(&row.documents[0], WINDOW, FAR, SCALE));
}

/// Forward and backward passes over a window and keys beyond it.
pub(in crate::specialisations) fn far_training(calls: &mut Calls, shape: &AttentionShape, sums: SumOrder) {
    calls.with_shares(sums, |calls| {
        let row = calls.row(shape, ROW);
        let [start, end] = &row.documents;
        if let Some(result) = calls.note(row.qkv.far_attention_forward(start, WINDOW, FAR, SCALE)) {
            calls.note(row.gradients(&result).far_attention_backward([start, end], WINDOW, FAR));
        }
    });
}

/// Forward and backward passes with a bias on each key, with and without the low bits of the output.
pub(in crate::specialisations) fn biased_training(calls: &mut Calls, shape: &AttentionShape, sums: SumOrder) {
    calls.with_shares(sums, |calls| {
        for o_low in [KeepOLow::Never, KeepOLow::Always] {
            let row = calls.row(shape, ROW);
            let [start, end] = &row.documents;
            let bias = calls.f32(&row.shape.per_key());
            let Some(result) = calls.note(row.qkv.attention_forward(start, None, SCALE, Some((&bias, o_low)))) else {
                continue;
            };
            calls.note(row.gradients(&result).attention_backward([start, end], None, Some(&bias)));
        }
    });
}

/// Sinks of training in one type: joined to an output of heads of `width` columns, and their gradient.
pub(in crate::specialisations) fn sinks(calls: &mut Calls, width: usize, dtype: DType) {
    let num_heads = 2;
    let o = calls.bf16(&[1, ROW, num_heads, width]);
    let result = AttentionResult { o: o.clone(), lse: calls.f32(&[1, num_heads, ROW]), o_low: None, base: None };
    let sinks = calls.tensor(&[num_heads], dtype);
    if let Some(result) = calls.note(result.with_sinks(&sinks)) {
        calls.note(result.sinks_gradient(&sinks, &o));
    }
}

/// Decoding: tokens that join the cache, and queries of a cache and of its blocks.
pub(in crate::specialisations) fn decoding(calls: &mut Calls, shape: &AttentionShape, has_sinks: bool) {
    // A short cache takes another tiling than a long one.
    for capacity in [ROW, 256] {
        tokens_that_join(calls, shape, DecodeStep::new(capacity / 2, SCALE), has_sinks, capacity);
    }
    let Some(token) = calls.token(shape, ROW) else {
        return;
    };
    let Token { shape, qkv, cache, length, scratch } = &token;
    let sinks = calls.bf16(&[shape.num_heads]);
    let step = DecodeStep { sinks: has_sinks.then_some(&sinks), ..DecodeStep::new(ROW / 2, SCALE) };
    calls.note(cache.attention_decode_cached(&qkv.q, length, step, scratch));
    // Chosen blocks take no sinks.
    if !has_sinks {
        let chosen = calls.i32(&[1, shape.num_kv_heads, 4]);
        calls.note(cache.attention_decode_chosen(&qkv.q, length, step, scratch, &chosen, 64));
    }
}

/// Decoding over a window and keys beyond it: tokens that join the cache.
pub(in crate::specialisations) fn far_decoding(calls: &mut Calls, shape: &AttentionShape, has_sinks: bool) {
    for capacity in [ROW, 256] {
        let far = DecodeStep { window: Some(WINDOW), far: Some(FAR), ..DecodeStep::new(capacity / 2, SCALE) };
        tokens_that_join(calls, shape, far, has_sinks, capacity);
    }
}

/// Tokens that join their caches, before and after their rotation.
fn tokens_that_join(calls: &mut Calls, shape: &AttentionShape, step: DecodeStep<'_>, has_sinks: bool, capacity: usize) {
    let Some(token) = calls.token(shape, capacity) else {
        return;
    };
    let Token { shape, qkv, cache, length, scratch } = &token;
    let sinks = calls.bf16(&[shape.num_heads]);
    let step = DecodeStep { sinks: has_sinks.then_some(&sinks), ..step };
    calls.note(cache.attention_decode(qkv, length, step, scratch));
    // Latent attention, whose heads of values are narrower, rotates in a kernel of its own.
    if shape.head_dim == shape.head_dim_v {
        let table = calls.f32(&[ROW, shape.head_dim / 2]);
        let weight = calls.bf16(&[shape.head_dim]);
        for norm in [None, Some(([&weight; 2], EPSILON))] {
            let rotation = TokenRotation { norm, tables: [&table; 2] };
            calls.note(cache.attention_decode_rotated(qkv, rotation, length, step, scratch));
        }
    }
}
