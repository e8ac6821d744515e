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

pub use blocks::{
    nsa_blocks_backward, nsa_blocks_forward, nsa_mean_pool_backward, nsa_mean_pool_forward,
};
pub use compressed::{nsa_compressed_attention_backward, nsa_compressed_attention_forward};
pub use gates::{nsa_gates_backward, nsa_gates_forward};
pub use select::{choose_blocks, overlap_weight};
pub use selected::nsa_selected_attention_forward;
pub use selected_backward::nsa_selected_attention_backward;

use crate::attention::Documents;

/// Block sizes of the compressed and the selected branch, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NsaBlocks {
    /// Tokens of a compressed block (l).
    pub compress_block_size: usize,
    /// Tokens between the starts of two compressed blocks (s); divides both block sizes.
    pub compress_stride: usize,
    /// Tokens of a selected block (l').
    pub select_block_size: usize,
    /// Blocks a query selects per KV head (k).
    pub num_selected_blocks: usize,
}

impl NsaBlocks {
    /// Places for compressed blocks in a row of `seq_len` tokens, whatever its documents.
    pub fn num_slots(&self, seq_len: usize) -> usize {
        seq_len.div_ceil(self.compress_stride)
    }

    /// Compressed blocks that lie in a document of `len` tokens whole.
    pub fn num_compressed_blocks(&self, len: usize) -> usize {
        match len.checked_sub(self.compress_block_size) {
            Some(rest) => rest / self.compress_stride + 1,
            None => 0,
        }
    }

    /// First slot of the document that begins at `start`. The blocks of a document end before the next one's first slot,
    /// because a block is at least as long as the stride.
    pub fn first_slot(&self, start: usize) -> usize {
        start.div_ceil(self.compress_stride)
    }

    /// First token of the block in each slot, `[batch, num_slots]`; -1 where a slot is empty.
    pub fn slot_starts(&self, batch: usize, seq_len: usize, documents: Documents<'_>) -> Vec<i32> {
        let mut starts = Vec::new();
        for row in 0..batch {
            let first = starts.len();
            starts.resize(first + self.num_slots(seq_len), -1);
            for document in documents_of(documents, row, seq_len) {
                let slot = first + self.first_slot(document.start);
                for c in 0..self.num_compressed_blocks(document.len()) {
                    starts[slot + c] = (document.start + c * self.compress_stride) as i32;
                }
            }
        }
        starts
    }

    /// Panics unless the sizes fit each other.
    pub fn check(&self) {
        let Self {
            compress_block_size,
            compress_stride,
            select_block_size,
            num_selected_blocks,
        } = *self;
        assert!(
            compress_stride > 0 && compress_block_size > 0 && select_block_size > 0,
            "nsa: a block size is 0"
        );
        assert!(
            compress_block_size.is_multiple_of(compress_stride)
                && select_block_size.is_multiple_of(compress_stride),
            "nsa: compress_stride does not divide both block sizes"
        );
        assert!(num_selected_blocks > 0, "nsa: num_selected_blocks is 0");
    }
}

/// The documents of one row, in order.
pub(crate) fn documents_of(
    documents: Documents<'_>,
    row: usize,
    seq_len: usize,
) -> Vec<std::ops::Range<usize>> {
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
