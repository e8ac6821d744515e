//! Errors of sieve-infer.
use sieve_core::{ModelShape, Refusal, attention_label};
use std::borrow::Cow;

/// Every error of reading a text with a model, and of continuing it.
#[derive(Debug, thiserror::Error)]
pub enum InferError {
    /// An error of the data or the tokenizer.
    #[error(transparent)]
    Data(#[from] sieve_data::DataError),
    /// An error of a selector.
    #[error(transparent)]
    Select(#[from] sieve_select::SelectError),
    /// A selector for a model without a dense layer.
    #[error(
        "{selector} selects for dense attention, and no layer of this model is dense: its attention is {attention}\n  \
         hint: use a checkpoint with kind = \"mha\", or with dense layers among others; eval selectors --compare \
         measures a sparse model next to a dense one"
    )]
    NotDense {
        /// Name of the selector.
        selector: String,
        /// The model's kind of attention, in words.
        attention: String,
    },
    /// A forward pass was given no token.
    #[error("there is no token to start from\n  hint: give at least one")]
    NoTokens,
    /// A text has more tokens than the model has positions.
    #[error(
        "{num_tokens} tokens do not fit into the model's context of {context} (max_position_embeddings)\n  \
         hint: shorten the input"
    )]
    TooLong {
        /// Number of tokens of the text.
        num_tokens: usize,
        /// The model's context, in tokens.
        context: usize,
    },
    /// A setting outside its range.
    #[error("{name} is {value}\n  hint: {hint}")]
    BadSetting {
        /// Flag of the command line, without dashes.
        name: &'static str,
        /// The value that was given.
        value: String,
        /// The values that are possible.
        hint: &'static str,
    },
    /// The model's output after this number of tokens is NaN or infinite.
    #[error(
        "the model's output after {0} tokens is not finite\n  \
         hint: the weights are damaged or training diverged; use an earlier checkpoint"
    )]
    NotFinite(usize),
    /// Files, rows or sizes that contradict each other.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A kernel refused a selector's mask.
    #[error("{selector}: attention under its mask: {reason}\n  hint: use --device cpu, and report this")]
    Kernel {
        /// Name of the selector.
        selector: &'static str,
        /// The error text of the kernel.
        reason: String,
    },
}

impl InferError {
    /// Inputs that contradict each other: what is wrong, and how to mend it.
    pub fn refused(what: String, hint: impl Into<Cow<'static, str>>) -> Self {
        Refusal::new(what, hint).into()
    }

    /// Checks that a selector can act on a model of `shape`.
    ///
    /// # Errors
    /// No dense layer; sinks, which attention under a selector's mask does not count.
    pub fn require_dense(selector: impl Into<String>, shape: &ModelShape) -> Result<(), Self> {
        let selector = selector.into();
        if shape.num_layers_of_dense_attention() == 0 {
            return Err(Self::NotDense { selector, attention: attention_label(shape) });
        }
        if shape.attention_sinks {
            let what = format!(
                "{selector} computes a softmax over only the keys, and this model's softmax also includes sinks \
                 (model.attention_sinks)"
            );
            return Err(Self::refused(what, "leave the selector out, or use a checkpoint without sinks"));
        }
        Ok(())
    }

    /// A setting outside its range: its flag without dashes, its value, and the values that are possible.
    pub fn setting(name: &'static str, value: impl ToString, hint: &'static str) -> Self {
        let value = value.to_string();
        Self::BadSetting { name, value, hint }
    }

    /// A kernel refused the mask of `selector`.
    pub fn kernel(selector: &'static str, reason: String) -> Self {
        Self::Kernel { selector, reason }
    }
}
