//! The path of each op, kernel or reference, on a device.

use serde::Serialize;

use crate::Target;
use sieve_core::model::{AttentionForm, ModelShape};
use sieve_core::recipe::Recipe;
use sieve_core::{ReferenceTooLarge, ScoreMatrix};
use sieve_kernels::{AttentionNeeds, AttentionShape, ChoiceLists, NeededKernels, NeededKeys, ScoreBias, SumOrder};

/// An op, and whether it runs as a kernel or as the reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpPlan {
    /// Name of the op.
    pub op: &'static str,
    /// `"cpu kernel"`, `"cuda kernel"`, `"cuda library"`, or `"plain"`: the slower reference of Burn's own ops.
    pub path: &'static str,
    /// What the path does, or why there is no kernel.
    pub reason: String,
}

/// The ops of a training step and their paths on `target`.
///
/// A running program counts the calls itself and prints each op that ran as its reference.
pub fn op_plans(shape: &ModelShape, target: &Target) -> Vec<OpPlan> {
    let names = shape.by_kind();
    let names = names.iter().flat_map(|part| -> &[&'static str] {
        match part.attention.form() {
            AttentionForm::Grouped { .. } => &["attention"],
            AttentionForm::Latent(_) => &["latent attention"],
            AttentionForm::Branches(_) => &["compression", "selection", "selected and window attention"],
            AttentionForm::Ranked(_) => &["dma scores", "dma selection", "dma attention"],
            // Layers with their own choice come first and have the same ops.
            AttentionForm::Blocks(_) if part.is_shared_layer(0) => &[],
            AttentionForm::Blocks(_) => &["choice of blocks", "attention over chosen blocks"],
        }
    });
    let rest = ["GEMMs", "norms, rotation, embedding", "swiglu", "loss", "adamw"];
    // (name, whether the op belongs to attention).
    let all = names.map(|name| (*name, true));
    let all = all.chain(rest.into_iter().map(|name| (name, false)));
    all.map(|(op, is_attention)| {
        let (path, reason) = match target {
            Target::Cpu { .. } => ("cpu kernel", "f32, SIMD and all threads; sums in a fixed order".to_owned()),
            Target::Gpu(gpu) if is_attention => cuda_attention(op, shape, &gpu.arch),
            Target::Gpu(_) => cuda_rest(op),
        };
        OpPlan { op, path, reason }
    })
    .collect()
}

/// Why the attention of `shape` has no kernel on a GPU, so that its reference would run, which holds n x n scores.
/// `None` if there is a kernel.
pub fn gpu_attention_gap(shape: &ModelShape) -> Option<String> {
    let width = shape.head_dim;
    let (step, most) = (AttentionShape::HEAD_DIM_STEP, AttentionShape::MAX_HEAD_DIM);
    let group = shape.num_heads / shape.num_kv_heads;
    let of_blocks = |gap: Option<(String, &str)>| {
        let name = shape.attention.kind().name();
        gap.map(|(got, supported)| format!("{got}, the kernels of {name} take {supported}"))
    };
    match shape.attention.form() {
        AttentionForm::Branches(nsa) => of_blocks(nsa.blocks().cuda_gap(width, group)),
        AttentionForm::Blocks(choice) => of_blocks(choice.cuda_gap(width, group)),
        AttentionForm::Latent(mla) => {
            let rope = mla.qk_rope_head_dim;
            let fits = [width, rope, width + rope].map(AttentionShape::supports_head_dim);
            fits.contains(&false)
                .then(|| format!("heads of {width} + {rope} are no multiples of {step} with a sum up to {most}"))
        }
        _ if AttentionShape::supports_head_dim(width) => None,
        _ => Some(format!("heads of {width} are no multiple of {step} up to {most}")),
    }
}

/// Why training runs attention as its reference on a GPU of `arch` (such as `sm_86`): [`gpu_attention_gap`], or a
/// kernel's tiles do not fit into shared memory.
pub fn gpu_training_gap(shape: &ModelShape, arch: &str) -> Option<String> {
    gpu_attention_gap(shape).or_else(|| refused_tiles(shape, arch))
}

/// Why tiles of one of the attention's kernels do not fit into the shared memory of `arch`; `None` if all fit.
fn refused_tiles(shape: &ModelShape, arch: &str) -> Option<String> {
    shape.by_kind().iter().find_map(|part| {
        let (head_dim, keys): (_, &[NeededKeys]) = match part.attention.form() {
            AttentionForm::Grouped { .. } => (part.head_dim, &[NeededKeys::Neighbours]),
            AttentionForm::Latent(mla) => (part.head_dim + mla.qk_rope_head_dim, &[NeededKeys::Neighbours]),
            AttentionForm::Ranked(_) => (part.head_dim, &[NeededKeys::Chosen(ScoreBias::Exp)]),
            AttentionForm::Branches(_) => (part.head_dim, &[NeededKeys::Blocks, NeededKeys::Neighbours]),
            AttentionForm::Blocks(_) => (part.head_dim, &[NeededKeys::Blocks]),
        };
        let heads = [part.num_heads, part.num_kv_heads];
        let shape = AttentionShape::new(1, part.max_seq_len, heads, [head_dim, part.head_dim]);
        let order = SumOrder::Any;
        keys.iter().find_map(|&keys| {
            let needed = AttentionNeeds { shape, keys, order }.kernels(arch);
            needed.refused.first().map(ToString::to_string)
        })
    })
}

/// Fails if in some stage attention would run as its reference on a GPU of `arch`, with more scores than a reference
/// may hold.
///
/// # Errors
/// [`ReferenceTooLarge`].
pub fn check_gpu_attention(recipe: &Recipe, shape: &ModelShape, arch: &str) -> Result<(), ReferenceTooLarge> {
    let of_any_row = gpu_training_gap(shape, arch);
    let op = format!("{} attention", recipe.attention.kind().name());
    for stage in recipe.stages() {
        let seq_len = stage.section.seq_len;
        // `None`: the kernels take the stage's rows.
        let Some(reason) = of_any_row.clone().or_else(|| row_gap(shape, seq_len, arch)) else {
            continue;
        };
        let scores = ScoreMatrix { batch: stage.section.local_batch_size, num_heads: shape.num_heads, seq_len };
        scores.check(&op, "a GPU", &reason)?;
    }
    Ok(())
}

/// Why rows of `seq_len` tokens are too long for the kernels on a GPU of `arch`, if they are. The limit comes from a
/// counter in shared memory for each block of a row.
fn row_gap(shape: &ModelShape, seq_len: usize, arch: &str) -> Option<String> {
    let blocks = match shape.attention.form() {
        AttentionForm::Branches(nsa) => nsa.blocks(),
        AttentionForm::Blocks(choice) => choice.attended(),
        // Other kinds have no such counters.
        _ => return None,
    };
    let size = blocks.select_block_size;
    let most = ChoiceLists::most_tokens(size, NeededKernels::shared_bytes_of(arch)?);
    (seq_len > most).then(|| {
        let name = shape.attention.kind().name();
        format!("{seq_len} tokens, the kernels of {name} take rows up to {most} of them in blocks of {size} on {arch}")
    })
}

/// [`OpPlan::path`] and [`OpPlan::reason`] of one of attention's ops on a GPU.
fn cuda_attention(op: &str, shape: &ModelShape, arch: &str) -> (&'static str, String) {
    let plain = |reason: String| ("plain", reason);
    if let Some(reason) = gpu_training_gap(shape, arch) {
        return plain(format!("{reason}; the reference holds n x n scores"));
    }
    let width = shape.head_dim;
    let (kv_heads, most) = (shape.num_kv_heads, ScoreBias::MAX_KV_HEADS);
    if op == "dma scores" && kv_heads > most {
        return plain(format!("{kv_heads} KV heads, the kernel takes up to {most}"));
    }
    let width = match shape.attention.form() {
        AttentionForm::Latent(mla) => format!("{width} + {}", mla.qk_rope_head_dim),
        _ => width.to_string(),
    };
    let reason = match op {
        "dma attention" => "keys gathered by list, none outside it is read",
        "dma selection" => "exact top w as one integer a key; no n x n mask",
        "compression" => "blocks or their means in one pass, the MLP by cuBLASLt",
        "selection" => "compressed keys by list, importance and choice on the chip; no n x n scores",
        "choice of blocks" if shape.has_pooled_indexer() => {
            "scores by cuBLASLt of some queries at a time, chosen on the chip; no n x n scores"
        }
        "choice of blocks" => "pooled keys scored and chosen on the chip; no n x n scores",
        "selected and window attention" | "attention over chosen blocks" => {
            "block by block over the queries that chose it"
        }
        _ => "bf16 in, f32 sums; packed documents",
    };
    ("cuda kernel", format!("{reason}; heads of {width}"))
}

/// [`OpPlan::path`] and [`OpPlan::reason`] of any other op on a GPU.
fn cuda_rest(op: &str) -> (&'static str, String) {
    let kernel = |reason: &str| ("cuda kernel", reason.to_owned());
    match op {
        "GEMMs" => ("cuda library", "cuBLASLt, in the order of the other launches".to_owned()),
        "loss" => kernel("logits by cuBLASLt in chunks, never all of them; the rest in one launch"),
        "adamw" => kernel("f32 masters, moments and bf16 weights in one pass"),
        _ => kernel("forward and backward in one launch each, sums in f32"),
    }
}
