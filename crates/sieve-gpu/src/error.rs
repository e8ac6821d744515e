//! Everything that can go wrong between a Rust call and a finished launch.
use std::path::PathBuf;

/// Why a kernel, the CUDA installation or the kernel cache refused. Each message says what, where and how to fix it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum KernelError {
    /// A value that no compiled form of the kernel takes.
    #[error("{kernel}: {what} {got} is not supported (supported: {supported})")]
    Unsupported {
        /// Kernel that refused.
        kernel: &'static str,
        /// Name of the value, as the caller knows it.
        what: &'static str,
        /// The value itself.
        got: String,
        /// What would have been accepted.
        supported: String,
    },
    /// A size of zero where the kernel needs at least one element.
    #[error("{kernel}: {what} is 0, nothing to compute\n  hint: skip the call for an empty input")]
    Empty {
        /// Kernel that refused.
        kernel: &'static str,
        /// Name of the size that is zero.
        what: &'static str,
    },
    /// A tensor of another shape than the other arguments call for.
    #[error("{kernel}: {tensor} has shape {got:?}, expected {expected:?}")]
    Shape {
        /// Kernel that refused.
        kernel: &'static str,
        /// Name of the tensor.
        tensor: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// The shape that fits the other arguments.
        expected: Vec<usize>,
    },
    /// A tensor with another number of dimensions.
    #[error("{kernel}: {tensor} has {got} dimensions, expected {expected}")]
    Rank {
        /// Kernel that refused.
        kernel: &'static str,
        /// Name of the tensor.
        tensor: &'static str,
        /// Its number of dimensions.
        got: usize,
        /// The number expected.
        expected: usize,
    },
    /// A tensor of another element type.
    #[error("{kernel}: {tensor} is {got}, expected {expected}\n  hint: cast it before the call")]
    DType {
        /// Kernel that refused.
        kernel: &'static str,
        /// Name of the tensor.
        tensor: &'static str,
        /// Its element type.
        got: String,
        /// The element type expected.
        expected: String,
    },
    /// A tensor whose strides the kernel cannot follow.
    #[error(
        "{kernel}: {tensor} of shape {shape:?} has strides {strides:?}; {expected}\n  \
         hint: call into_contiguous() on it first"
    )]
    Layout {
        /// Kernel that refused.
        kernel: &'static str,
        /// Name of the tensor.
        tensor: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides, in elements.
        strides: Vec<usize>,
        /// The layout the kernel needs, in words.
        expected: &'static str,
    },
    /// A launch larger than the device takes.
    #[error("{kernel}: {what} {got} is over this device's limit of {limit}")]
    DeviceLimit {
        /// Kernel that refused.
        kernel: &'static str,
        /// The resource: a grid axis, threads, or shared memory in bytes.
        what: &'static str,
        /// What the launch asks for.
        got: usize,
        /// What the device has.
        limit: usize,
    },
    /// No kernel text under that name is built in.
    #[error(
        "{name}: no such file among the kernels built into this program\n  \
         hint: kernels/{name} must exist when sieve-kernels is compiled"
    )]
    UnknownSource {
        /// File name below `kernels/`.
        name: String,
    },
    /// An include that the loader cannot resolve.
    #[error("{file}, line {line}: {reason}")]
    Include {
        /// File with the include line.
        file: String,
        /// Line number, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// The CUDA compiler refused the source; its log follows.
    #[error(
        "{kernel}: the CUDA compiler refused the source\n{log}\n  \
         hint: a Sieve kernel that does not compile is a bug; please report it with the CUDA version"
    )]
    Compile {
        /// Kernel that failed.
        kernel: &'static str,
        /// The compiler's log.
        log: String,
    },
    /// The driver refused the launch, or an earlier operation on the stream failed.
    #[error("{kernel}: the launch failed, or an operation queued before it did\n{reason}")]
    Launch {
        /// Kernel whose launch reported it.
        kernel: &'static str,
        /// The driver's or CubeCL's words.
        reason: String,
    },
    /// libcuda is not on this machine.
    #[error(
        "CUDA: the driver library libcuda was not found\n  hint: install NVIDIA's driver, or run with --device cpu"
    )]
    NoDriver,
    /// libcuda is there but does not start.
    #[error(
        "CUDA: the driver does not start: {reason}\n  \
         hint: check `nvidia-smi`; in a container, pass the GPU through; or run with --device cpu"
    )]
    DriverInit {
        /// The driver's error.
        reason: String,
    },
    /// NVRTC is not on this machine.
    #[error(
        "CUDA: the run-time compiler libnvrtc was not found\n  \
         hint: install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc`, and put its folder on LD_LIBRARY_PATH"
    )]
    NoNvrtc,
    /// cuBLASLt is not on this machine.
    #[error(
        "CUDA: the library libcublasLt was not found\n  \
         hint: install the CUDA toolkit, or `pip install nvidia-cublas`, and put its folder on LD_LIBRARY_PATH"
    )]
    NoCublasLt,
    /// NCCL is not on this machine, or lacks a function.
    #[error(
        "CUDA: the library libnccl, which several processes on GPUs need, cannot be used: {reason}\n  \
         hint: install libnccl2, or `pip install nvidia-nccl-cu13` and put the folder of its libnccl.so.2 on \
         LD_LIBRARY_PATH"
    )]
    NoNccl {
        /// What the loader said of each name.
        reason: String,
    },
    /// CUPTI, which traces kernels, is missing or refuses.
    #[error(
        "CUDA: kernels cannot be traced: {reason}\n  \
         hint: install the CUDA toolkit, or `pip install nvidia-cuda-cupti`, put the folder of libcupti.so on \
         LD_LIBRARY_PATH, and run no other profiler"
    )]
    NoCupti {
        /// What CUPTI or the loader said.
        reason: String,
    },
    /// NVRTC emits code that the driver cannot load.
    #[error(
        "CUDA: libnvrtc is version {nvrtc}, but the driver supports CUDA {driver} only, so it would refuse the \
         compiled kernels\n  hint: update the driver, or use a toolkit of version {driver} or older"
    )]
    NvrtcTooNew {
        /// NVRTC's version.
        nvrtc: CudaVersion,
        /// The newest CUDA version that the driver supports.
        driver: CudaVersion,
    },
    /// The CUDA headers are missing.
    #[error(
        "CUDA: the header {header} was not found in {searched}\n  \
         hint: set CUDA_PATH to the toolkit's folder (the one with include/{header}); without a toolkit: `pip install \
         nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl` and CUDA_PATH=<site-packages>/nvidia/cu13"
    )]
    NoHeaders {
        /// The header looked for.
        header: &'static str,
        /// Where it was looked for.
        searched: String,
    },
    /// The driver runs but sees no GPU.
    #[error(
        "CUDA: the driver sees no GPU\n  hint: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or run with --device cpu"
    )]
    NoDevice,
    /// A device number that does not exist.
    #[error("CUDA: there is no device {wanted}; this machine has {count}, numbered from 0\n  \
        hint: use --device cuda:{} at most", count.saturating_sub(1))]
    WrongDevice {
        /// The number asked for.
        wanted: usize,
        /// How many devices there are.
        count: usize,
    },
    /// A GPU older than the kernels.
    #[error(
        "CUDA: device {index} ({name}) has compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or \
         newer\n  hint: use another GPU, or --device cpu"
    )]
    OldDevice {
        /// Device number.
        index: usize,
        /// Device name.
        name: String,
        /// Compute capability, major part.
        major: u32,
        /// Compute capability, minor part.
        minor: u32,
    },
    /// A file of the kernel cache could not be used.
    #[error("kernel cache {path}: {reason}\n  \
        hint: make the folder writable, or name another with XDG_CACHE_HOME", path = path.display())]
    Cache {
        /// File or folder.
        path: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// The CUDA runtime was configured twice in one process.
    #[error(
        "the CUDA runtime is already configured in this process\n  \
         hint: call KernelCache::init_runtime once, before the first tensor is made"
    )]
    AlreadyInitialised,
}

impl KernelError {
    /// [`Unsupported`](Self::Unsupported): `what` of `kernel` is `got`, where it takes `supported` alone.
    pub fn unsupported(
        kernel: &'static str,
        what: &'static str,
        got: impl ToString,
        supported: impl Into<String>,
    ) -> Self {
        Self::Unsupported {
            kernel,
            what,
            got: got.to_string(),
            supported: supported.into(),
        }
    }
}

/// A CUDA version, `major.minor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// Major part.
    pub major: u32,
    /// Minor part.
    pub minor: u32,
}

impl std::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
