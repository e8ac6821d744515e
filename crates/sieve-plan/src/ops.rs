//! The path of each op, kernel or reference, on a device.

use serde::Serialize;

use crate::Target;
use sieve_core::kinds::{AttentionOp, HeadWidths, KeyReads};
use sieve_core::model::ModelShape;
use sieve_core::recipe::Recipe;
use sieve_core::{ReferenceTooLarge, ScoreMatrix};
use sieve_kernels::{
    AttentionNeeds, AttentionShape, ChoiceLists, HEAD_DIM_STEP, MAX_HEAD_DIM, NeededKernels, NeededKeys, ScoreBias,
    SumOrder,
};

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

/// The ops of the training steps of models of these shapes, which a run has in its stages, and their paths on `target`.
///
/// A running program counts the calls itself and prints each op that ran as its reference.
pub fn op_plans(shapes: &[ModelShape], target: &Target) -> Vec<OpPlan> {
    let rest = ["GEMMs", "norms, rotation, embedding", "swiglu", "loss", "adamw"];
    let attention = shapes.iter().flat_map(ModelShape::by_kind).flat_map(|part| {
        let ops = part.attention.as_kind().ops(&part).iter();
        ops.map(move |op| (*op, part.clone())).collect::<Vec<_>>()
    });
    let on_cpu = || ("cpu kernel", "f32, SIMD and all threads; sums in a fixed order".to_owned());
    let attention = attention.map(|(op, part)| {
        let (path, reason) = match target {
            Target::Cpu { .. } => on_cpu(),
            Target::Gpu(gpu) => cuda_attention(op, &part, &gpu.arch),
        };
        OpPlan { op: op.name(), path, reason }
    });
    let rest = rest.into_iter().map(|op| {
        let (path, reason) = match target {
            Target::Cpu { .. } => on_cpu(),
            Target::Gpu(_) => cuda_rest(op),
        };
        OpPlan { op, path, reason }
    });
    let mut all = Vec::new();
    for op in attention.chain(rest) {
        if !all.contains(&op) {
            all.push(op);
        }
    }
    all
}

/// Widths of heads that the attention kernels take.
const WIDTHS: HeadWidths = HeadWidths { step: HEAD_DIM_STEP, most: MAX_HEAD_DIM };

/// Why the attention of `shape` has no kernel on a GPU, so that its reference would run, which holds n x n scores.
/// `None` if there is a kernel.
pub fn gpu_attention_gap(shape: &ModelShape) -> Option<String> {
    shape.by_kind().iter().find_map(|part| part.attention.as_kind().gpu_gap(part, WIDTHS))
}

/// Why training runs attention as its reference on a GPU of `arch` (such as `sm_86`): [`gpu_attention_gap`], or a
/// kernel's tiles do not fit into shared memory.
pub fn gpu_training_gap(shape: &ModelShape, arch: &str) -> Option<String> {
    gpu_attention_gap(shape).or_else(|| refused_tiles(shape, arch))
}

/// Why tiles of one of the attention's kernels do not fit into the shared memory of `arch`; `None` if all fit.
fn refused_tiles(shape: &ModelShape, arch: &str) -> Option<String> {
    shape.by_kind().iter().find_map(|part| {
        let head_dim = part.key_width();
        let heads = [part.num_heads, part.num_kv_heads];
        let shape = AttentionShape::new(1, part.max_seq_len, heads, [head_dim, part.head_dim]);
        let order = SumOrder::Any;
        part.attention.as_kind().reads().iter().find_map(|&reads| {
            let needs = AttentionNeeds { shape, keys: needed_keys(reads), order, has_sinks: part.attention_sinks };
            needs.gap(arch).map(|error| error.to_string())
        })
    })
}

/// The kernels that read keys this way, as the launch wrappers name them.
fn needed_keys(reads: KeyReads) -> NeededKeys {
    match reads {
        KeyReads::Neighbours => NeededKeys::Neighbours,
        KeyReads::Bands => NeededKeys::Bands,
        KeyReads::Listed(bias) => NeededKeys::Chosen(bias.into()),
        KeyReads::Blocks => NeededKeys::Blocks,
    }
}

/// Fails if in some stage attention would run as its reference on a GPU of `arch`, with more scores than a reference
/// may hold.
///
/// # Errors
/// [`ReferenceTooLarge`].
pub fn check_gpu_attention(recipe: &Recipe, shape: &ModelShape, arch: &str) -> Result<(), ReferenceTooLarge> {
    for stage in recipe.stages() {
        let shape = &recipe.shape_at(&stage, shape);
        let of_any_row = gpu_training_gap(shape, arch);
        let op = format!("{} attention", shape.attention.kind().name());
        let seq_len = stage.section.seq_len;
        // `None`: the kernels take the stage's rows.
        let Some(reason) = of_any_row.or_else(|| row_gap(shape, seq_len, arch)) else {
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
    let shared_bytes = NeededKernels::shared_bytes_of(arch)?;
    shape.attentions().into_iter().find_map(|(attention, _)| {
        // Only kernels of kinds with blocks limit a row: they count in shared memory.
        let size = attention.as_kind().attended_blocks()?.select_block_size;
        let (name, most) = (attention.kind().name(), ChoiceLists::most_tokens(size, shared_bytes));
        let gap = format!(
            "{seq_len} tokens, the kernels of {name} take rows up to {most} of them in blocks of {size} on {arch}"
        );
        (seq_len > most).then_some(gap)
    })
}

/// [`OpPlan::path`] and [`OpPlan::reason`] of one of attention's ops on a GPU.
fn cuda_attention(op: AttentionOp, shape: &ModelShape, arch: &str) -> (&'static str, String) {
    let plain = |reason: String| ("plain", reason);
    if let Some(reason) = gpu_training_gap(shape, arch) {
        return plain(format!("{reason}; the reference holds n x n scores"));
    }
    let (kv_heads, most) = (shape.num_kv_heads, ScoreBias::MAX_KV_HEADS);
    if op.bounds_kv_heads() && kv_heads > most {
        return plain(format!("{kv_heads} KV heads, the kernel takes up to {most}"));
    }
    let width = match shape.latent() {
        None => shape.head_dim.to_string(),
        Some(latent) => format!("{} + {}", shape.head_dim, latent.rope_width),
    };
    ("cuda kernel", format!("{}; heads of {width}", op.on_cuda()))
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
