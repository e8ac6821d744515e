//! DMA's ops on CUDA.
use super::backend::{DmaBackend, DmaGradients, DmaSelection};
use super::reference;
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::cuda::dma;
use crate::device::cuda::Cuda;
use crate::device::paths::{kernel_or, kernel_or_scores, scores};
use crate::documents::DocumentBounds;
use sieve_core::DmaWindow;
use sieve_kernels::CudaPrimitive as Float;

impl DmaBackend for Cuda {
    fn dma_scores(qkv: Float, w_dt: Float, a: Float, spec: AttentionSpec) -> Float {
        let attempt = dma::scores(&qkv, &w_dt, &a, spec);
        kernel_or("dma_scores", attempt, || {
            reference::dma_scores::<Self>(qkv, w_dt, a, spec)
        })
    }

    fn dma_select(
        rank: Float,
        documents: &DocumentBounds<Self>,
        window: DmaWindow,
    ) -> DmaSelection<Self> {
        let attempt = dma::select(&rank, documents, window);
        kernel_or("dma_select", attempt, || {
            reference::dma_select::<Self>(rank, documents, window)
        })
    }

    fn dma_attention(
        qkv: Float,
        delta: Float,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self> {
        let attempt = dma::forward(&qkv, &delta, documents, selection, spec);
        kernel_or_scores(
            "dma_attention",
            attempt,
            scores(&qkv, spec.num_heads),
            || reference::dma_attention::<Self>(qkv, delta, documents, selection, spec),
        )
    }
}

impl DmaGradients for Cuda {
    fn dma_scores_backward(
        qkv: Float,
        w_dt: Float,
        a: Float,
        spec: AttentionSpec,
        dz: Float,
        dqkv: Float,
    ) -> (Float, Float, Float) {
        // The kernel adds to dqkv in place, so it must be nobody else's.
        let dqkv = if dqkv.can_mut() { dqkv } else { dqkv.copy() };
        let attempt = dma::scores_backward(&qkv, [&w_dt, &a], spec, &dz, &dqkv);
        kernel_or(
            "dma_scores_backward",
            attempt.map(|(dw_dt, da)| (dqkv.clone(), dw_dt, da)),
            || reference::dma_scores_backward::<Self>(qkv, w_dt, a, spec, dz, dqkv),
        )
    }

    fn dma_attention_backward(
        qkv: Float,
        delta: Float,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: Float,
    ) -> (Float, Float) {
        let attempt = dma::backward(&qkv, &delta, documents, selection, spec, &output, &d_o);
        let scores = scores(&qkv, spec.num_heads);
        kernel_or_scores("dma_attention_backward", attempt, scores, || {
            reference::dma_attention_backward::<Self>(
                qkv, delta, documents, selection, spec, output, d_o,
            )
        })
    }
}
