//! The choice on the CPU; f32 takes the kernel of `sieve-cpu`, any other dtype the reference.
use super::{ChoiceCall, IndexGradientCall, reference};
use crate::attention::cpu::{attention_shape, contiguous_bounds, documents};
use crate::device::flex::{contiguous, floats, is_f32, plain_scores};
use crate::device::paths::scores;
use burn::tensor::TensorData;
use burn_flex::{Flex, FlexTensor};

pub(crate) fn choose_key_blocks(qkv: FlexTensor, pooled: FlexTensor, call: &ChoiceCall<Flex>) -> FlexTensor {
    if !is_f32(&qkv) {
        return plain_scores("choose_key_blocks", scores(&qkv, call.spec.num_heads), || {
            reference::choose_key_blocks::<Flex>(qkv, pooled, call)
        });
    }
    let [qkv, pooled] = [qkv, pooled].map(contiguous);
    let bounds = contiguous_bounds(&call.documents);
    let shape = attention_shape(&qkv, call.spec);
    let choosers = call.choice.num_choosers(shape.num_heads, shape.num_kv_heads);
    let dims = [
        shape.batch,
        shape.seq_len,
        choosers,
        call.choice.blocks.num_selected_blocks,
    ];
    let mut chosen = vec![0i32; dims.iter().product()];
    let keys = floats(&pooled);
    sieve_cpu::nsa::choose_key_blocks(
        shape,
        call.choice,
        floats(&qkv),
        documents(&bounds),
        &keys[..keys.len() / 2],
        None,
        &mut chosen,
    );
    FlexTensor::from_data(TensorData::new(chosen, dims))
}

/// None: both products of the gradient run on the attention kernels.
pub(crate) fn index_gradient(
    _packed: [FlexTensor; 2],
    _chosen: FlexTensor,
    _call: &IndexGradientCall<'_, Flex>,
) -> Option<FlexTensor> {
    None
}
