//! Which text is held out for validation.
//!
//! A fraction is held out by a hash of each document's text. Where that leaves a split without documents, the corpus
//! has too few: then the end of its text is held out, and the document that contains the boundary is cut there, between
//! two characters. With several corpora text is held out of each, since the loss on one says nothing about the others.

use std::collections::HashSet;

use super::content_hash;
use crate::corpus::{Corpus, Cursor, Document, Documents};
use crate::error::DataError;

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
    Hash(f64),
    /// The text from this byte on.
    End(u64),
    /// Nothing: it is the validation corpus.
    AllHeldOut,
    /// Documents with these hashes are left out: the validation corpus has them.
    Without(&'a HashSet<u128>),
}

impl Split<'_> {
    /// Where a document goes, of which `start` bytes of the corpus's text come before it; two parts where it is cut.
    pub(super) fn parts(&self, start: u64, mut document: Document) -> Vec<(Target, Document)> {
        match *self {
            Self::Hash(fraction) if is_held_out(&document, fraction) => {
                vec![(Target::Validation, document)]
            }
            Self::Hash(_) => vec![(Target::Train, document)],
            Self::AllHeldOut => vec![(Target::Validation, document)],
            Self::Without(held_out) if held_out.contains(&content_hash(&document)) => Vec::new(),
            Self::Without(_) => vec![(Target::Train, document)],
            // The end of an answer says little without its beginning: it is not cut.
            Self::End(cut) if document.prompt.is_some() => match start + document.text.len() as u64 > cut {
                true => vec![(Target::Validation, document)],
                false => vec![(Target::Train, document)],
            },
            Self::End(cut) => {
                let cut = usize::try_from(cut.saturating_sub(start)).unwrap_or(usize::MAX);
                let end = document.text.split_off(document.text.floor_char_boundary(cut));
                let end = Document {
                    text: end,
                    ..document.clone()
                };
                let mut parts = vec![(Target::Train, document), (Target::Validation, end)];
                parts.retain(|part| !part.1.text.is_empty());
                parts
            }
        }
    }
}

/// For each corpus the byte of its text from which on it is held out, or `None` where whole documents are. Stops
/// reading as soon as there are enough documents.
pub(super) fn cuts(corpora: &[Corpus], fraction: f64) -> Result<Vec<Option<u64>>, DataError> {
    let mut seen = HashSet::new();
    let mut cuts = Vec::new();
    for corpus in corpora {
        let mut documents = Documents::resume(corpus, Cursor::default(), seen);
        let (mut any_train, mut any_held_out) = (false, false);
        while !(any_train && any_held_out)
            && let Some(document) = documents.next().transpose()?
        {
            match is_held_out(&document, fraction) {
                true => any_held_out = true,
                false => any_train = true,
            }
        }
        // Where one of them is missing, the whole text was read.
        let num_bytes = documents.report().num_bytes;
        let end = (num_bytes as f64 * fraction).round() as u64;
        cuts.push((!any_train || !any_held_out).then(|| num_bytes - end));
        seen = documents.into_seen();
    }
    Ok(cuts)
}

fn is_held_out(document: &Document, fraction: f64) -> bool {
    // The upper 64 bits as a number in [0, 1).
    ((content_hash(document) >> 64) as f64) / 2f64.powi(64) < fraction
}
