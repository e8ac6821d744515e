//! Reading and tokenising, batch by batch: one batch is tokenised on all cores while the next is read.

use rayon::prelude::*;

use super::split::{Split, Target};
use super::{DocumentSize, Progress, content_hash};
use crate::corpus::{Corpus, Cursor, Document, Documents};
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
    /// Text between two times that the work is made durable.
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

/// Documents taken together, and how far the reading was after them.
struct Batch {
    documents: Vec<Document>,
    cursor: Cursor,
    newly_seen: Vec<u128>,
}

/// One pass over a corpus.
pub(super) struct Pass<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) eos_id: u32,
    /// For the progress.
    pub(super) split: &'static str,
    pub(super) progress: &'a dyn Fn(Progress),
    pub(super) pace: Pace,
}

/// What a pass does with its documents.
pub(super) trait Sink {
    /// Takes the documents of one batch, in the corpus's order.
    fn take(&mut self, documents: Vec<Encoded>, cursor: Cursor, newly_seen: &[u128]) -> Result<(), DataError>;

    /// Makes all that was taken durable.
    fn keep(&mut self) -> Result<(), DataError>;
}

impl Pass<'_> {
    /// Gives every document from `documents` on to `sink`, with the shard that `held_out` names.
    pub(super) fn run(
        &self,
        corpus: &Corpus,
        documents: &mut Documents,
        held_out: Split,
        sink: &mut dyn Sink,
    ) -> Result<(), DataError> {
        let (tokenizer, eos_id, split) = (self.tokenizer, self.eos_id, self.split);
        let encode = |(target, document): (Target, Document)| {
            // As a prompt of generation is read.
            let prompt = document.prompt.as_deref().map(|prompt| tokenizer.encode_marked(prompt));
            let prompt = prompt.transpose()?;
            let hash = content_hash(&document);
            let text = document.text;
            let mut ids = tokenizer.encode(&text)?;
            ids.push(eos_id);
            let size = DocumentSize {
                num_bytes: text.len() as u64,
                num_words: text.split_whitespace().count() as u64,
            };
            Ok(Encoded {
                target,
                prompt,
                ids,
                size,
                hash,
            })
        };
        let mut bytes_done = documents.report().num_bytes;
        let (mut num_documents, mut num_tokens, mut bytes_since_kept) = (0, 0, 0);
        let bytes_total = corpus.max_text_bytes();
        let wanted_bytes = self.pace.batch_bytes;
        let report = |bytes_done, num_documents, num_tokens, num_files_done| {
            (self.progress)(Progress::Tokenising {
                split,
                bytes_done,
                bytes_total,
                num_documents,
                num_tokens,
                num_files_done,
                num_files: corpus.files().len(),
            });
        };
        // Before the first file is fetched, which may take a while.
        report(bytes_done, 0, 0, documents.cursor().file_idx);
        let mut batch = next_batch(documents, wanted_bytes)?;
        while !batch.documents.is_empty() {
            let batch_bytes = batch
                .documents
                .iter()
                .map(|document| document.text.len())
                .sum::<usize>();
            let starts = batch.documents.iter().scan(bytes_done, |end, document| {
                let start = *end;
                *end += document.text.len() as u64;
                Some(start)
            });
            let starts = starts.collect::<Vec<_>>();
            bytes_done += batch_bytes as u64;
            bytes_since_kept += batch_bytes;
            let taken = batch.documents;
            let (encoded, next) = rayon::join(
                || {
                    let taken = taken.into_par_iter().zip(starts);
                    let parts = taken.flat_map_iter(|(document, start)| held_out.parts(start, document));
                    parts.map(encode).collect::<Result<Vec<_>, DataError>>()
                },
                || next_batch(documents, wanted_bytes),
            );
            let encoded = encoded?;
            num_documents += encoded.len() as u64;
            num_tokens += encoded.iter().map(Encoded::num_tokens).sum::<u64>();
            let num_files_done = batch.cursor.file_idx;
            sink.take(encoded, batch.cursor, &batch.newly_seen)?;
            // What was done is also worth keeping when the next batch cannot be read: a network that fails, say.
            if bytes_since_kept >= self.pace.keep_bytes || next.is_err() {
                sink.keep()?;
                bytes_since_kept = 0;
            }
            report(bytes_done, num_documents, num_tokens, num_files_done);
            batch = next?;
        }
        Ok(())
    }
}

fn next_batch(documents: &mut Documents, wanted_bytes: usize) -> Result<Batch, DataError> {
    let mut taken = Vec::new();
    let mut num_bytes = 0;
    while num_bytes < wanted_bytes {
        let Some(document) = documents.next().transpose()? else {
            break;
        };
        num_bytes += document.text.len() + document.prompt.as_ref().map_or(0, String::len);
        taken.push(document);
    }
    Ok(Batch {
        documents: taken,
        cursor: documents.cursor().clone(),
        newly_seen: documents.take_newly_seen(),
    })
}
