//! `sieve data` and `sieve tokenizer`: what a run reads.
pub(crate) mod account;
mod batch;
mod generate;
pub(crate) mod prepare;
mod tokenizer;

use crate::recipe::RecipeArgs;
use anyhow::Result;
use clap::Subcommand;
use sieve_core::Recipe;
use std::path::PathBuf;

pub(crate) use tokenizer::{TokenizerCommand, run as run_tokenizer};

/// Subcommands of `sieve data`.
#[derive(Subcommand, Debug)]
pub(crate) enum DataCommand {
    /// Tokenise a recipe's text into shards; after an interruption the same command continues
    #[command(after_help = "Example: sieve data prepare --recipe mine.toml")]
    Prepare(prepare::PrepareArgs),
    /// Write training samples of the tasks of `sieve eval ruler`, as JSON lines
    #[command(
        after_help = "Example: sieve data generate --tasks niah_single_1 --tokenizer tokenizer.json --out needles.jsonl"
    )]
    Generate(generate::GenerateArgs),
    /// Write the token ids, labels and document ids of one training step as safetensors
    #[command(after_help = "Example: sieve data batch --recipe mine.toml --step 1 --out batch.safetensors")]
    Batch(batch::BatchArgs),
}

pub(crate) fn run(command: DataCommand) -> Result<()> {
    match command {
        DataCommand::Prepare(args) => prepare::run(args),
        DataCommand::Generate(args) => generate::run(&args),
        DataCommand::Batch(args) => batch::run(args),
    }
}

/// Folder of a recipe's shards: `--data-dir`, else `data.cache_dir`, else `out/RECIPE/data`, as for `sieve train`
/// without `--out`.
pub(crate) fn folder(args: &RecipeArgs, recipe: &Recipe, data_dir: Option<PathBuf>) -> Result<PathBuf> {
    Ok(match (data_dir, &recipe.data.cache_dir) {
        (Some(dir), _) => dir,
        (None, Some(dir)) => PathBuf::from(sieve_core::paths::expand(dir, &crate::train::variable)?),
        (None, None) => args.default_out().join("data"),
    })
}
