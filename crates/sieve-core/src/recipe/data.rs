//! `[data]`: the text or synthetic task that a run trains on, and the rules of its keys.

use super::rules::{Parts, Rules, check_paths};
use super::{Recipe, TokenizerSection, TokenizerSource};
use crate::keys::{MAX_VOCAB, choices, keys};

keys! {
    /// `[data]`: text files, or a synthetic task.
    pub struct DataSection {
        /// Globs; `~`, `$VAR`, `${VAR}` and `${VAR:-default}` are expanded. A data set of the Hugging Face hub is
        /// `hf://datasets/OWNER/NAME[@REVISION][/FILES]`. Empty only for `format = "mqar"`.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        pub paths: Vec<String> = Vec::new(),
        /// One number for each of `paths`: the share of its text in the training tokens, relative to the other numbers.
        /// Absent: every document is read once per epoch.
        pub weights: Option<Vec<f64>>,
        /// What to read if `paths` matches no file. Absent: the run ends with an error.
        #[key(may_change)]
        pub fallback: Option<DataFallback>,
        /// How the files hold documents. A resumed run may go from or to `"auto"`.
        pub format: DataFormat = DataFormat::Auto,
        /// JSONL and Parquet: the field or column that holds a document's text.
        pub text_column: String = "text".to_owned(),
        /// JSONL and Parquet: the field or column with what comes before a document's text, a question for example. The
        /// model reads it and is not trained to write it: loss is taken of the text and of the end of the document.
        /// Names of special tokens in it are those tokens, as in a prompt of `sieve generate`. Absent: documents are
        /// text alone.
        pub prompt_column: Option<String>,
        /// JSONL and Parquet: the field or column with a chat, a list of messages `{"role", "content"}`, in place of
        /// `text_column`. The chat template in the folder of `tokenizer.path` makes one text of them, and loss is taken
        /// of the assistant's words alone: of the template's `{% generation %}` blocks, or, without them, of what each
        /// message of the assistant adds to the chat before it. Absent: documents are text.
        pub messages_column: Option<String>,
        /// Stop reading after this much text, in bytes; with `weights`, shared among `paths` by them. Absent: read all.
        #[key(at_least_one)]
        pub max_bytes: Option<u64>,
        /// A document larger than this, in bytes, is not valid (see `skip_invalid`). A text file that `paths` names by
        /// itself, not by a folder or glob, may be larger. Absent: none is too large.
        #[key(at_least_one)]
        pub max_document_bytes: Option<u64>,
        /// Whether a document that is not valid (too large, not UTF-8, not JSON) is counted and left out, instead of
        /// ending the run.
        pub skip_invalid: bool = false,
        /// Whether only the first of documents with equal text is kept.
        pub deduplicate: bool = false,
        /// Share of the documents held out for validation; of too few documents, that share of the text, from its end.
        /// Not used when `[validation] paths` is given.
        #[key(share("(0, 1)", "0.05 holds out one document in twenty"))]
        pub validation_fraction: f64 = 0.05,
        /// Where tokenised shards go; expanded as `paths` are. Absent: under the output folder.
        #[key(may_change)]
        pub cache_dir: Option<String>,
        /// What `format = "mqar"` generates.
        pub mqar: Option<MqarSection>,
    }
}

choices! {
    /// `[data] format`.
    pub enum DataFormat {
        /// By the end of each file's name: `.jsonl` and `.ndjson` as `jsonl`, `.parquet` as `parquet`, all others as
        /// `text`. One path names files of one kind.
        Auto = "auto",
        /// One document a file, UTF-8. Text and JSONL may be packed (`.gz`, `.zst`).
        Text = "text",
        /// One JSON object a line, the text in `text_column`.
        Jsonl = "jsonl",
        /// Apache Parquet, the text in `text_column`.
        Parquet = "parquet",
        /// Multi-query associative recall, generated as `mqar` says.
        Mqar = "mqar",
    }
}

choices! {
    /// `[data] fallback`.
    pub enum DataFallback {
        /// Text inside the program: Sieve's own sources and docs.
        Sieve = "sieve",
    }
}

keys! {
    /// `[data] mqar`: kinds of samples of multi-query associative recall (arXiv:2312.04927). The lists have one entry
    /// for each kind.
    pub struct MqarSection {
        /// Number of token ids; keys come from the lower half of them, values from the upper half.
        pub vocab_size: usize,
        /// Number of token ids for each kind, at most `vocab_size`. A small vocabulary is learned many times faster,
        /// and prepares the model for the large one. Absent: `vocab_size` for all kinds.
        pub vocab_sizes: Option<Vec<usize>>,
        /// Tokens of a sample. Samples of one kind share a row as separate documents, as many as fit
        /// `training.seq_len`.
        pub seq_lens: Vec<usize>,
        /// Pairs of key and value in a sample; a sample has room for `seq_len / 4`.
        pub num_pairs: Vec<usize>,
        /// Training samples of each kind in an epoch.
        pub num_samples: Vec<usize>,
        /// Validation samples of each kind.
        #[key(at_least_one)]
        pub num_test_samples: usize = 1000,
        /// Tokens at positions without a key or a value.
        pub noise: MqarNoise = MqarNoise::Zeros,
        /// Queries are placed in slot x with a probability proportional to `x^(power - 1)`.
        #[key(between(1e-6, 100.0, "0.01 is usual"))]
        pub power: f64 = 0.01,
        /// Seed of the samples; `training.seed` decides their order.
        pub seed: u64 = 0,
    }
}

impl MqarSection {
    /// The vocabulary of each kind.
    pub fn vocab_size_of_kinds(&self) -> Vec<usize> {
        let all = || vec![self.vocab_size; self.seq_lens.len()];
        self.vocab_sizes.clone().unwrap_or_else(all)
    }
}

choices! {
    /// `[data] mqar.noise`.
    pub enum MqarNoise {
        /// Token 0.
        Zeros = "zeros",
        /// Any token of the vocabulary.
        Uniform = "uniform",
        /// Any token except the keys of the sample.
        Disjoint = "disjoint",
    }
}

impl Recipe {
    /// Share of the tokens that have a label: all tokens of a text, only the queries' tokens in MQAR.
    pub fn label_share(&self) -> f64 {
        let Some(mqar) = &self.data.mqar else {
            return 1.0;
        };
        let kinds = mqar.seq_lens.iter().zip(&mqar.num_pairs).zip(&mqar.num_samples);
        let (labels, tokens) = kinds.fold((0.0, 0.0), |(labels, tokens), ((len, pairs), count)| {
            let count = *count as f64;
            (labels + count * *pairs as f64, tokens + count * *len as f64)
        });
        if tokens > 0.0 { labels / tokens } else { 1.0 }
    }
}

/// Appends the broken rules of `[data]`.
pub(super) fn check_data(data: &DataSection, parts: &Parts, rules: &mut Rules<'_>) {
    rules.bounds("data", data);
    match (data.format, &data.mqar) {
        (DataFormat::Mqar, Some(mqar)) => check_mqar(mqar, parts, rules),
        (DataFormat::Mqar, None) => rules.require(
            data.mqar.is_some(),
            "data.mqar",
            "is missing, and format = \"mqar\" needs it",
            "mqar = { vocab_size = 8192, seq_lens = [64], num_pairs = [4], num_samples = [100000] }",
        ),
        (_, mqar) => {
            check_paths("data.paths", &data.paths, rules);
            rules.require(
                mqar.is_none(),
                "data.mqar",
                "is given, but the format is another",
                "set data.format = \"mqar\", or leave data.mqar out",
            );
        }
    }
    if data.format == DataFormat::Mqar {
        let given = [("data.paths", !data.paths.is_empty()), ("data.fallback", data.fallback.is_some())];
        for (key, is_given) in given {
            let what = "is given, but format = \"mqar\" reads no files";
            rules.require(!is_given, key, what, format!("leave {key} out"));
        }
    }
    if let Some(weights) = &data.weights {
        check_weights("data.weights", weights, ("data.paths", data.paths.len()), rules);
    }
    if let Some(column) = &data.prompt_column {
        rules.require(
            !matches!(data.format, DataFormat::Text | DataFormat::Mqar),
            "data.prompt_column",
            "is given, but plain text and MQAR have no columns",
            "leave it out, or read JSONL or Parquet",
        );
        rules.require(
            !column.is_empty() && *column != data.text_column,
            "data.prompt_column",
            format!("is {column:?}, but must name another column than data.text_column = {:?}", data.text_column),
            "name the field or column that holds the prompt, or leave it out",
        );
    }
    if let Some(column) = &data.messages_column {
        check_messages(column, data, parts, rules);
    }
    rules.require(
        !data.text_column.is_empty(),
        "data.text_column",
        "is empty",
        "name the field or column that holds the text; \"text\" is usual",
    );
    rules.require(
        data.cache_dir.as_ref().is_none_or(|folder| !folder.trim().is_empty()),
        "data.cache_dir",
        "is empty",
        "leave it out to keep the shards under the output folder",
    );
}

/// Appends the broken rules of `data.messages_column`.
fn check_messages(column: &str, data: &DataSection, parts: &Parts, rules: &mut Rules<'_>) {
    let key = "data.messages_column";
    rules.require(
        !matches!(data.format, DataFormat::Text | DataFormat::Mqar),
        key,
        "is given, but plain text and MQAR have no columns",
        "leave it out, or read JSONL or Parquet",
    );
    rules.require(!column.is_empty(), key, "is empty", "name the field or column of messages, or leave it out");
    rules.require(
        data.prompt_column.is_none(),
        key,
        "is given, and data.prompt_column too",
        "leave one of them out: a chat has its questions among its messages",
    );
    if let Some(tokenizer) = parts.tokenizer.as_ref().and_then(TokenizerSection::given) {
        rules.require(
            matches!(tokenizer, TokenizerSource::Path(_)),
            key,
            "is given, but only a tokenizer of tokenizer.path has a chat template in its folder",
            "set tokenizer.path to the tokenizer.json of a model with a chat template",
        );
    }
}

/// Checks that `key` has a positive weight for each of `num_paths` paths, which the recipe gives as `paths`.
pub(super) fn check_weights(key: &str, weights: &[f64], (paths, num_paths): (&str, usize), rules: &mut Rules<'_>) {
    rules.require(
        weights.len() == num_paths,
        key,
        format!("has {} entries, {paths} has {num_paths}", weights.len()),
        "give one weight for each path, in their order",
    );
    for (index, weight) in weights.iter().enumerate() {
        rules.require(
            weight.is_finite() && *weight > 0.0,
            key,
            format!("item {} is {weight}, not a positive number", index + 1),
            "remove the path to leave its text out",
        );
    }
}

/// Appends the broken rules of `data.mqar`.
fn check_mqar(mqar: &MqarSection, parts: &Parts, rules: &mut Rules<'_>) {
    rules.bounds("data.mqar", mqar);
    let num_kinds = mqar.seq_lens.len();
    let same_lengths = mqar.num_pairs.len() == num_kinds && mqar.num_samples.len() == num_kinds;
    rules.require(
        num_kinds > 0 && same_lengths,
        "data.mqar.seq_lens",
        format!(
            "has {num_kinds} entries, num_pairs {} and num_samples {}",
            mqar.num_pairs.len(),
            mqar.num_samples.len()
        ),
        "give each list one entry a kind of sample, at least one",
    );
    let longest = mqar.seq_lens.iter().copied().max().unwrap_or(0);
    let vocab_size = mqar.vocab_size;
    rules.require(
        vocab_size.is_multiple_of(2) && vocab_size > longest && vocab_size <= MAX_VOCAB,
        "data.mqar.vocab_size",
        format!("is {vocab_size}, not an even number above the longest sample's {longest} tokens"),
        "8192 is usual",
    );
    if let Some(tokenizer) = parts.tokenizer.as_ref().and_then(TokenizerSection::given) {
        rules.require(
            matches!(tokenizer, TokenizerSource::Numbers(numbers) if numbers >= vocab_size),
            "tokenizer.numbers",
            "is missing or too small: MQAR's tokens are numbers, and the tokenizer's job is to name them",
            format!("[tokenizer] numbers = {vocab_size}"),
        );
    }
    if let Some(training) = &parts.training {
        rules.require(
            longest <= training.seq_len,
            "data.mqar.seq_lens",
            format!("holds {longest}, which does not fit rows of training.seq_len = {}", training.seq_len),
            format!("set training.seq_len = {longest}"),
        );
    }
    let vocab_sizes = mqar.vocab_size_of_kinds();
    rules.require(
        vocab_sizes.len() == num_kinds,
        "data.mqar.vocab_sizes",
        format!("has {} entries, seq_lens {num_kinds}", vocab_sizes.len()),
        "give it one entry a kind of sample, or leave it out",
    );
    let kinds = mqar.seq_lens.iter().zip(&mqar.num_pairs).zip(&mqar.num_samples).zip(&vocab_sizes);
    for (((&seq_len, &num_pairs), &num_samples), &of_kind) in kinds {
        rules.require(
            mqar.vocab_sizes.is_none() || (of_kind.is_multiple_of(2) && of_kind > seq_len && of_kind <= vocab_size),
            "data.mqar.vocab_sizes",
            format!("holds {of_kind} for samples of {seq_len} tokens"),
            format!("use even numbers above the sample's length, up to vocab_size = {vocab_size}"),
        );
        rules.require(
            seq_len.is_multiple_of(2),
            "data.mqar.seq_lens",
            format!("holds {seq_len}, which is odd"),
            "use even lengths",
        );
        // A sample has room for `seq_len / 4` pairs, and keys come from the lower half of the vocabulary.
        let room = (seq_len / 4).min((of_kind / 2).saturating_sub(1));
        rules.require(
            (1..=room).contains(&num_pairs),
            "data.mqar.num_pairs",
            format!("holds {num_pairs}, but samples of {seq_len} tokens have room for 1 to {room}"),
            "a pair takes two tokens, its query two more, and each needs a key of its own",
        );
        rules.at_least_one("data.mqar.num_samples", num_samples as u64);
    }
}
