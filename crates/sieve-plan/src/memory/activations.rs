//! Activations that a block keeps for its backward pass, and temporary tensors of that pass.

use crate::context_parallel::RowShare;
use crate::{Target, gpu_attention_gap};
use sieve_core::block_choice::SCORES_AT_ONCE;
use sieve_core::model::{AttentionForm, ModelShape, NUM_NSA_BRANCHES};
use sieve_core::recipe::TrainingSection;
use sieve_core::{BlockChoice, KeepOLow, Keeping};
use sieve_kernels::oracle::SUPER_BLOCK;
use sieve_kernels::{AttentionShape, ChoiceLists, Hardware, KernelFamily, KeyLists, KeySource};

/// Bytes of an f32, and of an i32.
pub(super) const F32: u64 = 4;
/// More bytes than any machine has. Products saturate here, so that their sums fit into a u64.
const MOST_BYTES: u64 = 1 << 58;

/// The product `count * bytes`, at most [`MOST_BYTES`].
pub(super) fn times(count: u64, bytes: u64) -> u64 {
    count.saturating_mul(bytes).min(MOST_BYTES)
}

/// n x n score matrices that a reference on a GPU holds at the same time.
const PLAIN_SCORES: u64 = 4;

/// Bytes per token that one block keeps for its backward pass, in rows of `seq_len` tokens.
pub(super) fn block_kept(shape: &ModelShape, target: &Target, seq_len: usize, keeping: Keeping) -> u64 {
    let [d_model, d_ff] = [shape.d_model, shape.d_ff].map(|size| size as u64);
    let (q, kv) = (shape.q_width() as u64, shape.kv_width() as u64);
    let (heads, kv_heads) = (shape.num_heads as u64, shape.num_kv_heads as u64);
    let packed = q + 2 * kv;
    // `common`: the inputs of the attention and feed-forward halves, gate and up. If they fit, also `more`: the GEMMs'
    // inputs and the rotated heads.
    let more = match keeping.recomputable {
        true => of_inputs(shape) + if joins_attention(shape) { packed } else { 0 },
        false => 0,
    };
    let common = 2 * d_model + 2 * d_ff + more;
    // The norm's output is kept, unless attention is one op, which recomputes it.
    let normed = if joins_attention(shape) { 0 } else { d_model };
    let lse = F32 * heads;
    // Where queries choose blocks, lists of the queries that chose each block. (A deterministic run keeps none.)
    let keeps_lists = matches!(target, Target::Gpu(_)) && gpu_attention_gap(shape).is_none();
    let (values, f32_bytes) = match shape.attention.form() {
        // Keeps q, k and v (before norm and rotation if these are in the same op), and the output.
        AttentionForm::Grouped { .. } => (common + normed + packed + q, lse),
        // Keeps also each key's score z (f32) and expire (i32: the first query that no longer sees the key), key lists
        // and `o_low`.
        form @ AttentionForm::Ranked(_) => {
            let o_low = if keeps_o_low(shape, target, seq_len, keeping.o_low) { q } else { 0 };
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
            // Keeps the latent with the rotated key, the normed latent, packed q, k and v, and the output. With
            // q/k-norm also the packed tensor before the norms, which the backward pass recomputes.
            let before_norms = if mla.qk_norm { queries + 2 * q } else { 0 };
            let attention = (rank + rope) + rank + before_norms + (2 * queries + q) + q;
            (common + normed + attention, lse)
        }
        AttentionForm::Branches(nsa) => {
            let branches = NUM_NSA_BRANCHES as u64;
            // Keeps packed q, k, v before and after norm and rotation: one pair for all branches, or one for each. The
            // normed but unrotated tensor, from which blocks are compressed, is not kept.
            let pairs = nsa.num_kv_copies() as u64;
            let stride = nsa.compress_stride as u64;
            let blocks = match nsa.compress_hidden_size {
                // The two MLPs keep their inputs, the concatenated keys and values of each block, and their hidden
                // layers before and after the ReLU.
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
            let lists = if keeps_lists { 2 * F32 * kv_heads * nsa.num_selected_blocks as u64 } else { 0 };
            (common + normed + attention, branches * lse + lists)
        }
        // Keeps packed q, k, v before and after norm and rotation, and the output; the chosen blocks, and on a GPU
        // lists of them. For an indexer also its projection and two packed tensors.
        AttentionForm::Blocks(choice) => {
            let choices = num_choices(shape, choice);
            let indexer = match shape.has_indexer() {
                true => 3 * (kv + 2 * shape.head_dim as u64),
                false => 0,
            };
            let lists = if keeps_lists { 2 * choices } else { 0 };
            (common + normed + 2 * packed + indexer + q, lse + F32 * (choices + lists))
        }
    };
    values * target.value_bytes() + f32_bytes
}

/// Attended blocks per token, over all choosers.
fn num_choices(shape: &ModelShape, choice: BlockChoice) -> u64 {
    let choosers = choice.choices_per_token([shape.num_heads, shape.num_kv_heads]);
    (choosers * choice.attended().num_selected_blocks) as u64
}

/// Whether a block's attention is one op together with its norm and GEMMs.
fn joins_attention(shape: &ModelShape) -> bool {
    shape.attention.form().is_one_op() && shape.qk_norm && !shape.qkv_bias
}

/// Values per token of GEMM inputs that a block's backward pass can recompute.
fn of_inputs(shape: &ModelShape) -> u64 {
    let norms = if joins_attention(shape) { 2 } else { 1 };
    (norms * shape.d_model + shape.d_ff) as u64
}

/// (weights, [input width, output width]) of a block's fp8 GEMMs, summed over the GEMMs.
pub(crate) fn fp8_gemms(shape: &ModelShape) -> (u64, [u64; 2]) {
    let [d_model, d_ff] = [shape.d_model, shape.d_ff].map(|size| size as u64);
    let (q, kv) = (shape.q_width() as u64, shape.kv_width() as u64);
    // The feed-forward's GEMMs; if attention is one op with its GEMMs, also its projections of q, k, v and output.
    let (weights, inner, outer) = (3 * d_model * d_ff, d_model + d_ff, 2 * d_ff + d_model);
    match joins_attention(shape) {
        false => (weights, [inner, outer]),
        true => {
            let widths = [inner + d_model + q, outer + q + 2 * kv + d_model];
            (weights + 2 * d_model * (q + kv), widths)
        }
    }
}

/// Bytes that an fp8 block keeps in addition to a bf16 one: its rounded operands (f32 on a CPU), minus the GEMMs'
/// inputs that a bf16 block keeps.
pub(super) fn fp8_kept(shape: &ModelShape, target: &Target, tokens: u64, keeping: Keeping) -> i64 {
    let (weights, [inner, _]) = fp8_gemms(shape);
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
    let (heads, widths) = ([shape.num_heads, shape.num_kv_heads], [shape.head_dim; 2]);
    let attention = AttentionShape::new(1, seq_len, heads, widths);
    let family = KernelFamily::best(&attention, KeySource::Biased, gpu.is_hopper());
    family.keeps_o_low(o_low, seq_len)
}

/// Bytes per token of the GPU's key lists. There is a list for each KV head and super-block (1024 queries).
fn key_list_bytes(shape: &ModelShape, seq_len: usize, window: usize) -> u64 {
    let row = KeyLists::shape(seq_len, window).map(|size| size as u64);
    let words = row.iter().product::<u64>() * shape.num_kv_heads as u64;
    (F32 * words).div_ceil(seq_len as u64)
}

/// Bytes per token that all blocks keep after the forward pass, in rows of `seq_len` tokens. A block for which
/// `recomputed` is true keeps only its input.
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

/// Peak of a block's backward pass in addition to the kept activations, in bytes. It includes the gradients of the
/// block's weights.
pub(super) fn block_temporaries(
    shape: &ModelShape,
    target: &Target,
    training: &TrainingSection,
    rows: &RowShare,
) -> u64 {
    let bytes = target.value_bytes();
    let tokens = rows.tokens() as u64;
    let [d_model, d_ff] = [shape.d_model, shape.d_ff].map(|size| size as u64);
    let (q, kv) = (shape.q_width() as u64, shape.kv_width() as u64);
    let matrix = F32 * d_model * d_ff;
    // MLA's packed q, k and v have wider heads. The gradients of the parts before packing exist only after the packed
    // gradient is freed.
    let packed = match shape.attention.form() {
        AttentionForm::Latent(mla) => 3 * q + 2 * (shape.num_heads * mla.qk_rope_head_dim) as u64,
        _ => q + 2 * kv,
    };

    // Feed-forward: the gradients of the output, of the activation and of gate and up, and the recomputed activation.
    // `beside` is the part that a GPU writes in place (and a CPU does not): a CPU also copies the transposed gradient
    // of gate and up for its GEMM; with fp8 a GPU holds two rounded copies of that gradient.
    let is_fp8 = !training.fp8_blocks(shape.num_layers).is_empty();
    let beside = match target {
        Target::Cpu { .. } => 5 * d_ff,
        Target::Gpu(_) if is_fp8 => 2 * d_ff,
        Target::Gpu(_) => 0,
    };
    let swiglu = times(tokens, (d_model + d_ff + beside) * bytes) + matrix;
    let norm = times(tokens, 4 * d_model * bytes) + 3 * matrix;

    // Attention: the weights' gradients of the feed-forward; the gradients of the block's input and of the attention's
    // output; rotated heads and their gradient; f32 sums of dq. By then gate and up and the feed-forward's input
    // (`gone`) are freed.
    let kinds = shape.by_kind();
    let dense = (training.dense_steps > 0.0).then(|| shape.dense());
    let sums = kinds.iter().chain(&dense).map(|part| {
        let (own, seq_len) = rows.attention(part);
        attention_sums(&own, target, [rows.batch, seq_len])
    });
    let sums = sums.max().unwrap_or(0);
    let attention = 3 * matrix + times(tokens, (d_model + q + 2 * packed) * bytes) + sums;
    let gone = times(tokens, (2 * d_ff + d_model) * bytes);
    swiglu.max(norm).max(attention.saturating_sub(gone))
}

/// Bytes of f32 sums and other temporary buffers of attention's backward pass, for `[rows, tokens of a row]`.
fn attention_sums(shape: &ModelShape, target: &Target, [num_rows, seq_len]: [usize; 2]) -> u64 {
    let batch = num_rows as u64;
    let tokens = batch * seq_len as u64;
    let (q, kv) = (shape.q_width() as u64, shape.kv_width() as u64);
    let heads = shape.num_heads as u64;
    // On a CPU only threads have buffers, which are small beside the activations.
    let Target::Gpu(_) = target else {
        return 0;
    };
    let row_stats = times(tokens, 2 * F32 * heads);
    // Parts of dk and dv, where several thread blocks share a tile of keys. The GPU is assumed to be an H100 or H200.
    let key_parts = |rope_dim: usize, window: usize| {
        let (heads, widths) = ([shape.num_heads, shape.num_kv_heads], [shape.head_dim + rope_dim, shape.head_dim]);
        let call = AttentionShape::new(num_rows, seq_len, heads, widths);
        call.key_part_bytes(window, Hardware::HOPPER.num_multiprocessors) as u64
    };
    // dq of each block that a query chose, and lists of these choices.
    let choice_parts = |num_blocks: usize, num_choices: u64| {
        let a_query = num_blocks as u64 * target.value_bytes() * q + 2 * F32 * num_choices;
        times(tokens, a_query).min((ChoiceLists::PART_BYTES as u64).max(batch * a_query))
    };
    let plain_scores = plain_score_bytes(shape, tokens, seq_len);
    let form = shape.attention.form();
    match form {
        _ if plain_scores > 0 => plain_scores,
        AttentionForm::Blocks(choice) => {
            // `repeated`: K and V repeated for each chooser, and f32 sums of their gradients.
            let choosers = choice.choices_per_token([shape.num_heads, shape.num_kv_heads]);
            let kv = (choosers * shape.head_dim) as u64;
            let repeated = match choosers == shape.num_kv_heads {
                true => 0,
                false => times(tokens, 2 * (q + 2 * kv) * target.value_bytes() + F32 * kv),
            };
            let parts = choice_parts(choice.attended().num_selected_blocks, num_choices(shape, choice));
            // The indexer's loss runs attention twice, with the model's heads and with the indexer's: q, k, v, the
            // output in f32, and the gradients.
            let indexer = match shape.has_indexer() {
                // With one pooled key a block (QSA), the loss takes some queries at a time: so many that the logits of
                // one KV head's query heads are at most SCORES_AT_ONCE. Six f32 tensors of that size are counted: the
                // logits, the probabilities and temporaries.
                true if shape.has_pooled_indexer() => times(6 * SCORES_AT_ONCE as u64, F32),
                true => times(tokens, (2 * target.value_bytes() + F32) * (q + 2 * kv + 3 * kv)),
                false => 0,
            };
            row_stats + times(tokens, 2 * F32 * kv) + repeated + indexer + parts
        }
        AttentionForm::Branches(nsa) => {
            let sums = times(tokens, 2 * F32 * kv);
            // The compressed branch needs K, V and their gradients with a row per token, sums of dq, key lists.
            let rows = batch * KeyLists::dq_sum_queries(seq_len) as u64;
            let slots = nsa.blocks().num_slots(seq_len) as u64;
            let lists = 2 * F32 * slots * shape.num_kv_heads as u64 / SUPER_BLOCK as u64;
            let by_list = times(tokens, 4 * target.value_bytes() * kv + lists) + times(rows, F32 * q);
            let num_blocks = nsa.num_selected_blocks;
            let by_choice = choice_parts(num_blocks, (num_blocks * shape.num_kv_heads) as u64);
            row_stats + sums + by_list.max(by_choice)
        }
        AttentionForm::Latent(mla) => {
            let queries = q + heads * mla.qk_rope_head_dim as u64;
            row_stats + times(tokens, F32 * queries) + key_parts(mla.qk_rope_head_dim, seq_len)
        }
        AttentionForm::Ranked(_) if form.num_kept() < Some(seq_len) => {
            let rows = batch * KeyLists::dq_sum_queries(seq_len) as u64;
            // A free order has lists of its own, and a mark for each key.
            let lists = form.num_kept().map_or(0, |kept| key_list_bytes(shape, seq_len, kept));
            let marks = F32 * shape.num_kv_heads as u64;
            row_stats + times(rows, F32 * q) + times(tokens, 2 * F32 * kv + lists + marks)
        }
        AttentionForm::Grouped { window: Some(window) } => row_stats + times(tokens, F32 * q) + key_parts(0, window),
        _ => row_stats + times(tokens, F32 * q) + key_parts(0, seq_len),
    }
}

/// Bytes of n x n scores that a GPU holds if this attention has no kernel; 0 if it has one.
pub(super) fn plain_score_bytes(shape: &ModelShape, tokens: u64, seq_len: usize) -> u64 {
    match shape.attention.form().is_one_op() || gpu_attention_gap(shape).is_none() {
        true => 0,
        false => times(tokens, PLAIN_SCORES * F32 * (shape.num_heads * seq_len) as u64),
    }
}
