//! Reads tokens from a memory-mapped shard.

use std::ops::Range;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::layout::Layout;
use super::{TokenDtype, with_ending};
use crate::error::DataError;
use crate::mapped_file::MappedFile;

/// A memory-mapped pair of `.bin` and `.idx`, fully validated when opened, so that reading cannot go out of bounds.
///
/// The files must not be changed in place while a reader lives (replacing them by renaming is fine).
#[derive(Debug)]
pub struct ShardReader {
    prefix: PathBuf,
    bin: MappedFile,
    idx: MappedFile,
    layout: Layout,
    has_parts: bool,
}

impl ShardReader {
    /// Opens `<prefix>.bin` and `<prefix>.idx`, and checks every entry of the index.
    ///
    /// # Errors
    /// A file that cannot be read or is malformed; the message names it and what is wrong.
    pub fn open(prefix: &Path) -> Result<Self, DataError> {
        let idx_path = with_ending(prefix, ".idx");
        let idx = MappedFile::open(&idx_path)?;
        let bin = MappedFile::open(&with_ending(prefix, ".bin"))?;
        let layout = Layout::check(&idx, bin.len() as u64).map_err(|what| DataError::shard(&idx_path, what))?;
        Ok(Self { prefix: prefix.to_path_buf(), bin, idx, layout, has_parts: false })
    }

    /// Takes every second of a document's sequences as predicted: a text after its prompt, or the assistant's messages.
    ///
    /// # Errors
    /// A document has an odd number of sequences, or none.
    pub fn with_parts(self) -> Result<Self, DataError> {
        let num_sequences = |document: u64| {
            let sequences = self.layout.sequences_of(&self.idx, document);
            sequences.end - sequences.start
        };
        let is_other = |document: &u64| num_sequences(*document) == 0 || !num_sequences(*document).is_multiple_of(2);
        if let Some(document) = (0..self.num_documents()).find(is_other) {
            let found = num_sequences(document);
            let what = format!("document {document} has {found} sequences, not prompts and texts in turn");
            return Err(DataError::shard(&with_ending(&self.prefix, ".idx"), what));
        }
        Ok(Self { has_parts: true, ..self })
    }

    /// The ranges of a document's tokens that the model is trained to predict, in order; the others it only reads.
    /// Without [parts](Self::with_parts), all tokens.
    ///
    /// # Panics
    /// When `document >= num_documents`.
    pub fn predicted(&self, document: u64) -> Vec<Range<u64>> {
        if !self.has_parts {
            let all = 0..self.document_len(document);
            return vec![all];
        }
        let mut end = 0;
        let sequences = self.layout.sequences_of(&self.idx, document);
        let parts = sequences.map(|sequence| {
            let start = end;
            end += self.layout.sequence_len(&self.idx, sequence);
            start..end
        });
        // Every second part is predicted.
        parts.skip(1).step_by(2).filter(|part| !part.is_empty()).collect()
    }

    /// Path of the shard without `.bin` and `.idx`.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// Integer type in which token ids are stored.
    pub fn dtype(&self) -> TokenDtype {
        self.layout.dtype
    }

    /// Number of documents in the shard.
    pub fn num_documents(&self) -> u64 {
        self.layout.num_documents
    }

    /// Number of tokens in the shard.
    pub fn num_tokens(&self) -> u64 {
        self.layout.num_tokens
    }

    /// Tokens of one document, its end-of-document token included.
    ///
    /// # Panics
    /// When `document >= num_documents`.
    pub fn document_len(&self, document: u64) -> u64 {
        let tokens = self.document_tokens(document);
        tokens.end - tokens.start
    }

    /// The tokens of one document.
    ///
    /// # Errors
    /// A negative token id.
    ///
    /// # Panics
    /// When `document >= num_documents`.
    pub fn document(&self, document: u64) -> Result<Vec<u32>, DataError> {
        let mut tokens = Vec::new();
        self.read(document, 0..self.document_len(document), usize::MAX, &mut tokens)?;
        Ok(tokens)
    }

    /// How often each of the `vocab_size` token ids is predicted. Reads the whole shard, in parallel.
    ///
    /// # Errors
    /// A token id outside the vocabulary.
    pub fn token_counts(&self, vocab_size: usize) -> Result<Vec<u64>, DataError> {
        let count = |mut counts: Vec<u64>, document| {
            let mut tokens = Vec::new();
            for predicted in self.predicted(document) {
                self.read(document, predicted, vocab_size, &mut tokens)?;
            }
            tokens.iter().for_each(|&token| counts[token as usize] += 1);
            Ok(counts)
        };
        let add = |mut left: Vec<u64>, right: Vec<u64>| {
            left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
            Ok(left)
        };
        // At most 65 chunks, because each chunk has counts for the whole vocabulary.
        let chunk_len = (self.num_documents() / 64).max(1);
        (0..self.num_documents().div_ceil(chunk_len))
            .into_par_iter()
            .map(|chunk| {
                let documents = chunk * chunk_len..((chunk + 1) * chunk_len).min(self.num_documents());
                documents.into_iter().try_fold(vec![0; vocab_size], count)
            })
            .try_reduce(|| vec![0; vocab_size], add)
    }

    /// Appends the tokens `range` of a document to `out`.
    ///
    /// # Errors
    /// A token id outside `vocab_size`; `out` is then unchanged.
    ///
    /// # Panics
    /// The shard has no such document, or the document no such range.
    pub(crate) fn read(
        &self,
        document: u64,
        range: Range<u64>,
        vocab_size: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), DataError> {
        let tokens = self.document_tokens(document);
        assert!(range.start <= range.end && range.end <= tokens.end - tokens.start, "token range outside the document");
        let size = self.layout.dtype.num_bytes();
        let bytes =
            &self.bin[((tokens.start + range.start) * size) as usize..((tokens.start + range.end) * size) as usize];
        let already = out.len();
        match self.layout.dtype {
            TokenDtype::U16 => out.extend(bytes.as_chunks().0.iter().map(|&two| u32::from(u16::from_le_bytes(two)))),
            // A negative id becomes 2^31 or more, which the check below refuses.
            TokenDtype::I32 => out.extend(bytes.as_chunks().0.iter().map(|&four| u32::from_le_bytes(four))),
        }
        let limit = vocab_size.min(1 << 31) as u32;
        if let Some(&token) = out[already..].iter().find(|&&token| token >= limit) {
            out.truncate(already);
            let path = with_ending(&self.prefix, ".bin");
            let token = token as i32;
            let what = format!("document {document} holds token {token}, outside a vocabulary of {vocab_size}");
            let hint = "the shard was made with a different tokenizer from the model's, the token was added to it \
                        without a row of the embedding, or the shard is damaged: then prepare it again with \
                        sieve data prepare --recipe RECIPE --data-dir DIR --replace";
            return Err(DataError::file(&path, what, hint));
        }
        Ok(())
    }

    fn document_tokens(&self, document: u64) -> Range<u64> {
        assert!(document < self.num_documents(), "document {document} of {}", self.num_documents());
        self.layout.document_tokens(&self.idx, document)
    }
}
