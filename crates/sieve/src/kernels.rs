//! `sieve kernels`: compile the CUDA kernels ahead of time, check them, time them, and write what they compute.

mod bench;
mod build;
mod capture;
mod case;
mod check;
mod on_cuda;
mod outputs;
mod place;
mod random;
mod reference;
mod run;
mod scores;
mod shape;
mod strided;

use anyhow::Result;
use clap::Subcommand;

/// Subcommands of `sieve kernels`.
#[derive(Subcommand)]
pub(crate) enum KernelsCommand {
    /// Compile kernels ahead of time into the cache; needs no GPU
    Build(build::BuildArgs),
    /// Compare every kernel and gradient on this device with references on the host
    Check(check::CheckArgs),
    /// Time the attention kernels on this GPU, parity first
    Bench(bench::BenchArgs),
    /// Write the scores that a trained DMA model gives to a text
    Capture(capture::CaptureArgs),
    /// Write one op's inputs, outputs and gradients, for other programs to check
    Run(run::RunArgs),
}

/// Runs the command.
pub(crate) fn run(command: KernelsCommand) -> Result<()> {
    match command {
        KernelsCommand::Build(args) => build::run(&args),
        KernelsCommand::Check(args) => check::run(&args),
        KernelsCommand::Bench(args) => bench::run(&args),
        KernelsCommand::Capture(args) => capture::run(&args),
        KernelsCommand::Run(args) => run::run(&args),
    }
}
