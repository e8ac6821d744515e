//! Attention under a selector's mask on CUDA, and the selections that run entirely on the device.
use crate::attention::cuda::packed_heads;
use crate::decode::cuda::{CudaDecodeScratch, heavy_step, kept_cache, selector_steps};
use crate::device::kernel_or_refusal;
use crate::{Cuda, DmaCache, SelectorCache};
use burn::tensor::DType;
use burn::tensor::ops::IntTensor;
use sieve_core::{BlockSelection, ChosenKeys, HeavyKeys, KeyMask, ProbeCorrection, TokenKeys};
use sieve_kernels::{CudaPrimitive as Float, CudaTensor, KernelError, ToBurn, kernel_tensor, supports_head_dim};
use std::ops::Range;

pub(crate) fn has_sparse_attention(qkv: &Float) -> bool {
    qkv.dtype == DType::BF16 && supports_head_dim(qkv.meta.shape()[3])
}

/// `[o, lse]` of the mask's queries, the last tokens of `qkv`; the mask's words are on the device. A refusal is an
/// error, as there is no reference.
pub(crate) fn sparse_attention(
    qkv: Float,
    mask: KeyMask<IntTensor<Cuda>>,
    softmax_scale: f64,
) -> Result<[Float; 2], String> {
    let mask = mask.map(|words| kernel_tensor(words).contiguous());
    let qkv = packed_heads(&qkv, [mask.shape.num_heads, mask.shape.num_kv_heads]);
    let result = qkv.sparse_attention_forward(&mask, softmax_scale as f32);
    let result = result.map(|result| [result.o.burn(), result.lse.burn()]);
    kernel_or_refusal("sparse_attention", result)
}

/// The mask's arrays as one flat tensor on the device, and the rows of dense attention that the selection computed on
/// the way, if any.
pub(crate) fn select_blocks(
    qkv: Float,
    selection: &BlockSelection,
) -> Result<ChosenKeys<IntTensor<Cuda>, Float>, String> {
    let heads = [selection.shape.num_heads, selection.shape.num_kv_heads];
    let flat = |tensor: CudaTensor| -> Result<Float, KernelError> {
        let size = tensor.num_elements();
        Ok(tensor.reshaped("select_blocks", "lists", &[size])?.burn())
    };
    let qkv = packed_heads(&qkv, heads);
    let chosen = qkv.select_blocks(selection).and_then(|chosen| {
        Ok(ChosenKeys { mask: chosen.mask.try_map(flat)?, probe_o: chosen.probe_o.map(ToBurn::burn) })
    });
    kernel_or_refusal("select_blocks", chosen)
}

/// Corrects `o` in place and returns it; `probe_o` `None`: the kernels compute the probes' dense rows. `o` tells the
/// query heads of the packed tensor from its KV heads.
pub(crate) fn correct_by_probes(
    qkv: Float,
    o: Float,
    probe_o: Option<Float>,
    correction: ProbeCorrection,
    dense_rows: Range<usize>,
    softmax_scale: f64,
) -> Result<Float, String> {
    let o = kernel_tensor(o).contiguous();
    let probe_o = probe_o.map(kernel_tensor);
    let heads = kernel_tensor(qkv.clone()).shape()[2];
    let num_heads = o.shape()[2];
    let qkv = packed_heads(&qkv, [num_heads, (heads - num_heads) / 2]);
    let result = qkv.correct_by_probes(&o, probe_o.as_ref(), correction, dense_rows, softmax_scale as f32);
    kernel_or_refusal("correct_by_probes", result.map(|()| o.burn()))
}

pub(crate) fn keep_heavy_keys(qkv: Float, lse: Float, heavy: &HeavyKeys) -> Result<DmaCache<Cuda>, String> {
    let shape = heavy.selection.shape;
    let qkv = packed_heads(&qkv, [shape.num_heads, shape.num_kv_heads]);
    kernel_or_refusal("keep_heavy_keys", kept_cache(&qkv, &kernel_tensor(lse), heavy))
}

/// Writes the token's key and value into the cache in place; `position` is the number of tokens before it, those of
/// evicted keys too.
pub(crate) fn heavy_decode(
    cache: &mut DmaCache<Cuda>,
    qkv: Float,
    position: usize,
    softmax_scale: f64,
    scratch: &mut CudaDecodeScratch,
) -> Result<Float, String> {
    let result = heavy_step(cache, &qkv, position, softmax_scale as f32, scratch);
    kernel_or_refusal("heavy_decode", result)
}

/// One output a token, `[1, 1, num_heads, head_dim]`: the tokens are added to the cache and attend one after the other.
pub(crate) fn selector_decode(
    cache: &mut SelectorCache<Cuda>,
    qkv: Float,
    reads: &[TokenKeys],
    softmax_scale: f64,
    scratch: &mut CudaDecodeScratch,
) -> Result<Vec<Float>, String> {
    let result = selector_steps(cache, &qkv, reads, softmax_scale as f32, scratch);
    kernel_or_refusal("selector_decode", result)
}
