//! A corpus: which files, in which order, and under which limits.

mod documents;
mod files;
mod source;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::error::DataError;
pub use documents::{CorpusReport, Documents};

/// How documents lie in files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// One file is one document.
    Text,
    /// One line is one document: a JSON object with the text in `text_column`. Blank lines are passed over.
    Jsonl {
        /// Name of the column that holds the text; usually "text".
        text_column: String,
    },
}

/// The order in which files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileOrder {
    /// By path.
    #[default]
    Sorted,
    /// By a seeded hash of the path below its folder or glob, so that `max_bytes` takes a fair sample of all files and
    /// the choice does not depend on where the folder lies.
    Hashed {
        /// Another seed, another sample.
        seed: u64,
    },
}

/// Which documents make up a corpus.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorpusConfig {
    /// Files, folders and globs, with `~` and variables already expanded. Each must match at least one file.
    pub paths: Vec<String>,
    /// How documents lie in the files.
    pub format: Format,
    /// File name endings taken from *folders*, without the dot. Files named alone or by a glob are always taken; hidden
    /// files and folders, and links to folders, never.
    pub extensions: Vec<String>,
    /// The order of the files.
    pub order: FileOrder,
    /// Stop before the document that would pass this many bytes of text.
    pub max_bytes: Option<u64>,
    /// A larger document is invalid.
    pub max_document_bytes: Option<u64>,
    /// Keep only the first of documents with equal text.
    pub deduplicate: bool,
    /// Pass over and count invalid documents (too large, with a NUL, not UTF-8, not JSON, without the text column)
    /// instead of failing.
    pub skip_invalid: bool,
}

impl CorpusConfig {
    /// Every text file of `paths`, strictly: nothing dropped, nothing skipped. From folders `.txt`, `.md` and `.rs`.
    pub fn text(paths: Vec<String>) -> Self {
        Self {
            paths,
            format: Format::Text,
            extensions: ["txt", "md", "rs"].map(String::from).to_vec(),
            order: FileOrder::Sorted,
            max_bytes: None,
            max_document_bytes: None,
            deduplicate: false,
            skip_invalid: false,
        }
    }

    /// Every line of `paths`, strictly: nothing dropped, nothing skipped. From folders `.jsonl`.
    pub fn jsonl(paths: Vec<String>, text_column: &str) -> Self {
        Self {
            format: Format::Jsonl {
                text_column: text_column.to_owned(),
            },
            extensions: vec!["jsonl".to_owned()],
            ..Self::text(paths)
        }
    }
}

/// One file of a corpus, as it was when the corpus was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its size.
    pub num_bytes: u64,
    /// Its time of change, in nanoseconds since 1970; 0 where the system has none.
    pub modified_ns: u64,
}

/// One document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Its text, never blank, without a byte order mark.
    pub text: String,
    /// Its file, an index into [`Corpus::files`].
    pub file_idx: usize,
    /// Its line in that file, from 1; always 1 in [`Format::Text`].
    pub line: u64,
}

/// The files of a corpus, in order. Opening it lists them and reads none.
#[derive(Debug, Clone)]
pub struct Corpus {
    config: CorpusConfig,
    files: Vec<SourceFile>,
}

impl Corpus {
    /// Expands the paths.
    ///
    /// # Errors
    /// No paths, a bad glob, a path that matches no file, a folder that cannot be listed.
    pub fn open(config: CorpusConfig) -> Result<Self, DataError> {
        let files = files::expand(&config)?;
        Ok(Self { config, files })
    }

    /// What it was opened with.
    pub fn config(&self) -> &CorpusConfig {
        &self.config
    }

    /// The files, in reading order, each once.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// An upper bound of the text's bytes: the files' sizes, or `max_bytes` if that is less.
    pub fn max_text_bytes(&self) -> u64 {
        let total = self.files.iter().map(|file| file.num_bytes).sum::<u64>();
        self.config
            .max_bytes
            .map_or(total, |limit| total.min(limit))
    }

    /// Reads the documents, always in the same order.
    pub fn documents(&self) -> Documents<'_> {
        Documents::new(self)
    }

    /// Changes when a file comes, goes or is changed (path, size or time), or when a setting is.
    pub fn fingerprint(&self) -> u128 {
        let mut hash = Xxh3::new();
        let settings = serde_json::to_vec(&self.config).expect("plain settings serialise");
        hash.update(&(settings.len() as u64).to_le_bytes());
        hash.update(&settings);
        for file in &self.files {
            let path = file.path.as_os_str().as_encoded_bytes();
            hash.update(&(path.len() as u64).to_le_bytes());
            hash.update(path);
            hash.update(&file.num_bytes.to_le_bytes());
            hash.update(&file.modified_ns.to_le_bytes());
        }
        hash.digest128()
    }
}

#[cfg(test)]
mod tests;
