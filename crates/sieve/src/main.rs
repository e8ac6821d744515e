//! `sieve`: trains, evaluates and exports language models with learned sparse attention.

mod data;
mod device;
mod interrupt;
mod recipe;
mod terminal;
mod train;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Trains, evaluates and exports language models whose attention is learned to be sparse.
#[derive(Parser)]
#[command(name = "sieve", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model from a recipe
    Train(train::TrainArgs),
    /// Inspect what a run reads
    #[command(subcommand)]
    Data(data::DataCommand),
}

fn main() -> ExitCode {
    terminal::install_panic_message();
    let result = match Cli::parse().command {
        Command::Train(args) => train::run(args),
        Command::Data(command) => data::run(command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            terminal::print_error(&error);
            ExitCode::FAILURE
        }
    }
}
