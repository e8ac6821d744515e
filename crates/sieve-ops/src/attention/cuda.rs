//! Dense and sliding-window attention on CUDA.
use super::backend::{AttentionBackend, AttentionGradients, AttentionOutput, AttentionSpec};
use super::reference;
use crate::cuda::attention::{backward, forward};
use crate::device::cuda::Cuda;
use crate::device::paths::{kernel_or_scores, scores};
use crate::documents::DocumentBounds;
use sieve_kernels::CudaPrimitive as Float;

impl AttentionBackend for Cuda {
    fn attention(
        qkv: Float,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self> {
        let attempt = forward(&qkv, documents, spec, None);
        kernel_or_scores("attention", attempt, scores(&qkv, spec.num_heads), || {
            reference::attention::<Self>(qkv, documents, spec)
        })
    }
}

impl AttentionGradients for Cuda {
    fn attention_backward(
        qkv: Float,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: Float,
    ) -> Float {
        let attempt = backward(&qkv, documents, spec, None, &output, &d_o);
        let attempt = attempt.map(|(dqkv, _)| dqkv);
        let scores = scores(&qkv, spec.num_heads);
        kernel_or_scores("attention_backward", attempt, scores, || {
            reference::attention_backward::<Self>(qkv, documents, spec, output, d_o)
        })
    }
}
