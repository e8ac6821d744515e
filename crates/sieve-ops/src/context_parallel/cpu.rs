//! Context parallelism on the CPU: reference operations on the halo (`halo_keys`), and exchanges through host memory.
use super::{RankGroup, SendRecv, reference};
use crate::tensors::{Float, primitive, tensor};
use crate::{AttentionSpec, DeviceBackend, DmaOrder, DocumentBounds};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use sieve_core::{DmaWindow, KeyOrder};

/// Makes DMA's selection from the ranks again, on the CPU, and takes the keys that expire after the last query.
pub(crate) fn dma_last_kept(
    rank: FlexTensor,
    documents: &DocumentBounds<Flex>,
    window: DmaWindow,
    slots: usize,
) -> FlexTensor {
    let selection = Flex::dma_select(rank, documents, window, DmaOrder::Of(KeyOrder::Leaving));
    dma_kept_keys(selection.expire, slots)
}

/// By one walk over each row, from its end.
pub(crate) fn dma_kept_keys(expire: FlexTensor, slots: usize) -> FlexTensor {
    let expire = Tensor::<Flex, 3, Int>::from_primitive(expire);
    let ([batch, kv_heads, seq_len], device) = (expire.dims(), expire.device());
    let expire: Vec<i64> = expire.into_data().iter::<i64>().collect();
    let mut kept = vec![-1; batch * kv_heads * slots];
    for (row, kept) in expire.chunks(seq_len).zip(kept.chunks_mut(slots)) {
        let seen = (0..seq_len).rev().filter(|&key| row[key] >= seq_len as i64);
        kept.iter_mut().rev().zip(seen).for_each(|(slot, key)| *slot = key as i32);
    }
    let kept = TensorData::new(kept, [batch, kv_heads, slots]);
    Tensor::<Flex, 3, Int>::from_data(kept, &device).into_primitive()
}

/// The reference, which is not counted as one; `kept` holds positions as `dma_last_kept` returns them.
pub(crate) fn dma_halo_keys(
    packed: FlexTensor,
    rank: FlexTensor,
    kept: FlexTensor,
    spec: AttentionSpec,
) -> [FlexTensor; 2] {
    reference::dma_halo_keys::<Flex>(packed, rank, kept, spec)
}

/// The reference, which is not counted as one: new totals of the packed tensor's gradient and of the ranks'.
pub(crate) fn dma_halo_keys_backward(
    totals: [FlexTensor; 2],
    kept: FlexTensor,
    halo_gradients: [FlexTensor; 2],
    spec: AttentionSpec,
) -> [FlexTensor; 2] {
    reference::dma_halo_keys_backward::<Flex>(totals, kept, halo_gradients, spec)
}

pub(crate) fn all_to_all(links: &dyn RankGroup, x: FlexTensor) -> FlexTensor {
    slices_over_hosts::<Flex>(links, x)
}

/// Does [`DeviceBackend::all_to_all`] through host memory.
pub(super) fn slices_over_hosts<B: Backend>(links: &dyn RankGroup, x: Float<B>) -> Float<B> {
    let slices = tensor::<B, 5>(x.clone());
    let [parts, batch, len, heads, width] = slices.dims();
    let slice = |part| (part, primitive(slices.clone().narrow(0, part, 1)));
    let parcel = SendRecv::<B> {
        given: (0..parts).map(slice).collect(),
        from: 0..parts,
        shape: vec![1, batch, len, heads, width],
        like: x,
    };
    let found = exchange(links, parcel);
    primitive(Tensor::cat(found.into_iter().map(tensor::<B, 5>).collect(), 0))
}

/// [`DeviceBackend::exchange`] through host memory, for any backend.
pub(crate) fn exchange<B: Backend>(links: &dyn RankGroup, parcel: SendRecv<B>) -> Vec<Float<B>> {
    let (parts, count) = (links.num_parts(), parcel.shape.iter().product::<usize>());
    let (device, dtype) = (B::float_device(&parcel.like), parcel.like.dtype());
    let mut values = vec![Vec::new(); parts];
    for (part, given) in parcel.given {
        let flat = B::float_reshape(given, [count].into());
        values[part] = tensor::<B, 1>(flat).into_data().iter::<f32>().collect();
    }
    let counts = (0..parts).map(|part| if parcel.from.contains(&part) { count } else { 0 });
    let mut found = links.exchange(values, &counts.collect::<Vec<_>>());
    let found = found.drain(parcel.from).map(|values| {
        let flat = Tensor::<B, 1>::from_data(TensorData::new(values, [count]), &device).cast(dtype);
        B::float_reshape(primitive(flat), parcel.shape.clone().into())
    });
    found.collect()
}
