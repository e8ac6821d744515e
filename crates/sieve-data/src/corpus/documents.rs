//! Reading a corpus: limits, duplicates, invalid documents, and the account of them all.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::source::{self, DocumentSource};
use super::{Corpus, Document};
use crate::error::DataError;

/// Where the documents went.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorpusReport {
    /// Files opened.
    pub num_files: u64,
    /// Documents given.
    pub num_documents: u64,
    /// Bytes of their text.
    pub num_bytes: u64,
    /// Documents dropped because they are blank.
    pub num_blank: u64,
    /// Documents dropped because an earlier one has the same text.
    pub num_duplicates: u64,
    /// Invalid documents passed over.
    pub num_invalid: u64,
    /// The first of them, as a message.
    pub first_invalid: Option<String>,
    /// True when `max_bytes` ended the reading.
    pub reached_max_bytes: bool,
}

impl CorpusReport {
    fn summary(&self) -> String {
        let mut summary = format!(
            "{} blank, {} duplicates, {} invalid",
            self.num_blank, self.num_duplicates, self.num_invalid
        );
        if self.reached_max_bytes {
            summary.push_str(", the next is larger than max_bytes");
        }
        if let Some(first) = &self.first_invalid {
            summary.push_str(&format!(
                "; the first invalid one: {}",
                first.lines().next().unwrap_or_default()
            ));
        }
        summary
    }
}

/// The documents of a corpus, in order. Ends after its first error; a corpus without any document is an error too.
pub struct Documents<'a> {
    corpus: &'a Corpus,
    next_file: usize,
    source: Option<Box<dyn DocumentSource>>,
    seen: HashSet<u128>,
    report: CorpusReport,
    done: bool,
}

impl<'a> Documents<'a> {
    pub(super) fn new(corpus: &'a Corpus) -> Self {
        let report = CorpusReport::default();
        Self {
            corpus,
            next_file: 0,
            source: None,
            seen: HashSet::new(),
            report,
            done: false,
        }
    }

    /// The account so far.
    pub fn report(&self) -> &CorpusReport {
        &self.report
    }

    /// The next document that counts, or `None` at the end.
    fn advance(&mut self) -> Result<Option<Document>, DataError> {
        let config = self.corpus.config();
        loop {
            let Some(source) = &mut self.source else {
                let Some(file) = self.corpus.files().get(self.next_file) else {
                    return Ok(None);
                };
                self.source = Some(source::open(
                    &config.format,
                    &file.path,
                    config.max_document_bytes,
                )?);
                self.next_file += 1;
                self.report.num_files += 1;
                continue;
            };
            let (text, line) = match source.next_document() {
                None => {
                    self.source = None;
                    continue;
                }
                Some(Err(error)) if config.skip_invalid && error.is_invalid_document() => {
                    self.report.num_invalid += 1;
                    self.report
                        .first_invalid
                        .get_or_insert_with(|| error.to_string());
                    continue;
                }
                Some(document) => document?,
            };
            if text.trim().is_empty() {
                self.report.num_blank += 1;
            } else if config.deduplicate && !self.seen.insert(xxh3_128(text.as_bytes())) {
                self.report.num_duplicates += 1;
            } else if self.report.num_bytes + text.len() as u64
                > config.max_bytes.unwrap_or(u64::MAX)
            {
                self.report.reached_max_bytes = true;
                return Ok(None);
            } else {
                self.report.num_documents += 1;
                self.report.num_bytes += text.len() as u64;
                return Ok(Some(Document {
                    text,
                    file_idx: self.next_file - 1,
                    line,
                }));
            }
        }
    }
}

impl Iterator for Documents<'_> {
    type Item = Result<Document, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let next = match self.advance() {
            Ok(None) if self.report.num_documents == 0 => Err(DataError::EmptyCorpus {
                num_files: self.corpus.files().len(),
                summary: self.report.summary(),
            }),
            next => next,
        };
        self.done = !matches!(next, Ok(Some(_)));
        next.transpose()
    }
}
