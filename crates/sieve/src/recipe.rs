//! Recipes by path or by name.
use anyhow::{Context, Result, bail};
use clap::Args;
use sieve_core::Recipe;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Which recipe, and what to change in it.
#[derive(Args, Clone, Debug)]
pub(crate) struct RecipeArgs {
    /// A recipe: a path, else a name in recipes/
    #[arg(long, value_name = "FILE")]
    pub(crate) recipe: String,
    /// Override a key, for example optimizer.lr=1e-3; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

impl RecipeArgs {
    /// Finds, reads and checks the recipe.
    pub(crate) fn load(&self) -> Result<Recipe> {
        let path = find(&self.recipe)?;
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("reading the recipe {}", path.display()))?;
        Ok(Recipe::load(
            &text,
            &path.display().to_string(),
            &self.overrides,
        )?)
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

/// Where recipes lie: beside the user, else where the program was built.
fn folders() -> [PathBuf; 2] {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    let built = built.unwrap_or(Path::new("")).join("recipes");
    ["recipes".into(), built]
}

fn find(recipe: &str) -> Result<PathBuf> {
    let given = PathBuf::from(recipe);
    if given.is_file() {
        return Ok(given);
    }
    if given.is_dir() {
        bail!(
            "--recipe {recipe} is a folder\n  hint: name one of its files: {}",
            list(&shipped(&[given]))
        );
    }
    for folder in folders() {
        for name in [recipe.to_owned(), format!("{recipe}.toml")] {
            let path = folder.join(name);
            if path.is_file() {
                return Ok(path);
            }
        }
    }
    let looked_at = folders().map(|folder| folder.display().to_string());
    bail!(
        "there is no recipe {recipe}\n  looked at: {recipe}, and in {}\n  hint: name a file, or one of: {}",
        looked_at.join(" and "),
        list(&shipped(&folders())),
    )
}

fn list(names: &BTreeSet<String>) -> String {
    if names.is_empty() {
        return "(there is none)".to_owned();
    }
    names.iter().cloned().collect::<Vec<_>>().join(", ")
}

/// Names of the recipes in `folders`.
fn shipped(folders: &[PathBuf]) -> BTreeSet<String> {
    let entries = folders
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten());
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
