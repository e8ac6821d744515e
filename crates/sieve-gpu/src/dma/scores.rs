//! Launch of `kernels/dma_scores.cu`: the scores by which dynamic mask attention (DMA) ranks keys.
use crate::KernelError;
use crate::attention::Heads;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require, require_non_empty};
use sieve_core::DmaBias;

const NAME: &str = "dma_scores";

/// Tokens that a thread block scores.
const BLOCK_TOKENS: usize = 64;

impl ScoreBias {
    /// Most KV heads that the kernels of DMA's scores take: a lane holds the sums of all of them in registers.
    pub const MAX_KV_HEADS: usize = 32;
}

/// How the bias of a key's logits comes from its score z.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreBias {
    /// The bias is `exp(min(z, 60))`, as in arXiv:2508.02124.
    Exp,
    /// The bias is z itself.
    Linear,
}

impl From<DmaBias> for ScoreBias {
    fn from(bias: DmaBias) -> Self {
        match bias {
            DmaBias::Exp => Self::Exp,
            DmaBias::Linear => Self::Linear,
        }
    }
}

/// Results of [`dma_scores`](crate::Heads::dma_scores), each f32 `[batch, num_kv_heads, seq_len]`.
#[derive(Debug, Clone)]
pub struct Scores {
    /// `concat(v_j) . W_dt`, for the backward pass.
    pub x: CudaTensor,
    /// `A * softplus(x)`, by which keys are ranked.
    pub z: CudaTensor,
}

/// The recency term of a key's rank: the slope of its KV head times its position.
#[derive(Debug, Clone)]
pub struct Recency<'a> {
    /// A slope for each KV head, as f32.
    pub slopes: &'a [f32],
    /// The token that counts as position 0.
    pub origin: PositionOrigin<'a>,
}

/// The token from which the positions of a call's tokens are counted.
#[derive(Debug, Clone, Copy)]
pub enum PositionOrigin<'a> {
    /// The first token of each token's document: i32 `[batch, seq_len]`.
    DocumentStart(&'a CudaTensor),
    /// The call's first token has this position in every row.
    First(usize),
}

impl Heads {
    /// Scores of all keys from their values, which these heads are (arXiv:2508.02124, eq. 3). `w_dt` is f32
    /// `[num_kv_heads, num_kv_heads * head_dim]`, the weight of a linear layer, `a` f32 `[num_kv_heads]`.
    ///
    /// # Errors
    /// Other types or shapes, more than 32 KV heads, a W_dt that does not fit the device's shared memory.
    pub fn dma_scores(&self, w_dt: &CudaTensor, a: &CudaTensor) -> Result<Scores, KernelError> {
        let recency = None;
        self.dma_ranks(w_dt, a, recency)
    }

    /// [`dma_scores`](Self::dma_scores) with the recency term, if any, added to z.
    ///
    /// # Errors
    /// The errors of [`dma_scores`](Self::dma_scores); a number of slopes other than the number of KV heads.
    pub fn dma_ranks(
        &self,
        w_dt: &CudaTensor,
        a: &CudaTensor,
        recency: Option<&Recency<'_>>,
    ) -> Result<Scores, KernelError> {
        let (scores, _bias) = self.dma_ranks_and_bias(w_dt, a, recency, ScoreBias::Linear)?;
        Ok(scores)
    }

    /// [`dma_ranks`](Self::dma_ranks) with the biases of logits, f32 `[batch, num_kv_heads, seq_len]`: z itself where
    /// `bias` is linear.
    ///
    /// # Errors
    /// The errors of [`dma_ranks`](Self::dma_ranks).
    pub fn dma_ranks_and_bias(
        &self,
        w_dt: &CudaTensor,
        a: &CudaTensor,
        recency: Option<&Recency<'_>>,
        bias: ScoreBias,
    ) -> Result<(Scores, CudaTensor), KernelError> {
        let [batch, seq_len, kv_heads, head_dim] = self.sizes(NAME, "v")?;
        require_kv_heads(NAME, kv_heads)?;
        operands!(NAME, w_dt: F32[kv_heads, kv_heads * head_dim], a: F32[kv_heads]);
        let values = self.with_kernel_strides();
        let words = values.require_words(NAME, "v")?;
        let slopes = recency.map_or(&[][..], |recency| recency.slopes);
        let fits = recency.is_none() || slopes.len() == kv_heads;
        require!(fits, NAME, "number of slopes": slopes.len(), "{kv_heads}");
        let (start, first_position) = match recency.map(|recency| recency.origin) {
            Some(PositionOrigin::DocumentStart(start)) => {
                operands!(NAME, start: I32[batch, seq_len]);
                (Some(start), 0)
            }
            Some(PositionOrigin::First(position)) => (None, position),
            None => (None, 0),
        };
        let new = || w_dt.empty_contiguous(&[batch, kv_heads, seq_len], DType::F32);
        let (x, z) = (new(), new());
        let params = params!(DmaScoresParams {
            seq_len,
            head_dim,
            [v_offset, v_token_stride, v_batch_stride]: words,
            first_position,
            has_start: start.is_some(),
        });
        let grid = [seq_len.div_ceil(BLOCK_TOKENS), 1, batch];
        // Without document starts `a` stands in for them, and the kernel does not read it as starts.
        let start = start.as_ref().unwrap_or(&a);
        let exponentials = (bias == ScoreBias::Exp).then(new);
        let kernel = dma_scores_kernel(kv_heads, head_dim, slopes);
        let kernel = match bias {
            ScoreBias::Exp => kernel.define("BIAS", 1),
            ScoreBias::Linear => kernel,
        };
        let tensors = [values.tensor(), &w_dt, &a, start, &x, &z].into_iter().chain(&exponentials);
        // SAFETY: sizes, strides and types checked above; writes every element of x, z and the exponentials.
        unsafe { kernel.launch(grid, &tensors.collect::<Vec<_>>(), &params) }?;
        let bias = exponentials.unwrap_or_else(|| z.clone());
        Ok((Scores { x, z }, bias))
    }
}

/// The specialisation for a number of KV heads, and for their slopes where there are any.
fn dma_scores_kernel(num_kv_heads: usize, head_dim: usize, slopes: &[f32]) -> SourceKernel {
    let kernel = SourceKernel::new(NAME)
        .starts_early()
        .define("NUM_KV_HEADS", num_kv_heads)
        .threads(256)
        .shared_bytes(shared_bytes(num_kv_heads, head_dim));
    if slopes.is_empty() {
        return kernel;
    }
    // Nine significant decimal digits identify every f32.
    let slopes: Vec<String> = slopes.iter().map(|slope| format!("{slope:.8e}f")).collect();
    kernel.define("SLOPES", slopes.join(","))
}

/// Refuses more KV heads than the kernels have registers for.
pub(crate) fn require_kv_heads(kernel: &'static str, kv_heads: usize) -> Result<(), KernelError> {
    require_non_empty(kernel, "the number of KV heads", kv_heads)?;
    let most = ScoreBias::MAX_KV_HEADS;
    require!(kv_heads <= most, kernel, "number of KV heads": kv_heads, "1 to {most}");
    Ok(())
}

/// Shared memory for a tile of W_dt, in bytes: chunks of 8 f32 channels for each KV head, as many as fit 48 KiB.
fn shared_bytes(num_kv_heads: usize, head_dim: usize) -> usize {
    let chunks = num_kv_heads * head_dim / 8;
    32 * num_kv_heads * chunks.min(1536 / num_kv_heads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_w_dt_above_48_kib_is_read_in_tiles() {
        assert_eq!(shared_bytes(8, 128), 32 * 8 * 128, "8 heads of 128: all of it");
        assert_eq!(shared_bytes(32, 128), 32 * 32 * 48, "32 heads: 48 KiB of 512");
        assert!((1..=32).all(|heads| shared_bytes(heads, 256) <= 48 * 1024));
    }
}
