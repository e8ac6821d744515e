//! Compiles every shipped specialisation with NVRTC, the compiler that users' machines run, from the
//! exact text a launch would send. Needs no GPU: `nvrtc_check CUDA_PATH`, with libnvrtc's folder on LD_LIBRARY_PATH.
#![allow(clippy::print_stdout, clippy::print_stderr)]
use sieve_kernels::{NeededKernels, ahead_of_time::compile_with_nvrtc};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let Some(cuda_path) = std::env::args().nth(1) else {
        eprintln!("usage: nvrtc_check CUDA_PATH   (the folder with include/cuda_bf16.h)");
        return ExitCode::FAILURE;
    };
    let start = Instant::now();
    let (mut compiled, mut failed) = (0, 0);
    for (kernel, architectures) in NeededKernels::shipped() {
        // The others' code is the same but for tile sizes, and nvcc compiles it.
        let families = |arch: &&&str| ["sm_80", "sm_90a"].contains(*arch);
        for arch in architectures.iter().filter(families) {
            match compile_with_nvrtc(&kernel, arch, Path::new(&cuda_path)) {
                Ok(kernel) if kernel.cubin.starts_with(b"\x7fELF") => compiled += 1,
                Ok(_) => {
                    eprintln!(
                        "{} {:?} {arch}: the result is no cubin",
                        kernel.name(),
                        kernel.defines()
                    );
                    failed += 1;
                }
                Err(error) => {
                    eprintln!("{:?} {arch}: {error}", kernel.defines());
                    failed += 1;
                }
            }
        }
    }
    println!(
        "nvrtc: {compiled} compiled, {failed} failed, {:.1} s",
        start.elapsed().as_secs_f64()
    );
    if failed == 0 && compiled > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
