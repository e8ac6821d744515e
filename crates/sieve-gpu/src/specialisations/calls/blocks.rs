//! Attention over chosen blocks of keys: NSA's branches, the rules that choose blocks, blocks that a caller chose, an
//! indexer's gradient, and decoding.
use super::{Calls, EPSILON, ROW, SCALE};
use crate::attention::{AttentionShape, DecodeScratch, DecodeStep, KvCache};
use crate::runtime::SumOrder;
use crate::step::linear_in_order;
use crate::{
    AttendedBlocks, BlocksWithLocal, IndexGradient, IndexedToken, NsaToken, PackedGradient, PooledStep, Qkv,
    SelectedBlocks, TokenRotation, choose_by_scores, nsa_blocks, nsa_blocks_backward, nsa_gates, nsa_gates_backward,
    nsa_mean_pool, nsa_mean_pool_backward,
};
use sieve_core::{BlockChoice, ChoiceRule, ForcedBlocks, KernelPolicy, KeyOrder, LocalBlocks, NsaBlocks};

/// The usual sizes of blocks.
const BLOCKS: NsaBlocks = NsaBlocks::PUBLISHED;

/// Tokens of a cache whose choice of blocks takes a thread block for each query.
const LONG_CACHE: usize = 1 << 17;

/// The rules, apart from NSA's, by which kernels choose blocks.
const RULES: [ChoiceRule; 3] = [ChoiceRule::LargestProbability, ChoiceRule::MeanKey, ChoiceRule::LargestScore];

/// How queries choose blocks by a rule.
fn choice(rule: ChoiceRule) -> BlockChoice {
    let blocks = match rule {
        // Keys are scored one by one, without means.
        ChoiceRule::LargestScore => NsaBlocks { compress_block_size: 1, compress_stride: 1, ..BLOCKS },
        _ => BLOCKS,
    };
    BlockChoice { blocks, rule, forced: ForcedBlocks::NSA }
}

/// The shape of the heads that choose blocks by a rule: the layer's, or an indexer's.
fn choosing_heads(shape: &AttentionShape, choice: BlockChoice) -> AttentionShape {
    let [num_heads, num_kv_heads] = choice.scored_heads([shape.num_heads, shape.num_kv_heads]);
    AttentionShape { num_heads, num_kv_heads, ..*shape }
}

/// Forward and backward passes of all branches, with the choice of blocks.
pub(in crate::specialisations) fn training(calls: &mut Calls, shape: &AttentionShape, sums: SumOrder) {
    calls.with_shares(sums, |calls| {
        call_compressed(calls, shape);
        call_selected(calls, shape);
        call_index_gradient(calls, shape);
    });
    call_choices(calls, shape, KeyOrder::Leaving);
    call_gates(calls, shape);
}

/// Compression by an MLP's blocks or by means, attention over compressed blocks, and their gradients.
fn call_compressed(calls: &mut Calls, shape: &AttentionShape) {
    let row = calls.row(shape, ROW);
    let bounds = row.documents.each_ref();
    let positions = calls.bf16(&[BLOCKS.compress_block_size, shape.head_dim]);
    let Qkv { q, k, v } = &row.qkv;
    let heads = shape.num_heads + 2 * shape.num_kv_heads;
    let packed = PackedGradient { dims: [1, ROW, heads, shape.head_dim], num_kv_heads: shape.num_kv_heads };
    if let Some(y) = calls.note(nsa_blocks([k, v], [&positions; 2], bounds, BLOCKS)) {
        calls.note(nsa_blocks_backward(packed, bounds, BLOCKS, &y));
    }
    let Some(pooled) = calls.note(nsa_mean_pool([k, v], bounds, BLOCKS)) else {
        return;
    };
    calls.note(nsa_mean_pool_backward(packed, bounds, BLOCKS, &pooled));
    let forward = q.nsa_compressed_attention_forward(bounds, &pooled, BLOCKS, SCALE);
    if let Some((result, _)) = calls.note(forward) {
        let backward = q.nsa_compressed_attention_backward(bounds, &pooled, BLOCKS, SCALE, &result, &row.d_o);
        calls.note(backward);
    }
}

/// Attention over the chosen blocks, and over blocks that a caller chose, and its gradients.
fn call_selected(calls: &mut Calls, shape: &AttentionShape) {
    let row = calls.row(shape, ROW);
    let bounds = row.documents.each_ref();
    let (per_query, size) = ([1, ROW, shape.num_kv_heads], BLOCKS.select_block_size);
    let indices = calls.i32(&[1, ROW, shape.num_kv_heads, BLOCKS.num_selected_blocks]);
    for in_pairs in [false, true] {
        let attended = AttendedBlocks { indices: &indices, size, in_pairs };
        let forward = row.qkv.nsa_selected_attention_forward(bounds, attended, SCALE);
        if let Some((result, lists)) = calls.note(forward) {
            calls.note(row.gradients(&result).nsa_selected_attention_backward(bounds, attended, &lists));
        }
    }
    let local = LocalBlocks { size, count: BLOCKS.num_selected_blocks / 2 };
    let blocks = BlocksWithLocal { indices: &indices, size, local };
    let forward = row.qkv.local_and_selected_attention_forward(bounds, blocks, SCALE);
    if let Some((result, lists)) = calls.note(forward) {
        calls.note(row.gradients(&result).local_and_selected_attention_backward(bounds, blocks, &lists));
    }
    let counts = calls.i32(&per_query);
    for counts in [None, Some(&counts)] {
        let given = SelectedBlocks { indices: &indices, counts, block: size };
        for wants_sums in [false, true] {
            calls.note(row.qkv.selected_attention_forward(bounds, given, SCALE, wants_sums));
        }
    }
}

/// The gradient of an indexer's loss, which Hopper devices have a kernel for.
fn call_index_gradient(calls: &mut Calls, shape: &AttentionShape) {
    let row = calls.row(shape, ROW);
    let bounds = row.documents.each_ref();
    let indices = calls.i32(&[1, ROW, shape.num_kv_heads, BLOCKS.num_selected_blocks]);
    let index = calls.bf16(&[1, ROW, shape.num_kv_heads + 2, shape.head_dim]);
    for in_pairs in [false, true] {
        let blocks = AttendedBlocks { indices: &indices, size: BLOCKS.select_block_size, in_pairs };
        let forward = row.qkv.nsa_selected_attention_forward(bounds, blocks, SCALE);
        let Some((result, lists)) = calls.note(forward) else {
            return;
        };
        let queries_and_keys = [&row.qkv.q, &row.qkv.k];
        let call =
            IndexGradient { queries_and_keys, index: &index, lse: &result.lse, blocks, lists: &lists, weight: 1.0 };
        calls.note(call.index_gradient(bounds, SCALE));
    }
}

/// The choice of blocks by each rule that has kernels of its own, and by scores that a GEMM computed.
fn call_choices(calls: &mut Calls, shape: &AttentionShape, keys: KeyOrder) {
    for choice in RULES.map(choice) {
        let row = calls.row(&choosing_heads(shape, choice), ROW);
        let rows = choice.blocks.num_slots(ROW) * row.shape.num_kv_heads;
        let pooled = calls.bf16(&[2, rows, shape.head_dim]);
        let qkv = row.qkv.under(KernelPolicy { keys, ..row.qkv.policy() });
        calls.note(qkv.q.choose_key_blocks(row.documents.each_ref(), &pooled, choice, SCALE));
    }
    let importance = calls.f32(&[1, 1, ROW, ROW.div_ceil(BLOCKS.select_block_size)]);
    let (start, indices) = (calls.i32(&[1, ROW]), calls.i32(&[1, ROW, 1, BLOCKS.num_selected_blocks]));
    calls.note(choose_by_scores(&importance, &start, &indices, BLOCKS.select_block_size, ForcedBlocks::NSA, 0));
}

/// NSA's gates of the three branches, and their gradients.
fn call_gates(calls: &mut Calls, shape: &AttentionShape) {
    let branch = calls.bf16(&[1, ROW, shape.num_heads, shape.head_dim]);
    let (logits, bias) = (calls.bf16(&[1, ROW, 3 * shape.num_heads]), calls.f32(&[3 * shape.num_heads]));
    calls.note(nsa_gates([&branch; 3], &logits, &bias));
    calls.note(nsa_gates_backward([&branch; 3], &logits, &bias, &branch));
}

/// Decoding: NSA's three branches, and chosen blocks by each rule, in short and long caches.
pub(in crate::specialisations) fn decoding(calls: &mut Calls, shape: &AttentionShape) {
    for capacity in [ROW, LONG_CACHE] {
        decode_three_branches(calls, shape, capacity, SumOrder::Any);
        for choice in RULES.map(choice) {
            decode_by_choice(calls, shape, choice, capacity, SumOrder::Any);
        }
    }
}

/// A decoding step with the bits of whole rows, and the choice of whole rows, with NSA's compressed branch, in that
/// order.
pub(in crate::specialisations) fn in_order(calls: &mut Calls, shape: &AttentionShape) {
    for capacity in [ROW, LONG_CACHE] {
        decode_three_branches(calls, shape, capacity, SumOrder::Fixed);
        for choice in RULES.map(choice) {
            decode_by_choice(calls, shape, choice, capacity, SumOrder::Fixed);
        }
    }
    call_choices(calls, shape, KeyOrder::Epochs);
    call_compressed_in_order(calls, shape);
}

/// Attention over compressed blocks in one order, and the products of compression MLPs and of gates: of one row and of
/// several, with columns that are whole words and others.
fn call_compressed_in_order(calls: &mut Calls, shape: &AttentionShape) {
    let row = calls.row(shape, ROW);
    let qkv = row.qkv.under(KernelPolicy { keys: KeyOrder::Epochs, ..row.qkv.policy() });
    let compressed = calls.bf16(&[2, BLOCKS.num_slots(ROW) * shape.num_kv_heads, shape.head_dim]);
    calls.note(qkv.q.nsa_compressed_attention_forward(row.documents.each_ref(), &compressed, BLOCKS, SCALE));
    for columns in [shape.head_dim, shape.head_dim + 1] {
        let weight = calls.bf16(&[shape.head_dim, columns]);
        for rows in [1, 2] {
            calls.note(linear_in_order(&calls.bf16(&[rows, columns]), &weight));
        }
    }
}

/// Decodes one token under NSA over caches of `capacity` tokens, with blocks compressed by their means and by MLPs.
fn decode_three_branches(calls: &mut Calls, shape: &AttentionShape, capacity: usize, sums: SumOrder) {
    let Some(token) = calls.token(shape, capacity) else {
        return;
    };
    let (size, width, hidden) = (BLOCKS.compress_block_size, shape.head_dim, 2 * shape.head_dim);
    let new_cache = |room| KvCache::new(token.qkv.q.tensor(), &token.shape, room);
    let (compressed, tail) = (new_cache(BLOCKS.num_slots(capacity)), new_cache(capacity));
    let (positions, up, down) =
        (calls.bf16(&[size, width]), calls.bf16(&[hidden, size * width]), calls.bf16(&[width, hidden]));
    let start = calls.i32(&[1, 1]);
    let (step, branch) = (DecodeStep::new(capacity / 2, SCALE), token.qkv.in_order(sums));
    for mlp in [None, Some([[&positions, &up, &down]; 2])] {
        let call = NsaToken {
            branches: [&branch; 3],
            caches: [&compressed, &token.cache, &token.cache],
            tail: (&tail, 0),
            mlp,
            start: &start,
            blocks: BLOCKS,
        };
        calls.note(call.decode(&token.length, [step; 2], [&token.scratch; 3]));
    }
}

/// Decodes one token that attends over the blocks that it chooses in a cache of `capacity` tokens.
fn decode_by_choice(calls: &mut Calls, shape: &AttentionShape, choice: BlockChoice, capacity: usize, sums: SumOrder) {
    let Some(token) = calls.token(shape, capacity) else {
        return;
    };
    let in_order = token.qkv.in_order(sums);
    let index = calls.row(&choosing_heads(shape, choice), 1);
    let choosers = choice.choices_per_token([shape.num_heads, shape.num_kv_heads]);
    let attended = AttentionShape { num_kv_heads: choosers, ..token.shape };
    let Some(scratch) = calls.note(DecodeScratch::new(token.qkv.q.tensor(), attended, capacity)) else {
        return;
    };
    let pooled = calls.bf16(&[1, index.shape.num_kv_heads, choice.blocks.num_slots(capacity), shape.head_dim]);
    let start = calls.i32(&[1, 1]);
    let step = PooledStep { pooled: &pooled, start: &start, choice };
    let decode = DecodeStep::new(capacity / 2, SCALE);
    let (table, weight) = (calls.f32(&[ROW, shape.head_dim / 2]), calls.bf16(&[shape.head_dim]));
    let weights = ([&weight; 2], EPSILON);
    for norm in [None, Some(weights)] {
        let rotation = TokenRotation { norm, tables: [&table; 2] };
        let (cache, length, token) = (&token.cache, &token.length, &in_order);
        if choice.has_indexer() {
            let index = [&index.qkv.q, &index.qkv.k];
            let call = IndexedToken { token, index, rotation, index_norm: weights };
            calls.note(cache.indexed_decode(call, length, decode, step, &scratch));
        } else {
            calls.note(cache.chosen_decode(token, rotation, length, decode, step, &scratch));
        }
    }
}
