//! Context parallelism on CUDA: kernels choose and gather the halo keys (`halo_keys`), NCCL carries them. Calls that
//! a kernel refuses run the reference.
use super::cpu::{self, slices_over_hosts};
use super::{RankGroup, SendRecv, reference};
use crate::attention::cuda::bounds;
use crate::device::{kernel_on, kernel_or, tensors, writable};
use crate::{AttentionSpec, Cuda, DeviceBackend, DmaOrder, DocumentBounds};
use sieve_core::{DmaWindow, KeyOrder};
use sieve_kernels::{CudaPrimitive as Float, CudaTensor, KernelError, ToBurn, kernel_tensor};

pub(crate) fn dma_last_kept(rank: Float, documents: &DocumentBounds<Cuda>, window: DmaWindow, slots: usize) -> Float {
    let attempt = last_kept(&rank, documents, window, slots);
    kernel_or("dma_last_kept", attempt.map(ToBurn::burn), || {
        let selection = Cuda::dma_select(rank, documents, window, DmaOrder::Of(KeyOrder::Leaving));
        reference::dma_last_kept::<Cuda>(selection.expire, slots)
    })
}

pub(crate) fn dma_kept_keys(expire: Float, slots: usize) -> Float {
    let attempt = sieve_kernels::dma_last_kept(&kernel_tensor(expire.clone()), slots);
    kernel_or("dma_kept_keys", attempt.map(ToBurn::burn), || reference::dma_last_kept::<Cuda>(expire, slots))
}

pub(crate) fn dma_halo_keys(packed: Float, rank: Float, kept: Float, spec: AttentionSpec) -> [Float; 2] {
    let [packed_view, rank_view, kept_view] = tensors([&packed, &rank, &kept]);
    let attempt = sieve_kernels::dma_halo_keys_forward(&packed_view, &rank_view, &kept_view);
    let attempt = attempt.map(|results| results.map(ToBurn::burn));
    kernel_or("dma_halo_keys", attempt, || reference::dma_halo_keys::<Cuda>(packed, rank, kept, spec))
}

/// The kernel adds the gradients of the halo's keys to `totals` in place, at the keys in `kept`.
pub(crate) fn dma_halo_keys_backward(
    totals: [Float; 2],
    kept: Float,
    halo_gradients: [Float; 2],
    spec: AttentionSpec,
) -> [Float; 2] {
    let totals = totals.map(writable);
    let [d_keys, d_ranks, kept_view] = tensors([&halo_gradients[0], &halo_gradients[1], &kept]);
    let outcome = sieve_kernels::dma_halo_keys_backward(totals.each_ref(), &kept_view, [&d_keys, &d_ranks]);
    kernel_on("dma_halo_keys_backward", totals.map(ToBurn::burn), outcome, |totals| {
        reference::dma_halo_keys_backward::<Cuda>(totals, kept, halo_gradients, spec)
    })
}

/// Through NCCL where the processes are linked by it, else through host memory. Panics where NCCL fails.
pub(crate) fn exchange(links: &dyn RankGroup, parcel: SendRecv<Cuda>) -> Vec<Float> {
    let Some(nccl) = links.nccl() else {
        return cpu::exchange(links, parcel);
    };
    let given = parcel.given.into_iter();
    let given = given.map(|(part, tensor)| (part, kernel_tensor(tensor)));
    let found = nccl.exchange(given.collect(), parcel.from, &parcel.shape, &kernel_tensor(parcel.like));
    match found {
        Ok(found) => found.into_iter().map(ToBurn::burn).collect(),
        // The other processes wait in NCCL, so that this one cannot change to an exchange through the host.
        Err(error) => panic!("{error}"),
    }
}

/// Through NCCL where the processes are linked by it, else through host memory. Panics where NCCL fails, because the
/// other processes wait in it.
pub(crate) fn all_to_all(links: &dyn RankGroup, x: Float) -> Float {
    let Some(nccl) = links.nccl() else {
        return slices_over_hosts::<Cuda>(links, x);
    };
    match nccl.all_to_all(&kernel_tensor(x)) {
        Ok(found) => found.burn(),
        Err(error) => panic!("{error}"),
    }
}

/// The launches of [`dma_last_kept`].
fn last_kept(
    rank: &Float,
    documents: &DocumentBounds<Cuda>,
    window: DmaWindow,
    slots: usize,
) -> Result<CudaTensor, KernelError> {
    let rank = kernel_tensor(rank.clone());
    let [start, end] = bounds(documents);
    let selection = sieve_kernels::dma_select(&rank, &start, &end, window)?;
    sieve_kernels::dma_last_kept(&selection.expire, slots)
}
