//! `sieve data generate`: training samples of the tasks of `sieve eval ruler`.
use crate::OwnText;
use crate::eval::SourceArgs;
use anyhow::{Context, Result, bail};
use clap::Args;
use sieve_core::ShownPath;
use sieve_data::Tokenizer;
use sieve_eval::{LongSource, LongTask, Match, Split, long_texts};
use sieve_host::out_file::OutFile;
use sieve_host::terminal;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Largest `--max-length`, in tokens: all lengths up to it are listed in memory.
const MOST_LENGTH: usize = 1 << 24;

/// Arguments of `sieve data generate`.
#[derive(Args, Debug)]
pub struct GenerateArgs {
    /// Tasks by name, in turn; RULER's thirteen when absent, without those that ask the questions of a file that is not
    /// given
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    tasks: Vec<String>,
    /// The tokenizer.json that counts tokens
    #[arg(long, value_name = "FILE")]
    tokenizer: PathBuf,
    /// Tokens of a sample at least
    #[arg(long, default_value_t = 768, value_name = "N")]
    min_length: usize,
    /// Tokens of a sample at most; multiples of 256, which `sieve eval ruler` is asked with, are left out
    #[arg(long, default_value_t = 2047, value_name = "N")]
    max_length: usize,
    /// Samples in all
    #[arg(long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    samples: u64,
    #[command(flatten)]
    source: SourceArgs,
    /// Draws the samples
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// The file of JSON lines: text, prompt, answer, task, length
    #[arg(long, value_name = "FILE")]
    out: OutFile,
}

/// Runs `sieve data generate`: writes documents of a synthetic task as JSON lines.
///
/// # Errors
/// What the arguments refuse, and failures of files.
pub fn run(args: &GenerateArgs, own_text: OwnText) -> Result<()> {
    if args.min_length > args.max_length {
        bail!(
            "--min-length {} is above --max-length {}\n  hint: the default is 768 to 2047",
            args.min_length,
            args.max_length
        );
    }
    if args.max_length > MOST_LENGTH {
        bail!(
            "--max-length {} is more than {MOST_LENGTH} tokens\n  hint: give the length of the longest training row",
            args.max_length
        );
    }
    args.out.check_new()?;
    let tasks = args.source.tasks(&args.tasks)?;
    let source = args.source.source(Split::Train, own_text)?;
    let tokenizer = Tokenizer::from_file(&args.tokenizer)?;
    let lengths: Vec<usize> =
        (args.min_length..=args.max_length).filter(|length| !length.is_multiple_of(256)).collect();
    if lengths.is_empty() {
        bail!("all lengths asked for are multiples of 256\n  hint: give a wider range");
    }
    let tasks_and_lengths = (tasks.as_slice(), lengths.as_slice());
    let write = |path: &Path| write(args, path, tasks_and_lengths, &source, &tokenizer);
    args.out.write_new(write)?;
    terminal::line(&format!(
        "wrote {} of {} to {}",
        terminal::counted(args.samples, "sample"),
        terminal::counted(tasks.len() as u64, "task"),
        args.out.shown()
    ));
    Ok(())
}

/// Writes all generated samples to the file `path`.
fn write(
    args: &GenerateArgs,
    path: &Path,
    (tasks, lengths): (&[LongTask], &[usize]),
    source: &LongSource,
    tokenizer: &Tokenizer,
) -> Result<()> {
    let cannot = || format!("cannot write {}", args.out.shown());
    let mut file = BufWriter::new(File::create(path).with_context(cannot)?);
    let template = "{bar:30} {human_pos}/{human_len} samples  {left}";
    terminal::with_bar(args.samples, template, |bar| {
        for number in 0..args.samples {
            let task = tasks[(number % tasks.len() as u64) as usize];
            // Multiples of the golden ratio, modulo 1, spread evenly over the lengths. The seed shifts them.
            let share = (number as f64 * 0.618_033_988_749_895 + args.seed as f64 * 0.37).fract();
            let length = lengths[(share * lengths.len() as f64) as usize];
            let split = (Split::Train, args.seed);
            for (sample, _) in long_texts(task, source, tokenizer, split, length, number..number + 1)?.samples {
                let answer = match sample.matching {
                    Match::All => sample.references.join(" "),
                    Match::Any => sample.references.into_iter().next().unwrap_or_default(),
                };
                let line = serde_json::json!({
                    "text": format!("{} {answer}", sample.prompt),
                    "prompt": sample.prompt,
                    "answer": answer,
                    "task": task.name(),
                    "length": length,
                });
                writeln!(file, "{line}").with_context(cannot)?;
            }
            bar.set_position(number + 1);
        }
        file.flush().with_context(cannot)
    })
}
