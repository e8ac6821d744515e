//! Attention under a selector's mask, and the selection of one, without gradient.
pub(crate) mod cpu;
pub(crate) mod cuda;

use crate::SieveBackend;
use crate::backend::DeviceBackend;
use crate::decode::DmaCache;
use crate::tensors::{Float, primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_core::{BlockSelection, HeavyKeys, MaskLayout, PackedMask, ProbeCorrection};
use std::ops::Range;

/// A selector's mask where the queries are.
#[derive(Clone, Debug)]
pub struct DeviceMask<B: Backend> {
    layout: MaskLayout,
    data: Tensor<B, 1, Int>,
}

impl<B: Backend> DeviceMask<B> {
    /// A mask of the host, copied to a device.
    pub fn upload(mask: &PackedMask, device: &B::Device) -> Self {
        let data = TensorData::new(mask.data().to_vec(), [mask.data().len()]);
        Self {
            layout: mask.layout().clone(),
            data: Tensor::from_data(data, device),
        }
    }
}

/// A mask made on the device, and what it keeps.
#[derive(Clone, Debug)]
pub struct DeviceSelection<B: Backend> {
    /// The mask.
    pub mask: DeviceMask<B>,
    /// Kept tiles of each row of each list, `[lists * query tiles]`.
    pub counts: Tensor<B, 1, Int>,
    /// Pairs of a query and a kept key not after it, likewise.
    pub pairs: Tensor<B, 1, Int>,
    /// Rows of each head with a score that is no number; such heads are dense. `[num_heads]`.
    pub nan_rows: Tensor<B, 1, Int>,
}

/// A mask made on a device.
#[derive(Clone, Debug)]
pub struct ChosenBlocks<I> {
    /// Sizes, and where arrays are in the first tensor.
    pub layout: MaskLayout,
    /// The mask; kept tiles and kept pairs of each row; rows of each head with a score that is no number.
    pub tensors: [I; 4],
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
pub fn has_sparse_attention<B: SieveBackend>(qkv: &Tensor<B, 4>) -> bool {
    !B::HAS_GRAPH && B::Inner::has_sparse_attention(&B::value(primitive(qkv.clone())))
}

/// Attention of a tensor's last tokens over the keys that a mask names.
///
/// # Shapes
/// - qkv: `[1, num_keys, num_heads + 2 * num_kv_heads, head_dim]`
///
/// # Errors
/// Why the kernel refuses the call, or that the backend has none.
pub fn sparse_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    mask: &DeviceMask<B>,
    softmax_scale: f64,
) -> Result<SparseOutput<B>, String> {
    let data = mask.data.clone().into_primitive();
    let [o, lse] = B::Inner::sparse_attention(value::<B, 4>(qkv)?, &mask.layout, data, softmax_scale)?;
    Ok(SparseOutput {
        o: tensor(B::constant(o)),
        lse: tensor(B::constant(lse)),
    })
}

/// Chooses the blocks that a selector keeps from queries and keys, on the device; nothing is copied to the host.
///
/// # Shapes
/// - qkv: as [`sparse_attention`]
///
/// # Errors
/// Why the kernels refuse the call, or that the backend has none.
pub fn select_blocks<B: SieveBackend>(
    qkv: &Tensor<B, 4>,
    selection: &BlockSelection,
) -> Result<DeviceSelection<B>, String> {
    select_blocks_by_bounds(qkv, selection, None)
}

/// The same with bounds of pages that are kept from call to call, f32 `[num_kv_heads, pages or more, 2, head_dim]`: new
/// ones are written there.
///
/// # Errors
/// As [`select_blocks`].
pub fn select_blocks_by_bounds<B: SieveBackend>(
    qkv: &Tensor<B, 4>,
    selection: &BlockSelection,
    bounds: Option<&Tensor<B, 4>>,
) -> Result<DeviceSelection<B>, String> {
    let bounds = bounds.map(|bounds| value::<B, 4>(bounds.clone())).transpose()?;
    let chosen = B::Inner::select_blocks(value::<B, 4>(qkv.clone())?, selection, bounds)?;
    let [data, counts, pairs, nan_rows] = chosen.tensors.map(Tensor::from_primitive);
    let layout = chosen.layout;
    Ok(DeviceSelection {
        mask: DeviceMask { layout, data },
        counts,
        pairs,
        nan_rows,
    })
}

/// Corrects attention under a mask by dense rows. One position in `correction.gamma` is computed densely here;
/// `dense_rows` are dense already.
///
/// # Shapes
/// - qkv: as [`sparse_attention`], whose output `o` is
///
/// # Errors
/// Why the kernels refuse the call, or that the backend has none.
pub fn correct_by_probes<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    o: Tensor<B, 4>,
    correction: ProbeCorrection,
    dense_rows: Range<usize>,
    softmax_scale: f64,
) -> Result<Tensor<B, 4>, String> {
    let (qkv, o) = (value::<B, 4>(qkv)?, value::<B, 4>(o)?);
    let o = B::Inner::correct_by_probes(qkv, o, correction, dense_rows, softmax_scale)?;
    Ok(tensor(B::constant(o)))
}

/// Chooses the keys of a prompt that the tokens after it read: each KV head's own, by the attention that they received,
/// which is their rank. Nothing is copied to the host.
///
/// # Shapes
/// - qkv: as [`sparse_attention`]
///
/// # Errors
/// Why the kernels refuse the call, or that the backend has none.
pub fn keep_heavy_keys<B: DeviceBackend>(qkv: &Tensor<B, 4>, heavy: &HeavyKeys) -> Result<DmaCache<B>, String> {
    B::keep_heavy_keys(primitive(qkv.clone()), heavy)
}

/// Adds the key and value of the token at a position to the keys that stayed, where the one that received the least
/// attention leaves once all slots are taken, and attends with its query. Ranks grow by the attention that it gives.
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

/// A tensor's value, where there is no graph.
fn value<B: SieveBackend, const D: usize>(x: Tensor<B, D>) -> Result<Float<B::Inner>, String> {
    match B::HAS_GRAPH {
        true => Err("it has no gradient".to_owned()),
        false => Ok(B::value(primitive(x))),
    }
}
