//! `sieve data` and `sieve tokenizer`: what a run reads.
pub(crate) mod account;
mod batch;
pub(crate) mod prepare;
mod tokenizer;

use crate::shipped;
use anyhow::Result;
use clap::Subcommand;

pub(crate) use tokenizer::{TokenizerCommand, run as run_tokenizer};

/// Subcommands of `sieve data`.
#[derive(Subcommand, Debug)]
pub(crate) enum DataCommand {
    /// Tokenise a recipe's text into shards; after an interruption the same command continues
    #[command(after_help = "Example: sieve data prepare --recipe mine.toml")]
    Prepare(prepare::PrepareArgs),
    /// Write training samples of the tasks of `sieve eval ruler`, as JSON lines
    #[command(
        display_order = crate::LAST,
        after_help = "Example: sieve data generate --tasks niah_single_1 --tokenizer tokenizer.json --out needles.jsonl"
    )]
    Generate(sieve_lab::GenerateArgs),
    /// Write the token ids, labels and document ids of one training step as safetensors
    #[command(after_help = "Example: sieve data batch --recipe mine.toml --step 1 --out batch.safetensors")]
    Batch(batch::BatchArgs),
}

pub(crate) fn run(command: DataCommand) -> Result<()> {
    match command {
        DataCommand::Prepare(args) => prepare::run(args),
        DataCommand::Generate(args) => sieve_lab::generate_data(&args, shipped::own_text()),
        DataCommand::Batch(args) => batch::run(args),
    }
}
