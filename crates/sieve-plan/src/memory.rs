//! Memory of training, by part: weights, moments, gradients, activations and others.
//!
//! The tensors of a training step are added up at each point of the step that can be its peak:
//! - in the loss, where all blocks wait for their backward pass;
//! - in the last block's backward pass;
//! - in the first block's backward pass, when all gradients exist;
//! - in the embedding's backward pass, whose gradient may be as large as several blocks';
//! - with context parallelism, in a validation, whose rows are not divided among ranks.
//!
//! A checkpoint being written is added too: on a CPU to the planned memory, on a GPU to the host's. On a GPU so is what
//! the allocator holds beyond the tensors (`held.rs`).

mod activations;
mod advice;
mod held;
mod inference;
mod parts;
mod verdict;

pub use activations::activation_bytes_per_token;
use inference::forward_bytes;
pub use inference::{InferenceSize, import_memory, inference_memory};
pub use parts::{FittingSetting, MemoryParts, MemoryPlan};
pub use verdict::MemoryVerdict;

use crate::Target;
use crate::context_parallel::RowShare;
use crate::disk::{num_moments, num_trained};
use activations::{F32, block_kept, block_temporaries, fp8_kept, logit_bytes, times};
pub(crate) use activations::{fp8_gemms, shards_weights};
use sieve_core::model::ModelShape;
use sieve_core::recipe::Recipe;
use sieve_core::{KeepOLow, Keeping};

/// The most GPUs that the advice about a run that does not fit considers.
const MOST_GPUS: usize = 256;
/// Segments whose gradients exist at the same time while they are reduced over all ranks.
const SUMS_UNDER_WAY: u64 = 3;

/// Memory of one stage's training step, on each of `ranks` ranks. Keeps the optional activations if they fit.
pub fn memory_plan(recipe: &Recipe, shape: &ModelShape, target: &Target, ranks: usize) -> MemoryPlan {
    memory_plan_within(recipe, shape, target, ranks, Keeping::ALL)
}

/// As [`memory_plan`], with at most the optional activations of `most`.
pub(crate) fn memory_plan_within(
    recipe: &Recipe,
    shape: &ModelShape,
    target: &Target,
    ranks: usize,
    most: Keeping,
) -> MemoryPlan {
    let needed = |recipe: &Recipe| {
        let with = |attention, recomputable, o_low| {
            let keeping = Keeping { o_low, recomputable, attention }.and(most);
            plan_keeping(recipe, shape, target, ranks, keeping)
        };
        // Pages are found only where the tensors fit.
        let paged = |plan: MemoryPlan| match plan.verdict {
            MemoryVerdict::DoesNotFit => plan,
            _ => {
                let keeping = plan.keeping;
                plan.with_pages(|card_bytes| held::held_by_steps(recipe, shape, target, ranks, keeping, card_bytes))
            }
        };
        // From most to least, in the order of the time that a byte saves: attention's output of recomputed blocks and
        // recomputable activations (both on a GPU alone), `o_low` of all rows, `o_low` of short rows.
        let is_gpu = matches!(target, Target::Gpu(_));
        let attention = is_gpu && keeps_attention(recipe, shape);
        let choices = |is_offered: bool| if is_offered { &[true, false][..] } else { &[false][..] };
        let ways = choices(attention)
            .iter()
            .flat_map(|&attention| choices(is_gpu).iter().map(move |&recomputable| (attention, recomputable)));
        let plans = ways.map(|(attention, recomputable)| with(attention, recomputable, KeepOLow::Always));
        let fitting = plans.filter(MemoryPlan::fits_surely).map(&paged).find(MemoryPlan::fits_surely);
        fitting.unwrap_or_else(|| paged(with(false, false, KeepOLow::ShortRows)))
    };
    let mut plan = needed(recipe);
    if plan.verdict.needs_advice() {
        plan.would_fit = advice::settings_that_fit(recipe, RowShare::of(recipe).groups(ranks), ranks > 1, needed);
        if plan.would_fit.is_empty() {
            plan.would_fit.extend(more_gpus(recipe, shape, target, ranks));
        }
    }
    plan
}

/// Settings with which one of `ranks` ranks takes less memory than as `recipe` stands, the cheapest first: advice for a
/// run that was planned to fit and does not. None where every key has its least already; then more ranks are left.
pub fn settings_that_save(recipe: &Recipe, shape: &ModelShape, target: &Target, ranks: usize) -> Vec<FittingSetting> {
    let needed = |recipe: &Recipe| {
        let plan = plan_keeping(recipe, shape, target, ranks, Keeping::NOTHING);
        plan.with_pages(|card_bytes| held::held_by_steps(recipe, shape, target, ranks, Keeping::NOTHING, card_bytes))
    };
    advice::settings_that_save(recipe, RowShare::of(recipe).groups(ranks), ranks > 1, needed)
}

/// Whether some recomputed block can keep its attention's output.
fn keeps_attention(recipe: &Recipe, shape: &ModelShape) -> bool {
    let is_whole = recipe.parallelism.context_parallel_degree == 1;
    let recomputed = (0..shape.num_layers).filter(|&layer| recipe.activation_checkpoint.recomputes(layer));
    let fp8 = recipe.training.fp8_blocks(shape.num_layers);
    let mut can_keep = recomputed.filter(|layer| !fp8.contains(layer));
    is_whole && can_keep.any(|layer| activations::can_keep_attention(&shape.of_layer(layer)))
}

/// The least number of GPUs, a power of two above `ranks`, that trains the recipe with ZeRO-3 and full recomputation;
/// `None` for a CPU, whose processes share one memory, or if [`MOST_GPUS`] are too few.
fn more_gpus(recipe: &Recipe, shape: &ModelShape, target: &Target, ranks: usize) -> Option<FittingSetting> {
    if matches!(target, Target::Cpu { .. }) {
        return None;
    }
    let mut sharded = advice::with_mode(recipe, sieve_core::recipe::ActivationCheckpointMode::Full);
    sharded.parallelism.zero_stage = 3;
    sharded.parallelism.shard_ranks = 0;
    let all = if recipe.parallelism.shard_ranks > 0 { " parallelism.shard_ranks=0" } else { "" };
    let counts = (1..=MOST_GPUS.ilog2()).map(|power| 1 << power).filter(|&count| count > ranks);
    let mut fitting = counts.filter_map(|count| {
        let groups = RowShare::of(&sharded).groups(count);
        let alone = advice::smallest_batch(&sharded, groups)?;
        let plan = plan_keeping(&alone, shape, target, count, Keeping::NOTHING);
        let batch = alone.training.local_batch_size;
        let setting = format!(
            "sieve launch --nproc {count} and parallelism.zero_stage=3 activation_checkpoint.mode=full \
             training.local_batch_size={batch}{all}"
        );
        let plan = plan
            .with_pages(|total_bytes| held::held_by_steps(&alone, shape, target, count, Keeping::NOTHING, total_bytes));
        plan.fits_surely().then_some(FittingSetting { setting, total_bytes: plan.total_bytes })
    });
    fitting.next()
}

/// As [`memory_plan`], with the optional activations of `keeping`, and without advice.
fn plan_keeping(recipe: &Recipe, shape: &ModelShape, target: &Target, ranks: usize, keeping: Keeping) -> MemoryPlan {
    let points = points_of_step(recipe, shape, target, ranks, keeping);
    let fullest = points.into_iter().max_by_key(|(_, parts)| parts.total());
    let (moment, parts) = fullest.expect("there are several");
    let (value_bytes, num_parameters) = (target.value_bytes(), shape.parameters().total());
    // With ZeRO a rank holds the bits that its shard of the parameters lacks, and a copy of that shard: together an
    // f32 for each value. With ZeRO-3 that copy is all that it holds of the parameters.
    let num_shards = recipe.parallelism.num_shards(ranks) as u64;
    let shard = num_parameters.div_ceil(num_shards);
    let shards_weights = shards_weights(recipe, ranks);
    let master_bytes = match (value_bytes, num_shards) {
        (_, 2..) if !shards_weights => times(shard, F32),
        (F32, _) => 0,
        _ => times(shard, F32 - value_bytes),
    };
    let peak = MemoryParts {
        parameter_bytes: times(if shards_weights { shard } else { num_parameters }, value_bytes),
        master_bytes,
        moment_bytes: times(num_moments(recipe, &shape.parameters()).div_ceil(num_shards), F32),
        ..parts
    };
    MemoryPlan {
        host_checkpoint_bytes: match target {
            Target::Cpu { .. } => 0,
            Target::Gpu(_) => snapshot_bytes(recipe, shape, ranks),
        },
        keeping,
        activations_by_mode: activations_by_mode(recipe, shape, target, keeping),
        ..peak.plan(moment, target, ranks)
    }
}

/// Bytes of the weights that a rank has whole at points of a step, with ZeRO-3; all 0 without it.
#[derive(Default)]
struct GatheredBytes {
    /// The matrix of the embedding, or of the output projection.
    head: u64,
    /// The weights of one block.
    block: u64,
    /// The weights of the blocks whose graphs wait for their backward passes, without the last block.
    kept: u64,
}

impl GatheredBytes {
    /// The bytes of one of `ranks` ranks. A block that is recomputed is gathered again for its backward pass, so only
    /// the other blocks count as kept.
    fn new(recipe: &Recipe, shape: &ModelShape, target: &Target, ranks: usize) -> Self {
        if !shards_weights(recipe, ranks) {
            return Self::default();
        }
        let block = block_parameters(shape) * target.value_bytes();
        let last = shape.num_layers.saturating_sub(1);
        let kept = (0..last).filter(|&layer| !recipe.activation_checkpoint.recomputes(layer));
        Self {
            head: (shape.vocab_size * shape.d_model) as u64 * target.value_bytes(),
            block,
            kept: kept.count() as u64 * block,
        }
    }

    /// The weights that are whole in the last block's backward pass: the kept ones, its own, and those of the next
    /// recomputed block, which are gathered meanwhile.
    fn in_last_block(&self, recipe: &Recipe, shape: &ModelShape) -> u64 {
        let mut before = 0..shape.num_layers.saturating_sub(1);
        let gathers = before.any(|layer| recipe.activation_checkpoint.recomputes(layer));
        self.kept + self.block * (1 + u64::from(gathers))
    }
}

/// Parameters of a block; of blocks that differ, the mean.
fn block_parameters(shape: &ModelShape) -> u64 {
    shape.parameters().non_embedding() / shape.num_layers.max(1) as u64
}

/// Memory that a checkpoint takes while it is written: f32 copies of weights and moments.
fn snapshot_bytes(recipe: &Recipe, shape: &ModelShape, ranks: usize) -> u64 {
    let parameters = shape.parameters();
    let values = parameters.total() + num_moments(recipe, &parameters);
    times(values.div_ceil(recipe.parallelism.num_shards(ranks) as u64), F32)
}

/// (name of a mode of activation checkpointing, bytes that all blocks keep with it).
fn activations_by_mode(
    recipe: &Recipe,
    shape: &ModelShape,
    target: &Target,
    keeping: Keeping,
) -> Vec<(&'static str, u64)> {
    use sieve_core::recipe::ActivationCheckpointMode::{Full, None, Selective};
    let bytes = |(name, mode)| (name, kept_by_blocks(&advice::with_mode(recipe, mode), shape, target, keeping));
    [("none", None), ("selective", Selective), ("full", Full)].map(bytes).to_vec()
}

/// Bytes that all blocks keep for their backward passes.
fn kept_by_blocks(recipe: &Recipe, shape: &ModelShape, target: &Target, keeping: Keeping) -> u64 {
    let rows = RowShare::of(recipe);
    let recomputes = |layer_idx: usize| recipe.activation_checkpoint.recomputes(layer_idx);
    let per_token = activation_bytes_per_token(shape, target, rows.attended(shape), keeping, recomputes);
    let all_tokens = times(rows.tokens() as u64, per_token);
    let fp8 = fp8_bytes(recipe, shape, target, keeping, recomputes);
    let layers = (0..shape.num_layers).filter(|&layer_idx| !recomputes(layer_idx));
    let exchanged = layers.map(|layer_idx| rows.kept_bytes(&shape.of_layer(layer_idx), target.value_bytes()));
    all_tokens.saturating_add_signed(fp8) + exchanged.sum::<u64>()
}

/// Bytes of gradients at the points of a training step that can be its peak.
struct GradientBytes {
    /// Gradients that exist while the loss is computed.
    loss: u64,
    /// In the loss, in addition: the head's new gradient until it is added to the gradient of earlier micro-batches.
    new_in_loss: u64,
    /// Bytes during the last block's backward pass.
    last_block: u64,
    /// Bytes during the first block's backward pass.
    first_block: u64,
    /// Bytes during the embedding's backward pass.
    embedding: u64,
}

impl GradientBytes {
    /// The gradients that one of `ranks` ranks holds, by micro-batches and `parallelism.zero_stage`.
    fn new(recipe: &Recipe, shape: &ModelShape, ranks: usize) -> Self {
        let (training, zero_stage) = (&recipe.training, recipe.parallelism.zero_stage);
        let num_parameters = num_trained(recipe, &shape.parameters());
        let all = times(num_parameters, training.gradient_dtype.bytes());
        if training.trains_indexers_alone() {
            return Self { loss: all, new_in_loss: 0, last_block: all, first_block: all, embedding: all };
        }
        let num_shards = recipe.parallelism.num_shards(ranks) as u64;
        let shard = all / num_shards;
        let head = F32 * (shape.vocab_size * shape.d_model) as u64;
        let block = times(block_parameters(shape), F32);
        let has_micro_batches =
            training.global_batch_size * RowShare::of(recipe).degree > training.local_batch_size * ranks;
        // With several ranks, gradients are reduced while the backward pass continues: in the last micro-batch, and
        // from ZeRO-2 on in every one.
        let keeps_shards = num_shards > 1 && (!has_micro_batches || zero_stage > 1);
        // From the second micro-batch on every weight has a gradient, or a shard of one.
        let (loss, new_in_loss) = match (has_micro_batches, keeps_shards) {
            (true, false) => (all, head),
            (true, true) => (shard + head, 0),
            (false, _) => (head, 0),
        };
        // The gradient of a tied embedding exists from the head's backward pass on; the embedding's own is a second
        // gradient.
        let tied = if shape.tie_word_embeddings { head } else { 0 };
        if !keeps_shards {
            return Self { loss, new_in_loss, last_block: loss, first_block: all, embedding: all + tied };
        }
        // Sharded sums of earlier micro-batches exist in addition to the gradients being reduced.
        let reduced = |bytes: u64| if has_micro_batches { bytes + bytes / num_shards } else { bytes };
        let most = reduced(times(num_parameters, F32));
        Self {
            loss,
            new_in_loss,
            last_block: if has_micro_batches { shard + reduced(head) + block } else { loss },
            first_block: shard + (tied + reduced(SUMS_UNDER_WAY * block)).min(most),
            embedding: shard + (head + reduced((SUMS_UNDER_WAY - 1) * block)).min(most),
        }
    }
}

/// (name, memory) of each point of a step that can be its peak, without weights and the optimizer's moments.
fn points_of_step(
    recipe: &Recipe,
    shape: &ModelShape,
    target: &Target,
    ranks: usize,
    keeping: Keeping,
) -> Vec<(&'static str, MemoryParts)> {
    // Where indexers alone are trained, a block's activations exist during its own pass, as if it were recomputed.
    let alone = recipe.training.trains_indexers_alone();
    let full = alone.then(|| advice::with_mode(recipe, sieve_core::recipe::ActivationCheckpointMode::Full));
    let recipe = full.as_ref().unwrap_or(recipe);
    let training = &recipe.training;
    let rows = RowShare::of(recipe);
    let tokens = rows.tokens() as u64;
    let gradients = GradientBytes::new(recipe, shape, ranks);
    let gathered = GatheredBytes::new(recipe, shape, target, ranks);
    let blocks = kept_by_blocks(recipe, shape, target, keeping);
    // Bytes of a micro-batch's residual stream.
    let stream = times(tokens, shape.d_model as u64 * target.value_bytes());
    let exchanged = shape.by_kind().into_iter();
    let exchanged = exchanged.map(|part| rows.temporary_bytes(&part, target.value_bytes()));
    let temporaries = block_temporaries(shape, target, training, &rows) + exchanged.max().unwrap_or(0);
    // All activations of a recomputed block exist while its backward pass runs.
    let kept_by = |layer_idx: usize| {
        let layer = shape.of_layer(layer_idx);
        let block = block_kept(&layer, target, rows.attended(shape), keeping);
        let fp8 = fp8_bytes(recipe, shape, target, keeping, |other| other != layer_idx);
        times(tokens, block).saturating_add_signed(fp8) + rows.kept_bytes(&layer, target.value_bytes())
    };
    let last = shape.num_layers.saturating_sub(1);
    let recomputed_last = if recipe.activation_checkpoint.recomputes(last) { kept_by(last) } else { 0 };
    let written = match target {
        Target::Cpu { .. } => snapshot_bytes(recipe, shape, ranks),
        Target::Gpu(_) => 0,
    };
    // Only a checkpoint before the last step is written while another step runs.
    let has_next_step = recipe.checkpoint.interval < training.steps;
    let beside_step =
        MemoryParts { checkpoint_bytes: if has_next_step { written } else { 0 }, ..MemoryParts::default() };
    let in_loss = MemoryParts {
        gradient_bytes: gradients.loss,
        gathered_bytes: gathered.kept + gathered.block + gathered.head,
        activation_bytes: blocks + stream,
        // `2 * stream`: the final norm's output and its gradient.
        workspace_bytes: 2 * stream + logit_bytes(shape, tokens, target) + gradients.new_in_loss,
        ..beside_step
    };
    let in_last_block = MemoryParts {
        gradient_bytes: gradients.last_block,
        gathered_bytes: gathered.in_last_block(recipe, shape),
        activation_bytes: blocks + recomputed_last,
        workspace_bytes: temporaries,
        ..beside_step
    };
    // The next micro-batch begins with the embedding and the first block.
    let begins_again = rows.micro_batches(training.global_batch_size, ranks) > 1;
    let for_next = if begins_again { gathered.head + gathered.block } else { 0 };
    let in_first_block = MemoryParts {
        gradient_bytes: gradients.first_block,
        gathered_bytes: for_next.max(gathered.block),
        activation_bytes: kept_by(0),
        workspace_bytes: temporaries,
        ..beside_step
    };
    let in_embedding = MemoryParts {
        gradient_bytes: gradients.embedding,
        gathered_bytes: for_next,
        workspace_bytes: stream,
        ..beside_step
    };
    let in_checkpoint = MemoryParts { checkpoint_bytes: written, ..MemoryParts::default() };
    let mut points = vec![
        ("the loss", in_loss),
        ("the last block's backward pass", in_last_block),
        ("the first block's backward pass", in_first_block),
        ("the embedding's backward pass", in_embedding),
        ("the last checkpoint", in_checkpoint),
    ];
    if rows.degree > 1 {
        // A validation reads whole rows on each rank.
        let size = InferenceSize {
            rows: rows.batch.min(recipe.validation.tokens.div_ceil(rows.seq_len.max(1))),
            ..InferenceSize::rows_of(rows.seq_len, 0)
        };
        let in_validation = MemoryParts {
            activation_bytes: forward_bytes(shape, size, target),
            gathered_bytes: gathered.block + gathered.head,
            ..beside_step
        };
        points.push(("validation", in_validation));
    }
    points
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
    kept.map(|layer_idx| fp8_kept(&shape.of_layer(layer_idx), target, tokens, keeping)).sum()
}
