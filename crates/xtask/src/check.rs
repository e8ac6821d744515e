//! `cargo xtask check`: what CI runs, cheapest first.
use crate::{gpu, kernels, tidy, workspace};
use anyhow::Result;

/// Runs all checks; with `on_gpu` also every kernel on this machine's GPU.
pub(crate) fn run(on_gpu: bool) -> Result<()> {
    if on_gpu {
        gpu::require()?;
    }
    // A macro declares the selectors of prefill as modules, so `cargo fmt` does not find their files by itself.
    let files = workspace::files()?;
    let selectors = files.iter().filter(|file| file.starts_with("crates/sieve-select/src/prefill/"));
    let mut fmt = vec!["fmt", "--all", "--", "--check"];
    fmt.extend(selectors.map(String::as_str));
    workspace::run("cargo", &fmt)?;
    tidy::run()?;
    workspace::cargo("clippy --release --workspace --all-targets -- -D warnings")?;
    workspace::cargo("test --release --workspace")?;
    kernels::run(None)?;
    if on_gpu {
        gpu::run()?;
    }
    println!("check: all green");
    Ok(())
}
