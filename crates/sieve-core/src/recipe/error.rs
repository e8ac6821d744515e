//! What can go wrong between a recipe's text and a run.

use thiserror::Error;

use super::mistake::Mistake;
use super::resume::KeyChange;

/// Every error of this crate.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum RecipeError {
    /// The text is not TOML; the message shows the line.
    #[error("{origin} is not valid TOML\n{message}")]
    Syntax {
        /// Where the text came from.
        origin: String,
        /// What the TOML reader says, with line, column and excerpt.
        message: String,
    },
    /// The recipe is TOML, but cannot be run. Holds every mistake, not only the first.
    #[error("{origin} is not a valid recipe: {}", list(.mistakes))]
    Invalid {
        /// Where the recipe came from.
        origin: String,
        /// Every mistake, in the order of the text.
        mistakes: Vec<Mistake>,
    },
    /// The embedding would have fewer rows than the tokenizer has tokens.
    #[error(
        "model.vocab_size is {model}, but the tokenizer has {tokenizer} tokens\n  \
         hint: remove model.vocab_size from the recipe, or set it to at least {tokenizer}"
    )]
    VocabularyTooSmall {
        /// `model.vocab_size`.
        model: usize,
        /// Tokens of the tokenizer.
        tokenizer: usize,
    },
    /// A resumed run asks for a change that would make it another run.
    #[error(
        "the recipe is not the one this run began with:{}\n  \
         hint: take these values back; or begin a new run in another folder with this one's weights: \
         --branch-from CHECKPOINT --out DIR",
        changes(.refused)
    )]
    ResumeChanged {
        /// The keys that differ and may not.
        refused: Vec<KeyChange>,
    },
    /// A path names a variable that is not set.
    #[error(
        "{path}: the environment variable {variable} is not set\n  \
         hint: set it, or give a default: ${{{variable}:-some/folder}}"
    )]
    UndefinedVariable {
        /// The path as written.
        path: String,
        /// The variable.
        variable: String,
    },
    /// A path holds a `$` that begins no variable.
    #[error(
        "{path}: the $ at character {position} begins no variable\n  \
         hint: write $NAME, ${{NAME}}, or $$ for a dollar sign"
    )]
    BadVariable {
        /// The path as written.
        path: String,
        /// Where the `$` stands, counted from 1 in characters.
        position: usize,
    },
    /// A recipe built in code that TOML cannot hold.
    #[error("the recipe cannot be written as TOML: {message}")]
    NotRepresentable {
        /// What the TOML writer says.
        message: String,
    },
}

fn list(mistakes: &[Mistake]) -> String {
    let count = match mistakes.len() {
        1 => "1 mistake".to_owned(),
        count => format!("{count} mistakes"),
    };
    mistakes
        .iter()
        .fold(count, |text, mistake| format!("{text}\n  {mistake}"))
}

fn changes(refused: &[KeyChange]) -> String {
    refused
        .iter()
        .fold(String::new(), |text, change| format!("{text}\n  {change}"))
}
