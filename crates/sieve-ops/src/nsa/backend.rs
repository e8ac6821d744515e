//! The ops of NSA that a backend may override.
use crate::{AttentionOutput, AttentionSpec, DocumentBounds, NsaBlocks, reference};
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};

/// Output of the compressed branch.
#[derive(Clone, Debug)]
pub struct NsaCompressed<B: Backend> {
    /// Attention over the compressed blocks.
    pub output: AttentionOutput<B>,
    /// See [`crate::CompressedAttention::block_indices`].
    pub block_indices: IntTensor<B>,
}

/// NSA's part of [`SieveBackend`](crate::SieveBackend), on primitives; the shapes are those of the functions of the same
/// names. Default bodies are the references.
pub trait NsaBackend: Backend {
    /// See [`crate::nsa_blocks`]; positions of keys, then of values.
    fn nsa_blocks(
        qkv: FloatTensor<Self>,
        positions: [FloatTensor<Self>; 2],
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> FloatTensor<Self> {
        reference::nsa_blocks::<Self>(qkv, positions, documents, spec, blocks)
    }
    /// `[dqkv, dk_positions, dv_positions]` of [`crate::nsa_blocks`]; `dims` are qkv's.
    fn nsa_blocks_backward(
        dims: [usize; 4],
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        dy: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 3] {
        reference::nsa_blocks_backward::<Self>(dims, documents, spec, blocks, dy)
    }

    /// See [`crate::nsa_mean_pool`].
    fn nsa_mean_pool(
        qkv: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> FloatTensor<Self> {
        reference::nsa_mean_pool::<Self>(qkv, documents, spec, blocks)
    }
    /// `dqkv` of [`crate::nsa_mean_pool`]; `dims` are qkv's.
    fn nsa_mean_pool_backward(
        dims: [usize; 4],
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::nsa_mean_pool_backward::<Self>(dims, documents, spec, blocks, dy)
    }

    /// See [`crate::nsa_compressed_attention`].
    fn nsa_compressed_attention(
        qkv: FloatTensor<Self>,
        compressed: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> NsaCompressed<Self> {
        reference::nsa_compressed_attention::<Self>(qkv, compressed, documents, spec, blocks)
    }
    /// `[dqkv, dcompressed]` of [`crate::nsa_compressed_attention`]; dqkv is zero for keys and values.
    fn nsa_compressed_attention_backward(
        qkv: FloatTensor<Self>,
        compressed: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        output: AttentionOutput<Self>,
        d_o: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        reference::nsa_compressed_attention_backward::<Self>(
            qkv, compressed, documents, spec, blocks, output, d_o,
        )
    }

    /// See [`crate::nsa_selected_attention`].
    fn nsa_selected_attention(
        qkv: FloatTensor<Self>,
        block_indices: IntTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> AttentionOutput<Self> {
        reference::nsa_selected_attention::<Self>(qkv, block_indices, documents, spec, blocks)
    }
    /// `dqkv` of [`crate::nsa_selected_attention`].
    fn nsa_selected_attention_backward(
        qkv: FloatTensor<Self>,
        block_indices: IntTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        output: AttentionOutput<Self>,
        d_o: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::nsa_selected_attention_backward::<Self>(
            qkv,
            block_indices,
            documents,
            spec,
            blocks,
            output,
            d_o,
        )
    }

    /// See [`crate::nsa_gates`].
    fn nsa_gates(
        branches: [FloatTensor<Self>; 3],
        logits: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::nsa_gates::<Self>(branches, logits, bias)
    }
    /// Gradients of the branches, the logits and the bias of [`crate::nsa_gates`].
    fn nsa_gates_backward(
        branches: [FloatTensor<Self>; 3],
        logits: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        d_o: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 5] {
        reference::nsa_gates_backward::<Self>(branches, logits, bias, d_o)
    }
}
