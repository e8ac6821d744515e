//! Recipes by path or by name.
use anyhow::{Context, Result, bail};
use clap::Args;
use sieve_core::Recipe;
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
        let name = Path::new(&self.recipe).file_stem().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }
}

fn find(recipe: &str) -> Result<PathBuf> {
    let given = PathBuf::from(recipe);
    if given.is_file() {
        return Ok(given);
    }
    let mut tried = vec![given.clone()];
    for folder in [
        "recipes".into(),
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes"),
    ] {
        for name in [recipe.to_owned(), format!("{recipe}.toml")] {
            let path = folder.join(name);
            if path.is_file() {
                return Ok(path);
            }
            tried.push(path);
        }
    }
    let names = shipped().join(", ");
    bail!(
        "there is no recipe {recipe}\n  looked at: {}\n  hint: name a file, or one of: {names}",
        tried
            .iter()
            .take(3)
            .map(|p| p.display().to_string())
            .collect::<Vec<_>>()
            .join(", "),
    )
}

/// Names in `recipes/`.
fn shipped() -> Vec<String> {
    let entries = std::fs::read_dir("recipes").into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".toml"))
        .collect();
    names.sort();
    names
}
