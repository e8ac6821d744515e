//! `sieve kernels`: compile the CUDA kernels ahead of time, check them, time them, and write what they compute.

mod build;

use anyhow::Result;
use clap::Subcommand;

/// Subcommands of `sieve kernels`.
#[derive(Subcommand)]
pub(crate) enum KernelsCommand {
    /// Compile kernels ahead of time into the cache; needs no GPU
    Build(build::BuildArgs),
}

/// Runs the command.
pub(crate) fn run(command: KernelsCommand) -> Result<()> {
    match command {
        KernelsCommand::Build(args) => build::run(&args),
    }
}
