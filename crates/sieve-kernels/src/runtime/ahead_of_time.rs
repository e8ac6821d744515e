//! Kernels compiled before they are needed, put into CubeCL's cache as ready machine code.
//!
//! CubeCL would compile each kernel at its first launch, one after the other, to PTX that the driver compiles once
//! more. What [`store`] puts into the cache is loaded instead, without any compiler.
mod resources;

pub use resources::KernelResources;

use crate::error::{CudaVersion, KernelError};
use crate::runtime::cache::KernelCache;
use crate::runtime::cache_files::{CacheEntry, open_files};
use crate::runtime::probe::{check_headers, nvrtc_version};
use crate::runtime::source_kernel::SourceKernel;
use cubecl::cuda::install;
use cudarc::nvrtc::{result as nvrtc, sys};
use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A kernel as a GPU loads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompiledKernel {
    /// The machine code.
    pub cubin: Vec<u8>,
    /// What it uses; `None` when the compiler did not say.
    pub resources: Option<KernelResources>,
}

/// Version of the NVRTC on this machine.
///
/// # Errors
/// [`KernelError::NoNvrtc`].
pub fn installed_nvrtc() -> Result<CudaVersion, KernelError> {
    // SAFETY: only tries to open the library.
    if unsafe { sys::is_culib_present() } {
        nvrtc_version()
    } else {
        Err(KernelError::NoNvrtc)
    }
}

/// The toolkit folder whose headers kernels are compiled against: `$CUDA_PATH`, or one of the usual places.
///
/// # Errors
/// [`KernelError::NoHeaders`].
pub fn cuda_folder() -> Result<PathBuf, KernelError> {
    let folder = install::cuda_path();
    check_headers(folder.as_deref())?;
    Ok(folder.unwrap_or_default())
}

/// Version of an nvcc: that of its toolkit, and so of the NVRTC beside it.
///
/// # Errors
/// [`KernelError::Nvcc`] when it does not start or is no nvcc.
pub fn nvcc_version(nvcc: &Path) -> Result<CudaVersion, KernelError> {
    let error = |reason: String| KernelError::Nvcc {
        path: nvcc.to_owned(),
        reason,
    };
    let output = Command::new(nvcc)
        .arg("--version")
        .output()
        .map_err(|e| error(e.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    release(&text).ok_or_else(|| error("it does not print a CUDA release when asked for its --version".to_owned()))
}

/// `13.0` of `Cuda compilation tools, release 13.0, V13.0.88`.
fn release(text: &str) -> Option<CudaVersion> {
    let (_, rest) = text.split_once("release ")?;
    let (major, rest) = rest.split_once('.')?;
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some(CudaVersion {
        major: major.parse().ok()?,
        minor: digits.parse().ok()?,
    })
}

/// Compiles one kernel with NVRTC for `arch` (`sm_80`, `sm_90a`, …) to a cubin. Needs no GPU. Safe to call from several
/// threads at once.
///
/// # Errors
/// Missing library or headers, or [`KernelError::Compile`] with the compiler's log.
pub fn compile_with_nvrtc(kernel: &SourceKernel, arch: &str, cuda_path: &Path) -> Result<CompiledKernel, KernelError> {
    // SAFETY: only tries to open the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(KernelError::NoNvrtc);
    }
    let include = check_headers(Some(cuda_path))?;
    let source = c_string(kernel, kernel.text()?.text.as_str())?;
    let failed = |e: nvrtc::NvrtcError| KernelError::Compile {
        kernel: kernel.name(),
        log: e.to_string(),
    };
    let program = nvrtc::create_program(&source, None).map_err(failed)?;
    let program = Program(program);
    // The options CubeCL compiles with, so that both ways give the same code.
    let cccl = include.join("cccl");
    let options = [
        format!("--gpu-architecture={arch}"),
        format!("--include-path={}", include.display()),
        "-lineinfo".to_owned(),
        // Changes no code: the log names registers and spills.
        "--ptxas-options=-v".to_owned(),
        format!("--include-path={}", cccl.display()),
    ];
    let used = if cccl.is_dir() { &options[..] } else { &options[..4] };
    // SAFETY: the program is alive.
    let compiled = unsafe { nvrtc::compile_program(program.0, used) };
    // SAFETY: the program is alive and was compiled.
    let log = text_of(&unsafe { nvrtc::get_program_log(program.0) }.map_err(failed)?);
    if compiled.is_err() {
        let kernel = kernel.name();
        return Err(KernelError::Compile { kernel, log });
    }
    let mut size = 0;
    // SAFETY: the program is compiled; `size` is a valid pointer.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }
        .result()
        .map_err(failed)?;
    let mut cubin = vec![0u8; size];
    // SAFETY: the buffer has the size just asked for.
    unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) }
        .result()
        .map_err(failed)?;
    let resources = resources::parse(&log, kernel.entry_point());
    Ok(CompiledKernel { cubin, resources })
}

/// Compiles one kernel with an installed nvcc for `arch` to a cubin.
///
/// # Errors
/// [`KernelError::Nvcc`] when it does not start, [`KernelError::Cache`] when the temporary files cannot be used,
/// [`KernelError::Compile`] with nvcc's messages.
pub fn compile_with_nvcc(
    kernel: &SourceKernel,
    arch: &str,
    nvcc: &Path,
    work_folder: &Path,
) -> Result<CompiledKernel, KernelError> {
    let stem = format!("{}-{arch}-{:032x}", kernel.entry_point(), kernel.cache_key()?);
    let (source, cubin) = (
        work_folder.join(format!("{stem}.cu")),
        work_folder.join(format!("{stem}.cubin")),
    );
    let io = |e: std::io::Error| KernelError::Cache {
        path: work_folder.to_owned(),
        reason: e.to_string(),
    };
    std::fs::write(&source, &kernel.text()?.text).map_err(io)?;
    let virtual_arch = arch.replacen("sm_", "compute_", 1);
    let run = Command::new(nvcc)
        .arg(format!("-gencode=arch={virtual_arch},code={arch}"))
        .args(["-std=c++17", "-lineinfo", "-Xptxas", "-v", "-cubin", "-o"])
        .args([&cubin, &source])
        .output();
    let output = run.map_err(|e| KernelError::Nvcc {
        path: nvcc.to_owned(),
        reason: e.to_string(),
    })?;
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        return Err(KernelError::Compile {
            kernel: kernel.name(),
            log,
        });
    }
    let bytes = std::fs::read(&cubin).map_err(io)?;
    let _ = (std::fs::remove_file(source), std::fs::remove_file(cubin));
    Ok(CompiledKernel {
        cubin: bytes,
        resources: resources::parse(&log, kernel.entry_point()),
    })
}

/// Puts compiled kernels into a cache, before the first client is made. Returns how many were new; a kernel already
/// there stays as it is.
///
/// # Errors
/// An unresolvable source, a folder without room for the kernels.
pub fn store(cache: &KernelCache, kernels: &[(SourceKernel, Vec<u8>)]) -> Result<usize, KernelError> {
    require_room(cache, kernels)?;
    let mut files = open_files(cache.folder());
    let mut stored = 0;
    for (kernel, cubin) in kernels {
        let key = kernel.cache_key()?;
        if files.get(&key).is_some() {
            continue;
        }
        let entry = CacheEntry {
            entrypoint_name: kernel.entry_point().to_owned(),
            shared_mem_bytes: kernel.dynamic_shared_bytes(),
            ptx: cubin.iter().map(|&byte| byte as c_char).collect(),
        };
        let failed = |e| KernelError::Cache {
            path: cache.folder().to_owned(),
            reason: format!("{e:?}"),
        };
        files.insert(key, entry).map_err(failed)?;
        stored += 1;
    }
    Ok(stored)
}

/// For each kernel, whether a launch would find it in the cache.
///
/// # Errors
/// An unresolvable source.
pub fn are_stored(cache: &KernelCache, kernels: &[SourceKernel]) -> Result<Vec<bool>, KernelError> {
    let files = open_files(cache.folder());
    let stored = |kernel: &SourceKernel| Ok(files.get(&kernel.cache_key()?).is_some());
    kernels.iter().map(stored).collect()
}

/// CubeCL's files panic when the disk is full, so the room is tried first: as much as they will take (an entry stores
/// most bytes as two).
fn require_room(cache: &KernelCache, kernels: &[(SourceKernel, Vec<u8>)]) -> Result<(), KernelError> {
    let bytes: usize = kernels.iter().map(|(_, cubin)| 2 * cubin.len() + 512).sum();
    let trial = cache.folder().join("room");
    let written = std::fs::write(&trial, vec![1u8; bytes]);
    let _ = std::fs::remove_file(&trial);
    written.map_err(|e| KernelError::Cache {
        path: cache.folder().to_owned(),
        reason: format!("no room for {bytes} bytes of kernels: {e}"),
    })
}

/// Destroys the program when it goes.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by create_program, destroyed once.
        let _ = unsafe { nvrtc::destroy_program(self.0) };
    }
}

fn c_string(kernel: &SourceKernel, text: &str) -> Result<CString, KernelError> {
    let log = "the source contains a NUL byte".to_owned();
    CString::new(text).map_err(|_| KernelError::Compile {
        kernel: kernel.name(),
        log,
    })
}

fn text_of(log: &[c_char]) -> String {
    let bytes: Vec<u8> = log.iter().map(|&c| c as u8).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_nvcc_tells_its_release() {
        let text = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.8, V12.8.93\n";
        let version = CudaVersion { major: 12, minor: 8 };
        assert_eq!(release(text), Some(version));
        assert_eq!(release("something else"), None);
        let error = nvcc_version(Path::new("no-such-nvcc"))
            .expect_err("there is none")
            .to_string();
        assert!(error.contains("no-such-nvcc"), "{error}");
    }

    #[test]
    fn what_is_stored_is_found_again_and_only_that() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let kernel = SourceKernel::from_text("probe", "one").shared_bytes(2048);
        let changed = SourceKernel::from_text("probe", "onE").shared_bytes(2048);
        let both = [kernel.clone(), changed];
        {
            let cache = KernelCache::open(root.path(), "sm_80", "13.0").expect("writable");
            assert_eq!(are_stored(&cache, &both), Ok(vec![false, false]));
            assert_eq!(store(&cache, &[(kernel.clone(), vec![1, 2, 250])]), Ok(1));
            assert_eq!(store(&cache, &[(kernel.clone(), vec![9])]), Ok(0), "the first stays");
        }
        let cache = KernelCache::open(root.path(), "sm_80", "13.0").expect("writable");
        let files = open_files(cache.folder());
        let entry = files.get(&kernel.cache_key().expect("plain text")).expect("stored");
        assert_eq!(
            (entry.entrypoint_name.as_str(), entry.shared_mem_bytes),
            ("probe", 2048)
        );
        assert_eq!(entry.ptx, [1, 2, 250u8 as c_char]);
        assert_eq!(
            are_stored(&cache, &both),
            Ok(vec![true, false]),
            "a changed character is another kernel"
        );
    }
}
