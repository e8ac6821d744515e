//! Which blocks of keys a query reads, as native sparse attention (arXiv:2502.11089) and its relatives choose them. The
//! attention over them is [`attention_forward`](crate::attention_forward) under [`Mask::Chosen`](crate::Mask::Chosen).
//!
//! Everything restarts at each document: its blocks are counted from its first token. Compressed block c of a document
//! covers its tokens `[c s, c s + l)` and is seen from its last token on.

mod select;

pub use select::{choose_blocks, choose_key_blocks, overlap_weight};

pub use sieve_core::NsaBlocks;

use crate::attention::Documents;

/// First token of the block in each slot, `[batch, num_slots]`; -1 where a slot is empty.
pub fn slot_starts(blocks: NsaBlocks, batch: usize, seq_len: usize, documents: Documents<'_>) -> Vec<i32> {
    let mut starts = Vec::new();
    for row in 0..batch {
        let first = starts.len();
        starts.resize(first + blocks.num_slots(seq_len), -1);
        for document in documents_of(documents, row, seq_len) {
            let slot = first + blocks.first_slot(document.start);
            for c in 0..blocks.num_compressed_blocks(document.len()) {
                starts[slot + c] = (document.start + c * blocks.compress_stride) as i32;
            }
        }
    }
    starts
}

/// The documents of one row, in order.
pub(crate) fn documents_of(documents: Documents<'_>, row: usize, seq_len: usize) -> Vec<std::ops::Range<usize>> {
    let end = &documents.end[row * seq_len..(row + 1) * seq_len];
    let mut ranges = Vec::new();
    let mut first = 0;
    while first < seq_len {
        let next = end[first] as usize;
        ranges.push(first..next);
        first = next;
    }
    ranges
}
