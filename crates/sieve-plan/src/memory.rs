//! Memory of training, by part: weights, moments, gradients, activations and others.
//!
//! The tensors of a training step are added up at each moment that can be its peak:
//! - in the loss, where all blocks wait for their backward pass;
//! - in the last block's backward pass;
//! - in the first block's backward pass, when all gradients exist;
//! - in the embedding's backward pass, whose gradient may be as large as several blocks';
//! - with context parallelism, in a validation, whose rows are not divided among ranks.
//!
//! A checkpoint being written is added too: on a CPU to the planned memory, on a GPU to the host's.

mod activations;
mod advice;
mod inference;
mod verdict;

pub use activations::activation_bytes_per_token;
pub use advice::FittingSetting;
use inference::forward_bytes;
pub use inference::{InferenceSize, import_memory, inference_memory};
pub use verdict::MemoryVerdict;

use serde::Serialize;

use crate::Target;
use crate::context_parallel::RowShare;
pub(crate) use activations::fp8_products;
use activations::{F32, block_kept, block_temporaries, fp8_kept, times};
use sieve_core::model::ModelShape;
use sieve_core::recipe::{OptimizerName, Recipe};
use sieve_core::{KeepOLow, Keeping};
use sieve_cpu::linear_cross_entropy::chunk_rows;

/// Memory of a process on a CPU before it has a model, as measured.
const CPU_PROGRAM_BYTES: u64 = 110 << 20;
/// GPU memory of a process before it has a model: the context and cuBLASLt's workspace.
const GPU_PROGRAM_BYTES: u64 = 700 << 20;

/// GPU memory that NCCL takes, measured on two H200s.
const NCCL_BYTES: u64 = 388 << 20;
/// Segments whose gradients exist at the same time while they are reduced over all ranks.
const SUMS_UNDER_WAY: u64 = 3;

/// Host memory per parameter while a checkpoint is written: f32 copies of the weight and two moments.
const CHECKPOINT_BYTES: u64 = 3 * F32;

/// Memory at a training step's peak, by part, without the allocator's overhead.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// Parameters in the type that the layers compute in.
    pub parameter_bytes: u64,
    /// Bits of the f32 master weights that the parameters lack, and the ranks' copies; 0 for f32 parameters.
    pub master_bytes: u64,
    /// The optimizer's moments, f32.
    pub moment_bytes: u64,
    /// KV caches of decoded sequences; 0 in training.
    pub cache_bytes: u64,
    /// Gradients that exist at the peak.
    pub gradient_bytes: u64,
    /// Activations that exist at the peak, with the recipe's activation checkpointing.
    pub activation_bytes: u64,
    /// Temporary tensors at the peak.
    pub workspace_bytes: u64,
    /// A checkpoint being written, on a CPU.
    pub checkpoint_bytes: u64,
    /// A checkpoint being written by a run on a GPU, in host memory; not in the total.
    pub host_checkpoint_bytes: u64,
    /// Optional activations that there is room to keep, for the trainer (`sieve_train::Hardware::keeping`).
    pub keeping: Keeping,
    /// The program and its libraries: an assumption.
    pub program_bytes: u64,
    /// Sum of all parts.
    pub total_bytes: u64,
    /// Name of the moment of the peak.
    pub moment: &'static str,
    /// Activations of all blocks by `activation_checkpoint.mode`, to choose with.
    pub activations_by_mode: Vec<(&'static str, u64)>,
    /// Free memory; 0 if unknown.
    pub available_bytes: u64,
    /// Whether it fits.
    pub verdict: MemoryVerdict,
    /// If it may not fit: settings with which it fits into nine tenths of the free memory.
    pub would_fit: Vec<FittingSetting>,
}

impl MemoryPlan {
    /// (name, bytes) of every part that is not 0, in the order in which a run allocates them.
    pub fn parts(&self) -> Vec<(&'static str, u64)> {
        let parts = [
            ("program", self.program_bytes),
            ("parameters", self.parameter_bytes),
            ("rest of f32 masters", self.master_bytes),
            ("moments", self.moment_bytes),
            ("caches", self.cache_bytes),
            ("activations", self.activation_bytes),
            ("workspace", self.workspace_bytes),
            ("gradients", self.gradient_bytes),
            ("checkpoint", self.checkpoint_bytes),
        ];
        parts.into_iter().filter(|(_, bytes)| *bytes > 0).collect()
    }
}

/// Memory at one moment of a training step or of another command.
#[derive(Default)]
struct Moment {
    name: &'static str,
    parameter_bytes: u64,
    master_bytes: u64,
    moment_bytes: u64,
    cache_bytes: u64,
    gradient_bytes: u64,
    activation_bytes: u64,
    workspace_bytes: u64,
    checkpoint_bytes: u64,
}

impl Moment {
    fn total(&self) -> u64 {
        let weights = self.parameter_bytes + self.master_bytes + self.moment_bytes + self.cache_bytes;
        weights + self.gradient_bytes + self.activation_bytes + self.workspace_bytes + self.checkpoint_bytes
    }

    /// The plan of a process, one of `ranks`, whose peak is this moment.
    fn plan(self, target: &Target, ranks: usize) -> MemoryPlan {
        let program_bytes = match target {
            Target::Cpu { .. } => CPU_PROGRAM_BYTES,
            Target::Gpu(_) if ranks > 1 => GPU_PROGRAM_BYTES + NCCL_BYTES,
            Target::Gpu(_) => GPU_PROGRAM_BYTES,
        };
        let total_bytes = program_bytes + self.total();
        let available_bytes = target.memory_bytes();
        MemoryPlan {
            parameter_bytes: self.parameter_bytes,
            master_bytes: self.master_bytes,
            moment_bytes: self.moment_bytes,
            cache_bytes: self.cache_bytes,
            gradient_bytes: self.gradient_bytes,
            activation_bytes: self.activation_bytes,
            workspace_bytes: self.workspace_bytes,
            checkpoint_bytes: self.checkpoint_bytes,
            host_checkpoint_bytes: 0,
            keeping: Keeping::NOTHING,
            program_bytes,
            total_bytes,
            moment: self.name,
            activations_by_mode: Vec::new(),
            available_bytes,
            verdict: MemoryVerdict::of(total_bytes, available_bytes),
            would_fit: Vec::new(),
        }
    }
}

/// Memory of one stage's training step, on each of `ranks` ranks. Keeps the optional activations if there is room.
pub fn memory_plan(recipe: &Recipe, shape: &ModelShape, target: &Target, ranks: usize) -> MemoryPlan {
    let needed = |recipe: &Recipe| {
        let with = |recomputable, o_low| {
            let keeping = Keeping { o_low, recomputable };
            needed(recipe, shape, target, ranks, keeping)
        };
        let is_gpu = matches!(target, Target::Gpu(_));
        let more = [is_gpu, false].map(|recomputable| with(recomputable, KeepOLow::Always));
        let fits = |plan: &MemoryPlan| plan.total_bytes <= plan.available_bytes / 10 * 9;
        let more = more.into_iter().find(fits);
        more.unwrap_or_else(|| with(false, KeepOLow::ShortRows))
    };
    let mut plan = needed(recipe);
    if plan.verdict.needs_advice() {
        let rows_apart = ranks / RowShare::of(recipe).degree;
        plan.would_fit = advice::settings_that_fit(recipe, rows_apart.max(1), needed);
    }
    plan
}

fn needed(recipe: &Recipe, shape: &ModelShape, target: &Target, ranks: usize, keeping: Keeping) -> MemoryPlan {
    let value_bytes = target.value_bytes();
    let num_parameters = shape.parameters().total();
    let section = &recipe.activation_checkpoint;
    let rows = RowShare::of(recipe);
    let (seq_len, tokens) = (rows.attended(shape), rows.tokens() as u64);
    let modes = {
        use sieve_core::recipe::ActivationCheckpointMode::{Full, None, Selective};
        [("none", None), ("selective", Selective), ("full", Full)].map(|(name, mode)| {
            let mut section = section.clone();
            section.mode = mode;
            let recomputed = |layer_idx| section.recomputes(layer_idx);
            let bytes = activation_bytes_per_token(shape, target, seq_len, keeping, recomputed);
            let fp8 = fp8_bytes(recipe, shape, target, keeping, recomputed);
            let parts = (0..shape.num_layers).filter(|&layer| !section.recomputes(layer));
            let parts = parts.map(|layer| rows.kept_bytes(&shape.of_layer(layer), value_bytes));
            let all = times(tokens, bytes).saturating_add_signed(fp8);
            (name, all + parts.sum::<u64>())
        })
    };
    let moments = moments(recipe, shape, target, ranks, keeping);
    let fullest = moments.into_iter().max_by_key(Moment::total);
    let fullest = fullest.expect("there are several");
    let parameter_bytes = times(num_parameters, value_bytes);
    // With ZeRO a rank holds the masters of its shard, and a copy of that shard of the parameters.
    let shards = if recipe.parallelism.zero_stage == 0 { 1 } else { ranks };
    let piece = num_parameters.div_ceil(shards as u64);
    let master_bytes = match (value_bytes, shards) {
        (_, 2..) => times(piece, F32),
        (F32, _) => 0,
        _ => times(piece, F32 - value_bytes),
    };
    // Muon has one moment instead of two for the blocks' matrices. It does not shard.
    let without_second = match recipe.optimizer.name {
        OptimizerName::AdamW => 0,
        OptimizerName::Muon => shape.parameters().attention + shape.parameters().mlp,
    };
    let moment_bytes = times(piece + piece.saturating_sub(without_second), F32);
    let fullest = Moment {
        parameter_bytes,
        master_bytes,
        moment_bytes,
        ..fullest
    };
    MemoryPlan {
        host_checkpoint_bytes: match target {
            Target::Cpu { .. } => 0,
            Target::Gpu(_) => times(piece, CHECKPOINT_BYTES),
        },
        keeping,
        activations_by_mode: modes.to_vec(),
        ..fullest.plan(target, ranks)
    }
}

fn moments(recipe: &Recipe, shape: &ModelShape, target: &Target, ranks: usize, keeping: Keeping) -> Vec<Moment> {
    let training = &recipe.training;
    let section = &recipe.activation_checkpoint;
    let rows = RowShare::of(recipe);
    let (seq_len, tokens) = (rows.attended(shape), rows.tokens() as u64);
    let of_parts = |layer_idx: usize| rows.kept_bytes(&shape.of_layer(layer_idx), target.value_bytes());
    let recomputes = |layer_idx: usize| section.recomputes(layer_idx);
    let per_token = activation_bytes_per_token(shape, target, seq_len, keeping, recomputes);
    let layers = (0..shape.num_layers).filter(|&layer_idx| !recomputes(layer_idx));
    let blocks = times(tokens, per_token).saturating_add_signed(fp8_bytes(recipe, shape, target, keeping, recomputes))
        + layers.map(of_parts).sum::<u64>();
    let stream = times(tokens, shape.d_model as u64 * target.value_bytes());

    let num_parameters = shape.parameters().total();
    let dtype_bytes = training.gradient_dtype.bytes();
    let all_gradients = times(num_parameters, dtype_bytes);
    let shards = all_gradients / ranks as u64;
    let head_gradient = F32 * (shape.vocab_size * shape.d_model) as u64;
    let adds_up = training.global_batch_size * rows.degree > training.local_batch_size * ranks;
    // With several ranks, gradients are reduced while the backward pass goes on: in the last micro-batch, and with
    // ZeRO-2 in every one.
    let blocks_total = shape.parameters().non_embedding();
    let block = times(blocks_total / shape.num_layers.max(1) as u64, F32);
    let stage = recipe.parallelism.zero_stage;
    let keeps_shards = ranks > 1 && stage > 0 && (!adds_up || stage > 1);
    // The gradient of a tied embedding exists from the head's backward pass on.
    let waits = if shape.tie_word_embeddings { head_gradient } else { 0 };
    // Sharded sums of earlier micro-batches exist in addition to the gradients being reduced.
    let on_their_way = |bytes: u64| if adds_up { bytes + bytes / ranks as u64 } else { bytes };
    let [at_the_end, in_embedding] = match keeps_shards {
        true => {
            let blocks = |count: u64| on_their_way(count * block);
            let most = on_their_way(times(num_parameters, F32));
            [
                waits + blocks(SUMS_UNDER_WAY),
                head_gradient + blocks(SUMS_UNDER_WAY - 1),
            ]
            .map(|under_way| shards + under_way.min(most))
        }
        false => [all_gradients; 2],
    };
    // From the second micro-batch on every weight has a gradient, or a shard of one. In the loss, the head's new
    // gradient exists in addition until it is added.
    let (before, new) = match (adds_up, keeps_shards) {
        (true, false) => (all_gradients, head_gradient),
        (true, true) => (shards + head_gradient, 0),
        (false, _) => (head_gradient, 0),
    };
    let behind_head = match (adds_up, keeps_shards) {
        (true, true) => shards + on_their_way(head_gradient) + block,
        _ => before,
    };
    let exchanged = shape.by_kind().into_iter();
    let exchanged = exchanged.map(|part| rows.temporary_bytes(&part, target.value_bytes()));
    let temporaries =
        block_temporaries(shape, target, &rows.recipe_of_part(recipe).training, &rows) + exchanged.max().unwrap_or(0);
    // All activations of a recomputed block exist while its backward pass runs.
    let kept = |layer_idx: usize| {
        let block = block_kept(&shape.of_layer(layer_idx), target, seq_len, keeping);
        let others = |other: usize| other != layer_idx;
        let fp8 = fp8_bytes(recipe, shape, target, keeping, others);
        times(tokens, block).saturating_add_signed(fp8) + of_parts(layer_idx)
    };
    let recomputed = |layer_idx: usize| {
        if recomputes(layer_idx) { kept(layer_idx) } else { 0 }
    };
    let last = shape.num_layers.saturating_sub(1);
    let written = match target {
        Target::Cpu { .. } => {
            let piece = shape.parameters().total().div_ceil(ranks as u64);
            times(piece, CHECKPOINT_BYTES)
        }
        Target::Gpu(_) => 0,
    };
    // Only a checkpoint before the last step is written while another step runs.
    let beside = if recipe.checkpoint.interval < training.steps {
        written
    } else {
        0
    };
    let mut moments = vec![
        Moment {
            name: "the loss",
            gradient_bytes: before,
            activation_bytes: blocks + stream,
            // The final norm's output and its gradient, and a chunk of logits.
            workspace_bytes: 2 * stream + logit_bytes(shape, tokens, target) + new,
            checkpoint_bytes: beside,
            ..Moment::default()
        },
        Moment {
            name: "the last block's backward pass",
            gradient_bytes: behind_head,
            activation_bytes: blocks + recomputed(last),
            workspace_bytes: temporaries,
            checkpoint_bytes: beside,
            ..Moment::default()
        },
        Moment {
            name: "the first block's backward pass",
            gradient_bytes: at_the_end,
            activation_bytes: kept(0),
            workspace_bytes: temporaries,
            checkpoint_bytes: beside,
            ..Moment::default()
        },
        Moment {
            name: "the embedding's backward pass",
            gradient_bytes: in_embedding,
            workspace_bytes: stream,
            checkpoint_bytes: beside,
            ..Moment::default()
        },
        Moment {
            name: "the last checkpoint",
            checkpoint_bytes: written,
            ..Moment::default()
        },
    ];
    if rows.degree > 1 {
        // A validation reads whole rows on each rank.
        let size = InferenceSize {
            rows: rows.batch.min(recipe.validation.tokens.div_ceil(rows.seq_len.max(1))),
            ..InferenceSize::rows_of(rows.seq_len, 0)
        };
        moments.push(Moment {
            name: "validation",
            activation_bytes: forward_bytes(shape, size, target),
            checkpoint_bytes: beside,
            ..Moment::default()
        });
    }
    moments
}

/// Bytes that fp8 blocks keep in addition to bf16 ones; negative if they keep less. `recomputed` blocks do not count.
fn fp8_bytes(
    recipe: &Recipe,
    shape: &ModelShape,
    target: &Target,
    keeping: Keeping,
    recomputed: impl Fn(usize) -> bool,
) -> i64 {
    let tokens = RowShare::of(recipe).tokens() as u64;
    let blocks = recipe.training.fp8_blocks(shape.num_layers);
    let kept = blocks.filter(|&layer_idx| !recomputed(layer_idx));
    kept.map(|layer_idx| fp8_kept(&shape.of_layer(layer_idx), target, tokens, keeping))
        .sum()
}

/// Bytes of a chunk of logits in the loss.
fn logit_bytes(shape: &ModelShape, tokens: u64, target: &Target) -> u64 {
    let (tokens, vocab_size) = (tokens as usize, shape.vocab_size);
    let rows = match target {
        Target::Cpu { .. } => chunk_rows(vocab_size).min(tokens),
        Target::Gpu(_) => sieve_kernels::loss_block_tokens(tokens, vocab_size),
    };
    times(rows as u64, vocab_size as u64 * target.value_bytes())
}
