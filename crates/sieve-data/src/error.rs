//! The one error type of the crate.

use sieve_files::FileError;
use std::path::{Path, PathBuf};

/// What can go wrong between a text file and a batch. Every message says what, where, and how to fix it.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The operating system refused: missing file, no permission, full disk.
    #[error(transparent)]
    File(#[from] FileError),
    /// The list of paths is empty.
    #[error("no data paths are given\n  hint: name at least one file, folder or glob")]
    NoPaths,
    /// A pattern is not a valid glob.
    #[error("{pattern:?} is not a valid glob: {reason}\n  hint: write [[] for a bracket")]
    BadGlob {
        /// The pattern as given.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A path or glob matches no file.
    #[error(
        "{pattern:?} matches no file{searched}\n  \
         hint: check the path; in folders only files with a known ending are taken, a glob takes any"
    )]
    NoFiles {
        /// The path or glob as given.
        pattern: String,
        /// What was looked for, when it was a folder.
        searched: String,
    },
    /// A path leads to a pipe, a socket or a device.
    #[error("{}: {found}, not a file\n  \
        hint: data is read more than once; write it to a file first and name that", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What is there: "a pipe (FIFO)".
        found: &'static str,
    },
    /// A path names files of several formats, and none is said.
    #[error(
        "{pattern:?} names files of several formats: {kinds}\n  \
         hint: say which is meant (format: text, jsonl or parquet), or name the files of one format, for example by a \
         glob"
    )]
    MixedFormats {
        /// The path or glob as given.
        pattern: String,
        /// Format, number of files and first file of each.
        kinds: String,
    },
    /// A document begins with the byte order mark of UTF-16.
    #[error("{0}: UTF-16, by its first two bytes; text is read as UTF-8\n  \
        hint: iconv -f UTF-16 -t UTF-8 {0} > NEW.txt, or leave such documents out: skip_invalid", path.display())]
    Utf16 {
        /// The file.
        path: PathBuf,
    },
    /// A document is not UTF-8.
    #[error("{}: not UTF-8 at byte {byte_offset}\n  \
        hint: convert the file, or leave such documents out: skip_invalid", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Offset of the first bad byte in the file.
        byte_offset: u64,
    },
    /// A document holds a NUL byte, so it is most likely no text.
    #[error("{}: NUL at byte {byte_offset}, so this is probably not text\n  \
        hint: leave the file out, or all such documents: skip_invalid", path.display())]
    NulByte {
        /// The file.
        path: PathBuf,
        /// Offset of the first NUL in the file (text), or of its line (JSONL).
        byte_offset: u64,
    },
    /// A document is larger than allowed.
    #[error("{}: a document of {bytes} bytes is over the limit of {max_bytes}\n  \
        hint: raise data.max_document_bytes, split the document, or leave such documents out: \
        data.skip_invalid; a text file that a path names by itself may be larger", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Size of the document.
        bytes: u64,
        /// The limit.
        max_bytes: u64,
    },
    /// A line of a JSONL file is longer than any line is read.
    #[error("{}: line {line} is longer than {max_bytes} bytes\n  \
        hint: raise max_document_bytes, split the document, or allow invalid documents to be skipped", path.display())]
    LineTooLong {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// The limit.
        max_bytes: u64,
    },
    /// A line of a JSONL file is not a JSON object.
    #[error("{}: line {line} is not a JSON object: {reason}\n  \
        hint: mend the line, or leave such lines out: skip_invalid", path.display())]
    BadJson {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// The parser's reason.
        reason: String,
    },
    /// Prompts are asked for in a file of plain text.
    #[error("{}: plain text has no column {column:?}\n  \
        hint: prompt_column is for JSONL and Parquet: leave it out, or name such files alone", path.display())]
    TextHasNoColumns {
        /// The file.
        path: PathBuf,
        /// The column of prompts.
        column: String,
    },
    /// A JSONL object lacks the text column.
    #[error("{}: line {line} has no column {column:?} (it has {found:?})\n  \
        hint: set text_column to the column that holds the text (prompt_column: the prompt), or leave such rows out: \
        skip_invalid", path.display())]
    MissingColumn {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// The column looked for.
        column: String,
        /// The columns of that line.
        found: Vec<String>,
    },
    /// The text column holds something else than a string.
    #[error("{}: line {line}: column {column:?} is {found}, not a string\n  \
        hint: set text_column to the column that holds the text (prompt_column: the prompt), or leave such rows out: \
        skip_invalid", path.display())]
    ColumnNotText {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// The column looked for.
        column: String,
        /// What is there: "a number", "null".
        found: &'static str,
    },
    /// A file that is to be read row by row, and says nothing of rows.
    #[error("{}: neither JSONL nor Parquet by its ending\n  \
        hint: name it .jsonl (one JSON object a line) or .parquet; .jsonl.gz and .jsonl.zst are read \
        too", path.display())]
    NotATable {
        /// The file.
        path: PathBuf,
    },
    /// A file without a row.
    #[error("{}: there is no row in it\n  hint: name a file with a row a line", path.display())]
    EmptyTable {
        /// The file.
        path: PathBuf,
    },
    /// A packed file cannot be unpacked.
    #[error("{}: damaged after {byte_offset} bytes of text: {packing}: {reason}\n  \
        hint: nothing of it was used; fetch or pack the file again", path.display())]
    BrokenArchive {
        /// The file.
        path: PathBuf,
        /// "gzip" or "zstd".
        packing: &'static str,
        /// Unpacked bytes before the damage.
        byte_offset: u64,
        /// The unpacker's reason.
        reason: String,
    },
    /// A Parquet file cannot be read.
    #[error("{}: not a readable Parquet file: {reason}\n  hint: fetch or write the file again", path.display())]
    BadParquet {
        /// The file.
        path: PathBuf,
        /// The reader's reason.
        reason: String,
    },
    /// A Parquet file lacks the text column.
    #[error("{}: no column {column:?} (it has {found:?})\n  \
        hint: set text_column to the column that holds the text (prompt_column: the prompt)", path.display())]
    MissingParquetColumn {
        /// The file.
        path: PathBuf,
        /// The column looked for.
        column: String,
        /// The columns that there are (at most 16).
        found: Vec<String>,
    },
    /// The text column of a Parquet file holds no text.
    #[error("{}: column {column:?} holds {found}, not text\n  \
        hint: set text_column to the column that holds the text (prompt_column: the prompt)", path.display())]
    ParquetColumnNotText {
        /// The file.
        path: PathBuf,
        /// The column looked for.
        column: String,
        /// What it holds: "INT64", "lists".
        found: String,
    },
    /// The text of a Parquet row cannot be used.
    #[error("{}: row {row} {what}\n  \
        hint: leave the row out, or all such rows: skip_invalid", path.display())]
    BadRow {
        /// The file.
        path: PathBuf,
        /// The row, from 1.
        row: u64,
        /// What is wrong with it.
        what: String,
    },
    /// The `hf://` path of a tokenizer cannot be understood.
    #[error(
        "{path:?} names no tokenizer of the hub\n  \
         hint: write hf://OWNER/NAME, with @REVISION and /FOLDER behind it if need be"
    )]
    BadHubTokenizer {
        /// The path as given.
        path: String,
    },
    /// A file of a tokenizer is not there.
    #[error(
        "there is no tokenizer {}\n  \
         hint: huggingface-cli download OWNER/NAME tokenizer.json --local-dir DIR fetches a model's; or name it \
         as hf://OWNER/NAME, or train one: [tokenizer] train = {{ vocab_size = 8192 }} (docs/own-data.md)",
        path.display()
    )]
    NoTokenizer {
        /// The file.
        path: PathBuf,
    },
    /// A path that begins with `hf://` cannot be understood.
    #[error(
        "{path:?} is no data set: {reason}\n  \
         hint: write hf://datasets/OWNER/NAME, with @REVISION and /FILES behind it if need be"
    )]
    BadHubPath {
        /// The path as given.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A data set of the Hugging Face hub cannot be reached.
    #[error(
        "data set {repo} at {endpoint}: {reason}\n  \
         hint: check the name, the revision and the network; 401 and 404 mean that there is no such data set, or that \
         it needs a token (HF_TOKEN); what was fetched before is kept, so ask again"
    )]
    Hub {
        /// "OWNER/NAME".
        repo: String,
        /// The hub's address.
        endpoint: String,
        /// The reason.
        reason: String,
    },
    /// A file of root certificates cannot be used.
    #[error("{}: not usable as root certificates: {reason}\n  \
        hint: SSL_CERT_FILE names a file in PEM form; unset it to trust the roots of the web", path.display())]
    BadCertificates {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A corpus names a data set of the hub, but it was opened without access to the hub.
    #[error(
        "{path:?} lies on the Hugging Face hub, which is not read here\n  \
         hint: prepare the data first, or name local files"
    )]
    NotConnected {
        /// The path as given.
        path: String,
    },
    /// Every file was read and no document came out.
    #[error(
        "no document in {}{} ({summary})\n  hint: check the paths and the format, and what limits them: \
         data.max_document_bytes for files of folders and globs, data.max_bytes for all",
        first.display(),
        match num_files { 0 | 1 => String::new(), more => format!(" and {} files more", more - 1) }
    )]
    EmptyCorpus {
        /// Number of files read.
        num_files: usize,
        /// The first of them.
        first: PathBuf,
        /// Where the documents went.
        summary: String,
    },
    /// A split came out empty.
    #[error(
        "the {split} split holds no document: {num_documents} documents, validation_fraction {validation_fraction}\n  \
         hint: name text to validate on with [validation] paths, change validation_fraction, or give more text"
    )]
    EmptySplit {
        /// "train", "train-001" for the second of several corpora, or "validation".
        split: String,
        /// Number of documents in all.
        num_documents: u64,
        /// The fraction asked for.
        validation_fraction: f64,
    },
    /// A setting is out of its range.
    #[error("{name}: {reason}")]
    BadSetting {
        /// Name of the setting.
        name: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A tokenizer file cannot be used.
    #[error("{}: not a usable tokenizer.json: {reason}\n  \
        hint: name the tokenizer.json of a Hugging Face model, or one of sieve tokenizer train", path.display())]
    BadTokenizer {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// Training a tokenizer failed.
    #[error("the tokenizer could not be trained: {reason}")]
    TokenizerTraining {
        /// The reason.
        reason: String,
    },
    /// A special token is not in the vocabulary.
    #[error(
        "the tokenizer has no token {token:?}\n  \
         hint: name its end-of-document token by tokenizer.eos_token; its special tokens are {special:?}"
    )]
    NoSuchToken {
        /// What was looked for.
        token: String,
        /// The special tokens that there are (at most 16).
        special: Vec<String>,
    },
    /// The tokenizer refused a text or ids.
    #[error("the tokenizer cannot {action} {what}: {reason}")]
    Tokenize {
        /// "encode" or "decode".
        action: &'static str,
        /// The text's origin.
        what: String,
        /// The reason.
        reason: String,
    },
    /// A shard file is malformed.
    #[error("{}: {what}\n  hint: the file is damaged or no Megatron-LM shard; prepare the data again", path.display())]
    BadShard {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A token id is outside the vocabulary.
    #[error("{}: document {document} holds token {token}, outside a vocabulary of {vocab_size}\n  \
        hint: the shard was made with another tokenizer than the model's", path.display())]
    TokenOutOfVocabulary {
        /// The file.
        path: PathBuf,
        /// The document.
        document: u64,
        /// The token id as stored.
        token: i64,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A shard is too small for one sample.
    #[error("{}: {num_tokens} tokens in {num_documents} documents give no sample of seq_len {seq_len}\n  \
        hint: give more text or lower seq_len", path.display())]
    TooFewTokens {
        /// The shard.
        path: PathBuf,
        /// Its tokens.
        num_tokens: u64,
        /// Its documents.
        num_documents: u64,
        /// The length asked for.
        seq_len: usize,
    },
    /// The folder holds another preparation, or something else.
    #[error("{}: {what}\n  hint: choose another folder, or ask for the data to be replaced", dir.display())]
    OtherPreparation {
        /// The folder.
        dir: PathBuf,
        /// What it holds, and what differs.
        what: String,
    },
    /// A side file of a preparation cannot be understood.
    #[error("{}: {what}\n  hint: prepare the data again", path.display())]
    BadMeta {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The background thread ended early.
    #[error("the loader's background thread ended early: {reason}")]
    PrefetchStopped {
        /// The reason.
        reason: String,
    },
}

impl DataError {
    /// For `map_err`: wraps an I/O error with what was tried on which path.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| {
            let error = FileError { action, path, source };
            error.into()
        }
    }

    /// True when one document is at fault and the others can still be read.
    pub(crate) fn is_invalid_document(&self) -> bool {
        matches!(
            self,
            Self::Utf16 { .. }
                | Self::NotUtf8 { .. }
                | Self::NulByte { .. }
                | Self::TooLarge { .. }
                | Self::LineTooLong { .. }
                | Self::BadJson { .. }
                | Self::MissingColumn { .. }
                | Self::ColumnNotText { .. }
                | Self::BadRow { .. }
        )
    }
}
