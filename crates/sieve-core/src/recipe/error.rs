//! The errors of reading and checking a recipe.

use thiserror::Error;

use super::key_change::KeyChange;
use super::mistake::Mistake;

/// An error in a recipe or in the paths that it names.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum RecipeError {
    /// The text is not TOML; the message shows the line.
    #[error("{origin} is not valid TOML\n{message}")]
    Syntax {
        /// Name of the text, usually its path.
        origin: String,
        /// The TOML reader's message, with line, column and excerpt.
        message: String,
    },
    /// The recipe is TOML, but not valid.
    #[error("{origin} is not a valid recipe: {}", list(.mistakes))]
    Invalid {
        /// Name of the recipe, usually its path.
        origin: String,
        /// Every mistake, in the order of the text.
        mistakes: Vec<Mistake>,
    },
    /// The embedding would have fewer rows than the tokenizer has tokens.
    #[error(
        "model.vocab_size is {model}, but the tokenizer has {tokenizer} tokens\n  \
         hint: with weights that exist, name the tokenizer they were trained with; a new model takes it without \
         model.vocab_size, or with at least {tokenizer}"
    )]
    VocabularyTooSmall {
        /// Value of `model.vocab_size`.
        model: usize,
        /// Number of tokens of the tokenizer.
        tokenizer: usize,
    },
    /// A run is resumed with a recipe whose changes would make it another run.
    #[error(
        "the recipe is not the one this run began with:{}\n  \
         hint: restore these values; or begin a new run with this one's weights in a different folder, --branch-from \
         CHECKPOINT --out DIR; or begin again from step 0 with --overwrite instead of --resume",
        changes(.refused)
    )]
    ResumeChanged {
        /// The keys that differ and may not change.
        refused: Vec<KeyChange>,
    },
    /// A path names a variable that is not set.
    #[error(
        "{path}: the environment variable {variable} is not set\n  \
         hint: set it, or give a default: ${{{variable}:-some/folder}}"
    )]
    UndefinedVariable {
        /// The path as the recipe writes it.
        path: String,
        /// Name of the variable.
        variable: String,
    },
    /// A path holds a `$` that does not begin a variable.
    #[error(
        "{path}: the $ at character {position} does not begin a variable\n  \
         hint: write $NAME, ${{NAME}}, or $$ for a dollar sign"
    )]
    BadVariable {
        /// The path as the recipe writes it.
        path: String,
        /// Position of the `$` in the path, in characters from 1.
        position: usize,
    },
    /// A recipe built in code holds a value that TOML cannot express.
    #[error("the recipe cannot be written as TOML: {message}")]
    NotRepresentable {
        /// Error text of the TOML writer.
        message: String,
    },
}

impl From<toml::ser::Error> for RecipeError {
    fn from(error: toml::ser::Error) -> Self {
        Self::NotRepresentable { message: error.to_string() }
    }
}

fn list(mistakes: &[Mistake]) -> String {
    let count = match mistakes.len() {
        1 => "1 mistake".to_owned(),
        count => format!("{count} mistakes"),
    };
    mistakes.iter().fold(count, |text, mistake| format!("{text}\n  {mistake}"))
}

fn changes(refused: &[KeyChange]) -> String {
    refused.iter().fold(String::new(), |text, change| format!("{text}\n  {change}"))
}
