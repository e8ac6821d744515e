//! `sieve recipe new` and `sieve recipe show`.
use super::{RecipeArgs, find};
use crate::train::variable;
use crate::{shipped, terminal, text_files};
use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use sieve_core::Recipe;
use sieve_core::recipe::{AttentionKind, DataFormat, StartingSize, TokenizerTraining};
use sieve_data::{Corpus, Tokenizer};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Sizes for which the program holds recipes of all kinds.
const SHIPPED_SIZES: [&str; 4] = ["80m", "200m", "680m", "1p7b"];
/// Tokens of the tokenizer that is trained for those, and text that it is trained on.
const TRAINED: TokenizerTraining = TokenizerTraining {
    vocab_size: 32_768,
    sample_bytes: 64 << 20,
};
/// Characters of the text's beginning that become the prompt of the samples, at most.
const PROMPT_CHARACTERS: usize = 32;

fn sizes() -> PossibleValuesParser {
    let own = StartingSize::ALL.map(|size| size.name);
    PossibleValuesParser::new(own.into_iter().chain(SHIPPED_SIZES))
}

fn kinds() -> PossibleValuesParser {
    PossibleValuesParser::new(AttentionKind::ALL.map(AttentionKind::name))
}

/// Arguments of `sieve recipe new`.
#[derive(Args, Clone, Debug)]
pub(crate) struct NewArgs {
    /// Parameters besides the embedding, about: 1m takes two minutes on a CPU, 10m hours there or minutes on a GPU
    #[arg(long, default_value = "1m", value_parser = sizes())]
    size: String,
    /// Which attention: dense (mha), sliding window, latent, native sparse, dynamic mask
    #[arg(long, default_value = "dma", value_parser = kinds())]
    kind: String,
    /// Text to train on: files, folders, globs or hf://datasets/OWNER/NAME; may be repeated
    #[arg(long, value_name = "PATH", default_value = "text.txt")]
    data: Vec<String>,
    /// A Hugging Face tokenizer.json; when absent, one is trained on the text
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<String>,
    /// Set a key, for example training.steps=1000; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// The recipe to write; the terminal when absent
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Arguments of `sieve recipe show`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ShowArgs {
    /// A recipe: a path, else a name in recipes/, else the name of one inside the program; without one, their names
    recipe: Option<String>,
    /// Override a key, for example optimizer.lr=1e-3; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "recipe")]
    overrides: Vec<String>,
    /// Every key, with its meaning and its default
    #[arg(long, requires = "recipe")]
    all: bool,
}

/// Prints a recipe, or the names of all.
pub(super) fn show(args: ShowArgs) -> Result<()> {
    let Some(name) = args.recipe else {
        for name in shipped::recipe_names() {
            let text = shipped::recipe(name).unwrap_or_default();
            let about = text.lines().next().unwrap_or_default();
            terminal::line(&format!("{name:<22} {}", about.trim_start_matches("# ")));
        }
        return Ok(());
    };
    if !args.all && args.overrides.is_empty() {
        terminal::text(&find(&name)?.0);
        return Ok(());
    }
    let recipe = RecipeArgs {
        recipe: name,
        overrides: args.overrides,
    };
    terminal::text(&recipe.load()?.to_template()?);
    Ok(())
}

/// Writes a recipe to begin with.
pub(super) fn run(args: &NewArgs) -> Result<()> {
    if let Some(path) = &args.tokenizer {
        check_tokenizer(path).context("--tokenizer cannot be used")?;
    }
    let recipe = start(args)?;
    let text = format!(
        "# A recipe made by `sieve recipe new --size {} --kind {}`. Lines that are commented out hold defaults.\n\
         # `sieve plan --recipe FILE` says what it needs, `sieve train --recipe FILE` trains.\n\n{}",
        args.size,
        args.kind,
        recipe.to_template()?
    );
    match &args.out {
        None => terminal::text(&text),
        Some(out) => {
            write_new(out, &text)?;
            terminal::line(&format!("wrote {}", out.display()));
            let file = terminal::quoted(out);
            terminal::line(&terminal::next(&[
                format!("plan --recipe {file}"),
                format!("train --recipe {file}"),
            ]));
        }
    }
    Ok(())
}

/// Reads a tokenizer that is on this machine; one of the hub is fetched when it is needed.
fn check_tokenizer(path: &str) -> Result<()> {
    let path = sieve_core::paths::expand(path, &variable)?;
    if !sieve_data::is_hub_tokenizer(&path) {
        Tokenizer::from_file(Path::new(&path))?;
    }
    Ok(())
}

/// Writes a file that is not there yet.
pub(crate) fn write_new(path: &Path, text: &str) -> Result<()> {
    let created = OpenOptions::new().write(true).create_new(true).open(path);
    match created {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => bail!(
            "{} is there already\n  hint: name another file with --out, or remove this one",
            path.display()
        ),
        created => created.and_then(|mut file| file.write_all(text.as_bytes())),
    }
    .with_context(|| format!("writing {}", path.display()))
}

/// The recipe that is asked for.
fn start(args: &NewArgs) -> Result<Recipe> {
    let kind = AttentionKind::ALL.into_iter().find(|kind| kind.name() == args.kind);
    let kind = kind.context("clap takes known kinds alone")?;
    let mut sets = Vec::new();
    if let Some(prompt) = first_words(&args.data) {
        sets.push(format!("generation.prompts={:?}", [prompt]));
    }
    sets.extend(args.tokenizer.iter().map(|path| format!("tokenizer.path={path}")));
    sets.extend(args.overrides.iter().cloned());
    let mut own = StartingSize::ALL.into_iter();
    if let Some(size) = own.find(|size| size.name == args.size) {
        return Ok(size.recipe(kind, &args.data, &sets)?);
    }
    let name = format!("{}_{}.toml", args.kind, args.size);
    let text = shipped::recipe(&name).context("every kind has a recipe of each size")?;
    let text = Recipe::load(text, &name, &[]).map(|mut recipe| {
        recipe.data.paths.clone_from(&args.data);
        recipe.data.weights = None;
        recipe.data.format = DataFormat::Auto;
        recipe.model.vocab_size = None;
        recipe.tokenizer.path = None;
        recipe.tokenizer.train = Some(TRAINED);
        recipe.to_toml()
    })??;
    Ok(Recipe::load(&text, "the new recipe", &sets)?)
}

/// The beginning of the text, where it is on this machine and can be read: the model will have seen its like.
fn first_words(paths: &[String]) -> Option<String> {
    let expanded = paths.iter().map(|path| sieve_core::paths::expand(path, &variable));
    let paths = expanded.collect::<Result<_, _>>().ok()?;
    let corpus = Corpus::open(text_files::config(paths, None, "text")).ok()?;
    let text = corpus.documents().next()?.ok()?.text;
    text_files::beginning(&text, PROMPT_CHARACTERS)
}
