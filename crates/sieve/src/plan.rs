//! `sieve plan`: parameters, FLOPs, memory, cache and time of a recipe before it runs.
use crate::epochs::{self, TextEpochs};
use crate::recipe::useless::{untrained_model, useless_settings};
use crate::recipe::{RecipeArgs, vocab_size};
use anyhow::{Result, bail};
use clap::Args;
use sieve_core::model::gpu;
use sieve_core::{NumberFormat, Recipe, model_line};
use sieve_host::device::Device;
use sieve_host::out_of_memory::{self, need, nothing_fits};
use sieve_host::room;
use sieve_host::same_bits;
use sieve_host::terminal::{self, gib, short_count};
use sieve_host::text_files;
use sieve_plan::{ContextParallelPlan, Plan, Ranks, RanksPlan, StagePlan, Suggestion, Target, ZeroPlan, plan_of_ranks};
use sieve_train::{TrainError, initial_checkpoint, initial_weights};

/// Arguments of `sieve plan`.
#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Plan for a GPU by name (h200, a100, 4090, …) instead of this machine's CPU; no such GPU is needed
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,
    /// Plan for N processes on each host, one for each GPU, as `sieve launch --nproc N` starts them
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        requires = "gpu",
        value_parser = clap::value_parser!(u16).range(1..=1024),
    )]
    nproc: u16,
    /// Hosts that take part, of --nproc GPUs each
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        requires = "gpu",
        value_parser = clap::value_parser!(u16).range(1..=4096),
    )]
    nnodes: u16,
    /// Also suggest a learning rate, a batch and steps, by Step Law (arXiv:2503.04715)
    #[arg(long)]
    suggest: bool,
    /// Tokens that --suggest plans for; 20 for each parameter besides the embedding when absent
    #[arg(long, value_name = "N", requires = "suggest", value_parser = clap::value_parser!(u64).range(1..))]
    budget_tokens: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs `sieve plan`: predicts memory, time and disk space of a recipe's run.
pub(crate) fn run(args: PlanArgs) -> Result<()> {
    let source = args.recipe;
    let recipe = source.load()?;
    useless_settings(&recipe).iter().for_each(|words| terminal::warning(words));
    if recipe.model.initial_folder().is_none() {
        untrained_model(&recipe).into_iter().for_each(terminal::warning);
    }
    let vocab_size = match initial_checkpoint(&recipe)? {
        Some(checkpoint) => checkpoint.state.vocab_size,
        None => vocab_size(&recipe)?,
    };
    if let Some(Err(words)) = source.file().map(|file| file.check_beside(&recipe, &source.default_out())) {
        terminal::warning(&format!("sieve train refuses this recipe: {words}"));
    }
    let (target, name) = target(args.gpu.as_deref())?;
    let ranks = Ranks { size: usize::from(args.nproc) * usize::from(args.nnodes), hosts: usize::from(args.nnodes) };
    TrainError::check_ranks(&recipe, ranks.size)?;
    let mut plan = plan_of_ranks(&recipe, vocab_size, &target, ranks)?;
    if let (Target::Gpu(gpu), true, None) = (&target, recipe.training.same_bits, &plan.refused) {
        let held = same_bits::check_planned(gpu, &recipe.model_shape(vocab_size)?);
        plan.refused = held.err().map(|error| error.to_string());
    }
    // `folder` fails if data.cache_dir has a variable that is not set here; the plan does without the text then.
    let folder = source.data_folder(&recipe, None).ok();
    let found = folder.and_then(|folder| epochs::of_run(&recipe, &folder));
    let line = planned_line(&recipe, vocab_size, &target)?;
    let suggestion = args.suggest.then(|| Suggestion::new(&plan, &recipe, args.budget_tokens));
    if args.json {
        let mut json = serde_json::to_value(&plan)?;
        json["model"] = line.into();
        json["text"] = serde_json::to_value(&found)?;
        json["initial_weights"] = initial_weights(&recipe).to_string().into();
        if let Some(suggestion) = &suggestion {
            json["suggestion"] = serde_json::to_value(suggestion)?;
        }
        terminal::line(&serde_json::to_string_pretty(&json)?);
        return Ok(());
    }
    // With data.fallback, paths without files are no problem.
    if recipe.data.fallback.is_none() {
        text_files::remark_on_missing("data.paths", &recipe.data.paths);
    }
    terminal::lines(text(&plan, &recipe, [&name, &line], found.as_deref()));
    terminal::line("");
    terminal::line(&format!("disk          {}", room::line(&recipe, plan.disk, &source.default_out())));
    if let Some(suggestion) = suggestion {
        terminal::line(&suggestion_text(&suggestion, &recipe, &plan));
    }
    Ok(())
}

/// The lines of `--suggest`: learning rate, batch and steps by Step Law beside the recipe's.
fn suggestion_text(suggestion: &Suggestion, recipe: &Recipe, plan: &Plan) -> String {
    let tokens = suggestion.num_tokens as f64;
    let sharding = match (plan.cheapest_stage(), plan.ranks) {
        (Some(ZeroPlan { zero_stage, shard_ranks, gradient_dtype, total_bytes, .. }), Some(_)) => format!(
            "\n  --set parallelism.zero_stage={zero_stage}{} --set training.gradient_dtype={}: of the shardings that \
             fit, with gradients in f32 where one does, the one whose transfers take least time ({})",
            match shard_ranks {
                0 => String::new(),
                size => format!(" --set parallelism.shard_ranks={size}"),
            },
            format!("{gradient_dtype:?}").to_lowercase(),
            gib(*total_bytes)
        ),
        (None, Some(together)) => {
            format!("\n  no sharding over {} processes fits; see `would fit` above", together.ranks.size)
        }
        _ => String::new(),
    };
    format!(
        "\nsuggested     for {} tokens, {:.1} per parameter besides the embedding, {} FLOPs (20 is usual, \
         arXiv:2203.15556)\n\
         \x20 learning rate {:.2e} (the recipe has {:.2e}), {} rows a step ({}), {} steps ({})\n\
         \x20 by Step Law, 1.79 N^-0.713 D^0.307 and 0.58 D^0.571 tokens a step (arXiv:2503.04715), N the parameters \
         besides\n\
         \x20 the embedding, D the tokens; a start for a sweep, no promise: at 1.7B DMA's paper has steps of 1M \
         tokens, the law 0.66M\n\
         \x20 {}{sharding}",
        short_count(tokens),
        tokens / plan.num_non_embedding.max(1) as f64,
        exponent(suggestion.total_flops),
        suggestion.lr,
        recipe.optimizer.lr,
        suggestion.global_batch_size,
        recipe.training.global_batch_size,
        suggestion.steps,
        recipe.training.steps,
        suggestion.overrides()
    )
}

/// The device to plan for, and its name for the heading: a GPU by name, or this CPU, whose speed is measured.
fn target(gpu: Option<&str>) -> Result<(Target, String)> {
    let Some(name) = gpu else {
        let (peak, threads) = (sieve_host::device::cpu_peak_flops(), sieve_host::device::num_threads());
        let target = out_of_memory::target(&Device::Cpu, Some(peak));
        let speed = peak / 1e9;
        let busy = match sieve_host::device::load() {
            Some(load) if load > 1.0 + threads as f64 => {
                format!(" on a busy machine (load {load:.0}): a quiet one is faster")
            }
            _ => String::new(),
        };
        let threads = terminal::counted(threads as u64, "thread");
        let name = format!("this CPU, {threads}, f32: {speed:.0} GFLOP/s in GEMMs, measured just now{busy}");
        return Ok((target, name));
    };
    match gpu::find(name) {
        Some(gpu) => {
            let name = format!("{}, bf16 over f32 masters", gpu.name);
            Ok((Target::Gpu(gpu), name))
        }
        None if is_no_nvidia(name) => {
            bail!(
                "--gpu {name} is not an NVIDIA GPU: the kernels are CUDA's\n  hint: one of {}",
                gpu::names().join(", ")
            )
        }
        None => bail!("--gpu {name} is not known{}\n  hint: one of {}", gpu::why_not(name), gpu::names().join(", ")),
    }
}

/// Whether a name looks like a GPU of AMD, Intel, Apple or Google.
fn is_no_nvidia(name: &str) -> bool {
    let others = ["mi", "rx", "radeon", "instinct", "amd", "arc", "gaudi", "intel", "apple", "tpu"];
    let name = name.to_ascii_lowercase();
    others.iter().any(|other| name.starts_with(other))
}

/// What the run would train, on one line.
fn planned_line(recipe: &Recipe, vocab_size: usize, target: &Target) -> Result<String> {
    let numbers = match target {
        Target::Cpu { .. } => NumberFormat::TrainedInF32,
        Target::Gpu(_) => NumberFormat::TrainedInBf16,
    };
    Ok(model_line(recipe, &recipe.model_shape(vocab_size)?, numbers, &initial_weights(recipe)))
}

/// The printed lines: parameters, stages, memory, cache, path of each op, and time.
fn text(plan: &Plan, recipe: &Recipe, [target, line]: [&str; 2], found: Option<&[TextEpochs]>) -> Vec<String> {
    let mut lines = vec![format!("plan for {target}"), terminal::model_line(line), String::new()];
    lines.push(format!(
        "parameters    {} ({} besides embedding and output)",
        short_count(plan.num_parameters as f64),
        short_count(plan.num_non_embedding as f64),
    ));
    for (part, number) in &plan.parameters {
        let share = 100.0 * *number as f64 / plan.num_parameters as f64;
        let number = terminal::thousands(*number);
        lines.push(format!("  {part:<16} {number:>16}  {share:>5.1} %"));
    }
    lines.push(format!("  {:<16} {}", "initial weights", initial_weights(recipe)));
    lines.push(String::new());
    lines.push(format!(
        "run           {} tokens, {:.1} per parameter besides the embedding, {} FLOPs executed",
        short_count(plan.num_tokens as f64),
        plan.tokens_per_parameter,
        exponent(plan.total_flops)
    ));
    for (number, stage) in (1..).zip(&plan.stages) {
        lines.extend(stage_lines(number, stage, plan.stages.len()));
    }
    lines.extend(epochs::lines(found, recipe));
    lines.extend(plan.ranks.iter().map(ranks_line));
    lines.push(String::new());
    lines.extend(memory_lines(plan, recipe));
    lines.push(String::new());
    lines.extend(cache_lines(plan));
    lines.push(String::new());
    lines.push("ops".to_owned());
    for op in &plan.ops {
        lines.push(format!("  {:<30} {:<12} {}", op.op, op.path, op.reason));
    }
    lines.push(String::new());
    lines.push(match (plan.seconds, &plan.assumption) {
        (Some(seconds), Some(assumption)) => {
            format!("time          a guess: {} at {assumption}", terminal::duration(seconds))
        }
        _ => "time          not known: no run of this attention was measured there".to_owned(),
    });
    if let Some(refused) = &plan.refused {
        lines.push(String::new());
        lines.push(format!("refused       {refused}"));
    }
    lines
}

/// The lines about the steps and FLOPs of a stage.
fn stage_lines(number: usize, stage: &StagePlan, num_stages: usize) -> Vec<String> {
    let name = if num_stages == 1 { "steps".to_owned() } else { format!("stage {number}") };
    let mut lines = vec![
        format!(
            "  {name:<10} {} of {} tokens, rows of {}, {}",
            terminal::counted(stage.steps as u64, "step"),
            terminal::thousands(stage.tokens_per_step as u64),
            stage.seq_len,
            terminal::counted(stage.micro_batches as u64, "micro-batch")
        ),
        format!(
            "             {} FLOPs a token executed, {} dense equivalent ({:.2}x); {:.1} keys a query, \
             attention {:.1} %",
            exponent(stage.executed_flops_per_token),
            exponent(stage.dense_flops_per_token),
            stage.dense_flops_per_token / stage.executed_flops_per_token,
            stage.mean_active_keys,
            100.0 * stage.attention_share
        ),
    ];
    if let Some(speed) = stage.tokens_per_second {
        let speed = terminal::thousands(speed as u64);
        lines.push(format!("             about {speed} tokens/s"));
    }
    if let Some(parts) = &stage.context_parallel {
        lines.extend(context_parallel_lines(parts));
    }
    if let Some(seq_len) = stage.pays_from {
        let seq_len = terminal::thousands(seq_len as u64);
        lines.push(format!("             nsa is faster than dense attention from about {seq_len} tokens a row on"));
    }
    lines
}

/// The lines about rows that several ranks divide: the time of their exchange, and the longest rows that fit.
fn context_parallel_lines(parts: &ContextParallelPlan) -> Vec<String> {
    let ContextParallelPlan { degree, tokens, exchange_seconds, longest_rows, speed_too_high_by } = parts;
    let longest = longest_rows.iter().map(|(kind, seq_len)| match seq_len {
        0 => format!("{kind} none"),
        seq_len => format!("{kind} {}", terminal::thousands(*seq_len as u64)),
    });
    let too_high = speed_too_high_by.map(|percent| {
        format!(
            "             note: on two H200s, estimates of this attention under context parallelism were too high by \
             {percent}"
        )
    });
    let lines = [
        format!(
            "             rows in {degree} parts of {} tokens; keys and heads travel for {:.1} ms a step",
            terminal::thousands(*tokens as u64),
            1e3 * exchange_seconds
        ),
        format!("             longest rows that fit, one a micro-batch: {}", longest.collect::<Vec<_>>().join(", ")),
    ];
    too_high.into_iter().chain(lines).collect()
}

/// The line about what several processes exchange in a step: gradient sums and gathered weights.
fn ranks_line(together: &RanksPlan) -> String {
    let RanksPlan { ranks, num_shards, sum_bytes, gather_bytes, sum_seconds, gather_seconds } = together;
    let [sums, gathered] = [sum_seconds, gather_seconds].map(|seconds| 1e3 * seconds);
    let hosts = match ranks.hosts {
        1 => "on one host".to_owned(),
        hosts => format!("on {hosts} hosts, one 400 Gb/s card each assumed"),
    };
    let copies = match ranks.size / num_shards {
        1 => String::new(),
        copies if *num_shards > 1 => format!(", {copies} groups that divide weights {num_shards} ways"),
        _ => ", each with all weights".to_owned(),
    };
    format!(
        "  together   {} processes {hosts}{copies}: {sums:.1} ms of gradient sums ({:.1} GB) and {gathered:.1} ms of \
         gathered weights ({:.1} GB) a step, while the passes run; memory below is of each process",
        ranks.size,
        sum_bytes / 1e9,
        gather_bytes / 1e9
    )
}

/// The line about the copy of which a checkpoint is written; `None` on a CPU, whose memory has the copy among the
/// parts.
fn copy_line(plan: &Plan) -> Option<String> {
    let (each, ranks) = (plan.memory.host_checkpoint_bytes, plan.ranks.as_ref());
    if each == 0 {
        return None;
    }
    let each_in_words = gib(each);
    if plan.memory.copies_on_device() {
        return Some(format!("  and {each_in_words} that are free, for a copy while a checkpoint is written"));
    }
    // Ranks with the same shards write them once.
    let of_host = ranks.map_or(1, |plan| (plan.ranks.size / plan.ranks.hosts).min(plan.num_shards) as u64);
    let all = match of_host {
        1 => String::new(),
        count => format!(", {} for the {count} processes of a host", gib(count * each)),
    };
    Some(format!("  and {each_in_words} of the machine's own memory while a checkpoint is written{all}"))
}

/// The lines about memory: need and parts, settings that would fit, and the need of other `zero_stage`s and activation
/// modes.
fn memory_lines(plan: &Plan, recipe: &Recipe) -> Vec<String> {
    let memory = &plan.memory;
    let mut lines =
        vec![format!("memory        {}: {}; fullest in {}", need(memory), memory.verdict.words(), memory.moment)];
    for (part, bytes) in memory.parts() {
        lines.push(format!("  {part:<20} {:>12}", gib(bytes)));
    }
    lines.extend(copy_line(plan));
    for fitting in &memory.would_fit {
        let (setting, total) = (&fitting.setting, gib(fitting.total_bytes));
        lines.push(format!("  would fit: {total} with {setting}"));
    }
    if memory.verdict.needs_advice() && memory.would_fit.is_empty() {
        lines.push(format!("  {}", nothing_fits(memory)));
    }
    for way in &plan.zero_stages {
        let ZeroPlan { zero_stage, shard_ranks, gradient_dtype, total_bytes, sum_bytes, gather_bytes, .. } = way;
        let ZeroPlan { seconds, verdict, .. } = way;
        let within = match shard_ranks {
            0 => String::new(),
            size => format!(", shard_ranks = {size}"),
        };
        // Between hosts the bytes do not say what a step costs.
        let time = match plan.ranks {
            Some(RanksPlan { ranks: Ranks { hosts: 2.., .. }, .. }) => format!(" in {:.1} ms", 1e3 * seconds),
            _ => String::new(),
        };
        lines.push(format!(
            "  zero_stage = {zero_stage}{within}, gradients in {:<4}: {}, {}; {:.1} GB of gradients and {:.1} GB of \
             weights cross a step{time}",
            format!("{gradient_dtype:?}").to_lowercase(),
            gib(*total_bytes),
            verdict.words(),
            sum_bytes / 1e9,
            gather_bytes / 1e9
        ));
    }
    let modes = memory.activations_by_mode.iter();
    let modes = modes.map(|(mode, bytes)| format!("{mode} {}", gib(*bytes)));
    lines.push(format!(
        "  activations by mode: {} (now {})",
        modes.collect::<Vec<_>>().join(", "),
        format!("{:?}", recipe.activation_checkpoint.mode).to_lowercase()
    ));
    if memory.keeping.recomputable {
        lines.push("  with room to spare: blocks keep activations that they could recompute".to_owned());
    }
    if memory.keeping.attention {
        lines.push("  with room to spare: recomputed blocks keep their attention's output".to_owned());
    }
    lines
}

/// The line about the KV cache: bytes of a token and of a row.
fn cache_lines(plan: &Plan) -> Vec<String> {
    let cache = &plan.cache;
    let until = match cache.stops_at_tokens {
        Some(tokens) => format!(", up to {} tokens", terminal::thousands(tokens as u64)),
        None => String::new(),
    };
    vec![format!(
        "KV cache      {} a token{until}; {} at {} tokens",
        terminal::bytes(cache.bytes_per_token),
        terminal::bytes(cache.bytes_at_seq_len),
        terminal::thousands(cache.seq_len as u64)
    )]
}

fn exponent(number: f64) -> String {
    format!("{number:.3e}")
}
