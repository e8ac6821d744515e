//! Recipes and training text embedded in the program. The text replaces a recipe's missing files (`data.fallback`).
use anyhow::{Context, Result};
use sieve_core::recipe::{DataFallback, DataFormat, siblings};
use sieve_core::{Recipe, RecipeError, ShownPath};
use sieve_data::{Corpus, DataError};
use sieve_host::environment::variable;
use sieve_host::out_file::write_text;
use sieve_host::terminal;
use sieve_train::{TrainError, corpus_configs};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::LazyLock;

include!(concat!(env!("OUT_DIR"), "/shipped.rs"));

/// Folder that the embedded text is written to, since a run reads files.
const FOLDER: &str = "out/sieve-text";

/// The recipes inside the program by file name: the files of recipes/, and the recipes that differ from a dense one in
/// a few lines.
static ALL: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
    let files = RECIPES.iter().map(|&(name, text)| (name.to_owned(), text.to_owned()));
    let files = files.collect::<BTreeMap<_, _>>();
    let siblings = siblings(|dense| files[&format!("{dense}.toml")].clone());
    let siblings = siblings.into_iter().map(|(name, text)| (format!("{name}.toml"), text));
    siblings.chain(files.clone()).collect()
});

/// File names of the recipes inside the program.
pub(crate) fn recipe_names() -> impl Iterator<Item = &'static str> {
    ALL.keys().map(String::as_str)
}

/// The text of a recipe, by its file name, also with `recipes/` before it.
pub(crate) fn recipe(name: &str) -> Option<&'static str> {
    ALL.get(name.strip_prefix("recipes/").unwrap_or(name)).map(String::as_str)
}

/// (name, text) of the embedded sources and docs of Sieve.
pub(crate) fn own_text() -> sieve_lab::OwnText {
    OWN_TEXT
}

/// If `recipe` has a `data.fallback` and its paths match no file, writes the embedded text to [`FOLDER`] and makes that
/// the recipe's path. Returns a line that says which text is used.
pub(crate) fn choose_text(recipe: &mut Recipe) -> Result<Option<String>> {
    let Some(DataFallback::Sieve) = recipe.data.fallback else {
        return Ok(None);
    };
    let paths = recipe.data.paths.join(", ");
    if let Some(num_files) = num_files(recipe)? {
        let files = terminal::counted(num_files as u64, "file");
        return Ok(Some(format!("text: {files} of {paths}")));
    }
    for (name, text) in OWN_TEXT {
        let path = Path::new(FOLDER).join(name);
        // Rewriting an equal file would change its modification time, and shards made from it would look outdated.
        if sieve_files::read_text(&path).is_ok_and(|found| found == *text) {
            continue;
        }
        let folder = path.parent().unwrap_or(Path::new(FOLDER));
        std::fs::create_dir_all(folder)
            .with_context(|| format!("making {} for the program's own text", folder.shown()))?;
        // Another run may read the file at this time.
        write_text(&path, text)?;
    }
    recipe.data.paths = vec![FOLDER.to_owned()];
    recipe.data.weights = None;
    recipe.data.format = DataFormat::Text;
    let num_bytes = OWN_TEXT.iter().map(|(_, text)| text.len() as u64).sum();
    Ok(Some(format!(
        "text: there is no file of {paths}, so Sieve's own sources and docs are read: {} files, {}, written \
         to {FOLDER}",
        OWN_TEXT.len(),
        terminal::bytes(num_bytes),
    )))
}

/// Number of files that the recipe's paths match; `None` if one path matches none.
fn num_files(recipe: &Recipe) -> Result<Option<usize>> {
    let config = match corpus_configs(recipe, &variable) {
        Ok((config, _)) => config,
        Err(TrainError::Recipe(RecipeError::UndefinedVariable { .. })) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    match Corpus::open(config) {
        Ok(corpus) => Ok(Some(corpus.files().len())),
        Err(DataError::NoFiles { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_text_and_recipes_keep_their_sizes() {
        let num_bytes = OWN_TEXT.iter().map(|(_, text)| text.len()).sum::<usize>();
        assert!((500_000..=900_000).contains(&num_bytes), "{num_bytes}");
        let recipes = RECIPES.iter().map(|(_, text)| text.len()).sum::<usize>();
        assert!(recipes < 160_000, "{recipes}");
        for (name, text) in OWN_TEXT {
            // Files that the quickstart skips as too large are not embedded.
            assert!(text.len() <= 65_536, "{name}: {}", text.len());
        }
    }
}
