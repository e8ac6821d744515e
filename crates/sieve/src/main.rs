//! `sieve`: trains, evaluates and exports language models with learned sparse attention.

mod allocator;
mod chat;
mod completion;
mod data;
mod elsewhere;
mod epochs;
mod eval;
mod export;
mod generate;
mod import;
mod info;
mod kernels;
mod launch;
mod logits;
mod manual;
mod own_text;
mod plan;
mod recipe;
mod serve;
mod shipped;
mod startup;
mod train;

use clap::{Args, CommandFactory, Parser, Subcommand};
use sieve_host::exit::Exit;
use sieve_host::out_file::on_this_machine;
use sieve_host::terminal::Loudness;
use sieve_host::{interrupt, out_of_memory, paths, terminal};
use std::path::PathBuf;
use std::process::ExitCode;

/// Trains, evaluates and exports language models whose attention is learned to be sparse.
#[derive(Parser)]
#[command(name = "sieve", version = VERSION, arg_required_else_help = true, after_help = of_lab())]
struct Cli {
    #[command(flatten)]
    output: OutputArgs,
    #[command(subcommand)]
    command: Command,
}

/// The lab's commands as the end of `sieve --help`: each command that has some, and their names.
fn of_lab() -> String {
    let line = |name: &'static str, lab: fn(clap::Command) -> clap::Command| {
        let lab = lab(clap::Command::new(name));
        let names = lab.get_subcommands().map(clap::Command::get_name).collect::<Vec<_>>().join(", ");
        format!("\n  {name:<8} {names}")
    };
    let eval = line("eval", sieve_lab::EvalCommand::augment_subcommands);
    let kernels = line("kernels", sieve_lab::KernelsCommand::augment_subcommands);
    format!("Commands of the lab, which compare and measure:\n  compare\n  data     generate{eval}{kernels}")
}

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("SIEVE_COMMIT"), ")");

/// How much any command prints, and where to.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Print only results, warnings and errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Print more: the device, and all numbers of each logged step
    #[arg(short, long, global = true)]
    verbose: bool,
    /// Also append all that is printed to this file
    #[arg(long, global = true, value_name = "FILE", value_parser = on_this_machine())]
    log_file: Option<PathBuf>,
}

impl OutputArgs {
    /// Adds these flags to the words of a command that `launch` starts, unless they say it themselves.
    fn hand_on(&self, words: &mut Vec<String>) {
        let has = |names: &[&str]| words.iter().any(|word| names.contains(&word.split('=').next().unwrap_or_default()));
        let is_loud = has(&["-q", "--quiet", "-v", "--verbose"]);
        let flags = [(self.quiet, "--quiet"), (self.verbose, "--verbose")]
            .into_iter()
            .filter(|(is_set, _)| *is_set && !is_loud);
        let mut more: Vec<String> = flags.map(|(_, flag)| flag.to_owned()).collect();
        if let Some(path) = self.log_file.as_ref().filter(|_| !has(&["--log-file"])) {
            more.push(format!("--log-file={}", path.to_string_lossy()));
        }
        words.extend(more);
    }
}

/// Place of the lab's commands in a list: behind a user's, before `help`.
pub(crate) const LAST: usize = 900;

#[derive(Subcommand)]
enum Command {
    /// Train a model from a recipe
    #[command(after_help = "Example: sieve train --recipe quickstart.toml --set training.steps=200 --out out/mine")]
    Train(train::TrainArgs),
    /// Start several processes on this host, one for each GPU, that train together or use a divided model
    #[command(after_help = "Example: sieve launch --nproc 8 train --recipe dma_1p7b")]
    Launch(launch::LaunchArgs),
    /// Print what a recipe needs before it runs: parameters, FLOPs, memory, cache, time
    #[command(after_help = "Example: sieve plan --recipe dma_1p7b --gpu h200")]
    Plan(plan::PlanArgs),
    /// Continue a prompt with a trained model
    #[command(
        after_help = "Example: sieve generate --checkpoint out/quickstart --prompt 'fn main' --max-new-tokens 100"
    )]
    Generate(generate::GenerateArgs),
    /// Talk to an instruct model in the terminal
    #[command(after_help = "Example: sieve chat --checkpoint hf://HuggingFaceTB/SmolLM2-135M-Instruct")]
    Chat(chat::ChatArgs),
    /// Answer requests with a trained model: an OpenAI-compatible server
    #[command(after_help = "Example: sieve serve --checkpoint out/quickstart --port 8000")]
    Serve(serve::ServeArgs),
    /// Measure a trained model
    #[command(subcommand)]
    Eval(eval::EvalCommand),
    /// Show runs side by side in one HTML page: recipes, curves, speed, memory, evaluations
    #[command(display_order = LAST, after_help = "Example: sieve compare out/mha out/dma --out compare.html")]
    Compare(sieve_lab::CompareArgs),
    /// Write a trained model in the Hugging Face layout
    #[command(after_help = "Example: sieve export --checkpoint out/quickstart --out exported")]
    Export(export::ExportArgs),
    /// Import a model in the Hugging Face layout, from a folder or from the Hugging Face hub, as a checkpoint
    #[command(after_help = "Example: sieve import --from qwen --out in/qwen --attention dma \
                      --set attention.keep_window_size=1024")]
    Import(import::ImportArgs),
    /// Write raw model output, to compare with other programs
    #[command(after_help = "Example: sieve logits --checkpoint out/quickstart --tokens 1,2,3 --out logits.safetensors")]
    Logits(logits::LogitsArgs),
    /// Prepare and inspect what a run reads
    #[command(subcommand)]
    Data(data::DataCommand),
    /// Make a recipe, show one, and list what it may contain
    #[command(subcommand)]
    Recipe(recipe::RecipeCommand),
    /// Make a tokenizer
    #[command(subcommand)]
    Tokenizer(data::TokenizerCommand),
    /// Compile, check, time and run the CUDA kernels
    #[command(subcommand)]
    Kernels(kernels::KernelsCommand),
    /// Print what this program is and what this machine offers: versions, GPUs, libraries, paths of attention
    #[command(after_help = "Example: sieve info --json")]
    Info(info::InfoArgs),
    /// Print a script that completes this program's commands in a shell
    #[command(after_help = "Example: sieve completions bash")]
    Completions(manual::CompletionsArgs),
    /// Write manual pages
    #[command(after_help = "Example: sieve man --out man1")]
    Man(manual::ManArgs),
}

/// Begins with what must come before the arguments are read: completion in a shell, the clock of the start, the message
/// of a panic.
fn main() -> ExitCode {
    completion::answer(Cli::command);
    startup::mark();
    terminal::install_panic_message(out_of_memory::message);
    interrupt::have_large_files_refused();
    let cli = Cli::try_parse().unwrap_or_else(|error| {
        let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
        elsewhere::refuse(&Cli::command(), &error, &words.collect::<Vec<_>>())
    });
    let result = match open_output(&cli.output).and_then(|()| startup::check_variables()).map(|()| cli.command) {
        Err(error) => Err(error),
        Ok(command) => run(command, &cli.output),
    };
    let exit = result.unwrap_or_else(|error| {
        terminal::print_error(&error);
        Exit::Failed
    });
    terminal::after_lost_output(exit).into()
}

/// Opens the terminal and the log file as the flags say; `--quiet` counts more than `--verbose`.
fn open_output(args: &OutputArgs) -> anyhow::Result<()> {
    let loudness = match (args.quiet, args.verbose) {
        (true, _) => Loudness::Quiet,
        (_, true) => Loudness::Verbose,
        _ => Loudness::Usual,
    };
    terminal::open(loudness, args.log_file.as_deref())
}

/// Runs a command. Those that use a trained model end with a line for each op that took its reference, not a kernel.
fn run(command: Command, output: &OutputArgs) -> anyhow::Result<Exit> {
    let done = |result: anyhow::Result<()>| result.map(|()| Exit::Done);
    match command {
        Command::Train(args) => train::run(args),
        Command::Launch(mut args) => {
            output.hand_on(&mut args.command);
            // A bad command line is refused once here instead of by each process.
            let words = std::iter::once("sieve".to_owned()).chain(args.command.iter().cloned());
            let words: Vec<String> = words.collect();
            Cli::try_parse_from(&words).unwrap_or_else(|error| elsewhere::refuse(&Cli::command(), &error, &words));
            launch::run(&args)
        }
        Command::Plan(args) => done(plan::run(args)),
        Command::Generate(args) => paths::with_reference_lines(generate::run(args)),
        Command::Chat(args) => done(paths::with_reference_lines(chat::run(args))),
        Command::Serve(args) => done(paths::with_reference_lines(serve::run(args))),
        Command::Eval(command) => paths::with_reference_lines(eval::run(command)),
        Command::Compare(args) => done(sieve_lab::compare(&args)),
        Command::Export(args) => done(export::run(args)),
        Command::Import(args) => done(import::run(args)),
        Command::Logits(args) => done(paths::with_reference_lines(logits::run(args))),
        Command::Data(command) => done(data::run(command)),
        Command::Recipe(command) => done(recipe::run(command)),
        Command::Tokenizer(command) => done(data::run_tokenizer(command)),
        Command::Kernels(command) => done(kernels::run(command)),
        Command::Info(args) => done(info::run(args)),
        Command::Completions(args) => done(manual::completions(args)),
        Command::Man(args) => done(manual::man(&args, Cli::command())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_host::out_file::PictureFile;

    /// What is not a user's own command in these lists is the lab's.
    #[test]
    fn the_lab_s_commands_are_last_in_every_list_and_all_named_at_the_end() {
        let cli = Cli::command();
        let mut own_of_groups = Vec::new();
        for (group, own) in [("data", &["prepare", "batch"][..]), ("eval", &["ppl"]), ("kernels", &["build"])] {
            let group = cli.find_subcommand(group).expect("a command");
            let mut names: Vec<_> =
                group.get_subcommands().map(|inner| (inner.get_display_order(), inner.get_name())).collect();
            names.sort_by_key(|(order, _)| *order);
            let (first, lab) = names.split_at(own.len());
            assert!(first.iter().all(|(_, name)| own.contains(name)), "{names:?}");
            let line =
                format!("\n  {:<8} {}", group.get_name(), lab.iter().map(|lab| lab.1).collect::<Vec<_>>().join(", "));
            assert!(of_lab().contains(&line), "{line} is not in {}", of_lab());
            own_of_groups.push(line);
        }
        let last = cli.get_subcommands().max_by_key(|command| command.get_display_order()).expect("commands");
        assert_eq!(last.get_name(), "compare");
        assert_eq!(of_lab().lines().count(), 2 + own_of_groups.len(), "{}", of_lab());
    }

    #[test]
    fn every_flag_that_draws_takes_the_name_of_a_picture() {
        let cli = Cli::command();
        let (mut open, mut drawing) = (vec![(&cli, String::from("sieve"))], Vec::new());
        while let Some((command, name)) = open.pop() {
            for argument in command.get_arguments() {
                let is_picture = argument.get_value_parser().type_id() == std::any::TypeId::of::<PictureFile>();
                let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
                let draws = help.starts_with("Draw ") && !help.starts_with("Draw only")
                    || help.starts_with("Also draw")
                    || help.contains("an SVG");
                let flag = format!("{name} --{}", argument.get_long().unwrap_or_default());
                assert_eq!(is_picture, draws, "{flag}: {help}");
                drawing.extend(is_picture.then_some(flag));
            }
            open.extend(command.get_subcommands().map(|inner| (inner, format!("{name} {}", inner.get_name()))));
        }
        drawing.sort();
        let evals = ["attention", "mqar", "needle", "ppl", "ruler", "selectors"];
        let mut known = evals.map(|name| format!("sieve eval {name} --plot")).to_vec();
        known.push("sieve eval selectors --scores".to_owned());
        assert_eq!(drawing, known);
    }
}
