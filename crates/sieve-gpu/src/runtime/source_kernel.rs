//! A kernel given as CUDA C++ text, and its launches.
use crate::KernelError;
use crate::runtime::{CudaTensor, Hardware, KernelText, MapLayout, Params, assemble_file, assemble_text, words_for};
use std::fmt::Display;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Most 64-bit words of a params struct.
const MAX_PARAM_WORDS: usize = 60;

/// A TMA tensor map.
#[derive(Debug, Clone, Copy)]
pub struct TileMap<'a> {
    /// The bf16 tensor that TMA reads.
    pub tensor: &'a CudaTensor,
    /// Index of the map's first element in the tensor; a multiple of 8.
    pub offset: usize,
    /// Sizes and strides of the map.
    pub layout: MapLayout,
}

/// One launch of a kernel, checked against the GPU's limits.
#[derive(Debug)]
pub struct LaunchRequest<'a> {
    /// The kernel, with its threads and shared memory.
    pub kernel: &'a SourceKernel,
    /// Thread blocks along x, y and z.
    pub grid: [usize; 3],
    /// Tensor maps, which kernels take by value before the pointers. Their tensors are among `tensors` too, which
    /// orders the launch after the kernels that write them.
    pub maps: &'a [TileMap<'a>],
    /// The kernel's pointer arguments; at least one.
    pub tensors: &'a [&'a CudaTensor],
    /// The kernel's params struct, as 64-bit words.
    pub words: &'a [u64],
}

/// A specialisation of a kernel: file, defines, threads and shared memory.
///
/// ```no_run
/// # use sieve_gpu::SourceKernel;
/// let kernel = SourceKernel::new("swiglu_forward").define("IS_BF16", 1).threads(256);
/// ```
#[derive(Debug, Clone)]
pub struct SourceKernel {
    name: &'static str,
    /// CUDA C++ of [`from_text`](Self::from_text); `None` for an embedded file.
    text: Option<Arc<str>>,
    defines: Vec<(&'static str, String)>,
    threads: u32,
    shared_bytes: usize,
    starts_early: bool,
    runs_together: bool,
}

impl SourceKernel {
    /// The kernel in `kernels/<name>.cu`, whose entry point has the same name.
    pub const fn new(name: &'static str) -> Self {
        Self {
            name,
            text: None,
            defines: Vec::new(),
            threads: 128,
            shared_bytes: 0,
            starts_early: false,
            runs_together: false,
        }
    }

    /// A kernel given as text, for tests and experiments. Its includes come from the embedded files.
    pub fn from_text(name: &'static str, text: impl Into<Arc<str>>) -> Self {
        Self { text: Some(text.into()), ..Self::new(name) }
    }

    /// Adds `#define name value` before the text.
    pub fn define(mut self, name: &'static str, value: impl Display) -> Self {
        self.defines.push((name, value.to_string()));
        self
    }

    /// The same specialisation of the kernel in another file.
    pub fn in_file(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// Sets the threads of a thread block, along x.
    pub const fn threads(mut self, threads: usize) -> Self {
        self.threads = threads as u32;
        self
    }

    /// Sets the dynamic shared memory of a block, in bytes.
    pub fn shared_bytes(mut self, bytes: usize) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// Allows a captured CUDA graph to start the kernel before its predecessor has ended (programmatic dependent
    /// launch). The kernel must call `wait_for_previous` before it reads results of other kernels, and before it
    /// writes.
    pub const fn starts_early(mut self) -> Self {
        self.starts_early = true;
        self
    }

    /// Whether a captured step may start the kernel early; see [`starts_early`](Self::starts_early).
    pub fn may_start_early(&self) -> bool {
        self.starts_early
    }

    /// Makes the driver start the blocks of a launch only when there is room for all of them at once (cooperative
    /// launch): for kernels whose blocks wait for each other in any order.
    pub const fn run_together(mut self) -> Self {
        self.runs_together = true;
        self
    }

    /// Whether all blocks of a launch run at the same time; see [`run_together`](Self::run_together).
    pub fn runs_together(&self) -> bool {
        self.runs_together
    }

    /// Name of the kernel's file without `.cu`, and of its `__global__` function.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The `#define`s, in order, as names and values.
    pub fn defines(&self) -> &[(&'static str, String)] {
        &self.defines
    }

    /// Dynamic shared memory of a block, in bytes.
    pub fn dynamic_shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// Threads of a thread block.
    pub fn block_threads(&self) -> usize {
        self.threads as usize
    }

    /// Whether both kernels have the same code: file or text, and defines. Threads and shared memory may differ.
    pub(crate) fn is_same_code(&self, other: &Self) -> bool {
        self.name == other.name && self.text == other.text && self.defines == other.defines
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

    /// Cache key of the compiled kernel: a hash of the complete text and the name.
    ///
    /// # Errors
    /// The errors of [`text`](Self::text).
    pub fn code_key(&self) -> Result<u128, KernelError> {
        let mut hasher = Xxh3::new();
        hasher.update(&self.text()?.hash.to_le_bytes());
        hasher.update(self.name.as_bytes());
        Ok(hasher.digest128())
    }

    /// Queues the kernel on the stream of the first tensor: `tensors` are its pointer arguments in the order of the
    /// entry point. Returns before the GPU has run it.
    ///
    /// On tensors of a [`Recorder`](crate::Recorder) the launch is recorded instead.
    ///
    /// The first launch of each specialisation waits until the kernel is compiled, loaded and queued, and returns the
    /// error of these. A later error of the driver is returned by the next call, and names its kernel.
    ///
    /// # Errors
    /// [`KernelError::Compile`], [`KernelError::Launch`], [`KernelError::Refused`].
    ///
    /// # Safety
    /// With these params, grid and block the kernel must access only the given tensors, and must terminate.
    pub(crate) unsafe fn launch(
        &self,
        grid: [usize; 3],
        tensors: &[&CudaTensor],
        params: &impl Params,
    ) -> Result<(), KernelError> {
        // SAFETY: the caller fulfils the conditions.
        unsafe { self.launch_with_maps(grid, &[], tensors, params) }
    }

    /// [`launch`](Self::launch) with tensor maps, which the kernel takes by value before the pointers.
    ///
    /// # Errors
    /// The errors of [`launch`](Self::launch).
    ///
    /// # Safety
    /// The conditions of [`launch`](Self::launch); the maps' tensors are among `tensors`, which orders the launch after
    /// the kernels that write them.
    pub(crate) unsafe fn launch_with_maps(
        &self,
        grid: [usize; 3],
        maps: &[TileMap<'_>],
        tensors: &[&CudaTensor],
        params: &impl Params,
    ) -> Result<(), KernelError> {
        let words = words_for(self.name, params)?;
        // SAFETY: the caller fulfils the conditions.
        unsafe { self.launch_words(grid, maps, tensors, &words) }
    }

    /// Checks a launch against the device's limits and queues it; `words` are the params struct. For kernels
    /// [given as text](Self::from_text), whose struct has no Rust form.
    ///
    /// # Errors
    /// The errors of `launch`.
    ///
    /// # Safety
    /// The conditions of `launch_with_maps`.
    pub unsafe fn launch_words(
        &self,
        grid: [usize; 3],
        maps: &[TileMap<'_>],
        tensors: &[&CudaTensor],
        words: &[u64],
    ) -> Result<(), KernelError> {
        let [first, ..] = tensors else {
            return Err(KernelError::empty(self.name, "the list of tensors"));
        };
        self.check_limits(grid, words.len(), &first.hardware())?;
        let request = LaunchRequest { kernel: self, grid, maps, tensors, words };
        // SAFETY: the caller fulfils the conditions; the launch is within the device's limits, checked above.
        unsafe { first.gpu().launch(&request) }
    }

    /// Refuses an empty grid, and sizes above the device's limits; `words` is the number of the params' words.
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
                return Err(KernelError::over_limit(self.name, what, got, limit));
            }
        }
        if grid.contains(&0) {
            return Err(KernelError::empty(self.name, "the grid"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const TEXT: &str = "extern \"C\" __global__ void probe(float* x) { x[0] = 1.0f; }";

    fn kernel() -> SourceKernel {
        SourceKernel::from_text("probe", TEXT)
    }

    #[test]
    fn the_cache_key_depends_on_the_code_alone() {
        let key = |kernel: SourceKernel| kernel.code_key().expect("plain text");
        let others = [
            SourceKernel::from_text("probe", "extern \"C\" __global__ void probe(float* x) { x[0] = 2.0f; }"),
            kernel().define("A", 1),
            SourceKernel::from_text("other", TEXT),
        ];
        let mut keys: Vec<_> = others.map(key).to_vec();
        keys.push(key(kernel()));
        let distinct: HashSet<_> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
        // Threads and shared memory belong to the launch.
        assert_eq!(key(kernel().threads(256).shared_bytes(16)), key(kernel()));
    }

    #[test]
    fn limits_are_checked_before_the_launch() {
        let device = Hardware { max_shared_bytes: 1000, ..Hardware::AMPERE };
        assert_eq!(kernel().check_limits([1, 1, 1], 3, &device), Ok(()));
        let too_tall = kernel().check_limits([1, 65536, 1], 3, &device).expect_err("y is 16 bits");
        assert!(too_tall.to_string().contains("grid size y 65536"), "{too_tall}");
        assert!(kernel().shared_bytes(1001).check_limits([1, 1, 1], 3, &device).is_err());
        assert!(kernel().check_limits([1, 1, 0], 3, &device).is_err());
        assert!(kernel().check_limits([1, 1, 1], 61, &device).is_err());
    }
}
