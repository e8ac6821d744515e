//! Reading and tokenising, batch by batch: one batch is tokenised on all cores while the next is read.

use rayon::prelude::*;

use super::split::{Split, Target};
use super::{DocumentSize, content_hash};
use crate::corpus::{Cursor, Document, Documents};
use crate::error::DataError;
use crate::tokenizer::Tokenizer;

/// A document on its way into a shard.
pub(super) struct Encoded {
    pub(super) target: Target,
    /// Where documents have prompts.
    pub(super) prompt: Option<Vec<u32>>,
    /// Ends with the end-of-document token.
    pub(super) ids: Vec<u32>,
    pub(super) size: DocumentSize,
    /// Of its prompt and text.
    pub(super) hash: u128,
}

impl Encoded {
    /// Tokens of prompt and text.
    pub(super) fn num_tokens(&self) -> u64 {
        (self.prompt.as_ref().map_or(0, Vec::len) + self.ids.len()) as u64
    }
}

/// How much is done at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// Text held at once, twice over: one batch being read, one being tokenised. Ids take about as much again.
    pub(super) batch_bytes: usize,
    /// Text after which the work is made durable, when the file that it ends in was read.
    pub(super) keep_bytes: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            batch_bytes: 8 << 20,
            keep_bytes: 128 << 20,
        }
    }
}

/// Documents read together.
pub(super) struct Batch {
    pub(super) documents: Vec<Document>,
    /// How far the reading is behind them.
    pub(super) cursor: Cursor,
    /// Whether that is between two files.
    pub(super) ends_file: bool,
    /// Hashes of texts met, where duplicates are dropped.
    pub(super) newly_seen: Vec<u128>,
    /// Whether nothing comes behind them.
    pub(super) is_last: bool,
    /// Why nothing comes, where that is an error.
    pub(super) error: Option<DataError>,
}

impl Batch {
    /// Reads the next documents. `bytes_since_kept` is the text before them that is not durable yet: when that is
    /// enough, they end with their file.
    pub(super) fn read(documents: &mut Documents, pace: Pace, bytes_since_kept: usize) -> Self {
        let (mut taken, mut error) = (Vec::new(), None);
        let mut num_bytes = 0;
        while num_bytes < pace.batch_bytes {
            match documents.next_in_file() {
                Some(Ok(document)) => {
                    num_bytes += document.text.len() + document.prompt.as_ref().map_or(0, String::len);
                    taken.push(document);
                }
                Some(Err(found)) => {
                    error = Some(found);
                    break;
                }
                None if documents.is_done() || bytes_since_kept + num_bytes >= pace.keep_bytes => break,
                None => {}
            }
        }
        Self {
            documents: taken,
            cursor: documents.cursor().clone(),
            ends_file: documents.is_between_files(),
            newly_seen: documents.take_newly_seen(),
            is_last: documents.is_done(),
            error,
        }
    }

    /// Bytes of text.
    pub(super) fn num_bytes(&self) -> usize {
        self.documents.iter().map(|document| document.text.len()).sum()
    }
}

/// Tokenises documents on all cores. `start` bytes of the corpus's text come before them.
pub(super) fn encode(
    tokenizer: &Tokenizer,
    eos_id: u32,
    held_out: Split,
    start: u64,
    documents: Vec<Document>,
) -> Result<Vec<Encoded>, DataError> {
    let encode = |(target, document): (Target, Document)| {
        // As a prompt of generation is read.
        let prompt = document.prompt.as_deref().map(|prompt| tokenizer.encode_marked(prompt));
        let prompt = prompt.transpose()?;
        let hash = content_hash(&document);
        let text = document.text;
        let mut ids = tokenizer.encode(&text)?;
        ids.push(eos_id);
        let size = DocumentSize::of(&text);
        Ok(Encoded {
            target,
            prompt,
            ids,
            size,
            hash,
        })
    };
    let starts = documents.iter().scan(start, |end, document| {
        let start = *end;
        *end += document.text.len() as u64;
        Some(start)
    });
    let starts = starts.collect::<Vec<_>>();
    let documents = documents.into_par_iter().zip(starts);
    let parts = documents.flat_map_iter(|(document, start)| held_out.parts(start, document));
    parts.map(encode).collect()
}
