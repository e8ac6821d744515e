//! How the ranks of a run divide its rows and weights.
use sieve_comm::{Pieces, ShardGroup};
use std::ops::Range;

/// This rank, the number of ranks, and how they divide the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// The ranks among which matrices are divided: all, or those of `parallelism.shard_ranks`.
    pub(crate) group: ShardGroup,
    /// Whether matrices are divided into pieces: `parallelism.zero_stage` is not 0.
    pub(crate) cuts: bool,
    /// Whether a rank has whole weights between their uses: `parallelism.zero_stage` is not 3.
    pub(crate) keeps_whole: bool,
}

impl Share {
    /// The share of a run in one process: everything.
    pub(crate) const ALL: Self = Self { rank: 0, size: 1, group: ShardGroup::ALONE, cuts: true, keeps_whole: true };

    /// This rank's share of the rows where `degree` consecutive ranks share each row.
    pub(crate) fn of_rows(&self, degree: usize) -> Self {
        Self { rank: self.rank / degree, size: (self.size / degree).max(1), ..*self }
    }

    /// The pieces of a parameter of this shape; `None` for vectors and small matrices, which every rank updates whole.
    pub(crate) fn pieces(&self, shape: &[usize]) -> Option<Pieces> {
        let count = shape.iter().product();
        (self.cuts && shape.len() > 1).then(|| Pieces::new(count, self.group.size()))?
    }

    /// This rank's range of a parameter that is divided into `pieces`.
    pub(crate) fn own(&self, pieces: Pieces) -> Range<usize> {
        pieces.of(self.group.place())
    }

    /// This rank's range of the flattened parameter; `None` if ranks do not divide it.
    pub(crate) fn range(&self, shape: &[usize]) -> Option<Range<usize>> {
        Some(self.own(self.pieces(shape)?))
    }

    /// Whether this rank's values count in sums over all ranks, and are saved. Every group of `parallelism.shard_ranks`
    /// has the same pieces: those of the first group count. Values that all ranks have whole count on rank 0.
    pub(crate) fn counts(&self, is_piece: bool) -> bool {
        if is_piece { self.group.is_first() } else { self.rank == 0 }
    }
}
