//! Attention of the compressed and the selected branch.
//!
//! A compressed key takes the position of its block's last token. The compressed branch is then masked attention in a
//! row of tokens; most of these tokens have no key.
use crate::attention::reference::{masked_attention, masked_attention_backward};
use crate::chosen::{ChoiceCall, reference::choose_key_blocks};
use crate::dma::reference::{dma_attention, dma_attention_backward};
use crate::documents::HostBounds;
use crate::tensors::{Float, Ints, ints, primitive, split_heads, tensor, upcast};
use crate::{
    AttentionCall, AttentionOutput, DmaCall, DmaSelection, DocumentBounds, NsaCall, NsaCompressed, NsaSelected,
};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, IndexingUpdateOp, Int, Tensor, TensorData};
use sieve_core::BlockChoice;
use sieve_cpu::NsaBlocks;

/// Compressed keys and values at the positions of their blocks' last tokens, and the mask that hides all other
/// positions.
struct Placed<B: Backend> {
    qkv: Tensor<B, 4>,
    expire: Tensor<B, 3, Int>,
    /// For each token the slot of the block that ends there, 0 where none ends, `[batch * seq_len]`.
    slots: Tensor<B, 1, Int>,
    /// 1 where a block ends at the token, else 0, `[batch * seq_len, 1]`.
    used: Tensor<B, 2>,
}

/// Puts each compressed key and value at the position of its block's last token.
fn place<B: Backend>(qkv: Tensor<B, 4>, compressed: Tensor<B, 3>, call: &NsaCall<B>) -> Placed<B> {
    let (documents, spec, blocks) = (&call.documents, call.spec, call.blocks);
    let [batch, n, _, d] = qkv.dims();
    let (device, dtype) = (qkv.device(), qkv.dtype());
    let kv_heads = spec.num_kv_heads;
    let host = HostBounds::new::<B>(documents);
    let num_slots = blocks.num_slots(n);
    let (mut slots, mut used) = (vec![0; batch * n], vec![0.0; batch * n]);
    // `expire` equal to the key's position hides the key from all queries.
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
    Placed { qkv: Tensor::cat(vec![q, k, v], 2), expire: ints(expire, [batch, kv_heads, n], &device), slots, used }
}

/// The call of attention over the placed keys, without a bias.
fn placed_call<B: Backend>(placed: &Placed<B>, call: &NsaCall<B>) -> DmaCall<B> {
    let expire = placed.expire.clone();
    let no_bias = Tensor::<B, 3>::zeros(expire.dims(), (&expire.device(), placed.qkv.dtype()));
    DmaCall {
        qkv: primitive(placed.qkv.clone()),
        delta: primitive(no_bias),
        selection: DmaSelection::of_expire(expire.into_primitive()),
        attention: AttentionCall::new(call.documents.clone(), call.spec),
    }
}

/// Reference of [`crate::nsa_compressed_attention`].
pub fn nsa_compressed_attention<B: Backend>(
    qkv: Float<B>,
    compressed: Float<B>,
    call: &NsaCall<B>,
) -> NsaCompressed<B> {
    compressed_attention(qkv, compressed, call, dma_attention)
}

/// Like [`nsa_compressed_attention`], with `attend` for the attention over the placed keys.
pub(crate) fn compressed_attention<B: Backend>(
    qkv: Float<B>,
    compressed: Float<B>,
    call: &NsaCall<B>,
    attend: impl FnOnce(&DmaCall<B>) -> AttentionOutput<B>,
) -> NsaCompressed<B> {
    let choice = ChoiceCall {
        documents: call.documents.clone(),
        spec: call.spec,
        choice: BlockChoice::nsa(call.blocks),
        first: call.first,
    };
    let block_indices = choose_key_blocks::<B>(qkv.clone(), compressed.clone(), &choice);
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let (compressed, _) = upcast::<B, 3>(compressed);
    let placed = place::<B>(qkv, compressed, call);
    let output = attend(&placed_call(&placed, call));
    let o = tensor::<B, 4>(output.o).cast(dtype);
    NsaCompressed { output: AttentionOutput::new(primitive(o), output.lse), block_indices }
}

/// Gradients `[dqkv, dcompressed]` of [`nsa_compressed_attention`].
pub fn nsa_compressed_attention_backward<B: Backend>(
    qkv: Float<B>,
    compressed: Float<B>,
    call: &NsaCall<B>,
    output: AttentionOutput<B>,
    d_o: Float<B>,
) -> [Float<B>; 2] {
    let gradient = |call: &DmaCall<B>| dma_attention_backward(call, output, d_o);
    compressed_attention_backward(qkv, compressed, call, gradient)
}

/// As [`nsa_compressed_attention_backward`]; `gradient` computes the gradients of the attention over the placed keys.
pub(crate) fn compressed_attention_backward<B: Backend>(
    qkv: Float<B>,
    compressed: Float<B>,
    call: &NsaCall<B>,
    gradient: impl FnOnce(&DmaCall<B>) -> [Float<B>; 2],
) -> [Float<B>; 2] {
    let (spec, blocks) = (call.spec, call.blocks);
    let (qkv, dtype) = upcast::<B, 4>(qkv);
    let (compressed, compressed_dtype) = upcast::<B, 3>(compressed);
    let compute = qkv.dtype();
    let [batch, n, _, d] = qkv.dims();
    let kv_heads = spec.num_kv_heads;
    let num_slots = blocks.num_slots(n);
    let placed = place::<B>(qkv, compressed, call);
    let [d_placed, _] = gradient(&placed_call(&placed, call));
    let [dq, dk, dv] = split_heads(tensor::<B, 4>(d_placed), kv_heads);
    let d_compressed = [dk.clone(), dv.clone()].map(|dx| {
        let zeros = Tensor::<B, 2>::zeros([batch * num_slots, kv_heads * d], (&dx.device(), compute));
        let dx = dx.reshape([batch * n, kv_heads * d]) * placed.used.clone();
        zeros.select_assign(0, placed.slots.clone(), dx, IndexingUpdateOp::Add).reshape([
            1,
            batch * num_slots * kv_heads,
            d,
        ])
    });
    let dqkv = Tensor::cat(vec![dq, dk.zeros_like(), dv.zeros_like()], 2);
    [primitive(dqkv.cast(dtype)), primitive(Tensor::cat(d_compressed.into(), 0).cast(compressed_dtype))]
}

/// True where a query does not attend to a key, `[batch, num_kv_heads, 1, seq_len, seq_len]`.
fn hidden_by_blocks<B: Backend>(
    block_indices: Ints<B>,
    documents: &DocumentBounds<B>,
    blocks: NsaBlocks,
) -> Tensor<B, 5, Bool> {
    let indices = Tensor::<B, 4, Int>::from_primitive(block_indices);
    let [batch, n, kv_heads, num_chosen] = indices.dims();
    let device = indices.device();
    let indices: Vec<i64> = indices.into_data().iter::<i64>().collect();
    let host = HostBounds::new::<B>(documents);
    let mut hidden = vec![true; batch * kv_heads * n * n];
    for (list, chosen) in indices.chunks_exact(num_chosen).enumerate() {
        let (token, kv_head) = (list / kv_heads, list % kv_heads);
        let (row, query) = (token / n, token % n);
        let start = host.start[token] as usize;
        let hidden = &mut hidden[((row * kv_heads + kv_head) * n + query) * n..][..n];
        for (key, hidden) in hidden.iter_mut().enumerate().take(query + 1).skip(start) {
            let block = ((key - start) / blocks.select_block_size) as i64;
            *hidden = !chosen.contains(&block);
        }
    }
    Tensor::from_data(TensorData::new(hidden, [batch, kv_heads, 1, n, n]), &device)
}

/// Reference of [`crate::nsa_selected_attention`].
pub fn nsa_selected_attention<B: Backend>(qkv: Float<B>, block_indices: Ints<B>, call: &NsaCall<B>) -> NsaSelected<B> {
    let hidden = hidden_by_blocks::<B>(block_indices, &call.documents, call.blocks);
    let delta = None;
    NsaSelected::without_lists(masked_attention::<B>(qkv, delta, hidden, call.spec))
}

/// Gradient `dqkv` of [`nsa_selected_attention`].
pub fn nsa_selected_attention_backward<B: Backend>(
    qkv: Float<B>,
    block_indices: Ints<B>,
    call: &NsaCall<B>,
    selected: NsaSelected<B>,
    d_o: Float<B>,
) -> Float<B> {
    let hidden = hidden_by_blocks::<B>(block_indices, &call.documents, call.blocks);
    let delta = None;
    let [dqkv, _] = masked_attention_backward::<B>(qkv, delta, hidden, call.spec, selected.output, d_o);
    dqkv
}
