//! Checks the memory plan before a command begins, and words the message if CubeCL still runs out of GPU memory.
use crate::device::{Device, Place};
use crate::terminal::{bytes, gib};
use anyhow::{Result, bail};
use burn::tensor::DType;
use clap::Args;
use sieve_core::model::gpu::Gpu;
use sieve_core::{Keeping, ModelShape, Recipe};
use sieve_hf::Kept;
use sieve_plan::{
    FittingSetting, InferenceSize, MemoryPlan, MemoryVerdict, Ranks, Target, import_memory, inference_memory,
    plan_of_ranks, settings_that_save,
};
use sieve_train::MemoryProbe;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Advice to print when the GPU's memory is full.
static ADVICE: Mutex<Option<String>> = Mutex::new(None);

/// A message names this many of the largest parts of the needed memory.
const PARTS_NAMED: usize = 4;

/// `--ignore-memory`.
#[derive(Args, Clone, Copy, Debug)]
pub struct MemoryArgs {
    /// Start even if the plan needs more than the free memory
    #[arg(long)]
    ignore_memory: bool,
}

/// Result of the memory check of a run that may begin.
#[derive(Debug)]
pub struct Admitted {
    /// Warnings to print first, if the run or a copy of its state may not fit.
    pub warnings: Vec<String>,
    /// Optional activations that fit into the memory, for the trainer.
    pub keeping: Keeping,
    /// Text for [`advise`], in case the memory runs out nevertheless.
    pub advice: String,
}

/// Sets the advice that is printed when the GPU's memory is full.
pub fn advise(advice: String) {
    *ADVICE.lock().unwrap_or_else(PoisonError::into_inner) = Some(advice);
}

impl MemoryArgs {
    /// Refuses a run of `recipe` that does not fit on `device`, or whose checkpoints do not fit into the host's memory.
    /// Of all `ranks`, the `sharers` are on this host; on the CPU they divide its free memory equally.
    ///
    /// # Errors
    /// The run does not fit: the message has the needed and the free memory, the largest parts, and settings that would
    /// fit. Or the recipe contradicts its vocabulary.
    pub fn check_training(
        self,
        recipe: &Recipe,
        vocab_size: usize,
        device: &Device,
        [sharers, ranks]: [usize; 2],
    ) -> Result<Admitted> {
        let mut target = target(device, None);
        if let Target::Cpu { memory_bytes, .. } = &mut target {
            *memory_bytes /= sharers.max(1) as u64;
        }
        let memory = plan_of_ranks(recipe, vocab_size, &target, Ranks { size: ranks, hosts: 1 })?.memory;
        let mut warnings = Vec::from_iter(self.decide("this run", &memory)?);
        // Other replicas of the shards write nothing.
        let writers = sharers.min(recipe.parallelism.num_shards(ranks)) as u64;
        warnings.extend(self.decide_host_copies(&memory, writers, MemoryProbe::Process.available())?);
        let hint = if memory.would_fit.is_empty() {
            saving_hint(recipe, vocab_size, &target, ranks)?
        } else {
            fitting_settings_hint(&memory)
        };
        Ok(Admitted { warnings, keeping: memory.keeping, advice: format!("{}\n{hint}", parts(&memory)) })
    }

    /// Refuses to load `checkpoint` for work of this size if it does not fit into the device's memory; warns if it may
    /// not.
    ///
    /// # Errors
    /// It does not fit: a message as of [`check_training`](Self::check_training). An unreadable checkpoint is no error
    /// here; loading it reports that.
    pub fn check_inference(
        self,
        checkpoint: &Path,
        place: &Place,
        size: impl FnOnce(&Recipe, &ModelShape) -> InferenceSize,
    ) -> Result<()> {
        let Ok((recipe, shape)) = sieve_hf::peek_model(checkpoint) else {
            return Ok(());
        };
        self.warn(&inference_plan(&shape, size(&recipe, &shape), place))
    }

    /// Refuses to import a model of `shape` if host memory is too small for it; warns if it may be.
    ///
    /// # Errors
    /// It does not fit: a message as of [`check_training`](Self::check_training).
    pub fn check_import(self, shape: &ModelShape) -> Result<()> {
        self.warn(&import_memory(shape, &target(&Device::Cpu, None)))
    }

    /// Prints a warning if the model may not fit; fails if it does not.
    fn warn(self, memory: &MemoryPlan) -> Result<()> {
        if let Some(warning) = self.decide("this model", memory)? {
            crate::terminal::note(&warning);
        }
        Ok(())
    }

    /// As [`decide`](Self::decide), for the copies of weights and moments that `writers` processes of this host hold in
    /// its memory, of which `available` bytes are free, while a checkpoint is written.
    fn decide_host_copies(self, memory: &MemoryPlan, writers: u64, available: u64) -> Result<Option<String>> {
        let needed = writers * memory.host_checkpoint_bytes;
        if memory.copies_on_device() || needed == 0 {
            return Ok(None);
        }
        let verdict = MemoryVerdict::of(needed, available);
        let [each, all, free] = [memory.host_checkpoint_bytes, needed, available].map(gib);
        let text = format!(
            "a checkpoint of this run {} into the machine's own memory, as the GPU has no room for a copy: {writers} \
             {} of {each} {} {all} of {free} available\n  \
             hint: free memory, or use a machine with more of it, or more machines: their processes share the copy",
            verdict.words(),
            if writers == 1 { "copy" } else { "copies" },
            if writers == 1 { "takes" } else { "take" },
        );
        match verdict {
            MemoryVerdict::Fits | MemoryVerdict::Unknown => Ok(None),
            MemoryVerdict::DoesNotFit if !self.ignore_memory => {
                bail!("{text}\n  --ignore-memory starts it all the same")
            }
            MemoryVerdict::MayNotFit | MemoryVerdict::DoesNotFit => Ok(Some(format!("warning: {text}"))),
        }
    }

    /// The warning to print; `None` if the memory suffices or is unknown. Fails if it does not, unless
    /// `--ignore-memory`.
    fn decide(self, what: &str, memory: &MemoryPlan) -> Result<Option<String>> {
        let text = || {
            format!(
                "{what} {}: it needs {}\n{}\n{}",
                memory.verdict.words(),
                need(memory),
                parts(memory),
                fitting_settings_hint(memory)
            )
        };
        match memory.verdict {
            MemoryVerdict::Fits | MemoryVerdict::Unknown => Ok(None),
            MemoryVerdict::DoesNotFit if !self.ignore_memory => {
                bail!("{}\n  --ignore-memory starts it all the same", text())
            }
            MemoryVerdict::MayNotFit | MemoryVerdict::DoesNotFit => Ok(Some(format!("warning: {}", text()))),
        }
    }
}

/// What work of this size on a model takes of the memory that is free on a device now.
pub fn inference_plan(shape: &ModelShape, mut size: InferenceSize, place: &Place) -> MemoryPlan {
    // The command itself refuses rows longer than the context, with a better message.
    let InferenceSize { seq_len, cached_tokens, logit_tokens, .. } = &mut size;
    for tokens in [seq_len, cached_tokens, logit_tokens] {
        *tokens = (*tokens).min(shape.max_seq_len);
    }
    let weight_bytes = match place.kept {
        Kept::All(dtype) => dtype.size(),
        Kept::Bf16Weights => DType::BF16.size(),
    };
    let target = target(&place.device, None);
    let plan = |weight_bytes: usize| inference_memory(shape, size, &target, weight_bytes as u64);
    let mut memory = plan(weight_bytes);
    if memory.verdict.needs_advice() && place.kept == Kept::All(DType::F32) {
        let rounded = plan(DType::BF16.size());
        if rounded.verdict == MemoryVerdict::Fits {
            let setting = "--dtype bf16".to_owned();
            memory.would_fit.push(FittingSetting { setting, total_bytes: rounded.total_bytes });
        }
    }
    memory
}

/// The plan's description of a device, with the memory that is free now. `cpu_flops` is only needed to estimate time.
pub fn target(device: &Device, cpu_flops: Option<f64>) -> Target {
    match device {
        Device::Cpu => Target::Cpu { flops_per_second: cpu_flops, memory_bytes: MemoryProbe::Process.available() },
        Device::Cuda(gpu) => {
            let (in_use, total) = crate::device::cuda_memory(gpu.index);
            // Only memory is planned: the rates of an unlisted GPU do not matter.
            let listed = sieve_core::model::gpu::find(&gpu.name);
            Target::Gpu(Gpu {
                name: gpu.name.clone(),
                bf16_flops: listed.as_ref().map_or(1e14, |gpu| gpu.bf16_flops),
                memory_bytes: total.saturating_sub(in_use),
                total_memory_bytes: total,
                memory_bytes_per_second: listed.map_or(1e12, |gpu| gpu.memory_bytes_per_second),
                arch: gpu.arch(),
            })
        }
    }
}

/// The needed and the free memory: `12.34 GiB of 23.00 GiB available`.
pub fn need(memory: &MemoryPlan) -> String {
    let needed = gib(memory.total_bytes);
    match memory.available_bytes {
        0 => needed,
        available => format!("{needed} of {} available", gib(available)),
    }
}

/// Printed if none of the settings that the plan tries makes a run fit.
pub fn nothing_fits(memory: &MemoryPlan) -> String {
    let (what, instead) = if memory.fits_without_rows() {
        ("activations and workspace of a single row", "lower training.seq_len")
    } else {
        ("the weights and the optimizer's state", "make the model smaller")
    };
    format!(
        "no local_batch_size and no activation_checkpoint.mode makes it fit: {what} are too large; {instead}, or use a \
         machine with more memory"
    )
}

/// The line about the point of a step that needs most memory, with its largest parts.
fn parts(memory: &MemoryPlan) -> String {
    let mut parts = memory.parts();
    parts.retain(|(_, bytes)| *bytes >= memory.total_bytes / 100);
    parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let largest = parts.iter().take(PARTS_NAMED);
    let largest = largest.map(|(name, bytes)| format!("{name} {}", gib(*bytes)));
    let largest = largest.collect::<Vec<_>>().join(", ");
    format!("  fullest in {}: {largest}", memory.moment)
}

/// The hint for a run that was planned to fit and does not: what takes less, the cheapest first.
fn saving_hint(recipe: &Recipe, vocab_size: usize, target: &Target, ranks: usize) -> Result<String> {
    // The stage with the longest rows takes most.
    let stages = recipe.stages();
    let stage = stages.iter().max_by_key(|stage| recipe.at_stage(stage).training.seq_len);
    let alone = stage.map_or_else(|| recipe.clone(), |stage| recipe.at_stage(stage));
    let settings = settings_that_save(&alone, &alone.model_shape(vocab_size)?, target, ranks);
    let settings: Vec<String> =
        settings.iter().map(|saving| format!("{} ({})", saving.setting, gib(saving.total_bytes))).collect();
    Ok(if settings.is_empty() {
        "  hint: every key that takes less is set: take more GPUs, shorter rows or a smaller model".to_owned()
    } else {
        format!("  hint: less is needed with {}", settings.join(", or with "))
    })
}

/// The hint: settings with which the run fits, or what else to change.
fn fitting_settings_hint(memory: &MemoryPlan) -> String {
    let settings = memory.would_fit.iter().map(|fitting| {
        let (setting, total) = (&fitting.setting, gib(fitting.total_bytes));
        format!("{setting} ({total})")
    });
    let settings = settings.collect::<Vec<_>>();
    let hint = match (settings.is_empty(), memory.peak.moment_bytes > 0) {
        (false, _) => format!("it would fit with {}", settings.join(", or with ")),
        (true, true) if memory.verdict.needs_advice() => nothing_fits(memory),
        (true, true) => {
            "lower training.local_batch_size, or set activation_checkpoint.mode=full; sieve plan prints what is needed \
             then"
                .to_owned()
        }
        (true, false) => "free memory, or use a machine with more of it".to_owned(),
    };
    format!("  hint: {hint}")
}

/// The message to print instead of a panic that reports full GPU memory; `None` for any other panic.
pub fn message(panic: &str) -> Option<String> {
    const SIZE: &str = "can't allocate buffer of size: ";
    let size = panic.split_once(SIZE).map(|(_, rest)| {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        rest[..digits].parse::<u64>().unwrap_or(0)
    });
    if size.is_none() && !panic.contains("OUT_OF_MEMORY") {
        return None;
    }
    let wanted = match size {
        Some(size) if size > 0 => format!(": {} more could not be had", bytes(size)),
        _ => String::new(),
    };
    let advice = ADVICE.lock().unwrap_or_else(PoisonError::into_inner);
    let advice = advice.as_deref().unwrap_or("  hint: free memory on the GPU, or make the work smaller");
    Some(format!("the GPU's memory is full{wanted}\n{advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_plan::plan;

    const REFUSE: MemoryArgs = MemoryArgs { ignore_memory: false };

    /// The memory plan of a shipped recipe, with these overrides, on a GPU of this size.
    fn memory(gigabytes: f64, overrides: &[&str]) -> MemoryPlan {
        let text = include_str!("../../../recipes/dma_80m.toml");
        let overrides: Vec<String> = overrides.iter().map(|&set| set.to_owned()).collect();
        let recipe = Recipe::load(text, "a recipe", &overrides).expect("a shipped recipe");
        let target = Target::Gpu(Gpu {
            name: "H100".to_owned(),
            bf16_flops: 1e15,
            memory_bytes: (gigabytes * 1e9) as u64,
            total_memory_bytes: (gigabytes * 1e9) as u64,
            memory_bytes_per_second: 3.35e12,
            arch: "sm_90a".to_owned(),
        });
        plan(&recipe, 50_277, &target).expect("plans").memory
    }

    #[test]
    fn needed_memory_its_parts_and_settings_that_fit_are_named() {
        let memory = memory(23.0, &["training.local_batch_size=64"]);
        let error = REFUSE.decide("this run", &memory).expect_err("too large");
        let text = error.to_string();
        for word in [
            "this run does not fit: it needs ",
            " of 21.42 GiB available\n",
            "fullest in the loss: activations ",
            "it would fit with training.local_batch_size=",
            "or with activation_checkpoint.mode=",
            "--ignore-memory starts it all the same",
        ] {
            assert!(text.contains(word), "no {word:?} in {text}");
        }
    }

    #[test]
    fn only_the_flag_lets_a_run_begin_that_does_not_fit() {
        let wide = &["training.local_batch_size=64"];
        let ignore = MemoryArgs { ignore_memory: true };
        let mut verdicts = Vec::new();
        for gigabytes in [60.0, 48.0, 42.0, 38.0, 35.0, 32.0, 29.0, 26.0, 20.0] {
            let memory = memory(gigabytes, wide);
            let answer = REFUSE.decide("this run", &memory);
            assert_eq!(answer.is_err(), memory.verdict == MemoryVerdict::DoesNotFit, "{gigabytes}");
            let answer = ignore.decide("this run", &memory).expect("let through");
            assert_eq!(answer.is_none(), memory.verdict == MemoryVerdict::Fits, "{gigabytes}");
            assert!(answer.is_none_or(|text| text.starts_with("warning: this run ")));
            verdicts.push(memory.verdict);
        }
        // The smaller the card, the worse; all three are met.
        verdicts.dedup();
        assert_eq!(verdicts, [MemoryVerdict::Fits, MemoryVerdict::MayNotFit, MemoryVerdict::DoesNotFit]);
    }

    #[test]
    fn a_copy_that_the_host_cannot_hold_is_refused_with_numbers() {
        // 6.8 GB of 8: a second copy of 1.4 GB of state, and a quarter, do not fit beside the step.
        let full = memory(8.0, &["training.local_batch_size=8", "training.global_batch_size=8"]);
        let each = full.host_checkpoint_bytes;
        assert!(!full.copies_on_device() && each > 900 << 20, "{} of {}", full.total_bytes, full.available_bytes);
        let refuse = |available| REFUSE.decide_host_copies(&full, 4, available);
        let error = refuse(3 * each).expect_err("too large").to_string();
        for word in [
            "a checkpoint of this run does not fit into the machine's own memory",
            &format!("4 copies of {} take {} of {} available", gib(each), gib(4 * each), gib(3 * each)),
            "--ignore-memory",
        ] {
            assert!(error.contains(word), "no {word:?} in {error}");
        }
        assert_eq!(refuse(5 * each).expect("fits"), None);
        assert_eq!(refuse(0).expect("unknown"), None);
        let warning = refuse(4 * each - 1).expect("a warning").expect("it may not fit");
        assert!(warning.starts_with("warning: a checkpoint of this run may not fit into"), "{warning}");
        let ignore = MemoryArgs { ignore_memory: true };
        assert!(ignore.decide_host_copies(&full, 4, 3 * each).expect("let through").is_some());
        // With room for the copy on the GPU, the host holds none.
        let wide = memory(80.0, &["training.local_batch_size=8", "training.global_batch_size=8"]);
        assert!(wide.copies_on_device(), "{} of {}", wide.total_bytes, wide.available_bytes);
        assert_eq!(REFUSE.decide_host_copies(&wide, 4, each).expect("no copy"), None);
    }

    #[test]
    fn weights_that_do_not_fit_get_a_hint_of_a_smaller_model() {
        let text = fitting_settings_hint(&memory(1.0, &[]));
        assert!(text.contains("the optimizer's state are too large; make the model smaller"), "{text}");
    }

    #[test]
    fn a_row_that_does_not_fit_gets_a_hint_of_a_shorter_one() {
        let long = "training.seq_len=2000000";
        let text = fitting_settings_hint(&memory(80.0, &[long, "model.max_position_embeddings=2000000"]));
        assert!(text.contains("of a single row are too large; lower training.seq_len"), "{text}");
    }

    #[test]
    fn a_panic_of_the_allocator_becomes_a_message_with_a_hint() {
        let panic = "called `Result::unwrap()` on an `Err` value: can't allocate buffer of size: 2361393152\n   \
            0: frame";
        let text = message(panic).expect("it is about memory");
        assert!(text.starts_with("the GPU's memory is full: 2.20 GiB more"), "{text}");
        assert!(text.contains("hint: ") && !text.contains("frame"), "{text}");
        let driver = "cublaslt: a workspace of 64 MiB: DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")";
        assert!(message(driver).is_some());
        assert_eq!(message("index out of bounds"), None);
    }
}
