//! What can go wrong between a model and an answer.

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// Data or tokenizer.
    #[error(transparent)]
    Data(#[from] sieve_data::DataError),
    /// Selectors.
    #[error(transparent)]
    Select(#[from] sieve_select::SelectError),
    /// A selector for a model that is sparse itself.
    #[error(
        "{selector} selects for dense attention, and no layer of this model is dense\n  \
         hint: use a checkpoint with kind = \"mha\", or with dense layers among others"
    )]
    NotDense {
        /// The selector.
        selector: String,
    },
    /// No document as long as the longest context.
    #[error(
        "none of {num_documents} documents has {wanted} tokens; the longest has {longest}\n  \
         hint: give longer documents, or shorter contexts"
    )]
    NoLongDocument {
        /// Documents read.
        num_documents: u64,
        /// Tokens of the longest one.
        longest: usize,
        /// Tokens that one must have.
        wanted: usize,
    },
    /// No token at all.
    #[error("there is no token to start from\n  hint: give at least one")]
    NoTokens,
    /// A token that the model does not know.
    #[error(
        "token {token} at position {position} is outside the model's vocabulary of {vocab_size}\n  \
         hint: use the tokenizer.json of the checkpoint"
    )]
    TokenOutOfVocabulary {
        /// The token.
        token: u32,
        /// Where it stands, from 0.
        position: usize,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// More tokens than positions.
    #[error(
        "{num_tokens} tokens do not fit into the model's context of {context} (max_position_embeddings)\n  \
         hint: shorten the input"
    )]
    TooLong {
        /// Tokens given.
        num_tokens: usize,
        /// The model's context, in tokens.
        context: usize,
    },
    /// A prompt with its continuation has more tokens than positions.
    #[error("a prompt of {prompt} tokens and {max_new_tokens} new ones do not fit into the model's context \
        of {context} (max_position_embeddings)\n  hint: {}", hint(*prompt, *context))]
    NoRoom {
        /// Tokens of the prompt.
        prompt: usize,
        /// New tokens asked for.
        max_new_tokens: usize,
        /// The model's context, in tokens.
        context: usize,
    },
    /// A setting outside its range.
    #[error("{name} is {value}\n  hint: {hint}")]
    BadSetting {
        /// Its name on the command line, without dashes.
        name: &'static str,
        /// What was given.
        value: String,
        /// What would be right.
        hint: &'static str,
    },
    /// The model's output is NaN or infinite.
    #[error(
        "the model's output after {num_tokens} tokens is not finite\n  \
         hint: the weights are damaged or training diverged; use an earlier checkpoint"
    )]
    NotFinite {
        /// Tokens that went in.
        num_tokens: usize,
    },
    /// The shards were made with another tokenizer.
    #[error("{}: the shards there were made with another tokenizer than the checkpoint's\n  \
        hint: name the text with --data instead", dir.display())]
    OtherTokenizer {
        /// Folder of the shards.
        dir: std::path::PathBuf,
    },
    /// Less text than a needle is to be hidden in.
    #[error(
        "the haystack has {got} tokens, and the longest length needs {needed}\n  \
         hint: give more text with --data, or shorter --lengths"
    )]
    HaystackTooShort {
        /// Tokens of the text.
        got: usize,
        /// Tokens of the longest haystack.
        needed: usize,
    },
    /// A needle, its question and its answer do not fit into the room kept for them.
    #[error(
        "a needle with its question and answer takes {needed} tokens of this tokenizer, and {buffer} are kept for \
         them\n  hint: use --buffer {needed} or more"
    )]
    NeedleTooLong {
        /// Tokens that the longest of them takes.
        needed: usize,
        /// Tokens kept.
        buffer: usize,
    },
    /// A task that is not inside the program.
    #[error(
        "there is no task {name:?}, did you mean {nearest}?\n  \
         hint: the tasks are {known}; one of your own is a TOML file, named by its path"
    )]
    UnknownTask {
        /// As asked for.
        name: String,
        /// The most similar name.
        nearest: &'static str,
        /// All names.
        known: String,
    },
    /// A task that cannot be read, or rows that it does not fit.
    #[error("task {task}: {reason}{}", match reason.contains("hint:") {
        true => "",
        false => "\n  hint: sieve eval tasks --show TASK prints a task and its columns; docs/evaluation.md has every \
            key",
    })]
    Task {
        /// Its name.
        task: String,
        /// What is wrong, and where.
        reason: String,
    },
    /// A task about long texts that is not inside the program.
    #[error("there is no task {name:?}, did you mean {nearest}?\n  hint: the tasks are {known}")]
    UnknownLongTask {
        /// As asked for.
        name: String,
        /// The most similar name.
        nearest: &'static str,
        /// All names.
        known: String,
    },
    /// A length without room for the shortest text of a task.
    #[error(
        "the shortest text of {task} takes {needed} tokens of this tokenizer, and the length is {length}\n  \
         hint: use --lengths {needed} or more for it, or leave the task out"
    )]
    LengthTooShort {
        /// The task.
        task: &'static str,
        /// As asked for.
        length: usize,
        /// Tokens of the shortest text with its answer.
        needed: usize,
    },
    /// A question task without its questions.
    #[error(
        "{task} asks the questions of a published file, which is not inside the program\n  \
         hint: give the file with {option}, or leave the task out of --tasks"
    )]
    NoQaFile {
        /// The task.
        task: &'static str,
        /// Names the file.
        option: &'static str,
    },
    /// A file of questions that cannot be read.
    #[error(
        "{name}: {reason}\n  \
         hint: give SQuAD 2.0 (dev-v2.0.json) or HotpotQA (hotpot_dev_distractor_v1.json) as published"
    )]
    QaFile {
        /// The file.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A file of settings that cannot be read.
    #[error(
        "{file}: {problem}\n  \
         hint: write selectors = [\"NAME:key=value\", …], or [[grid]] with selector = \"NAME\" and key = [value, …]"
    )]
    Grid {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// A kernel that refused a selector's mask.
    #[error("{selector}: attention under its mask: {reason}\n  hint: use --device cpu, and report this")]
    Kernel {
        /// The selector.
        selector: &'static str,
        /// The kernel's words.
        reason: String,
    },
    /// Nothing to predict.
    #[error("no document holds a token to predict ({num_documents} documents)\n  hint: give longer documents")]
    NothingToPredict {
        /// Documents read.
        num_documents: u64,
    },
}

/// The known name that is most like this one.
pub(crate) fn nearest(name: &str, known: impl Iterator<Item = &'static str>) -> &'static str {
    let likeness = |known: &str| strsim::jaro_winkler(&name.to_lowercase(), known);
    let nearest = known.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    nearest.unwrap_or_default()
}

fn hint(prompt: usize, context: usize) -> String {
    match context.checked_sub(prompt) {
        None | Some(0) => format!("shorten the prompt below {context} tokens"),
        Some(room) => format!("ask for at most {room} new tokens, or shorten the prompt"),
    }
}
