//! What can be wrong with a recipe.

use thiserror::Error;

/// A recipe that cannot be used, with every mistake found in it.
#[derive(Debug, Error)]
pub enum RecipeError {
    /// The text is no recipe.
    #[error("{origin}: {message}")]
    Invalid {
        /// Where the text came from.
        origin: String,
        /// What is wrong.
        message: String,
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
}
