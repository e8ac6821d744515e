//! A corpus: its files, their order, and the limits on its documents.

mod config;
mod documents;
mod files;
mod hub;
mod sample;
mod source;
mod table;

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use crate::chat::ChatFormat;
use crate::error::DataError;
pub use config::{CorpusConfig, FileOrder, Format, SourceFile};
pub(crate) use documents::Cursor;
pub use documents::{AlsoHeldOut, CorpusReport, Documents};
use files::PassedOver;
use hub::Hub;
pub use hub::{
    DownloadProgress, HubConfig, HubLimits, HubModel, HubModelEvent, SeeDownload, Surroundings, hub_model,
    hub_tokenizer, is_hub_model, is_hub_tokenizer,
};
pub use source::TableAsText;
pub use table::{TableRow, read_table};

/// One document of a corpus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// The text, never blank, without a byte order mark.
    pub text: String,
    /// The prompt, which comes before the text and is not predicted; `None` without [`CorpusConfig::prompt_column`].
    pub prompt: Option<String>,
    /// Of a chat, the bytes of the text that are predicted; `None` without [`CorpusConfig::messages_column`].
    pub answers: Option<Vec<Range<usize>>>,
    /// Index of the document's file in [`Corpus::files`].
    pub file_idx: usize,
    /// Line or row of the document in the file, from 1; always 1 in [`Format::Text`].
    pub line: u64,
}

impl Document {
    /// Whether the document has a prompt or is a chat: it goes into a split whole, since the end of an answer means
    /// little without its beginning.
    pub(crate) fn is_indivisible(&self) -> bool {
        self.prompt.is_some() || self.answers.is_some()
    }

    /// Bytes of the text that is predicted: of a chat the answers, else all of it.
    pub(crate) fn predicted_bytes(&self) -> u64 {
        let answers = self.answers.as_ref().map(|answers| answers.iter().map(Range::len).sum());
        answers.unwrap_or(self.text.len()) as u64
    }
}

/// The files of a corpus, in order. Opening it lists them and reads none.
#[derive(Debug, Clone)]
pub struct Corpus {
    config: CorpusConfig,
    files: Vec<SourceFile>,
    passed_over: PassedOver,
    /// Where remote files come from; `None` before [`connect`](Self::connect).
    hub: Option<Arc<Hub>>,
    /// The chat template, which makes texts of messages; `None` before [`with_chats`](Self::with_chats).
    chats: Option<Arc<dyn ChatFormat>>,
    /// [`fingerprint`](Self::fingerprint), once it is known.
    fingerprint: OnceLock<u128>,
}

impl Corpus {
    /// Lists the files of the paths. If a path names a data set of the hub, the list stays empty until
    /// [`connect`](Self::connect) is called.
    ///
    /// # Errors
    /// No paths, a bad glob, a path that matches no file, a folder that cannot be listed.
    pub fn open(config: CorpusConfig) -> Result<Self, DataError> {
        let mut is_remote = false;
        for path in config.paths.iter().filter(|path| hub::is_remote(path)) {
            hub::check_path(path)?;
            is_remote = true;
        }
        let mut corpus = Self {
            config,
            files: Vec::new(),
            passed_over: PassedOver::new(),
            hub: None,
            chats: None,
            fingerprint: OnceLock::new(),
        };
        if !is_remote {
            let no_hub = None;
            corpus.list(no_hub)?;
        }
        Ok(corpus)
    }

    /// Lists the data sets of the hub that the paths name. The network is used the first time only, because the listing
    /// is kept in `config.dir`.
    ///
    /// # Errors
    /// A data set that cannot be reached, or has no file that a path names; the errors of [`open`](Self::open).
    pub fn connect(&mut self, config: &HubConfig) -> Result<(), DataError> {
        if self.hub.is_none() && self.config.paths.iter().any(|path| hub::is_remote(path)) {
            let hub = Hub::new(config.clone())?;
            self.list(Some(&hub))?;
            self.hub = Some(Arc::new(hub));
        }
        Ok(())
    }

    /// Sets the chat template, which a corpus with [`CorpusConfig::messages_column`] needs to make texts of messages.
    #[must_use]
    pub fn with_chats(self, chats: Option<Arc<dyn ChatFormat>>) -> Self {
        Self { chats, ..self }
    }

    /// The chat template, if documents are chats.
    pub(crate) fn chats(&self) -> Option<&dyn ChatFormat> {
        self.chats.as_deref().filter(|_| self.config.messages_column.is_some())
    }

    /// Lists the files. If all have the same format, that becomes the format of the corpus.
    fn list(&mut self, hub: Option<&Hub>) -> Result<(), DataError> {
        (self.files, self.passed_over) = files::expand(&self.config, hub)?;
        self.fingerprint = OnceLock::new();
        if matches!(self.config.format, Format::ByEnding { .. }) {
            let mut formats = self.files.iter().map(|file| self.config.format.of(&file.path));
            if let Some(first) = formats.next()
                && formats.all(|format| format == first)
            {
                self.config.extensions = first.extensions();
                self.config.format = first;
            }
        }
        Ok(())
    }

    /// Returns an error if files are missing because the hub was not contacted.
    pub(crate) fn check_connected(&self) -> Result<(), DataError> {
        let remote = self.config.paths.iter().find(|path| hub::is_remote(path));
        match (remote, &self.hub) {
            (Some(path), None) => Err(DataError::not_connected(path)),
            _ => Ok(()),
        }
    }

    /// Refuses a text column with a name other than "text" if all files are plain text, which has no columns.
    ///
    /// # Errors
    /// Such a name.
    pub fn check_text_column(&self, column: &str) -> Result<(), DataError> {
        match self.files.first() {
            Some(file) if self.config.format == Format::Text && column != "text" => {
                Err(DataError::no_column(&file.path, column, "text_column"))
            }
            _ => Ok(()),
        }
    }

    /// Path at which a file can be read; fetches a file of the hub that is missing.
    fn local_path(&self, file: &SourceFile) -> Result<PathBuf, DataError> {
        match (&file.remote, &self.hub) {
            (Some(remote), Some(hub)) => hub.fetch(remote),
            _ => Ok(file.path.clone()),
        }
    }

    /// The limit on the size of a file's documents.
    fn max_document_bytes(&self, file: &SourceFile) -> Option<u64> {
        let is_exempt = file.is_named && self.config.format.of(&file.path) == Format::Text;
        self.config.max_document_bytes.filter(|_| !is_exempt)
    }

    /// Removes the fetched copies of some files.
    pub(crate) fn discard_fetched(&self, files: std::ops::Range<usize>) {
        for file in &self.files[files] {
            if let (Some(remote), Some(hub)) = (&file.remote, &self.hub) {
                hub.discard(remote);
            }
        }
    }

    /// The settings that the corpus was opened with.
    pub fn config(&self) -> &CorpusConfig {
        &self.config
    }

    /// The files in reading order, without duplicates.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// Number of files in folders that are skipped because of the ending of their name, by that ending without its dot.
    /// Hidden files, and data sets of the hub, are not counted.
    pub fn passed_over(&self) -> &BTreeMap<String, usize> {
        &self.passed_over
    }

    /// An estimate of the bytes of text that is rather too large than too small: the files' sizes, four times the size
    /// of compressed ones, at most `max_bytes`.
    pub fn max_text_bytes(&self) -> u64 {
        let sizes = self.files.iter().map(|file| self.unpacked_bytes(file));
        // A listing of the hub may name any sizes, so their sum must not overflow.
        let total = sizes.fold(0, u64::saturating_add);
        self.config.max_bytes.map_or(total, |limit| total.min(limit))
    }

    /// The size of a file, four times that if it is compressed.
    fn unpacked_bytes(&self, file: &SourceFile) -> u64 {
        let is_parquet = matches!(self.config.format.of(&file.path), Format::Parquet { .. });
        let is_packed = is_parquet || source::Packed::of(&file.path).0.is_some();
        file.num_bytes.saturating_mul(if is_packed { USUAL_PACKING } else { 1 })
    }

    /// An estimate of the bytes of text and prompts. Other columns of JSONL and Parquet files do not count: their share
    /// is measured in the first rows of the first `FILES_LOOKED_INTO` files.
    pub fn text_bytes(&self) -> u64 {
        let (texts, tables): (Vec<_>, Vec<_>) =
            self.files.iter().partition(|file| self.config.format.of(&file.path) == Format::Text);
        let size = |files: &[&SourceFile]| files.iter().map(|file| self.unpacked_bytes(file) as f64).sum::<f64>();
        let (mut text_bytes, mut bytes_read) = (0, 0.0);
        for &file in tables.iter().filter(|file| file.remote.is_none()).take(FILES_LOOKED_INTO) {
            let corpus = Self { files: vec![file.clone()], ..self.clone() };
            let (mut documents, mut found) = (corpus.documents(), 0);
            while found < TEXT_LOOKED_AT
                && let Some(Ok(document)) = documents.next()
            {
                found += document.text.len() + document.prompt.map_or(0, |prompt| prompt.len());
            }
            let num_bytes = self.unpacked_bytes(file);
            text_bytes += found;
            bytes_read += documents.share_read(num_bytes) * num_bytes as f64;
        }
        let share = if text_bytes > 0 { text_bytes as f64 / bytes_read } else { 1.0 };
        let total = (size(&texts) + size(&tables) * share) as u64;
        self.config.max_bytes.map_or(total, |limit| total.min(limit))
    }

    /// The first file that is read as plain text although it holds rows of a table, among the first
    /// `FILES_LOOKED_INTO` text files on this disk.
    pub fn table_as_text(&self) -> Option<(&Path, TableAsText)> {
        let local = self.files.iter().filter(|file| file.remote.is_none());
        let text = local.filter(|file| self.config.format.of(&file.path) == Format::Text);
        let mut paths = text.map(|file| file.path.as_path()).take(FILES_LOOKED_INTO);
        paths.find_map(|path| Some((path, source::table_of(path)?)))
    }

    /// Reads the documents, always in the same order.
    ///
    /// The first item is an error if a path names a data set of the hub and [`connect`](Self::connect) was not called.
    pub fn documents(&self) -> Documents<'_> {
        Documents::resume(self, Cursor::default(), HashSet::new())
    }

    /// A hash that changes when a file is added, removed or changed (path, size, time, or the text at its beginning,
    /// middle and end), or when a setting is changed. The first call reads up to 192 KiB of each file on this disk: a
    /// file out of an archive may have the size and the time of another one.
    pub fn fingerprint(&self) -> u128 {
        *self.fingerprint.get_or_init(|| {
            let mut hash = Xxh3::new();
            hash.update(&self.listing_hash().to_le_bytes());
            let local = self.files.par_iter().filter(|file| file.remote.is_none());
            let samples = local.map(|file| sample::hash(&file.path)).collect::<Vec<_>>();
            samples.iter().for_each(|sample| hash.update(&sample.to_le_bytes()));
            hash.digest128()
        })
    }

    /// Whether `hash`, in hexadecimal, is the fingerprint, or the one that earlier versions stored.
    pub fn is_of_hash(&self, hash: &str) -> bool {
        [self.fingerprint(), self.listing_hash()].iter().any(|own| format!("{own:032x}") == hash)
    }

    /// A hash of the settings, and of the path, size and time of each file: the fingerprint of earlier versions.
    pub(crate) fn listing_hash(&self) -> u128 {
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
            // A file above the limit is read if a path names it, and invalid if it was found in a folder.
            let limit = self.config.max_document_bytes;
            if limit.is_some_and(|limit| file.num_bytes > limit) && self.max_document_bytes(file).is_none() {
                hash.update(b"named");
            }
        }
        hash.digest128()
    }
}

/// How many text files are searched for lines of JSON, and in how many tables text is counted.
const FILES_LOOKED_INTO: usize = 8;

/// Bytes of text, about, that are read of a table to see how much of it is text.
const TEXT_LOOKED_AT: usize = 1 << 18;

/// Compression makes text three to four times smaller.
const USUAL_PACKING: u64 = 4;

#[cfg(test)]
mod tests;
