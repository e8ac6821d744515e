//! NSA on CUDA: no kernel yet, so every op runs its counted reference.
use super::backend::{NsaBackend, NsaCall, NsaCompressed, NsaGradients};
use super::reference;
use crate::attention::AttentionOutput;
use crate::device::cuda::Cuda;
use crate::device::paths::{no_kernel, no_kernel_scores, scores};
use sieve_kernels::CudaPrimitive as Float;

impl NsaBackend for Cuda {
    fn nsa_blocks(qkv: Float, positions: [Float; 2], call: &NsaCall<Self>) -> Float {
        no_kernel("nsa_blocks", || reference::nsa_blocks(qkv, positions, call))
    }

    fn nsa_mean_pool(qkv: Float, call: &NsaCall<Self>) -> Float {
        no_kernel("nsa_mean_pool", || reference::nsa_mean_pool(qkv, call))
    }

    fn nsa_compressed_attention(
        qkv: Float,
        compressed: Float,
        call: &NsaCall<Self>,
    ) -> NsaCompressed<Self> {
        let scores = scores(&qkv, call.spec.num_heads);
        no_kernel_scores("nsa_compressed_attention", scores, || {
            reference::nsa_compressed_attention(qkv, compressed, call)
        })
    }

    fn nsa_selected_attention(
        qkv: Float,
        block_indices: Float,
        call: &NsaCall<Self>,
    ) -> AttentionOutput<Self> {
        let scores = scores(&qkv, call.spec.num_heads);
        no_kernel_scores("nsa_selected_attention", scores, || {
            reference::nsa_selected_attention(qkv, block_indices, call)
        })
    }

    fn nsa_gates(branches: [Float; 3], logits: Float, bias: Float) -> Float {
        no_kernel("nsa_gates", || {
            reference::nsa_gates::<Self>(branches, logits, bias)
        })
    }
}

impl NsaGradients for Cuda {
    fn nsa_blocks_backward(dims: [usize; 4], call: &NsaCall<Self>, dy: Float) -> [Float; 3] {
        no_kernel("nsa_blocks_backward", || {
            reference::nsa_blocks_backward(dims, call, dy)
        })
    }

    fn nsa_mean_pool_backward(dims: [usize; 4], call: &NsaCall<Self>, dy: Float) -> Float {
        no_kernel("nsa_mean_pool_backward", || {
            reference::nsa_mean_pool_backward(dims, call, dy)
        })
    }

    fn nsa_compressed_attention_backward(
        qkv: Float,
        compressed: Float,
        call: &NsaCall<Self>,
        output: AttentionOutput<Self>,
        d_o: Float,
    ) -> [Float; 2] {
        let scores = scores(&qkv, call.spec.num_heads);
        no_kernel_scores("nsa_compressed_attention_backward", scores, || {
            reference::nsa_compressed_attention_backward(qkv, compressed, call, output, d_o)
        })
    }

    fn nsa_selected_attention_backward(
        qkv: Float,
        block_indices: Float,
        call: &NsaCall<Self>,
        output: AttentionOutput<Self>,
        d_o: Float,
    ) -> Float {
        let scores = scores(&qkv, call.spec.num_heads);
        no_kernel_scores("nsa_selected_attention_backward", scores, || {
            reference::nsa_selected_attention_backward(qkv, block_indices, call, output, d_o)
        })
    }

    fn nsa_gates_backward(
        branches: [Float; 3],
        logits: Float,
        bias: Float,
        d_o: Float,
    ) -> [Float; 5] {
        no_kernel("nsa_gates_backward", || {
            reference::nsa_gates_backward::<Self>(branches, logits, bias, d_o)
        })
    }
}
