//! The calls of NSA's ops, and what a backend computes of them; the shapes are those of the functions of the same
//! names.
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::documents::{DocumentBounds, Documents};
use crate::tensors::{Float, Ints};
use burn::tensor::backend::Backend;
use sieve_cpu::NsaBlocks;

/// Where documents lie in the rows of a call, its heads, and its blocks.
#[derive(Clone, Debug)]
pub struct NsaCall<B: Backend> {
    /// Bounds of the documents.
    pub documents: DocumentBounds<B>,
    /// Heads and scale; the window is the third branch's alone and not read.
    pub spec: AttentionSpec,
    /// Sizes of compressed and selected blocks.
    pub blocks: NsaBlocks,
}

impl<B: Backend> NsaCall<B> {
    /// The call on `documents`.
    pub fn new(documents: &Documents<B>, spec: AttentionSpec, blocks: NsaBlocks) -> Self {
        Self {
            documents: documents.bounds(),
            spec,
            blocks,
        }
    }

    /// The same call on a backend with the same integers: an autodiff backend's inner one.
    pub(crate) fn on<I>(&self) -> NsaCall<I>
    where
        I: Backend<IntTensorPrimitive = B::IntTensorPrimitive>,
    {
        NsaCall {
            documents: self.documents.clone(),
            spec: self.spec,
            blocks: self.blocks,
        }
    }
}

/// Output of the compressed branch.
#[derive(Clone, Debug)]
pub struct NsaCompressed<B: Backend> {
    /// Attention over the compressed blocks.
    pub output: AttentionOutput<B>,
    /// See [`crate::CompressedAttention::block_indices`].
    pub block_indices: Ints<B>,
}

/// Output of the selected branch.
#[derive(Clone, Debug)]
pub struct NsaSelected<B: Backend> {
    /// Attention over the chosen blocks.
    pub output: AttentionOutput<B>,
    /// The queries that chose each block, where the device keeps its lists for the backward pass: entries, pieces and
    /// numbers of pieces, of each range of queries.
    pub lists: Vec<[Ints<B>; 3]>,
}

impl<B: Backend> NsaSelected<B> {
    /// Of a device that keeps no lists.
    pub(crate) fn without_lists(output: AttentionOutput<B>) -> Self {
        let lists = Vec::new();
        Self { output, lists }
    }
}

/// NSA's ops.
pub trait NsaBackend: Backend {
    /// See [`crate::nsa_blocks`]; positions of keys, then of values.
    fn nsa_blocks(qkv: Float<Self>, positions: [Float<Self>; 2], call: &NsaCall<Self>) -> Float<Self>;
    /// See [`crate::nsa_mean_pool`].
    fn nsa_mean_pool(qkv: Float<Self>, call: &NsaCall<Self>) -> Float<Self>;
    /// See [`crate::nsa_compressed_attention`].
    fn nsa_compressed_attention(qkv: Float<Self>, compressed: Float<Self>, call: &NsaCall<Self>)
    -> NsaCompressed<Self>;
    /// See [`crate::nsa_selected_attention`].
    fn nsa_selected_attention(qkv: Float<Self>, block_indices: Ints<Self>, call: &NsaCall<Self>) -> NsaSelected<Self>;
    /// See [`crate::nsa_gates`].
    fn nsa_gates(branches: [Float<Self>; 3], logits: Float<Self>, bias: Float<Self>) -> Float<Self>;
}

/// Gradients of NSA's ops, as a device computes them.
pub trait NsaGradients: NsaBackend {
    /// `[dqkv, dk_positions, dv_positions]` of [`nsa_blocks`](NsaBackend::nsa_blocks); `dims` are qkv's.
    fn nsa_blocks_backward(dims: [usize; 4], call: &NsaCall<Self>, dy: Float<Self>) -> [Float<Self>; 3];
    /// `dqkv` of [`nsa_mean_pool`](NsaBackend::nsa_mean_pool); `dims` are qkv's.
    fn nsa_mean_pool_backward(dims: [usize; 4], call: &NsaCall<Self>, dy: Float<Self>) -> Float<Self>;
    /// `[dqkv, dcompressed]` of [`nsa_compressed_attention`](NsaBackend::nsa_compressed_attention); dqkv is zero for
    /// keys and values.
    fn nsa_compressed_attention_backward(
        qkv: Float<Self>,
        compressed: Float<Self>,
        call: &NsaCall<Self>,
        output: AttentionOutput<Self>,
        d_o: Float<Self>,
    ) -> [Float<Self>; 2];
    /// `dqkv` of [`nsa_selected_attention`](NsaBackend::nsa_selected_attention).
    fn nsa_selected_attention_backward(
        qkv: Float<Self>,
        block_indices: Ints<Self>,
        call: &NsaCall<Self>,
        selected: NsaSelected<Self>,
        d_o: Float<Self>,
    ) -> Float<Self>;
    /// Gradients of the branches, the logits and the bias of [`nsa_gates`](NsaBackend::nsa_gates).
    fn nsa_gates_backward(
        branches: [Float<Self>; 3],
        logits: Float<Self>,
        bias: Float<Self>,
        d_o: Float<Self>,
    ) -> [Float<Self>; 5];
}
