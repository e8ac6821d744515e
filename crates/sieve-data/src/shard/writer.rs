//! Writing a shard: token ids as they come, the index at the end.

use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::{MAGIC, TokenDtype, VERSION, with_ending};
use crate::atomic_file::{AtomicFile, FinishedFile, sync_dir};
use crate::error::DataError;

/// Writes `<prefix>.bin` and `<prefix>.idx` under temporary names; they get their own when all is written and fsynced.
pub struct ShardWriter {
    prefix: PathBuf,
    bin: AtomicFile,
    idx: AtomicFile,
    dtype: TokenDtype,
    vocab_size: usize,
    lengths: Vec<i32>,
    hash: Xxh3,
    bytes: Vec<u8>,
}

/// Both files whole under their temporary names.
pub(crate) struct FinishedShard {
    bin: FinishedFile,
    idx: FinishedFile,
    pub(crate) bin_bytes: u64,
    pub(crate) idx_bytes: u64,
    /// XXH3-128 of the `.bin` file.
    pub(crate) bin_hash: u128,
}

impl ShardWriter {
    /// Begins a shard for token ids below `vocab_size`, which also chooses the dtype.
    ///
    /// # Errors
    /// A file that cannot be created, a vocabulary of 2^31 or more.
    pub fn create(prefix: &Path, vocab_size: usize) -> Result<Self, DataError> {
        if vocab_size > i32::MAX as usize {
            let reason = format!("{vocab_size} is more than 31 bits can number");
            return Err(DataError::BadSetting {
                name: "vocab_size",
                reason,
            });
        }
        Ok(Self {
            prefix: prefix.to_path_buf(),
            bin: AtomicFile::create(&with_ending(prefix, ".bin"))?,
            idx: AtomicFile::create(&with_ending(prefix, ".idx"))?,
            dtype: TokenDtype::for_vocab_size(vocab_size),
            vocab_size,
            lengths: Vec::new(),
            hash: Xxh3::new(),
            bytes: Vec::new(),
        })
    }

    /// Appends one document.
    ///
    /// # Errors
    /// A token id outside the vocabulary, a document of 2^31 tokens or more, a full disk.
    pub fn push(&mut self, document: &[u32]) -> Result<(), DataError> {
        let length = i32::try_from(document.len()).map_err(|_| DataError::BadSetting {
            name: "document",
            reason: format!(
                "{} tokens are more than a Megatron-LM shard can hold in one sequence",
                document.len()
            ),
        })?;
        if let Some(&token) = document
            .iter()
            .find(|&&token| token as usize >= self.vocab_size)
        {
            return Err(DataError::BadSetting {
                name: "document",
                reason: format!(
                    "token {token} is outside the vocabulary of {}",
                    self.vocab_size
                ),
            });
        }
        self.bytes.clear();
        match self.dtype {
            TokenDtype::U16 => self.bytes.extend(
                document
                    .iter()
                    .flat_map(|&token| (token as u16).to_le_bytes()),
            ),
            TokenDtype::I32 => self
                .bytes
                .extend(document.iter().flat_map(|&token| token.to_le_bytes())),
        }
        self.hash.update(&self.bytes);
        self.lengths.push(length);
        self.bin.write(&self.bytes)
    }

    /// Writes the index, fsyncs both files and gives them their names.
    ///
    /// # Errors
    /// A full disk, or a file that cannot be renamed.
    pub fn finish(self) -> Result<(), DataError> {
        let dir = self.prefix.parent().unwrap_or(Path::new("")).to_path_buf();
        self.finish_unnamed()?.publish()?;
        sync_dir(&dir)
    }

    /// Like [`finish`](Self::finish), without the names.
    pub(crate) fn finish_unnamed(mut self) -> Result<FinishedShard, DataError> {
        let num_documents = self.lengths.len() as u64;
        self.idx.write(MAGIC)?;
        self.idx.write(&VERSION.to_le_bytes())?;
        self.idx.write(&[self.dtype.code()])?;
        self.idx.write(&num_documents.to_le_bytes())?;
        self.idx.write(&(num_documents + 1).to_le_bytes())?;
        for length in &self.lengths {
            self.idx.write(&length.to_le_bytes())?;
        }
        let mut pointer = 0i64;
        for &length in &self.lengths {
            self.idx.write(&pointer.to_le_bytes())?;
            pointer += i64::from(length) * self.dtype.num_bytes() as i64;
        }
        for document in 0..=num_documents {
            self.idx.write(&document.to_le_bytes())?;
        }
        Ok(FinishedShard {
            bin: self.bin.finish()?,
            idx: self.idx.finish()?,
            bin_bytes: pointer as u64,
            idx_bytes: super::HEADER_BYTES + 12 * num_documents + 8 * (num_documents + 1),
            bin_hash: self.hash.digest128(),
        })
    }
}

impl FinishedShard {
    /// Gives both files their names. The folder is not fsynced.
    pub(crate) fn publish(self) -> Result<(), DataError> {
        self.bin.publish()?;
        self.idx.publish()
    }
}
