//! `sieve`: trains, evaluates and exports language models with learned sparse attention.

mod compare;
mod data;
mod device;
mod eval;
mod exit;
mod export;
mod generate;
mod import;
mod interrupt;
mod kernels;
mod launch;
mod loaded;
mod logits;
mod out_of_memory;
mod paths;
mod plan;
mod recipe;
mod selector;
mod shipped;
mod startup;
mod terminal;
mod text_files;
mod train;

use clap::{Parser, Subcommand};
use exit::Exit;
use mimalloc::MiMalloc;
use std::process::ExitCode;

/// Keeps what tensors free: the system's allocator gives large buffers back at once, and a step on the CPU then spends half
/// its time on page faults.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

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
    /// Start several processes on this host that train together, one for each GPU
    Launch(launch::LaunchArgs),
    /// Say what a recipe needs before it runs: parameters, FLOPs, memory, cache, time
    Plan(plan::PlanArgs),
    /// Continue a prompt with a trained model
    Generate(generate::GenerateArgs),
    /// Measure a trained model
    #[command(subcommand)]
    Eval(eval::EvalCommand),
    /// Show runs side by side in one HTML page: recipes, curves, speed, memory, evaluations
    Compare(compare::CompareArgs),
    /// Write a trained model in the Hugging Face layout
    Export(export::ExportArgs),
    /// Read a Qwen3 or Doge model in the Hugging Face layout as a checkpoint
    Import(import::ImportArgs),
    /// Write raw model output, to compare with other programs
    Logits(logits::LogitsArgs),
    /// Prepare and inspect what a run reads
    #[command(subcommand)]
    Data(data::DataCommand),
    /// List what a recipe may hold
    #[command(subcommand)]
    Recipe(recipe::RecipeCommand),
    /// Make a tokenizer
    #[command(subcommand)]
    Tokenizer(data::TokenizerCommand),
    /// Compile, check, time and run the CUDA kernels
    #[command(subcommand)]
    Kernels(kernels::KernelsCommand),
}

fn main() -> ExitCode {
    startup::mark();
    terminal::install_panic_message();
    let done = |result: anyhow::Result<()>| result.map(|()| Exit::Done);
    let result = match Cli::parse().command {
        Command::Train(args) => train::run(args),
        Command::Launch(args) => {
            // What the processes would refuse one by one is refused here, once.
            Cli::parse_from(
                std::iter::once("sieve").chain(args.command.iter().map(String::as_str)),
            );
            launch::run(&args)
        }
        other => done(run(other)),
    };
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            terminal::print_error(&error);
            Exit::Failed.into()
        }
    }
}

/// A command that ends well or with an error.
fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Train(_) | Command::Launch(_) => unreachable!("their exit codes say more"),
        Command::Plan(args) => plan::run(args),
        Command::Generate(args) => paths::told(generate::run(args)),
        Command::Eval(command) => paths::told(eval::run(command)),
        Command::Compare(args) => compare::run(&args),
        Command::Export(args) => export::run(args),
        Command::Import(args) => import::run(args),
        Command::Logits(args) => paths::told(logits::run(args)),
        Command::Data(command) => data::run(command),
        Command::Recipe(command) => {
            recipe::run(command);
            Ok(())
        }
        Command::Tokenizer(command) => data::run_tokenizer(command),
        Command::Kernels(command) => kernels::run(command),
    }
}
