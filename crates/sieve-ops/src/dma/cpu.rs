//! Dynamic mask attention's ops on the CPU. They implement the methods of `DeviceBackend` with the same names.
use super::rank::{Recency, ranks};
use super::{DmaCall, DmaOrder, DmaScoresCall, DmaSelection, reference};
use crate::attention::cpu::{attention_shape, backward, contiguous_bounds, documents, forward};
use crate::device::{contiguous, floats, from_vec, ints, unless_f32, zeros_like};
use crate::{AttentionOutput, DocumentBounds};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use sieve_core::{DmaWindow, KeepOLow};

/// The packed tensor, w_dt and a.
fn operands(call: &DmaScoresCall<Flex>) -> [FlexTensor; 3] {
    [call.qkv.clone(), call.w_dt.clone(), call.a.clone()].map(contiguous)
}

/// One score a key, f32 `[batch, num_kv_heads, seq_len]`, from the value heads of the packed tensor.
pub(crate) fn dma_scores(call: &DmaScoresCall<Flex>) -> FlexTensor {
    unless_f32!(&call.qkv, "dma_scores": reference::dma_scores(call));
    let [qkv, w, a] = operands(call);
    let shape = attention_shape(&qkv, call.spec);
    let mut z = vec![0.0; shape.batch * shape.num_kv_heads * shape.seq_len];
    sieve_cpu::dma_scores_forward(*shape, floats(&qkv), floats(&w), floats(&a), &mut z);
    from_vec(z, [shape.batch, shape.num_kv_heads, shape.seq_len])
}

pub(crate) fn dma_ranks(call: &DmaScoresCall<Flex>, recency: Option<Recency<Flex>>) -> FlexTensor {
    ranks(dma_scores(call), recency)
}

/// `[dqkv, dw_dt, da]`: the gradient of the value heads is added to the `dqkv` that comes in, in place if nothing else
/// holds it.
pub(crate) fn dma_scores_backward(call: &DmaScoresCall<Flex>, dz: FlexTensor, dqkv: FlexTensor) -> [FlexTensor; 3] {
    unless_f32!(&call.qkv, "dma_scores_backward": reference::dma_scores_backward(call, dz, dqkv));
    let [qkv, w, a] = operands(call);
    let [dz, mut dqkv] = [dz, dqkv].map(contiguous);
    let (mut dw, mut da) = (zeros_like(&w), zeros_like(&a));
    sieve_cpu::dma_scores_backward(
        *attention_shape(&qkv, call.spec),
        floats(&qkv),
        floats(&w),
        floats(&a),
        floats(&dz),
        dqkv.storage_mut(),
        &mut dw,
        &mut da,
    );
    [dqkv, from_vec(dw, w.shape()), from_vec(da, a.shape())]
}

/// The mask `expire`: for each key the first query that no longer sees it. Keys first expire by rank alone;
/// `extend_expire` then lets every key expire `local_window_size` queries later. Attention goes by rising position.
pub(crate) fn dma_select(
    rank: FlexTensor,
    bounds: &DocumentBounds<Flex>,
    window: DmaWindow,
    _order: DmaOrder<Flex>,
) -> DmaSelection<Flex> {
    unless_f32!(&rank, "dma_select": reference::dma_select::<Flex>(rank, bounds, window));
    let (rank, bounds) = (contiguous(rank), contiguous_bounds(bounds));
    let shape = rank.shape();
    let mut expire = vec![0i32; shape.num_elements()];
    let documents = documents(&bounds);
    sieve_cpu::dma_select(floats(&rank), documents, shape[0], shape[1], shape[2], window.num_ranked(), &mut expire);
    let local = window.local_window_size;
    sieve_cpu::extend_expire(&mut expire, documents, shape[1], shape[2], local);
    DmaSelection::of_expire(from_vec(expire, shape))
}

pub(crate) fn dma_attention(call: &DmaCall<Flex>, _o_low: KeepOLow) -> AttentionOutput<Flex> {
    unless_f32!(&call.qkv, call.attention.spec.num_heads, "dma_attention": reference::dma_attention(call));
    let [qkv, delta, expire] = keys(call);
    let shape = attention_shape(&qkv, call.attention.spec);
    forward(&qkv, shape, mask(&delta, &expire), &call.attention.documents)
}

/// `[dqkv, ddelta]`, packed as `qkv` and shaped as `delta`; of `output` only o and lse are read.
pub(crate) fn dma_attention_backward(
    call: &DmaCall<Flex>,
    output: AttentionOutput<Flex>,
    d_o: FlexTensor,
) -> [FlexTensor; 2] {
    unless_f32!(&call.qkv, call.attention.spec.num_heads, "dma_attention_backward":
        reference::dma_attention_backward(call, output, d_o));
    let [qkv, delta, expire] = keys(call);
    let mut d_delta = zeros_like(&delta);
    let (shape, bounds) = (attention_shape(&qkv, call.attention.spec), &call.attention.documents);
    let (mask, operands) = (mask(&delta, &expire), [output.o, output.lse, d_o]);
    let dqkv = backward(&qkv, shape, mask, bounds, operands, Some(&mut d_delta));
    [dqkv, from_vec(d_delta, delta.shape())]
}

/// The packed tensor, the keys' biases, and `expire`: the first query that no longer sees each key.
fn keys(call: &DmaCall<Flex>) -> [FlexTensor; 3] {
    [call.qkv.clone(), call.delta.clone(), call.selection.expire.clone()].map(contiguous)
}

fn mask<'a>(delta: &'a FlexTensor, expire: &'a FlexTensor) -> sieve_cpu::Mask<'a> {
    sieve_cpu::Mask::Expire { expire: ints(expire), delta: floats(delta) }
}
