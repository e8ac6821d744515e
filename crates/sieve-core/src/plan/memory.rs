//! Memory of training, by part.

use serde::Serialize;

use super::Target;
use crate::model::{Attention, ModelShape, NUM_NSA_BRANCHES};
use crate::recipe::Recipe;

/// f32.
const F32: u64 = 4;

/// What a process holds before it has a model: about 60 MiB on a CPU; on a GPU the context and cuBLAS workspaces.
const CPU_PROGRAM_BYTES: u64 = 60 << 20;
const GPU_PROGRAM_BYTES: u64 = 700 << 20;

/// Logits the loss holds at once, in elements, and rows of a chunk at most.
const MAX_LOGITS: u64 = 1 << 24;
const MAX_CHUNK_ROWS: u64 = 1024;

/// Bytes of what a training step holds at its fullest, by part. The allocator's slack is not in it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// Parameters as the layers compute with them.
    pub parameter_bytes: u64,
    /// f32 masters, where the layers compute in another type.
    pub master_bytes: u64,
    /// The optimizer's two moments, f32.
    pub moment_bytes: u64,
    /// Gradients, f32.
    pub gradient_bytes: u64,
    /// What the forward pass keeps for the backward pass, of one micro-batch, with the recipe's activation checkpointing.
    pub activation_bytes: u64,
    /// Temporaries of one block and of the loss.
    pub workspace_bytes: u64,
    /// The program, its libraries and their own memory: an assumption.
    pub program_bytes: u64,
    /// All of them.
    pub total_bytes: u64,
    /// Activations by `activation_checkpoint.mode`, to choose with.
    pub activations_by_mode: Vec<(&'static str, u64)>,
    /// Memory there is; 0 where unknown.
    pub available_bytes: u64,
    /// Whether it fits, by nine tenths of what there is; `None` where that is unknown.
    pub fits: Option<bool>,
}

/// Numbers that one block keeps of one token for its backward pass, in values, and beside them bytes of f32.
fn kept_per_token(shape: &ModelShape) -> (u64, u64) {
    let [d_model, d_ff] = [shape.d_model, shape.d_ff].map(|size| size as u64);
    let (q, kv) = (shape.q_width() as u64, shape.kv_width() as u64);
    let (heads, kv_heads) = (shape.num_heads as u64, shape.num_kv_heads as u64);
    // Input and normed input of both halves, gate and up, their product.
    let common = 4 * d_model + 3 * d_ff;
    let packed = q + 2 * kv;
    let lse = F32 * heads;
    match shape.attention {
        // Before and after q/k-norm and rotation, and the output.
        Attention::Mha | Attention::Swa { .. } => (common + 2 * packed + q, lse),
        // z (f32), expire (i32), and one key list of 1024 + w entries for 1024 queries.
        Attention::Dma { .. } => (common + 2 * packed + q, lse + 4 * F32 * kv_heads),
        Attention::Mla(mla) => {
            let (rank, rope) = (mla.kv_lora_rank as u64, mla.qk_rope_head_dim as u64);
            let queries = q + heads * rope;
            // q; latent and rotated key, then normed; up-projection; packed q, k and v; output.
            let attention = queries + (rank + rope) + rank + 2 * q + (2 * queries + q) + q;
            (common + attention, lse)
        }
        Attention::Nsa(nsa) => {
            let copies = 2 * kv * nsa.num_kv_copies() as u64;
            let branches = NUM_NSA_BRANCHES as u64;
            let compressed = 4 * kv / nsa.compress_stride as u64;
            let attention = 2 * (q + copies) + branches * (q + heads) + q + compressed;
            (common + attention, branches * lse)
        }
    }
}

/// Bytes that the forward pass keeps of one token over all blocks, when every `recomputed[i]` block keeps its input alone.
pub fn activation_bytes_per_token(
    shape: &ModelShape,
    value_bytes: u64,
    recomputed: impl Fn(usize) -> bool,
) -> u64 {
    let (values, f32_bytes) = kept_per_token(shape);
    let input = shape.d_model as u64 * value_bytes;
    let blocks = (0..shape.num_layers).map(|layer_idx| {
        if recomputed(layer_idx) {
            input
        } else {
            values * value_bytes + f32_bytes
        }
    });
    // The stream after the last block, and its gradient.
    blocks.sum::<u64>() + 2 * input
}

/// Memory of one stage's training step.
pub fn memory_plan(recipe: &Recipe, shape: &ModelShape, target: &Target) -> MemoryPlan {
    let value_bytes = target.value_bytes();
    let num_parameters = shape.parameters().total();
    let tokens = (recipe.training.local_batch_size * recipe.training.seq_len) as u64;
    let section = &recipe.activation_checkpoint;
    let activations = |recomputed: &dyn Fn(usize) -> bool| {
        tokens * activation_bytes_per_token(shape, value_bytes, recomputed)
    };
    let modes = {
        use crate::recipe::ActivationCheckpointMode::{Full, None, Selective};
        [("none", None), ("selective", Selective), ("full", Full)].map(|(name, mode)| {
            let mut section = section.clone();
            section.mode = mode;
            let bytes = activations(&|layer_idx| section.recomputes(layer_idx));
            (name, bytes)
        })
    };
    let activation_bytes = activations(&|layer_idx| section.recomputes(layer_idx));
    let recomputes_any = (0..shape.num_layers).any(|layer_idx| section.recomputes(layer_idx));
    let workspace_bytes = workspace(shape, tokens, value_bytes, recomputes_any);
    let parameter_bytes = num_parameters * value_bytes;
    let master_bytes = if value_bytes == F32 {
        0
    } else {
        num_parameters * F32
    };
    let moment_bytes = 2 * F32 * num_parameters;
    let gradient_bytes = F32 * num_parameters;
    let program_bytes = match target {
        Target::Cpu { .. } => CPU_PROGRAM_BYTES,
        Target::Gpu(_) => GPU_PROGRAM_BYTES,
    };
    let total_bytes = program_bytes
        + parameter_bytes
        + master_bytes
        + moment_bytes
        + gradient_bytes
        + activation_bytes
        + workspace_bytes;
    let available_bytes = target.memory_bytes();
    MemoryPlan {
        parameter_bytes,
        master_bytes,
        moment_bytes,
        gradient_bytes,
        activation_bytes,
        workspace_bytes,
        program_bytes,
        total_bytes,
        activations_by_mode: modes.to_vec(),
        available_bytes,
        fits: (available_bytes > 0).then(|| total_bytes * 10 <= available_bytes * 9),
    }
}

/// The larger of the loss (a chunk of logits, the gradient of the output weight, of the stream) and of one block's
/// backward pass (gradients of its widest activations, and the block itself where it is computed again).
fn workspace(shape: &ModelShape, tokens: u64, value_bytes: u64, recomputes: bool) -> u64 {
    let (d_model, vocab) = (shape.d_model as u64, shape.vocab_size as u64);
    let rows = (MAX_LOGITS / vocab).clamp(1, MAX_CHUNK_ROWS).min(tokens);
    let loss = rows * vocab * F32 + vocab * d_model * F32 + 2 * tokens * d_model * value_bytes;
    let (values, f32_bytes) = kept_per_token(shape);
    let kept = if recomputes {
        tokens * (values * value_bytes + f32_bytes)
    } else {
        0
    };
    let packed = (shape.q_width() + 2 * shape.kv_width()) as u64;
    let widest = (3 * shape.d_ff as u64).max(2 * packed) + 2 * d_model;
    loss.max(kept + tokens * widest * value_bytes)
}
