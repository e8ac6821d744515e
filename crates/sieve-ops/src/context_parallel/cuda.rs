//! Context parallelism on CUDA: kernels choose and move the halo keys, NCCL carries them.
use super::cpu::{over_hosts, slices_over_hosts};
use super::{RankGroup, SendRecv, reference};
use crate::attention::cuda::bounds;
use crate::device::{kernel_or, tensors, writable};
use crate::{AttentionSpec, Cuda, DeviceBackend, DocumentBounds};
use sieve_core::DmaWindow;
use sieve_kernels::{CudaPrimitive as Float, CudaTensor, KernelError, ToBurn, kernel_tensor};

pub(crate) fn dma_last_kept(rank: Float, documents: &DocumentBounds<Cuda>, window: DmaWindow, slots: usize) -> Float {
    let attempt = last_kept(&rank, documents, window, slots);
    kernel_or("dma_last_kept", attempt.map(ToBurn::burn), || {
        let selection = Cuda::dma_select(rank, documents, window);
        reference::dma_last_kept::<Cuda>(selection.expire, slots)
    })
}

pub(crate) fn dma_border_keys(packed: Float, rank: Float, kept: Float, spec: AttentionSpec) -> [Float; 2] {
    let [x, y, z] = tensors([&packed, &rank, &kept]);
    let attempt = sieve_kernels::dma_border_keys_forward(&x, &y, &z);
    let attempt = attempt.map(|results| results.map(ToBurn::burn));
    kernel_or("dma_border_keys", attempt, || {
        reference::dma_border_keys::<Cuda>(packed, rank, kept, spec)
    })
}

pub(crate) fn dma_border_keys_backward(
    sums: [Float; 2],
    kept: Float,
    gradients: [Float; 2],
    spec: AttentionSpec,
) -> [Float; 2] {
    let sums = sums.map(writable);
    let ([d_keys, d_ranks], [d_packed, d_rank]) = (tensors(gradients.each_ref()), &sums);
    let attempt =
        sieve_kernels::dma_border_keys_backward([d_packed, d_rank], &kernel_tensor(kept.clone()), [&d_keys, &d_ranks]);
    let sums = sums.map(ToBurn::burn);
    kernel_or("dma_border_keys_backward", attempt.map(|()| sums.clone()), || {
        reference::dma_border_keys_backward::<Cuda>(sums, kept, gradients, spec)
    })
}

pub(crate) fn exchange(links: &dyn RankGroup, parcel: SendRecv<Cuda>) -> Vec<Float> {
    let Some(nccl) = links.nccl() else {
        return over_hosts::<Cuda>(links, parcel);
    };
    let given = parcel.given.into_iter();
    let given = given.map(|(part, tensor)| (part, kernel_tensor(tensor)));
    let found = nccl.exchange(given.collect(), parcel.from, &parcel.shape, &kernel_tensor(parcel.like));
    match found {
        Ok(found) => found.into_iter().map(ToBurn::burn).collect(),
        // No other path reaches the other GPUs.
        Err(error) => panic!("{error}"),
    }
}

pub(crate) fn all_to_all(links: &dyn RankGroup, x: Float) -> Float {
    let Some(nccl) = links.nccl() else {
        return slices_over_hosts::<Cuda>(links, x);
    };
    match nccl.all_to_all(&kernel_tensor(x)) {
        Ok(found) => found.burn(),
        Err(error) => panic!("{error}"),
    }
}

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
