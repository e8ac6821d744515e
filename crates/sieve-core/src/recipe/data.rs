//! `[data]`: the text or synthetic task that a run trains on.

use super::Recipe;
use crate::keys::{choices, keys};

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

impl DataSection {
    /// Whether loss is taken of answers alone: of chats, or of the texts behind prompts.
    pub fn has_answers(&self) -> bool {
        self.messages_column.is_some() || self.prompt_column.is_some()
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
