//! `sieve info`: the program's version and the machine's devices and libraries.
use crate::shipped;
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use sieve_core::ModelShape;
use sieve_core::ShownPath;
use sieve_core::kinds::KeyReads;
use sieve_core::recipe::{AttentionKind, StartingSize};
use sieve_host::device::{cache_root, num_threads};
use sieve_host::terminal;
use sieve_kernels::step::require_fp8;
use sieve_kernels::{AttentionShape, Cublaslt, CudaReport, KernelFamily, KeySource, LaunchCounts, NcclGroup};
use sieve_plan::gpu_attention_gap;
use sieve_train::MemoryProbe;
use std::path::Path;

/// Commit that the program was built from, by build.rs.
pub(crate) const COMMIT: &str = env!("SIEVE_COMMIT");
/// Head widths for which the paths of ops are listed.
const WIDTHS: [usize; 7] = [16, 32, 64, 96, 128, 192, 256];

/// Arguments of `sieve info`.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct InfoArgs {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What `sieve info` prints.
#[derive(Serialize)]
struct Info {
    version: &'static str,
    commit: &'static str,
    target: String,
    threads: usize,
    memory_bytes: u64,
    free_memory_bytes: u64,
    /// Why no GPU is used; absent where one is.
    no_gpu: Option<String>,
    driver: Option<String>,
    nvrtc: Option<String>,
    cuda_headers: Option<String>,
    cublaslt: Option<String>,
    nccl: Option<String>,
    gpus: Vec<Gpu>,
    kernel_cache: String,
    /// (name, bytes) of the kernel cache's folders: one for each architecture and compiler version.
    compiled: Vec<(String, u64)>,
    num_recipes: usize,
    /// The head widths for which `paths` lists ops.
    widths: [usize; WIDTHS.len()],
    /// Each kind of attention with its path (kernel family, "reference" or "cpu") for each of `widths`.
    paths: Vec<(&'static str, Vec<&'static str>)>,
}

#[derive(Serialize)]
struct Gpu {
    name: String,
    arch: String,
    memory_bytes: u64,
    /// Whether the GPU can train with `training.precision = "fp8"`.
    trains_in_fp8: bool,
    /// Whether launches of Sieve's kernels go straight to Burn's stream; the reason where that could not be tried.
    launches_inline: std::result::Result<bool, String>,
}

/// Runs `sieve info`: prints the devices, libraries and versions that this program finds.
pub(crate) fn run(args: InfoArgs) -> Result<()> {
    let info = Info::new();
    terminal::line(&if args.json { serde_json::to_string_pretty(&info)? } else { info.text() });
    Ok(())
}

impl Info {
    /// Looks at this machine; where CUDA cannot be used, `no_gpu` says why.
    fn new() -> Self {
        let report = CudaReport::probe();
        let (no_gpu, report) = match report {
            Ok(report) => (None, Some(report)),
            Err(error) => (Some(error.to_string().replace("\n  ", "; ")), None),
        };
        let gpus = report.iter().flat_map(|report| &report.devices);
        let gpus = gpus.map(|gpu| Gpu {
            name: gpu.name.clone(),
            arch: gpu.arch(),
            memory_bytes: gpu.total_memory_bytes,
            trains_in_fp8: require_fp8((gpu.major, gpu.minor)).is_ok(),
            launches_inline: LaunchCounts::probe(gpu.index).map_err(|error| error.to_string()),
        });
        let is_hopper = report.as_ref().and_then(|report| report.devices.first());
        let is_hopper = is_hopper.map(|gpu| (gpu.major, gpu.minor) == (9, 0));
        let (_, memory_bytes) = MemoryProbe::Process.read();
        let cache = cache_root();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: COMMIT,
            target: format!("{} {}", std::env::consts::ARCH, std::env::consts::OS),
            threads: num_threads(),
            memory_bytes,
            free_memory_bytes: MemoryProbe::Process.available(),
            no_gpu,
            driver: report.as_ref().map(|report| report.driver.to_string()),
            nvrtc: report.as_ref().map(|report| report.nvrtc.to_string()),
            cuda_headers: report.as_ref().map(|report| report.include_folder.to_string_lossy().into_owned()),
            cublaslt: Cublaslt::version(),
            nccl: NcclGroup::version(),
            gpus: gpus.collect(),
            compiled: cache.as_deref().map_or(Vec::new(), folders),
            kernel_cache: match cache {
                Ok(path) => path.to_string_lossy().into_owned(),
                Err(error) => error.to_string(),
            },
            num_recipes: shipped::recipe_names().count(),
            widths: WIDTHS,
            paths: paths(is_hopper),
        }
    }

    /// The printed lines: program, machine, GPUs, libraries, kernel cache, and the path of each kind of attention.
    fn text(&self) -> String {
        let found = |version: &Option<String>| version.clone().unwrap_or("not found".to_owned());
        let mut lines = vec![
            format!("sieve       {} (commit {}, {})", self.version, self.commit, self.target),
            format!(
                "CPU         {}, {} of memory, {} free",
                terminal::counted(self.threads as u64, "thread"),
                terminal::gib(self.memory_bytes),
                terminal::gib(self.free_memory_bytes)
            ),
        ];
        if let Some(reason) = &self.no_gpu {
            lines.push(format!("GPU         none is used: {reason}"));
        }
        for (index, gpu) in self.gpus.iter().enumerate() {
            let memory = terminal::gib(gpu.memory_bytes);
            let fp8 = if gpu.trains_in_fp8 { "trains in fp8" } else { "no fp8" };
            lines.push(format!("cuda:{index:<6} {}, {}, {memory}, {fp8}", gpu.name, gpu.arch));
        }
        if self.no_gpu.is_none() {
            lines.push(format!("driver      CUDA {}", found(&self.driver)));
            let headers = found(&self.cuda_headers);
            lines.push(format!("NVRTC       {}, headers in {headers}", found(&self.nvrtc)));
        }
        for gpu in &self.gpus {
            lines.push(match &gpu.launches_inline {
                Ok(true) => "launches    on Burn's own stream".to_owned(),
                Ok(false) => "launches    on a stream of their own between two events, because Burn's was not found: \
                    some 20 microseconds slower each"
                    .to_owned(),
                Err(error) => format!("launches    not tried: {error}"),
            });
        }
        lines.push(format!("cuBLASLt    {}", found(&self.cublaslt)));
        lines.push(format!("NCCL        {}", found(&self.nccl)));
        let compiled = self.compiled.iter();
        let compiled = compiled.map(|(name, size)| format!("{name} {}", terminal::bytes(*size)));
        let compiled = if self.compiled.is_empty() {
            "nothing compiled yet".to_owned()
        } else {
            compiled.collect::<Vec<_>>().join(", ")
        };
        lines.push(format!("kernels     {}: {compiled}", self.kernel_cache));
        lines.push(format!("recipes     {} inside the program", self.num_recipes));
        let place = match self.gpus.first() {
            Some(gpu) => format!("on cuda:0, {}", gpu.name),
            None => "on the CPU".to_owned(),
        };
        lines.push(format!("\nattention by kind and head width, {place}"));
        let head = self.widths.map(|width| format!("{width:>10}"));
        lines.push(format!("{:<9}{}", "", head.concat()));
        for (kind, paths) in &self.paths {
            let cells = paths.iter().map(|path| format!("{path:>10}"));
            lines.push(format!("{kind:<9}{}", cells.collect::<String>()));
        }
        lines.push(if self.gpus.is_empty() {
            "cpu: own kernels in f32, any even width".to_owned()
        } else {
            "hopper, portable: kernels in bf16; reference: n x n scores, so --device auto takes the \
            CPU"
            .to_owned()
        });
        lines.join("\n")
    }
}

/// [`Info::paths`]. `is_hopper` is `None` on the CPU.
fn paths(is_hopper: Option<bool>) -> Vec<(&'static str, Vec<&'static str>)> {
    let kinds = AttentionKind::ALL.into_iter();
    kinds
        .filter_map(|kind| {
            // Any size serves: only kind and head width decide the path.
            let recipe = StartingSize::ALL[0].recipe(kind, &["text".to_owned()], &[]).ok()?;
            let shape = recipe.model_shape(1024).ok()?;
            let path = |width| match is_hopper {
                None => "cpu",
                Some(is_hopper) => gpu_path(&of_width(&shape, width), is_hopper),
            };
            Some((kind.name(), WIDTHS.into_iter().map(path).collect()))
        })
        .collect()
}

/// `shape` with heads of another width.
fn of_width(shape: &ModelShape, width: usize) -> ModelShape {
    ModelShape { head_dim: width, attention: shape.attention.with_head_width(width), ..shape.clone() }
}

/// The kernel family of a model's attention on a GPU, or "reference".
fn gpu_path(shape: &ModelShape, is_hopper: bool) -> &'static str {
    if gpu_attention_gap(shape).is_some() {
        return "reference";
    }
    let source = match shape.attention.as_kind().reads() {
        [KeyReads::Neighbours, ..] => KeySource::Dense,
        [KeyReads::Bands, ..] => KeySource::Bands,
        _ => KeySource::Gathered,
    };
    let call = AttentionShape {
        batch: 1,
        seq_len: shape.max_seq_len,
        num_heads: shape.num_heads,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.key_width(),
        head_dim_v: shape.head_dim,
    };
    match KernelFamily::best(&call, source, is_hopper) {
        KernelFamily::Hopper => "hopper",
        KernelFamily::Portable => "portable",
    }
}

/// The names of the folders in `folder`, with the bytes of their files.
fn folders(folder: &Path) -> Vec<(String, u64)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.path().is_dir());
    let mut folders = folders
        .map(|entry| (Path::new(&entry.file_name()).shown().to_string(), num_bytes(&entry.path())))
        .collect::<Vec<_>>();
    folders.sort();
    folders
}

/// Bytes of all files at and below a folder.
fn num_bytes(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => num_bytes(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_path_for_each_width() {
        for (is_hopper, at_128) in [(None, "cpu"), (Some(false), "portable"), (Some(true), "hopper")] {
            let paths = paths(is_hopper);
            assert_eq!(paths.len(), AttentionKind::ALL.len());
            for (kind, paths) in paths {
                assert_eq!(paths[4], at_128, "{kind}, {is_hopper:?}");
            }
        }
        let portable = paths(Some(true));
        let of = |kind: &str| &portable.iter().find(|(name, _)| *name == kind).expect("there").1;
        assert_eq!(of("nsa")[1], "reference");
        assert_eq!(of("dma")[3], "portable");
    }
}
