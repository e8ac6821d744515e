//! Which way each op goes.

use serde::Serialize;

use super::Target;
use crate::model::{Attention, ModelShape};
use crate::recipe::Recipe;
use crate::{ReferenceTooLarge, ScoreMatrix};

/// One op.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpPlan {
    /// What it computes.
    pub op: &'static str,
    /// `"cpu kernel"`, `"cuda kernel"`, `"cuda library"`, or `"plain"`: Burn's own ops, slower.
    pub path: &'static str,
    /// Why.
    pub reason: String,
}

/// Head widths that the CUDA attention kernels take: multiples of this, up to [`CUDA_MAX_HEAD_DIM`].
const CUDA_HEAD_DIM_STEP: usize = 16;
const CUDA_MAX_HEAD_DIM: usize = 256;
/// KV heads that the CUDA score kernel of DMA takes.
const CUDA_MAX_KV_HEADS: usize = 32;

/// The ops of a training step, with the path each takes on `target` by the sizes of `shape`.
///
/// A running program counts the calls itself and prints each op that took the plain path.
pub fn op_plans(shape: &ModelShape, target: &Target) -> Vec<OpPlan> {
    let names: &[&'static str] = match shape.attention {
        Attention::Mha | Attention::Swa { .. } => &["attention"],
        Attention::Mla(_) => &["latent attention"],
        Attention::Nsa(_) => &["compression", "selection", "selected and window attention"],
        Attention::Dma(_) => &["dma scores", "dma selection", "dma attention"],
    };
    let rest = [
        "matrix products",
        "norms, rotation, embedding",
        "swiglu",
        "loss",
        "adamw",
    ];
    let all = names.iter().map(|name| (*name, true));
    let all = all.chain(rest.into_iter().map(|name| (name, false)));
    all.map(|(op, is_attention)| {
        let (path, reason) = match target {
            Target::Cpu { .. } => (
                "cpu kernel",
                "f32, SIMD and all threads; sums in a fixed order".to_owned(),
            ),
            Target::Gpu(_) if is_attention => cuda_attention(op, shape),
            Target::Gpu(_) => cuda_rest(op),
        };
        OpPlan { op, path, reason }
    })
    .collect()
}

/// Why the attention of `shape` has no kernel on a GPU: its reference, which holds a score for every pair of tokens,
/// would run there. `None` where there are kernels.
pub fn gpu_attention_gap(shape: &ModelShape) -> Option<String> {
    let width = shape.head_dim;
    match shape.attention {
        Attention::Nsa(_) => Some("there is no CUDA kernel for nsa yet".to_owned()),
        Attention::Mla(_) => Some("there is no CUDA kernel for mla yet".to_owned()),
        _ if !width.is_multiple_of(CUDA_HEAD_DIM_STEP) || width > CUDA_MAX_HEAD_DIM => {
            Some(format!(
                "heads of {width} are no multiple of {CUDA_HEAD_DIM_STEP} up to {CUDA_MAX_HEAD_DIM}"
            ))
        }
        _ => None,
    }
}

/// Refuses a recipe whose attention would run as its reference on a GPU, with more scores than that may hold, in any
/// stage.
///
/// # Errors
/// [`ReferenceTooLarge`].
pub fn check_gpu_attention(recipe: &Recipe, shape: &ModelShape) -> Result<(), ReferenceTooLarge> {
    let Some(reason) = gpu_attention_gap(shape) else {
        return Ok(());
    };
    let op = format!("{} attention", recipe.attention.kind().name());
    for stage in recipe.stages() {
        let scores = ScoreMatrix {
            batch: stage.section.local_batch_size,
            num_heads: shape.num_heads,
            seq_len: stage.section.seq_len,
        };
        scores.check(&op, "a GPU", &reason)?;
    }
    Ok(())
}

fn cuda_attention(op: &str, shape: &ModelShape) -> (&'static str, String) {
    let plain = |reason: String| ("plain", reason);
    if let Some(reason) = gpu_attention_gap(shape) {
        return plain(format!("{reason}; the reference holds n x n scores"));
    }
    let width = shape.head_dim;
    if op == "dma scores" && shape.num_kv_heads > CUDA_MAX_KV_HEADS {
        return plain(format!(
            "{} KV heads, the kernel takes up to {CUDA_MAX_KV_HEADS}",
            shape.num_kv_heads
        ));
    }
    let reason = match op {
        "dma attention" => "keys gathered by list, none outside it is read",
        "dma selection" => "exact top w as one integer a key; no n x n mask",
        _ => "bf16 in, f32 sums; packed documents",
    };
    ("cuda kernel", format!("{reason}; heads of {width}"))
}

fn cuda_rest(op: &str) -> (&'static str, String) {
    let kernel = |reason: &str| ("cuda kernel", reason.to_owned());
    match op {
        "matrix products" => (
            "cuda library",
            "cuBLASLt, in the order of the other launches".to_owned(),
        ),
        "loss" => kernel("logits by cuBLASLt in chunks, never all of them; the rest in one launch"),
        "adamw" => kernel("f32 masters, moments and bf16 weights in one pass"),
        _ => kernel("forward and backward in one launch each, sums in f32"),
    }
}
