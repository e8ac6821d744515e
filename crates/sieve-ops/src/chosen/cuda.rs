//! The choice of blocks and the gradient of an indexer's loss on CUDA. Calls that a kernel refuses run the reference.
use super::pooled::{Slots, block_scores};
use super::{ChoiceCall, IndexGradientCall, reference};
use crate::attention::cuda::{bounds, packed};
use crate::device::{kernel_or, kernel_or_scores, scores};
use crate::nsa::cuda::{attended, lists_of};
use crate::tensors::{primitive, tensor};
use crate::{Cuda, DocumentBounds};
use burn::tensor::{Int, Tensor};
use sieve_core::ChoiceRule;
use sieve_kernels::{CudaPrimitive as Float, IndexGradient, SelectedBlocks, ToBurn, choose_by_scores, kernel_tensor};

/// By the rule that sums over an indexer's heads, GEMMs score the blocks and a kernel chooses; by every other rule
/// kernels do both.
pub(crate) fn choose_key_blocks(qkv: Float, pooled: Float, call: &ChoiceCall<Cuda>) -> Float {
    if call.choice.rule == ChoiceRule::SumOfHeads {
        return choose_scored(qkv, pooled, call);
    }
    let [start, end] = bounds(&call.documents);
    let attempt = packed(&qkv, call.spec).q.choose_key_blocks_of_last(
        [&start, &end],
        &kernel_tensor(pooled.clone()),
        call.choice,
        call.spec.softmax_scale as f32,
        call.first,
    );
    let score_matrix = scores(&qkv, call.spec.num_heads);
    kernel_or_scores("choose_key_blocks", attempt.map(ToBurn::burn), score_matrix, || {
        reference::choose_key_blocks::<Cuda>(qkv, pooled, call)
    })
}

/// Scores blocks by GEMMs; a kernel then chooses by these scores.
fn choose_scored(index: Float, block_keys: Float, call: &ChoiceCall<Cuda>) -> Float {
    let (index, choice) = (tensor::<Cuda, 4>(index), call.choice);
    let [batch, n, _, d] = index.dims();
    let keys = tensor::<Cuda, 3>(block_keys).reshape([batch, choice.blocks.num_slots(n), d]);
    let slots = Slots::<Cuda>::new(&call.documents, choice.blocks);
    let start = Tensor::<Cuda, 2, Int>::from_primitive(call.documents[0].clone());
    let of_row = |row: usize| {
        let shape = [1, n, 1, choice.blocks.num_selected_blocks];
        // The kernel writes the chosen blocks to `indices` through `chosen`, a view of the same memory.
        let indices = Tensor::<Cuda, 4, Int>::zeros(shape, &index.device());
        let (start, chosen) = (start.clone().narrow(0, row, 1), kernel_tensor(indices.clone().into_primitive()));
        let start = kernel_tensor(start.into_primitive());
        block_scores(&index, &keys, &slots, row, |first, scores| {
            let scores = kernel_tensor(primitive(scores.unsqueeze_dims::<4>(&[0, 0])));
            let (size, forced) = (choice.blocks.select_block_size, choice.forced);
            let written = choose_by_scores(&scores, &start, &chosen, size, forced, first);
            written.unwrap_or_else(|error| panic!("nsa_choose: {error}"));
        });
        indices
    };
    Tensor::cat((0..batch).map(of_row).collect(), 0).into_primitive()
}

/// Only the documents' starts are read: `indices` count blocks of `block` tokens from there on. `counts` `None`: all
/// indices of a query count.
pub(crate) fn selected_blocks(
    indices: Float,
    counts: Option<Float>,
    documents: &DocumentBounds<Cuda>,
    block: usize,
) -> Float {
    let [start, _] = bounds(documents);
    let of_kernel = kernel_tensor(indices.clone());
    let counts_of_kernel = counts.clone().map(kernel_tensor);
    let given = SelectedBlocks { indices: &of_kernel, counts: counts_of_kernel.as_ref(), block };
    let attempt = given.attended(&start).map(|(attended, _)| attended.burn());
    kernel_or("selected_blocks", attempt, || reference::selected_blocks::<Cuda>(indices, counts, documents, block))
}

/// `None` for calls that the fused kernel does not support: the caller then uses the attention kernels.
pub(crate) fn index_gradient(
    [qkv, index]: [Float; 2],
    chosen: Float,
    call: &IndexGradientCall<'_, Cuda>,
) -> Option<Float> {
    let (spec, attention) = (call.call.spec, call.attention);
    let [start, end] = bounds(&call.call.documents);
    let [index, lse, chosen] = [index, attention.output.lse.clone(), chosen].map(kernel_tensor);
    let lists: Vec<_> = attention.lists.iter().cloned().map(lists_of).collect();
    let heads = packed(&qkv, spec);
    let gradient = IndexGradient {
        queries_and_keys: [&heads.q, &heads.k],
        index: &index,
        lse: &lse,
        blocks: attended(&chosen, &call.call),
        lists: &lists,
        weight: call.weight as f32,
    };
    match gradient.index_gradient([&start, &end], spec.softmax_scale as f32) {
        Ok(None) => None,
        attempt => kernel_or("index_gradient", attempt, || None).map(ToBurn::burn),
    }
}
