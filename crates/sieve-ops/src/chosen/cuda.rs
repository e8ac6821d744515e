//! The choice on CUDA.
use super::{ChoiceCall, reference};
use crate::attention::cuda::{bounds, packed};
use crate::device::cuda::Cuda;
use crate::device::paths::{kernel_or_scores, scores};
use sieve_kernels::{CudaPrimitive as Float, ToBurn, kernel_tensor};

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
