//! MLA on CUDA: no kernel yet, so every op runs its counted reference.
use super::backend::{MlaBackend, MlaGradients, MlaPackCall, MlaSpec};
use super::reference;
use crate::attention::AttentionOutput;
use crate::device::cuda::Cuda;
use crate::device::paths::{no_kernel, no_kernel_scores, scores};
use crate::documents::DocumentBounds;
use sieve_kernels::CudaPrimitive as Float;

impl MlaBackend for Cuda {
    fn mla_pack(inputs: [Float; 3], call: MlaPackCall<Self>) -> Float {
        no_kernel("mla_pack", || reference::mla_pack(inputs, call))
    }

    fn mla_attention(
        packed: Float,
        documents: &DocumentBounds<Self>,
        spec: MlaSpec,
    ) -> AttentionOutput<Self> {
        no_kernel_scores("mla_attention", scores(&packed, spec.num_heads), || {
            reference::mla_attention::<Self>(packed, documents, spec)
        })
    }
}

impl MlaGradients for Cuda {
    fn mla_pack_backward(call: MlaPackCall<Self>, dy: Float) -> [Float; 3] {
        no_kernel("mla_pack_backward", || {
            reference::mla_pack_backward(call, dy)
        })
    }

    fn mla_attention_backward(
        packed: Float,
        documents: &DocumentBounds<Self>,
        spec: MlaSpec,
        output: AttentionOutput<Self>,
        d_o: Float,
    ) -> Float {
        no_kernel_scores(
            "mla_attention_backward",
            scores(&packed, spec.num_heads),
            || reference::mla_attention_backward::<Self>(packed, documents, spec, output, d_o),
        )
    }
}
