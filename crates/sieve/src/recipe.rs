//! `sieve recipe`, and how every command finds and reads its recipe.
mod new;
pub(crate) mod useless;

use crate::{elsewhere, shipped};
use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand};
use sieve_comm::World;
use sieve_core::recipe::{TokenizerSource, json_schema, keys_page};
use sieve_core::{Recipe, RecipeError, ShownPath, did_you_mean};
use sieve_data::{Tokenizer, is_hub_model};
use sieve_host::environment::variable;
use sieve_host::{hub, terminal};
use sieve_train::{RecipeFile, RunFolder};
use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// `sieve recipe …`.
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum RecipeCommand {
    /// Write a recipe to begin with, by size and kind, with every key explained
    #[command(after_help = "Example: sieve recipe new --data notes.txt --out notes.toml")]
    New(new::NewArgs),
    /// Print a recipe; without a name, list those inside the program
    #[command(after_help = "Example: sieve recipe show dma_1p7b --all")]
    Show(new::ShowArgs),
    /// Print every key with its type, default and meaning, as Markdown
    #[command(after_help = "Example: sieve recipe keys")]
    Keys,
    /// Print a JSON schema of every key, for editors
    #[command(after_help = "Example: sieve recipe schema")]
    Schema,
}

/// Runs `sieve recipe …`: `keys` and `schema` are printed here, the rest is in `new`.
pub(crate) fn run(command: RecipeCommand) -> Result<()> {
    match command {
        RecipeCommand::New(args) => return new::run(&args),
        RecipeCommand::Show(args) => return new::show(args),
        RecipeCommand::Keys => terminal::text(&keys_page()),
        RecipeCommand::Schema => terminal::text(&json_schema()),
    }
    Ok(())
}

/// The recipe that a command reads, and changes to it.
#[derive(Args, Clone, Debug)]
pub(crate) struct RecipeArgs {
    /// A recipe: a path, else a name in recipes/, else the name of one inside the program; - reads the standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) recipe: String,
    /// Override a key, for example optimizer.lr=1e-3; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
    /// The text that was read, shared by all clones: a pipe can be read only once.
    #[arg(skip)]
    found: Arc<OnceLock<Found>>,
}

/// The text of a recipe, and its name in messages.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    text: String,
    origin: String,
    /// The folder of the recipe's file; `None` for one from a pipe or inside the program.
    folder: Option<PathBuf>,
}

impl RecipeArgs {
    /// Arguments for a recipe by path or name.
    pub(crate) fn new(recipe: String, overrides: Vec<String>) -> Self {
        Self { recipe, overrides, found: Arc::default() }
    }

    /// Finds, reads and checks the recipe. If `--set` changes the kind of attention, warns of keys that only the old
    /// kind uses.
    pub(crate) fn load(&self) -> Result<Recipe> {
        let (recipe, left_out) = self.load_unsaid()?;
        // Of several ranks only rank 0 prints.
        let world = World::from_env(&variable).ok().flatten();
        if world.is_none_or(|world| world.rank == 0) && !left_out.is_empty() {
            terminal::warning(&format!(
                "not used with attention.kind = {:?}: {}",
                recipe.attention.kind().name(),
                left_out.join(", ")
            ));
        }
        Ok(recipe)
    }

    /// As [`load`](Self::load), but returns the keys that `--set` made useless instead of naming them in a warning.
    pub(crate) fn load_unsaid(&self) -> Result<(Recipe, Vec<String>)> {
        let found = match self.found.get() {
            Some(found) => found,
            None => {
                let found = find(&self.recipe)?;
                self.found.get_or_init(|| found)
            }
        };
        let loaded = Recipe::load_with_left_out(&found.text, &found.origin, &self.overrides);
        let (mut recipe, left_out) = loaded.map_err(|error| match error {
            RecipeError::Syntax { .. } if self.is_text() => {
                let word = terminal::quoted(Path::new(&self.recipe));
                anyhow!(
                    "--recipe {word} is a text, not a recipe\n  \
                     hint: sieve recipe new --data {word} --out NAME.toml makes a recipe for it"
                )
            }
            RecipeError::Syntax { .. } if self.is_of_other_language() => {
                let word = terminal::quoted(Path::new(&self.recipe));
                anyhow!(
                    "--recipe {word} is not a recipe: a recipe is TOML\n  \
                     hint: sieve recipe show quickstart prints one, and sieve recipe keys every key"
                )
            }
            error => error.into(),
        })?;
        if let Some(path) = recipe.model.initial_folder() {
            let path = if is_hub_model(Path::new(path)) {
                key_of(&hub::checkpoint(Path::new(path)).context("model.initial_weights")?)
            } else {
                self.in_full(path, found.folder.as_deref())?
            };
            recipe.model.initial_weights = Some(path);
        }
        Ok((recipe, left_out))
    }

    /// A path of `model.initial_weights` in full: one in the recipe's text starts from the `folder` of its file, one of
    /// `--set` from the current folder.
    fn in_full(&self, path: &str, folder: Option<&Path>) -> Result<String> {
        let is_key = |set: &String| set.split('=').next().is_some_and(|key| key.trim() == "model.initial_weights");
        let folder = folder.filter(|_| !self.overrides.iter().any(is_key));
        let path = PathBuf::from(sieve_core::paths::expand(path, &variable)?);
        let path = folder.map_or(path.clone(), |folder| folder.join(path));
        // A folder that is not there is reported by the command that needs it.
        let full = path.canonicalize().or_else(|_| std::path::absolute(&path));
        let full = full.with_context(|| format!("finding {}", path.shown()))?;
        Ok(key_of(&full))
    }

    /// The file that the recipe was read from; `None` for one from a pipe or inside the program, or before
    /// [`load`](Self::load).
    pub(crate) fn file(&self) -> Option<RecipeFile> {
        let folder = self.found.get()?.folder.clone()?;
        Some(RecipeFile { name: self.recipe.clone(), folder })
    }

    /// Whether the file that stands for a recipe is a text or a table by its ending.
    fn is_text(&self) -> bool {
        self.has_ending(&elsewhere::TEXTS)
    }

    /// Whether it is a configuration of another language by its ending.
    fn is_of_other_language(&self) -> bool {
        self.has_ending(&["yaml", "yml", "ini", "cfg", "conf"])
    }

    fn has_ending(&self, endings: &[&str]) -> bool {
        let ending = Path::new(&self.recipe).extension().map(|ending| ending.to_string_lossy().to_lowercase());
        ending.is_some_and(|ending| endings.contains(&ending.as_str()))
    }

    /// Finds, reads and checks the recipe for a command that reads the training text. Replaces paths without files as
    /// `data.fallback` says, and returns a line about that. Paths given by `--set` are not replaced.
    pub(crate) fn load_with_text(&self) -> Result<(Recipe, Option<String>)> {
        let mut recipe = self.load()?;
        let line = self.choose_text(&mut recipe)?;
        Ok((recipe, line))
    }

    /// Replaces paths without files in `recipe`, which these arguments gave, as `data.fallback` says. Returns a line
    /// about that; paths given by `--set` stay.
    pub(crate) fn choose_text(&self, recipe: &mut Recipe) -> Result<Option<String>> {
        let is_path = |set: &String| set.trim_start().starts_with("data.paths");
        if self.overrides.iter().any(is_path) {
            return Ok(None);
        }
        shipped::choose_text(recipe)
    }

    /// Output folder of the recipe's runs without `--out`.
    pub(crate) fn default_out(&self) -> PathBuf {
        PathBuf::from("out").join(self.name())
    }

    /// Folder of the recipe's shards: `data_dir` (`--data-dir`), else `data.cache_dir`, else `out/RECIPE/data`, as for
    /// `sieve train` without `--out`.
    pub(crate) fn data_folder(&self, recipe: &Recipe, data_dir: Option<PathBuf>) -> Result<PathBuf> {
        Ok(match (data_dir, &recipe.data.cache_dir) {
            (Some(dir), _) => dir,
            (None, Some(dir)) => PathBuf::from(sieve_core::paths::expand(dir, &variable)?),
            (None, None) => self.default_out().join(DATA),
        })
    }

    /// The words of a command line that name this recipe and its changes; `None` for one from a pipe.
    pub(crate) fn words(&self) -> Option<String> {
        let sets = self.overrides.iter().map(|set| format!(" --set {}", terminal::shell_word(set)));
        let named = || format!("--recipe {}", terminal::quoted(Path::new(&self.recipe)));
        (!is_pipe(&self.recipe)).then(|| named() + &sets.collect::<String>())
    }

    /// The command that trains this recipe, into a folder that holds no run; `None` for a recipe from a pipe.
    pub(crate) fn train_command(&self) -> Option<String> {
        let words = self.words()?;
        let out = self.default_out();
        if !RunFolder::holds_run(&out) {
            return Some(format!("train {words}"));
        }
        let name = self.name();
        let mut others = (2..).map(|number| out.with_file_name(format!("{name}-{number}")));
        let free = others.find(|other| !other.exists())?;
        Some(format!("train {words} --out {}", terminal::quoted(&free)))
    }

    /// The folders that may hold the prepared tokens of a run in `out` already: the folder of the recipe's own runs,
    /// where `sieve data prepare` puts them, and the folders of the runs beside `out`.
    pub(crate) fn known_data(&self, out: &Path) -> Vec<PathBuf> {
        let beside = match out.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let entries = std::fs::read_dir(beside).into_iter().flatten().flatten();
        let mut known: Vec<_> = entries.map(|entry| entry.path().join(DATA)).collect();
        known.retain(|folder| folder.join("meta.json").is_file());
        known.sort();
        known.insert(0, self.default_out().join(DATA));
        known
    }

    /// Name of the recipe without folders and ending. A file `recipe.toml`, as an import has it, is named by its
    /// folder.
    pub(crate) fn name(&self) -> String {
        if is_pipe(&self.recipe) {
            return PIPED.to_owned();
        }
        let path = Path::new(&self.recipe);
        if path.file_name().is_some_and(|name| name == OF_AN_IMPORT)
            && let Some(folder) = path.parent().and_then(Path::file_name)
        {
            return folder.to_string_lossy().into_owned();
        }
        let name = match path.extension() {
            // quickstart and quickstart.toml are one recipe; dma_1.7b is not the recipe dma_1.
            Some(ending) if ending == "toml" => path.file_stem(),
            _ => path.file_name(),
        };
        name.unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// Rows of the embedding: the recipe's, else the size of the tokenizer's vocabulary.
pub(crate) fn vocab_size(recipe: &Recipe) -> Result<usize> {
    match (recipe.stated_vocab_size(), recipe.tokenizer.source()) {
        (Some(rows), _) => Ok(rows),
        (None, TokenizerSource::Path(path)) => {
            let tokenizer = sieve_train::tokenizer_file(path, &hub::surroundings())
                .and_then(|path| Ok(Tokenizer::from_file(&path)?))
                .context(
                    "the recipe leaves model.vocab_size to its tokenizer, which cannot be read\n  \
                     hint: get the tokenizer, or plan with --set model.vocab_size=N",
                )?;
            Ok(tokenizer.vocab_size())
        }
        (None, TokenizerSource::Train(_) | TokenizerSource::Numbers(_)) => {
            unreachable!("a tokenizer made here states its size")
        }
    }
}

/// Folder, below the current one, in which recipes are looked up by name.
const FOLDER: &str = "recipes";

/// The file name that stands for standard input.
const STANDARD_INPUT: &str = "-";
/// Name of a recipe that has no file.
const PIPED: &str = "recipe";
/// The folder of a run's prepared data, under its output folder.
const DATA: &str = "data";
/// The file name of every import's recipe, which says nothing of the model.
const OF_AN_IMPORT: &str = "recipe.toml";
/// Bytes of a recipe, at most: a device such as /dev/zero would never end.
const MOST_BYTES: u64 = 16 << 20;

/// The value of `model.initial_weights` that stands for a path.
fn key_of(path: &Path) -> String {
    path.to_string_lossy().into_owned().replace('$', "$$")
}

/// Whether a recipe comes from the standard input or a pipe, which has no name of its own.
fn is_pipe(recipe: &str) -> bool {
    recipe == STANDARD_INPUT || sieve_files::is_pipe_or_device(Path::new(recipe))
}

/// Reads the text of a recipe; more than [`MOST_BYTES`] are an error.
fn read(reader: impl Read, origin: String, folder: Option<PathBuf>) -> Result<Found> {
    let mut text = String::new();
    let read = reader.take(MOST_BYTES + 1).read_to_string(&mut text);
    let num_bytes = read.with_context(|| format!("reading the recipe {origin}"))?;
    if num_bytes as u64 > MOST_BYTES {
        bail!("{origin} is not a recipe: it is longer than {MOST_BYTES} bytes\n  hint: name a TOML text");
    }
    Ok(Found { text, origin, folder })
}

/// Reads a recipe: standard input, a path, a name in [`FOLDER`], or a name inside the program, in this order.
fn find(recipe: &str) -> Result<Found> {
    if recipe == STANDARD_INPUT {
        return read(std::io::stdin(), "the standard input".to_owned(), None);
    }
    let given = PathBuf::from(recipe);
    if given.is_dir() {
        let names: Vec<String> = in_folder(&given).into_iter().collect();
        let hint = match names.as_slice() {
            [] => "name a file".to_owned(),
            names => format!("name one of its files: {}", names.join(", ")),
        };
        bail!("--recipe {recipe} is a folder\n  hint: {hint}");
    }
    let names_given = [recipe.to_owned(), format!("{recipe}.toml")];
    let beside = names_given.each_ref().map(|name| Path::new(FOLDER).join(name));
    let mut paths = names_given.each_ref().map(PathBuf::from).into_iter().chain(beside);
    if let Some(path) = paths.find(|path| path.exists() && !path.is_dir()) {
        let origin = path.shown().to_string();
        let file = sieve_files::open_file(&path).with_context(|| format!("reading the recipe {origin}"))?;
        let folder = path.is_file().then(|| path.parent().map(Path::to_owned)).flatten();
        // The parent of a bare file name is the empty path.
        let folder = folder.map(|folder| if folder.as_os_str().is_empty() { PathBuf::from(".") } else { folder });
        return read(file, origin, folder);
    }
    let inside = names_given.iter().find_map(|name| {
        let (text, origin) = (shipped::recipe(name)?.to_owned(), format!("{name} (inside the program)"));
        Some(Found { text, origin, folder: None })
    });
    inside.with_context(|| {
        let mut names = in_folder(Path::new(FOLDER));
        names.extend(shipped::recipe_names().map(str::to_owned));
        let here = in_folder(Path::new("."));
        let known: Vec<&str> = here.iter().chain(&names).map(String::as_str).collect();
        let nearest = [recipe, &names_given[1]].map(|name| did_you_mean(name, &known));
        let nearest = nearest.into_iter().find(|words| !words.is_empty()).unwrap_or_default();
        format!(
            "there is no recipe {recipe}{nearest}\n  looked at: {recipe}, in {FOLDER}/, and inside the program\n  \
             hint: name a file, or a recipe that `sieve recipe show` lists"
        )
    })
}

/// Names of the recipes in a folder.
fn in_folder(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".toml"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ending_is_no_part_of_the_name() {
        for (recipe, expected) in [
            ("quickstart", "quickstart"),
            ("recipes/quickstart.toml", "quickstart"),
            ("dma_1.7b", "dma_1.7b"),
            ("-", "recipe"),
            ("/dev/null", "recipe"),
            // Of imports, the folder tells them apart.
            ("in/qwen/recipe.toml", "qwen"),
            ("./in/my model/recipe.toml", "my model"),
            ("recipe.toml", "recipe"),
            ("../recipe.toml", "recipe"),
            ("in/recipe.toml/other.toml", "other"),
        ] {
            let args = RecipeArgs::new(recipe.to_owned(), Vec::new());
            assert_eq!(args.name(), expected);
        }
    }

    #[test]
    fn shipped_recipes_are_found_from_any_folder() {
        // The last three have no file: their text is made from mha_80m.toml.
        for name in ["quickstart", "quickstart.toml", "msa_80m", "msa_80m.toml", "recipes/msa_80m.toml"] {
            assert!(find(name).is_ok(), "{name}");
        }
        for (wrong, near) in [("quikstart", "quickstart.toml"), ("msa_81m", "did you mean msa_80m.toml")] {
            let error = find(wrong).unwrap_err().to_string();
            assert!(error.contains(near), "{error}");
        }
    }
}
