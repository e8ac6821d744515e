//! `sieve kernels build`: machine code put into the kernel cache before the first run.
use crate::recipe::RecipeArgs;
use crate::terminal;
use anyhow::{Context, Result, bail};
use clap::Args;
use sieve_core::recipe::AttentionSection;
use sieve_core::{DmaBias, Recipe};
use sieve_kernels::ahead_of_time::{self, CompiledKernel};
use sieve_kernels::{
    AttentionNeeds, AttentionShape, KernelCache, KernelError, NeededKernels, NeededKeys, ScoreBias,
    SourceKernel, SumOrder, needed_kernels, shared_bytes_of, shipped_kernels_for,
};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Arguments of `sieve kernels build`.
#[derive(Args, Debug)]
pub(crate) struct BuildArgs {
    /// What this recipe's training and decoding launch; everything that ships when absent
    #[arg(long, value_name = "FILE")]
    recipe: Option<String>,
    /// Override a key of the recipe, for example training.deterministic=true; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "recipe")]
    overrides: Vec<String>,
    /// sm_80, sm_86, sm_89 or sm_90a; may be repeated. The GPU of this machine when absent
    #[arg(long, value_name = "ARCH")]
    arch: Vec<String>,
    /// Compile with this nvcc
    #[arg(long, value_name = "PATH", conflicts_with = "nvrtc")]
    nvcc: Option<PathBuf>,
    /// Compile with the run-time compiler (the default where it is installed)
    #[arg(long)]
    nvrtc: bool,
    /// The cache to fill, to be copied to another machine's $XDG_CACHE_HOME/sieve; this machine's when absent
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Who turns text into machine code.
enum Compiler {
    Nvcc(PathBuf),
    /// With the toolkit folder that has the headers.
    Nvrtc(PathBuf),
}

/// One kernel's outcome.
enum Outcome {
    Kept,
    Compiled(CompiledKernel),
    Failed(KernelError),
}

/// Runs the command.
pub(crate) fn run(args: &BuildArgs) -> Result<()> {
    let recipe = args.recipe.as_ref().map(|name| {
        let args = RecipeArgs {
            recipe: name.clone(),
            overrides: args.overrides.clone(),
        };
        args.load()
    });
    let recipe = recipe.transpose()?;
    let architectures = architectures(&args.arch)?;
    let (compiler, version) = compiler(args)?;
    let root = match &args.out {
        Some(folder) => folder.clone(),
        None => crate::device::cache_root()?,
    };
    let mut failed = 0;
    for (arch, shared_bytes) in architectures {
        let needed = wanted(recipe.as_ref(), &arch, shared_bytes)?;
        let cache = KernelCache::open(&root, &arch, version)?;
        if cache.is_private() {
            bail!(
                "the kernel cache {} is in use by another process\n  hint: wait for it, or name another folder with --out",
                root.display()
            );
        }
        failed += build(&arch, &needed, &compiler, &cache)?;
    }
    if failed > 0 {
        bail!("{failed} kernels were not compiled");
    }
    Ok(())
}

/// Compiles what is missing into a cache that is about to be used, with the run-time compiler of this machine.
pub(crate) fn prefill(cache: &KernelCache, arch: &str, needed: &NeededKernels) -> Result<()> {
    let compiler = Compiler::Nvrtc(ahead_of_time::cuda_folder()?);
    let stored = ahead_of_time::are_stored(cache, &needed.kernels)?;
    let missing = stored.iter().filter(|stored| !**stored).count();
    if missing == 0 {
        return Ok(());
    }
    let started = Instant::now();
    let outcomes = compile_all(arch, &needed.kernels, &stored, &compiler, cache.folder());
    let mut ready = Vec::new();
    for (kernel, outcome) in needed.kernels.iter().zip(outcomes) {
        match outcome {
            Outcome::Compiled(compiled) => ready.push((kernel.clone(), compiled.cubin)),
            Outcome::Failed(error) => return Err(error.into()),
            Outcome::Kept => {}
        }
    }
    ahead_of_time::store(cache, &ready)?;
    terminal::line(&format!(
        "{missing} kernels compiled in {:.1} s",
        started.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Compiles one architecture's kernels into the cache and prints what they use; returns how many failed.
fn build(
    arch: &str,
    needed: &NeededKernels,
    compiler: &Compiler,
    cache: &KernelCache,
) -> Result<usize> {
    let started = Instant::now();
    let stored: Vec<bool> = ahead_of_time::are_stored(cache, &needed.kernels)?;
    let outcomes = compile_all(arch, &needed.kernels, &stored, compiler, cache.folder());
    terminal::line(&format!(
        "{:7} {:32} {:>9} {:>15} {:>7} {:>14}  defines",
        "arch", "kernel", "registers", "spills st/ld B", "stack B", "smem dyn+st B"
    ));
    let (mut ready, mut kept, mut failed) = (Vec::new(), 0, 0);
    for (kernel, outcome) in needed.kernels.iter().zip(outcomes) {
        match outcome {
            Outcome::Kept => kept += 1,
            Outcome::Compiled(compiled) => {
                terminal::line(&row(arch, kernel, &compiled));
                ready.push((kernel.clone(), compiled.cubin));
            }
            Outcome::Failed(error) => {
                failed += 1;
                terminal::line(&format!("{arch:7} {:32} FAILED {error}", kernel.name()));
            }
        }
    }
    for error in &needed.refused {
        terminal::line(&format!(
            "{arch:7} none for this architecture: {error}; such calls take the reference path"
        ));
    }
    let compiled = ahead_of_time::store(cache, &ready)?;
    terminal::line(&format!(
        "{arch}: {compiled} kernels compiled in {:.1} s, {kept} were there, {failed} failed; in {}",
        started.elapsed().as_secs_f64(),
        cache.folder().display()
    ));
    Ok(failed)
}

fn row(arch: &str, kernel: &SourceKernel, compiled: &CompiledKernel) -> String {
    let defines: Vec<String> = kernel
        .defines()
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
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
        kernel.entry_point(),
        format!("{}+{fixed}", kernel.dynamic_shared_bytes()),
        defines.join(" ")
    )
}

/// Compiles on all cores; outcomes in the order of the kernels.
fn compile_all(
    arch: &str,
    kernels: &[SourceKernel],
    stored: &[bool],
    compiler: &Compiler,
    work_folder: &Path,
) -> Vec<Outcome> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    let bar = terminal::progress_bar(kernels.len() as u64, "{pos}/{len} kernels {wide_bar} {eta}");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(kernels.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(kernel) = kernels.get(index) else {
                        break;
                    };
                    let compiled = match (stored[index], compiler) {
                        (true, _) => Ok(None),
                        (false, Compiler::Nvcc(nvcc)) => {
                            ahead_of_time::compile_with_nvcc(kernel, arch, nvcc, work_folder)
                                .map(Some)
                        }
                        (false, Compiler::Nvrtc(cuda)) => {
                            ahead_of_time::compile_with_nvrtc(kernel, arch, cuda).map(Some)
                        }
                    };
                    let outcome = match compiled {
                        Ok(None) => Outcome::Kept,
                        Ok(Some(compiled)) => Outcome::Compiled(compiled),
                        Err(error) => Outcome::Failed(error),
                    };
                    bar.inc(1);
                    done.lock()
                        .unwrap_or_else(|e| e.into_inner())
                        .push((index, outcome));
                }
            });
        }
    });
    bar.finish_and_clear();
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}

/// Each architecture once, with the shared memory of its blocks.
fn architectures(named: &[String]) -> Result<Vec<(String, usize)>> {
    let mut list = named.to_vec();
    if list.is_empty() {
        let report = sieve_kernels::probe()
            .context("there is no GPU here to build for; name one with --arch")?;
        list = report.devices.iter().map(|device| device.arch()).collect();
    }
    list.sort();
    list.dedup();
    list.into_iter()
        .map(|arch| match shared_bytes_of(&arch) {
            Some(bytes) => Ok((arch, bytes)),
            None => bail!(
                "--arch {arch}: the kernels are made for sm_80, sm_86, sm_89 and sm_90a\n  hint: sm_80 is an A100, sm_86 an RTX 30, sm_89 an RTX 40 or L40S, sm_90a an H100 or H200"
            ),
        })
        .collect()
}

fn compiler(args: &BuildArgs) -> Result<(Compiler, sieve_kernels::CudaVersion)> {
    if let Some(nvcc) = &args.nvcc {
        let version = ahead_of_time::nvcc_version(nvcc)?;
        return Ok((Compiler::Nvcc(nvcc.clone()), version));
    }
    let version = ahead_of_time::installed_nvrtc().context(
        "no compiler: install the CUDA toolkit's run-time compiler, or name an nvcc with --nvcc",
    )?;
    let cuda = ahead_of_time::cuda_folder()?;
    Ok((Compiler::Nvrtc(cuda), version))
}

/// What is to be compiled for an architecture with so much shared memory.
fn wanted(recipe: Option<&Recipe>, arch: &str, shared_bytes: usize) -> Result<NeededKernels> {
    let shipped = shipped_kernels_for(shared_bytes);
    let Some(recipe) = recipe else {
        return Ok(shipped);
    };
    let mut list = NeededKernels::default();
    // What every model launches beside its attention.
    for kernel in shipped.kernels {
        let name = kernel.name();
        let attention = ["attention_", "hopper_", "dma_attention"]
            .iter()
            .any(|start| name.starts_with(start));
        let choice = ["dma_select", "dma_lists", "dma_decode", "dma_scores"]
            .iter()
            .any(|kernel| name == *kernel || name == format!("{kernel}_prefix"));
        if !attention && !choice {
            list.kernels.push(kernel);
        }
    }
    for needs in attention_needs(recipe)? {
        list.extend(needed_kernels(&needs, arch));
    }
    Ok(list.deduplicated()?)
}

/// The attention of a recipe: for DMA also that of rows too short to mask anything.
fn attention_needs(recipe: &Recipe) -> Result<Vec<AttentionNeeds>> {
    let model = &recipe.model;
    let mut shape = AttentionShape {
        batch: 1,
        seq_len: 1,
        num_heads: model.num_attention_heads,
        num_kv_heads: model.num_key_value_heads,
        head_dim: model.head_dim,
        head_dim_v: model.head_dim,
    };
    let order = if recipe.training.deterministic {
        SumOrder::Fixed
    } else {
        SumOrder::Any
    };
    let keys = match recipe.attention {
        AttentionSection::Mha | AttentionSection::Swa { .. } => vec![NeededKeys::Neighbours],
        AttentionSection::Mla(mla) => {
            shape.head_dim += mla.qk_rope_head_dim;
            vec![NeededKeys::Neighbours]
        }
        AttentionSection::Dma(dma) => {
            let bias = match dma.bias {
                DmaBias::Exp => ScoreBias::Exp,
                DmaBias::Linear => ScoreBias::Linear,
            };
            vec![NeededKeys::Chosen(bias), NeededKeys::AllBiased]
        }
        AttentionSection::Nsa(_) => bail!(
            "attention.kind \"nsa\" has no CUDA kernels of its own yet: on a GPU it runs on Burn's operations"
        ),
    };
    Ok(keys
        .into_iter()
        .map(|keys| AttentionNeeds { shape, keys, order })
        .collect())
}
