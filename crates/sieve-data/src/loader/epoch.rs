//! One epoch: the order of the documents, and which pieces of them make up each row.

use std::ops::Range;

use rayon::prelude::*;

use super::batch::{LoaderConfig, Order, Packing};
use crate::permutation::Permutation;
use crate::shard::ShardReader;

/// Changes the seed, so that the order of rows is independent of the order of documents.
const ROW_ORDER_SALT: u64 = 0x726F_775F_6F72_6465;

/// The order of documents and rows of one epoch.
#[derive(Debug)]
pub(super) struct Epoch {
    pub(super) number: u64,
    /// Order of the documents; `None` for the shard's order.
    permutation: Option<Permutation>,
    /// Order of the rows, so that the rows of a batch come from many documents; `None` for the order of their tokens.
    row_order: Option<Permutation>,
    packing: Packing,
    seq_len: u64,
    /// For each place in the order of documents, the number of tokens (concatenated) or rows (one document per row) up
    /// to the end of that document.
    ends: Vec<u64>,
    pub(super) num_samples: u64,
}

/// A piece of a document in a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) document: u64,
    /// Range of the document's tokens, not empty.
    pub(super) tokens: Range<u64>,
}

impl Epoch {
    /// Permutes the documents and rows of epoch `number`, and adds up the documents' lengths in their order.
    pub(super) fn new(shard: &ShardReader, config: &LoaderConfig, number: u64) -> Self {
        let seq_len = config.seq_len as u64;
        let order = |len: u64, salt: u64| match config.order {
            Order::Shuffled { seed } => Some(Permutation::new(len, seed ^ salt, number)),
            Order::Sequential => None,
        };
        let no_salt = 0;
        let permutation = order(shard.num_documents(), no_salt);
        let lengths = (0..shard.num_documents()).into_par_iter().map(|place| {
            let document = permutation.as_ref().map_or(place, |permutation| permutation.get(place));
            let len = shard.document_len(document);
            match config.packing {
                Packing::Concatenated => len,
                // The document's rows, without its last token, which has no label.
                Packing::OneDocumentPerRow => len.saturating_sub(1).div_ceil(seq_len),
            }
        });
        // The lengths become their running sums.
        let mut ends = lengths.collect::<Vec<_>>();
        let mut total = 0;
        for end in &mut ends {
            total += *end;
            *end = total;
        }
        let num_samples = match (config.packing, config.order) {
            (Packing::OneDocumentPerRow, _) => total,
            (Packing::Concatenated, Order::Shuffled { .. }) => total / seq_len,
            // The last token ends a document, so it has no label and needs no row of its own.
            (Packing::Concatenated, Order::Sequential) => total.saturating_sub(1).div_ceil(seq_len),
        };
        let row_order = order(num_samples, ROW_ORDER_SALT);
        Self { number, permutation, row_order, packing: config.packing, seq_len, ends, num_samples }
    }

    /// The pieces of one row, which have at most `seq_len` tokens together.
    pub(super) fn row(&self, shard: &ShardReader, sample: u64) -> Vec<Piece> {
        let sample = self.row_order.as_ref().map_or(sample, |order| order.get(sample));
        match self.packing {
            Packing::Concatenated => self.concatenated_row(shard, sample),
            Packing::OneDocumentPerRow => vec![self.single_row(shard, sample)],
        }
    }

    /// The pieces of documents that fill row `sample` of the epoch's concatenated tokens.
    fn concatenated_row(&self, shard: &ShardReader, sample: u64) -> Vec<Piece> {
        let mut token = sample * self.seq_len;
        let row_end = token + self.seq_len;
        let mut pieces = Vec::new();
        for place in self.place_of(token)..self.ends.len() {
            if token == row_end {
                break;
            }
            let document = self.document(place);
            // The document's first token, counted like `token` over the documents of the epoch in their order.
            let begin = self.ends[place] - shard.document_len(document);
            let piece_end = self.ends[place].min(row_end);
            if token < piece_end {
                pieces.push(Piece { document, tokens: token - begin..piece_end - begin });
                token = piece_end;
            }
        }
        pieces
    }

    /// The part of one document that makes up row `sample`.
    fn single_row(&self, shard: &ShardReader, sample: u64) -> Piece {
        let place = self.place_of(sample);
        let document = self.document(place);
        let rows_before = if place == 0 { 0 } else { self.ends[place - 1] };
        let start = (sample - rows_before) * self.seq_len;
        Piece {
            document,
            // Without the document's last token, which has no label.
            tokens: start..(start + self.seq_len).min(shard.document_len(document) - 1),
        }
    }

    /// The place in the epoch's order of documents whose document holds this token or, with one document per row, this
    /// row.
    fn place_of(&self, token_or_row: u64) -> usize {
        self.ends.partition_point(|&end| end <= token_or_row)
    }

    fn document(&self, place: usize) -> u64 {
        self.permutation.as_ref().map_or(place as u64, |permutation| permutation.get(place as u64))
    }
}
