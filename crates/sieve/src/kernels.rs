//! `sieve kernels`: compiles the CUDA kernels ahead of time; the lab checks and times them.
use crate::recipe::RecipeArgs;
use anyhow::Result;
use clap::{Args, Subcommand};
use sieve_host::kernels_ahead::{BuildSettings, build};
use std::path::PathBuf;

/// Subcommands of `sieve kernels`.
#[derive(Subcommand)]
pub(crate) enum KernelsCommand {
    /// Compile kernels ahead of time into the cache; needs no GPU
    #[command(after_help = "Example: sieve kernels build --recipe dma_1p7b --arch sm_90a --out kernels")]
    Build(BuildArgs),
    #[command(flatten)]
    Lab(sieve_lab::KernelsCommand),
}

/// Arguments of `sieve kernels build`.
#[derive(Args, Debug)]
pub(crate) struct BuildArgs {
    /// The recipe whose training and decoding kernels are compiled; without it, all kernels that ship are
    #[arg(long, value_name = "FILE")]
    pub(crate) recipe: Option<String>,
    /// Override a key of the recipe, for example training.deterministic=true; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "recipe")]
    pub(crate) overrides: Vec<String>,
    /// sm_80, sm_86, sm_89, sm_90a, sm_100a or sm_120a; may be repeated. The GPU of this machine when absent
    #[arg(long, value_name = "ARCH")]
    pub(crate) arch: Vec<String>,
    /// The cache to fill, to be copied to another machine's $XDG_CACHE_HOME/sieve; this machine's when absent
    #[arg(long, value_name = "DIR", value_parser = sieve_host::out_file::on_this_machine())]
    pub(crate) out: Option<PathBuf>,
}

pub(crate) fn run(command: KernelsCommand) -> Result<()> {
    match command {
        KernelsCommand::Build(args) => run_build(args),
        KernelsCommand::Lab(command) => sieve_lab::kernels(command),
    }
}

/// Runs `sieve kernels build`.
fn run_build(args: BuildArgs) -> Result<()> {
    let overrides = args.overrides;
    let recipe = args.recipe.map(|recipe| RecipeArgs::new(recipe, overrides).load());
    let settings = BuildSettings {
        recipe: recipe.transpose()?,
        arch: args.arch,
        root: match args.out {
            Some(folder) => folder,
            None => sieve_host::device::cache_root()?,
        },
    };
    build(&settings)
}
