//! Call and outputs of native sparse attention.
use crate::tensors::Ints;
use crate::{AttentionOutput, AttentionSpec, DocumentBounds};
use burn::tensor::backend::Backend;
use sieve_core::{LocalBlocks, NsaBlocks};

/// Operands of NSA's ops other than tensors.
#[derive(Clone, Debug)]
pub struct NsaCall<B: Backend> {
    /// Bounds of the documents.
    pub documents: DocumentBounds<B>,
    /// Heads and scale. The window, of the window branch, is not read.
    pub spec: AttentionSpec,
    /// Sizes of compressed and selected blocks.
    pub blocks: NsaBlocks,
    /// Blocks that tokens before this one of each row choose are not read, and may be anything.
    pub first: usize,
    /// The local blocks that every query's choice holds, where attention may read them in another order than the other
    /// chosen blocks.
    pub local: Option<LocalBlocks>,
    /// Whether the blocks of every query are pairs of neighbours: pieces of larger blocks.
    pub in_pairs: bool,
}

impl<B: Backend> NsaCall<B> {
    /// The call inside these documents.
    pub fn new(documents: DocumentBounds<B>, spec: AttentionSpec, blocks: NsaBlocks) -> Self {
        Self { documents, spec, blocks, first: 0, local: None, in_pairs: false }
    }

    /// The same call for the tokens from `first` on in each row.
    #[must_use]
    pub fn of_last(self, first: usize) -> Self {
        Self { first, ..self }
    }
}

/// Output of the compressed branch.
#[derive(Clone, Debug)]
pub struct NsaCompressed<B: Backend> {
    /// Attention over the compressed blocks.
    pub output: AttentionOutput<B>,
    /// Blocks of the selected branch; see
    /// [`CompressedAttention::block_indices`](crate::CompressedAttention::block_indices).
    pub block_indices: Ints<B>,
}

/// Output of the selected branch.
#[derive(Clone, Debug)]
pub struct NsaSelected<B: Backend> {
    /// Attention over the chosen blocks.
    pub output: AttentionOutput<B>,
    /// For the backward pass: which queries chose each block, where the device keeps that. One triple per range of
    /// queries: the concatenated lists of queries, the pieces into which kernels divide long lists, and the number of
    /// pieces.
    pub lists: Vec<[Ints<B>; 3]>,
}

impl<B: Backend> NsaSelected<B> {
    /// The output of a device that keeps no lists.
    pub(crate) fn without_lists(output: AttentionOutput<B>) -> Self {
        let lists = Vec::new();
        Self { output, lists }
    }
}
