//! Which files a corpus has, and how they hold documents.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::hub::RemoteFile;
use super::source::Packed;

/// How files hold documents. Text and JSONL may be compressed: a file whose name ends in `.gz` or `.zst` is
/// decompressed while it is read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Plain text: one file is one document.
    Text,
    /// One line is one document: a JSON object with the text in `text_column`. Blank lines are skipped.
    Jsonl {
        /// Name of the column that holds the text; usually "text".
        text_column: String,
    },
    /// Apache Parquet: one row is one document, its text in `text_column`.
    Parquet {
        /// Name of the column that holds the text; the path of a column inside a group, as "meta.text".
        text_column: String,
    },
    /// The format of each file follows from the end of its name: `.jsonl` and `.ndjson`, `.parquet`, and any other is
    /// text. All files of one path have the same format; several paths may have different ones.
    ByEnding {
        /// Name of the column that holds the text of JSONL and Parquet files.
        text_column: String,
    },
}

impl Format {
    /// The format of a file, by its name's ending.
    pub(super) fn of(&self, path: &Path) -> Self {
        let Self::ByEnding { text_column } = self else {
            return self.clone();
        };
        let text_column = text_column.clone();
        match ending(path).to_ascii_lowercase().as_str() {
            "jsonl" | "ndjson" => Self::Jsonl { text_column },
            "parquet" => Self::Parquet { text_column },
            _ => Self::Text,
        }
    }

    /// The same format with its text in another column; plain text has no column.
    #[must_use]
    pub fn with_column(&self, column: &str) -> Self {
        let mut changed = self.clone();
        match &mut changed {
            Self::Text => {}
            Self::Jsonl { text_column } | Self::Parquet { text_column } | Self::ByEnding { text_column } => {
                text_column.replace_range(.., column);
            }
        }
        changed
    }

    /// File name endings that are read from folders.
    pub(super) fn extensions(&self) -> Vec<String> {
        let endings: &[&str] = match self {
            Self::Text => &["txt", "md", "rs"],
            Self::Jsonl { .. } => &["jsonl"],
            Self::Parquet { .. } => &["parquet"],
            Self::ByEnding { .. } => &["txt", "md", "rs", "jsonl", "ndjson", "parquet"],
        };
        endings.iter().copied().map(String::from).collect()
    }

    /// Name of the format in error messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Jsonl { .. } => "jsonl",
            Self::Parquet { .. } => "parquet",
            Self::ByEnding { .. } => "by ending",
        }
    }
}

/// The order in which files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileOrder {
    /// Files in the order of their paths.
    #[default]
    Sorted,
    /// By a seeded hash of the path relative to its folder or glob, so that `max_bytes` takes a fair sample of all
    /// files, independent of the folder's location.
    Hashed {
        /// Seed of the hash that orders files.
        seed: u64,
    },
}

/// The files of a corpus, and which of their documents belong to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorpusConfig {
    /// Files, folders and globs, with `~` and variables already expanded, and data sets of the Hugging Face hub
    /// (`hf://datasets/OWNER/NAME[@REVISION][/FILES]`). Each must match at least one file.
    pub paths: Vec<String>,
    /// How files hold documents. [`Corpus::open`](super::Corpus::open) replaces [`Format::ByEnding`] if all files have
    /// the same format.
    pub format: Format,
    /// File name endings that are read from *folders*, without the dot, and without the `.gz` or `.zst` of a compressed
    /// file. A file that a path or glob names is always read; hidden files and folders, and links to folders, never
    /// are.
    pub extensions: Vec<String>,
    /// The order in which files are read.
    pub order: FileOrder,
    /// For JSONL and Parquet: the column with a document's prompt, which comes before its text and is not predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_column: Option<String>,
    /// For JSONL and Parquet: the column with a chat's messages, of which the assistant's are predicted. It takes the
    /// place of `text_column`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages_column: Option<String>,
    /// Stop before the document that would pass this many bytes of text.
    pub max_bytes: Option<u64>,
    /// A document of more bytes is invalid. The limit holds for rows, and for text files in folders or matched by a
    /// glob; a text file that a path names directly may be larger.
    pub max_document_bytes: Option<u64>,
    /// Keep only the first of documents with equal text.
    pub deduplicate: bool,
    /// Skip and count invalid documents (too large, with a NUL, not UTF-8, not JSON, without the text column) instead
    /// of failing.
    pub skip_invalid: bool,
}

impl CorpusConfig {
    /// Every text file of `paths`, without limits; an invalid document is an error. In folders, files that end in
    /// `.txt`, `.md` or `.rs` are read.
    pub fn text(paths: Vec<String>) -> Self {
        Self::new(paths, Format::Text)
    }

    /// Every line of `paths`, without limits; an invalid document is an error. In folders, `.jsonl` files are read.
    pub fn jsonl(paths: Vec<String>, text_column: &str) -> Self {
        Self::new(paths, Format::Jsonl { text_column: text_column.to_owned() })
    }

    /// Every row of `paths`, without limits; an invalid document is an error. In folders, `.parquet` files are read.
    pub fn parquet(paths: Vec<String>, text_column: &str) -> Self {
        Self::new(paths, Format::Parquet { text_column: text_column.to_owned() })
    }

    /// Every document of `paths`, with the format of each file from its ending, without limits; an invalid document is
    /// an error. If all files have the same format, the corpus equals the one from [`text`](Self::text),
    /// [`jsonl`](Self::jsonl) or [`parquet`](Self::parquet).
    pub fn by_ending(paths: Vec<String>, text_column: &str) -> Self {
        Self::new(paths, Format::ByEnding { text_column: text_column.to_owned() })
    }

    /// Whether not all of a document is predicted: it has a prompt, or is a chat.
    pub(crate) fn has_parts(&self) -> bool {
        self.prompt_column.is_some() || self.messages_column.is_some()
    }

    /// The documents of `paths` in one format, without limits and with nothing left out.
    fn new(paths: Vec<String>, format: Format) -> Self {
        Self {
            paths,
            extensions: format.extensions(),
            format,
            order: FileOrder::Sorted,
            prompt_column: None,
            messages_column: None,
            max_bytes: None,
            max_document_bytes: None,
            deduplicate: false,
            skip_invalid: false,
        }
    }
}

/// One file of a corpus, as it was when the corpus was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Size of the file in bytes.
    pub num_bytes: u64,
    /// Modification time in nanoseconds since 1970; 0 if the system has none.
    pub modified_ns: u64,
    /// The file on the hub; `None` for a file on this disk.
    pub(super) remote: Option<RemoteFile>,
    /// Whether a path names this file directly, not by a folder or glob.
    pub(super) is_named: bool,
}

/// The ending of a file's name, before `.gz` or `.zst` if it has one of these.
pub(super) fn ending(path: &Path) -> &str {
    let ending = Packed::of(path).1.extension();
    ending.and_then(OsStr::to_str).unwrap_or_default()
}
