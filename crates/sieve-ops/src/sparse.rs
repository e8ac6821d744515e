//! Attention under a selector's mask, and the selection of one, without gradient.
pub(crate) mod cpu;
pub(crate) mod cuda;

use crate::tensors::{primitive, tensor};
use crate::{DeviceBackend, DmaCache};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_core::{BlockSelection, HeavyKeys, KeyMask, MaskError, ProbeCorrection};
use std::ops::Range;

/// A mask of the host, copied to a device as kernels take it.
///
/// # Errors
/// The errors of [`KeyMask::for_kernels`].
pub fn upload_mask<B: Backend>(mask: &KeyMask, device: &B::Device) -> Result<KeyMask<Tensor<B, 1, Int>>, MaskError> {
    let upload = |words: Vec<i32>| {
        let shape = [words.len()];
        Tensor::from_data(TensorData::new(words, shape), device)
    };
    Ok(mask.for_kernels()?.map(upload))
}

/// What attention under a mask returns.
#[derive(Clone, Debug)]
pub struct SparseOutput<B: Backend> {
    /// `[1, num_queries, num_heads, head_dim]`.
    pub o: Tensor<B, 4>,
    /// Log-sum-exp of the kept logits, f32 `[1, num_heads, num_queries]`.
    pub lse: Tensor<B, 3>,
}

/// Whether the backend has a kernel for [`sparse_attention`] on this tensor. Where it has none, sieve-select's
/// attention on the host takes the call.
pub fn has_sparse_attention<B: DeviceBackend>(qkv: &Tensor<B, 4>) -> bool {
    B::has_sparse_attention(&primitive(qkv.clone()))
}

/// Attention of a tensor's last tokens over the keys that a mask names.
///
/// # Shapes
/// - qkv: `[1, num_keys, num_heads + 2 * num_kv_heads, head_dim]`
///
/// # Errors
/// Why the kernel refuses the call, or that the backend has none.
pub fn sparse_attention<B: DeviceBackend>(
    qkv: Tensor<B, 4>,
    mask: &KeyMask<Tensor<B, 1, Int>>,
    softmax_scale: f64,
) -> Result<SparseOutput<B>, String> {
    let mask = mask.clone().map(Tensor::into_primitive);
    let [o, lse] = B::sparse_attention(primitive(qkv), mask, softmax_scale)?;
    Ok(SparseOutput {
        o: tensor(o),
        lse: tensor(lse),
    })
}

/// Chooses the blocks that a selector keeps from queries and keys, on the device, with its statistics; nothing is
/// copied to the host.
///
/// # Shapes
/// - qkv: as [`sparse_attention`]
///
/// # Errors
/// Why the kernels refuse the call, or that the backend has none.
pub fn select_blocks<B: DeviceBackend>(
    qkv: &Tensor<B, 4>,
    selection: &BlockSelection,
) -> Result<KeyMask<Tensor<B, 1, Int>>, String> {
    select_blocks_by_bounds(qkv, selection, None)
}

/// The same with bounds of pages that are kept from call to call, f32 `[num_kv_heads, pages or more, 2, head_dim]`: new
/// ones are written there.
///
/// # Errors
/// As [`select_blocks`].
pub fn select_blocks_by_bounds<B: DeviceBackend>(
    qkv: &Tensor<B, 4>,
    selection: &BlockSelection,
    bounds: Option<&Tensor<B, 4>>,
) -> Result<KeyMask<Tensor<B, 1, Int>>, String> {
    let bounds = bounds.map(|bounds| primitive(bounds.clone()));
    let chosen = B::select_blocks(primitive(qkv.clone()), selection, bounds)?;
    Ok(chosen.map(Tensor::from_primitive))
}

/// Corrects attention under a mask by dense rows. One position in `correction.gamma` is computed densely here;
/// `dense_rows` are dense already.
///
/// # Shapes
/// - qkv: as [`sparse_attention`], whose output `o` is
///
/// # Errors
/// Why the kernels refuse the call, or that the backend has none.
pub fn correct_by_probes<B: DeviceBackend>(
    qkv: Tensor<B, 4>,
    o: Tensor<B, 4>,
    correction: ProbeCorrection,
    dense_rows: Range<usize>,
    softmax_scale: f64,
) -> Result<Tensor<B, 4>, String> {
    let (qkv, o) = (primitive(qkv), primitive(o));
    B::correct_by_probes(qkv, o, correction, dense_rows, softmax_scale).map(tensor)
}

/// Chooses the keys of a prompt that the tokens after it read: each KV head's own, by the attention that they received,
/// which becomes their rank. Nothing is copied to the host.
///
/// # Shapes
/// - qkv: as [`sparse_attention`]
///
/// # Errors
/// Why the kernels refuse the call, or that the backend has none.
pub fn keep_heavy_keys<B: DeviceBackend>(qkv: &Tensor<B, 4>, heavy: &HeavyKeys) -> Result<DmaCache<B>, String> {
    B::keep_heavy_keys(primitive(qkv.clone()), heavy)
}

/// Appends the key and value of the token at a position to the kept keys, evicting the one with the least accumulated
/// attention once all slots are taken, and attends with its query, whose attention weights are added to the ranks.
///
/// # Shapes
/// - qkv: `[1, 1, num_heads + 2 * num_kv_heads, head_dim]`
/// - returns: `[1, 1, num_heads, head_dim]`
///
/// # Errors
/// Why the kernels refuse the call, or that the backend has none.
pub fn heavy_decode<B: DeviceBackend>(
    cache: &mut DmaCache<B>,
    qkv: Tensor<B, 4>,
    position: usize,
    softmax_scale: f64,
    scratch: &mut B::DecodeScratch,
) -> Result<Tensor<B, 4>, String> {
    B::heavy_decode(cache, primitive(qkv), position, softmax_scale, scratch).map(tensor)
}
