//! `sieve recipe new` and `sieve recipe show`.
use super::RecipeArgs;
use super::useless::useless_settings;
use crate::own_text::{OwnText, given_steps, gives_steps};
use crate::shipped;
use anyhow::{Context, Result, anyhow};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use sieve_core::recipe::{
    AttentionKind, DataFormat, MAX_SEQ_LEN, StartingSize, TokenizerTraining, least_tokens, steps_for_text,
    vocab_size_for_text,
};
use sieve_core::{Recipe, ShownPath};
use sieve_data::is_hub_model;
use sieve_host::out_file::OutFile;
use sieve_host::terminal;
use sieve_host::text_files::remark_on_missing;
use std::path::Path;

/// Sizes for which the program holds recipes of all kinds.
const SHIPPED_SIZES: [&str; 4] = ["80m", "200m", "680m", "1p7b"];
/// The tokenizer to train for a recipe of [`SHIPPED_SIZES`].
const TRAINED: TokenizerTraining = TokenizerTraining { vocab_size: 32_768, sample_bytes: 64 << 20 };
/// Path of the text in a recipe made without `--data`.
const USUAL_TEXT: &str = "text.txt";

fn sizes() -> PossibleValuesParser {
    let own = StartingSize::ALL.map(|size| size.name);
    PossibleValuesParser::new(own.into_iter().chain(SHIPPED_SIZES))
}

fn kinds() -> impl TypedValueParser<Value = AttentionKind> {
    let names = PossibleValuesParser::new(AttentionKind::ALL.map(AttentionKind::name));
    names.map(|name| AttentionKind::named(&name).expect("clap takes the names above alone"))
}

/// Arguments of `sieve recipe new`.
#[derive(Args, Clone, Debug)]
pub(crate) struct NewArgs {
    /// Parameters besides the embedding, about: 1m takes two minutes on a CPU, 10m hours there or minutes on a GPU
    #[arg(long, default_value = "1m", value_parser = sizes())]
    size: String,
    /// Tokens of a row, with about as many tokens a step; the size's own when absent. Of stages with rows of several
    /// lengths it is the longest, and the others are scaled
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_SEQ_LEN as i64))]
    context: Option<u32>,
    /// Which attention: dense (mha), sliding window, latent, native sparse, dynamic mask
    #[arg(long, default_value = "dma", value_parser = kinds())]
    kind: AttentionKind,
    /// Text to train on: files, folders, globs or hf://datasets/OWNER/NAME; may be repeated
    #[arg(long, value_name = "PATH", default_value = USUAL_TEXT)]
    data: Vec<String>,
    /// A Hugging Face tokenizer.json; when absent, one is trained on the text
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<String>,
    /// Set a key, for example training.steps=1000; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Only the keys that were chosen for the size, the kind and the text, instead of every key
    #[arg(long)]
    short: bool,
    /// The recipe to write; the terminal when absent
    #[arg(long, value_name = "FILE")]
    out: Option<OutFile>,
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

/// Runs `sieve recipe show`.
pub(super) fn show(args: ShowArgs) -> Result<()> {
    let Some(name) = args.recipe else {
        for name in shipped::recipe_names() {
            let text = shipped::recipe(name).unwrap_or_default();
            terminal::line(&format!("{name:<22} {}", first_sentence(text)));
        }
        return Ok(());
    };
    let source = RecipeArgs::new(name, args.overrides);
    let recipe = source.load()?;
    match source.found.get() {
        Some(found) if !args.all && source.overrides.is_empty() => terminal::text(&found.text),
        _ => terminal::text(&recipe.to_template()?),
    }
    Ok(())
}

/// The first sentence of the comment that a recipe begins with.
fn first_sentence(recipe: &str) -> String {
    let comment: Vec<&str> = recipe.lines().map_while(|line| line.strip_prefix("# ")).collect();
    let comment = comment.join(" ");
    let ends = comment.match_indices(". ").map(|(at, _)| at);
    let end = ends.into_iter().find(|at| comment[at + 2..].starts_with(char::is_uppercase));
    end.map_or(comment.as_str(), |at| &comment[..at]).trim_end_matches('.').to_owned()
}

/// Runs `sieve recipe new`.
pub(super) fn run(args: &NewArgs) -> Result<()> {
    args.out.iter().try_for_each(OutFile::check_new)?;
    let mut recipe = start(args, None)?;
    let (own, has_text) = OwnText::read(&recipe)?;
    if let Some(own) = &own {
        recipe = start(args, Some(own))?;
        if has_text {
            own.check_rows(&recipe)?;
        }
    }
    let [about, keys] = if args.short {
        ["`sieve recipe show FILE --all` lists the other keys.", &recipe.to_short_template()?]
    } else {
        ["Lines that are commented out hold defaults.", &recipe.to_template()?]
    };
    let text = format!(
        "# A recipe made by `sieve recipe new --size {} --kind {}`. {about}\n\
         # `sieve plan --recipe FILE` says what it needs, `sieve train --recipe FILE` trains.\n\n{keys}",
        args.size,
        args.kind.name(),
    );
    match &args.out {
        None => terminal::text(&text),
        Some(out) => {
            out.write_new_text(&text)?;
            terminal::line(&format!("wrote {}", out.shown()));
            let file = terminal::quoted(out);
            let train = RecipeArgs::new(out.to_string_lossy().into_owned(), Vec::new()).train_command();
            if let Some(train) = train.as_ref().filter(|_| !has_text) {
                terminal::line(&format!("once the text of data.paths is here: sieve {train}"));
            }
            let commands = [format!("plan --recipe {file}")].into_iter().chain(train.filter(|_| has_text));
            terminal::line(&terminal::next(&commands.collect::<Vec<_>>()));
        }
    }
    useless_settings(&recipe).iter().for_each(|words| terminal::warning(words));
    // USUAL_TEXT is a name for a file that the user adds later, so it may be missing.
    if args.data != [USUAL_TEXT] {
        remark_on_missing("--data", &args.data);
    }
    if let Some(words) = own.as_ref().and_then(|own| own.epochs(&recipe)) {
        terminal::remark(&words);
    }
    Ok(())
}

impl OwnText {
    /// The error of a text that is too short for a size, with the bytes that are enough.
    fn too_little(&self, size: &str, tokens_per_step: usize) -> anyhow::Error {
        anyhow!(
            "{} of text are too little for --size {size}, which takes {} or more\n  \
             hint: a smaller --size, more text, or --set training.steps=N",
            terminal::bytes(self.num_bytes),
            terminal::bytes((least_tokens(tokens_per_step) / self.num_tokens * self.num_bytes as f64).ceil() as u64)
        )
    }
}

/// Builds the recipe of the arguments. `own` is the text, if it is on this machine; the number of steps is fitted to
/// it.
fn start(args: &NewArgs, own: Option<&OwnText>) -> Result<Recipe> {
    let mut sets = Vec::new();
    sets.extend(own.and_then(OwnText::prompts_key));
    sets.extend(args.tokenizer.iter().map(|path| format!("tokenizer.path={path}")));
    sets.extend(args.overrides.iter().cloned());
    let recipe = of_size(args, own, &sets)?;
    // Chats and questions are read less often than a text; --set wins over these keys.
    let keys = own.map_or(Vec::new(), |own| {
        [own.keys_of_tokenizer(&recipe), own.keys_for_answers(&recipe, &args.overrides)].concat()
    });
    let mut recipe = if keys.is_empty() {
        recipe
    } else {
        Recipe::load(&recipe.to_template()?, "the new recipe", &[keys, args.overrides.clone()].concat())?
    };
    // A path of --set starts from the current folder, and in a file from the file's.
    if let Some(path) = recipe.model.initial_folder().filter(|path| !is_hub_model(Path::new(path))) {
        let full = RecipeArgs::new(String::new(), args.overrides.clone()).in_full(path, None)?;
        recipe.model.initial_weights = Some(full);
    }
    Ok(recipe)
}

/// The recipe of the arguments' size with the keys `sets`, and with the steps that `own` is worth as a text.
fn of_size(args: &NewArgs, own: Option<&OwnText>, sets: &[String]) -> Result<Recipe> {
    let context = args.context.map(|context| context as usize);
    let mut all = StartingSize::ALL.into_iter();
    if let Some(mut size) = all.find(|size| size.name == args.size) {
        if let Some(context) = context {
            size = size.with_context(context);
        }
        if let Some(own) = own.filter(|_| !gives_steps(&args.overrides)) {
            let fitted = size.for_text(own.num_bytes, own.num_tokens);
            size = fitted.ok_or_else(|| own.too_little(size.name, size.tokens_per_step()))?;
        }
        return Ok(size.recipe(args.kind, &args.data, sets)?);
    }
    let name = format!("{}_{}.toml", args.kind.name(), args.size);
    let text = shipped::recipe(&name).context("every kind has a recipe of each size")?;
    let mut recipe = Recipe::load(text, &name, &[])?;
    recipe.data.paths.clone_from(&args.data);
    recipe.data.weights = None;
    recipe.data.format = DataFormat::Auto;
    recipe.model.vocab_size = None;
    recipe.tokenizer.path = None;
    let vocab_size = own.map_or(TRAINED.vocab_size, |own| vocab_size_for_text(own.num_bytes, TRAINED.vocab_size));
    recipe.tokenizer.train = Some(TokenizerTraining { vocab_size, ..TRAINED });
    if let Some(context) = context {
        set_context(&mut recipe, context);
    }
    // Stages and the warm-up follow the number of steps, also where it is given.
    if let Some(steps) = given_steps(&args.overrides, recipe.stage.len()) {
        set_steps(&mut recipe, steps);
    } else if let Some(own) = own {
        let tokens_per_step = recipe.training.tokens_per_step();
        let fitted = steps_for_text(own.num_tokens, tokens_per_step, recipe.training.steps);
        set_steps(&mut recipe, fitted.ok_or_else(|| own.too_little(&args.size, tokens_per_step))?);
    }
    // The template, unlike the TOML, leaves out what follows from other values, which --set may change.
    Ok(Recipe::load(&recipe.to_template()?, "the new recipe", sets)?)
}

/// Sets the length of the longest stage's rows to `seq_len`, and scales the rows of other stages with it. Batch sizes
/// follow, so that a step and a micro-batch keep about the same number of tokens.
fn set_context(recipe: &mut Recipe, seq_len: usize) {
    let longest = recipe.stages().iter().map(|stage| stage.section.seq_len).max().unwrap_or(seq_len);
    let resize = |row: &mut usize, local: &mut usize, global: &mut usize| {
        let before = *row;
        *row = (before * seq_len / longest).max(1);
        let rows = |rows: usize| (rows * before / *row).max(1);
        let rounds = rows(*global).div_ceil(rows(*local));
        *local = rows(*local);
        *global = rounds * *local;
    };
    let training = &mut recipe.training;
    resize(&mut training.seq_len, &mut training.local_batch_size, &mut training.global_batch_size);
    for stage in &mut recipe.stage {
        resize(&mut stage.seq_len, &mut stage.local_batch_size, &mut stage.global_batch_size);
    }
    recipe.model.max_position_embeddings = seq_len;
}

/// Sets the number of steps, and shortens stages in proportion, each to one step at least. The learning rate warms up
/// over a fifth of the steps at most.
fn set_steps(recipe: &mut Recipe, steps: usize) {
    let before = recipe.training.steps.max(1);
    let (mut passed, mut end) = (0, 0);
    for stage in &mut recipe.stage {
        passed += stage.steps;
        let begin = end;
        end = (passed * steps / before).max(begin + 1);
        stage.steps = end - begin;
    }
    recipe.training.steps = if recipe.stage.is_empty() { steps } else { end };
    let warmup_steps = &mut recipe.lr_scheduler.warmup_steps;
    *warmup_steps = (*warmup_steps).min(recipe.training.steps / 5);
}
