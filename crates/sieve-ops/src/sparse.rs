//! Attention under the mask of a selector, which chooses the keys that a trained dense model reads, and the making of
//! such a mask. Nothing here has a gradient.
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use crate::tensors::{ints, primitive, tensor};
use crate::{AttentionCall, AttentionSpec, DeviceBackend, DmaCache, Documents, SelectorCache};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::{BlockSelection, ChosenKeys, HeavyKeys, KeyMask, MaskError, ProbeCorrection, TokenKeys};
use std::ops::Range;

/// Copies a mask from the host to a device, in the form that kernels read.
///
/// # Errors
/// The errors of [`KeyMask::for_kernels`].
pub fn upload_mask<B: Backend>(mask: &KeyMask, device: &B::Device) -> Result<KeyMask<Tensor<B, 1, Int>>, MaskError> {
    let upload = |words: Vec<i32>| {
        let shape = [words.len()];
        ints(words, shape, device)
    };
    Ok(mask.for_kernels()?.map(upload))
}

/// Output of [`sparse_attention`] and [`attention_with_lse`].
#[derive(Clone, Debug)]
pub struct SparseOutput<B: Backend> {
    /// Attention output, `[1, num_queries, num_heads, head_dim]`.
    pub o: Tensor<B, 4>,
    /// Log-sum-exp of the kept logits, f32 `[1, num_heads, num_queries]`.
    pub lse: Tensor<B, 3>,
}

/// Whether the backend has a kernel for [`sparse_attention`] on this tensor. Where it has none, sieve-select's
/// attention on the host takes the call.
pub fn has_sparse_attention<B: DeviceBackend>(qkv: &Tensor<B, 4>) -> bool {
    B::has_sparse_attention(&primitive(qkv.clone()))
}

/// Attention of a tensor's last tokens, which are the mask's queries, over the keys that the mask lists.
///
/// # Shapes
/// - qkv: `[1, num_keys, num_heads + 2 * num_kv_heads, head_dim]`
///
/// # Errors
/// The reason why the kernel refuses the call, or that the backend has none.
pub fn sparse_attention<B: DeviceBackend>(
    qkv: Tensor<B, 4>,
    mask: &KeyMask<Tensor<B, 1, Int>>,
    softmax_scale: f64,
) -> Result<SparseOutput<B>, String> {
    let mask = mask.clone().map(Tensor::into_primitive);
    let [o, lse] = B::sparse_attention(primitive(qkv), mask, softmax_scale)?;
    Ok(SparseOutput { o: tensor(o), lse: tensor(lse) })
}

/// Dense or sliding-window attention with its log-sum-exp, without gradient.
///
/// # Shapes
/// - qkv: `[1, num_tokens, num_heads + 2 * num_kv_heads, head_dim]`
pub fn attention_with_lse<B: DeviceBackend>(
    qkv: Tensor<B, 4>,
    documents: &Documents<B>,
    spec: AttentionSpec,
) -> SparseOutput<B> {
    let output = <B as DeviceBackend>::attention(primitive(qkv), &AttentionCall::new(documents.bounds(), spec));
    SparseOutput { o: tensor(output.o), lse: tensor(output.lse) }
}

/// Chooses the blocks that a selector keeps, from queries and keys, on the device; nothing is copied to the host.
///
/// # Shapes
/// - qkv: `[1, num_keys, num_heads + 2 * num_kv_heads, head_dim]`
///
/// # Errors
/// The reason why the kernels refuse the call, or that the backend has none.
pub fn select_blocks<B: DeviceBackend>(
    qkv: &Tensor<B, 4>,
    selection: &BlockSelection,
) -> Result<ChosenKeys<Tensor<B, 1, Int>, Tensor<B, 4>>, String> {
    let chosen = B::select_blocks(primitive(qkv.clone()), selection)?;
    Ok(ChosenKeys { mask: chosen.mask.map(Tensor::from_primitive), probe_o: chosen.probe_o.map(tensor) })
}

/// Corrects the output `o` of [`sparse_attention`] by rows of dense attention. These are the probes (the first row, and
/// each whose position is a multiple of `correction.gamma`), from `probe_o` or computed here, and `dense_rows`, which
/// are dense in `o` already.
///
/// # Shapes
/// - qkv: `[1, num_keys, num_heads + 2 * num_kv_heads, head_dim]`
/// - o and the result: `[1, num_queries, num_heads, head_dim]`; `probe_o` is from [`select_blocks`]
///
/// # Errors
/// The reason why the kernels refuse the call, or that the backend has none.
pub fn correct_by_probes<B: DeviceBackend>(
    qkv: Tensor<B, 4>,
    o: Tensor<B, 4>,
    probe_o: Option<Tensor<B, 4>>,
    correction: ProbeCorrection,
    dense_rows: Range<usize>,
    softmax_scale: f64,
) -> Result<Tensor<B, 4>, String> {
    let (qkv, o, probe_o) = (primitive(qkv), primitive(o), probe_o.map(primitive));
    B::correct_by_probes(qkv, o, probe_o, correction, dense_rows, softmax_scale).map(tensor)
}

/// Chooses the keys of a prompt that later tokens read: for each KV head the keys that received the most attention,
/// which becomes their rank. Nothing is copied to the host.
///
/// # Shapes
/// - qkv: `[1, num_keys, num_heads + 2 * num_kv_heads, head_dim]`
/// - lse: log-sum-exp of the prompt's dense attention, f32 `[1, num_heads, num_keys]`
///
/// # Errors
/// The reason why the kernels refuse the call, or that the backend has none.
pub fn keep_heavy_keys<B: DeviceBackend>(
    qkv: &Tensor<B, 4>,
    lse: Tensor<B, 3>,
    heavy: &HeavyKeys,
) -> Result<DmaCache<B>, String> {
    B::keep_heavy_keys(primitive(qkv.clone()), primitive(lse), heavy)
}

/// Adds the key and value of the token at `position` to the kept keys, evicting the key with the least accumulated
/// attention once all slots are taken. Then attends with the token's query, whose attention weights are added to the
/// ranks.
///
/// # Shapes
/// - qkv: `[1, 1, num_heads + 2 * num_kv_heads, head_dim]`
/// - returns: `[1, 1, num_heads, head_dim]`
///
/// # Errors
/// The reason why the kernels refuse the call, or that the backend has none.
pub fn heavy_decode<B: DeviceBackend>(
    cache: &mut DmaCache<B>,
    qkv: Tensor<B, 4>,
    position: usize,
    softmax_scale: f64,
    scratch: &mut B::DecodeScratch,
) -> Result<Tensor<B, 4>, String> {
    B::heavy_decode(cache, primitive(qkv), position, softmax_scale, scratch).map(tensor)
}

/// Adds new tokens of one text to a selector's cache, one after the other, and attends with each token's queries over
/// the keys that it reads, `reads`, one entry a token. The result is the same for one call and for several.
///
/// # Shapes
/// - qkv: `[1, new, num_heads + 2 * num_kv_heads, head_dim]`
/// - returns: `[1, new, num_heads, head_dim]`
///
/// # Errors
/// The reason why the kernels refuse the call, or that the backend has none.
pub fn selector_decode<B: DeviceBackend>(
    cache: &mut SelectorCache<B>,
    qkv: Tensor<B, 4>,
    reads: &[TokenKeys],
    softmax_scale: f64,
    scratch: &mut B::DecodeScratch,
) -> Result<Tensor<B, 4>, String> {
    assert_eq!(qkv.dims()[..2], [1, reads.len()], "one text, and what each token reads");
    let o = B::selector_decode(cache, primitive(qkv), reads, softmax_scale, scratch)?;
    Ok(Tensor::cat(o.into_iter().map(tensor).collect(), 1))
}
