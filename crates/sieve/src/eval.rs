//! `sieve eval`: perplexity, and the lab's measures.
mod ppl;

use crate::shipped;
use anyhow::Result;
use clap::Subcommand;
use sieve_host::evaluation::so_far;
use sieve_host::exit::Exit;

/// Subcommands of `sieve eval`: first what every user of a model asks, then the lab's.
#[derive(Subcommand, Debug)]
pub(crate) enum EvalCommand {
    /// Perplexity and bits per byte on text
    #[command(after_help = "Example: sieve eval ppl --checkpoint out/quickstart --data notes.txt")]
    Ppl(ppl::PplArgs),
    #[command(flatten)]
    Lab(sieve_lab::EvalCommand),
}

pub(crate) fn run(command: EvalCommand) -> Result<Exit> {
    so_far::watch();
    match command {
        EvalCommand::Ppl(args) => ppl::run(args),
        EvalCommand::Lab(command) => sieve_lab::eval(command, shipped::own_text()).map(|()| Exit::Done),
    }
}
