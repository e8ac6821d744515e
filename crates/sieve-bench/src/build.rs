//! Machine code put into the kernel cache before the first run.
use crate::error::{BenchError, Result, refused};
use sieve_core::model::AttentionForm;
use sieve_core::{Attention, DmaBias, Recipe};
use sieve_kernels::ahead_of_time::{self, CompiledKernel};
use sieve_kernels::{
    AttentionNeeds, AttentionShape, CudaVersion, KernelCache, KernelError, NeededKernels, NeededKeys, ScoreBias,
    SourceKernel, SumOrder,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

/// What to compile, and for which GPUs.
#[derive(Clone, Debug)]
pub struct BuildSettings {
    /// What this recipe's training and decoding launch; everything that ships when absent.
    pub recipe: Option<Recipe>,
    /// Architectures, as compilers name them; those of this machine's GPUs when empty.
    pub arch: Vec<String>,
    /// Compile with this nvcc instead of the run-time compiler.
    pub nvcc: Option<PathBuf>,
    /// The folder of caches to fill.
    pub root: PathBuf,
}

/// What compiling tells while it runs.
#[derive(Clone, Debug)]
pub enum BuildEvent {
    /// How many kernels are done, and out of how many.
    Progress(usize, usize),
    /// All kernels of an architecture are done; what each uses follows.
    Table,
    /// One kernel's line of the table.
    Kernel(String),
    /// An architecture is done.
    Done(String),
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

/// Puts machine code into kernel caches, one for each architecture. Needs no GPU.
///
/// # Errors
/// An unknown architecture, no compiler, a cache in use, kernels that do not compile.
pub fn build(settings: &BuildSettings, say: &mut dyn FnMut(BuildEvent)) -> Result<()> {
    let architectures = architectures(&settings.arch)?;
    let (compiler, version) = compiler(settings.nvcc.as_deref())?;
    let mut failed = 0;
    for (arch, shared_bytes) in architectures {
        let needed = needed_by(settings.recipe.as_ref(), &arch, shared_bytes)?;
        let cache = KernelCache::open(&settings.root, &arch, version)?;
        if cache.is_private() {
            return refused(format!(
                "the kernel cache {} is in use by another process\n  \
                 hint: wait for it, or name another folder with --out",
                settings.root.display()
            ));
        }
        failed += build_one(&arch, &needed, &compiler, &cache, say)?;
    }
    if failed > 0 {
        return refused(format!("{failed} kernels were not compiled"));
    }
    Ok(())
}

/// Compiles what is missing into a cache that is about to be used, with the run-time compiler of this machine.
///
/// # Errors
/// No compiler, or a kernel that does not compile.
pub fn prefill(cache: &KernelCache, arch: &str, needed: &NeededKernels, say: &mut dyn FnMut(BuildEvent)) -> Result<()> {
    let compiler = Compiler::Nvrtc(ahead_of_time::cuda_folder()?);
    let stored = ahead_of_time::are_stored(cache, &needed.kernels)?;
    let missing = stored.iter().filter(|stored| !**stored).count();
    if missing == 0 {
        return Ok(());
    }
    let started = Instant::now();
    let outcomes = compile_all(arch, &needed.kernels, &stored, &compiler, cache.folder(), say);
    let mut ready = Vec::new();
    for (kernel, outcome) in needed.kernels.iter().zip(outcomes) {
        match outcome {
            Outcome::Compiled(compiled) => ready.push((kernel.clone(), compiled.cubin)),
            Outcome::Failed(error) => return Err(error.into()),
            Outcome::Kept => {}
        }
    }
    ahead_of_time::store(cache, &ready)?;
    say(BuildEvent::Done(format!(
        "{missing} kernels compiled in {:.1} s",
        started.elapsed().as_secs_f64()
    )));
    Ok(())
}

/// Compiles one architecture's kernels into the cache and says what they use; returns how many failed.
fn build_one(
    arch: &str,
    needed: &NeededKernels,
    compiler: &Compiler,
    cache: &KernelCache,
    say: &mut dyn FnMut(BuildEvent),
) -> Result<usize> {
    let started = Instant::now();
    let stored: Vec<bool> = ahead_of_time::are_stored(cache, &needed.kernels)?;
    let outcomes = compile_all(arch, &needed.kernels, &stored, compiler, cache.folder(), say);
    say(BuildEvent::Table);
    let (mut ready, mut kept, mut failed) = (Vec::new(), 0, 0);
    for (kernel, outcome) in needed.kernels.iter().zip(outcomes) {
        match outcome {
            Outcome::Kept => kept += 1,
            Outcome::Compiled(compiled) => {
                say(BuildEvent::Kernel(row(arch, kernel, &compiled)));
                ready.push((kernel.clone(), compiled.cubin));
            }
            Outcome::Failed(error) => {
                failed += 1;
                let line = format!("{arch:7} {:32} FAILED {error}", kernel.name());
                say(BuildEvent::Kernel(line));
            }
        }
    }
    for error in &needed.refused {
        say(BuildEvent::Kernel(format!(
            "{arch:7} none for this architecture: {error}; such calls take the reference path"
        )));
    }
    let compiled = ahead_of_time::store(cache, &ready)?;
    say(BuildEvent::Done(format!(
        "{arch}: {compiled} kernels compiled in {:.1} s, {kept} were there, {failed} failed; in {}",
        started.elapsed().as_secs_f64(),
        cache.folder().display()
    )));
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

/// The head of the table of kernels.
pub fn build_table_head() -> String {
    format!(
        "{:7} {:32} {:>9} {:>15} {:>7} {:>14}  defines",
        "arch", "kernel", "registers", "spills st/ld B", "stack B", "smem dyn+st B"
    )
}

/// Compiles on all cores; outcomes in the order of the kernels.
fn compile_all(
    arch: &str,
    kernels: &[SourceKernel],
    stored: &[bool],
    compiler: &Compiler,
    work_folder: &Path,
    say: &mut dyn FnMut(BuildEvent),
) -> Vec<Outcome> {
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
                        break;
                    };
                    let compiled = match (stored[index], compiler) {
                        (true, _) => Ok(None),
                        (false, Compiler::Nvcc(nvcc)) => {
                            ahead_of_time::compile_with_nvcc(kernel, arch, nvcc, work_folder).map(Some)
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
                    if send.send((index, outcome)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(send);
        for outcome in receive {
            done.push(outcome);
            say(BuildEvent::Progress(done.len(), kernels.len()));
        }
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}

/// Each architecture once, with the shared memory of its blocks.
fn architectures(named: &[String]) -> Result<Vec<(String, usize)>> {
    let mut list = named.to_vec();
    if list.is_empty() {
        let report = sieve_kernels::CudaReport::probe().map_err(BenchError::NothingToBuildFor)?;
        list = report.devices.iter().map(|device| device.arch()).collect();
    }
    list.sort();
    list.dedup();
    list.into_iter()
        .map(|arch| match NeededKernels::shared_bytes_of(&arch) {
            Some(bytes) => Ok((arch, bytes)),
            None => refused(format!(
                "--arch {arch}: the kernels are made for sm_80, sm_86, sm_89 and sm_90a\n  \
                 hint: sm_80 is an A100, sm_86 an RTX 30, sm_89 an RTX 40 or L40S, sm_90a an H100 or H200"
            )),
        })
        .collect()
}

fn compiler(nvcc: Option<&Path>) -> Result<(Compiler, CudaVersion)> {
    if let Some(nvcc) = nvcc {
        let version = ahead_of_time::nvcc_version(nvcc)?;
        return Ok((Compiler::Nvcc(nvcc.to_owned()), version));
    }
    let version = ahead_of_time::installed_nvrtc().map_err(BenchError::NoCompiler)?;
    Ok((Compiler::Nvrtc(ahead_of_time::cuda_folder()?), version))
}

/// What is to be compiled for an architecture with so much shared memory: for a recipe, or everything that ships.
///
/// # Errors
/// A recipe whose kernels cannot be listed.
pub fn needed_by(recipe: Option<&Recipe>, arch: &str, shared_bytes: usize) -> Result<NeededKernels> {
    let Some(recipe) = recipe else {
        return Ok(NeededKernels::shipped_for(arch));
    };
    let mut list = NeededKernels::default();
    list.extend_kernels(NeededKernels::step(arch));
    if let Attention::Mla(mla) = recipe.attention {
        let (head_dim, rope_dim) = (recipe.model.head_dim, mla.qk_rope_head_dim);
        let (rank, norm_dim) = (mla.kv_lora_rank, mla.qk_norm_dim(head_dim));
        list.extend_kernels(NeededKernels::mla_pack(head_dim, rope_dim, norm_dim));
        list.extend_kernels(NeededKernels::mla_decode(rank, rope_dim, norm_dim, shared_bytes));
    }
    for needs in attention_needs(recipe)? {
        list.extend(needs.kernels(arch));
    }
    Ok(list)
}

/// The attention of a recipe: for DMA also that of rows too short to mask anything.
fn attention_needs(recipe: &Recipe) -> Result<Vec<AttentionNeeds>> {
    let model = &recipe.model;
    let mut shape = AttentionShape::new(
        1,
        1,
        [model.num_attention_heads, model.num_key_value_heads],
        [model.head_dim, model.head_dim],
    );
    let order = if recipe.training.deterministic {
        SumOrder::Fixed
    } else {
        SumOrder::Any
    };
    let mut keys = match recipe.attention.form() {
        AttentionForm::Grouped { .. } => vec![NeededKeys::Neighbours],
        AttentionForm::Latent(mla) => {
            shape.head_dim += mla.qk_rope_head_dim;
            vec![NeededKeys::Neighbours]
        }
        AttentionForm::Ranked(dma) => {
            let bias = match dma.bias {
                DmaBias::Exp => ScoreBias::Exp,
                DmaBias::Linear => ScoreBias::Linear,
            };
            vec![NeededKeys::Chosen(bias), NeededKeys::AllBiased]
        }
        AttentionForm::Branches(nsa) => {
            let group = shape.num_heads / shape.num_kv_heads;
            if let Some((got, supported)) = nsa.blocks().cuda_gap(shape.head_dim, group) {
                return refused(format!(
                    "attention.kind \"nsa\" has no CUDA kernels for {got} (they take {supported})"
                ));
            }
            vec![NeededKeys::Blocks, NeededKeys::Neighbours]
        }
    };
    if recipe.dense_layers().contains(&true) {
        keys.push(NeededKeys::Neighbours);
    }
    Ok(keys
        .into_iter()
        .map(|keys| AttentionNeeds { shape, keys, order })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_of_latent_attention_gets_its_own_kernels() {
        let latent = |text: &str, settings: &[&str]| {
            let settings: Vec<String> = settings.iter().map(|x| (*x).to_owned()).collect();
            let recipe = Recipe::load(text, "a recipe", &settings).expect("valid");
            let wanted = needed_by(Some(&recipe), "sm_90a", 227 * 1024).expect("kernels");
            let mut names: Vec<String> = wanted
                .kernels
                .iter()
                .filter(|kernel| kernel.name().starts_with("mla_"))
                .map(|kernel| format!("{} {:?}", kernel.name(), kernel.defines()[0]))
                .collect();
            names.sort();
            names
        };
        let mla = include_str!("../../../recipes/mla_80m.toml");
        let names = latent(mla, &["model.head_dim=64", "attention.kv_lora_rank=96"]);
        assert_eq!(
            names,
            [
                "mla_decode (\"KEY_DIM\", \"160\")",
                "mla_decode_join (\"VALUE_DIM\", \"96\")",
                "mla_pack_backward (\"CONTENT_DIM\", \"64\")",
                "mla_pack_forward (\"CONTENT_DIM\", \"64\")",
            ]
        );
        let dma = include_str!("../../../recipes/dma_80m.toml");
        assert_eq!(latent(dma, &[]), [""; 0]);
    }
}
