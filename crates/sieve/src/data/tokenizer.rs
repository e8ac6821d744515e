//! `sieve tokenizer train`: a byte-level BPE from text.
use crate::recipe::RecipeArgs;
use anyhow::{Context, Result};
use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use sieve_core::ShownPath;
use sieve_data::{BpeConfig, Corpus, HubConfig, Tokenizer};
use sieve_host::out_file::OutFile;
use sieve_host::text_files::{Beginning, FormatArg};
use sieve_host::{hub, terminal, text_files};
use sieve_train::corpus_configs;
use std::path::Path;

/// Subcommands of `sieve tokenizer`.
#[derive(Subcommand, Debug)]
pub(crate) enum TokenizerCommand {
    /// Train a byte-level BPE on text and write its tokenizer.json
    #[command(after_help = "Example: sieve tokenizer train --data notes.txt --vocab-size 4096 --out tokenizer.json")]
    Train(TrainArgs),
}

/// Arguments of `sieve tokenizer train`.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("text").required(true).args(["recipe", "data"])))]
pub(crate) struct TrainArgs {
    /// Train on the text of this recipe: a path, else a name in recipes/
    #[arg(long, value_name = "FILE")]
    recipe: Option<String>,
    /// Override a key of the recipe; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", conflicts_with = "data")]
    overrides: Vec<String>,
    /// Train on these files, folders, globs or data sets (hf://datasets/OWNER/NAME); may be repeated
    #[arg(long, value_name = "PATH")]
    data: Vec<String>,
    /// How the files of --data hold documents; by their ending when absent
    #[arg(long, value_enum, conflicts_with = "recipe")]
    format: Option<FormatArg>,
    /// JSONL and Parquet: the column that holds the text
    #[arg(long, default_value = "text", conflicts_with = "recipe")]
    text_column: String,
    /// Tokens in all, special ones included; the recipe's when absent
    // Training reserves memory for all of them.
    #[arg(long, value_parser = clap::value_parser!(u32).range(258..=1 << 24))]
    vocab_size: Option<u32>,
    /// Text to train on, at most, in bytes; the recipe's when absent, else 16 MiB
    #[arg(long)]
    sample_bytes: Option<u64>,
    /// The tokenizer.json to write
    #[arg(long, value_name = "FILE")]
    out: OutFile,
}

const DEFAULT_SAMPLE_BYTES: u64 = 16 << 20;

/// Runs `sieve tokenizer train`: trains on the recipe's text or on `--data`, writes the tokenizer.json and prints how
/// many bytes of text a token holds.
pub(crate) fn run(command: TokenizerCommand) -> Result<()> {
    let TokenizerCommand::Train(args) = command;
    let variable = &sieve_host::environment::variable;
    let (config, from_recipe) = match &args.recipe {
        Some(recipe) => {
            let recipe = RecipeArgs::new(recipe.clone(), args.overrides.clone());
            let (recipe, text) = recipe.load_with_text()?;
            terminal::lines(text);
            // `.0` is the training text; validation text has a corpus of its own.
            (corpus_configs(&recipe, variable)?.0, recipe.tokenizer.train)
        }
        None => {
            let expanded = args.data.iter();
            let paths =
                expanded.map(|path| sieve_core::paths::expand(path, variable)).collect::<Result<Vec<_>, _>>()?;
            let config = text_files::config(paths, args.format, &args.text_column);
            (config, None)
        }
    };
    let vocab_size = args
        .vocab_size
        .map(|vocab_size| vocab_size as usize)
        .or(from_recipe.as_ref().map(|training| training.vocab_size))
        .context("--vocab-size is missing, and no recipe with tokenizer.train names one")?;
    let sample_bytes = args
        .sample_bytes
        .or(from_recipe.as_ref().map(|training| training.sample_bytes))
        .unwrap_or(DEFAULT_SAMPLE_BYTES);
    args.out.check_new()?;
    let mut corpus = Corpus::open(config)?;
    // Files fetched from the hub are kept in OUT.hub, beside the tokenizer.
    corpus.connect(&HubConfig::new(&hub::surroundings(), args.out.with_extension("hub")))?;
    corpus.check_text_column(&args.text_column)?;
    text_files::warn_of_json(&corpus);
    terminal::line(&format!(
        "training a byte-level BPE of {vocab_size} tokens on up to {} of {}",
        terminal::bytes(sample_bytes),
        terminal::counted(corpus.files().len() as u64, "file")
    ));
    let config = BpeConfig { vocab_size, sample_bytes };
    let tokenizer = Tokenizer::train(&corpus, config)?;
    let text = tokenizer.to_json()?;
    args.out.write_new_text(&text)?;
    let beginning = Beginning::read(&corpus, Some(&tokenizer))?;
    terminal::line(&format!(
        "wrote {}: {} tokens, {:.2} bytes of text a token on the first {}",
        args.out.shown(),
        terminal::thousands(tokenizer.vocab_size() as u64),
        beginning.bytes_per_token(),
        terminal::bytes(beginning.num_bytes as u64)
    ));
    terminal::lines(next(&args).map(|command| terminal::next(&[command])));
    Ok(())
}

/// The command that uses the tokenizer; `None` for a recipe that came through a pipe.
fn next(args: &TrainArgs) -> Option<String> {
    if let Some(recipe) = &args.recipe {
        // The run reads this tokenizer, and trains none.
        let others = args.overrides.iter().filter(|item| !item.starts_with("tokenizer."));
        let train = RecipeArgs::new(recipe.clone(), others.cloned().collect()).train_command()?;
        let key = format!("tokenizer.path={}", args.out.to_string_lossy().replace('$', "$$"));
        return Some(format!("{train} --set {}", terminal::shell_word(&key)));
    }
    let data = args.data.iter().map(|path| format!(" --data {}", terminal::quoted(Path::new(path))));
    let format = args.format.and_then(|format| format.to_possible_value());
    let format = format.map(|format| format!(" --set data.format={}", format.get_name()));
    let column = Some(&args.text_column).filter(|column| *column != "text");
    let column = column.map(|column| format!(" --set {}", terminal::shell_word(&format!("data.text_column={column}"))));
    // `recipe new` replaces no file.
    let first = args.data.first().map_or(Path::new(""), Path::new);
    let stem = first.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let stem = if stem.contains(['*', '?', '[']) || stem.is_empty() { "recipe".to_owned() } else { stem };
    let names = (1..).map(|number| if number == 1 { format!("{stem}.toml") } else { format!("{stem}-{number}.toml") });
    let free = names.into_iter().find(|name| !Path::new(name).exists())?;
    Some(format!(
        "recipe new{} --tokenizer {}{}{} --out {}",
        data.collect::<String>(),
        terminal::quoted(&args.out),
        format.unwrap_or_default(),
        column.unwrap_or_default(),
        terminal::quoted(Path::new(&free))
    ))
}
