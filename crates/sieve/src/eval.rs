//! `sieve eval`: how good a model is.

mod mqar;
mod ppl;
mod selectors;

use anyhow::Result;
use clap::Subcommand;

/// Subcommands of `sieve eval`.
#[derive(Subcommand, Debug)]
pub(crate) enum EvalCommand {
    /// Perplexity and bits per byte on text
    Ppl(ppl::PplArgs),
    /// Accuracy on multi-query associative recall, by number of pairs, length and distance
    Mqar(mqar::MqarArgs),
    /// Sparse methods side by side on one dense model: density, recall, times, error, loss
    Selectors(selectors::SelectorsArgs),
}

/// Runs the command.
pub(crate) fn run(command: EvalCommand) -> Result<()> {
    match command {
        EvalCommand::Ppl(args) => ppl::run(args),
        EvalCommand::Mqar(args) => mqar::run(args),
        EvalCommand::Selectors(args) => selectors::run(args),
    }
}
