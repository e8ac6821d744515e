//! NSA's ops with everything masked and nothing skipped; the choice of blocks on the host.
use super::attention::{
    dma_attention, group_probabilities, hidden_by_expiry, masked_attention,
    masked_attention_backward,
};
use super::norm::split_heads;
use super::{dma_attention_backward, primitive, tensor, upcast};
use crate::{
    AttentionOutput, AttentionSpec, DmaSelection, DocumentBounds, NsaBlocks, NsaCompressed,
    choose_blocks, overlap_weight,
};
use burn::tensor::activation::sigmoid;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Bool, DType, IndexingUpdateOp, Int, Tensor, TensorData, TensorMetadata};

/// Document bounds on the host.
struct Host {
    start: Vec<i32>,
    end: Vec<i32>,
    batch: usize,
    seq_len: usize,
}

impl Host {
    fn new<B: Backend>(documents: &DocumentBounds<B>) -> Self {
        let [start, end] = documents.clone().map(Tensor::<B, 2, Int>::from_primitive);
        let [batch, seq_len] = start.dims();
        let read = |x: Tensor<B, 2, Int>| x.into_data().iter::<i32>().collect();
        Self {
            start: read(start),
            end: read(end),
            batch,
            seq_len,
        }
    }

    /// First token of the block in each slot, `[batch, num_slots]`, -1 where a slot is empty.
    fn slot_starts(&self, blocks: NsaBlocks) -> Vec<i32> {
        let documents = sieve_cpu::Documents {
            start: &self.start,
            end: &self.end,
        };
        blocks.slot_starts(self.batch, self.seq_len, documents)
    }
}

fn ints<B: Backend, const D: usize>(
    values: Vec<i32>,
    dims: [usize; D],
    device: &B::Device,
) -> Tensor<B, D, Int> {
    Tensor::from_data(TensorData::new(values, dims), device)
}

/// Tokens (of the batch) of each slot's block, `[batch * num_slots * l]`, and 1 or 0 where the slot is used or not,
/// `[batch * num_slots, 1, 1, 1]`.
fn gather_plan<B: Backend>(
    documents: &DocumentBounds<B>,
    blocks: NsaBlocks,
    dtype: DType,
    device: &B::Device,
) -> (Tensor<B, 1, Int>, Tensor<B, 4>) {
    let host = Host::new::<B>(documents);
    let starts = host.slot_starts(blocks);
    let (l, num_slots) = (
        blocks.compress_block_size as i32,
        blocks.num_slots(host.seq_len),
    );
    let (mut tokens, mut used) = (Vec::new(), Vec::new());
    for (slot, &start) in starts.iter().enumerate() {
        let row = (slot / num_slots * host.seq_len) as i32;
        tokens.extend((0..l).map(|inside| if start < 0 { 0 } else { row + start + inside }));
        used.push(f64::from(u8::from(start >= 0)));
    }
    let len = tokens.len();
    let used = TensorData::new(used, [starts.len(), 1, 1, 1]).convert_dtype(dtype);
    (
        ints(tokens, [len], device),
        Tensor::from_data(used, (device, dtype)),
    )
}

/// See [`crate::nsa_blocks`].
pub fn nsa_blocks<B: Backend>(
    qkv: FloatTensor<B>,
    positions: [FloatTensor<B>; 2],
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    blocks: NsaBlocks,
) -> FloatTensor<B> {
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
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    blocks: NsaBlocks,
    dy: FloatTensor<B>,
) -> [FloatTensor<B>; 3] {
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
pub fn nsa_mean_pool<B: Backend>(
    qkv: FloatTensor<B>,
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    blocks: NsaBlocks,
) -> FloatTensor<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let (l, d) = (blocks.compress_block_size, qkv.dims()[3]);
    let zeros = Tensor::<B, 2>::zeros([l, d], (&qkv.device(), qkv.dtype()));
    let positions = [zeros.clone(), zeros].map(primitive);
    let all = nsa_blocks::<B>(primitive(qkv), positions, documents, spec, blocks);
    let all = tensor::<B, 3>(all);
    let rows = all.dims()[1];
    let mean = all.reshape([2, rows, l, d]).mean_dim(2);
    primitive(mean.reshape([2, rows, d]).cast(dtype))
}

/// `dqkv` of [`nsa_mean_pool`].
pub fn nsa_mean_pool_backward<B: Backend>(
    dims: [usize; 4],
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    blocks: NsaBlocks,
    dy: FloatTensor<B>,
) -> FloatTensor<B> {
    let (dy, dtype) = upcast::<B, 3>(dy);
    let (l, [_, rows, d]) = (blocks.compress_block_size, dy.dims());
    let dy = (dy / l as f64)
        .reshape([2, rows, 1, d])
        .expand([2, rows, l, d])
        .reshape([2, rows, l * d]);
    let [dqkv, _, _] = nsa_blocks_backward::<B>(dims, documents, spec, blocks, primitive(dy));
    primitive(tensor::<B, 4>(dqkv).cast(dtype))
}

/// Compressed keys and values at their blocks' last tokens, and the mask that shows only those.
struct Placed<B: Backend> {
    qkv: Tensor<B, 4>,
    expire: Tensor<B, 3, Int>,
    /// Slot of the block that ends at each token (0 where none), `[batch * seq_len]`.
    slots: Tensor<B, 1, Int>,
    /// Whether one ends there, `[batch * seq_len, 1]`.
    used: Tensor<B, 2>,
}

fn place<B: Backend>(
    qkv: Tensor<B, 4>,
    compressed: Tensor<B, 3>,
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    blocks: NsaBlocks,
) -> Placed<B> {
    let [batch, n, _, d] = qkv.dims();
    let (device, dtype) = (qkv.device(), qkv.dtype());
    let kv_heads = spec.num_kv_heads;
    let host = Host::new::<B>(documents);
    let num_slots = blocks.num_slots(n);
    let (mut slots, mut used) = (vec![0; batch * n], vec![0.0; batch * n]);
    // A key whose expiry is its own position is never seen.
    let mut expire: Vec<i32> = (0..batch * kv_heads).flat_map(|_| 0..n as i32).collect();
    for (slot, &start) in host.slot_starts(blocks).iter().enumerate() {
        if start >= 0 {
            let row = slot / num_slots;
            let last = start as usize + blocks.compress_block_size - 1;
            slots[row * n + last] = slot as i32;
            used[row * n + last] = 1.0;
            for kv_head in 0..kv_heads {
                expire[(row * kv_heads + kv_head) * n + last] = host.end[row * n + last];
            }
        }
    }
    let slots = ints::<B, 1>(slots, [batch * n], &device);
    let used = TensorData::new(used, [batch * n, 1]).convert_dtype(dtype);
    let used = Tensor::<B, 2>::from_data(used, (&device, dtype));
    let [k, v] = [0, 1].map(|which| {
        let x = compressed.clone().narrow(0, which, 1);
        let x = x.reshape([batch * num_slots, kv_heads * d]);
        (x.select(0, slots.clone()) * used.clone()).reshape([batch, n, kv_heads, d])
    });
    let [q, _, _] = split_heads(qkv, kv_heads);
    Placed {
        qkv: Tensor::cat(vec![q, k, v], 2),
        expire: ints(expire, [batch, kv_heads, n], &device),
        slots,
        used,
    }
}

fn no_bias<B: Backend>(expire: &Tensor<B, 3, Int>, dtype: DType) -> FloatTensor<B> {
    primitive(Tensor::<B, 3>::zeros(
        expire.dims(),
        (&expire.device(), dtype),
    ))
}

fn selection<B: Backend>(expire: &Tensor<B, 3, Int>) -> DmaSelection<B> {
    DmaSelection {
        expire: expire.clone().into_primitive(),
        lists: Vec::new(),
    }
}

/// See [`crate::nsa_compressed_attention`].
pub fn nsa_compressed_attention<B: Backend>(
    qkv: FloatTensor<B>,
    compressed: FloatTensor<B>,
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    blocks: NsaBlocks,
) -> NsaCompressed<B> {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let (compressed, _) = upcast::<B, 3>(compressed);
    let compute = qkv.dtype();
    let placed = place::<B>(qkv, compressed, documents, spec, blocks);
    let output = dma_attention::<B>(
        primitive(placed.qkv.clone()),
        no_bias(&placed.expire, compute),
        documents,
        &selection(&placed.expire),
        spec,
    );
    let hidden = hidden_by_expiry::<B>(documents, placed.expire.into_primitive());
    let p = group_probabilities::<B>(primitive(placed.qkv), hidden, spec, output.lse.clone());
    let block_indices = select::<B>(p, documents, blocks);
    let o = tensor::<B, 4>(output.o).cast(dtype);
    NsaCompressed {
        output: AttentionOutput {
            o: primitive(o),
            lse: output.lse,
            o_rest: None,
        },
        block_indices,
    }
}

/// Chooses blocks from the probabilities `[batch, num_kv_heads, seq_len, seq_len]` of keys at their blocks' last tokens.
fn select<B: Backend>(
    p: Tensor<B, 4>,
    documents: &DocumentBounds<B>,
    blocks: NsaBlocks,
) -> IntTensor<B> {
    let [batch, kv_heads, n, _] = p.dims();
    let device = p.device();
    let host = Host::new::<B>(documents);
    let p: Vec<f64> = p.into_data().iter::<f64>().collect();
    let k = blocks.num_selected_blocks;
    let (l, s) = (blocks.compress_block_size, blocks.compress_stride);
    let mut chosen = vec![0i32; batch * n * kv_heads * k];
    for (at, chosen) in chosen.chunks_exact_mut(k).enumerate() {
        let (token, kv_head) = (at / kv_heads, at % kv_heads);
        let (row, i) = (token / n, token % n);
        let start = host.start[token] as usize;
        let own = (i - start) / blocks.select_block_size;
        let p = &p[((row * kv_heads + kv_head) * n + i) * n..][..n];
        let importance: Vec<f32> = (0..=own)
            .map(|block| {
                let of_key = |c: usize| {
                    let key = start + c * s + l - 1;
                    overlap_weight(blocks, c, block) as f64 * p[key]
                };
                let seen = (0..).take_while(|c| start + c * s + l - 1 <= i);
                seen.map(of_key).sum::<f64>() as f32
            })
            .collect();
        choose_blocks(&importance, own, chosen);
    }
    ints::<B, 4>(chosen, [batch, n, kv_heads, k], &device).into_primitive()
}

/// `[dqkv, dcompressed]` of [`nsa_compressed_attention`].
pub fn nsa_compressed_attention_backward<B: Backend>(
    qkv: FloatTensor<B>,
    compressed: FloatTensor<B>,
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    blocks: NsaBlocks,
    output: AttentionOutput<B>,
    d_o: FloatTensor<B>,
) -> [FloatTensor<B>; 2] {
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let (compressed, compressed_dtype) = upcast::<B, 3>(compressed);
    let compute = qkv.dtype();
    let [batch, n, _, d] = qkv.dims();
    let kv_heads = spec.num_kv_heads;
    let num_slots = blocks.num_slots(n);
    let placed = place::<B>(qkv, compressed, documents, spec, blocks);
    let (d_placed, _) = dma_attention_backward::<B>(
        primitive(placed.qkv),
        no_bias(&placed.expire, compute),
        documents,
        &selection(&placed.expire),
        spec,
        output,
        d_o,
    );
    let [dq, dk, dv] = split_heads(tensor::<B, 4>(d_placed), kv_heads);
    let d_compressed = [dk.clone(), dv.clone()].map(|dx| {
        let zeros =
            Tensor::<B, 2>::zeros([batch * num_slots, kv_heads * d], (&dx.device(), compute));
        let dx = dx.reshape([batch * n, kv_heads * d]) * placed.used.clone();
        zeros
            .select_assign(0, placed.slots.clone(), dx, IndexingUpdateOp::Add)
            .reshape([1, batch * num_slots * kv_heads, d])
    });
    let dqkv = Tensor::cat(vec![dq, dk.zeros_like(), dv.zeros_like()], 2);
    [
        primitive(dqkv.cast(dtype)),
        primitive(Tensor::cat(d_compressed.into(), 0).cast(compressed_dtype)),
    ]
}

/// True where a query does not attend to a key, `[batch, num_kv_heads, 1, seq_len, seq_len]`.
fn hidden_by_blocks<B: Backend>(
    block_indices: IntTensor<B>,
    documents: &DocumentBounds<B>,
    blocks: NsaBlocks,
) -> Tensor<B, 5, Bool> {
    let indices = Tensor::<B, 4, Int>::from_primitive(block_indices);
    let [batch, n, kv_heads, k] = indices.dims();
    let device = indices.device();
    let indices: Vec<i64> = indices.into_data().iter::<i64>().collect();
    let host = Host::new::<B>(documents);
    let mut hidden = vec![true; batch * kv_heads * n * n];
    for (at, chosen) in indices.chunks_exact(k).enumerate() {
        let (token, kv_head) = (at / kv_heads, at % kv_heads);
        let (row, i) = (token / n, token % n);
        let start = host.start[token] as usize;
        let hidden = &mut hidden[((row * kv_heads + kv_head) * n + i) * n..][..n];
        for (j, hidden) in hidden.iter_mut().enumerate().take(i + 1).skip(start) {
            let block = ((j - start) / blocks.select_block_size) as i64;
            *hidden = !chosen.contains(&block);
        }
    }
    Tensor::from_data(TensorData::new(hidden, [batch, kv_heads, 1, n, n]), &device)
}

/// See [`crate::nsa_selected_attention`].
pub fn nsa_selected_attention<B: Backend>(
    qkv: FloatTensor<B>,
    block_indices: IntTensor<B>,
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    blocks: NsaBlocks,
) -> AttentionOutput<B> {
    let hidden = hidden_by_blocks::<B>(block_indices, documents, blocks);
    masked_attention::<B>(qkv, hidden, spec)
}

/// `dqkv` of [`nsa_selected_attention`].
pub fn nsa_selected_attention_backward<B: Backend>(
    qkv: FloatTensor<B>,
    block_indices: IntTensor<B>,
    documents: &DocumentBounds<B>,
    spec: AttentionSpec,
    blocks: NsaBlocks,
    output: AttentionOutput<B>,
    d_o: FloatTensor<B>,
) -> FloatTensor<B> {
    let hidden = hidden_by_blocks::<B>(block_indices, documents, blocks);
    masked_attention_backward::<B>(qkv, hidden, spec, output, d_o)
}

/// Gates `[batch, seq_len, num_heads, 3]` from logits `[batch, seq_len, num_heads * 3]` and bias.
fn gates<B: Backend>(
    logits: FloatTensor<B>,
    bias: FloatTensor<B>,
    num_heads: usize,
) -> Tensor<B, 4> {
    let (logits, _) = upcast::<B, 3>(logits);
    let (bias, _) = upcast::<B, 1>(bias);
    let [batch, n, width] = logits.dims();
    sigmoid(logits + bias.reshape([1, 1, width])).reshape([batch, n, num_heads, 3])
}

/// See [`crate::nsa_gates`].
pub fn nsa_gates<B: Backend>(
    branches: [FloatTensor<B>; 3],
    logits: FloatTensor<B>,
    bias: FloatTensor<B>,
) -> FloatTensor<B> {
    let dtype = branches[0].dtype();
    let [a, b, c] = branches.map(|x| upcast::<B, 4>(x).0);
    let gates = gates::<B>(logits, bias, a.dims()[2]);
    let gate = |branch| gates.clone().narrow(3, branch, 1);
    primitive((a * gate(0) + b * gate(1) + c * gate(2)).cast(dtype))
}

/// Gradients of the branches, the logits and the bias of [`nsa_gates`].
pub fn nsa_gates_backward<B: Backend>(
    branches: [FloatTensor<B>; 3],
    logits: FloatTensor<B>,
    bias: FloatTensor<B>,
    d_o: FloatTensor<B>,
) -> [FloatTensor<B>; 5] {
    let (logits_dtype, bias_dtype) = (logits.dtype(), bias.dtype());
    let (d_o, dtype) = upcast::<B, 4>(d_o);
    let [batch, n, num_heads, _] = d_o.dims();
    let gates = gates::<B>(logits, bias, num_heads);
    let branches = branches.map(|x| upcast::<B, 4>(x).0);
    let d_gates = branches.map(|x| (x * d_o.clone()).sum_dim(3));
    let d_gates = Tensor::cat(d_gates.into(), 3);
    let slope = gates.clone() * (gates.ones_like() - gates.clone());
    let d_logits = (d_gates * slope).reshape([batch, n, num_heads * 3]);
    let d_bias = d_logits
        .clone()
        .sum_dim(0)
        .sum_dim(1)
        .reshape([num_heads * 3]);
    let of_branch = |c| primitive((d_o.clone() * gates.clone().narrow(3, c, 1)).cast(dtype));
    [
        of_branch(0),
        of_branch(1),
        of_branch(2),
        primitive(d_logits.cast(logits_dtype)),
        primitive(d_bias.cast(bias_dtype)),
    ]
}
