//! What a preparation is asked for, and what it reports.

use std::path::PathBuf;

use super::prepared::Prepared;
use crate::corpus::Corpus;

/// Where the validation documents come from.
#[derive(Debug, Clone, Copy)]
pub enum ValidationSource<'a> {
    /// This fraction of the corpus, in (0, 1). A hash of its text decides whether a document is held out, so that
    /// adding text moves no document between the splits, and equal documents stay together. If this left one split
    /// empty, the last bytes of the corpus are held out instead, and the document around the boundary is cut
    /// ([`PreparedMeta::is_cut`](super::PreparedMeta::is_cut)); no corpus that holds the same documents trains on these
    /// bytes.
    Fraction(f64),
    /// Another corpus, whose documents are left out of the training split.
    Corpus(&'a Corpus),
}

impl<'a> ValidationSource<'a> {
    /// The corpus of validation documents; `None` if they come from the training corpora.
    pub(super) fn corpus(self) -> Option<&'a Corpus> {
        match self {
            Self::Corpus(corpus) => Some(corpus),
            Self::Fraction(_) => None,
        }
    }
}

/// What to do with a folder that holds data prepared from other sources or settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnChange {
    /// Fail with an error that says what differs.
    Refuse,
    /// Prepare again and replace the folder's data.
    Replace,
    /// As `Replace`, and also if the shards are not the ones that were prepared ([`Prepared::verify`]).
    ReplaceDamaged,
}

/// Sources and settings of [`prepare`](super::prepare()).
#[derive(Debug, Clone)]
pub struct PrepareConfig<'a> {
    /// The folder to write to; created if missing.
    pub dir: PathBuf,
    /// Where the validation documents come from.
    pub validation: ValidationSource<'a>,
    /// What to do if the folder holds data prepared from other sources or settings.
    pub on_change: OnChange,
    /// For the text of a stage, the run's data: the stage does not train on text that the run validates on.
    pub base: Option<&'a Prepared>,
    /// Other folders, whose shards are taken if they were prepared from the same sources, settings and tokenizer, and
    /// `dir` holds none.
    pub known: &'a [PathBuf],
}

/// How far [`prepare`](super::prepare()) is. The callback runs on the thread that called it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Another process prepares in the same folder.
    Waiting,
    /// Documents are read and tokenised.
    Tokenising {
        /// `"validation"` for a separate validation corpus, else `"train"`, whose corpus may have held-out documents.
        split: &'static str,
        /// Bytes of text tokenised so far.
        bytes_done: u64,
        /// Upper bound of the bytes of text, from the sizes of the files.
        bytes_total: u64,
        /// Number of documents tokenised so far.
        num_documents: u64,
        /// Number of tokens written so far.
        num_tokens: u64,
        /// Number of files read to their end.
        num_files_done: usize,
        /// Number of files of all corpora.
        num_files: usize,
    },
    /// All documents are tokenised; files are being fsynced.
    Writing,
}
