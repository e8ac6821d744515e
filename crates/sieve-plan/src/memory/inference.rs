//! Memory of using a model: reading its weights, a forward pass, KV caches.

use super::activations::{F32, block_kept, logit_bytes, plain_score_bytes, times};
use super::{MemoryParts, MemoryPlan, block_parameters};
use crate::{Target, cache_on};
use sieve_core::Keeping;
use sieve_core::kinds::ParamSpec;
use sieve_core::model::ModelShape;

/// Sizes of a command's forward passes and caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InferenceSize {
    /// Rows of one forward pass.
    pub rows: usize,
    /// Tokens of each row.
    pub seq_len: usize,
    /// Tokens of the KV cache of a decoded sequence; 0 without decoding.
    pub cached_tokens: usize,
    /// KV caches held at the same time; at least 1.
    pub num_caches: usize,
    /// Tokens whose logits are returned together; 0 if logits are used chunk by chunk.
    pub logit_tokens: usize,
    /// Processes among which the weights are divided; 1 for a whole model.
    pub ranks: usize,
}

impl InferenceSize {
    /// Forward passes of `tokens / seq_len` rows (at least one) of `seq_len` tokens, without decoding.
    pub fn rows_of(seq_len: usize, tokens: usize) -> Self {
        Self {
            rows: (tokens / seq_len.max(1)).max(1),
            seq_len,
            cached_tokens: 0,
            num_caches: 1,
            logit_tokens: 0,
            ranks: 1,
        }
    }
}

/// Memory of reading a checkpoint and of forward passes of `size`. A weight takes `weight_bytes`.
///
/// A tensor is read and converted before the next one is, so that the largest one stands beside the model: in f32, as
/// some files have it, and in the model's type. Of several ranks each keeps its shard of a tensor before it reads the
/// next one, and its passes hold the weights of a block or of the largest matrix whole.
pub fn inference_memory(shape: &ModelShape, size: InferenceSize, target: &Target, weight_bytes: u64) -> MemoryPlan {
    let parameters = shape.parameters().total();
    let cache_bytes = match size.cached_tokens {
        0 => 0,
        cached => {
            let one = cache_on(shape, cached, target).bytes_at_seq_len;
            times(size.num_caches.max(1) as u64, one)
        }
    };
    let largest = largest_tensor(shape);
    // Ranks exchange what they read, so that it is on the host and the device.
    let read_as_f32 = if size.ranks > 1 { 2 * F32 } else { F32 };
    let parameter_bytes = times(parameters.div_ceil(size.ranks.max(1) as u64), weight_bytes);
    let workspace_bytes = times(largest, read_as_f32 + weight_bytes);
    let loaded = MemoryParts { parameter_bytes, workspace_bytes, ..MemoryParts::default() };
    let gathered = match size.ranks {
        1 => 0,
        // A rank's host has what it received, in f32, beside the tensors on a CPU.
        _ => times(
            largest.max(block_parameters(shape)),
            weight_bytes + if matches!(target, Target::Cpu { .. }) { F32 } else { 0 },
        ),
    };
    let forward = MemoryParts {
        parameter_bytes,
        cache_bytes,
        gathered_bytes: gathered,
        activation_bytes: forward_bytes(shape, size, target),
        ..MemoryParts::default()
    };
    if loaded.total() > forward.total() {
        loaded.plan("reading the weights", target, size.ranks)
    } else {
        forward.plan("a forward pass", target, size.ranks)
    }
}

/// Peak of a forward pass without a backward pass, in bytes of activations.
pub(super) fn forward_bytes(shape: &ModelShape, size: InferenceSize, target: &Target) -> u64 {
    let value_bytes = target.value_bytes();
    let tokens = size.rows.saturating_mul(size.seq_len).max(1) as u64;
    let [d_model, d_ff] = [shape.d_model, shape.d_ff].map(|size| size as u64);
    let packed = (shape.q_width() + 2 * shape.kv_width()) as u64;
    // Feed-forward: its input, the norm's output and the sum with the residual, each d_model wide; gate, up and the
    // activation, each d_ff wide. Attention: what a block keeps in training, less the feed-forward layer's input, gate
    // and up, plus the sum with the residual and the rotated packed heads.
    let feed_forward = (3 * d_model + 3 * d_ff) * value_bytes;
    let kinds = shape.by_kind();
    let kept = kinds.iter().map(|part| block_kept(part, target, size.seq_len, Keeping::NOTHING));
    let kept = kept.max().unwrap_or(0);
    let kept_by_feed_forward = (d_model + 2 * d_ff) * value_bytes;
    let sum_and_rotated = (d_model + packed) * value_bytes;
    let attention = kept - kept_by_feed_forward + sum_and_rotated;
    let scores = match target {
        Target::Gpu(_) => plain_score_bytes(shape, tokens, size.seq_len),
        Target::Cpu { .. } => 0,
    };
    let block = times(tokens, feed_forward).max(times(tokens, attention) + scores);
    let logits = match size.logit_tokens {
        0 => logit_bytes(shape, tokens, target),
        returned => times(returned as u64, shape.vocab_size as u64 * value_bytes),
    };
    let loss = times(tokens, 2 * d_model * value_bytes) + logits;
    block.max(loss)
}

/// Memory of importing a model, a tensor at a time: the largest one, and as much for its way into the file.
pub fn import_memory(shape: &ModelShape, target: &Target) -> MemoryPlan {
    let largest = times(largest_tensor(shape), F32);
    let peak = MemoryParts { workspace_bytes: 2 * largest, ..MemoryParts::default() };
    peak.plan("the largest tensor", target, 1)
}

/// Elements of the largest tensor of a model's weights.
fn largest_tensor(shape: &ModelShape) -> u64 {
    shape.all_parameters().iter().map(ParamSpec::num_elements).max().unwrap_or(0)
}
