//! Errors of sieve-eval.
use sieve_core::{Refusal, did_you_mean};
use sieve_data::DataError;
use sieve_infer::InferError;
use sieve_select::SelectError;
use std::borrow::Cow;

/// Every error of an evaluation.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// An error of the model's passes, or of a text that they read.
    #[error(transparent)]
    Infer(#[from] InferError),
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
        "the shortest prompt of {task} takes {needed} tokens of this tokenizer, and the length is {length}\n  \
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
    #[error("task {task}: {reason}{}", if reason.contains("hint:") {
        ""
    } else {
        "\n  hint: sieve eval tasks --show TASK prints a task and its columns; docs/evaluation.md has every key"
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
}

impl From<DataError> for EvalError {
    fn from(error: DataError) -> Self {
        InferError::from(error).into()
    }
}

impl From<SelectError> for EvalError {
    fn from(error: SelectError) -> Self {
        InferError::from(error).into()
    }
}

impl EvalError {
    pub(crate) fn refused(what: String, hint: impl Into<Cow<'static, str>>) -> Self {
        Refusal::new(what, hint).into()
    }

    pub(crate) fn setting(name: &'static str, value: impl ToString, hint: &'static str) -> Self {
        InferError::setting(name, value, hint).into()
    }

    pub(crate) fn task(name: &str, reason: String) -> Self {
        let task = name.to_owned();
        Self::Task { task, reason }
    }

    /// The error about an unknown task. It names the most similar one of `known`, if one is similar; the hint lists all
    /// and ends with `more`.
    pub(crate) fn unknown_task(name: &str, known: &[&str], more: &str) -> Self {
        let what = format!("there is no task {name:?}{}", did_you_mean(name, known));
        Self::refused(what, format!("the tasks are {}{more}", known.join(", ")))
    }
}
