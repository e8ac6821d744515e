//! Launch of `kernels/dma_decode.cu`: attention of one new token for each row of the batch over a fixed-size cache of
//! the keys that DMA keeps.
use crate::KernelError;
use crate::attention::{AttentionShape, DecodeScratch, DecodeTiling, KvCache, Qkv, one_token, require_scale};
use crate::dma::{ScoreBias, require_local_window};
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params};
use sieve_core::DmaWindow;

const NAME: &str = "dma_decode";

/// The fixed-size cache of a layer: `keep_window_size` slots for each KV head. All tensors are written in place.
#[derive(Debug, Clone)]
pub struct DmaSlots {
    /// Keys and values; the capacity is `keep_window_size`.
    pub kv: KvCache,
    /// Scores of the cached keys, f32 `[batch, num_kv_heads, keep_window_size]`.
    pub z: CudaTensor,
    /// Positions of the cached keys, i32 `[batch, num_kv_heads, keep_window_size]`.
    pub positions: CudaTensor,
    /// Number of last keys of a row that are never evicted.
    pub local_window_size: usize,
}

impl DmaSlots {
    /// Empty slots without a local window; `like` is any tensor on the device.
    pub fn new(like: &CudaTensor, shape: &AttentionShape, keep_window_size: usize) -> Self {
        let per_slot = [shape.batch, shape.num_kv_heads, keep_window_size];
        Self {
            kv: KvCache::new(like, shape, keep_window_size),
            z: like.empty_contiguous(&per_slot, DType::F32),
            positions: like.empty_contiguous(&per_slot, DType::I32),
            local_window_size: 0,
        }
    }

    /// Inserts one new key a row into the slots if it ranks high enough, then attends with its query over the kept
    /// keys, which are the keys that the full forward pass sees. `token` holds `[batch, 1, heads, head_dim]` tensors;
    /// `z`, f32 `[batch, num_kv_heads]`, is the score of the new key, and `length`, i32 `[batch]`, the number of tokens
    /// before it. Returns `[batch, 1, num_heads, head_dim_v]`.
    ///
    /// # Errors
    /// Types or sizes that do not fit.
    pub fn dma_decode(
        &self,
        token: &Qkv,
        z: &CudaTensor,
        length: &CudaTensor,
        softmax_scale: f32,
        bias: ScoreBias,
        scratch: &DecodeScratch,
    ) -> Result<CudaTensor, KernelError> {
        slots_decode(token, z, self, length, softmax_scale, Some(bias), scratch)
    }

    /// Checks the slots and the operands of one new token a row for `kernel`. Returns the call's sizes, how many keys
    /// a query sees, and `z` without gaps.
    ///
    /// # Errors
    /// Types or sizes that do not fit.
    pub(super) fn require_token(
        &self,
        kernel: &'static str,
        token: &Qkv,
        z: &CudaTensor,
        length: &CudaTensor,
    ) -> Result<(AttentionShape, DmaWindow, CudaTensor), KernelError> {
        let shape = one_token(kernel, token)?;
        let (batch, kv_heads, local_window_size) = (shape.batch, shape.num_kv_heads, self.local_window_size);
        let keep_window_size = self.kv.capacity(kernel, &shape)?;
        operands!(kernel, z: F32[batch, kv_heads]);
        operands!(only kernel,
            slot_z: F32[batch, kv_heads, keep_window_size] contiguous = &self.z,
            slot_position: I32[batch, kv_heads, keep_window_size] contiguous = &self.positions,
            length: I32[batch] strided,
        );
        require_local_window(kernel, local_window_size, keep_window_size)?;
        Ok((shape, DmaWindow { keep_window_size, local_window_size }, z))
    }
}

/// Launches [`DmaSlots::dma_decode`], with a bias or without.
pub(crate) fn slots_decode(
    token: &Qkv,
    z: &CudaTensor,
    slots: &DmaSlots,
    length: &CudaTensor,
    softmax_scale: f32,
    bias: Option<ScoreBias>,
    scratch: &DecodeScratch,
) -> Result<CudaTensor, KernelError> {
    let (shape, window, z) = slots.require_token(NAME, token, z, length)?;
    let token = token.with_kernel_strides();
    require_scale(NAME, softmax_scale)?;
    scratch.require(NAME, &shape)?;
    let o = z.empty_contiguous(&shape.output(), DType::BF16);
    let tensors = [
        token.q.tensor(),
        token.k.tensor(),
        token.v.tensor(),
        &z,
        &slots.kv.k,
        &slots.kv.v,
        &slots.z,
        &slots.positions,
        length,
        &o,
        &scratch.partials,
        &scratch.counters,
    ];
    let params = params!(DmaDecodeParams {
        base: token.token_params(NAME, &shape, softmax_scale)?,
        keep_window_size: window.keep_window_size,
        num_splits: scratch.num_splits,
        local_window_size: window.local_window_size,
    });
    let kernel = dma_decode_kernel(scratch.tiling, bias);
    // SAFETY: sizes, strides and types checked above; writes every element of o and at most one slot a head.
    unsafe { kernel.launch(scratch.grid(), &tensors, &params) }?;
    Ok(o)
}

/// The specialisation for a tiling and a form of the bias, or for none.
fn dma_decode_kernel(tiling: DecodeTiling, bias: Option<ScoreBias>) -> SourceKernel {
    let kernel = tiling.kernel(SourceKernel::new(NAME)).starts_early();
    match bias {
        Some(bias) => kernel.define("BIAS_LINEAR", (bias == ScoreBias::Linear) as u8),
        None => kernel.define("NO_BIAS", 1),
    }
}
