//! Compiles kernels into the kernel cache before the first run.
use crate::device::{Device, DeviceChoice};
use crate::terminal;
use anyhow::{Result, anyhow, bail};
use sieve_core::{Recipe, ShownPath};
use sieve_kernels::ahead_of_time::{CompiledKernel, compile_with_nvrtc, installed_nvrtc};
use sieve_kernels::{Cubins, DeviceReport, KernelCache, KernelError, NeededKernels, SourceKernel};
use sieve_plan::needed_kernels;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

/// What to compile, and for which GPUs.
#[derive(Clone, Debug)]
pub struct BuildSettings {
    /// The recipe whose training and decoding kernels are compiled; without it, all kernels that ship are.
    pub recipe: Option<Recipe>,
    /// Architectures such as `sm_90a`; those of this machine's GPUs when empty.
    pub arch: Vec<String>,
    /// Folder that gets one cache of cubins for each architecture.
    pub root: PathBuf,
}

/// What became of one kernel: found in the cache, compiled, or failed.
enum Outcome {
    Kept,
    Compiled(CompiledKernel),
    Failed(KernelError),
}

/// Puts machine code into kernel caches, one for each architecture, and prints what each kernel uses. Needs no GPU.
///
/// # Errors
/// An unknown architecture, no compiler, a folder that cannot be written, kernels that do not compile.
pub fn build(settings: &BuildSettings) -> Result<()> {
    let architectures = architectures(&settings.arch)?;
    let version = installed_nvrtc().map_err(|error| {
        anyhow!(error).context("no compiler\n  hint: install the run-time compiler of a CUDA toolkit (NVRTC)")
    })?;
    let mut failed = 0;
    for arch in architectures {
        let needed = needed_kernels(settings.recipe.as_ref(), &arch).map_err(anyhow::Error::msg)?;
        let cubins = Cubins::below(&settings.root, &arch, version);
        failed += build_one(&arch, &needed, &cubins)?;
    }
    if failed > 0 {
        bail!("{failed} kernels were not compiled");
    }
    Ok(())
}

/// Compiles the kernels of `needed` that a cache lacks, on all cores.
///
/// # Errors
/// No compiler, a folder that cannot be written, or a kernel that does not compile.
fn fill(cache: &KernelCache, arch: &str, needed: &NeededKernels) -> Result<()> {
    let cubins = cache.cubins();
    let keys = keys_of(&needed.kernels)?;
    let missing = keys.iter().filter(|key| !cubins.has(**key)).count();
    if missing == 0 {
        return Ok(());
    }
    let started = Instant::now();
    for outcome in compile_all(arch, &needed.kernels, &keys, cubins) {
        if let Outcome::Failed(error) = outcome {
            return Err(error.into());
        }
    }
    terminal::line(&format!("{missing} kernels compiled in {:.1} s", started.elapsed().as_secs_f64()));
    Ok(())
}

fn keys_of(kernels: &[SourceKernel]) -> Result<Vec<u128>> {
    Ok(kernels.iter().map(SourceKernel::code_key).collect::<Result<_, _>>()?)
}

/// Compiles one architecture's kernels into the cache and prints what they use; returns how many failed.
fn build_one(arch: &str, needed: &NeededKernels, cubins: &Cubins) -> Result<usize> {
    let started = Instant::now();
    let keys = keys_of(&needed.kernels)?;
    let outcomes = compile_all(arch, &needed.kernels, &keys, cubins);
    terminal::line(&build_table_head());
    let (mut compiled, mut kept, mut failed) = (0, 0, 0);
    for (kernel, outcome) in needed.kernels.iter().zip(outcomes) {
        match outcome {
            Outcome::Kept => kept += 1,
            Outcome::Compiled(machine_code) => {
                compiled += 1;
                terminal::line(&row(arch, kernel, &machine_code));
            }
            Outcome::Failed(error) => {
                failed += 1;
                terminal::line(&format!("{arch:7} {:32} FAILED {error}", kernel.name()));
            }
        }
    }
    for error in &needed.refused {
        terminal::line(&format!("{arch:7} none for this architecture: {error}; such calls take the reference path"));
    }
    terminal::line(&format!(
        "{arch}: {compiled} kernels compiled in {:.1} s, {kept} were there, {failed} failed; in {}",
        started.elapsed().as_secs_f64(),
        cubins.folder().shown()
    ));
    Ok(failed)
}

/// A kernel's line of the table; "?" where the compiler reported no resources.
fn row(arch: &str, kernel: &SourceKernel, compiled: &CompiledKernel) -> String {
    let defines: Vec<String> = kernel.defines().iter().map(|(name, value)| format!("{name}={value}")).collect();
    let (registers, spills, stack, fixed) = match &compiled.resources {
        Some(r) => (
            r.registers.to_string(),
            format!("{}/{}", r.spill_store_bytes, r.spill_load_bytes),
            r.stack_bytes.to_string(),
            r.static_shared_bytes.to_string(),
        ),
        None => ["?"; 4].map(str::to_owned).into(),
    };
    format!(
        "{arch:7} {:32} {registers:>9} {spills:>15} {stack:>7} {:>14}  {}",
        kernel.name(),
        format!("{}+{fixed}", kernel.dynamic_shared_bytes()),
        defines.join(" ")
    )
}

/// The head of the table of kernels.
fn build_table_head() -> String {
    format!(
        "{:7} {:32} {:>9} {:>15} {:>7} {:>14}  defines",
        "arch", "kernel", "registers", "spills st/ld B", "stack B", "smem dyn+st B"
    )
}

/// Compiles the kernels that the cache lacks, on all cores, with a bar; returns the outcomes in the order of `kernels`.
fn compile_all(arch: &str, kernels: &[SourceKernel], keys: &[u128], cubins: &Cubins) -> Vec<Outcome> {
    let next = AtomicUsize::new(0);
    let (send, receive) = mpsc::channel();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut done = Vec::new();
    std::thread::scope(|scope| {
        for _ in 0..threads.min(kernels.len()) {
            let (send, next) = (send.clone(), &next);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(kernel) = kernels.get(index) else {
                        // Another thread has taken the last kernel.
                        break;
                    };
                    let outcome = if cubins.has(keys[index]) {
                        Outcome::Kept
                    } else {
                        compile_into(kernel, keys[index], arch, cubins).map_or_else(Outcome::Failed, Outcome::Compiled)
                    };
                    // The receiver is gone where the caller panicked.
                    if send.send((index, outcome)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(send);
        let bar = terminal::progress_bar(kernels.len() as u64, "{pos}/{len} kernels {wide_bar} {left}");
        for outcome in receive {
            done.push(outcome);
            bar.set_position(done.len() as u64);
        }
        bar.finish_and_clear();
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}

fn compile_into(kernel: &SourceKernel, key: u128, arch: &str, cubins: &Cubins) -> Result<CompiledKernel, KernelError> {
    let compiled = compile_with_nvrtc(kernel, arch)?;
    cubins.write(key, &compiled.cubin)?;
    Ok(compiled)
}

/// The error where no architecture was named, and there is no GPU. Of the reason its first line: the second is a hint
/// for a run.
fn nothing_to_build_for(error: KernelError) -> anyhow::Error {
    let text = error.to_string();
    let reason = text.lines().next().unwrap_or_default();
    anyhow!("there is no GPU here to build for: {reason}\n  hint: name its architecture, such as --arch sm_90a")
}

/// The named architectures (this machine's if none is named), each once.
fn architectures(named: &[String]) -> Result<Vec<String>> {
    let mut list = named.to_vec();
    if list.is_empty() {
        let report = sieve_kernels::CudaReport::probe().map_err(nothing_to_build_for)?;
        list = report.devices.iter().map(|device| device.arch()).collect();
    }
    list.sort();
    list.dedup();
    list.into_iter()
        .map(|arch| match NeededKernels::shared_bytes_of(&arch) {
            Some(_) => Ok(arch),
            None => Err(anyhow!(
                "--arch {arch}: the kernels are made for sm_80, sm_86, sm_89, sm_90a, sm_100a and sm_120a\n  \
                 hint: sm_80 is an A100, sm_86 an RTX 30, sm_89 an RTX 40 or L40S, sm_90a an H100 or H200, sm_100a a \
                 B200, sm_120a an RTX 50"
            )),
        })
        .collect()
}

/// A callback that compiles the kernels of a check or a benchmark before its first case.
pub fn prepare(needed: impl Fn(&DeviceReport) -> NeededKernels) -> impl Fn(&KernelCache, &DeviceReport) -> Result<()> {
    move |cache, gpu| fill(cache, &gpu.arch(), &needed(gpu))
}

/// The device of a run. On a GPU, first compiles the recipe's kernels, on all cores.
pub fn device_for(choice: DeviceChoice, recipe: &Recipe) -> Result<Device> {
    choice.resolve_and_prepare(|cache, gpu| {
        let arch = gpu.arch();
        // For an unlisted architecture each kernel is compiled at its first use.
        if NeededKernels::shared_bytes_of(&arch).is_none() {
            return Ok(());
        }
        let needed = needed_kernels(Some(recipe), &arch).map_err(anyhow::Error::msg)?;
        if let Err(error) = fill(cache, &arch, &needed) {
            // No error: each kernel is then compiled at its first use.
            terminal::warning(&format!("kernels were not compiled ahead: {error}"));
        }
        Ok(())
    })
}
