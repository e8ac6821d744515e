//! Rows in parts on CUDA: kernels choose and move the border's keys, NCCL carries them.
use super::backend::{Parcel, RowPartsBackend};
use super::flex::{over_hosts, slices_over_hosts};
use super::{RowLinks, reference};
use crate::attention::AttentionSpec;
use crate::attention::cuda::bounds;
use crate::device::cuda::{Cuda, tensors, writable};
use crate::device::paths::kernel_or;
use crate::dma::DmaBackend;
use crate::documents::DocumentBounds;
use sieve_core::DmaWindow;
use sieve_kernels::{CudaPrimitive as Float, CudaTensor, KernelError, ToBurn, kernel_tensor};

impl RowPartsBackend for Cuda {
    fn dma_last_kept(rank: Float, documents: &DocumentBounds<Self>, window: DmaWindow, slots: usize) -> Float {
        let attempt = last_kept(&rank, documents, window, slots);
        kernel_or("dma_last_kept", attempt.map(ToBurn::burn), || {
            let selection = Self::dma_select(rank, documents, window);
            reference::dma_last_kept::<Self>(selection.expire, slots)
        })
    }

    fn dma_border_keys(packed: Float, rank: Float, kept: Float, spec: AttentionSpec) -> [Float; 2] {
        let [x, y, z] = tensors([&packed, &rank, &kept]);
        let attempt = sieve_kernels::dma_border_keys_forward(&x, &y, &z);
        let attempt = attempt.map(|results| results.map(ToBurn::burn));
        kernel_or("dma_border_keys", attempt, || {
            reference::dma_border_keys::<Self>(packed, rank, kept, spec)
        })
    }

    fn dma_border_keys_backward(
        sums: [Float; 2],
        kept: Float,
        gradients: [Float; 2],
        spec: AttentionSpec,
    ) -> [Float; 2] {
        let sums = sums.map(writable);
        let ([d_keys, d_ranks], [d_packed, d_rank]) = (tensors(gradients.each_ref()), &sums);
        let attempt = sieve_kernels::dma_border_keys_backward(
            [d_packed, d_rank],
            &kernel_tensor(kept.clone()),
            [&d_keys, &d_ranks],
        );
        let sums = sums.map(ToBurn::burn);
        kernel_or("dma_border_keys_backward", attempt.map(|()| sums.clone()), || {
            reference::dma_border_keys_backward::<Self>(sums, kept, gradients, spec)
        })
    }

    fn exchange(links: &dyn RowLinks, parcel: Parcel<Self>) -> Vec<Float> {
        let Some(nccl) = links.nccl() else {
            return over_hosts::<Self>(links, parcel);
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

    fn all_to_all(links: &dyn RowLinks, x: Float) -> Float {
        let Some(nccl) = links.nccl() else {
            return slices_over_hosts::<Self>(links, x);
        };
        match nccl.all_to_all(&kernel_tensor(x)) {
            Ok(found) => found.burn(),
            Err(error) => panic!("{error}"),
        }
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
    let (kept, local) = (window.keep_window_size, window.local_window_size);
    let selection = sieve_kernels::dma_select(&rank, &start, &end, kept, local)?;
    sieve_kernels::dma_last_kept(&selection.expire, slots)
}
