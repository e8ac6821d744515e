//! Reads a recipe from its text and overrides, checks it, and writes it as TOML.

use toml::Table;

use super::check;
use super::document::Document;
use super::error::RecipeError;
use super::mistake::{Location, Mistake};
use super::rules::{self, Parts};
use super::{Recipe, resolve, schema};

impl Recipe {
    /// Reads a recipe, applies `overrides` (`section.key=value`, later ones win) and checks every rule.
    ///
    /// `origin` names the text in messages, usually its path. An override's value is read as TOML, else taken as a bare
    /// string. Overriding `attention.kind` removes keys that only other kinds have, from the text and the overrides;
    /// overriding one of `tokenizer.path` and `tokenizer.train` drops the other; overriding `attention.preset` drops
    /// the keys that a preset sets; another number of `data.paths` drops `data.weights`.
    ///
    /// # Errors
    /// [`RecipeError::Syntax`] when the text is not TOML, else [`RecipeError::Invalid`] with every mistake of the text
    /// and of the overrides at once: unknown names, missing keys, wrong types, broken rules.
    pub fn load(text: &str, origin: &str, overrides: &[String]) -> Result<Self, RecipeError> {
        Self::load_with_left_out(text, origin, overrides).map(|(recipe, _)| recipe)
    }

    /// As [`load`](Self::load). Also returns the keys that were removed because they do not go with the overridden
    /// `attention.kind`.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load).
    pub fn load_with_left_out(
        text: &str,
        origin: &str,
        overrides: &[String],
    ) -> Result<(Self, Vec<String>), RecipeError> {
        let mut document = Document::parse(text, origin)?;
        document.apply(overrides);
        let mut mistakes = std::mem::take(&mut document.mistakes);
        resolve::steps_of_stages(&mut document.table, &mut mistakes);
        check::check_table(&mut document.table, &mut mistakes);
        resolve::attention(&mut document.table, &mut mistakes);
        resolve::defaults(&mut document.table);

        rules::check(&Parts::from(&document.table), &mut mistakes);
        if mistakes.is_empty() {
            match document.table.clone().try_into() {
                Ok(recipe) => {
                    let recipe: Self = recipe;
                    mistakes.extend(recipe.impossible_stages());
                    if mistakes.is_empty() {
                        return Ok((recipe, document.left_out));
                    }
                }
                Err(error) => mistakes.push(Mistake::new("recipe", error.message(), "")),
            }
        }
        for mistake in &mut mistakes {
            if mistake.location.is_none() {
                mistake.location = document.locate(&mistake.key);
            }
        }
        sort(&mut mistakes);
        Err(RecipeError::Invalid { origin: origin.to_owned(), mistakes })
    }

    /// Checks every rule between the values, for a recipe built or changed in code.
    ///
    /// # Errors
    /// [`RecipeError::Invalid`] with every broken rule.
    pub fn validate(&self) -> Result<(), RecipeError> {
        let mut mistakes = Vec::new();
        rules::check(&Parts::from(self), &mut mistakes);
        if mistakes.is_empty() {
            mistakes = self.impossible_stages();
        }
        if mistakes.is_empty() {
            Ok(())
        } else {
            Err(RecipeError::Invalid { origin: "the recipe".to_owned(), mistakes })
        }
    }

    /// The recipe with every default written out; [`load`](Self::load) reads it back equal.
    ///
    /// # Errors
    /// [`RecipeError::NotRepresentable`] for a whole number above `i64::MAX`.
    pub fn to_toml(&self) -> Result<String, RecipeError> {
        // `toml::to_string` writes whole numbers above i64::MAX, which no TOML reader accepts; `try_from` refuses them.
        Table::try_from(self)?;
        Ok(toml::to_string(self)?)
    }
}

/// Sorts mistakes by their line in the text; then come mistakes in overrides, then missing keys in the order of
/// sections.
fn sort(mistakes: &mut [Mistake]) {
    let section_rank = |mistake: &Mistake| {
        let name = mistake.key.split('.').next().unwrap_or_default();
        schema::sections().position(|section| section.name == name)
    };
    mistakes.sort_by_key(|mistake| match &mistake.location {
        Some(Location::Line(line)) => (0, *line, None),
        Some(Location::Override(_)) => (1, 0, None),
        None => (2, 0, section_rank(mistake)),
    });
}
