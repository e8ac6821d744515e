//! Errors of sieve-eval.
use sieve_core::{ModelShape, Refusal, attention_label, did_you_mean};
use std::borrow::Cow;

/// Every error of an evaluation.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
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
         measures a sparse model beside a dense one"
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
    /// A needle, its question and its answer are longer than `--buffer`.
    #[error(
        "a needle with its question and answer takes {needed} tokens of this tokenizer, and {buffer} are kept for \
         them\n  hint: use --buffer {needed} or more"
    )]
    NeedleTooLong {
        /// Tokens of the longest needle with question and answer.
        needed: usize,
        /// The value of `--buffer`, in tokens.
        buffer: usize,
    },
    /// The shortest text of a task does not fit into the length asked for.
    #[error(
        "the shortest text of {task} takes {needed} tokens of this tokenizer, and the length is {length}\n  \
         hint: use {option} {enough} or more for it, or leave the task out"
    )]
    NoRoom {
        /// Name of the task.
        task: &'static str,
        /// Tokens of the text and of its answer.
        needed: usize,
        /// The length, in tokens.
        length: usize,
        /// The option that gives the length.
        option: &'static str,
        /// A length that has room for every text of the task.
        enough: usize,
    },
    /// A task whose TOML is invalid, or whose columns the rows do not have.
    #[error("task {task}: {reason}{}", match reason.contains("hint:") {
        true => "",
        false => "\n  hint: sieve eval tasks --show TASK prints a task and its columns; docs/evaluation.md has every \
            key",
    })]
    Task {
        /// Name of the task.
        task: String,
        /// What is wrong with the task, and where.
        reason: String,
    },
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

impl EvalError {
    pub(crate) fn refused(what: String, hint: impl Into<Cow<'static, str>>) -> Self {
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
                "{selector} computes a softmax over the keys alone, and this model's has sinks too \
                 (model.attention_sinks)"
            );
            return Err(Self::refused(what, "leave the selector out, or use a checkpoint without sinks"));
        }
        Ok(())
    }

    pub(crate) fn setting(name: &'static str, value: impl ToString, hint: &'static str) -> Self {
        let value = value.to_string();
        Self::BadSetting { name, value, hint }
    }

    pub(crate) fn task(name: &str, reason: String) -> Self {
        let task = name.to_owned();
        Self::Task { task, reason }
    }

    pub(crate) fn kernel(selector: &'static str, reason: String) -> Self {
        Self::Kernel { selector, reason }
    }

    /// The error about an unknown task. It names the most similar one of `known`, if one is similar; the hint lists all
    /// and ends with `more`.
    pub(crate) fn unknown_task(name: &str, known: &[&str], more: &str) -> Self {
        let what = format!("there is no task {name:?}{}", did_you_mean(name, known));
        Self::refused(what, format!("the tasks are {}{more}", known.join(", ")))
    }
}
