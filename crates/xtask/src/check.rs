//! `cargo xtask check`: what CI runs, cheapest first.
use crate::{gpu, tidy, workspace};
use anyhow::Result;

/// Runs all checks; with `on_gpu` also every kernel on this machine's GPU.
pub(crate) fn run(on_gpu: bool) -> Result<()> {
    if on_gpu {
        gpu::require()?;
    }
    workspace::cargo("fmt --all -- --check")?;
    tidy::run()?;
    workspace::cargo("clippy --release --workspace --all-targets -- -D warnings")?;
    workspace::cargo("test --release --workspace")?;
    workspace::cargo("xtask kernels")?;
    if on_gpu {
        gpu::run()?;
    }
    println!("check: all green");
    Ok(())
}
