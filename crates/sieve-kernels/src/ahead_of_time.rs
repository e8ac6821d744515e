//! Kernels compiled before they are needed, put into CubeCL's cache as ready machine code.
//!
//! CubeCL would compile each kernel at its first launch, one after the other, to PTX that the driver compiles once more.
//! What [`store`] puts into the cache is loaded instead, without any compiler.
use crate::cache::KernelCache;
use crate::error::KernelError;
use crate::probe::check_headers;
use crate::source_kernel::SourceKernel;
use cubecl_common::cache::CacheOption;
use cubecl_common::compilation_cache::CompilationCache;
use cudarc::nvrtc::{result as nvrtc, sys};
use std::ffi::{CString, c_char};
use std::path::Path;
use std::process::Command;

/// What CubeCL 0.10 stores under a kernel's key; field names and order are its format.
#[derive(serde::Serialize, serde::Deserialize, Clone, Debug, PartialEq, Eq)]
struct CacheEntry {
    entrypoint_name: String,
    shared_mem_bytes: usize,
    ptx: Vec<c_char>,
}

/// Compiles one kernel with NVRTC for `arch` (`sm_80`, `sm_90a`, …) to a cubin. Needs no GPU. Safe to call from several
/// threads at once.
///
/// # Errors
/// Missing library or headers, or [`KernelError::Compile`] with the compiler's log.
pub fn compile_with_nvrtc(
    kernel: &SourceKernel,
    arch: &str,
    cuda_path: &Path,
) -> Result<Vec<u8>, KernelError> {
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
        format!("--include-path={}", cccl.display()),
    ];
    let used = if cccl.is_dir() {
        &options[..]
    } else {
        &options[..3]
    };
    // SAFETY: the program is alive.
    if unsafe { nvrtc::compile_program(program.0, used) }.is_err() {
        // SAFETY: the program is alive and was compiled.
        let log = unsafe { nvrtc::get_program_log(program.0) }.map_err(failed)?;
        return Err(KernelError::Compile {
            kernel: kernel.name(),
            log: text_of(&log),
        });
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
    Ok(cubin)
}

/// Compiles one kernel with an installed nvcc for `arch` to a cubin.
///
/// # Errors
/// [`KernelError::Cache`] when nvcc or the temporary files cannot be used, [`KernelError::Compile`] with nvcc's messages.
pub fn compile_with_nvcc(
    kernel: &SourceKernel,
    arch: &str,
    nvcc: &Path,
    work_folder: &Path,
) -> Result<Vec<u8>, KernelError> {
    let stem = format!("{}-{:032x}", kernel.entry_point(), kernel.cache_key()?);
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
        .args(["-std=c++17", "-cubin", "-o"])
        .args([&cubin, &source])
        .output();
    let output = run.map_err(|e| KernelError::Cache {
        path: nvcc.to_owned(),
        reason: e.to_string(),
    })?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(KernelError::Compile {
            kernel: kernel.name(),
            log,
        });
    }
    let bytes = std::fs::read(&cubin).map_err(io)?;
    let _ = (std::fs::remove_file(source), std::fs::remove_file(cubin));
    Ok(bytes)
}

/// Puts compiled kernels into a cache, before the first client is made. Returns how many were new; a kernel already there
/// stays as it is.
///
/// # Errors
/// An unresolvable source; writing failures make CubeCL fall back to compiling, so they are no error here.
pub fn store(
    cache: &KernelCache,
    kernels: &[(SourceKernel, Vec<u8>)],
) -> Result<usize, KernelError> {
    let mut files = open_files(cache);
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

/// True when a launch of this kernel would find it in the cache.
///
/// # Errors
/// An unresolvable source.
pub fn is_stored(cache: &KernelCache, kernel: &SourceKernel) -> Result<bool, KernelError> {
    let key = kernel.cache_key()?;
    Ok(open_files(cache).get(&key).is_some())
}

fn open_files(cache: &KernelCache) -> CompilationCache<u128, CacheEntry> {
    // Folder names as cubecl-cuda opens them; the version directory is cubecl-common's own.
    CompilationCache::new(
        "ptx",
        CacheOption::default().name("cuda").root(cache.folder()),
    )
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
    let bytes: Vec<u8> = log
        .iter()
        .map(|&c| c as u8)
        .take_while(|&b| b != 0)
        .collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_found_again_and_only_that() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let kernel = SourceKernel::from_text("probe", "one").shared_bytes(2048);
        let changed = SourceKernel::from_text("probe", "onE").shared_bytes(2048);
        {
            let cache = KernelCache::open(root.path(), "sm_80", "13.0").expect("writable");
            assert!(!is_stored(&cache, &kernel).expect("plain text"));
            assert_eq!(store(&cache, &[(kernel.clone(), vec![1, 2, 250])]), Ok(1));
            assert_eq!(
                store(&cache, &[(kernel.clone(), vec![9])]),
                Ok(0),
                "the first stays"
            );
        }
        let cache = KernelCache::open(root.path(), "sm_80", "13.0").expect("writable");
        let files = open_files(&cache);
        let entry = files
            .get(&kernel.cache_key().expect("plain text"))
            .expect("stored");
        assert_eq!(
            (entry.entrypoint_name.as_str(), entry.shared_mem_bytes),
            ("probe", 2048)
        );
        assert_eq!(entry.ptx, [1, 2, 250u8 as c_char]);
        assert!(
            !is_stored(&cache, &changed).expect("plain text"),
            "a changed character is another kernel"
        );
    }
}
