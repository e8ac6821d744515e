//! Selectors: the choice of keys, attention under its mask and the mask's gradients, and decoding.
use super::{Calls, ROW, SCALE};
use crate::attention::{AttentionShape, DecodeScratch, DecodeStep, TileLists};
use crate::runtime::SumOrder;
use crate::{DmaSlots, SelectorStep};
use sieve_core::{
    BlockScores, BlockSelection, CallShape, HeavyKeys, KeepBlocks, KeyMask, KeyScores, ProbeCorrection, SlotOrder,
    TokenKeys,
};

/// Rows from one probe, a query with dense attention, to the next.
const GAMMA: usize = 16;

/// A prefill by each method, attention under its mask, and decoding. Probes score blocks of each of these sizes.
pub(in crate::specialisations) fn attention(calls: &mut Calls, shape: &AttentionShape, probed_blocks: &[usize]) {
    let row = calls.row(shape, ROW);
    let call = CallShape::new([ROW, ROW], [shape.num_heads, shape.num_kv_heads], shape.head_dim);
    for selection in selections(call, probed_blocks) {
        if let Some(chosen) = calls.note(row.qkv.select_blocks(&selection)) {
            calls.note(row.qkv.sparse_attention_forward(&chosen.mask, SCALE));
        }
    }
    // A mask of tiles alone, as the host makes it.
    let mask = plain_mask(calls, call, [64, 64]);
    if let Some(result) = calls.note(row.qkv.sparse_attention_forward(&mask, SCALE)) {
        let correction = ProbeCorrection { gamma: GAMMA, replaces_only: false };
        calls.note(row.qkv.correct_by_probes(&result.o, None, correction, 0..0, SCALE));
    }
    // The keys that the last queries, or all, attended to most.
    let lse = calls.f32(&[1, shape.num_heads, ROW]);
    for num_queries in [64, ROW] {
        let call = CallShape { num_queries, ..call };
        let selection = BlockSelection::new(call, 1, BlockScores::Logits, KeepBlocks::Top(256));
        let heavy = HeavyKeys { selection, last: 32, width: 7, by_largest: true, slots: None };
        calls.note(row.qkv.keep_heavy_keys(&heavy, &lse));
    }
    decoding(calls, shape);
}

/// A selection for each way in which the methods of `sieve-select/src/prefill` choose blocks.
fn selections(call: CallShape, probed_blocks: &[usize]) -> Vec<BlockSelection> {
    let by_mass = |block, scores| BlockSelection::new(call, block, scores, KeepBlocks::Mass(0.9));
    let means = |variances| BlockScores::Means { variances };
    let cells = BlockScores::Cells { stride: 8, reversed: true, norm: 1.0 };
    let forced = {
        let mut selection = by_mass(128, cells);
        selection.keep.counts_own = true;
        selection
    };
    let small_tiles = {
        let mut selection = by_mass(128, BlockScores::LargestOfGroups(4));
        selection.keep.tile = 32;
        selection
    };
    let ordered = |scores, keys, moves_queries| {
        let order = SlotOrder { segment: 256, keys: Some(keys), moves_queries, keeps_first: true };
        BlockSelection { order: Some(order), ..by_mass(128, scores) }
    };
    let tall_tiles = |block, scores| {
        let mut selection = by_mass(block, scores);
        selection.scores.query_block = 128;
        selection
    };
    let lines = BlockScores::Lines { rows: 64, columns: [100, 4], diagonals: [200, 100] };
    let mut all = vec![
        by_mass(64, means(0.0)),
        by_mass(128, means(1.0)),
        tall_tiles(64, means(0.0)),
        forced,
        small_tiles,
        ordered(cells, KeyScores::Attention(128), false),
        ordered(means(0.0), KeyScores::Length, true),
        by_mass(64, lines),
        by_mass(128, BlockScores::Patterns { gamma: 0.9, tau: 0.1, blocks: [8, 16] }),
    ];
    let probes = BlockScores::Probes { gamma: GAMMA, chosen: [16, 8] };
    all.extend(probed_blocks.iter().map(|&block| tall_tiles(block, probes)));
    all
}

/// A mask of these query and key tiles alone.
fn plain_mask(calls: &Calls, call: CallShape, [query_tile, key_tile]: [usize; 2]) -> KeyMask<crate::CudaTensor> {
    let mut selection = BlockSelection::new(call, key_tile, BlockScores::Means { variances: 0.0 }, KeepBlocks::Top(4));
    selection.scores.query_block = query_tile;
    let layout = selection.layout();
    let num_words = layout.places.num_words();
    layout.map(|()| calls.i32(&[num_words]))
}

/// Forward and backward passes under a mask of tiles. Lists have parts in short rows alone.
pub(in crate::specialisations) fn training(calls: &mut Calls, shape: &AttentionShape, sums: SumOrder) {
    const SHORT_ROW: usize = 128;
    calls.with_shares(sums, |calls| {
        let tokens = if calls.policy.blocks_per_tile == Some(1) { ROW } else { SHORT_ROW };
        let call = CallShape::new([tokens, tokens], [shape.num_heads, shape.num_kv_heads], shape.head_dim);
        let row = calls.row(shape, tokens);
        let mask = plain_mask(calls, call, [64, 64]);
        let Some(result) = calls.note(row.qkv.sparse_attention_forward(&mask, SCALE)) else {
            return;
        };
        let words = calls.i32(&[shape.num_kv_heads * ROW]);
        let lists = TileLists { words: &words, head_shares: 1 };
        calls.note(row.gradients(&result).sparse_attention_backward(&mask, lists));
    });
}

/// Notes the kernels of a decoding step under selectors, without running one: a step that evicts the key with the least
/// attention, and steps that read the first and last keys, some pages, or the keys with the largest logits.
fn decoding(calls: &mut Calls, shape: &AttentionShape) {
    let capacity = 2 * ROW;
    let Some(token) = calls.token(shape, capacity) else {
        return;
    };
    let slots = DmaSlots::new(token.qkv.q.tensor(), &token.shape, ROW);
    calls.note(slots.heavy_decode(&token.qkv, &token.length, ROW, SCALE, &token.scratch));
    let page = 16;
    let bounds = calls.f32(&[1, shape.num_kv_heads, capacity / page, 2 * shape.head_dim]);
    let start = calls.i32(&[1, 1]);
    for keys in [TokenKeys::Ends { first: 4, last: 512 }, TokenKeys::Pages { page, count: 32 }, TokenKeys::Largest(512)]
    {
        let (attended, num_keys) = SelectorStep::scratch(keys, token.shape, capacity);
        let Some(scratch) = calls.note(DecodeScratch::new(token.qkv.q.tensor(), attended, num_keys)) else {
            continue;
        };
        let choice = SelectorStep { length: &token.length, start: &start, keys, bounds: Some(&bounds) };
        let step = DecodeStep::new(ROW, SCALE);
        calls.note(token.cache.selector_decode(&token.qkv, step, choice, &scratch));
    }
}
