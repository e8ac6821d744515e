//! NSA on CUDA: no kernel yet, so every op runs its counted reference.
use super::{NsaBackend, NsaCompressed};
use crate::device::paths::{no_kernel, no_kernel_scores, scores};
use crate::{AttentionOutput, AttentionSpec, Cuda, DocumentBounds, NsaBlocks, reference};
use sieve_kernels::CudaPrimitive;

impl NsaBackend for Cuda {
    fn nsa_blocks(
        qkv: CudaPrimitive,
        positions: [CudaPrimitive; 2],
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> CudaPrimitive {
        no_kernel("nsa_blocks", || {
            reference::nsa_blocks::<Self>(qkv, positions, documents, spec, blocks)
        })
    }

    fn nsa_blocks_backward(
        dims: [usize; 4],
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        dy: CudaPrimitive,
    ) -> [CudaPrimitive; 3] {
        no_kernel("nsa_blocks_backward", || {
            reference::nsa_blocks_backward::<Self>(dims, documents, spec, blocks, dy)
        })
    }

    fn nsa_mean_pool(
        qkv: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> CudaPrimitive {
        no_kernel("nsa_mean_pool", || {
            reference::nsa_mean_pool::<Self>(qkv, documents, spec, blocks)
        })
    }

    fn nsa_mean_pool_backward(
        dims: [usize; 4],
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        dy: CudaPrimitive,
    ) -> CudaPrimitive {
        no_kernel("nsa_mean_pool_backward", || {
            reference::nsa_mean_pool_backward::<Self>(dims, documents, spec, blocks, dy)
        })
    }

    fn nsa_compressed_attention(
        qkv: CudaPrimitive,
        compressed: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> NsaCompressed<Self> {
        let scores = scores(&qkv, spec.num_heads);
        no_kernel_scores("nsa_compressed_attention", scores, || {
            reference::nsa_compressed_attention::<Self>(qkv, compressed, documents, spec, blocks)
        })
    }

    fn nsa_compressed_attention_backward(
        qkv: CudaPrimitive,
        compressed: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        output: AttentionOutput<Self>,
        d_o: CudaPrimitive,
    ) -> [CudaPrimitive; 2] {
        let scores = scores(&qkv, spec.num_heads);
        no_kernel_scores("nsa_compressed_attention_backward", scores, || {
            reference::nsa_compressed_attention_backward::<Self>(
                qkv, compressed, documents, spec, blocks, output, d_o,
            )
        })
    }

    fn nsa_selected_attention(
        qkv: CudaPrimitive,
        block_indices: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> AttentionOutput<Self> {
        let scores = scores(&qkv, spec.num_heads);
        no_kernel_scores("nsa_selected_attention", scores, || {
            reference::nsa_selected_attention::<Self>(qkv, block_indices, documents, spec, blocks)
        })
    }

    fn nsa_selected_attention_backward(
        qkv: CudaPrimitive,
        block_indices: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
        output: AttentionOutput<Self>,
        d_o: CudaPrimitive,
    ) -> CudaPrimitive {
        let scores = scores(&qkv, spec.num_heads);
        no_kernel_scores("nsa_selected_attention_backward", scores, || {
            reference::nsa_selected_attention_backward::<Self>(
                qkv,
                block_indices,
                documents,
                spec,
                blocks,
                output,
                d_o,
            )
        })
    }

    fn nsa_gates(
        branches: [CudaPrimitive; 3],
        logits: CudaPrimitive,
        bias: CudaPrimitive,
    ) -> CudaPrimitive {
        no_kernel("nsa_gates", || {
            reference::nsa_gates::<Self>(branches, logits, bias)
        })
    }

    fn nsa_gates_backward(
        branches: [CudaPrimitive; 3],
        logits: CudaPrimitive,
        bias: CudaPrimitive,
        d_o: CudaPrimitive,
    ) -> [CudaPrimitive; 5] {
        no_kernel("nsa_gates_backward", || {
            reference::nsa_gates_backward::<Self>(branches, logits, bias, d_o)
        })
    }
}
