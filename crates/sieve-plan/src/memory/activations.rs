//! What a block keeps for its backward pass, and what that pass holds for a moment.

use crate::context_parallel::RowShare;
use crate::{Target, gpu_attention_gap};
use sieve_core::block_choice::SCORES_AT_ONCE;
use sieve_core::model::{AttentionForm, ModelShape, NUM_NSA_BRANCHES};
use sieve_core::recipe::TrainingSection;
use sieve_core::{BlockChoice, KeepOLow, Keeping};
use sieve_kernels::oracle::SUPER_BLOCK;
use sieve_kernels::{AttentionShape, ChoiceLists, Hardware, KernelFamily, KeyLists, KeySource};

/// Bytes of an f32 or i32.
pub(super) const F32: u64 = 4;
/// More than any machine has. Products of sizes end here, so that sums of them stay inside a u64.
const MOST_BYTES: u64 = 1 << 58;

/// `count * bytes`, at most [`MOST_BYTES`].
pub(super) fn times(count: u64, bytes: u64) -> u64 {
    count.saturating_mul(bytes).min(MOST_BYTES)
}

/// Score matrices that the plain path of NSA on a GPU holds at once.
const PLAIN_SCORES: u64 = 4;

/// Bytes of one token of a row of `seq_len` that one block keeps for its backward pass.
pub(super) fn block_kept(shape: &ModelShape, target: &Target, seq_len: usize, keeping: Keeping) -> u64 {
    let [d_model, d_ff] = [shape.d_model, shape.d_ff].map(|size| size as u64);
    let (q, kv) = (shape.q_width() as u64, shape.kv_width() as u64);
    let (heads, kv_heads) = (shape.num_heads as u64, shape.num_kv_heads as u64);
    let packed = q + 2 * kv;
    // The stream before either half, gate and up; where there is room the products' inputs and rotated heads.
    let more = match keeping.recomputable {
        true => of_inputs(shape) + if joins_attention(shape) { packed } else { 0 },
        false => 0,
    };
    let common = 2 * d_model + 2 * d_ff + more;
    // Where attention is several ops: its normed stream.
    let normed = if joins_attention(shape) { 0 } else { d_model };
    let lse = F32 * heads;
    let (values, f32_bytes) = match shape.attention.form() {
        // q, k and v, before q/k-norm and rotation where these are in the same op, and the output.
        AttentionForm::Grouped { .. } => (common + normed + packed + q, lse),
        // z and expire beside them, key lists, and the lower 16 bits of the output.
        form @ AttentionForm::Ranked(_) => {
            let o_low = if keeps_o_low(shape, target, seq_len, keeping.o_low) {
                q
            } else {
                0
            };
            let lists = match (target, form.num_kept()) {
                (Target::Gpu(_), Some(kept)) if kept < seq_len => key_list_bytes(shape, seq_len, kept),
                _ => 0,
            };
            let per_key = 2 * F32 * kv_heads + lists;
            (common + normed + packed + q + o_low, lse + per_key)
        }
        AttentionForm::Latent(mla) => {
            let (rank, rope) = (mla.kv_lora_rank as u64, mla.qk_rope_head_dim as u64);
            let queries = q + heads * rope;
            // Normed stream; latent and rotated key, then normed; packed q, k and v; output. The packed tensor is kept
            // where the backward pass recomputes its norms.
            let before_norms = if mla.qk_norm { queries + 2 * q } else { 0 };
            let attention = (rank + rope) + rank + before_norms + (2 * queries + q) + q;
            (common + normed + attention, lse)
        }
        AttentionForm::Branches(nsa) => {
            let branches = NUM_NSA_BRANCHES as u64;
            // Packed tensors before and after norm and rotation: one pair for all branches or one for each. The tensor
            // that is only normed, for compressed blocks, is not kept.
            let pairs = nsa.num_kv_copies() as u64;
            let stride = nsa.compress_stride as u64;
            let blocks = match nsa.compress_hidden_size {
                // Keys and values concatenated, and again as each MLP's input; its hidden layer before and after the
                // ReLU.
                Some(hidden) => {
                    let inputs = 4 * kv * nsa.compress_block_size as u64;
                    let hidden = 4 * kv_heads * hidden as u64;
                    (inputs + hidden) / stride
                }
                None => 0,
            };
            let compressed = 4 * kv / stride + blocks;
            let packs = 2 * pairs * packed;
            let attention = packs + branches * (q + heads) + q + compressed;
            // The queries that chose each block; a fixed order of sums keeps none.
            let lists = match target {
                Target::Gpu(_) if gpu_attention_gap(shape).is_none() => {
                    2 * F32 * kv_heads * nsa.num_selected_blocks as u64
                }
                _ => 0,
            };
            (common + normed + attention, branches * lse + lists)
        }
        // Packed before and after norm and rotation, and the output; the choice, and on a GPU its lists. For an indexer
        // its projection, and two packed tensors.
        AttentionForm::Blocks(choice) => {
            let choices = num_choices(shape, choice);
            let indexer = match shape.has_indexer() {
                true => 3 * (kv + 2 * shape.head_dim as u64),
                false => 0,
            };
            let lists = match target {
                Target::Gpu(_) if gpu_attention_gap(shape).is_none() => 2 * choices,
                _ => 0,
            };
            (
                common + normed + 2 * packed + indexer + q,
                lse + F32 * (choices + lists),
            )
        }
    };
    values * target.value_bytes() + f32_bytes
}

/// Blocks that all heads read for a token, in the pieces that attention reads.
fn num_choices(shape: &ModelShape, choice: BlockChoice) -> u64 {
    let choosers = choice.choices_per_token([shape.num_heads, shape.num_kv_heads]);
    (choosers * choice.attended().num_selected_blocks) as u64
}

/// Whether a block's attention is one op with its norm and products.
fn joins_attention(shape: &ModelShape) -> bool {
    shape.attention.form().is_one_op() && shape.qk_norm && !shape.qkv_bias
}

/// Numbers a token that a block's GEMMs read and its backward pass can recompute.
fn of_inputs(shape: &ModelShape) -> u64 {
    let norms = if joins_attention(shape) { 2 } else { 1 };
    (norms * shape.d_model + shape.d_ff) as u64
}

/// Weights of a block's fp8 GEMMs, and the widths of their inputs and outputs.
pub(crate) fn fp8_products(shape: &ModelShape) -> (u64, [u64; 2]) {
    let [d_model, d_ff] = [shape.d_model, shape.d_ff].map(|size| size as u64);
    let (q, kv) = (shape.q_width() as u64, shape.kv_width() as u64);
    let (weights, inner, outer) = (3 * d_model * d_ff, d_model + d_ff, 2 * d_ff + d_model);
    match joins_attention(shape) {
        false => (weights, [inner, outer]),
        true => {
            let widths = [inner + d_model + q, outer + q + 2 * kv + d_model];
            (weights + 2 * d_model * (q + kv), widths)
        }
    }
}

/// Bytes that a block in fp8 keeps beyond another: its rounded operands (held as f32 on a CPU) instead of the GEMMs'
/// inputs.
pub(super) fn fp8_kept(shape: &ModelShape, target: &Target, tokens: u64, keeping: Keeping) -> i64 {
    let (weights, [inner, _]) = fp8_products(shape);
    let bytes = match target {
        Target::Cpu { .. } => F32,
        Target::Gpu(_) => 1,
    };
    let inputs = match keeping.recomputable {
        true => times(tokens, of_inputs(shape) * target.value_bytes()),
        false => 0,
    };
    (times(tokens, inner * bytes) + times(weights, bytes)) as i64 - inputs as i64
}

/// Whether DMA's forward pass stores `o_low`, the 16 bits of each output that bf16 lacks.
fn keeps_o_low(shape: &ModelShape, target: &Target, seq_len: usize, o_low: KeepOLow) -> bool {
    let Target::Gpu(gpu) = target else {
        return false;
    };
    let attention = AttentionShape {
        batch: 1,
        seq_len,
        num_heads: shape.num_heads,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
        head_dim_v: shape.head_dim,
    };
    let family = KernelFamily::best(&attention, KeySource::Biased, gpu.is_hopper());
    family.keeps_o_low(o_low, seq_len)
}

/// Bytes a token of the GPU's key lists: one list for each super-block of queries and KV head.
fn key_list_bytes(shape: &ModelShape, seq_len: usize, window: usize) -> u64 {
    let row = KeyLists::shape(seq_len, window).map(|size| size as u64);
    let words = row.iter().product::<u64>() * shape.num_kv_heads as u64;
    (F32 * words).div_ceil(seq_len as u64)
}

/// Bytes that the forward pass keeps of one token of a row of `seq_len` over all blocks, when every block that
/// `recomputed` names keeps its input alone.
pub fn activation_bytes_per_token(
    shape: &ModelShape,
    target: &Target,
    seq_len: usize,
    keeping: Keeping,
    recomputed: impl Fn(usize) -> bool,
) -> u64 {
    let input = shape.d_model as u64 * target.value_bytes();
    let blocks = (0..shape.num_layers).map(|layer_idx| match recomputed(layer_idx) {
        true => input,
        false => block_kept(&shape.of_layer(layer_idx), target, seq_len, keeping),
    });
    blocks.sum()
}

/// Most bytes that one block's backward pass holds in addition to what the forward pass kept, gradients of its weights
/// included.
pub(super) fn block_temporaries(
    shape: &ModelShape,
    target: &Target,
    training: &TrainingSection,
    rows: &RowShare,
) -> u64 {
    let bytes = target.value_bytes();
    let tokens = (training.local_batch_size * training.seq_len) as u64;
    let [d_model, d_ff] = [shape.d_model, shape.d_ff].map(|size| size as u64);
    let (q, kv) = (shape.q_width() as u64, shape.kv_width() as u64);
    let matrix = F32 * d_model * d_ff;
    // MLA: packed q, k and v and their gradient; gradients of what was packed come once the first of them is gone.
    let packed = match shape.attention.form() {
        AttentionForm::Latent(mla) => 3 * q + 2 * (shape.num_heads * mla.qk_rope_head_dim) as u64,
        _ => q + 2 * kv,
    };

    // Feed-forward: gradient of the output, of the activation, of gate and up, and the recomputed activation; a GPU
    // writes the last two in place of gate and up and of the activation's gradient. On a CPU the GEMM also copies the
    // transposed gradient of gate and up; in fp8 that gradient also exists in bytes, twice.
    let is_fp8 = !training.fp8_blocks(shape.num_layers).is_empty();
    let beside = match target {
        Target::Cpu { .. } => 5 * d_ff,
        Target::Gpu(_) if is_fp8 => 2 * d_ff,
        Target::Gpu(_) => 0,
    };
    let swiglu = times(tokens, (d_model + d_ff + beside) * bytes) + matrix;
    let norm = times(tokens, 4 * d_model * bytes) + 3 * matrix;

    // Attention: the feed-forward's gradients and the stream's; of the output; rotated heads, their gradient, f32 sums
    // of dq. Gate and up, and the stream between the halves, are freed by then.
    let kinds = shape.by_kind();
    let dense = (training.dense_steps > 0.0).then(|| shape.dense());
    let sums = kinds.iter().chain(&dense).map(|part| {
        let (own, seq_len) = rows.attention(part);
        attention_sums(&own, target, [training.local_batch_size, seq_len])
    });
    let sums = sums.max().unwrap_or(0);
    let attention = 3 * matrix + times(tokens, (d_model + q + 2 * packed) * bytes) + sums;
    let gone = times(tokens, (2 * d_ff + d_model) * bytes);
    swiglu.max(norm).max(attention.saturating_sub(gone))
}

/// f32 buffers of an attention's backward pass over rows of this number and length.
fn attention_sums(shape: &ModelShape, target: &Target, [num_rows, seq_len]: [usize; 2]) -> u64 {
    let batch = num_rows as u64;
    let tokens = batch * seq_len as u64;
    let (q, kv) = (shape.q_width() as u64, shape.kv_width() as u64);
    let heads = shape.num_heads as u64;
    let Target::Gpu(_) = target else {
        return 0;
    };
    let row_stats = times(tokens, 2 * F32 * heads);
    // Where several blocks of threads share a tile of keys; as on an H100 or H200.
    let key_parts = |rope_dim: usize, window: usize| {
        let (heads, widths) = (
            [shape.num_heads, shape.num_kv_heads],
            [shape.head_dim + rope_dim, shape.head_dim],
        );
        let call = AttentionShape::new(num_rows, seq_len, heads, widths);
        call.key_part_bytes(window, Hardware::HOPPER.num_multiprocessors) as u64
    };
    let plain_scores = plain_score_bytes(shape, tokens, seq_len);
    let form = shape.attention.form();
    match form {
        _ if plain_scores > 0 => plain_scores,
        AttentionForm::Blocks(choice) => {
            // Keys and values that each chooser reads, and f32 sums of their gradients; a part of dq for each block
            // that a query chose, and lists of these choices.
            let choosers = choice.choices_per_token([shape.num_heads, shape.num_kv_heads]);
            let kv = (choosers * shape.head_dim) as u64;
            let repeated = match choosers == shape.num_kv_heads {
                true => 0,
                false => times(tokens, 2 * (q + 2 * kv) * target.value_bytes() + F32 * kv),
            };
            let choices = choice.attended().num_selected_blocks as u64;
            let a_query = choices * target.value_bytes() * q + 2 * F32 * num_choices(shape, choice);
            let parts = times(tokens, a_query).min((ChoiceLists::PART_BYTES as u64).max(batch * a_query));
            // The indexer's loss: queries and keys with the indexer's keys as values, the attention's output in f32,
            // and the gradients; the same for the indexer, with one head for each KV head.
            let indexer = match shape.has_indexer() {
                // Scores of all heads, of some queries at a time.
                true if shape.has_pooled_indexer() => times(6 * SCORES_AT_ONCE as u64, F32),
                true => times(tokens, (2 * target.value_bytes() + F32) * (q + 2 * kv + 3 * kv)),
                false => 0,
            };
            row_stats + times(tokens, 2 * F32 * kv) + repeated + indexer + parts
        }
        AttentionForm::Branches(nsa) => {
            let sums = times(tokens, 2 * F32 * kv);
            // The compressed branch: keys, values and their two gradients with a row a token, sums of dq, key lists.
            let rows = batch * KeyLists::dq_sum_queries(seq_len) as u64;
            let slots = nsa.blocks().num_slots(seq_len) as u64;
            let lists = 2 * F32 * slots * shape.num_kv_heads as u64 / SUPER_BLOCK as u64;
            let by_list = times(tokens, 4 * target.value_bytes() * kv + lists) + times(rows, F32 * q);
            // The selected branch: a part of dq for each block that a query chose, and lists of these choices.
            let choices = nsa.num_selected_blocks as u64;
            let a_query = choices * (target.value_bytes() * q + 2 * F32 * shape.num_kv_heads as u64);
            let parts = times(tokens, a_query).min((ChoiceLists::PART_BYTES as u64).max(batch * a_query));
            row_stats + sums + by_list.max(parts)
        }
        AttentionForm::Latent(mla) => {
            let queries = q + heads * mla.qk_rope_head_dim as u64;
            row_stats + times(tokens, F32 * queries) + key_parts(mla.qk_rope_head_dim, seq_len)
        }
        AttentionForm::Ranked(_) if form.num_kept() < Some(seq_len) => {
            let rows = batch * KeyLists::dq_sum_queries(seq_len) as u64;
            row_stats + times(rows, F32 * q) + times(tokens, 2 * F32 * kv)
        }
        AttentionForm::Grouped { window: Some(window) } => row_stats + times(tokens, F32 * q) + key_parts(0, window),
        _ => row_stats + times(tokens, F32 * q) + key_parts(0, seq_len),
    }
}

/// Scores of all pairs that a GPU holds at once for sizes without kernels there; 0 for the others.
pub(super) fn plain_score_bytes(shape: &ModelShape, tokens: u64, seq_len: usize) -> u64 {
    match shape.attention.form().is_one_op() || gpu_attention_gap(shape).is_none() {
        true => 0,
        false => times(tokens, PLAIN_SCORES * F32 * (shape.num_heads * seq_len) as u64),
    }
}
