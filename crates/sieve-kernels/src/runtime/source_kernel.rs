//! A kernel given as CUDA C++ text, launched on Burn's own stream.
//!
//! CubeCL 0.10 lets a `CubeTask` hand its compiler any text; NVRTC compiles it for the device at hand, and the launch
//! is queued with Burn's own, in order, without synchronisation. This is the one module that knows how.
use crate::error::KernelError;
use crate::runtime::cuda_tensor::CudaTensor;
use crate::runtime::params::{Params, words_for};
use crate::runtime::recording::{BufferView, Hardware, Launch, MapData, RecordedTensor, Step};
use crate::runtime::source::{KernelText, assemble_file, assemble_text};
use cubecl::ir::{ElemType, FloatKind, StorageType, UIntKind};
use cubecl::prelude::{CubeCount, CubeDim};
use cubecl::zspace::metadata::Metadata;
use cubecl_runtime::compiler::{CompilationError, Compiler, CubeTask};
use cubecl_runtime::id::KernelId;
use cubecl_runtime::kernel::{CompiledKernel, KernelMetadata};
use cubecl_runtime::server::{
    ExecutionMode, KernelArguments, LaunchError, MetadataBindingInfo, ServerError, TensorMapBinding, TensorMapMeta,
};
use cubecl_runtime::tma::{
    OobFill, TensorMapFormat, TensorMapInterleave, TensorMapPrefetch, TensorMapSwizzle, TiledArgs,
};
use serde::Serialize;
use sieve_cuda::launch::{CudaCompiler, sizes_of_launch};
use std::collections::HashSet;
use std::fmt::{Display, Write};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use xxhash_rust::xxh3::Xxh3;

/// The words of one params struct are few; more would mean a kernel that takes a table by value.
const MAX_PARAM_WORDS: usize = 60;

/// A bf16 tensor `[batch, rows, width]` that the copy engine (TMA) reads in tiles of `tile` rows and columns, swizzled
/// in lines of 128 bytes; what lies outside arrives as zeros.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TileMap<'a> {
    /// The tensor.
    pub(crate) tensor: &'a CudaTensor,
    /// Its first element that the map sees; a multiple of 8.
    pub(crate) offset: usize,
    /// `[batch, rows, width]`.
    pub(crate) shape: [usize; 3],
    /// Elements from batch row to batch row and from row to row, multiples of 8; columns are neighbours.
    pub(crate) strides: [usize; 2],
    /// Rows and columns of a tile.
    pub(crate) tile: [usize; 2],
}

impl TileMap<'_> {
    /// The map as data; `None` of a tensor in GPU memory.
    fn data(&self) -> Option<MapData> {
        let mut at = self.tensor.recorded_at()?;
        at.offset_bytes += self.offset * self.tensor.dtype().size();
        Some(MapData {
            at,
            shape: self.shape,
            strides: self.strides,
            tile: self.tile,
        })
    }

    fn binding(&self) -> TensorMapBinding {
        let [batch_stride, row_stride] = self.strides;
        let handle = self.tensor.primitive().handle.clone();
        let bytes = self.offset * self.tensor.dtype().size();
        TensorMapBinding {
            binding: handle.offset_start(bytes as u64).binding(),
            map: TensorMapMeta {
                format: TensorMapFormat::Tiled(TiledArgs {
                    tile_size: [1, self.tile[0], self.tile[1]].into(),
                }),
                metadata: Metadata::new(self.shape, [batch_stride, row_stride, 1]),
                elem_stride: [1usize, 1, 1].into(),
                interleave: TensorMapInterleave::None,
                swizzle: TensorMapSwizzle::B128,
                prefetch: TensorMapPrefetch::B256,
                oob_fill: OobFill::Zero,
                storage_ty: StorageType::Scalar(ElemType::Float(FloatKind::BF16)),
            },
        }
    }
}

/// One specialisation of one kernel: file, entry point, defines, block and shared memory.
///
/// ```no_run
/// # use sieve_kernels::SourceKernel;
/// let kernel = SourceKernel::new("swiglu_forward").define("IS_BF16", 1).threads(256);
/// ```
#[derive(Debug, Clone, Serialize)]
pub struct SourceKernel {
    #[serde(rename = "file", serialize_with = "file_name")]
    name: &'static str,
    entry: &'static str,
    #[serde(skip)]
    text: Option<Arc<str>>,
    defines: Vec<(&'static str, String)>,
    threads: u32,
    shared_bytes: usize,
}

impl SourceKernel {
    /// The kernel in `kernels/<name>.cu`, whose entry point has the same name.
    pub const fn new(name: &'static str) -> Self {
        Self {
            name,
            entry: name,
            text: None,
            defines: Vec::new(),
            threads: 128,
            shared_bytes: 0,
        }
    }

    /// A kernel given as text; includes still come from the built-in files. For tests and experiments.
    pub fn from_text(name: &'static str, text: impl Into<Arc<str>>) -> Self {
        Self {
            text: Some(text.into()),
            ..Self::new(name)
        }
    }

    /// Another entry point of the same file.
    pub fn entry(mut self, entry: &'static str) -> Self {
        self.entry = entry;
        self
    }

    /// Adds `#define name value` before the text.
    pub fn define(mut self, name: &'static str, value: impl Display) -> Self {
        self.defines.push((name, value.to_string()));
        self
    }

    /// Threads of a block, along x.
    pub const fn threads(mut self, threads: usize) -> Self {
        self.threads = threads as u32;
        self
    }

    /// Dynamic shared memory of a block, in bytes.
    pub fn shared_bytes(mut self, bytes: usize) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// Name of the kernel, as errors give it.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Entry point of the compiled module.
    pub fn entry_point(&self) -> &'static str {
        self.entry
    }

    /// The defines, in order.
    pub fn defines(&self) -> &[(&'static str, String)] {
        &self.defines
    }

    /// Dynamic shared memory of a block, in bytes.
    pub fn dynamic_shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// Threads of a block.
    pub fn block_threads(&self) -> usize {
        self.threads as usize
    }

    /// Whether both are one entry point with the same defines; threads and shared memory belong to the launch.
    pub(crate) fn is_same_code(&self, other: &Self) -> bool {
        let code = |kernel: &Self| (kernel.name, kernel.entry);
        code(self) == code(other) && self.text == other.text && self.defines == other.defines
    }

    /// The complete text that is compiled.
    ///
    /// # Errors
    /// An unknown file, or an include that cannot be resolved.
    pub fn text(&self) -> Result<Arc<KernelText>, KernelError> {
        match &self.text {
            None => assemble_file(&format!("{}.cu", self.name), &self.defines),
            Some(text) => assemble_text(&format!("{}.cu", self.name), text, &self.defines).map(Arc::new),
        }
    }

    /// The key under which CubeCL's cache files keep this kernel, as a launch computes it.
    ///
    /// # Errors
    /// As [`text`](Self::text).
    pub fn cache_key(&self) -> Result<u128, KernelError> {
        let mut id = self.prepare()?.id();
        id.mode(ExecutionMode::Unchecked);
        Ok(id.stable_hash())
    }

    /// Queues the kernel on the stream of the first tensor: `tensors` are its pointer arguments in the order of the
    /// entry point. Returns before the GPU has run it.
    ///
    /// On tensors of a [`Recorder`](crate::Recorder) the launch is written down instead.
    ///
    /// The first launch of each specialisation waits for its compilation, so that a compile error is this call's error.
    ///
    /// # Errors
    /// [`KernelError::Compile`], [`KernelError::Launch`], [`KernelError::DeviceLimit`].
    ///
    /// # Safety
    /// The kernel must stay inside the given tensors for these params, grid and block, and must end.
    pub(crate) unsafe fn launch(
        &self,
        grid: [usize; 3],
        tensors: &[&CudaTensor],
        params: &impl Params,
    ) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with_maps(grid, &[], tensors, params) }
    }

    /// As [`launch`](Self::launch), with tensor maps by value before the pointers.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    ///
    /// # Safety
    /// As [`launch`](Self::launch); the tensors behind the maps are among `tensors`, which is what orders the launch
    /// after their writers.
    pub(crate) unsafe fn launch_with_maps(
        &self,
        grid: [usize; 3],
        maps: &[TileMap<'_>],
        tensors: &[&CudaTensor],
        params: &impl Params,
    ) -> Result<(), KernelError> {
        let words = words_for(self.entry, params)?;
        // SAFETY: the caller's promise.
        unsafe { self.launch_words(grid, maps, tensors, &words) }
    }

    /// As `launch`, of a kernel [given as text](Self::from_text): `words` are its params struct.
    ///
    /// # Errors
    /// As `launch`.
    ///
    /// # Safety
    /// As `launch`.
    pub unsafe fn launch_text(
        &self,
        grid: [usize; 3],
        tensors: &[&CudaTensor],
        words: &[u64],
    ) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_words(grid, &[], tensors, words) }
    }

    unsafe fn launch_words(
        &self,
        grid: [usize; 3],
        maps: &[TileMap<'_>],
        tensors: &[&CudaTensor],
        words: &[u64],
    ) -> Result<(), KernelError> {
        let [first, ..] = tensors else {
            return Err(KernelError::Empty {
                kernel: self.name,
                what: "the list of tensors",
            });
        };
        self.check_limits(grid, words.len(), &first.hardware())?;
        if let Some(tensor) = first.recorded() {
            return self.record(tensor, grid, maps, tensors, words);
        }
        let client = first.client();
        let task = self.prepare()?;
        let first_of_its_kind = first_launch(first.device().index, task.hash);
        let arguments = KernelArguments {
            buffers: tensors.iter().map(|t| t.primitive().handle.clone().binding()).collect(),
            // The whole struct stays in constant memory: CubeCL copies words past this offset to a buffer.
            info: MetadataBindingInfo {
                dynamic_metadata_offset: words.len(),
                data: words.to_vec(),
            },
            tensor_maps: maps.iter().map(TileMap::binding).collect(),
        };
        let [x, y, z] = grid.map(|n| n as u32);
        // SAFETY: the caller vouches for the kernel; the checks above keep the launch within the device's limits.
        unsafe { client.launch_unchecked(Box::new(task), CubeCount::Static(x, y, z), arguments) };
        if first_of_its_kind {
            // A flush waits for the compiler, not for the GPU, and is the only way to learn of a refused source.
            if let Err(error) = client.flush() {
                forget_launch(first.device().index, self.prepare()?.hash);
                return Err(launch_error(self.name, &error));
            }
        }
        Ok(())
    }

    fn record(
        &self,
        first: &RecordedTensor,
        grid: [usize; 3],
        maps: &[TileMap<'_>],
        tensors: &[&CudaTensor],
        words: &[u64],
    ) -> Result<(), KernelError> {
        let places: Option<Vec<BufferView>> = tensors.iter().map(|t| t.recorded_at()).collect();
        let mapped: Option<Vec<MapData>> = maps.iter().map(TileMap::data).collect();
        let (Some(tensors), Some(maps)) = (places, mapped) else {
            return Err(KernelError::Launch {
                kernel: self.name,
                reason: "recorded tensors and tensors on a GPU in one call".to_owned(),
            });
        };
        first.recorder.push(Step::Launch(Launch {
            kernel: self.clone(),
            grid,
            maps,
            tensors,
            words: words.to_vec(),
        }));
        Ok(())
    }

    fn check_limits(&self, grid: [usize; 3], words: usize, device: &Hardware) -> Result<(), KernelError> {
        let threads = self.threads as usize;
        let checks = [
            ("grid size x", grid[0], device.max_grid[0]),
            ("grid size y", grid[1], device.max_grid[1]),
            ("grid size z", grid[2], device.max_grid[2]),
            ("threads of a block", threads, device.max_threads),
            ("shared memory in bytes", self.shared_bytes, device.max_shared_bytes),
            ("number of parameter words", words, MAX_PARAM_WORDS),
        ];
        for (what, got, limit) in checks {
            if got > limit {
                return Err(KernelError::DeviceLimit {
                    kernel: self.name,
                    what,
                    got,
                    limit,
                });
            }
        }
        if grid.contains(&0) {
            return Err(KernelError::Empty {
                kernel: self.name,
                what: "the grid",
            });
        }
        Ok(())
    }

    /// The kernel as CubeCL's server takes it; for a launch that does not go through a client.
    ///
    /// # Errors
    /// As [`text`](Self::text).
    pub(crate) fn prepare(&self) -> Result<PreparedKernel, KernelError> {
        let text = self.text()?;
        let mut hasher = Xxh3::new();
        hasher.update(&text.hash.to_le_bytes());
        hasher.update(self.entry.as_bytes());
        hasher.update(&self.threads.to_le_bytes());
        hasher.update(&self.shared_bytes.to_le_bytes());
        let (entry, threads, shared_bytes) = (self.entry, self.threads, self.shared_bytes);
        Ok(PreparedKernel {
            entry,
            text,
            hash: hasher.digest128(),
            threads,
            shared_bytes,
        })
    }
}

fn file_name<S: serde::Serializer>(name: &&'static str, out: S) -> Result<S::Ok, S::Error> {
    out.collect_str(&format_args!("{name}.cu"))
}

/// What CubeCL is given.
#[derive(Clone)]
pub(crate) struct PreparedKernel {
    entry: &'static str,
    text: Arc<KernelText>,
    hash: u128,
    threads: u32,
    shared_bytes: usize,
}

impl KernelMetadata for PreparedKernel {
    fn name(&self) -> &'static str {
        self.entry
    }

    fn id(&self) -> KernelId {
        // CubeCL caches by this key alone, in memory and on disk. A plain u128, because the key on disk contains the
        // TypeId of what stands here, and that of our own types changes with every build.
        KernelId::new::<SourceKernel>()
            .info(self.hash)
            .cube_dim(CubeDim::new_1d(self.threads))
    }

    fn address_type(&self) -> StorageType {
        StorageType::Scalar(ElemType::UInt(UIntKind::U32))
    }
}

impl CubeTask<CudaCompiler> for PreparedKernel {
    fn compile(
        &self,
        compiler: &mut CudaCompiler,
        options: &<CudaCompiler as Compiler>::CompilationOptions,
        mode: ExecutionMode,
        address_type: StorageType,
    ) -> Result<CompiledKernel<CudaCompiler>, CompilationError> {
        let sizes = [self.threads as usize, self.shared_bytes];
        let repr = sizes_of_launch(compiler, options, mode, address_type, sizes)?;
        Ok(CompiledKernel {
            entrypoint_name: self.entry.into(),
            debug_name: None,
            source: self.text.text.clone(),
            repr: Some(repr),
            cube_dim: CubeDim::new_1d(self.threads),
            debug_info: None,
        })
    }
}

/// Kernels launched once without an error, by device. Process-wide, because compiled modules are.
static LAUNCHED: LazyLock<Mutex<HashSet<(usize, u128)>>> = LazyLock::new(Mutex::default);

fn first_launch(device: usize, hash: u128) -> bool {
    LAUNCHED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert((device, hash))
}

fn forget_launch(device: usize, hash: u128) {
    LAUNCHED
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .remove(&(device, hash));
}

/// Turns what a flush reports into one error of ours; a compile error comes first, since the rest follows from it.
fn launch_error(kernel: &'static str, error: &ServerError) -> KernelError {
    let mut leaves = Vec::new();
    collect_leaves(error, &mut leaves);
    for leaf in &leaves {
        if let ServerError::Launch(LaunchError::CompilationError(CompilationError::Generic { reason, .. })) = leaf {
            return KernelError::Compile {
                kernel,
                log: compiler_log(reason),
            };
        }
    }
    let mut reason = String::new();
    for leaf in leaves {
        let text = leaf.to_string();
        // Backtraces of CubeCL's internals help nobody who reads this message.
        let text = text.split("\nBacktrace").next().unwrap_or_default();
        let _ = writeln!(reason, "{text}");
    }
    KernelError::Launch {
        kernel,
        reason: reason.trim_end().to_owned(),
    }
}

fn collect_leaves<'a>(error: &'a ServerError, leaves: &mut Vec<&'a ServerError>) {
    match error {
        ServerError::ServerUnhealthy { errors, .. } => errors.iter().for_each(|e| collect_leaves(e, leaves)),
        leaf => leaves.push(leaf),
    }
}

/// NVRTC's log without the full source that CubeCL appends.
fn compiler_log(reason: &str) -> String {
    let log = reason.split("\n[Source]").next().unwrap_or(reason);
    log.trim_start_matches("[Compilation Error]").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel() -> SourceKernel {
        SourceKernel::from_text("probe", "extern \"C\" __global__ void probe(float* x) { x[0] = 1.0f; }")
    }

    #[test]
    fn the_cache_key_follows_everything_that_matters() {
        let base = kernel().cache_key().expect("plain text");
        let others = [
            SourceKernel::from_text("probe", "extern \"C\" __global__ void probe(float* x) { x[0] = 2.0f; }"),
            kernel().define("A", 1),
            kernel().threads(256),
            kernel().shared_bytes(16),
            kernel().entry("other"),
        ];
        let mut keys: Vec<_> = others.iter().map(|k| k.cache_key().expect("plain text")).collect();
        keys.push(base);
        let distinct: HashSet<_> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
        assert_eq!(
            kernel().cache_key().expect("plain text"),
            base,
            "the same kernel has the same key"
        );
    }

    #[test]
    fn limits_are_checked_before_the_launch() {
        let device = Hardware {
            max_shared_bytes: 1000,
            ..Hardware::AMPERE
        };
        assert_eq!(kernel().check_limits([1, 1, 1], 3, &device), Ok(()));
        let too_tall = kernel()
            .check_limits([1, 65536, 1], 3, &device)
            .expect_err("y is 16 bits");
        assert!(too_tall.to_string().contains("grid size y 65536"), "{too_tall}");
        assert!(kernel().shared_bytes(1001).check_limits([1, 1, 1], 3, &device).is_err());
        assert!(kernel().check_limits([1, 1, 0], 3, &device).is_err());
        assert!(kernel().check_limits([1, 1, 1], 61, &device).is_err());
    }

    #[test]
    fn a_compile_error_keeps_the_log_and_drops_the_source() {
        let backtrace = cubecl_common::backtrace::BackTrace::capture();
        let reason = "[Compilation Error] \n    kernels/a.cu(3): error: x is undefined\n[Source]  \nlong text".into();
        let leaf = ServerError::Launch(LaunchError::CompilationError(CompilationError::Generic {
            reason,
            backtrace: backtrace.clone(),
        }));
        let error = ServerError::ServerUnhealthy {
            errors: vec![leaf],
            backtrace,
        };
        let expected = KernelError::Compile {
            kernel: "a",
            log: "kernels/a.cu(3): error: x is undefined".into(),
        };
        assert_eq!(launch_error("a", &error), expected);
    }
}
