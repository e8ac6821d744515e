//! Reading and tokenising, batch by batch: one batch is tokenised on all cores while the next is read.

use rayon::prelude::*;

use super::{DocumentSize, Progress};
use crate::corpus::{Corpus, CorpusReport, Documents};
use crate::error::DataError;
use crate::tokenizer::Tokenizer;

/// Which shard a document goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Train,
    Validation,
}

/// A document on its way into a shard.
pub(super) struct Encoded {
    pub(super) target: Target,
    /// Ends with the end-of-document token.
    pub(super) ids: Vec<u32>,
    pub(super) size: DocumentSize,
}

/// Text held at once, twice over: one batch being read, one being tokenised. Ids take about as much again.
const BATCH_BYTES: usize = 8 << 20;

/// One pass over a corpus.
pub(super) struct Pass<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) eos_id: u32,
    /// For the progress.
    pub(super) split: &'static str,
    pub(super) progress: &'a dyn Fn(Progress),
}

impl Pass<'_> {
    /// Gives every document for which `target` names a shard to `keep`, in the corpus's order.
    pub(super) fn run(
        &self,
        corpus: &Corpus,
        target: impl Fn(&str) -> Option<Target> + Sync,
        keep: &mut dyn FnMut(Encoded) -> Result<(), DataError>,
    ) -> Result<CorpusReport, DataError> {
        let (tokenizer, eos_id, split) = (self.tokenizer, self.eos_id, self.split);
        let encode = |text: String| {
            let Some(target) = target(&text) else {
                return Ok(None);
            };
            let mut ids = tokenizer.encode(&text)?;
            ids.push(eos_id);
            let size = DocumentSize {
                num_bytes: text.len() as u64,
                num_words: text.split_whitespace().count() as u64,
            };
            Ok(Some(Encoded { target, ids, size }))
        };
        let mut documents = corpus.documents();
        let (mut bytes_done, mut num_documents, mut num_tokens) = (0, 0, 0);
        let bytes_total = corpus.max_text_bytes();
        let mut batch = next_batch(&mut documents)?;
        while !batch.is_empty() {
            bytes_done += batch.iter().map(|text| text.len() as u64).sum::<u64>();
            let (encoded, next) = rayon::join(
                || {
                    batch
                        .into_par_iter()
                        .map(encode)
                        .collect::<Result<Vec<_>, DataError>>()
                },
                || next_batch(&mut documents),
            );
            for document in encoded?.into_iter().flatten() {
                num_documents += 1;
                num_tokens += document.ids.len() as u64;
                keep(document)?;
            }
            (self.progress)(Progress::Tokenising {
                split,
                bytes_done,
                bytes_total,
                num_documents,
                num_tokens,
            });
            batch = next?;
        }
        Ok(documents.report().clone())
    }
}

fn next_batch(documents: &mut Documents) -> Result<Vec<String>, DataError> {
    let mut batch = Vec::new();
    let mut num_bytes = 0;
    while num_bytes < BATCH_BYTES {
        let Some(document) = documents.next().transpose()? else {
            break;
        };
        num_bytes += document.text.len();
        batch.push(document.text);
    }
    Ok(batch)
}
