//! Compiles kernels into the kernel cache before the first run.
use crate::error::{BenchError, Result, refused};
use sieve_core::kinds::{KeyReads, LatentSizes};
use sieve_core::{Attention, Recipe, ShownPath};
use sieve_kernels::ahead_of_time::{CompiledKernel, compile_with_nvrtc, installed_nvrtc};
use sieve_kernels::{
    AttentionNeeds, AttentionShape, Cubins, KernelError, NeededKernels, NeededKeys, SourceKernel, StepSizes, SumOrder,
};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

/// What to compile, and for which GPUs.
#[derive(Clone, Debug)]
pub struct BuildSettings {
    /// The recipe whose training and decoding kernels are compiled; all kernels that ship when absent.
    pub recipe: Option<Recipe>,
    /// Architectures such as `sm_90a`; those of this machine's GPUs when empty.
    pub arch: Vec<String>,
    /// Folder that gets one cache of cubins for each architecture.
    pub root: PathBuf,
}

/// What is reported while kernels are compiled.
#[derive(Clone, Debug)]
pub enum BuildEvent {
    /// How many kernels are done, and out of how many.
    Progress(usize, usize),
    /// All kernels of an architecture are done; the table of the resources that each uses follows.
    Table,
    /// A kernel was compiled: its line of the table.
    Kernel(String),
    /// The last event of an architecture: a line that says how many kernels were compiled, and in how many seconds.
    Done(String),
}

/// What became of one kernel: found in the cache, compiled, or failed.
enum Outcome {
    Kept,
    Compiled(CompiledKernel),
    Failed(KernelError),
}

/// Puts machine code into kernel caches, one for each architecture. Needs no GPU.
///
/// # Errors
/// An unknown architecture, no compiler, a folder that cannot be written, kernels that do not compile.
pub fn build(settings: &BuildSettings, say: &mut dyn FnMut(BuildEvent)) -> Result<()> {
    let architectures = architectures(&settings.arch)?;
    let version = installed_nvrtc().map_err(BenchError::NoCompiler)?;
    let mut failed = 0;
    for arch in architectures {
        let needed = needed_by(settings.recipe.as_ref(), &arch)?;
        let cubins = Cubins::below(&settings.root, &arch, version);
        failed += build_one(&arch, &needed, &cubins, say)?;
    }
    if failed > 0 {
        return refused(format!("{failed} kernels were not compiled"));
    }
    Ok(())
}

/// Compiles what is missing into a cache that is about to be used, on all cores.
///
/// # Errors
/// No compiler, a folder that cannot be written, or a kernel that does not compile.
pub fn prefill(cubins: &Cubins, arch: &str, needed: &NeededKernels, say: &mut dyn FnMut(BuildEvent)) -> Result<()> {
    let keys = keys_of(&needed.kernels)?;
    let missing = keys.iter().filter(|key| !cubins.has(**key)).count();
    if missing == 0 {
        return Ok(());
    }
    let started = Instant::now();
    for outcome in compile_all(arch, &needed.kernels, &keys, cubins, say) {
        if let Outcome::Failed(error) = outcome {
            return Err(error.into());
        }
    }
    say(BuildEvent::Done(format!("{missing} kernels compiled in {:.1} s", started.elapsed().as_secs_f64())));
    Ok(())
}

fn keys_of(kernels: &[SourceKernel]) -> Result<Vec<u128>> {
    Ok(kernels.iter().map(SourceKernel::code_key).collect::<Result<_, _>>()?)
}

/// Compiles one architecture's kernels into the cache and says what they use; returns how many failed.
fn build_one(arch: &str, needed: &NeededKernels, cubins: &Cubins, say: &mut dyn FnMut(BuildEvent)) -> Result<usize> {
    let started = Instant::now();
    let keys = keys_of(&needed.kernels)?;
    let outcomes = compile_all(arch, &needed.kernels, &keys, cubins, say);
    say(BuildEvent::Table);
    let (mut compiled, mut kept, mut failed) = (0, 0, 0);
    for (kernel, outcome) in needed.kernels.iter().zip(outcomes) {
        match outcome {
            Outcome::Kept => kept += 1,
            Outcome::Compiled(machine_code) => {
                compiled += 1;
                say(BuildEvent::Kernel(row(arch, kernel, &machine_code)));
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
    say(BuildEvent::Done(format!(
        "{arch}: {compiled} kernels compiled in {:.1} s, {kept} were there, {failed} failed; in {}",
        started.elapsed().as_secs_f64(),
        cubins.folder().shown()
    )));
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
pub fn build_table_head() -> String {
    format!(
        "{:7} {:32} {:>9} {:>15} {:>7} {:>14}  defines",
        "arch", "kernel", "registers", "spills st/ld B", "stack B", "smem dyn+st B"
    )
}

/// Compiles the kernels that the cache lacks, on all cores; returns the outcomes in the order of `kernels`.
fn compile_all(
    arch: &str,
    kernels: &[SourceKernel],
    keys: &[u128],
    cubins: &Cubins,
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
                        // Another thread has taken the last kernel.
                        break;
                    };
                    let outcome = match cubins.has(keys[index]) {
                        true => Outcome::Kept,
                        false => compile_into(kernel, keys[index], arch, cubins)
                            .map_or_else(Outcome::Failed, Outcome::Compiled),
                    };
                    // The receiver is gone where the caller panicked.
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

fn compile_into(kernel: &SourceKernel, key: u128, arch: &str, cubins: &Cubins) -> Result<CompiledKernel, KernelError> {
    let compiled = compile_with_nvrtc(kernel, arch)?;
    cubins.write(key, &compiled.cubin)?;
    Ok(compiled)
}

/// The named architectures (this machine's if none is named), each once.
fn architectures(named: &[String]) -> Result<Vec<String>> {
    let mut list = named.to_vec();
    if list.is_empty() {
        let report = sieve_kernels::CudaReport::probe().map_err(BenchError::NothingToBuildFor)?;
        list = report.devices.iter().map(|device| device.arch()).collect();
    }
    list.sort();
    list.dedup();
    list.into_iter()
        .map(|arch| match NeededKernels::shared_bytes_of(&arch) {
            Some(_) => Ok(arch),
            None => refused(format!(
                "--arch {arch}: the kernels are made for sm_80, sm_86, sm_89, sm_90a, sm_100a and sm_120a\n  \
                 hint: sm_80 is an A100, sm_86 an RTX 30, sm_89 an RTX 40 or L40S, sm_90a an H100 or H200, sm_100a a \
                 B200, sm_120a an RTX 50"
            )),
        })
        .collect()
}

/// The kernels that a recipe's model launches on an architecture; without a recipe, all kernels that ship.
///
/// # Errors
/// A recipe whose kernels cannot be listed.
pub fn needed_by(recipe: Option<&Recipe>, arch: &str) -> Result<NeededKernels> {
    let Some(recipe) = recipe else {
        return Ok(NeededKernels::shipped_for(arch));
    };
    let model = &recipe.model;
    let kind = recipe.attention.own.as_kind();
    let mut list = NeededKernels::step(
        arch,
        StepSizes {
            d_model: model.hidden_size,
            d_ff: model.intermediate_size,
            rotated_head_dim: (!kind.is_latent()).then_some(model.head_dim),
        },
    );
    if let Some(LatentSizes { rank, rope_width, has_norm }) = kind.latent(model.head_dim) {
        let widths = [model.head_dim, rope_width];
        list.extend(NeededKernels::mla_pack(arch, widths, has_norm));
        list.extend(NeededKernels::mla_decode(arch, rank, widths, has_norm));
    }
    let (kv_heads, head_dim) = (model.num_key_value_heads, model.head_dim);
    if let Some(slopes) = kind.rank_slopes(kv_heads) {
        let slopes: Vec<f32> = slopes.into_iter().map(|slope| slope as f32).collect();
        list.extend(NeededKernels::dma_ranks(arch, head_dim, &slopes));
    }
    for needs in attention_needs(recipe)? {
        list.extend(needs.kernels(arch));
    }
    Ok(list)
}

/// The attention kernels of a recipe's layers, without regard to batch and row length.
fn attention_needs(recipe: &Recipe) -> Result<Vec<AttentionNeeds>> {
    let layers = recipe.layer_pattern();
    let mut kinds = vec![recipe.attention.own];
    for other in layers.types().iter().filter_map(|of| of.other) {
        if !kinds.contains(&other) {
            kinds.push(other);
        }
    }
    let needs = kinds.into_iter().map(|attention| kind_needs(recipe, attention));
    Ok(needs.collect::<Result<Vec<_>>>()?.concat())
}

/// The kernels of layers of one kind. DMA also needs dense kernels with a bias: rows no longer than its window mask
/// nothing.
fn kind_needs(recipe: &Recipe, attention: Attention) -> Result<Vec<AttentionNeeds>> {
    let model = &recipe.model;
    let heads = [model.num_attention_heads, model.num_key_value_heads];
    let mut shape = AttentionShape::new(1, 1, heads, [model.head_dim; 2]);
    let order = if recipe.training.deterministic { SumOrder::Fixed } else { SumOrder::Any };
    let kind = attention.as_kind();
    if let Some((got, supported)) = kind.block_gap(shape.head_dim, shape.num_heads / shape.num_kv_heads) {
        let kind = attention.kind().name();
        return refused(format!("attention.kind {kind:?} has no CUDA kernels for {got} (they take {supported})"));
    }
    shape.num_kv_heads = kind.attended_kv_heads(heads);
    shape.head_dim += kind.rope_width();
    let mut keys = Vec::new();
    for reads in kind.reads() {
        match reads {
            KeyReads::Neighbours => keys.push(NeededKeys::Neighbours),
            KeyReads::Blocks => keys.push(NeededKeys::Blocks),
            KeyReads::Listed(bias) => keys.extend([NeededKeys::Chosen((*bias).into()), NeededKeys::AllBiased]),
        }
    }
    // An indexer's queries read all keys in the first `training.dense_steps` steps.
    if kind.has_indexer() {
        keys.push(NeededKeys::Neighbours);
    }
    let has_sinks = model.attention_sinks;
    Ok(keys.into_iter().map(|keys| AttentionNeeds { shape, keys, order, has_sinks }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A refused call of a launch wrapper would run as its reference.
    #[test]
    fn the_models_of_all_recipes_have_kernels_on_all_architectures() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
        let (mut num_recipes, mut narrow) = (0, 0);
        for file in std::fs::read_dir(folder).expect("the folder of recipes") {
            let file = file.expect("a recipe").path();
            let text = std::fs::read_to_string(&file).expect("text");
            let recipe = Recipe::load(&text, "a recipe", &[]).expect("valid");
            num_recipes += 1;
            for arch in ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"] {
                match needed_by(Some(&recipe), arch) {
                    Ok(needed) => assert_eq!(needed.refused, [], "{file:?} {arch}"),
                    // The recipes for two CPU cores have heads of 32, and kernels choose blocks for wider heads alone.
                    Err(error) => {
                        assert!(error.to_string().contains("heads of 32"), "{file:?} {arch}: {error}");
                        narrow += 1;
                    }
                }
            }
        }
        assert!(num_recipes > 50 && narrow < 6 * num_recipes / 4, "{num_recipes} {narrow}");
    }

    #[test]
    fn a_recipe_of_latent_attention_gets_its_own_kernels() {
        let latent = |text: &str, settings: &[&str]| {
            let settings: Vec<String> = settings.iter().map(|x| (*x).to_owned()).collect();
            let recipe = Recipe::load(text, "a recipe", &settings).expect("valid");
            let wanted = needed_by(Some(&recipe), "sm_90a").expect("kernels");
            let mut names: Vec<String> = wanted
                .kernels
                .iter()
                .filter(|kernel| kernel.name().starts_with("mla_"))
                .map(|kernel| match kernel.defines() {
                    [] => kernel.name().to_owned(),
                    [first, ..] => format!("{} {first:?}", kernel.name()),
                })
                .collect();
            names.sort();
            names
        };
        let mla = include_str!("../../../../recipes/mla_80m.toml");
        let names = latent(mla, &["model.head_dim=64", "attention.kv_lora_rank=96"]);
        assert_eq!(
            names,
            [
                "mla_decode (\"KEY_DIM\", \"160\")",
                "mla_decode (\"KEY_DIM\", \"160\")",
                "mla_decode_join (\"VALUE_DIM\", \"96\")",
                "mla_join_token (\"HEAD_DIM\", \"64\")",
                "mla_pack_backward (\"CONTENT_DIM\", \"64\")",
                "mla_pack_forward (\"CONTENT_DIM\", \"64\")",
                "mla_values",
            ]
        );
        let dma = include_str!("../../../../recipes/dma_80m.toml");
        assert_eq!(latent(dma, &[]), [""; 0]);
    }
}
