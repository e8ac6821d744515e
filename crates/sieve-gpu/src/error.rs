//! Errors between a Rust call and a finished launch.
use sieve_core::ShownPath;
use std::fmt::Display;
use std::path::PathBuf;

/// Why a kernel, the CUDA installation or the kernel cache refused. Each message says what, where and how to fix it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum KernelError {
    /// A kernel does not take an operand, a size, a define or the device.
    #[error("{kernel}: {words}")]
    Refused {
        /// Kernel, or file of kernels, that refused.
        kernel: String,
        /// The complete message: what was refused and how to fix it.
        words: String,
    },
    /// The CUDA compiler refused the source; its log follows.
    #[error(
        "{kernel}: the CUDA compiler refused the source\n{log}\n  \
         hint: a Sieve kernel that does not compile is a bug; please report it with the CUDA version"
    )]
    Compile {
        /// Kernel that did not compile.
        kernel: &'static str,
        /// NVRTC's log.
        log: String,
    },
    /// The driver refused the launch, or an earlier operation on the stream failed.
    #[error("{kernel}: the launch failed, or an operation queued before it did\n{reason}")]
    Launch {
        /// Kernel whose launch reported the error.
        kernel: &'static str,
        /// The error text of the driver or of CubeCL.
        reason: String,
    },
    /// The library libcuda is not on this machine.
    #[error(
        "CUDA: the driver library libcuda was not found\n  hint: install NVIDIA's driver, or run with --device cpu"
    )]
    NoDriver,
    /// A library of the CUDA installation is missing or too new, or the driver does not start.
    #[error("CUDA: {0}")]
    Installation(String),
    /// The driver runs but sees no GPU.
    #[error(
        "CUDA: the driver sees no GPU\n  hint: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or run with --device cpu"
    )]
    NoDevice,
    /// A device number that does not exist.
    #[error("CUDA: there is no device {wanted}; this machine has {count}, numbered from 0\n  \
        hint: use --device cuda:{} at most", count.saturating_sub(1))]
    WrongDevice {
        /// Number of the requested device.
        wanted: usize,
        /// Number of CUDA devices of this machine.
        count: usize,
    },
    /// A file of the kernel cache could not be used.
    #[error(
        "kernel cache {path}: {reason}\n  \
        hint: make the folder writable, or name one on a file system with locks with XDG_CACHE_HOME",
        path = path.shown()
    )]
    Cache {
        /// File or folder of the kernel cache.
        path: PathBuf,
        /// Why the file operation failed.
        reason: String,
    },
}

impl KernelError {
    /// A call of `kernel` that was refused before the launch; `words` says why.
    pub fn refused(kernel: &str, words: impl Into<String>) -> Self {
        let (kernel, words) = (kernel.to_owned(), words.into());
        Self::Refused { kernel, words }
    }

    /// `what` is `got`, but `kernel` takes only `supported`.
    pub fn unsupported(kernel: &str, what: &str, got: impl Display, supported: impl Display) -> Self {
        Self::refused(kernel, format!("{what} {got} is not supported (supported: {supported})"))
    }

    /// `tensor` has another shape than the other operands call for.
    pub fn shape(kernel: &str, tensor: &str, got: &[usize], expected: &[usize]) -> Self {
        Self::refused(kernel, format!("{tensor} has shape {got:?}, expected {expected:?}"))
    }

    /// An error about a size `what` that is 0.
    pub fn empty(kernel: &str, what: &str) -> Self {
        Self::refused(kernel, format!("{what} is 0, nothing to compute\n  hint: skip the call for an empty input"))
    }

    /// A launch larger than the device takes: a grid axis, threads, shared memory in bytes.
    pub fn over_limit(kernel: &str, what: &str, got: usize, limit: usize) -> Self {
        Self::refused(kernel, format!("{what} {got} is over this device's limit of {limit}"))
    }

    /// The driver does not start, or does not answer.
    pub fn driver(reason: impl Display) -> Self {
        Self::Installation(format!(
            "the driver does not start: {reason}\n  \
             hint: check `nvidia-smi`; in a container, pass the GPU through; or run with --device cpu"
        ))
    }

    /// The error when the NVRTC library is not on this machine.
    pub fn no_nvrtc() -> Self {
        Self::no_library("the run-time compiler libnvrtc was not found", "cuda-nvrtc")
    }

    /// The error when the cuBLASLt library is not on this machine.
    pub fn no_cublaslt() -> Self {
        Self::no_library("the library libcublasLt was not found", "cublas")
    }

    fn no_library(missing: &str, package: &str) -> Self {
        Self::Installation(format!(
            "{missing}\n  hint: install the CUDA toolkit, or `pip install nvidia-{package}`, and put \
             its folder on LD_LIBRARY_PATH"
        ))
    }

    /// NCCL is not on this machine, or lacks a function.
    pub fn no_nccl(reason: impl Display) -> Self {
        Self::Installation(format!(
            "the library libnccl, which several processes on GPUs need, cannot be used: {reason}\n  hint: install \
             libnccl2, or `pip install nvidia-nccl-cu13` and put the folder of its libnccl.so.2 on LD_LIBRARY_PATH"
        ))
    }

    /// NVRTC emits code that a driver of CUDA `driver` cannot load.
    pub fn nvrtc_too_new(nvrtc: CudaVersion, driver: CudaVersion) -> Self {
        Self::Installation(format!(
            "libnvrtc is version {nvrtc}, but the driver supports CUDA {driver} only, so it would refuse the compiled \
             kernels\n  hint: update the driver, or use a toolkit of version {driver} or older"
        ))
    }
}

/// A CUDA version, `major.minor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// Major version number.
    pub major: u32,
    /// Minor version number.
    pub minor: u32,
}

impl Display for CudaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
