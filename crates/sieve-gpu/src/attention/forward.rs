//! Launch of `kernels/attention_forward.cu`: dense causal and sliding-window attention.
use crate::KernelError;
use crate::attention::{Bias, FarWords, KeySource, PassInputs, Qkv, QueryPass, SeenKeys};
use crate::dma::oracle::SUPER_BLOCK;
use crate::runtime::{CudaTensor, DType, Params, operands, params, require, require_non_empty};
use sieve_core::{FarKeys, KeepOLow};

const NAME: &str = "attention_forward";

/// Output and log-sum-exp of a forward attention pass.
#[derive(Debug, Clone)]
pub struct AttentionResult {
    /// Attention output, bf16 `[batch, seq_len, num_heads, head_dim_v]`.
    pub o: CudaTensor,
    /// Log-sum-exp of each query's logits, f32 `[batch, num_heads, seq_len]`; `-inf` where a query sees no key. With a
    /// bias, the logits are without [`base`](Self::base), so that the log-sum-exp keeps its digits when biases are
    /// large.
    pub lse: CudaTensor,
    /// The low 16 bits of the f32 output, which the bf16 `o` lacks, in o's shape and dtype (as bf16 numbers they mean
    /// nothing). With `o_low` the backward pass need not recompute row sums. `None` where the kernel does not store it.
    pub o_low: Option<CudaTensor>,
    /// With a bias: the largest bias that each query sees, f32 `[batch, num_kv_heads, seq_len rounded up to 64]`.
    pub base: Option<CudaTensor>,
}

impl Qkv {
    /// Causal attention inside documents: query i sees the keys `max(doc_start[i], i - window + 1) <= j <= i`; without
    /// a window all keys from `doc_start[i]` on. `bias`, f32 `[batch, num_kv_heads, seq_len]`, is added to every logit
    /// of its key (DMA with every key kept); its second part says for which rows `o_low` is kept. `doc_start` is i32
    /// `[batch, seq_len]`.
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit, a window of 0, a scale that is not positive.
    pub fn attention_forward(
        &self,
        doc_start: &CudaTensor,
        window: Option<usize>,
        softmax_scale: f32,
        bias: Option<(&CudaTensor, KeepOLow)>,
    ) -> Result<AttentionResult, KernelError> {
        self.forward(doc_start, (window, None), softmax_scale, bias)
    }

    /// As [`attention_forward`](Self::attention_forward) of a window, whose queries see the keys `far` of their
    /// document too: its first tokens, and the keys at the distances of their KV head's band.
    ///
    /// # Errors
    /// The errors of [`attention_forward`](Self::attention_forward); no band.
    pub fn far_attention_forward(
        &self,
        doc_start: &CudaTensor,
        window: usize,
        far: FarKeys,
        softmax_scale: f32,
    ) -> Result<AttentionResult, KernelError> {
        self.forward(doc_start, (Some(window), Some(far)), softmax_scale, None)
    }

    /// Attention over a window of consecutive keys, and over keys beyond it or with a bias.
    fn forward(
        &self,
        doc_start: &CudaTensor,
        (window, far): (Option<usize>, Option<FarKeys>),
        softmax_scale: f32,
        bias: Option<(&CudaTensor, KeepOLow)>,
    ) -> Result<AttentionResult, KernelError> {
        let shape = self.shape(NAME)?;
        let qkv = self.with_kernel_strides();
        require_scale(NAME, softmax_scale)?;
        let window = window.unwrap_or(shape.seq_len).min(shape.seq_len);
        require_non_empty(NAME, "window", window)?;
        operands!(NAME, doc_start: I32[shape.batch, shape.seq_len]);
        let o_low = bias.map_or(KeepOLow::Never, |(_, o_low)| o_low);
        let bias = bias
            .map(|(bias, _)| {
                operands!(NAME, bias: F32(shape.per_key()));
                // A forward pass computes the base; a backward pass is given it.
                let kept_base = None;
                Bias::new(bias, kept_base, SeenKeys::Neighbours(&doc_start, window), &shape)
            })
            .transpose()?;
        let q = qkv.q.tensor();
        let source = KeySource::of_neighbours(bias.is_some(), far.is_some());
        let base = params!(AttentionForwardParams { base: qkv.params(NAME, &shape)?, window, softmax_scale });
        let params = params!(AttentionFarForwardParams {
            base,
            { sink_tokens, first_distance, last_distance, num_bands, first_band }: FarWords::new(NAME, far)?,
        });
        let mut tensors = vec![q, qkv.k.tensor(), qkv.v.tensor(), &doc_start];
        tensors.extend(bias.iter().flat_map(Bias::tensors));
        let pass = PassInputs { name: NAME, qkv: &qkv, d_o: None, shape: &shape, source, list_queries: SUPER_BLOCK };
        // SAFETY: sizes, strides and types checked above; q, k and v are among the tensors.
        let result = unsafe { launch_forward(&pass, tensors, &params, o_low) }?;
        Ok(AttentionResult { base: bias.map(|bias| bias.base), ..result })
    }
}

/// Allocates the outputs, appends them to `inputs` and launches a forward pass. `o_low` says for which row lengths the
/// low 16 bits of the output are stored; kernels without a bias store none.
///
/// # Safety
/// Sizes, strides and types of the inputs must fit `params` and the pass's kernel; q, k and v are among the inputs.
pub(crate) unsafe fn launch_forward(
    pass: &PassInputs<'_>,
    inputs: Vec<&CudaTensor>,
    params: &impl Params,
    o_low: KeepOLow,
) -> Result<AttentionResult, KernelError> {
    let (shape, q) = (pass.shape, pass.qkv.q.tensor());
    let o = q.empty_contiguous(&shape.output(), DType::BF16);
    let lse = q.empty_contiguous(&shape.lse(), DType::F32);
    let with_o_low = pass.family().keeps_o_low(o_low, shape.seq_len);
    let o_low = with_o_low.then(|| q.empty_contiguous(&shape.output(), DType::BF16));
    let (kernel, grid, maps) = pass.by_query(QueryPass::output(with_o_low))?;
    let mut tensors = inputs;
    tensors.extend([&o, &lse].into_iter().chain(&o_low));
    // SAFETY: the caller checked the inputs; every element of o and lse is written; the maps read q, k and v.
    unsafe { kernel.launch_with_maps(grid, &maps, &tensors, params) }?;
    Ok(AttentionResult { o, lse, o_low, base: None })
}

/// Refuses a softmax scale that is not positive and finite: kernels find the largest logit before they apply the scale.
pub(crate) fn require_scale(kernel: &'static str, softmax_scale: f32) -> Result<(), KernelError> {
    let fits = softmax_scale > 0.0 && softmax_scale.is_finite();
    require!(fits, kernel, "softmax_scale": softmax_scale, "positive and finite");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_must_be_positive() {
        assert!(require_scale("k", 0.125).is_ok());
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(require_scale("k", bad).is_err(), "{bad}");
        }
    }
}
