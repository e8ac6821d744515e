//! NSA on the CPU: the softmax branches run on the attention of `sieve-cpu`, which never holds an n x n tensor;
//! pooling, placing and gates are plain Burn operations.
use super::{NsaCall, NsaCompressed, NsaSelected, reference};
use crate::attention::cpu::{backward, forward};
use crate::attention::{AttentionCall, AttentionOutput};
use crate::device::flex::{contiguous, ints, is_f32, plain_scores};
use crate::device::paths::scores;
use crate::dma::cpu::{dma_attention, dma_attention_backward};
use burn_flex::{Flex, FlexTensor};
use sieve_core::{KeepOLow, NsaBlocks};
use sieve_cpu::{ChosenBlocks, Mask};

pub(crate) use super::reference::{nsa_blocks, nsa_blocks_backward, nsa_mean_pool, nsa_mean_pool_backward};

pub(crate) fn nsa_compressed_attention(
    qkv: FlexTensor,
    compressed: FlexTensor,
    call: &NsaCall<Flex>,
) -> NsaCompressed<Flex> {
    let attend = |call: &_| dma_attention(call, KeepOLow::Never);
    reference::compressed_attention(qkv, compressed, call, attend)
}

pub(crate) fn nsa_compressed_attention_backward(
    qkv: FlexTensor,
    compressed: FlexTensor,
    call: &NsaCall<Flex>,
    output: AttentionOutput<Flex>,
    d_o: FlexTensor,
) -> [FlexTensor; 2] {
    if !is_f32(&qkv) {
        // Keys are placed in f32, whatever the type of o and its gradient.
        return reference::nsa_compressed_attention_backward(qkv, compressed, call, output, d_o);
    }
    let gradient = |call: &_| dma_attention_backward(call, output, d_o);
    reference::compressed_attention_backward(qkv, compressed, call, gradient)
}

/// The mask of contiguous choices.
fn mask(block_indices: &FlexTensor, blocks: NsaBlocks) -> Mask<'_> {
    Mask::Chosen(ChosenBlocks {
        indices: ints(block_indices),
        count: blocks.num_selected_blocks,
        block_size: blocks.select_block_size,
    })
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
    let attention = AttentionCall::new(call.documents.clone(), call.spec);
    NsaSelected::without_lists(forward(&qkv, mask(&block_indices, call.blocks), &attention))
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
    let attention = AttentionCall::new(call.documents.clone(), call.spec);
    let operands = [selected.output.o, selected.output.lse, d_o];
    backward(&qkv, mask(&block_indices, call.blocks), &attention, operands, None)
}

pub(crate) fn nsa_gates(branches: [FlexTensor; 3], logits: FlexTensor, bias: FlexTensor) -> FlexTensor {
    reference::nsa_gates::<Flex>(branches, logits, bias)
}

pub(crate) fn nsa_gates_backward(
    branches: [FlexTensor; 3],
    logits: FlexTensor,
    bias: FlexTensor,
    d_o: FlexTensor,
) -> [FlexTensor; 5] {
    reference::nsa_gates_backward::<Flex>(branches, logits, bias, d_o)
}
