//! NSA on the CPU: the softmax branches run on the attention of `sieve-cpu`, which never holds an n x n tensor;
//! pooling, placing and gates are plain Burn operations. The functions implement methods of `DeviceBackend`.
use super::{NsaCall, NsaCompressed, NsaSelected, reference};
use crate::AttentionOutput;
use crate::attention::cpu::{attention_shape, backward, forward};
use crate::device::{contiguous, ints, is_f32, unless_f32};
use crate::dma::cpu::{dma_attention, dma_attention_backward};
use burn_flex::{Flex, FlexTensor};
use sieve_core::{KeepOLow, NsaBlocks};
use sieve_cpu::{ChosenBlocks, Mask};

pub(crate) use super::reference::{nsa_blocks, nsa_blocks_backward, nsa_mean_pool, nsa_mean_pool_backward};

/// By DMA's attention, whose mask hides the positions that hold no compressed key; `compressed` has the keys, then the
/// values.
pub(crate) fn nsa_compressed_attention(
    qkv: FlexTensor,
    compressed: FlexTensor,
    call: &NsaCall<Flex>,
) -> NsaCompressed<Flex> {
    // DMA's mask hides the positions without a compressed key, so DMA's attention computes the branch.
    let attend = |call: &_| dma_attention(call, KeepOLow::Never);
    reference::compressed_attention(qkv, compressed, call, attend)
}

/// `[dqkv, dcompressed]`: of `dqkv` only the query heads are not zero.
pub(crate) fn nsa_compressed_attention_backward(
    qkv: FlexTensor,
    compressed: FlexTensor,
    call: &NsaCall<Flex>,
    output: AttentionOutput<Flex>,
    d_o: FlexTensor,
) -> [FlexTensor; 2] {
    if !is_f32(&qkv) {
        // The CPU kernel would see compressed keys in f32, but o and d_o in another dtype.
        return reference::nsa_compressed_attention_backward(qkv, compressed, call, output, d_o);
    }
    let gradient = |call: &_| dma_attention_backward(call, output, d_o);
    reference::compressed_attention_backward(qkv, compressed, call, gradient)
}

/// The mask of chosen blocks; `block_indices` is contiguous.
fn mask(block_indices: &FlexTensor, blocks: NsaBlocks) -> Mask<'_> {
    Mask::Chosen(ChosenBlocks {
        indices: ints(block_indices),
        count: blocks.num_selected_blocks,
        block_size: blocks.select_block_size,
    })
}

/// Attention over the chosen blocks, without the lists of each block's queries, which only CUDA's backward pass reads.
pub(crate) fn nsa_selected_attention(
    qkv: FlexTensor,
    block_indices: FlexTensor,
    call: &NsaCall<Flex>,
) -> NsaSelected<Flex> {
    unless_f32!(&qkv, call.spec.num_heads, "nsa_selected_attention":
        reference::nsa_selected_attention(qkv, block_indices, call));
    let [qkv, block_indices] = [qkv, block_indices].map(contiguous);
    let (shape, mask) = (attention_shape(&qkv, call.spec), mask(&block_indices, call.blocks));
    NsaSelected::without_lists(forward(&qkv, shape, mask, &call.documents))
}

/// `dqkv`, packed as `qkv`; of `selected` only o and lse are read.
pub(crate) fn nsa_selected_attention_backward(
    qkv: FlexTensor,
    block_indices: FlexTensor,
    call: &NsaCall<Flex>,
    selected: NsaSelected<Flex>,
    d_o: FlexTensor,
) -> FlexTensor {
    unless_f32!(&qkv, call.spec.num_heads, "nsa_selected_attention_backward":
        reference::nsa_selected_attention_backward(qkv, block_indices, call, selected, d_o));
    let [qkv, block_indices] = [qkv, block_indices].map(contiguous);
    let (shape, mask) = (attention_shape(&qkv, call.spec), mask(&block_indices, call.blocks));
    let (operands, d_delta) = ([selected.output.o, selected.output.lse, d_o], None);
    backward(&qkv, shape, mask, &call.documents, operands, d_delta)
}

pub(crate) fn nsa_gates(branches: [FlexTensor; 3], logits: FlexTensor, bias: FlexTensor) -> FlexTensor {
    reference::nsa_gates::<Flex>(branches, logits, bias)
}

/// Gradients of the compressed, selected and window branch, the logits and the bias, by the reference, which is not
/// counted as one.
pub(crate) fn nsa_gates_backward(
    branches: [FlexTensor; 3],
    logits: FlexTensor,
    bias: FlexTensor,
    d_o: FlexTensor,
) -> [FlexTensor; 5] {
    reference::nsa_gates_backward::<Flex>(branches, logits, bias, d_o)
}
