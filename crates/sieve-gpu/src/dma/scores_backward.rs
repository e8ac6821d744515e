//! Launches of `kernels/dma_scores_backward.cu` and `column_sums.cu`: gradients of the scores by which DMA ranks keys.
use crate::KernelError;
use crate::attention::Heads;
use crate::dma::require_kv_heads;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params};
use crate::step::column_sums::{MAX_PARTIALS, column_sums};

const NAME: &str = "dma_scores_backward";

/// Tokens that a block takes at once.
const TILE_TOKENS: usize = 16;

/// Threads of a thread block.
const THREADS: usize = 128;

/// Operands of the gradient kernel [`dma_scores_backward`](crate::ScoresBackward::dma_scores_backward).
#[derive(Debug, Clone, Copy)]
pub struct ScoresBackward<'a> {
    /// The values that [`dma_scores`](crate::Heads::dma_scores) scored.
    pub values: &'a Heads,
    /// Weight of the scores, f32 `[num_kv_heads, num_kv_heads * head_dim]`.
    pub w_dt: &'a CudaTensor,
    /// Factor A of each KV head's scores, f32 `[num_kv_heads]`.
    pub a: &'a CudaTensor,
    /// `Scores::x` of the forward pass, f32 `[batch, num_kv_heads, seq_len]`.
    pub x: &'a CudaTensor,
    /// Gradient of z, f32 `[batch, num_kv_heads, seq_len]`.
    pub dz: &'a CudaTensor,
}

impl ScoresBackward<'_> {
    /// Gradients of [`dma_scores`](crate::Heads::dma_scores): adds the gradient of the values to the heads `dv` in
    /// place, which every clone of the tensor of `dv` shares, and returns the f32 gradients of W_dt and A.
    ///
    /// # Errors
    /// Other types or shapes, more than 32 KV heads, a `dv` of other sizes or with rows off 16-byte boundaries.
    pub fn dma_scores_backward(self, dv: &Heads) -> Result<(CudaTensor, CudaTensor), KernelError> {
        let sizes = self.values.sizes(NAME, "v")?;
        let [batch, seq_len, kv_heads, head_dim] = sizes;
        require_kv_heads(NAME, kv_heads)?;
        let channels = kv_heads * head_dim;
        operands!(NAME,
            w_dt: F32[kv_heads, channels] = self.w_dt,
            a: F32[kv_heads] = self.a,
            x: F32[batch, kv_heads, seq_len] = self.x,
            dz: F32[batch, kv_heads, seq_len] = self.dz,
        );
        let values = self.values.with_kernel_strides();
        if dv.sizes(NAME, "dv")? != sizes {
            return Err(KernelError::shape(NAME, "dv", dv.tensor().shape(), values.tensor().shape()));
        }
        let tiles = batch * seq_len.div_ceil(TILE_TOKENS);
        let blocks = tiles.min(MAX_PARTIALS);
        let width = (channels + 1) * kv_heads;
        let partials = w_dt.empty_contiguous(&[blocks, width], DType::F32);
        // Each thread block sums its tokens for one slab, a range of channels.
        let slabs = channels.div_ceil(THREADS * channels_per_thread(kv_heads));
        let params = params!(DmaScoresBackwardParams {
            batch,
            seq_len,
            head_dim,
            [v_offset, v_token_stride, v_batch_stride]: values.require_words(NAME, "v")?,
            [dv_offset, dv_token_stride, dv_batch_stride]: dv.require_words(NAME, "dv")?,
        });
        let tensors = [values.tensor(), &w_dt, &a, &x, &dz, dv.tensor(), &partials];
        // SAFETY: reads v, x and dz, reads and writes the value heads of every token, writes every partial sum.
        unsafe { dma_scores_backward_kernel(kv_heads).launch([blocks, slabs, 1], &tensors, &params) }?;
        let [dw_dt, da] = column_sums(&partials, [&[kv_heads, channels], &[kv_heads]])?;
        Ok((dw_dt, da))
    }
}

/// The specialisation for a number of KV heads.
fn dma_scores_backward_kernel(num_kv_heads: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("NUM_KV_HEADS", num_kv_heads)
        .threads(THREADS)
        .shared_bytes(shared_bytes(num_kv_heads))
}

/// Consecutive channels of a thread, which holds their weights and sums for all KV heads in registers.
fn channels_per_thread(num_kv_heads: usize) -> usize {
    match num_kv_heads {
        ..=8 => 8,
        9..=16 => 4,
        _ => 2,
    }
}

/// Shared memory in bytes: v and dv in bf16 of two groups of 8 tokens, for the channels of each thread.
fn shared_bytes(num_kv_heads: usize) -> usize {
    2 * 2 * 8 * THREADS * channels_per_thread(num_kv_heads) * 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_more_kv_heads_a_thread_has_fewer_channels() {
        for heads in 1..=32 {
            assert!(heads * channels_per_thread(heads) <= 64, "{heads}");
            assert!(shared_bytes(heads) <= 64 * 1024, "{heads}");
        }
    }
}
