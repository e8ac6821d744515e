//! Calls of attention over chosen blocks.
use crate::{AttentionSpec, DocumentBounds, NsaCall, NsaSelected};
use burn::tensor::backend::Backend;
use sieve_core::BlockChoice;

/// Operands of a choice of blocks other than the tensors.
#[derive(Clone, Debug)]
pub struct ChoiceCall<B: Backend> {
    /// Bounds of the documents.
    pub documents: DocumentBounds<B>,
    /// Heads and scale; the window is not read.
    pub spec: AttentionSpec,
    /// Pooled keys, blocks and the rule of the choice.
    pub choice: BlockChoice,
    /// Choices of tokens before this one of each row are not read, and may be anything.
    pub first: usize,
}

/// Operands of the fused kernel for the gradient of an indexer's loss, other than the packed tensors.
#[derive(Clone, Debug)]
pub struct IndexGradientCall<'a, B: Backend> {
    /// The call of the attention over the chosen blocks.
    pub call: NsaCall<B>,
    /// The output of that attention.
    pub attention: &'a NsaSelected<B>,
    /// Weight of the divergence of one query and KV head in the loss.
    pub weight: f64,
}
