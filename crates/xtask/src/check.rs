//! What CI runs, cheapest first.
use crate::{kernels, tidy, workspace};
use anyhow::Result;

/// Runs all checks; with `gpu` also the parity of every kernel on this machine's GPU.
pub(crate) fn run(gpu: bool) -> Result<()> {
    workspace::run("cargo", &["fmt", "--all", "--", "--check"])?;
    tidy::run()?;
    workspace::run(
        "cargo",
        &[
            "clippy",
            "--release",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ],
    )?;
    workspace::run("cargo", &["test", "--release", "--workspace"])?;
    kernels::run(None)?;
    if gpu {
        workspace::run("cargo", &["run", "--release", "--", "kernels", "check"])?;
    }
    println!("check: all green");
    Ok(())
}
