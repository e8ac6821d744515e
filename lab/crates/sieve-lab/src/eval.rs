//! The measures of `sieve eval` that are the lab's.
mod attention;
mod longbench;
mod mqar;
mod needle;
mod patterns;
mod phases;
mod ruler;
mod selectors;
mod tasks;

use crate::OwnText;
use anyhow::Result;
use clap::Subcommand;

pub(crate) use ruler::SourceArgs;

/// Subcommands of `sieve eval` that compare kinds of attention and methods of papers.
#[derive(Subcommand, Debug)]
pub enum EvalCommand {
    /// Accuracy on multi-query associative recall, by number of pairs, length and distance, or by phase
    #[command(after_help = "Example: sieve eval mqar --checkpoint out/mqar_dma")]
    Mqar(mqar::MqarArgs),
    /// A number hidden in a long prompt, asked for at its end, by length and depth, or by phase
    #[command(after_help = "Example: sieve eval needle --checkpoint out/mine --lengths 2048,8192 --plot needle.svg")]
    Needle(needle::NeedleArgs),
    /// LongBench's English tasks on its published files
    #[command(after_help = "Example: sieve eval longbench --checkpoint smollm2 --folder longbench")]
    Longbench(longbench::LongbenchArgs),
    /// RULER's tasks and others with synthetic long prompts: by length and depth
    #[command(after_help = "Example: sieve eval ruler --checkpoint smollm2 --lengths 4096,8192")]
    Ruler(ruler::RulerArgs),
    /// The tasks of language-model papers on local files: LAMBADA, HellaSwag, PIQA, ARC and others, or one of your own
    #[command(after_help = "Example: sieve eval tasks --checkpoint smollm2 --data piqa=piqa.jsonl --limit 200")]
    Tasks(tasks::TasksArgs),
    /// Sparse methods side by side on one dense model, and next to models trained with sparse attention: density,
    /// recall, times, error, loss
    #[command(after_help = "Example: sieve eval selectors --checkpoint smollm2 --data book.txt")]
    Selectors(selectors::SelectorsArgs),
    /// Where attention goes, layer by layer and head by head: weights, distances, overlap, how long keys stay; with a
    /// picture
    #[command(
        after_help = "Example: sieve eval attention --checkpoint out/quickstart --data notes.txt --plot attention.svg"
    )]
    Attention(attention::AttentionArgs),
    /// A pattern or a map for every head of a dense model, searched ahead of time: the file of `minference` and of
    /// `dam`
    #[command(after_help = "Example: sieve eval patterns --checkpoint smollm2 --data book.txt --out patterns.json")]
    Patterns(patterns::PatternsArgs),
}

/// Runs a measure; `own_text` is (name, text) of the sources and docs that the program holds, the haystack of tasks
/// that are given none.
///
/// # Errors
/// What the measure refuses, and failures of files and devices.
pub fn run(command: EvalCommand, own_text: OwnText) -> Result<()> {
    match command {
        EvalCommand::Mqar(args) => mqar::run(args),
        EvalCommand::Needle(args) => needle::run(args),
        EvalCommand::Longbench(args) => longbench::run(args),
        EvalCommand::Ruler(args) => ruler::run(args, own_text),
        EvalCommand::Tasks(args) => tasks::run(args),
        EvalCommand::Selectors(args) => selectors::run(args),
        EvalCommand::Attention(args) => attention::run(args),
        EvalCommand::Patterns(args) => patterns::run(args),
    }
}
