//! Which blocks of keys a query reads, as native sparse attention (arXiv:2502.11089) and the rules of
//! [`sieve_core::BlockChoice`] choose them. The attention over these blocks is
//! [`attention_forward`](crate::attention_forward) under [`Mask::Chosen`](crate::Mask::Chosen).
//!
//! Blocks are counted from each document's first token. Compressed block c of a document covers its tokens
//! `[c s, c s + l)`, with stride s and length l; queries see it from its last token on.

mod select;
mod selected;

pub use select::{choose_blocks, choose_key_blocks, choose_token_blocks, overlap_weight};
pub use selected::SelectedBlocks;

pub use sieve_core::NsaBlocks;

use crate::attention::Documents;

/// First token of the compressed block in each slot, `[batch, num_slots]`; -1 where a slot is empty. A row has one slot
/// per stride, which suffices for any documents; a document's blocks fill consecutive slots.
pub fn slot_starts(blocks: NsaBlocks, batch: usize, seq_len: usize, documents: Documents<'_>) -> Vec<i32> {
    let mut starts = Vec::new();
    for row in 0..batch {
        let slots_before = starts.len();
        starts.resize(slots_before + blocks.num_slots(seq_len), -1);
        for document in documents.of_row(row, seq_len) {
            let slot = slots_before + blocks.first_slot(document.start);
            for c in 0..blocks.num_compressed_blocks(document.len()) {
                starts[slot + c] = (document.start + c * blocks.compress_stride) as i32;
            }
        }
    }
    starts
}
