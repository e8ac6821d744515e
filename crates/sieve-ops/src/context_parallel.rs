//! Context parallelism: each row is cut into parts of equal length, one for each of several processes (with a GPU each;
//! threads in tests). A rank is here what it is in DMA: what orders a key; a run's rank is called a process.
//!
//! Everything but attention looks at one token at a time and needs no other part. Attention does one of two things.
//! Dense attention exchanges tokens for heads: each process then has whole rows of a few heads (Ulysses,
//! arXiv:2309.14509); so do all kinds that choose blocks, and latent attention, whose latents every process gets.
//! Window attention and DMA run on a longer row: the halo, keys of earlier parts that this part's queries may see,
//! followed by the part. A window's halo is the last keys before the part. DMA's is as many keys a head as a query
//! keeps, however long the row is: a key that one query no longer sees is seen by no later query. So the part's queries
//! can see only those earlier keys that are still kept where the part begins.
//!
//! The processes communicate through the `RankGroup` of `ContextParallel`, which a call has beside its `Documents`.
//! Tensors travel over TCP between CPUs, and between GPUs by an NCCL group of the processes that share a row, on
//! Burn's stream. `to_heads` and `to_tokens` divide heads among the processes, or give all heads to each, as with a
//! latent. On GPUs three small kernels choose and move DMA's keys.
mod attend;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod halo;
mod heads;
mod links;
mod reference;
#[cfg(test)]
mod tests;
mod threads;
mod traced;

pub(crate) use attend::{Parted, backward, forward};
pub use heads::Heads;
pub use links::{RankGroup, SendRecv};
pub use threads::ThreadGroup;
pub use traced::TracedPart;

use crate::Documents;
use crate::tensors::ints;
use burn::tensor::backend::Backend;
use std::ops::Range;
use std::sync::Arc;

/// A batch of rows, of each of which this process holds one part.
#[derive(Clone, Debug)]
pub struct ContextParallel {
    links: Arc<dyn RankGroup>,
    /// First position, and one past the last, of each token's document in its whole row.
    bounds: Arc<[Vec<u32>; 2]>,
    batch: usize,
    /// Tokens of a whole row.
    seq_len: usize,
}

impl ContextParallel {
    /// Parts of rows whose documents have these bounds, `batch * seq_len` each.
    ///
    /// # Panics
    /// When rows cannot be cut into parts of equal length.
    pub fn new(links: Arc<dyn RankGroup>, bounds: [Vec<u32>; 2], [batch, seq_len]: [usize; 2]) -> Self {
        let parts = links.num_parts();
        assert_eq!(seq_len % parts, 0, "{parts} parts of a row of {seq_len}");
        assert!(bounds.iter().all(|bounds| bounds.len() == batch * seq_len));
        Self { links, bounds: Arc::new(bounds), batch, seq_len }
    }

    /// Tokens of a part.
    fn len(&self) -> usize {
        self.seq_len / self.links.num_parts()
    }

    /// First position, and one past the last, of the document of a token.
    fn document(&self, row: usize, position: usize) -> [usize; 2] {
        let token = row * self.seq_len + position;
        [0, 1].map(|bound| self.bounds[bound][token] as usize)
    }

    /// For each row, how many keys of the parts `from` belong to the document that continues into this process's part,
    /// where each part has at most `share` keys to send.
    fn keys_of_open_documents(&self, from: Range<usize>, share: usize) -> Vec<usize> {
        let len = self.len();
        let keys = |row: usize| {
            let [start, _] = self.document(row, self.links.part() * len);
            let ends = from.clone().map(|part| (part + 1) * len);
            ends.map(|end| end.saturating_sub(start).min(share)).sum()
        };
        (0..self.batch).map(keys).collect()
    }

    /// Document bounds of each row after `halo` tokens were prepended to this process's part: the first `pads` of
    /// these belong to no document, the others to the document that continues into the part. The bounds are counted
    /// from the first of these tokens.
    fn bounds_behind(&self, halo: usize, pads: &[usize]) -> [Vec<i32>; 2] {
        let (len, first) = (self.len(), self.links.part() * self.len());
        let mut bounds = [Vec::new(), Vec::new()];
        for (row, &pads) in pads.iter().enumerate() {
            let mut push = |[start, end]: [usize; 2]| {
                bounds[0].push(start as i32);
                bounds[1].push(end as i32);
            };
            let document = |position: usize| {
                let [start, end] = self.document(row, position);
                let start = if start < first { pads } else { halo + start - first };
                [start, halo + end.min(first + len) - first]
            };
            (0..pads).for_each(|_| push([0, pads]));
            (pads..halo).for_each(|_| push(document(first)));
            (first..first + len).for_each(|position| push(document(position)));
        }
        bounds
    }
}

impl<B: Backend> Documents<B> {
    /// The documents of this process's part of the rows: bounds counted in the part, positions as in the whole row.
    pub fn of_part(parts: &ContextParallel, device: &B::Device) -> Self {
        let (batch, len) = (parts.batch, parts.len());
        let (halo, pads) = (0, vec![0; batch]);
        let [start, end] = parts.bounds_behind(halo, &pads);
        let first = parts.links.part() * len;
        let positions = (0..batch * len).map(|token| {
            let (row, position) = (token / len, first + token % len);
            (position - parts.document(row, position)[0]) as i32
        });
        let [start, end, positions] =
            [start, end, positions.collect()].map(|values| ints(values, [batch, len], device));
        Self { start, end, positions }
    }
}
