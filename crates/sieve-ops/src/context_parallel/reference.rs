//! Context parallelism's operations on DMA's halo in plain Burn operations.
use crate::AttentionSpec;
use crate::tensors::{Float, Ints, primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, IndexingUpdateOp, Int, Tensor};

/// [`DeviceBackend::dma_last_kept`](crate::DeviceBackend::dma_last_kept), from the `expire` of DMA's selection.
pub(super) fn dma_last_kept<B: Backend>(expire: Ints<B>, slots: usize) -> Ints<B> {
    let expire = Tensor::<B, 3, Int>::from_primitive(expire);
    let seq_len = expire.dims()[2];
    let positions = Tensor::<B, 1, Int>::arange(0..seq_len as i64, &expire.device());
    let positions = positions.unsqueeze::<3>().expand(expire.dims());
    // A key that is visible after the last query expires at `seq_len`.
    let has_left = expire.lower_elem(seq_len as i64);
    let sorted = positions.mask_fill(has_left, -1).sort(2);
    sorted.narrow(2, seq_len - slots, slots).into_primitive()
}

/// Reference of [`DeviceBackend::dma_halo_keys`](crate::DeviceBackend::dma_halo_keys).
pub(super) fn dma_halo_keys<B: Backend>(
    packed: Float<B>,
    rank: Float<B>,
    kept: Ints<B>,
    spec: AttentionSpec,
) -> [Float<B>; 2] {
    let packed = tensor::<B, 4>(packed);
    let places = Places::<B>::new(kept, packed.dims()[3]);
    let heads = 2 * spec.num_kv_heads;
    let first = packed.dims()[2] - heads;
    let keys = packed.narrow(2, first, heads).gather(1, places.keys);
    let ranks = tensor::<B, 3>(rank).gather(2, places.ranks);
    let keys = primitive(keys.mask_fill(places.no_keys, 0.0));
    [keys, primitive(ranks.mask_fill(places.no_ranks, 0.0))]
}

/// Reference of [`DeviceBackend::dma_halo_keys_backward`](crate::DeviceBackend::dma_halo_keys_backward).
pub(super) fn dma_halo_keys_backward<B: Backend>(
    [d_packed, d_rank]: [Float<B>; 2],
    kept: Ints<B>,
    [d_keys, d_ranks]: [Float<B>; 2],
    spec: AttentionSpec,
) -> [Float<B>; 2] {
    let (d_packed, d_rank) = (tensor::<B, 4>(d_packed), tensor::<B, 3>(d_rank));
    let [batch, seq_len, heads, head_dim] = d_packed.dims();
    let places = Places::<B>::new(kept, head_dim);
    let d_keys = tensor::<B, 4>(d_keys).mask_fill(places.no_keys, 0.0);
    let d_ranks = tensor::<B, 3>(d_ranks).mask_fill(places.no_ranks, 0.0);
    let range = heads - 2 * spec.num_kv_heads..heads;
    let own = d_packed.clone().slice([0..batch, 0..seq_len, range.clone()]);
    let sums = own.scatter(1, places.keys, d_keys, IndexingUpdateOp::Add);
    let d_packed = d_packed.slice_assign([0..batch, 0..seq_len, range, 0..head_dim], sums);
    let d_rank = d_rank.scatter(2, places.ranks, d_ranks, IndexingUpdateOp::Add);
    [primitive(d_packed), primitive(d_rank)]
}

/// Where the kept keys lie in a packed tensor (as indices of K, then V) and among the ranks. Empty slots have index 0,
/// and are marked in `no_keys` and `no_ranks`.
struct Places<B: Backend> {
    keys: Tensor<B, 4, Int>,
    no_keys: Tensor<B, 4, Bool>,
    ranks: Tensor<B, 3, Int>,
    no_ranks: Tensor<B, 3, Bool>,
}

impl<B: Backend> Places<B> {
    /// The places of the keys at the positions `kept`, `[batch, num_kv_heads, slots]`; -1 is an empty slot.
    fn new(kept: Ints<B>, head_dim: usize) -> Self {
        let kept = Tensor::<B, 3, Int>::from_primitive(kept);
        let [batch, kv_heads, slots] = kept.dims();
        let keys = kept.clone().swap_dims(1, 2);
        let keys = Tensor::cat(vec![keys.clone(), keys], 2).unsqueeze_dim::<4>(3);
        let keys = keys.expand([batch, slots, 2 * kv_heads, head_dim]);
        Self {
            no_keys: keys.clone().lower_elem(0),
            keys: keys.clamp_min(0),
            no_ranks: kept.clone().lower_elem(0),
            ranks: kept.clamp_min(0),
        }
    }
}
