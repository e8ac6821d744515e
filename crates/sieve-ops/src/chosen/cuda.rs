//! The choice, and what an indexer learns from, on CUDA.
use super::{ChoiceCall, IndexGradientCall, reference};
use crate::Cuda;
use crate::attention::cuda::{bounds, packed};
use crate::device::{kernel_or, kernel_or_scores, scores};
use crate::nsa::cuda::lists_of;
use sieve_kernels::{CudaPrimitive as Float, IndexGradient, ToBurn, kernel_tensor};

pub(crate) fn choose_key_blocks(qkv: Float, pooled: Float, call: &ChoiceCall<Cuda>) -> Float {
    let [start, end] = bounds(&call.documents);
    let attempt = packed(&qkv, call.spec).choose_key_blocks(
        [&start, &end],
        &kernel_tensor(pooled.clone()),
        call.choice,
        call.spec.softmax_scale as f32,
    );
    let scores = scores(&qkv, call.spec.num_heads);
    kernel_or_scores("choose_key_blocks", attempt.map(ToBurn::burn), scores, || {
        reference::choose_key_blocks::<Cuda>(qkv, pooled, call)
    })
}

pub(crate) fn index_gradient(
    [qkv, index]: [Float; 2],
    chosen: Float,
    call: &IndexGradientCall<'_, Cuda>,
) -> Option<Float> {
    let (spec, of) = (call.call.spec, call.attention);
    let [start, end] = bounds(&call.call.documents);
    let [index, lse, index_lse, chosen] =
        [index, of.output.lse.clone(), call.index_lse.clone(), chosen].map(kernel_tensor);
    let lists: Vec<_> = of.lists.iter().cloned().map(lists_of).collect();
    let gradient = IndexGradient {
        index: &index,
        lse: &lse,
        index_lse: &index_lse,
        block_indices: &chosen,
        lists: &lists,
        weight: call.weight as f32,
    };
    let attempt =
        packed(&qkv, spec).index_gradient([&start, &end], gradient, call.call.blocks, spec.softmax_scale as f32);
    match attempt {
        Ok(None) => None,
        attempt => kernel_or("index_gradient", attempt, || None).map(ToBurn::burn),
    }
}
