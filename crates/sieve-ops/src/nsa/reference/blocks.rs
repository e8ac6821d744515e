//! Concatenated keys and values of compressed blocks, and their means.
use crate::NsaCall;
use crate::documents::HostBounds;
use crate::tensors::{Float, ints, primitive, split_heads, tensor, upcast};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData};

/// Which keys each compressed key is computed from, and whether its slot is used. With rows =
/// `batch * num_slots * num_kv_heads`: indices into `[batch * seq_len * num_kv_heads, head_dim]`,
/// `[rows * compress_block_size]`, and 1 for used slots, 0 for empty ones, `[rows, 1]`.
fn gather_plan<B: Backend>(call: &NsaCall<B>, dtype: DType, device: &B::Device) -> (Tensor<B, 1, Int>, Tensor<B, 2>) {
    let (blocks, kv_heads) = (call.blocks, call.spec.num_kv_heads);
    let host = HostBounds::new::<B>(&call.documents);
    let (size, num_slots) = (blocks.compress_block_size, blocks.num_slots(host.seq_len));
    let (mut keys, mut used) = (Vec::new(), Vec::new());
    for (slot, start) in host.slot_starts(blocks).into_iter().enumerate() {
        let start = usize::try_from(start).ok();
        let first = start.map_or(0, |start| slot / num_slots * host.seq_len + start);
        for kv_head in 0..kv_heads {
            let token = |inside| if start.is_some() { first + inside } else { 0 };
            keys.extend((0..size).map(|inside| (token(inside) * kv_heads + kv_head) as i32));
            used.push(f64::from(u8::from(start.is_some())));
        }
    }
    let (len, rows) = (keys.len(), used.len());
    let used = TensorData::new(used, [rows, 1]).convert_dtype(dtype);
    (ints(keys, [len], device), Tensor::from_data(used, (device, dtype)))
}

/// Reference of [`crate::nsa_blocks`].
pub fn nsa_blocks<B: Backend>(qkv: Float<B>, positions: [Float<B>; 2], call: &NsaCall<B>) -> Float<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let [batch, seq_len, _, d] = qkv.dims();
    let (kv_heads, width) = (call.spec.num_kv_heads, call.blocks.compress_block_size * d);
    let (keys, used) = gather_plan::<B>(call, qkv.dtype(), &qkv.device());
    let rows = used.dims()[0];
    let [_, k, v] = split_heads(qkv, kv_heads);
    let parts = [k, v].into_iter().zip(positions).map(|(x, position)| {
        let (position, _) = upcast::<B, 2>(position);
        let x = x.reshape([batch * seq_len * kv_heads, d]).select(0, keys.clone());
        let x = (x.reshape([rows, width]) + position.reshape([1, width])) * used.clone();
        x.unsqueeze_dim::<3>(0)
    });
    primitive(Tensor::cat(parts.collect(), 0).cast(dtype))
}

/// Gradients `[dqkv, dk_positions, dv_positions]` of [`nsa_blocks`].
pub fn nsa_blocks_backward<B: Backend>(
    [batch, seq_len, heads, d]: [usize; 4],
    call: &NsaCall<B>,
    dy: Float<B>,
) -> [Float<B>; 3] {
    let (dy, dtype) = upcast::<B, 3>(dy);
    let (device, compute) = (dy.device(), dy.dtype());
    let (kv_heads, size) = (call.spec.num_kv_heads, call.blocks.compress_block_size);
    let (keys, used) = gather_plan::<B>(call, compute, &device);
    let rows = used.dims()[0];
    let zeros = |heads: usize| Tensor::<B, 2>::zeros([batch * seq_len * heads, d], (&device, compute));
    let [(dk, dk_positions), (dv, dv_positions)] = [0, 1].map(|which| {
        let dy = dy.clone().narrow(0, which, 1).reshape([rows, size * d]) * used.clone();
        let d_positions = dy.clone().sum_dim(0).reshape([size, d]);
        let dy = dy.reshape([rows * size, d]);
        let dx = zeros(kv_heads).select_assign(0, keys.clone(), dy, IndexingUpdateOp::Add);
        (dx.reshape([batch, seq_len, kv_heads, d]), d_positions)
    });
    let num_heads = heads - 2 * kv_heads;
    let dq = zeros(num_heads).reshape([batch, seq_len, num_heads, d]);
    [
        primitive(Tensor::cat(vec![dq, dk, dv], 2).cast(dtype)),
        primitive(dk_positions.cast(dtype)),
        primitive(dv_positions.cast(dtype)),
    ]
}

/// Reference of [`crate::nsa_mean_pool`].
pub fn nsa_mean_pool<B: Backend>(qkv: Float<B>, call: &NsaCall<B>) -> Float<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let (size, d) = (call.blocks.compress_block_size, qkv.dims()[3]);
    let zeros = Tensor::<B, 2>::zeros([size, d], (&qkv.device(), qkv.dtype()));
    let positions = [zeros.clone(), zeros].map(primitive);
    let all = nsa_blocks::<B>(primitive(qkv), positions, call);
    let all = tensor::<B, 3>(all);
    let rows = all.dims()[1];
    let mean = all.reshape([2, rows, size, d]).mean_dim(2);
    primitive(mean.reshape([2, rows, d]).cast(dtype))
}

/// Gradient `dqkv` of [`nsa_mean_pool`].
pub fn nsa_mean_pool_backward<B: Backend>(dims: [usize; 4], call: &NsaCall<B>, dy: Float<B>) -> Float<B> {
    let (dy, dtype) = upcast::<B, 3>(dy);
    let (size, [_, rows, d]) = (call.blocks.compress_block_size, dy.dims());
    let dy = (dy / size as f64).reshape([2, rows, 1, d]).expand([2, rows, size, d]).reshape([2, rows, size * d]);
    let [dqkv, _, _] = nsa_blocks_backward::<B>(dims, call, primitive(dy));
    primitive(tensor::<B, 4>(dqkv).cast(dtype))
}
