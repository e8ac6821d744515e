//! `sieve import`: a model in the Hugging Face layout as a checkpoint.
use crate::own_text::{OwnText, gives_steps};
use anyhow::{Context, Result, bail};
use burn_flex::{Flex, FlexDevice};
use clap::Args;
use sieve_core::kinds::names_of_kinds;
use sieve_core::recipe::{AttentionKind, StageSection, fine_tuning_steps};
use sieve_core::{Attention, InitialWeights, NumberFormat, ShownPath, model_line};
use sieve_data::Tokenizer;
use sieve_hf::{Checkpoint, ImportReport, refuse_odd_file, refuse_odd_model};
use sieve_host::ask::Ask;
use sieve_host::out_file::on_this_machine;
use sieve_host::out_file::write_text;
use sieve_host::out_of_memory::MemoryArgs;
use sieve_host::terminal::FolderBar;
use sieve_host::text_files::remark_on_missing;
use sieve_host::{hub, loaded, terminal};
use std::path::{Path, PathBuf};

/// Arguments of `sieve import`.
#[derive(Args, Debug)]
pub(crate) struct ImportArgs {
    #[arg(long, value_name = "HF_DIR", help = from_help())]
    from: PathBuf,
    /// Folder to write the checkpoint step-0 into
    #[arg(long, value_name = "DIR", value_parser = on_this_machine())]
    out: PathBuf,
    /// Text for the recipe that is written next to the checkpoint: files, folders, globs; may be repeated
    #[arg(long, value_name = "PATH")]
    data: Vec<String>,
    #[arg(long, value_name = "KIND", help = attention_help())]
    attention: Option<String>,
    /// With --attention: leave out trained tensors that the new attention has no place for, such as an indexer
    #[arg(long, requires = "attention")]
    drop: bool,
    /// Set a key of the checkpoint's recipe, for example attention.keep_window_size=1024; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    memory: MemoryArgs,
}

/// The help of `--from`.
fn from_help() -> String {
    format!(
        "Folder of a {} model in the Hugging Face layout: config.json, tokenizer.json, safetensors; or a model on the \
         Hugging Face hub, hf://OWNER/NAME or hf://OWNER/NAME@REVISION",
        sieve_hf::importable_families()
    )
}

/// The help of `--attention`.
fn attention_help() -> String {
    let kinds = names_of_kinds(AttentionKind::of_grouped_weights().filter(|kind| *kind != Attention::DENSE.kind()));
    format!(
        "Give the model a different attention, with a recipe's defaults: {kinds}; --set changes its sizes, --set \
         attention.preset=paper takes the published form"
    )
}

/// Runs `sieve import`: makes a checkpoint from a published model.
pub(crate) fn run(mut args: ImportArgs) -> Result<()> {
    let kind = args.attention.as_deref().map(kind).transpose()?;
    let named = args.from.clone();
    args.from = hub::folder(&args.from)?;
    check_folder(&args.from)?;
    let tokenizer = args.from.join("tokenizer.json");
    let tokenizer =
        Tokenizer::from_file(&tokenizer).with_context(|| format!("{} has no usable tokenizer", args.from.shown()))?;
    let Chosen { sets, own_text, has_text } = keys_of_recipe(&args, kind, &tokenizer)?;
    let bar = FolderBar::new(&args.out, hub::imported_bytes(&args.from, kind, &sets));
    let report = sieve_hf::import::<Flex>(&args.from, &args.out, kind, &sets, args.drop, &FlexDevice);
    drop(bar);
    let report = report?;
    let recipe_path = args.out.join("recipe.toml");
    let recipe = format!(
        "# Trains what `sieve import --from {}` made: a run begins with the weights that initial_weights names. Lines \
         that are commented out hold defaults.\n\n{}",
        named.shown(),
        recipe_text(&report)?
    );
    write_text(&recipe_path, &recipe)?;
    let model = terminal::model_line(&imported_line(&named, &report)?);
    terminal::line(&format!("imported as {}\n{model}", report.path.shown()));
    print_notes(&report, &tokenizer);
    print_commands(&args, &report, own_text.as_ref(), has_text, &recipe_path)?;
    if !has_text {
        remark_on_missing("--data", &args.data);
    }
    if let Some(words) = own_text.and_then(|own| own.epochs(&report.recipe)) {
        terminal::remark(&words);
    }
    Ok(())
}

/// The keys of the checkpoint's recipe.
struct Chosen {
    sets: Vec<String>,
    /// The text of `--data`, if it is known.
    own_text: Option<OwnText>,
    /// Whether all files of `--data` are here; true without `--data`.
    has_text: bool,
}

/// The keys of the checkpoint's recipe: `--data`, `--set` and, for the text of `--data`, as many steps as fine-tuning
/// takes, unless `--set` gives them. With the keys comes that text's size. Refuses another model's tokenizer, and a
/// model that the memory has no room for.
fn keys_of_recipe(args: &ImportArgs, kind: Option<AttentionKind>, tokenizer: &Tokenizer) -> Result<Chosen> {
    let mut sets = Vec::new();
    if !args.data.is_empty() {
        sets.push(format!("data.paths={:?}", args.data));
    }
    sets.extend(args.overrides.iter().cloned());
    // An unreadable configuration is no error here: `sieve_hf::import` reports it.
    let Ok((recipe, shape)) = sieve_hf::imported_model(&args.from, kind, &sets) else {
        return Ok(Chosen { sets, own_text: None, has_text: true });
    };
    // `print_notes` names the added tokens that lack a row.
    loaded::check_tokenizer(tokenizer, &args.from.join("tokenizer.json"), &shape)?;
    args.memory.check_import(&shape)?;
    let (mut own_text, mut has_text) = (None, true);
    if !args.data.is_empty() {
        let read;
        (read, has_text) = OwnText::read(&recipe)?;
        if let Some(own) = read.as_ref().filter(|_| has_text) {
            own.check_rows(&recipe)?;
        }
        own_text = read;
    }
    let Some(own) = &own_text else {
        return Ok(Chosen { sets, own_text, has_text });
    };
    let mut chosen = own.keys_for_answers(&recipe, &args.overrides);
    if chosen.is_empty() && !gives_steps(&args.overrides) {
        let training = &recipe.training;
        let steps = fine_tuning_steps(own.num_tokens, training.tokens_per_step(), training.steps);
        chosen.push(format!("training.steps={steps}"));
    }
    chosen.extend(own.prompts_key());
    // Of a key that is given twice the later value counts, so that --set wins.
    Ok(Chosen { sets: [chosen, sets].concat(), own_text, has_text })
}

/// The commands that go on: to train where there is text, and to generate.
fn print_commands(
    args: &ImportArgs,
    report: &ImportReport,
    own_text: Option<&OwnText>,
    has_text: bool,
    recipe_path: &Path,
) -> Result<()> {
    let recipe_file = terminal::quoted(recipe_path);
    let plan = format!("plan --recipe {recipe_file}");
    let train = format!("train --recipe {recipe_file} --out {}", terminal::quoted(&run_folder(&args.out)));
    let is_chat = Checkpoint::peek(&report.path)?.answers_chats(&report.recipe);
    // A chat model is not asked with the beginning of a text, nor another with a message.
    let own_text = own_text.filter(|_| is_chat == report.recipe.data.messages_column.is_some());
    let ask = Ask::with(is_chat, own_text.and_then(|own| own.prompt.as_deref()));
    let generate = format!("{} --checkpoint {}", ask.command(), terminal::quoted(&report.path));
    let commands = if args.data.is_empty() {
        terminal::line(&format!(
            "to train it: put your text into {} (data.paths), then sieve {plan}, sieve {train}",
            recipe_path.shown()
        ));
        vec![generate]
    } else if !has_text {
        terminal::line(&format!("once the text of data.paths is here: sieve {train}"));
        vec![plan, generate]
    } else {
        vec![plan, train, generate]
    };
    terminal::line(&terminal::next(&commands));
    Ok(())
}

/// The folder of a run that begins with what is in `imported`: of the same name, among the runs.
fn run_folder(imported: &Path) -> PathBuf {
    let of_name = imported.file_name().map(|name| Path::new("out").join(name));
    of_name.filter(|folder| folder != imported).unwrap_or_else(|| imported.join("run"))
}

/// What was imported, on one line.
fn imported_line(from: &Path, report: &ImportReport) -> Result<String> {
    let vocab_size = report.recipe.model.vocab_size.context("an imported recipe states the size of its vocabulary")?;
    let shape = report.recipe.model_shape(vocab_size)?;
    let weights = InitialWeights::Folder { path: from.shown().to_string(), step: None };
    Ok(model_line(&report.recipe, &shape, NumberFormat::F32, &weights))
}

/// The recipe of the imported model, which begins with the checkpoint beside it. A new indexer learns in a first stage,
/// while all keys are read.
fn recipe_text(report: &ImportReport) -> Result<String> {
    let mut recipe = report.recipe.clone();
    let beside = report.path.file_name().map(|name| name.to_string_lossy().into_owned());
    recipe.model.initial_weights = recipe.model.initial_weights.or(beside);
    let (steps, warmup) = (recipe.training.steps, recipe.lr_scheduler.warmup_steps);
    let has_new_indexer = recipe.attention.as_kind().indexer().is_some() && !report.added.is_empty();
    if has_new_indexer && recipe.stage.is_empty() && (1..steps).contains(&warmup) {
        let stage = |steps, warms_up| StageSection { steps, index_warmup: Some(warms_up), ..recipe.whole_run() };
        recipe.stage = vec![stage(warmup, true), stage(steps - warmup, false)];
    }
    Ok(recipe.to_template()?)
}

/// Refuses what is not a folder in the Hugging Face layout.
fn check_folder(from: &Path) -> Result<()> {
    refuse_odd_model(from)?;
    let config = from.join("config.json");
    if !config.is_file() {
        if Checkpoint::peek(from).is_ok() {
            bail!(
                "{} is a checkpoint of Sieve, which needs no import\n  \
                 hint: generate, serve, eval and export take it as --checkpoint; sieve train --branch-from begins \
                 with it",
                from.shown()
            );
        }
        let problem = if from.is_dir() { "config.json is missing in" } else { "there is no folder" };
        bail!("{problem} {}\n  hint: a model on the Hugging Face hub is named hf://OWNER/NAME", from.shown());
    }
    // Before the tokenizer: of a family that cannot be imported nobody should convert one.
    sieve_hf::check_config(&config)?;
    let tokenizer = from.join("tokenizer.json");
    refuse_odd_file(&tokenizer)?;
    if !tokenizer.is_file() {
        bail!(
            "{} has no tokenizer.json\n  hint: {}",
            from.shown(),
            sieve_core::how_to_convert(&from.shown().to_string())
        );
    }
    Ok(())
}

/// Prints what differs between the imported model and the one in the folder.
fn print_notes(report: &ImportReport, tokenizer: &Tokenizer) {
    if let [first, ..] = report.added.as_slice() {
        terminal::line(&format!("{} tensors are new and start as in a new model: {first}, …", report.added.len()));
    }
    if let Some(words) = &report.converted {
        terminal::line(&format!("note: {words}"));
    }
    for name in &report.ignored {
        terminal::line(&format!("note: {name} adds nothing and was ignored"));
    }
    let (tokens, rows) = (tokenizer.vocab_size(), report.recipe.model.vocab_size.unwrap_or(usize::MAX));
    if tokens > rows {
        terminal::line(&format!(
            "note: tokenizer.json has {} tokens and the embedding {} rows: a text with a token beyond them is refused",
            terminal::thousands(tokens as u64),
            terminal::thousands(rows as u64)
        ));
    }
    if report.all_scores_tie {
        terminal::line(
            "note: every A is 0, so all keys score alike: beyond keep_window_size tokens transformers keeps other ones \
             of equal score than Sieve, and logits differ until A is trained",
        );
    }
}

/// Parses the value of `--attention`.
fn kind(name: &str) -> Result<AttentionKind> {
    AttentionKind::named(name).with_context(|| {
        let names = AttentionKind::of_grouped_weights().map(AttentionKind::name).collect::<Vec<_>>().join(", ");
        format!("--attention {name} is not known\n  hint: one of {names}")
    })
}
