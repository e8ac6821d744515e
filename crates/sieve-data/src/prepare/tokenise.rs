//! Reading and tokenising, batch by batch: one batch is tokenised on all cores while the next is read.

use std::ops::Range;

use rayon::prelude::*;

use super::meta::DocumentSize;
use super::names::content_hash;
use super::split::{Split, Target};
use crate::corpus::{AlsoHeldOut, Cursor, Document, Documents};
use crate::error::DataError;
use crate::tokenizer::Tokenizer;

/// The tokens of a document, as shards hold them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocumentTokens {
    /// Token ids in parts. A document without a prompt is one part, which the end-of-document token ends. A document
    /// with a prompt and a chat have parts that the model only reads and parts that are predicted, in turn.
    pub parts: Vec<Vec<u32>>,
    /// Size of the text that is predicted: of a document with a prompt the text behind it, of a chat the answers.
    pub size: DocumentSize,
}

impl DocumentTokens {
    /// Tokenises a document; the token `eos_id` ends all but chats.
    ///
    /// # Errors
    /// A text that the tokenizer cannot encode.
    pub fn of(tokenizer: &Tokenizer, eos_id: u32, document: &Document) -> Result<Self, DataError> {
        let text = document.text.as_str();
        if let Some(answers) = &document.answers {
            let parts = tokenizer.encode_parts(text, answers)?;
            let size = answers.iter().map(|answer| DocumentSize::of(&text[answer.clone()]));
            return Ok(Self { parts, size: size.sum() });
        }
        // Names of special tokens in a prompt become these tokens, as in `sieve generate`.
        let prompt = document.prompt.as_deref().map(|prompt| tokenizer.encode_marked(prompt));
        let mut ids = tokenizer.encode(text)?;
        ids.push(eos_id);
        let parts = prompt.transpose()?.into_iter().chain([ids]).collect();
        Ok(Self { parts, size: DocumentSize::of(text) })
    }

    /// Of a document with a prompt or a chat, the ranges of its tokens that are predicted, in order; `None` where all
    /// are.
    pub fn predicted(&self) -> Option<Vec<Range<usize>>> {
        let mut end = 0;
        let parts = self.parts.iter().map(|part| {
            let start = end;
            end += part.len();
            start..end
        });
        let is_divided = self.parts.len() > 1;
        is_divided.then(|| parts.skip(1).step_by(2).filter(|part| !part.is_empty()).collect())
    }
}

/// A document on its way into a shard.
pub(super) struct Encoded {
    pub(super) target: Target,
    /// The parts of its [`DocumentTokens`].
    pub(super) parts: Vec<Vec<u32>>,
    pub(super) size: DocumentSize,
    /// [`content_hash`] of prompt and text.
    pub(super) hash: u128,
}

impl Encoded {
    /// Tokens of all parts.
    pub(super) fn num_tokens(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }

    /// Tokens of the predicted parts. A document's first token has no token before it that could predict it.
    pub(super) fn num_predicted(&self) -> u64 {
        let all: u64 = self.parts.iter().skip(1).step_by(2).map(|part| part.len() as u64).sum();
        let begins =
            self.parts.first().is_some_and(Vec::is_empty) && self.parts.get(1).is_some_and(|part| !part.is_empty());
        all - u64::from(begins)
    }
}

/// How much text is processed at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// Bytes of text in a batch. Two batches are in memory, one being read and one being tokenised; their token ids
    /// take about as much again.
    pub(super) batch_bytes: usize,
    /// After this many bytes of text, the work is made durable at the end of the source file that is being read.
    pub(super) keep_bytes: usize,
}

impl Default for Pace {
    fn default() -> Self {
        Self { batch_bytes: 8 << 20, keep_bytes: 128 << 20 }
    }
}

/// Documents that are read, and then tokenised, together.
pub(super) struct Batch {
    pub(super) documents: Vec<Document>,
    /// Position in the corpus after these documents.
    pub(super) cursor: Cursor,
    /// Whether that position is between two files.
    pub(super) ends_file: bool,
    /// Hashes of these texts, if duplicates are dropped.
    pub(super) newly_seen: Vec<u128>,
    /// Whether the corpus ends after these documents.
    pub(super) is_last: bool,
    /// The error that ended the reading after these documents, if one did.
    pub(super) error: Option<DataError>,
}

impl Batch {
    /// Reads the next documents. `bytes_since_kept` counts the text before them that is not durable yet. Once this and
    /// the batch reach `pace.keep_bytes`, the batch ends at the end of a file, where the work can be made durable.
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
                // A file ended; the batch continues with the next one.
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

    /// Bytes of text, prompts not counted.
    pub(super) fn num_bytes(&self) -> usize {
        self.documents.iter().map(|document| document.text.len()).sum()
    }
}

/// Splits documents into training and validation parts by `held_out` and tokenises them on all cores. `start` is the
/// number of bytes of the corpus's text before them. Also counts what goes into neither split.
pub(super) fn encode(
    tokenizer: &Tokenizer,
    eos_id: u32,
    held_out: Split,
    start: u64,
    documents: Vec<Document>,
) -> Result<(Vec<Encoded>, AlsoHeldOut), DataError> {
    let encode = |(target, document): (Target, Document)| {
        let hash = content_hash(&document);
        let DocumentTokens { parts, size } = DocumentTokens::of(tokenizer, eos_id, &document)?;
        Ok(Encoded { target, parts, size, hash })
    };
    let starts = documents.iter().scan(start, |end, document| {
        let start = *end;
        *end += document.text.len() as u64;
        Some(start)
    });
    let starts = starts.collect::<Vec<_>>();
    let documents = documents.into_par_iter().zip(starts);
    let divided = documents.map(|(document, start)| {
        let num_bytes = document.predicted_bytes();
        let parts = held_out.parts(start, document);
        let lost = num_bytes - parts.iter().map(|(_, part)| part.predicted_bytes()).sum::<u64>();
        (parts, lost)
    });
    let divided = divided.collect::<Vec<_>>();
    let mut also_held_out = AlsoHeldOut::default();
    for (parts, lost) in &divided {
        let is_trained_on = parts.iter().any(|(target, _)| *target == Target::Train);
        also_held_out += AlsoHeldOut {
            num_documents: u64::from(*lost > 0 && !is_trained_on),
            num_shortened: u64::from(*lost > 0 && is_trained_on),
            num_bytes: *lost,
        };
    }
    let parts = divided.into_par_iter().flat_map_iter(|(parts, _)| parts);
    Ok((parts.map(encode).collect::<Result<_, DataError>>()?, also_held_out))
}
