//! Blocks of keys and values, and their means.
use crate::documents::{DocumentBounds, HostBounds};
use crate::nsa::NsaCall;
use crate::tensors::{Float, ints, primitive, split_heads, tensor, upcast};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData};
use sieve_cpu::NsaBlocks;

/// Tokens (of the batch) of each slot's block, `[batch * num_slots * l]`, and 1 or 0 where the slot is used or not,
/// `[batch * num_slots, 1, 1, 1]`.
fn gather_plan<B: Backend>(
    documents: &DocumentBounds<B>,
    blocks: NsaBlocks,
    dtype: DType,
    device: &B::Device,
) -> (Tensor<B, 1, Int>, Tensor<B, 4>) {
    let host = HostBounds::new::<B>(documents);
    let starts = host.slot_starts(blocks);
    let (l, num_slots) = (blocks.compress_block_size as i32, blocks.num_slots(host.seq_len));
    let (mut tokens, mut used) = (Vec::new(), Vec::new());
    for (slot, &start) in starts.iter().enumerate() {
        let row = (slot / num_slots * host.seq_len) as i32;
        tokens.extend((0..l).map(|inside| if start < 0 { 0 } else { row + start + inside }));
        used.push(f64::from(u8::from(start >= 0)));
    }
    let len = tokens.len();
    let used = TensorData::new(used, [starts.len(), 1, 1, 1]).convert_dtype(dtype);
    (ints(tokens, [len], device), Tensor::from_data(used, (device, dtype)))
}

/// See [`crate::nsa_blocks`].
pub fn nsa_blocks<B: Backend>(qkv: Float<B>, positions: [Float<B>; 2], call: &NsaCall<B>) -> Float<B> {
    let (documents, spec, blocks) = (&call.documents, call.spec, call.blocks);
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let [batch, seq_len, _, d] = qkv.dims();
    let (kv_heads, l) = (spec.num_kv_heads, blocks.compress_block_size);
    let slots = batch * blocks.num_slots(seq_len);
    let (tokens, used) = gather_plan::<B>(documents, blocks, qkv.dtype(), &qkv.device());
    let [_, k, v] = split_heads(qkv, kv_heads);
    let parts = [k, v].into_iter().zip(positions).map(|(x, position)| {
        let (position, _) = upcast::<B, 2>(position);
        let x = x
            .reshape([batch * seq_len, kv_heads * d])
            .select(0, tokens.clone())
            .reshape([slots, l, kv_heads, d])
            + position.reshape([1, l, 1, d]);
        (x * used.clone())
            .permute([0, 2, 1, 3])
            .reshape([1, slots * kv_heads, l * d])
    });
    primitive(Tensor::cat(parts.collect(), 0).cast(dtype))
}

/// `[dqkv, dk_positions, dv_positions]` of [`nsa_blocks`].
pub fn nsa_blocks_backward<B: Backend>(
    [batch, seq_len, heads, d]: [usize; 4],
    call: &NsaCall<B>,
    dy: Float<B>,
) -> [Float<B>; 3] {
    let (documents, spec, blocks) = (&call.documents, call.spec, call.blocks);
    let (dy, dtype) = upcast::<B, 3>(dy);
    let (device, compute) = (dy.device(), dy.dtype());
    let (kv_heads, l) = (spec.num_kv_heads, blocks.compress_block_size);
    let slots = batch * blocks.num_slots(seq_len);
    let (tokens, used) = gather_plan::<B>(documents, blocks, compute, &device);
    let zeros = |dims: [usize; 2]| Tensor::<B, 2>::zeros(dims, (&device, compute));
    let [(dk, dk_positions), (dv, dv_positions)] = [0, 1].map(|which| {
        let dy = dy
            .clone()
            .narrow(0, which, 1)
            .reshape([slots, kv_heads, l, d])
            .permute([0, 2, 1, 3])
            * used.clone();
        let d_positions = dy.clone().sum_dim(2).sum_dim(0).reshape([l, d]);
        let dx = zeros([batch * seq_len, kv_heads * d]).select_assign(
            0,
            tokens.clone(),
            dy.reshape([slots * l, kv_heads * d]),
            IndexingUpdateOp::Add,
        );
        (dx.reshape([batch, seq_len, kv_heads, d]), d_positions)
    });
    let num_heads = heads - 2 * kv_heads;
    let dq = zeros([batch * seq_len, num_heads * d]).reshape([batch, seq_len, num_heads, d]);
    [
        primitive(Tensor::cat(vec![dq, dk, dv], 2).cast(dtype)),
        primitive(dk_positions.cast(dtype)),
        primitive(dv_positions.cast(dtype)),
    ]
}

/// See [`crate::nsa_mean_pool`].
pub fn nsa_mean_pool<B: Backend>(qkv: Float<B>, call: &NsaCall<B>) -> Float<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let (l, d) = (call.blocks.compress_block_size, qkv.dims()[3]);
    let zeros = Tensor::<B, 2>::zeros([l, d], (&qkv.device(), qkv.dtype()));
    let positions = [zeros.clone(), zeros].map(primitive);
    let all = nsa_blocks::<B>(primitive(qkv), positions, call);
    let all = tensor::<B, 3>(all);
    let rows = all.dims()[1];
    let mean = all.reshape([2, rows, l, d]).mean_dim(2);
    primitive(mean.reshape([2, rows, d]).cast(dtype))
}

/// `dqkv` of [`nsa_mean_pool`].
pub fn nsa_mean_pool_backward<B: Backend>(dims: [usize; 4], call: &NsaCall<B>, dy: Float<B>) -> Float<B> {
    let (dy, dtype) = upcast::<B, 3>(dy);
    let (l, [_, rows, d]) = (call.blocks.compress_block_size, dy.dims());
    let dy = (dy / l as f64)
        .reshape([2, rows, 1, d])
        .expand([2, rows, l, d])
        .reshape([2, rows, l * d]);
    let [dqkv, _, _] = nsa_blocks_backward::<B>(dims, call, primitive(dy));
    primitive(tensor::<B, 4>(dqkv).cast(dtype))
}
