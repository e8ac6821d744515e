//! Sums over all ranks where there are several groups of ranks, and each group divides the same tensors among its
//! ranks (hybrid sharding).
use super::{NcclGroup, NcclWork};
use sieve_gpu::{CudaTensor, KernelError};
use std::ops::Range;

/// The two groups of a rank where tensors are divided among some of all ranks. Their collectives run on the stream of
/// the group of all ranks ([`NcclStream::Of`](super::NcclStream::Of)): a sum over one group follows a sum over the
/// other.
#[derive(Debug)]
pub struct NcclReplicas {
    /// The ranks that divide tensors.
    pub within: NcclGroup,
    /// The ranks that have the same pieces, one of each group.
    pub across: NcclGroup,
}

/// Sums over all ranks that were queued and may still run.
#[derive(Debug)]
pub struct NcclSums {
    /// Whether each tensor is divided.
    are_cut: Vec<bool>,
    /// Sums of pieces over the ranks that divide them; `sums` reads them.
    pieces: NcclWork,
    sums: NcclWork,
    whole: NcclWork,
}

impl NcclReplicas {
    /// Starts to sum f32 tensors over the ranks of `all`. Tensors with ranges of their elements by rank are
    /// reduce-scattered among the ranks that divide them, and their pieces are all-reduced over the replicas; tensors
    /// without ranges are all-reduced.
    ///
    /// # Errors
    /// The errors of [`NcclGroup::sum`].
    pub fn sum(
        &self,
        all: &NcclGroup,
        tensors: Vec<(CudaTensor, Option<Vec<Range<usize>>>)>,
    ) -> Result<NcclSums, KernelError> {
        let are_cut = tensors.iter().map(|(_, ranges)| ranges.is_some()).collect();
        let (cut, whole) = tensors.into_iter().partition(|(_, ranges)| ranges.is_some());
        let pieces = self.within.sum(cut)?;
        // The one stream orders this read of the pieces behind the reduce-scatter; Burn's stream waits for neither.
        let sums = self.across.sum(pieces.results.iter().map(|piece| (piece.clone(), None)).collect())?;
        Ok(NcclSums { are_cut, pieces, sums, whole: all.sum(whole)? })
    }
}

impl NcclSums {
    /// Makes Burn's stream wait for the sums, and returns them in the order of the tensors.
    pub fn finish(self) -> Vec<CudaTensor> {
        let Self { are_cut, pieces, sums, whole } = self;
        let (mut sums, mut whole) = (sums.finish().into_iter(), whole.finish().into_iter());
        pieces.finish();
        let results = are_cut.into_iter().map(|is_cut| if is_cut { sums.next() } else { whole.next() });
        results.map(|sum| sum.expect("a sum of each tensor")).collect()
    }
}
