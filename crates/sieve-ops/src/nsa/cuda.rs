//! Native sparse attention's ops on CUDA: methods of `DeviceBackend`. Calls that a kernel refuses run the reference.
use super::{NsaCall, NsaCompressed, NsaSelected, reference};
use crate::attention::cuda::{bounds, output, packed, result, with_gradients};
use crate::device::{cast, kernel_or, kernel_or_scores, scores, tensors};
use crate::{AttentionOutput, Cuda};
use burn::tensor::DType;
use sieve_core::{KeyOrder, LocalBlocks};
use sieve_kernels::{
    AttendedBlocks, BlocksWithLocal, ChoiceLists, CudaPrimitive as Float, CudaTensor, KernelError, PackedGradient,
    ToBurn, kernel_tensor,
};

/// `positions` are the learned vectors of keys and of values, `[compress_block_size, head_dim]` each, which the kernel
/// adds to a block's keys and values.
pub(crate) fn nsa_blocks(qkv: Float, positions: [Float; 2], call: &NsaCall<Cuda>) -> Float {
    let [k, v] = positions.each_ref().map(|x| kernel_tensor(x.clone()));
    let [start, end] = bounds(&call.documents);
    let input = packed(&qkv, call.spec);
    let attempt = sieve_kernels::nsa_blocks([&input.k, &input.v], [&k, &v], [&start, &end], call.blocks);
    let attempt = attempt.map(ToBurn::burn);
    kernel_or("nsa_blocks", attempt, || reference::nsa_blocks(qkv, positions, call))
}

pub(crate) fn nsa_mean_pool(qkv: Float, call: &NsaCall<Cuda>) -> Float {
    let [start, end] = bounds(&call.documents);
    let input = packed(&qkv, call.spec);
    let attempt = sieve_kernels::nsa_mean_pool([&input.k, &input.v], [&start, &end], call.blocks);
    kernel_or("nsa_mean_pool", attempt.map(ToBurn::burn), || reference::nsa_mean_pool(qkv, call))
}

pub(crate) fn nsa_compressed_attention(qkv: Float, compressed: Float, call: &NsaCall<Cuda>) -> NsaCompressed<Cuda> {
    let attempt = compressed_forward(&qkv, &compressed, call);
    let score_matrix = scores(&qkv, call.spec.num_heads);
    kernel_or_scores("nsa_compressed_attention", attempt, score_matrix, || {
        reference::nsa_compressed_attention(qkv, compressed, call)
    })
}

/// The local blocks, where they are read as a run of neighbours. With [`KeyOrder::Epochs`] all blocks are read one by
/// one, in the order of a step that decodes one token.
fn run_of_local(call: &NsaCall<Cuda>) -> Option<LocalBlocks> {
    call.local.filter(|_| call.spec.policy.keys == KeyOrder::Leaving)
}

/// The blocks of a call, `indices`, as attention's kernels take them.
pub(crate) fn attended<'a>(indices: &'a CudaTensor, call: &NsaCall<Cuda>) -> AttendedBlocks<'a> {
    AttendedBlocks { indices, size: call.blocks.select_block_size, in_pairs: call.in_pairs }
}

/// Attention over the chosen blocks, whose numbers `block_indices` holds as integers: shapes as in
/// [its reference](reference::nsa_selected_attention), which is warned of with the size of its score matrix.
pub(crate) fn nsa_selected_attention(qkv: Float, block_indices: Float, call: &NsaCall<Cuda>) -> NsaSelected<Cuda> {
    let [start, end] = bounds(&call.documents);
    let (heads, documents) = (packed(&qkv, call.spec), [&start, &end]);
    let (indices, size) = (kernel_tensor(block_indices.clone()), call.blocks.select_block_size);
    let scale = call.spec.softmax_scale as f32;
    let attempt = match run_of_local(call) {
        Some(local) => {
            let blocks = BlocksWithLocal { indices: &indices, size, local };
            heads.local_and_selected_attention_forward(documents, blocks, scale)
        }
        None => heads.nsa_selected_attention_forward(documents, attended(&indices, call), scale),
    };
    let score_matrix = scores(&qkv, call.spec.num_heads);
    let attempt = attempt.map(|(result, lists)| NsaSelected {
        output: output(result),
        lists: lists.into_iter().map(of_lists).collect(),
    });
    kernel_or_scores("nsa_selected_attention", attempt, score_matrix, || {
        reference::nsa_selected_attention(qkv, block_indices, call)
    })
}

pub(crate) fn nsa_gates(branches: [Float; 3], logits: Float, bias: Float) -> Float {
    let [a, b, c] = tensors(branches.each_ref());
    let bias_f32 = cast(&bias, DType::F32);
    let attempt = sieve_kernels::nsa_gates([&a, &b, &c], &kernel_tensor(logits.clone()), &bias_f32);
    kernel_or("nsa_gates", attempt.map(ToBurn::burn), || reference::nsa_gates::<Cuda>(branches, logits, bias))
}

/// `[dqkv, dk_positions, dv_positions]`; `dims` is the shape of qkv, `dy` the gradient of the blocks of keys, then of
/// values.
pub(crate) fn nsa_blocks_backward(dims: [usize; 4], call: &NsaCall<Cuda>, dy: Float) -> [Float; 3] {
    let [start, end] = bounds(&call.documents);
    let packed = PackedGradient { dims, num_kv_heads: call.spec.num_kv_heads };
    let gradient = kernel_tensor(dy.clone());
    let attempt = sieve_kernels::nsa_blocks_backward(packed, [&start, &end], call.blocks, &gradient);
    let attempt = attempt.map(|gradients| gradients.map(ToBurn::burn));
    kernel_or("nsa_blocks_backward", attempt, || reference::nsa_blocks_backward(dims, call, dy))
}

pub(crate) fn nsa_mean_pool_backward(dims: [usize; 4], call: &NsaCall<Cuda>, dy: Float) -> Float {
    let [start, end] = bounds(&call.documents);
    let packed = PackedGradient { dims, num_kv_heads: call.spec.num_kv_heads };
    let gradient = kernel_tensor(dy.clone());
    let attempt = sieve_kernels::nsa_mean_pool_backward(packed, [&start, &end], call.blocks, &gradient);
    kernel_or("nsa_mean_pool_backward", attempt.map(ToBurn::burn), || reference::nsa_mean_pool_backward(dims, call, dy))
}

/// `[dqkv, dcompressed]`: of `dqkv` only the query heads are not zero. Where the kernels refuse the call, the reference
/// holds a score matrix.
pub(crate) fn nsa_compressed_attention_backward(
    qkv: Float,
    compressed: Float,
    call: &NsaCall<Cuda>,
    output: AttentionOutput<Cuda>,
    d_o: Float,
) -> [Float; 2] {
    let attempt = compressed_backward(&qkv, &compressed, call, &output, &d_o);
    let score_matrix = scores(&qkv, call.spec.num_heads);
    kernel_or_scores("nsa_compressed_attention_backward", attempt, score_matrix, || {
        reference::nsa_compressed_attention_backward(qkv, compressed, call, output, d_o)
    })
}

/// `dqkv`, packed as `qkv`; the lists of each block's queries that the forward pass left in `selected` are used again.
pub(crate) fn nsa_selected_attention_backward(
    qkv: Float,
    block_indices: Float,
    call: &NsaCall<Cuda>,
    selected: NsaSelected<Cuda>,
    d_o: Float,
) -> Float {
    let [start, end] = bounds(&call.documents);
    let (indices, size) = (kernel_tensor(block_indices.clone()), call.blocks.select_block_size);
    let lists: Vec<_> = selected.lists.iter().cloned().map(lists_of).collect();
    let attempt = with_gradients(&qkv, call.spec, &selected.output, &d_o, |gradients| match run_of_local(call) {
        Some(local) => {
            let blocks = BlocksWithLocal { indices: &indices, size, local };
            gradients.local_and_selected_attention_backward([&start, &end], blocks, &lists)
        }
        None => gradients.nsa_selected_attention_backward([&start, &end], attended(&indices, call), &lists),
    });
    // The launch returns nothing beside dqkv.
    let attempt = attempt.map(|(dqkv, ())| dqkv);
    let score_matrix = scores(&qkv, call.spec.num_heads);
    kernel_or_scores("nsa_selected_attention_backward", attempt, score_matrix, || {
        reference::nsa_selected_attention_backward(qkv, block_indices, call, selected, d_o)
    })
}

/// Gradients of the compressed, selected and window branch, the logits and the bias; the kernel reads the bias in f32.
pub(crate) fn nsa_gates_backward(branches: [Float; 3], logits: Float, bias: Float, d_o: Float) -> [Float; 5] {
    let [a, b, c, l, d] = tensors([&branches[0], &branches[1], &branches[2], &logits, &d_o]);
    let bias_f32 = cast(&bias, DType::F32);
    let attempt = sieve_kernels::nsa_gates_backward([&a, &b, &c], &l, &bias_f32, &d);
    let attempt = attempt.map(|gradients| {
        let [a, b, c] = gradients.branches;
        [a, b, c, gradients.logits, gradients.bias].map(ToBurn::burn)
    });
    kernel_or("nsa_gates_backward", attempt, || reference::nsa_gates_backward::<Cuda>(branches, logits, bias, d_o))
}

/// The lists of queries that chose each block, as Burn tensors.
fn of_lists(lists: ChoiceLists) -> [Float; 3] {
    [lists.entries, lists.items, lists.num_items].map(ToBurn::burn)
}

/// The inverse of [`of_lists`].
pub(crate) fn lists_of(lists: [Float; 3]) -> ChoiceLists {
    let [entries, items, num_items] = lists.map(kernel_tensor);
    ChoiceLists { entries, items, num_items }
}

/// Attention of the compressed branch, and the blocks that it chooses.
fn compressed_forward(
    qkv: &Float,
    compressed: &Float,
    call: &NsaCall<Cuda>,
) -> Result<NsaCompressed<Cuda>, KernelError> {
    let [start, end] = bounds(&call.documents);
    let (result, indices) = packed(qkv, call.spec).q.nsa_compressed_attention_of_last(
        [&start, &end],
        &kernel_tensor(compressed.clone()),
        call.blocks,
        call.spec.softmax_scale as f32,
        call.first,
    )?;
    Ok(NsaCompressed { output: output(result), block_indices: indices.burn() })
}

/// Gradients `[dqkv, dcompressed]` of the compressed branch.
fn compressed_backward(
    qkv: &Float,
    compressed: &Float,
    call: &NsaCall<Cuda>,
    output: &AttentionOutput<Cuda>,
    d_o: &Float,
) -> Result<[Float; 2], KernelError> {
    let [start, end] = bounds(&call.documents);
    let gradients = packed(qkv, call.spec).q.nsa_compressed_attention_backward(
        [&start, &end],
        &kernel_tensor(compressed.clone()),
        call.blocks,
        call.spec.softmax_scale as f32,
        &result(output),
        &kernel_tensor(d_o.clone()),
    )?;
    Ok(gradients.map(ToBurn::burn))
}
