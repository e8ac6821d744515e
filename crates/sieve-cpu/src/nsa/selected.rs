//! Blocks that a caller gives each query, in the form that attention reads.
use sieve_core::selected_pieces;
use std::collections::BTreeSet;

/// Blocks that a caller gives each query and chooser, in any order. Indices below 0, of blocks after the query's own
/// one and of a block that is named before count as none.
#[derive(Clone, Copy, Debug)]
pub struct SelectedBlocks<'a> {
    /// Indices of blocks from the document's first token on, `[batch, seq_len, choosers, num_indices]`.
    pub indices: &'a [i32],
    /// How many of a query's indices count, from the first one on, `[batch, seq_len, choosers]`; `None`: all.
    pub counts: Option<&'a [i32]>,
    /// Number of indices of a query and chooser.
    pub num_indices: usize,
    /// Tokens of a block, one of [`SELECTED_SIZES`](sieve_core::SELECTED_SIZES).
    pub block: usize,
}

impl SelectedBlocks<'_> {
    /// The blocks as attention reads them, `[batch, seq_len, choosers, num_indices * pieces]`: ascending, each once,
    /// then -1. A block of more than 64 tokens is cut into pieces ([`selected_pieces`]), of which those after the
    /// query's own piece are left out. `start` is the first token of each token's document, `[batch, seq_len]`.
    ///
    /// # Panics
    /// When lengths do not fit.
    pub fn attended(&self, start: &[i32], seq_len: usize) -> Vec<i32> {
        let &Self { indices, counts, num_indices, block } = self;
        let pieces = selected_pieces(block);
        let (size, lists) = (block / pieces, indices.len() / num_indices);
        let choosers = lists / start.len();
        let fits = indices.len() == start.len() * choosers * num_indices && start.len().is_multiple_of(seq_len);
        assert!(fits && counts.is_none_or(|counts| counts.len() == lists), "selected blocks: lengths do not fit");
        let mut all = Vec::with_capacity(lists * num_indices * pieces);
        for (list, indices) in indices.chunks_exact(num_indices).enumerate() {
            let token = list / choosers;
            let position = token % seq_len - start[token] as usize;
            let count = counts.map_or(num_indices, |counts| counts[list].max(0) as usize);
            let blocks = indices.iter().take(count).filter_map(|&index| usize::try_from(index).ok());
            let blocks: BTreeSet<usize> = blocks.filter(|index| index * block <= position).collect();
            let of_block = |index: usize| index * pieces..(index + 1) * pieces;
            let end = all.len() + num_indices * pieces;
            let kept = blocks.into_iter().flat_map(of_block).filter(|piece| piece * size <= position);
            all.extend(kept.map(|piece| piece as i32));
            all.resize(end, -1);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_indices_are_dropped_and_blocks_of_128_tokens_are_cut() {
        // Two documents, of 300 and 100 tokens.
        let start = [vec![0; 300], vec![300; 100]].concat();
        let indices = [2, 0, -1, 0, 7].repeat(400);
        let given = SelectedBlocks { indices: &indices, counts: None, num_indices: 5, block: 128 };
        let of = |given: SelectedBlocks<'_>, token: usize| -> Vec<i32> {
            let row = &given.attended(&start, 400)[token * 10..][..10];
            let (blocks, none) = row.split_at(row.iter().position(|&block| block < 0).unwrap_or(row.len()));
            assert!(none.iter().all(|&block| block == -1), "{row:?}");
            blocks.to_vec()
        };
        for (token, expected) in [
            (63, vec![0]),
            (64, vec![0, 1]),
            (256, vec![0, 1, 4]),
            (299, vec![0, 1, 4]),
            (300, vec![0]),
            (363, vec![0]),
            (364, vec![0, 1]),
        ] {
            assert_eq!(of(given, token), expected, "{token}");
        }
        let first = vec![1; 400];
        let few = SelectedBlocks { counts: Some(&first), ..given };
        assert_eq!((of(few, 255), of(few, 299)), (vec![], vec![4]));
        let counts = [-3, 9].repeat(200);
        let odd = SelectedBlocks { counts: Some(&counts), ..given };
        assert_eq!((of(odd, 298), of(odd, 299)), (vec![], vec![0, 1, 4]));
    }
}
