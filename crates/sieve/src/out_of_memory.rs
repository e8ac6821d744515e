//! A GPU whose memory is full: told before a run where it can be known, and in plain words where CubeCL panics.
use crate::terminal::{bytes, gib};
use anyhow::{Result, bail};
use sieve_core::Recipe;
use sieve_core::model::gpu::Gpu;
use sieve_core::plan::{MemoryPlan, Target, plan};
use sieve_kernels::DeviceReport;
use std::sync::{Mutex, PoisonError};

/// What to say about memory when it is full.
static ADVICE: Mutex<Option<String>> = Mutex::new(None);

/// A plan is right to a tenth: a run is refused only where it is larger than memory by more.
const TOLERANCE: f64 = 0.9;

/// Refuses a run that cannot fit on `gpu`, and keeps what to say should memory be full all the same.
///
/// # Errors
/// The part that does not fit, and settings with which the run would.
pub(crate) fn check(recipe: &Recipe, vocab_size: usize, gpu: &DeviceReport) -> Result<()> {
    let (used, total) = crate::device::cuda_memory(gpu.index);
    // Only memory is asked for: the rates of an unlisted GPU do not matter.
    let listed = sieve_core::model::gpu::find(&gpu.name);
    let target = Target::Gpu(Gpu {
        name: gpu.name.clone(),
        bf16_flops: listed.as_ref().map_or(1e14, |gpu| gpu.bf16_flops),
        memory_bytes: total,
        memory_bytes_per_second: listed.map_or(1e12, |gpu| gpu.memory_bytes_per_second),
    });
    let memory = plan(recipe, vocab_size, &target)?.memory;
    let free = total.saturating_sub(used);
    let advice = advice(&memory, free);
    if total > 0 && memory.total_bytes as f64 * TOLERANCE > free as f64 {
        let others = if used > total / 20 {
            format!(" ({} are in use already)", gib(used))
        } else {
            String::new()
        };
        bail!(
            "this run does not fit on cuda:{}: it needs about {}, {} of {} are free{others}\n{advice}",
            gpu.index,
            gib(memory.total_bytes),
            gib(free),
            gib(total)
        );
    }
    *ADVICE.lock().unwrap_or_else(PoisonError::into_inner) = Some(advice);
    Ok(())
}

/// The parts, the one that does not fit, and what to change.
fn advice(memory: &MemoryPlan, free: u64) -> String {
    let parts = memory.parts();
    let parts = parts
        .iter()
        .map(|(name, bytes)| format!("{name} {}", gib(*bytes)));
    let parts = parts.collect::<Vec<_>>().join(", ");
    let mut text = format!(
        "  by the plan: {parts}; fullest in {}\n  what does not fit: {}",
        memory.moment,
        memory.part_that_exceeds(free)
    );
    let settings = memory.would_fit.iter();
    let settings = settings.map(|fitting| {
        let (setting, total) = (&fitting.setting, gib(fitting.total_bytes));
        format!("{setting} ({total})")
    });
    let settings = settings.collect::<Vec<_>>();
    text.push_str("\n  hint: ");
    if settings.is_empty() {
        text.push_str(
            "lower training.local_batch_size, or set activation_checkpoint.mode=full; sieve plan says what is needed then",
        );
    } else {
        text.push_str("it would fit with ");
        text.push_str(&settings.join(", or with "));
    }
    text
}

/// What to print instead of a panic's own text, where the panic says that GPU memory is full.
pub(crate) fn message(panic: &str) -> Option<String> {
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
    let advice = advice
        .as_deref()
        .unwrap_or("  hint: free memory on the GPU, or make the work smaller");
    Some(format!("the GPU's memory is full{wanted}\n{advice}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(overrides: &[&str]) -> Recipe {
        let text = include_str!("../../../recipes/dma_80m.toml");
        let overrides: Vec<String> = overrides.iter().map(|&set| set.to_owned()).collect();
        Recipe::load(text, "a recipe", &overrides).expect("a shipped recipe")
    }

    fn memory(gigabytes: u64, overrides: &[&str]) -> MemoryPlan {
        let target = Target::Gpu(Gpu {
            name: "H100".to_owned(),
            bf16_flops: 1e15,
            memory_bytes: gigabytes * 1_000_000_000,
            memory_bytes_per_second: 3.35e12,
        });
        plan(&recipe(overrides), 50_277, &target)
            .expect("plans")
            .memory
    }

    #[test]
    fn the_part_and_the_setting_are_named() {
        let memory = memory(24, &["training.local_batch_size=64"]);
        let text = advice(&memory, 23_000_000_000);
        for word in [
            "activations",
            "what does not fit: activations",
            "activation_checkpoint.mode=selective (",
            "or with training.local_batch_size=32 (",
        ] {
            assert!(text.contains(word), "no {word:?} in {text}");
        }
        // What other programs left is too little even for the weights.
        let text = advice(&memory, 1_000_000_000);
        assert!(
            text.contains("what does not fit: rest of f32 masters"),
            "{text}"
        );
    }

    #[test]
    fn a_panic_of_the_allocator_is_told_plainly() {
        let panic = "called `Result::unwrap()` on an `Err` value: can't allocate buffer of size: 2361393152\n   0: frame";
        let text = message(panic).expect("it is about memory");
        assert!(
            text.starts_with("the GPU's memory is full: 2.20 GiB more"),
            "{text}"
        );
        assert!(text.contains("hint: ") && !text.contains("frame"), "{text}");
        let driver = "cublaslt: a workspace of 64 MiB: DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")";
        assert!(message(driver).is_some());
        assert_eq!(message("index out of bounds"), None);
    }
}
