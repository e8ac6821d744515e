//! Decides which text is held out for validation.
//!
//! A hash of each document's text decides whether the document is held out. A corpus with too few documents for that,
//! which would leave a split empty, is cut instead: the end of its text is held out, and the document that contains the
//! boundary is divided there, between two characters. Each of several corpora is split by itself, so that all of them
//! are validated on. If the same document occurs again (in another corpus, twice in one, or in the text of a stage), no
//! more bytes of it are trained on there than before the cut.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::meta::{DocumentSize, TrainBytes};
use super::names::{content_hash, hex};
use super::prepared::Prepared;
use crate::corpus::{Corpus, Cursor, Document, Documents};
use crate::error::DataError;

/// The corpora that are cut, and where.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Cuts {
    /// For each corpus, the first held-out byte of its text; `None` if it is split by hashes of documents.
    pub(super) places: Vec<Option<u64>>,
    /// How many bytes of each document of the cut corpora may be trained on. A document has no entry if it is trained
    /// on as a whole and its hash would not hold it out.
    pub(super) train_bytes: TrainBytes,
}

/// The split that a text goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Train,
    Validation,
}

/// Which documents of a corpus are validation documents.
#[derive(Debug, Clone, Copy)]
pub(super) enum Split<'a> {
    /// This fraction of the documents is held out, by a hash of their text.
    Hash(f64, &'a TrainBytes),
    /// The corpus is cut: its text from this byte on is held out.
    End(u64, &'a TrainBytes),
    /// All documents are held out: this is the validation corpus.
    AllHeldOut,
    /// It is trained on, except for documents with these hashes, which the validation corpus has.
    Without(&'a HashSet<u128>),
}

impl Split<'_> {
    /// Divides a document, which begins at byte `start` of the corpus's text, among the splits: the result is empty if
    /// it is left out, and has two parts if it is cut.
    pub(super) fn parts(&self, start: u64, document: Document) -> Vec<(Target, Document)> {
        match *self {
            Self::Hash(fraction, cut) => match train_bytes(&document, cut) {
                // A corpus that is cut holds out the end of the same document.
                Some(limit) => Vec::from_iter(beginning(document, limit)),
                None if is_held_out(content_hash(&document), fraction) => vec![(Target::Validation, document)],
                None => vec![(Target::Train, document)],
            },
            Self::AllHeldOut => vec![(Target::Validation, document)],
            Self::Without(held_out) if held_out.contains(&content_hash(&document)) => Vec::new(),
            Self::Without(_) => vec![(Target::Train, document)],
            Self::End(place, cut) => {
                let limit = train_bytes(&document, cut).unwrap_or(u64::MAX);
                let own = own_train_bytes([start, document.text.len() as u64], document.is_indivisible(), place);
                let mut end = document.clone();
                end.text.drain(..end.text.floor_char_boundary(own as usize));
                let end = Some((Target::Validation, end)).filter(|end| !end.1.text.is_empty());
                beginning(document, own.min(limit)).into_iter().chain(end).collect()
            }
        }
    }
}

/// How many bytes of a document, which begins at byte `start` of its corpus, lie before the corpus's cut. A text after
/// a prompt and a chat are not divided, because the end of an answer means little without its beginning: it counts 0
/// bytes unless all of it lies before the cut.
fn own_train_bytes([start, num_bytes]: [u64; 2], is_whole: bool, cut: u64) -> u64 {
    if is_whole && start + num_bytes > cut { 0 } else { cut.saturating_sub(start).min(num_bytes) }
}

/// The first `num_bytes` of a document for the training split; a text after a prompt, or a chat, goes there whole or
/// not at all.
fn beginning(mut document: Document, num_bytes: u64) -> Option<(Target, Document)> {
    let num_bytes = usize::try_from(num_bytes).unwrap_or(usize::MAX);
    if document.is_indivisible() && num_bytes < document.text.len() {
        document.text.clear()
    } else {
        document.text.truncate(document.text.floor_char_boundary(num_bytes))
    }
    (!document.text.is_empty()).then_some((Target::Train, document))
}

/// How many bytes of a document may be trained on, as the cuts say; `None` if they say nothing of it.
fn train_bytes(document: &Document, cut: &TrainBytes) -> Option<u64> {
    if cut.is_empty() {
        return None;
    }
    cut.get(&hex(content_hash(document))).copied()
}

/// A document of a corpus that may have to be cut.
struct Found {
    hash: u128,
    size: DocumentSize,
    /// Whether it may not be divided ([`Document::is_indivisible`]).
    is_whole: bool,
}

/// Finds the corpora that have to be cut, because splitting them by hashes would leave one split empty. Stops reading
/// a corpus as soon as both splits have a document. `base` is the run's data if these corpora are a stage's.
///
/// # Errors
/// A document that cannot be read; a stage that trains on what the run validates on.
pub(super) fn cuts(corpora: &[Corpus], fraction: f64, base: Option<&Prepared>) -> Result<Cuts, DataError> {
    let mut seen = HashSet::new();
    let mut cuts = Cuts::default();
    for corpus in corpora {
        let mut documents = Documents::resume(corpus, Cursor::default(), seen);
        let (mut any_train, mut any_held_out) = (false, false);
        let mut found = Vec::new();
        while !(any_train && any_held_out)
            && let Some(document) = documents.next().transpose()?
        {
            let hash = content_hash(&document);
            found.push(Found { hash, size: DocumentSize::of(&document.text), is_whole: document.is_indivisible() });
            if is_held_out(hash, fraction) { any_held_out = true } else { any_train = true }
        }
        let num_bytes = documents.report().num_bytes;
        seen = documents.into_seen();
        if any_train && any_held_out {
            cuts.places.push(None);
            continue;
        }
        if let Some(base) = base.filter(|_| any_held_out) {
            check_beside(corpus, base, &found)?;
        }
        // The corpus was read to its end, so `num_bytes` is all of its text.
        let cut = num_bytes - (num_bytes as f64 * fraction).round() as u64;
        cuts.places.push(Some(cut));
        let mut start = 0;
        for Found { hash, size, is_whole } in found {
            let own = own_train_bytes([start, size.num_bytes], is_whole, cut);
            start += size.num_bytes;
            // Equal documents are trained on up to the first of their cuts.
            if own < size.num_bytes || any_held_out {
                let limit = cuts.train_bytes.entry(hex(hash)).or_insert(own);
                *limit = own.min(*limit);
            }
        }
    }
    Ok(cuts)
}

/// Refuses to cut a stage's corpus, whose documents would all be held out by their hashes, if one of them has the size
/// of a validation document of the run: the run holds documents out by the same hashes, so it may be the same document.
fn check_beside(corpus: &Corpus, base: &Prepared, found: &[Found]) -> Result<(), DataError> {
    let validates = base.validation_sizes()?;
    let is_cut = |hash: u128| base.meta.train_bytes.contains_key(&hex(hash));
    if found.iter().any(|document| validates.contains(&document.size) && !is_cut(document.hash)) {
        let paths = &corpus.config().paths;
        let what = format!("a stage would train on text that the run validates on, in {paths:?}");
        let hint = "name text to validate on with [validation] paths, or give the stage different text";
        return Err(DataError::refused(what, hint));
    }
    Ok(())
}

fn is_held_out(hash: u128, fraction: f64) -> bool {
    // The upper 64 bits as a number in [0, 1).
    ((hash >> 64) as f64) / 2f64.powi(64) < fraction
}
