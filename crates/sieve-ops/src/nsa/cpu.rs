//! NSA on the CPU; f32 takes the kernels of `sieve-cpu`, any other dtype the reference.
mod gates;

use super::{NsaCall, NsaCompressed, NsaSelected, reference};
use crate::attention::AttentionOutput;
use crate::attention::cpu::{attention_shape, contiguous_bounds, documents, empty_output, output_of, shape_of};
use crate::device::flex::{contiguous, floats, from_vec, ints, is_f32, plain, plain_scores, zeros_like};
use crate::device::paths::scores;
use burn::tensor::{TensorData, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use sieve_cpu::{AttentionShape, NsaBlocks};

/// Compressed keys of a batch.
fn rows(shape: AttentionShape, blocks: NsaBlocks) -> usize {
    shape.batch * blocks.num_slots(shape.seq_len) * shape.num_kv_heads
}

pub(crate) fn nsa_blocks(qkv: FlexTensor, positions: [FlexTensor; 2], call: &NsaCall<Flex>) -> FlexTensor {
    if !is_f32(&qkv) {
        return plain("nsa_blocks", || reference::nsa_blocks(qkv, positions, call));
    }
    let (qkv, positions) = (contiguous(qkv), positions.map(contiguous));
    let bounds = contiguous_bounds(&call.documents);
    let shape = attention_shape(&qkv, call.spec);
    let width = call.blocks.compress_block_size * shape.head_dim;
    let rows = rows(shape, call.blocks);
    let mut out = vec![0.0; 2 * rows * width];
    sieve_cpu::nsa_blocks_forward(
        shape,
        call.blocks,
        floats(&qkv),
        documents(&bounds),
        positions.each_ref().map(floats),
        &mut out,
    );
    from_vec(out, [2, rows, width])
}

pub(crate) fn nsa_mean_pool(qkv: FlexTensor, call: &NsaCall<Flex>) -> FlexTensor {
    if !is_f32(&qkv) {
        return plain("nsa_mean_pool", || reference::nsa_mean_pool(qkv, call));
    }
    let (qkv, bounds) = (contiguous(qkv), contiguous_bounds(&call.documents));
    let shape = attention_shape(&qkv, call.spec);
    let rows = rows(shape, call.blocks);
    let mut out = vec![0.0; 2 * rows * shape.head_dim];
    let documents = documents(&bounds);
    sieve_cpu::nsa_mean_pool_forward(shape, call.blocks, floats(&qkv), documents, &mut out);
    from_vec(out, [2, rows, shape.head_dim])
}

pub(crate) fn nsa_compressed_attention(
    qkv: FlexTensor,
    compressed: FlexTensor,
    call: &NsaCall<Flex>,
) -> NsaCompressed<Flex> {
    if !is_f32(&qkv) {
        return plain_scores("nsa_compressed_attention", scores(&qkv, call.spec.num_heads), || {
            reference::nsa_compressed_attention(qkv, compressed, call)
        });
    }
    let [qkv, compressed] = [qkv, compressed].map(contiguous);
    let bounds = contiguous_bounds(&call.documents);
    let shape = attention_shape(&qkv, call.spec);
    let [mut o, mut lse] = empty_output(shape, shape.head_dim);
    let (tokens, per_query) = ([shape.batch, shape.seq_len], call.blocks.num_selected_blocks);
    let chosen = [tokens[0], tokens[1], shape.num_kv_heads, per_query];
    let mut block_indices = vec![0i32; chosen.iter().product()];
    sieve_cpu::nsa_compressed_attention_forward(
        shape,
        call.blocks,
        floats(&qkv),
        documents(&bounds),
        floats(&compressed),
        &mut o,
        &mut lse,
        &mut block_indices,
    );
    NsaCompressed {
        output: output_of(shape, shape.head_dim, [o, lse]),
        block_indices: FlexTensor::from_data(TensorData::new(block_indices, chosen)),
    }
}

pub(crate) fn nsa_selected_attention(
    qkv: FlexTensor,
    block_indices: FlexTensor,
    call: &NsaCall<Flex>,
) -> NsaSelected<Flex> {
    if !is_f32(&qkv) {
        return plain_scores("nsa_selected_attention", scores(&qkv, call.spec.num_heads), || {
            reference::nsa_selected_attention(qkv, block_indices, call)
        });
    }
    let [qkv, block_indices] = [qkv, block_indices].map(contiguous);
    let bounds = contiguous_bounds(&call.documents);
    let shape = attention_shape(&qkv, call.spec);
    let [mut o, mut lse] = empty_output(shape, shape.head_dim);
    sieve_cpu::nsa_selected_attention_forward(
        shape,
        call.blocks,
        floats(&qkv),
        documents(&bounds),
        ints(&block_indices),
        &mut o,
        &mut lse,
    );
    NsaSelected::without_lists(output_of(shape, shape.head_dim, [o, lse]))
}

pub(crate) fn nsa_gates(branches: [FlexTensor; 3], logits: FlexTensor, bias: FlexTensor) -> FlexTensor {
    if !is_f32(&logits) {
        return plain("nsa_gates", || reference::nsa_gates::<Flex>(branches, logits, bias));
    }
    gates::forward(branches, logits, bias)
}

pub(crate) fn nsa_blocks_backward(dims: [usize; 4], call: &NsaCall<Flex>, dy: FlexTensor) -> [FlexTensor; 3] {
    if !is_f32(&dy) {
        return plain("nsa_blocks_backward", || reference::nsa_blocks_backward(dims, call, dy));
    }
    let (dy, bounds) = (contiguous(dy), contiguous_bounds(&call.documents));
    let (l, d) = (call.blocks.compress_block_size, dims[3]);
    let mut dqkv = vec![0.0; dims.iter().product()];
    let (mut dk, mut dv) = (vec![0.0; l * d], vec![0.0; l * d]);
    sieve_cpu::nsa_blocks_backward(
        shape_of(dims, call.spec),
        call.blocks,
        documents(&bounds),
        floats(&dy),
        &mut dqkv,
        [&mut dk, &mut dv],
    );
    [from_vec(dqkv, dims), from_vec(dk, [l, d]), from_vec(dv, [l, d])]
}

pub(crate) fn nsa_mean_pool_backward(dims: [usize; 4], call: &NsaCall<Flex>, dy: FlexTensor) -> FlexTensor {
    if !is_f32(&dy) {
        return plain("nsa_mean_pool_backward", || {
            reference::nsa_mean_pool_backward(dims, call, dy)
        });
    }
    let (dy, bounds) = (contiguous(dy), contiguous_bounds(&call.documents));
    let mut dqkv = vec![0.0; dims.iter().product()];
    let (shape, documents) = (shape_of(dims, call.spec), documents(&bounds));
    sieve_cpu::nsa_mean_pool_backward(shape, call.blocks, documents, floats(&dy), &mut dqkv);
    from_vec(dqkv, dims)
}

pub(crate) fn nsa_compressed_attention_backward(
    qkv: FlexTensor,
    compressed: FlexTensor,
    call: &NsaCall<Flex>,
    output: AttentionOutput<Flex>,
    d_o: FlexTensor,
) -> [FlexTensor; 2] {
    if !is_f32(&qkv) {
        return plain_scores(
            "nsa_compressed_attention_backward",
            scores(&qkv, call.spec.num_heads),
            || reference::nsa_compressed_attention_backward(qkv, compressed, call, output, d_o),
        );
    }
    let [qkv, compressed] = [qkv, compressed].map(contiguous);
    let [o, lse, d_o] = [output.o, output.lse, d_o].map(contiguous);
    let bounds = contiguous_bounds(&call.documents);
    let (mut dqkv, mut d_compressed) = (zeros_like(&qkv), zeros_like(&compressed));
    sieve_cpu::nsa_compressed_attention_backward(
        attention_shape(&qkv, call.spec),
        call.blocks,
        floats(&qkv),
        documents(&bounds),
        floats(&compressed),
        floats(&o),
        floats(&lse),
        floats(&d_o),
        &mut dqkv,
        &mut d_compressed,
    );
    [from_vec(dqkv, qkv.shape()), from_vec(d_compressed, compressed.shape())]
}

pub(crate) fn nsa_selected_attention_backward(
    qkv: FlexTensor,
    block_indices: FlexTensor,
    call: &NsaCall<Flex>,
    selected: NsaSelected<Flex>,
    d_o: FlexTensor,
) -> FlexTensor {
    if !is_f32(&qkv) {
        return plain_scores(
            "nsa_selected_attention_backward",
            scores(&qkv, call.spec.num_heads),
            || reference::nsa_selected_attention_backward(qkv, block_indices, call, selected, d_o),
        );
    }
    let [qkv, block_indices] = [qkv, block_indices].map(contiguous);
    let AttentionOutput { o, lse, .. } = selected.output;
    let [o, lse, d_o] = [o, lse, d_o].map(contiguous);
    let bounds = contiguous_bounds(&call.documents);
    let mut dqkv = zeros_like(&qkv);
    sieve_cpu::nsa_selected_attention_backward(
        attention_shape(&qkv, call.spec),
        call.blocks,
        floats(&qkv),
        documents(&bounds),
        ints(&block_indices),
        floats(&o),
        floats(&lse),
        floats(&d_o),
        &mut dqkv,
    );
    from_vec(dqkv, qkv.shape())
}

pub(crate) fn nsa_gates_backward(
    branches: [FlexTensor; 3],
    logits: FlexTensor,
    bias: FlexTensor,
    d_o: FlexTensor,
) -> [FlexTensor; 5] {
    if !is_f32(&logits) {
        return plain("nsa_gates_backward", || {
            reference::nsa_gates_backward::<Flex>(branches, logits, bias, d_o)
        });
    }
    gates::backward(branches, logits, bias, d_o)
}
