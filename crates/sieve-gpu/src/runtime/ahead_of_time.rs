//! Compiles CUDA C++ to cubins with NVRTC. Sieve's kernels include no header of the CUDA toolkit.
mod resources;

pub use resources::{KernelResources, NamedResources};

use crate::runtime::SourceKernel;
use crate::{CudaVersion, KernelError};
use cudarc::nvrtc::{result as nvrtc, sys};
use std::ffi::{CString, c_char};

/// A kernel compiled by NVRTC, not yet loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompiledKernel {
    /// The machine code, as a cubin.
    pub cubin: Vec<u8>,
    /// Registers and memory that the kernel uses; `None` when the compiler's log does not name them.
    pub resources: Option<KernelResources>,
}

/// What the compiler says of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompilerOutput {
    /// Warnings, and the resources of every function ([`NamedResources::of_log`]).
    pub log: String,
    /// The kernel in PTX, with the lines of its source.
    pub ptx: String,
}

/// Version of the NVRTC on this machine.
///
/// # Errors
/// [`KernelError::Installation`].
pub fn installed_nvrtc() -> Result<CudaVersion, KernelError> {
    require_nvrtc()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two valid pointers to integers.
    let status = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    status.result().map_err(|e| KernelError::driver(format!("nvrtcVersion: {e}")))?;
    Ok(CudaVersion { major: major as u32, minor: minor as u32 })
}

/// Newest CUDA version that the driver supports. The driver must have been initialised.
///
/// # Errors
/// [`KernelError::Installation`].
pub fn driver_version() -> Result<CudaVersion, KernelError> {
    let mut version = 0;
    // SAFETY: a valid pointer to an integer.
    unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut version) }.result().map_err(KernelError::driver)?;
    // CUDA 13.2 is 13020.
    Ok(CudaVersion { major: version as u32 / 1000, minor: version as u32 % 1000 / 10 })
}

fn require_nvrtc() -> Result<(), KernelError> {
    // SAFETY: only tries to open the library.
    if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(KernelError::no_nvrtc()) }
}

/// Compiles one kernel with NVRTC for `arch` (`sm_80`, `sm_90a`, …) to a cubin. Needs no GPU. Several threads may call
/// it at the same time.
///
/// # Errors
/// [`KernelError::Installation`] without NVRTC, or [`KernelError::Compile`] with the compiler's log.
pub fn compile_with_nvrtc(kernel: &SourceKernel, arch: &str) -> Result<CompiledKernel, KernelError> {
    let (program, log) = compiled(kernel, arch)?;
    let failed = |e: nvrtc::NvrtcError| KernelError::Compile { kernel: kernel.name(), log: e.to_string() };
    let mut size = 0;
    // SAFETY: the program is compiled; `size` is a valid pointer.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }.result().map_err(failed)?;
    let mut cubin = vec![0u8; size];
    // SAFETY: the buffer has the size that NVRTC returned.
    unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) }.result().map_err(failed)?;
    let resources = resources::of_entry(&log, kernel.name());
    Ok(CompiledKernel { cubin, resources })
}

/// Compiles one kernel as [`compile_with_nvrtc`] does, and returns what there is to read about it instead of its
/// machine code.
///
/// # Errors
/// [`KernelError::Installation`] without NVRTC, or [`KernelError::Compile`] with the compiler's log.
pub fn explain_with_nvrtc(kernel: &SourceKernel, arch: &str) -> Result<CompilerOutput, KernelError> {
    let (program, log) = compiled(kernel, arch)?;
    // SAFETY: the program is alive and was compiled.
    let ptx = unsafe { nvrtc::get_ptx(program.0) };
    let ptx = ptx.map_err(|e| KernelError::Compile { kernel: kernel.name(), log: e.to_string() })?;
    Ok(CompilerOutput { log, ptx: text_of(&ptx) })
}

/// A compiled program and the compiler's log.
fn compiled(kernel: &SourceKernel, arch: &str) -> Result<(Program, String), KernelError> {
    require_nvrtc()?;
    let error = |log| KernelError::Compile { kernel: kernel.name(), log };
    let failed = |e: nvrtc::NvrtcError| error(e.to_string());
    let source = CString::new(kernel.text()?.text.as_str());
    let source = source.map_err(|_| error("the source contains a NUL byte".to_owned()))?;
    let program = nvrtc::create_program(&source, None).map(Program).map_err(failed)?;
    let options = [
        format!("--gpu-architecture={arch}"),
        "-lineinfo".to_owned(),
        // Makes the log name registers and spills; the code is the same.
        "--ptxas-options=-v".to_owned(),
    ];
    // SAFETY: the program is alive.
    let compiled = unsafe { nvrtc::compile_program(program.0, &options) };
    // SAFETY: the program is alive and was compiled.
    let log = text_of(&unsafe { nvrtc::get_program_log(program.0) }.map_err(failed)?);
    if compiled.is_err() {
        return Err(error(log));
    }
    Ok((program, log))
}

/// A handle of an NVRTC program, destroyed on drop.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by create_program, destroyed once.
        let _ = unsafe { nvrtc::destroy_program(self.0) };
    }
}

fn text_of(log: &[c_char]) -> String {
    let bytes: Vec<u8> = log.iter().map(|&c| c as u8).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}
