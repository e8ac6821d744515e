//! Sums over ranks that are several groups, each of which divides the same tensors among its ranks.
use super::{NcclGroup, NcclWork};
use sieve_gpu::{CudaTensor, KernelError};
use std::ops::Range;

/// The groups of a rank that divides tensors with some of all ranks. Their collectives run on the stream of the group
/// of all ranks ([`NcclStream::Of`](super::NcclStream::Of)): a sum over one group follows a sum over the other.
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
    /// As [`NcclGroup::sum`], over the ranks of `all`: tensors with ranges are reduce-scattered among the ranks that
    /// divide them, and their pieces are all-reduced over the replicas.
    ///
    /// # Errors
    /// As [`NcclGroup::sum`].
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
