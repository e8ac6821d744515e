//! A corpus: which files, in which order, and under which limits.

mod documents;
mod files;
mod hub;
mod source;

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::error::DataError;
pub(crate) use documents::Cursor;
pub use documents::{CorpusReport, Documents};
pub use hub::HubConfig;
use hub::{Hub, RemoteFile};

/// How documents lie in files. Text and JSONL may be packed: a file whose name ends in `.gz` or `.zst` is unpacked on the way.
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
    /// One row is one document, its text in `text_column`.
    Parquet {
        /// Name of the column that holds the text; a column inside a group by its path, as "meta.text".
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
    /// Files, folders and globs, with `~` and variables already expanded, and data sets of the Hugging Face hub
    /// (`hf://datasets/OWNER/NAME[@REVISION][/FILES]`). Each must match at least one file.
    pub paths: Vec<String>,
    /// How documents lie in the files.
    pub format: Format,
    /// File name endings taken from *folders*, without the dot, and without the `.gz` or `.zst` of a packed file. Files named alone or by a glob are always taken; hidden
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

    /// Every row of `paths`, strictly: nothing dropped, nothing skipped. From folders `.parquet`.
    pub fn parquet(paths: Vec<String>, text_column: &str) -> Self {
        Self {
            format: Format::Parquet {
                text_column: text_column.to_owned(),
            },
            extensions: vec!["parquet".to_owned()],
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
    /// `None` for a file on this disk.
    remote: Option<RemoteFile>,
}

/// One document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Its text, never blank, without a byte order mark.
    pub text: String,
    /// Its file, an index into [`Corpus::files`].
    pub file_idx: usize,
    /// Its line or row in that file, from 1; always 1 in [`Format::Text`].
    pub line: u64,
}

/// The files of a corpus, in order. Opening it lists them and reads none.
#[derive(Debug, Clone)]
pub struct Corpus {
    config: CorpusConfig,
    files: Vec<SourceFile>,
    hub: Option<Arc<Hub>>,
}

impl Corpus {
    /// Expands the paths. Where one names a data set of the hub, the list of files stays empty until
    /// [`connect`](Self::connect).
    ///
    /// # Errors
    /// No paths, a bad glob, a path that matches no file, a folder that cannot be listed.
    pub fn open(config: CorpusConfig) -> Result<Self, DataError> {
        let remote = config.paths.iter().filter(|path| hub::is_remote(path));
        let mut is_remote = false;
        for path in remote {
            hub::check_path(path)?;
            is_remote = true;
        }
        let files = match is_remote {
            true => Vec::new(),
            false => files::expand(&config, None)?,
        };
        Ok(Self {
            config,
            files,
            hub: None,
        })
    }

    /// Asks the hub for the data sets that the paths name, if any do: the network is used the first time only, as
    /// `config.dir` keeps the answer.
    ///
    /// # Errors
    /// A data set that cannot be reached, or without a wanted file; those of [`open`](Self::open).
    pub fn connect(&mut self, config: &HubConfig) -> Result<(), DataError> {
        if self.hub.is_none() && self.config.paths.iter().any(|path| hub::is_remote(path)) {
            let hub = Hub::new(config.clone())?;
            self.files = files::expand(&self.config, Some(&hub))?;
            self.hub = Some(Arc::new(hub));
        }
        Ok(())
    }

    /// An error where files are missing because the hub was not asked.
    fn check_connected(&self) -> Result<(), DataError> {
        let remote = self.config.paths.iter().find(|path| hub::is_remote(path));
        match (remote, &self.hub) {
            (Some(path), None) => Err(DataError::NotConnected { path: path.clone() }),
            _ => Ok(()),
        }
    }

    /// Where a file can be read; fetches it if need be.
    fn local_path(&self, file: &SourceFile) -> Result<PathBuf, DataError> {
        match (&file.remote, &self.hub) {
            (Some(remote), Some(hub)) => hub.fetch(remote),
            _ => Ok(file.path.clone()),
        }
    }

    /// Removes the fetched copies of some files.
    pub(crate) fn discard_fetched(&self, files: std::ops::Range<usize>) {
        for file in &self.files[files] {
            if let (Some(remote), Some(hub)) = (&file.remote, &self.hub) {
                hub.discard(remote);
            }
        }
    }

    /// What it was opened with.
    pub fn config(&self) -> &CorpusConfig {
        &self.config
    }

    /// The files, in reading order, each once.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// About how many bytes of text there are, mostly more than less: the files' sizes, four times those of packed ones, or
    /// `max_bytes` if that is less.
    pub fn max_text_bytes(&self) -> u64 {
        let is_parquet = matches!(self.config.format, Format::Parquet { .. });
        let total = self.files.iter().map(|file| {
            let is_packed = is_parquet || source::Packed::of(&file.path).0.is_some();
            file.num_bytes * if is_packed { USUAL_PACKING } else { 1 }
        });
        let total = total.sum::<u64>();
        self.config
            .max_bytes
            .map_or(total, |limit| total.min(limit))
    }

    /// Reads the documents, always in the same order.
    ///
    /// The first item is an error where a data set of the hub is named and was not [connected](Self::connect) to.
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

/// Packed text takes about a quarter or a third of its bytes.
const USUAL_PACKING: u64 = 4;

#[cfg(test)]
mod tests;
