//! Builds the plan of a run, stage by stage, from the counts of the other modules.

use crate::context_parallel::RowShare;
use crate::disk::{DiskPlan, orthogonalised};
use crate::memory::{memory_plan_within, shards_weights};
use crate::{
    CachePlan, MemoryPlan, MemoryVerdict, OpPlan, Ranks, RanksPlan, Target, cache_on, check_gpu_attention, memory_plan,
    op_plans, time,
};
use serde::Serialize;

use crate::measured::shared_rows_too_fast;
use sieve_core::Keeping;
use sieve_core::model::{ModelShape, ParameterCounts, gpu};
use sieve_core::recipe::{GradientDtype, Recipe, RecipeError, Stage, TrainingPrecision};

/// Share of the CPU's peak that the time estimate assumes: usual for good training programs on dense models, not
/// measured here.
pub const ASSUMED_MFU: f64 = 0.4;

/// The plan of a run, as `sieve plan` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Name of the attention kind.
    pub attention: &'static str,
    /// Parameters by part, in the order of the forward pass.
    pub parameters: Vec<(&'static str, u64)>,
    /// Number of all parameters.
    pub num_parameters: u64,
    /// Number of parameters without embedding and output projection.
    pub num_non_embedding: u64,
    /// Number of tokens of the whole run.
    pub num_tokens: u64,
    /// Ratio `num_tokens / num_non_embedding`.
    pub tokens_per_parameter: f64,
    /// The plan of each stage; one for a recipe without stages.
    pub stages: Vec<StagePlan>,
    /// Training FLOPs executed in the whole run.
    pub total_flops: f64,
    /// Communication of several ranks in the stage with most of it; `None` for one rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RanksPlan>,
    /// Memory of each sharding and type of gradients; empty for one rank.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub zero_stages: Vec<ZeroPlan>,
    /// Memory of each rank, in the stage that needs most.
    pub memory: MemoryPlan,
    /// Disk space that checkpoints take.
    pub disk: DiskPlan,
    /// Memory of one decoded sequence's KV cache.
    pub cache: CachePlan,
    /// Words for the speed that the estimated time assumes; `None` without an estimate.
    pub assumption: Option<String>,
    /// Estimated seconds of the whole run; `None` if the speed of its attention was not measured.
    pub seconds: Option<f64>,
    /// Why `sieve train` refuses the run on this device; `None` if it does not.
    pub refused: Option<String>,
    /// For each op whether it runs as a kernel or as the reference.
    pub ops: Vec<OpPlan>,
}

/// Sizes and time of one stage of the run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StagePlan {
    /// Number of optimizer steps.
    pub steps: usize,
    /// Tokens in one row.
    pub seq_len: usize,
    /// Tokens in one optimizer step.
    pub tokens_per_step: usize,
    /// Micro-batches in one step, on each rank.
    pub micro_batches: usize,
    /// Keys a query sees on average, if every row is one document.
    pub mean_active_keys: f64,
    /// Training FLOPs executed per token.
    pub executed_flops_per_token: f64,
    /// Training FLOPs per token of the same model with dense causal attention.
    pub dense_flops_per_token: f64,
    /// Share of the executed FLOPs that attention takes.
    pub attention_share: f64,
    /// Estimated tokens per second of all ranks; `None` if the speed of the attention was not measured.
    pub tokens_per_second: Option<f64>,
    /// How ranks share a row; `None` if each has whole rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "row_parts")]
    pub context_parallel: Option<ContextParallelPlan>,
    /// NSA on a GPU: the shortest rows, among powers of two, whose training is estimated to be faster than dense
    /// attention. `None` elsewhere, or if there are no such rows.
    pub pays_from: Option<usize>,
}

/// A type and sharding of gradients, and its memory in the stage with the highest peak.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ZeroPlan {
    /// Value of `parallelism.zero_stage`.
    pub zero_stage: usize,
    /// Value of `parallelism.shard_ranks`; 0: all ranks.
    pub shard_ranks: usize,
    /// Value of `training.gradient_dtype`.
    pub gradient_dtype: GradientDtype,
    /// Memory of each rank, in bytes.
    pub total_bytes: u64,
    /// Bytes of gradients that each rank sends in a step; it receives as many.
    pub sum_bytes: f64,
    /// Bytes of weights that each rank sends in a step; it receives as many.
    pub gather_bytes: f64,
    /// Seconds of a step in which gradients and weights are sent between ranks.
    pub seconds: f64,
    /// Whether the run fits into each device's memory.
    pub verdict: MemoryVerdict,
}

/// Context parallelism: the ranks divide each row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ContextParallelPlan {
    /// Number of ranks that share a row.
    pub degree: usize,
    /// Tokens of a row on each rank.
    pub tokens: usize,
    /// Seconds per step in which the ranks of a row exchange keys and heads; they do not overlap with compute.
    pub exchange_seconds: f64,
    /// (kind of attention, the longest row that fits in a micro-batch of one row). Rows are powers of two.
    pub longest_rows: Vec<(&'static str, usize)>,
    /// By how much estimates for this attention exceeded the speeds measured on two H200s; `None` if by at most 6 %.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed_too_high_by: Option<&'static str>,
}

/// Plans a run of `recipe` with an embedding of `vocab_size` rows.
///
/// # Errors
/// [`RecipeError::VocabularyTooSmall`].
pub fn plan(recipe: &Recipe, vocab_size: usize, target: &Target) -> Result<Plan, RecipeError> {
    plan_of_ranks(recipe, vocab_size, target, Ranks::ALONE)
}

/// As [`plan`], for several ranks. Their micro-batches must divide a step's rows.
///
/// # Errors
/// As [`plan`].
pub fn plan_of_ranks(recipe: &Recipe, vocab_size: usize, target: &Target, ranks: Ranks) -> Result<Plan, RecipeError> {
    let shape = recipe.model_shape(vocab_size)?;
    let counts: ParameterCounts = shape.parameters();
    let mut stages = Vec::new();
    let mut most_together: Option<RanksPlan> = None;
    // A run keeps the same optional activations in all stages: those that fit in each.
    let keeping = recipe.stages().iter().try_fold(Keeping::ALL, |most, stage| {
        let alone = recipe.at_stage(stage);
        let stage_shape = alone.model_shape(vocab_size)?;
        Ok::<_, RecipeError>(most.and(memory_plan(&alone, &stage_shape, target, ranks.size).keeping))
    })?;
    let mut memory: Option<(MemoryPlan, Recipe)> = None;
    let (mut total_flops, mut seconds) = (0.0, Some(0.0));
    for stage in recipe.stages() {
        // `alone`: the recipe of this stage alone. `together`: the ranks' communication in it.
        let alone = recipe.at_stage(&stage);
        let stage_shape = alone.model_shape(vocab_size)?;
        let together = (ranks.size > 1).then(|| communication(&alone, &stage_shape, target, ranks));
        if let Some(together) = together
            && most_together.is_none_or(|most| most.sum_bytes < together.sum_bytes)
        {
            most_together = Some(together);
        }
        let planned = stage_plan(&stage, &alone, &stage_shape, target, together.as_ref());
        let tokens = stage.section.steps as f64 * planned.tokens_per_step as f64;
        total_flops += tokens * planned.executed_flops_per_token;
        seconds = seconds.zip(planned.tokens_per_second).map(|(seconds, speed)| seconds + tokens / speed);
        let mut needed = memory_plan_within(&alone, &stage_shape, target, ranks.size, keeping);
        if !recipe.stage.is_empty() {
            let own = format!("local_batch_size of stage {}: ", stage.index + 1);
            for fitting in &mut needed.would_fit {
                fitting.setting = (fitting.setting).replace("training.local_batch_size=", &own);
            }
        }
        let is_most = |(most, _): &(MemoryPlan, Recipe)| most.total_bytes < needed.total_bytes;
        if memory.as_ref().is_none_or(is_most) {
            memory = Some((needed, alone));
        }
        stages.push(planned);
    }
    let last = recipe.at_stage(&recipe.stage_of_step(usize::MAX));
    let last_shape = last.model_shape(vocab_size)?;
    let (memory, largest) = memory.expect("a recipe has at least one stage");
    let zero_stages = match ranks.size {
        1 => Vec::new(),
        _ => zero_stages(&largest, &largest.model_shape(vocab_size)?, target, ranks),
    };
    let num_tokens = recipe.num_tokens();
    Ok(Plan {
        attention: recipe.attention.kind().name(),
        parameters: counts.by_part(),
        num_parameters: counts.total(),
        disk: DiskPlan::new(recipe, &counts),
        num_non_embedding: counts.non_embedding(),
        num_tokens,
        tokens_per_parameter: num_tokens as f64 / counts.non_embedding() as f64,
        stages,
        total_flops,
        ranks: most_together,
        zero_stages,
        memory,
        cache: cache_on(&last_shape, last.training.seq_len, target),
        assumption: seconds.and(target.flops_per_second()).map(|peak| assumption(target, peak, ranks.size)),
        seconds,
        refused: match target {
            Target::Cpu { .. } => None,
            Target::Gpu(gpu) => check_gpu_attention(recipe, &shape, &gpu.arch)
                .err()
                .map(|error| error.to_string())
                .or_else(|| fp8_refusal(recipe, gpu)),
        },
        ops: op_plans(&recipe.shapes_of_stages(&shape), target),
    })
}

/// The ranks' communication in one training stage.
fn communication(recipe: &Recipe, shape: &ModelShape, target: &Target, ranks: Ranks) -> RanksPlan {
    let zero_stage = recipe.parallelism.zero_stage;
    // How many times a step reduces its gradients over all ranks.
    let num_sums = match zero_stage {
        0 | 1 => 1,
        // From ZeRO-2 on gradients are reduced after every micro-batch.
        _ => RowShare::of(recipe).micro_batches(recipe.training.global_batch_size, ranks.size),
    };
    let num_parameters = shape.parameters().total();
    let num_gathered = if shards_weights(recipe, ranks.size) {
        // The first block's weights stay from one micro-batch to the next.

        let block = shape.parameters().non_embedding() / shape.num_layers.max(1) as u64;
        num_sums as u64 * (gathered_by_pass(recipe, shape) - block) + block
    } else {
        num_parameters
    };
    // A rank sends its piece of each of Muon's updates to the rank that orthogonalises it, which returns as much.
    let num_shards = recipe.parallelism.num_shards(ranks.size) as u64;
    let exchanged = 2 * orthogonalised(recipe, &shape.parameters()) / num_shards;
    ranks.together(num_parameters, target.value_bytes(), num_sums, num_gathered + exchanged, &recipe.parallelism)
}

/// Parameters that a micro-batch gathers with ZeRO-3: the embedding's and the head's once each, tied or not; a block's
/// once, or twice if the block is recomputed. The last block's stay from its forward pass to its backward pass.
fn gathered_by_pass(recipe: &Recipe, shape: &ModelShape) -> u64 {
    let parameters = shape.parameters().non_embedding();
    let last = shape.num_layers.saturating_sub(1);
    let again = (0..last).filter(|&layer| recipe.activation_checkpoint.recomputes(layer)).count() as u64;
    let matrix = (shape.vocab_size * shape.d_model) as u64;
    2 * matrix + parameters + again * parameters / shape.num_layers.max(1) as u64
}

/// A plan for every sharding and type of gradients in one stage: over all ranks, the recipe's own groups of them, and
/// those of each host.
fn zero_stages(recipe: &Recipe, shape: &ModelShape, target: &Target, ranks: Ranks) -> Vec<ZeroPlan> {
    let groups = [0, recipe.parallelism.shard_ranks, ranks.size / ranks.hosts.max(1)];
    let is_group = |&size: &usize| size == 0 || (size > 1 && size < ranks.size && ranks.size.is_multiple_of(size));
    let groups = groups.into_iter().filter(is_group).collect::<std::collections::BTreeSet<_>>();
    let ways = groups.into_iter().flat_map(|shard_ranks| {
        let dtypes = [GradientDtype::F32, GradientDtype::Bf16];
        (1..=3).flat_map(move |zero_stage| dtypes.map(|gradient_dtype| (shard_ranks, zero_stage, gradient_dtype)))
    });
    let planned = ways.map(|(shard_ranks, zero_stage, gradient_dtype)| {
        let mut recipe = recipe.clone();
        recipe.parallelism.zero_stage = zero_stage;
        recipe.parallelism.shard_ranks = shard_ranks;
        recipe.training.gradient_dtype = gradient_dtype;
        let memory = memory_plan(&recipe, shape, target, ranks.size);
        let together = communication(&recipe, shape, target, ranks);
        ZeroPlan {
            zero_stage,
            shard_ranks,
            gradient_dtype,
            total_bytes: memory.total_bytes,
            sum_bytes: together.sum_bytes,
            gather_bytes: together.gather_bytes,
            seconds: together.sum_seconds + together.gather_seconds,
            verdict: memory.verdict,
        }
    });
    planned.collect()
}

impl Plan {
    /// The sharding and type of gradients that fits each device and whose bytes between the ranks take the least time;
    /// `None` for one rank, or if none fits. f32 gradients come before bf16 ones.
    pub fn cheapest_stage(&self) -> Option<&ZeroPlan> {
        let fitting = self.zero_stages.iter().filter(|way| way.verdict == MemoryVerdict::Fits);
        let cost = |way: &ZeroPlan| (way.gradient_dtype == GradientDtype::Bf16, way.seconds);
        fitting.min_by(|one, other| cost(one).partial_cmp(&cost(other)).expect("numbers"))
    }
}

/// Why a GPU cannot train a recipe in fp8; `None` if it can or the recipe's precision is another.
fn fp8_refusal(recipe: &Recipe, gpu: &gpu::Gpu) -> Option<String> {
    // The number in a name such as sm_90a.
    let digits = gpu.arch.trim_matches(|letter: char| !letter.is_ascii_digit());
    let is_able = digits.parse().is_ok_and(|number: u32| number >= 89);
    let is_wanted = recipe.training.precision == TrainingPrecision::Fp8;
    (is_wanted && !is_able).then(|| {
        let (name, arch) = (&gpu.name, &gpu.arch);
        format!(
            "training.precision = \"fp8\": {name} is {arch}, and fp8 needs sm_89 or later\n  \
             hint: --set training.precision=bf16"
        )
    })
}

/// Words for the speed that the time estimate assumes; `peak` is one device's FLOP/s.
fn assumption(target: &Target, peak: f64, num_devices: usize) -> String {
    let devices = match num_devices {
        1 => "one device".to_owned(),
        several => format!("{several} devices"),
    };
    match target {
        Target::Gpu(gpu) => {
            let limit = if time::is_measured(gpu) { "" } else { "; the estimate is not fitted to this GPU" };
            format!(
                "the shares of {:.0} TFLOP/s and {:.2} TB/s that an H200 was measured to reach, on {devices}{limit}",
                peak / 1e12,
                gpu.memory_bytes_per_second / 1e12
            )
        }
        Target::Cpu { .. } => {
            format!("{:.0} % of {:.0} GFLOP/s in executed operations, on {devices}", 100.0 * ASSUMED_MFU, peak / 1e9)
        }
    }
}

/// Share of the blocks that the backward pass recomputes.
fn recomputed_share(recipe: &Recipe, num_layers: usize) -> f64 {
    let checkpoint = &recipe.activation_checkpoint;
    let again = (0..num_layers).filter(|&layer| checkpoint.recomputes(layer));
    again.count() as f64 / num_layers.max(1) as f64
}

/// The plan of one stage. `recipe` and `shape` are the stage's; `together` is `None` for one rank.
fn stage_plan(
    stage: &Stage,
    recipe: &Recipe,
    shape: &ModelShape,
    target: &Target,
    together: Option<&RanksPlan>,
) -> StagePlan {
    let section = &stage.section;
    let ranks = together.map_or(1, |together| together.ranks.size);
    let rows = RowShare::of(recipe);
    let micro_batches = rows.micro_batches(section.global_batch_size, ranks);
    let dense = shape.dense();
    let over_steps = |own: f64, dense: f64| over_steps(recipe, own, dense);
    let mut executed = shape.executed_flops_per_token(section.seq_len);
    let dense_attention = dense.executed_flops_per_token(section.seq_len).attention;
    executed.attention = over_steps(executed.attention, dense_attention);
    // FLOPs that a token saves on average: tokens without a label skip the output projection.
    let spared = (1.0 - recipe.label_share()) * shape.unlabelled_training_flops();
    let executed_training = executed.in_steps(&recipe.training) - spared;
    let attention_share = 3.0 * executed.attention / executed_training;
    let recomputed = recomputed_share(recipe, shape.num_layers);
    let exchanged = rows.exchanged_bytes(shape, target.value_bytes(), recomputed) * micro_batches as f64;
    let exchange_seconds = together.map_or(0.0, |together| together.row_seconds(exchanged));
    let (tokens_per_second, pays_from) = match target {
        Target::Cpu { flops_per_second, .. } => {
            let speed = flops_per_second.map(|peak| ASSUMED_MFU * peak / executed_training);
            (speed, None)
        }
        Target::Gpu(gpu) => {
            let size = time::StepSize {
                tokens: rows.tokens(),
                seq_len: section.seq_len,
                micro_batches,
                recomputed,
                fp8: recipe.training.fp8_blocks(shape.num_layers),
                indexers_alone: recipe.training.trains_indexers_alone(),
            };
            let alone = speed_alone(recipe, shape, spared, &size, gpu);
            let speed = alone.zip(together).map(|(alone, together)| {
                let tokens = (size.tokens * micro_batches) as f64;
                // The halo's zero queries cost attention as much time as others.
                let more = attention_share * (rows.queries_for_each(shape) - 1.0);
                let copied = rows.copied_bytes(shape, target.value_bytes(), recomputed);
                let copying = time::memory_seconds(copied * micro_batches as f64, gpu);
                let seconds = tokens / alone * (1.0 + more) + exchange_seconds + copying;
                let update = time::update_seconds(shape.parameters().total(), gpu);
                together.tokens_per_second(tokens, seconds, update)
            });
            (speed.or(alone), time::pays_from(shape, &size, gpu))
        }
    };
    StagePlan {
        steps: section.steps,
        seq_len: section.seq_len,
        tokens_per_step: section.global_batch_size * section.seq_len,
        micro_batches,
        mean_active_keys: over_steps(shape.mean_active_keys(section.seq_len), dense.mean_active_keys(section.seq_len)),
        executed_flops_per_token: executed_training,
        dense_flops_per_token: shape.dense_flops_per_token(section.seq_len).training() - spared,
        attention_share,
        tokens_per_second,
        context_parallel: (rows.degree > 1).then(|| ContextParallelPlan {
            degree: rows.degree,
            tokens: section.seq_len / rows.degree,
            exchange_seconds,
            longest_rows: longest_rows(recipe, shape, target, ranks),
            speed_too_high_by: match target {
                Target::Gpu(_) => shared_rows_too_fast(recipe.attention.kind()),
                Target::Cpu { .. } => None,
            },
        }),
        pays_from,
    }
}

/// Mean over a stage's steps of a number that is `dense` in the share `training.dense_steps` of the steps, in which
/// attention is dense, and `own` in all other steps.
fn over_steps(recipe: &Recipe, own: f64, dense: f64) -> f64 {
    own + (dense - own) * recipe.training.dense_steps
}

/// Estimated tokens per second of one GPU without other ranks; `None` if the speed of the attention was not measured.
/// `spared_flops` of a token's executed FLOPs are not computed, because tokens without a label have no logits.
fn speed_alone(
    recipe: &Recipe,
    shape: &ModelShape,
    spared_flops: f64,
    size: &time::StepSize,
    gpu: &gpu::Gpu,
) -> Option<f64> {
    let speed = |shape: &ModelShape| time::tokens_per_second(shape, spared_flops, size, gpu);
    let own = speed(shape);
    if recipe.training.dense_steps > 0.0 {
        own.zip(speed(&shape.dense())).map(|(own, dense)| 1.0 / over_steps(recipe, 1.0 / own, 1.0 / dense))
    } else {
        own
    }
}

/// (kind, longest row that fits in a micro-batch of one row), for dense attention and for the recipe's kind. Of the
/// powers of two from 2^10 to 2^23 tokens; 0 if none fits.
fn longest_rows(recipe: &Recipe, shape: &ModelShape, target: &Target, ranks: usize) -> Vec<(&'static str, usize)> {
    let dense = shape.dense();
    let own = recipe.attention.kind().name();
    let kinds = [(dense.attention.kind().name(), &dense), (own, shape)].into_iter();
    let longest = kinds.map(|(name, shape)| {
        let mut recipe = recipe.clone();
        recipe.training.local_batch_size = 1;
        let mut lengths = (10..=23).rev().map(|power| 1 << power);
        let longest = lengths.find(|&seq_len| {
            recipe.training.seq_len = seq_len;
            memory_plan(&recipe, shape, target, ranks).verdict == MemoryVerdict::Fits
        });
        (name, longest.unwrap_or(0))
    });
    let mut longest = longest.collect::<Vec<_>>();
    // A recipe of dense attention gives the same entry twice.
    longest.dedup();
    longest
}

#[cfg(test)]
mod tests;
