//! Writes a shard: token ids as they come, and the index at the end.

use std::io::Read;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::{MAGIC, TokenDtype, VERSION, with_ending};
use crate::error::DataError;
use sieve_files::{AtomicFile, FinishedFile, sync_folder, temporary_name};

/// Writes `<prefix>.bin` and `<prefix>.idx` under temporary names, and renames both files when they are fsynced.
pub struct ShardWriter {
    prefix: PathBuf,
    bin: AtomicFile,
    dtype: TokenDtype,
    vocab_size: usize,
    /// Number of tokens of each sequence.
    lengths: Vec<i32>,
    /// Number of sequences of each document, if documents have [parts](Self::with_parts); else each is one.
    parts: Option<Vec<u32>>,
    hash: Xxh3,
    bytes: Vec<u8>,
}

/// Both files of a shard, complete and fsynced under their temporary names.
pub(crate) struct FinishedShard {
    bin: FinishedFile,
    idx: FinishedFile,
    pub(crate) bin_bytes: u64,
    pub(crate) idx_bytes: u64,
    /// XXH3-128 hash of the `.bin` file.
    pub(crate) bin_hash: u128,
    /// XXH3-128 hash of the `.idx` file.
    pub(crate) idx_hash: u128,
}

impl ShardWriter {
    /// Creates a shard for token ids below `vocab_size`, which determines the dtype.
    ///
    /// # Errors
    /// A file that cannot be created, a vocabulary of 2^31 or more.
    pub fn create(prefix: &Path, vocab_size: usize) -> Result<Self, DataError> {
        check_vocab_size(vocab_size)?;
        Ok(Self {
            prefix: prefix.to_path_buf(),
            bin: AtomicFile::create(&with_ending(prefix, ".bin"))?,
            dtype: TokenDtype::for_vocab_size(vocab_size),
            vocab_size,
            lengths: Vec::new(),
            parts: None,
            hash: Xxh3::new(),
            bytes: Vec::new(),
        })
    }

    /// Makes documents several sequences: a part that is not predicted and a part that is, in turn.
    #[must_use]
    pub fn with_parts(self) -> Self {
        Self { parts: Some(Vec::new()), ..self }
    }

    /// Continues a shard after sequences of these lengths, which [`keep`](Self::keep) made durable, and documents of
    /// `parts` sequences.
    pub(crate) fn resume(
        prefix: &Path,
        vocab_size: usize,
        lengths: Vec<i32>,
        parts: Option<Vec<u32>>,
    ) -> Result<Self, DataError> {
        check_vocab_size(vocab_size)?;
        let dtype = TokenDtype::for_vocab_size(vocab_size);
        let num_tokens = lengths.iter().map(|&length| i64::from(length)).sum::<i64>();
        let bin_path = with_ending(prefix, ".bin");
        let bin = AtomicFile::resume(&bin_path, num_tokens as u64 * dtype.num_bytes())?;
        Ok(Self {
            prefix: prefix.to_path_buf(),
            bin,
            dtype,
            vocab_size,
            lengths,
            parts,
            hash: hash_file(&temporary_name(&bin_path))?,
            bytes: Vec::new(),
        })
    }

    /// Makes the documents so far durable. From then on the temporary file stays when the writer is dropped.
    pub(crate) fn keep(&mut self) -> Result<(), DataError> {
        Ok(self.bin.keep()?)
    }

    /// Number of tokens of each sequence written so far.
    pub(crate) fn lengths(&self) -> &[i32] {
        &self.lengths
    }

    /// Number of sequences of each document written so far; `None` if documents have no [parts](Self::with_parts).
    pub(crate) fn parts(&self) -> Option<&[u32]> {
        self.parts.as_deref()
    }

    /// Appends a document.
    ///
    /// # Errors
    /// A token id outside the vocabulary, a document of 2^31 tokens or more, a full disk.
    ///
    /// # Panics
    /// The shard has [parts](Self::with_parts).
    pub fn push(&mut self, document: &[u32]) -> Result<(), DataError> {
        assert!(self.parts.is_none(), "a document without parts");
        self.push_sequence(document)
    }

    /// Appends a document of parts, of which every second one is predicted. A part may be empty.
    ///
    /// # Errors
    /// The errors of [`push`](Self::push).
    ///
    /// # Panics
    /// The shard has no [parts](Self::with_parts), or their number is odd or 0.
    pub fn push_parts(&mut self, parts: &[Vec<u32>]) -> Result<(), DataError> {
        assert!(!parts.is_empty() && parts.len().is_multiple_of(2), "{} parts", parts.len());
        for part in parts {
            self.push_sequence(part)?;
        }
        let numbers = self.parts.as_mut().expect("a shard whose documents have parts");
        numbers.push(u32::try_from(parts.len()).map_err(|_| DataError::setting("document", "too many parts"))?);
        Ok(())
    }

    /// Appends the tokens of a part, or of a document without parts.
    fn push_sequence(&mut self, sequence: &[u32]) -> Result<(), DataError> {
        let bad = |reason: String| DataError::setting("document", reason);
        let num_tokens = sequence.len();
        let length = i32::try_from(num_tokens).map_err(|_| {
            bad(format!("{num_tokens} tokens are more than a Megatron-LM shard can hold in one sequence"))
        })?;
        if let Some(&token) = sequence.iter().find(|&&token| token as usize >= self.vocab_size) {
            return Err(bad(format!("token {token} is outside the vocabulary of {}", self.vocab_size)));
        }
        self.bytes.clear();
        for token in sequence {
            // The vocabulary fits the type, so the bytes left out are 0.
            let num_bytes = self.dtype.num_bytes() as usize;
            self.bytes.extend(&token.to_le_bytes()[..num_bytes]);
        }
        self.hash.update(&self.bytes);
        self.lengths.push(length);
        Ok(self.bin.write(&self.bytes)?)
    }

    /// Writes the index, fsyncs both files and renames them to their final names.
    ///
    /// # Errors
    /// A full disk, or a file that cannot be renamed.
    pub fn finish(self) -> Result<(), DataError> {
        let dir = self.prefix.parent().unwrap_or(Path::new("")).to_path_buf();
        self.finish_unnamed()?.publish()?;
        Ok(sync_folder(&dir)?)
    }

    /// Like [`finish`](Self::finish), but leaves the files under their temporary names.
    pub(crate) fn finish_unnamed(self) -> Result<FinishedShard, DataError> {
        let num_sequences = self.lengths.len() as u64;
        let num_documents = self.parts.as_ref().map_or(num_sequences, |parts| parts.len() as u64);
        let mut idx = AtomicFile::create(&with_ending(&self.prefix, ".idx"))?;
        let mut idx_hash = Xxh3::new();
        let mut write = |bytes: &[u8]| {
            idx_hash.update(bytes);
            idx.write(bytes)
        };
        write(MAGIC)?;
        write(&VERSION.to_le_bytes())?;
        write(&[self.dtype.code()])?;
        write(&num_sequences.to_le_bytes())?;
        write(&(num_documents + 1).to_le_bytes())?;
        // Tables: length of each sequence in tokens, its first byte in `.bin`, and first sequence of each document.
        for length in &self.lengths {
            write(&length.to_le_bytes())?;
        }
        let mut pointer = 0i64;
        for &length in &self.lengths {
            write(&pointer.to_le_bytes())?;
            pointer += i64::from(length) * self.dtype.num_bytes() as i64;
        }
        let mut first = 0u64;
        write(&first.to_le_bytes())?;
        for document in 0..num_documents {
            first += self.parts.as_ref().map_or(1, |parts| u64::from(parts[document as usize]));
            write(&first.to_le_bytes())?;
        }
        Ok(FinishedShard {
            bin: self.bin.finish()?,
            idx: idx.finish()?,
            bin_bytes: pointer as u64,
            // A sequence has a length of 4 bytes and a pointer of 8.
            idx_bytes: super::HEADER_BYTES + 12 * num_sequences + 8 * (num_documents + 1),
            bin_hash: self.hash.digest128(),
            idx_hash: idx_hash.digest128(),
        })
    }
}

impl FinishedShard {
    /// Renames both files to their final names. The folder is not fsynced.
    pub(crate) fn publish(self) -> Result<(), DataError> {
        self.bin.publish()?;
        Ok(self.idx.publish()?)
    }
}

/// Refuses a vocabulary whose ids do not fit 31 bits.
pub(crate) fn check_vocab_size(vocab_size: usize) -> Result<(), DataError> {
    if vocab_size > i32::MAX as usize {
        let reason = format!("{vocab_size} is more than 31 bits can number");
        return Err(DataError::setting("vocab_size", reason));
    }
    Ok(())
}

/// The state of the hash after a file's bytes.
fn hash_file(path: &Path) -> Result<Xxh3, DataError> {
    let mut file = sieve_files::open_file(path).map_err(DataError::io("open", path))?;
    let (mut hash, mut buffer) = (Xxh3::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).map_err(DataError::io("read", path))? {
            0 => return Ok(hash),
            num_bytes => hash.update(&buffer[..num_bytes]),
        }
    }
}
