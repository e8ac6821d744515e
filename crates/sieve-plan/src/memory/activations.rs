//! Activations that a block keeps for its backward pass, and temporary tensors of that pass.

use crate::context_parallel::RowShare;
use crate::{Target, gpu_attention_gap};
pub(super) use sieve_core::kinds::times;
use sieve_core::kinds::{BackwardCall, Chooses, KeptCall, KernelSizes};
use sieve_core::model::ModelShape;
use sieve_core::recipe::{Recipe, TrainingSection};
use sieve_core::{KeepOLow, Keeping};
use sieve_cpu::linear_cross_entropy::logit_rows;
use sieve_kernels::oracle::SUPER_BLOCK;
use sieve_kernels::{
    AttentionShape, ChoiceLists, Hardware, KernelFamily, KeyLists, KeySource, key_part_bytes, sink_sum_bytes,
};

/// Bytes of an f32, and of an i32.
pub(super) const F32: u64 = 4;
/// n x n score matrices that a reference on a GPU holds at the same time.
const PLAIN_SCORES: u64 = 4;

/// Bytes per token that one block keeps for its backward pass, in rows of `seq_len` tokens.
pub(super) fn block_kept(shape: &ModelShape, target: &Target, seq_len: usize, keeping: Keeping) -> u64 {
    let [d_model, d_ff] = [shape.d_model, shape.d_ff].map(|size| size as u64);
    // `common`: the inputs of the attention and feed-forward halves, gate and up. If they fit, also `more`: the GEMMs'
    // inputs and the rotated heads.
    let more = if keeping.recomputable {
        of_inputs(shape) + if joins_attention(shape) { shape.attention.as_kind().packed_width(shape) } else { 0 }
    } else {
        0
    };
    let common = 2 * d_model + 2 * d_ff + more;
    // The norm's output is kept, unless attention is one op, which recomputes it.
    let normed = if joins_attention(shape) { 0 } else { d_model };
    let is_gpu = matches!(target, Target::Gpu(_));
    let call = KeptCall {
        layer: shape,
        seq_len,
        o_low: keeping.o_low,
        sizes: if is_gpu { Some(target) } else { None },
        // Where queries choose blocks, lists of the queries that chose each block. (A deterministic run keeps none.)
        keeps_choice_lists: is_gpu && gpu_attention_gap(shape).is_none(),
    };
    let attention = shape.attention.as_kind().activations(&call);
    (common + normed + attention.values) * target.value_bytes() + attention.bytes
}

/// Whether a block's attention is one op together with its norm and GEMMs.
pub(super) fn joins_attention(shape: &ModelShape) -> bool {
    shape.attention.kind().facts().is_one_op && shape.fits_one_op()
}

/// Whether a recomputed block of this shape can keep its attention's output, [`Keeping::attention`]. A kind that
/// chooses keys needs its choice beside the output, which is not kept.
pub(super) fn can_keep_attention(layer: &ModelShape) -> bool {
    joins_attention(layer) && layer.attention.kind().facts().chooses == Chooses::Nothing
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
    if !joins_attention(shape) {
        (weights, [inner, outer])
    } else {
        let widths = [inner + d_model + q, outer + q + 2 * kv + d_model];
        (weights + 2 * d_model * (q + kv), widths)
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
    let inputs = if keeping.recomputable { times(tokens, of_inputs(shape) * target.value_bytes()) } else { 0 };
    (times(tokens, inner * bytes) + times(weights, bytes)) as i64 - inputs as i64
}

/// Sizes of the buffers that sieve-gpu's launch wrappers allocate. On a CPU there are no such buffers.
impl KernelSizes for Target {
    fn key_list_bytes(&self, layer: &ModelShape, seq_len: usize, kept: usize) -> u64 {
        // There is a list for each KV head and super-block (1024 queries).
        let row = KeyLists::shape(seq_len, kept).map(|size| size as u64);
        let words = row.iter().product::<u64>() * layer.num_kv_heads as u64;
        (F32 * words).div_ceil(seq_len as u64)
    }

    fn keeps_o_low(&self, layer: &ModelShape, seq_len: usize, o_low: KeepOLow) -> bool {
        let Target::Gpu(gpu) = self else {
            return false;
        };
        let (heads, widths) = ([layer.num_heads, layer.num_kv_heads], [layer.head_dim; 2]);
        let attention = AttentionShape::new(1, seq_len, heads, widths);
        let family = KernelFamily::best(&attention, KeySource::Biased, gpu.is_hopper());
        family.keeps_o_low(o_low, seq_len)
    }

    fn key_part_bytes(&self, layer: &ModelShape, rope_width: usize, rows: [usize; 2], window: usize) -> u64 {
        let [num_rows, seq_len] = rows;
        let (heads, widths) = ([layer.num_heads, layer.num_kv_heads], [layer.head_dim + rope_width, layer.head_dim]);
        let call = AttentionShape::new(num_rows, seq_len, heads, widths);
        // The GPU is assumed to be an H100 or H200.
        key_part_bytes(&call, window, Hardware::HOPPER.num_multiprocessors) as u64
    }

    fn sink_sum_bytes(&self, layer: &ModelShape, [num_rows, seq_len]: [usize; 2], sink_tokens: usize) -> u64 {
        let heads = [layer.num_heads, layer.num_kv_heads];
        let call = AttentionShape::new(num_rows, seq_len, heads, [layer.head_dim; 2]);
        sink_sum_bytes(&call, sink_tokens) as u64
    }

    fn dq_sum_queries(&self, seq_len: usize) -> u64 {
        KeyLists::dq_sum_queries(seq_len) as u64
    }

    fn choice_part_bytes(&self) -> u64 {
        ChoiceLists::PART_BYTES as u64
    }

    fn queries_of_list(&self) -> u64 {
        SUPER_BLOCK as u64
    }
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
        true if keeping.attention && can_keep_attention(&shape.of_layer(layer_idx)) => {
            let o = shape.of_layer(layer_idx).q_width() as u64 * target.value_bytes();
            2 * input + o + F32 * shape.num_heads as u64
        }
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
    let q = shape.q_width() as u64;
    let matrix = F32 * d_model * d_ff;
    let kinds = shape.by_kind();
    let packed = kinds.iter().map(|part| part.attention.as_kind().packed_width(part)).max().unwrap_or(0);

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
    // On a CPU only threads have buffers, which are small beside the activations.
    let Target::Gpu(_) = target else {
        return 0;
    };
    match plain_score_bytes(shape, (num_rows * seq_len) as u64, seq_len) {
        0 => {
            let value_bytes = target.value_bytes();
            let call = BackwardCall { layer: shape, num_rows, seq_len, value_bytes, sizes: target };
            shape.attention.as_kind().backward_buffers(&call)
        }
        plain_scores => plain_scores,
    }
}

/// Bytes of n x n scores that a GPU holds if this attention has no kernel; 0 if it has one.
pub(super) fn plain_score_bytes(shape: &ModelShape, tokens: u64, seq_len: usize) -> u64 {
    let kinds = shape.by_kind();
    let runs_reference =
        |part: &ModelShape| !part.attention.kind().facts().is_one_op && gpu_attention_gap(part).is_some();
    if !kinds.iter().any(runs_reference) {
        0
    } else {
        times(tokens, PLAIN_SCORES * F32 * (shape.num_heads * seq_len) as u64)
    }
}

/// Whether ranks have only shards of the weights between their uses: ZeRO-3.
pub(crate) fn shards_weights(recipe: &Recipe, ranks: usize) -> bool {
    recipe.parallelism.zero_stage == 3 && recipe.parallelism.num_shards(ranks) > 1
}

/// Bytes of a chunk of logits in the loss.
pub(super) fn logit_bytes(shape: &ModelShape, tokens: u64, target: &Target) -> u64 {
    let (tokens, vocab_size) = (tokens as usize, shape.vocab_size);
    let rows = match target {
        Target::Cpu { .. } => logit_rows(vocab_size, tokens),
        Target::Gpu(_) => sieve_kernels::loss_block_tokens(tokens, vocab_size),
    };
    times(rows as u64, vocab_size as u64 * target.value_bytes())
}
