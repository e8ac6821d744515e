//! The pieces of native sparse attention (arXiv:2502.11089): compressed blocks, choice of blocks, attention over the
//! chosen blocks, gates. The window branch is [`attention_forward`](crate::attention_forward).
//!
//! Everything restarts at each document: its blocks are counted from its first token. Compressed block c of a document
//! covers its tokens `[c s, c s + l)` and is seen from its last token on, so it is kept under its last token's position
//! and an ordinary mask does the rest.

mod blocks;
mod compressed;
mod gates;
#[cfg(test)]
mod reference;
mod select;
mod selected;
mod selected_backward;
#[cfg(test)]
mod tests;

pub use blocks::{nsa_blocks_backward, nsa_blocks_forward, nsa_mean_pool_backward, nsa_mean_pool_forward};
pub use compressed::{nsa_compressed_attention_backward, nsa_compressed_attention_forward};
pub use gates::{nsa_gates_backward, nsa_gates_forward};
pub use select::{choose_blocks, choose_key_blocks, overlap_weight};
pub use selected::nsa_selected_attention_forward;
pub use selected_backward::nsa_selected_attention_backward;

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
