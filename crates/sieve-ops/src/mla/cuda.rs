//! MLA on CUDA: no kernel yet, so every op runs its counted reference.
use super::{MlaBackend, MlaSpec};
use crate::device::paths::{no_kernel, no_kernel_scores, scores};
use crate::{AttentionOutput, Cuda, DocumentBounds, RopeTables, reference};
use sieve_kernels::CudaPrimitive;

impl MlaBackend for Cuda {
    fn mla_pack(
        [q, kv, k_rope]: [CudaPrimitive; 3],
        positions: CudaPrimitive,
        rope: &RopeTables<Self>,
        spec: MlaSpec,
    ) -> CudaPrimitive {
        no_kernel("mla_pack", || {
            reference::mla_pack::<Self>(q, kv, k_rope, positions, rope, spec)
        })
    }

    fn mla_pack_backward(
        positions: CudaPrimitive,
        rope: &RopeTables<Self>,
        spec: MlaSpec,
        dy: CudaPrimitive,
    ) -> [CudaPrimitive; 3] {
        no_kernel("mla_pack_backward", || {
            reference::mla_pack_backward::<Self>(positions, rope, spec, dy)
        })
    }

    fn mla_attention(
        packed: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        spec: MlaSpec,
    ) -> AttentionOutput<Self> {
        let scores = scores(&packed, spec.num_heads);
        no_kernel_scores("mla_attention", scores, || {
            reference::mla_attention::<Self>(packed, documents, spec)
        })
    }

    fn mla_attention_backward(
        packed: CudaPrimitive,
        documents: &DocumentBounds<Self>,
        spec: MlaSpec,
        output: AttentionOutput<Self>,
        d_o: CudaPrimitive,
    ) -> CudaPrimitive {
        let scores = scores(&packed, spec.num_heads);
        no_kernel_scores("mla_attention_backward", scores, || {
            reference::mla_attention_backward::<Self>(packed, documents, spec, output, d_o)
        })
    }
}
