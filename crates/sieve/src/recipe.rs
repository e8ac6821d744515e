//! Recipes by path or by name, new ones, and the list of their keys.
mod new;

use crate::{shipped, terminal};
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use sieve_core::Recipe;
use sieve_core::recipe::{json_schema, keys_page};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// `sieve recipe …`.
#[derive(Subcommand, Clone, Debug)]
pub(crate) enum RecipeCommand {
    /// Write a recipe to begin with, by size and kind, with every key explained
    New(new::NewArgs),
    /// Print a recipe; without a name, list those inside the program
    Show(new::ShowArgs),
    /// Print every key with its type, default and meaning, as Markdown
    Keys,
    /// Print a JSON schema of every key, for editors
    Schema,
}

/// Runs the command.
pub(crate) fn run(command: RecipeCommand) -> Result<()> {
    match command {
        RecipeCommand::New(args) => return new::run(&args),
        RecipeCommand::Show(args) => return new::show(args),
        RecipeCommand::Keys => terminal::text(&keys_page()),
        RecipeCommand::Schema => terminal::text(&json_schema()),
    }
    Ok(())
}

/// Which recipe, and what to change in it.
#[derive(Args, Clone, Debug)]
pub(crate) struct RecipeArgs {
    /// A recipe: a path, else a name in recipes/, else the name of one inside the program
    #[arg(long, value_name = "FILE")]
    pub(crate) recipe: String,
    /// Override a key, for example optimizer.lr=1e-3; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

impl RecipeArgs {
    /// The same, where `degree` processes share each row.
    pub(crate) fn with_parts(mut self, degree: Option<u16>) -> Self {
        let key = "parallelism.context_parallel_degree";
        let degree = degree.map(|degree| format!("{key}={degree}"));
        self.overrides.extend(degree);
        self
    }

    /// Finds, reads and checks the recipe.
    pub(crate) fn load(&self) -> Result<Recipe> {
        let (text, origin) = find(&self.recipe)?;
        Ok(Recipe::load(&text, &origin, &self.overrides)?)
    }

    /// The same for a command that reads the recipe's text, with a line that says which text that is where the recipe
    /// leaves it open. Paths given by `--set` are meant: the recipe's `data.fallback` does not stand in for them.
    pub(crate) fn load_with_text(&self) -> Result<(Recipe, Option<String>)> {
        let mut recipe = self.load()?;
        let is_path = |set: &String| set.trim_start().starts_with("data.paths");
        let line = match self.overrides.iter().any(is_path) {
            true => None,
            false => shipped::choose_text(&mut recipe)?,
        };
        Ok((recipe, line))
    }

    /// Output folder of its runs where none is named.
    pub(crate) fn default_out(&self) -> PathBuf {
        PathBuf::from("out").join(self.name())
    }

    /// Name of the recipe without folders and ending.
    pub(crate) fn name(&self) -> String {
        let path = Path::new(&self.recipe);
        let name = match path.extension() {
            // quickstart and quickstart.toml are one recipe; dma_1.7b is not the recipe dma_1.
            Some(ending) if ending == "toml" => path.file_stem(),
            _ => path.file_name(),
        };
        name.unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// The folder of recipes beside the user.
const FOLDER: &str = "recipes";

/// The text of a recipe, and what messages call it.
fn find(recipe: &str) -> Result<(String, String)> {
    let given = PathBuf::from(recipe);
    if given.is_dir() {
        bail!(
            "--recipe {recipe} is a folder\n  hint: name one of its files: {}",
            list(&in_folder(&given))
        );
    }
    let names = [recipe.to_owned(), format!("{recipe}.toml")];
    let beside = names.each_ref().map(|name| Path::new(FOLDER).join(name));
    let mut paths = names.each_ref().map(PathBuf::from).into_iter().chain(beside);
    if let Some(path) = paths.find(|path| path.is_file()) {
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading the recipe {}", path.display()))?;
        return Ok((text, path.display().to_string()));
    }
    let inside = names.iter().find_map(|name| {
        let text = shipped::recipe(name)?;
        Some((text.to_owned(), format!("{name} (inside the program)")))
    });
    inside.with_context(|| {
        let mut names = in_folder(Path::new(FOLDER));
        names.extend(shipped::recipe_names().map(str::to_owned));
        format!(
            "there is no recipe {recipe}\n  looked at: {recipe}, in {FOLDER}/, and inside the program\n  \
             hint: name a file, or one of: {}",
            list(&names)
        )
    })
}

fn list(names: &BTreeSet<String>) -> String {
    if names.is_empty() {
        return "(there is none)".to_owned();
    }
    names.iter().cloned().collect::<Vec<_>>().join(", ")
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
        ] {
            let args = RecipeArgs {
                recipe: recipe.to_owned(),
                overrides: Vec::new(),
            };
            assert_eq!(args.name(), expected);
        }
    }

    #[test]
    fn shipped_recipes_are_found_from_any_folder() {
        assert!(find("quickstart").is_ok());
        assert!(find("quickstart.toml").is_ok());
        let error = find("quikstart").unwrap_err().to_string();
        assert!(error.contains("quickstart.toml"), "{error}");
    }
}
