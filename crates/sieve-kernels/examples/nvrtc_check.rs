//! Compiles every specialisation of `kernels/manifest.toml` with NVRTC, the compiler that users' machines run, from the
//! exact text a launch would send. Needs no GPU: `nvrtc_check CUDA_PATH`, with libnvrtc's folder on LD_LIBRARY_PATH.
#![allow(clippy::print_stdout, clippy::print_stderr)]
use sieve_kernels::{SourceKernel, ahead_of_time::compile_with_nvrtc};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let Some(cuda_path) = std::env::args().nth(1) else {
        eprintln!("usage: nvrtc_check CUDA_PATH   (the folder with include/cuda_bf16.h)");
        return ExitCode::FAILURE;
    };
    let manifest = include_str!("../../../kernels/manifest.toml");
    let manifest: toml::Table = manifest
        .parse()
        .expect("`cargo xtask tidy` checks the manifest");
    let start = Instant::now();
    let (mut compiled, mut failed) = (0, 0);
    for (kernel, archs) in specialisations(&manifest) {
        for arch in &archs {
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

/// The manifest's kernels, each with its defines, and the architectures it is for.
fn specialisations(manifest: &toml::Table) -> Vec<(SourceKernel, Vec<String>)> {
    let mut kernels = Vec::new();
    for block in manifest["kernel"].as_array().expect("a list of kernels") {
        let file = block["file"].as_str().expect("a file name");
        let name: &'static str = file.trim_end_matches(".cu").to_owned().leak();
        let archs = match block.get("arch").and_then(toml::Value::as_array) {
            Some(archs) => archs.iter().filter_map(toml::Value::as_str).collect(),
            None => vec!["sm_80", "sm_90a"],
        };
        let archs: Vec<String> = archs.into_iter().map(str::to_owned).collect();
        let empty = toml::Table::new();
        let common = block
            .get("defines")
            .and_then(toml::Value::as_table)
            .unwrap_or(&empty);
        let variants = block
            .get("variants")
            .and_then(toml::Value::as_array)
            .cloned();
        for variant in variants.unwrap_or_else(|| vec![toml::Value::Table(toml::Table::new())]) {
            let mut defines = common.clone();
            defines.extend(variant.as_table().expect("a table of defines").clone());
            let kernel = defines
                .iter()
                .fold(SourceKernel::new(name), |kernel, (define, value)| {
                    let define: &'static str = define.clone().leak();
                    match value.as_str() {
                        Some(text) => kernel.define(define, text),
                        None => kernel.define(define, value),
                    }
                });
            kernels.push((kernel, archs.clone()));
        }
    }
    kernels
}
