//! A folder of prepared data, as trainers read it.

use std::path::{Path, PathBuf};

use super::check::{self, ShardCheck};
use super::meta::{self, DocumentSize, PreparedMeta, read_document_sizes};
use super::names::{TRAIN, VALIDATION, VALIDATION_SIZES, train_names};
use crate::error::DataError;
use crate::shard::ShardReader;

/// A folder of prepared data.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// Path of the folder.
    pub dir: PathBuf,
    /// The contents of `meta.json`.
    pub meta: PreparedMeta,
    /// Whether the data existed already and nothing was tokenised.
    pub reused: bool,
    /// The folder whose shards were taken, where another one held them ([`PrepareConfig::known`]).
    ///
    /// [`PrepareConfig::known`]: super::PrepareConfig::known
    pub taken_from: Option<PathBuf>,
}

impl Prepared {
    /// Opens data that was prepared earlier, from any sources.
    ///
    /// # Errors
    /// No `meta.json`, a `meta.json` of another version, or files of other sizes than it names.
    pub fn open(dir: &Path) -> Result<Self, DataError> {
        let meta = PreparedMeta::read(dir)?;
        meta.check_files(dir)?;
        Ok(Self { dir: dir.to_path_buf(), meta, reused: true, taken_from: None })
    }

    /// Starts a thread that reads the shards and compares their checksums with the ones in `meta.json`; opening
    /// compared only sizes.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub fn check_beside(&self) -> Result<ShardCheck, DataError> {
        ShardCheck::start(self.hashed_files())
    }

    /// Reads the shards to their end and compares their checksums with the ones in `meta.json`.
    ///
    /// # Errors
    /// A shard whose bytes are not those that were prepared.
    pub fn verify(&self) -> Result<(), DataError> {
        // Opening checks every entry of the .idx files.
        self.train_shards()?;
        self.validation()?;
        check::check_now(self.hashed_files())
    }

    /// The `.bin` files, and the `.idx` files that say what is predicted, each with its XXH3-128 in hexadecimal.
    fn hashed_files(&self) -> Vec<(PathBuf, String)> {
        let files = self.meta.shards().into_iter().flat_map(|(name, split)| {
            let path = |ending: &str| crate::shard::with_ending(&self.dir.join(&name), ending);
            let bounds = split.bounds_hash.clone().map(|hash| (path(".idx"), hash));
            std::iter::once((path(".bin"), split.tokens_hash.clone())).chain(bounds)
        });
        files.collect()
    }

    /// Maps the training shard.
    ///
    /// # Errors
    /// The errors of [`ShardReader::open`]; several corpora were prepared.
    pub fn train(&self) -> Result<ShardReader, DataError> {
        if !self.meta.sources.is_empty() {
            let what = format!("{} sources to be mixed, not one", self.meta.sources.len());
            return Err(DataError::meta(&meta::path(&self.dir), what));
        }
        self.shard(TRAIN)
    }

    /// Maps the training shards, one for each corpus.
    ///
    /// # Errors
    /// The errors of [`ShardReader::open`].
    pub fn train_shards(&self) -> Result<Vec<ShardReader>, DataError> {
        let names = train_names(self.meta.sources.len().max(1));
        names.iter().map(|name| self.shard(name)).collect()
    }

    fn shard(&self, name: &str) -> Result<ShardReader, DataError> {
        let shard = ShardReader::open(&self.dir.join(name))?;
        if self.meta.settings.has_parts() { shard.with_parts() } else { Ok(shard) }
    }

    /// Maps the validation shard.
    ///
    /// # Errors
    /// The errors of [`ShardReader::open`].
    pub fn validation(&self) -> Result<ShardReader, DataError> {
        self.shard(VALIDATION)
    }

    /// Bytes and words of each document of the validation shard, in order.
    ///
    /// # Errors
    /// The errors of [`read_document_sizes`].
    pub fn validation_sizes(&self) -> Result<Vec<DocumentSize>, DataError> {
        read_document_sizes(&self.dir.join(VALIDATION_SIZES))
    }
}
