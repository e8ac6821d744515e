//! Which text is held out for validation.
//!
//! A fraction is held out by a hash of each document's text. Where that leaves a split without documents, the corpus
//! has too few: then the end of its text is held out, and the document that contains the boundary is cut there, between
//! two characters. With several corpora text is held out of each, since the loss on one says nothing about the others.
//! A document that a cut holds out, wholly or from some byte on, is trained on up to that byte at most wherever else it
//! is found: in another corpus, twice in one, in the text of a stage.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use super::{DocumentSize, Prepared, content_hash, hex};
use crate::corpus::{Corpus, Cursor, Document, Documents};
use crate::error::DataError;

/// How many bytes of a document's text may be trained on, by the document's hash in hexadecimal.
pub(super) type TrainBytes = BTreeMap<String, u64>;

/// Which corpora are cut, and where.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Cuts {
    /// For each corpus the byte of its text from which on it is held out, or `None` where whole documents are.
    pub(super) places: Vec<Option<u64>>,
    /// The documents of cut corpora that are not trained on whole, or that their hash alone would hold out.
    pub(super) train_bytes: TrainBytes,
}

/// Which shard a text goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Train,
    Validation,
}

/// What is held out of one corpus.
#[derive(Debug, Clone, Copy)]
pub(super) enum Split<'a> {
    /// This fraction of the documents, by a hash of their text.
    Hash(f64, &'a TrainBytes),
    /// The text from this byte on.
    End(u64, &'a TrainBytes),
    /// Nothing: it is the validation corpus.
    AllHeldOut,
    /// Documents with these hashes are left out: the validation corpus has them.
    Without(&'a HashSet<u128>),
}

impl Split<'_> {
    /// The shards that a document goes to, which begins at byte `start` of the corpus's text: none where it is left
    /// out, two parts where it is cut.
    pub(super) fn parts(&self, start: u64, document: Document) -> Vec<(Target, Document)> {
        match *self {
            Self::Hash(fraction, cut) => match train_bytes(&document, cut) {
                // The rest validates in the corpus that is cut.
                Some(most) => Vec::from_iter(beginning(document, most)),
                None if is_held_out(content_hash(&document), fraction) => vec![(Target::Validation, document)],
                None => vec![(Target::Train, document)],
            },
            Self::AllHeldOut => vec![(Target::Validation, document)],
            Self::Without(held_out) if held_out.contains(&content_hash(&document)) => Vec::new(),
            Self::Without(_) => vec![(Target::Train, document)],
            Self::End(place, cut) => {
                let most = train_bytes(&document, cut).unwrap_or(u64::MAX);
                let own = own_train_bytes([start, document.text.len() as u64], document.prompt.is_some(), place);
                let mut end = document.clone();
                end.text.drain(..end.text.floor_char_boundary(own as usize));
                let end = Some((Target::Validation, end)).filter(|end| !end.1.text.is_empty());
                beginning(document, own.min(most)).into_iter().chain(end).collect()
            }
        }
    }
}

/// How many bytes of a document lie before the cut of its own corpus. The end of an answer says little without its
/// beginning: an answer is not cut.
fn own_train_bytes([start, num_bytes]: [u64; 2], is_answer: bool, cut: u64) -> u64 {
    match is_answer && start + num_bytes > cut {
        true => 0,
        false => cut.saturating_sub(start).min(num_bytes),
    }
}

/// The beginning of a document, to train on; of an answer all or nothing.
fn beginning(mut document: Document, most: u64) -> Option<(Target, Document)> {
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    match document.prompt.is_some() && most < document.text.len() {
        true => document.text.clear(),
        false => document.text.truncate(document.text.floor_char_boundary(most)),
    }
    (!document.text.is_empty()).then_some((Target::Train, document))
}

fn train_bytes(document: &Document, cut: &TrainBytes) -> Option<u64> {
    if cut.is_empty() {
        return None;
    }
    cut.get(&hex(content_hash(document))).copied()
}

/// Finds the corpora that have to be cut. Stops reading one as soon as it has enough documents. `base` is the run's own
/// text where these corpora are a stage's.
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
            found.push((hash, DocumentSize::of(&document.text), document.prompt.is_some()));
            match is_held_out(hash, fraction) {
                true => any_held_out = true,
                false => any_train = true,
            }
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
        // The whole text was read.
        let cut = num_bytes - (num_bytes as f64 * fraction).round() as u64;
        cuts.places.push(Some(cut));
        let mut start = 0;
        for (hash, size, is_answer) in found {
            let own = own_train_bytes([start, size.num_bytes], is_answer, cut);
            start += size.num_bytes;
            // Equal documents are trained on up to the first of their cuts.
            if own < size.num_bytes || any_held_out {
                let most = cuts.train_bytes.entry(hex(hash)).or_insert(own);
                *most = own.min(*most);
            }
        }
    }
    Ok(cuts)
}

/// Refuses the text of a stage whose documents their hash would all hold out, where the run validates on one of them.
fn check_beside(corpus: &Corpus, base: &Prepared, found: &[(u128, DocumentSize, bool)]) -> Result<(), DataError> {
    let validates = base.validation_sizes()?;
    let is_cut = |hash: u128| base.meta.train_bytes.contains_key(&hex(hash));
    if found
        .iter()
        .any(|(hash, size, _)| validates.contains(size) && !is_cut(*hash))
    {
        let paths = &corpus.config().paths;
        let what = format!("a stage would train on text that the run validates on, in {paths:?}");
        let hint = "name text to validate on with [validation] paths, or give the stage other text";
        return Err(DataError::refused(what, hint));
    }
    Ok(())
}

fn is_held_out(hash: u128, fraction: f64) -> bool {
    // The upper 64 bits as a number in [0, 1).
    ((hash >> 64) as f64) / 2f64.powi(64) < fraction
}
