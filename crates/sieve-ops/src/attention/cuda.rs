//! Dense and sliding-window attention on CUDA, and the operands that all attention kernels take. Calls that a kernel
//! refuses run the reference, which holds a score matrix.
use super::{AttentionCall, AttentionOutput, AttentionSpec, reference};
use crate::device::{kernel_or, kernel_or_scores, scores};
use crate::{Cuda, DocumentBounds};
use sieve_core::KeepOLow;
use sieve_kernels::{
    AttentionGradients, AttentionResult, CudaPrimitive as Float, CudaTensor, KernelError, Qkv, ToBurn, kernel_tensor,
};

pub(crate) fn attention(qkv: Float, call: &AttentionCall<Cuda>) -> AttentionOutput<Cuda> {
    let (bias, score_matrix) = (None, scores(&qkv, call.spec.num_heads));
    let attempt = forward(&qkv, call, bias);
    kernel_or_scores("attention", attempt, score_matrix, || reference::attention::<Cuda>(qkv, call))
}

/// By the kernels of whole rows: the call's bounds say that the tokens before `first` see themselves alone.
pub(crate) fn attention_of_last(qkv: Float, call: &AttentionCall<Cuda>, _first: usize) -> AttentionOutput<Cuda> {
    attention(qkv, call)
}

/// `dqkv`, packed as `qkv`, of attention without a bias per key. Where the kernels refuse the call, the reference holds
/// a score matrix.
pub(crate) fn attention_backward(
    qkv: Float,
    call: &AttentionCall<Cuda>,
    output: AttentionOutput<Cuda>,
    d_o: Float,
) -> Float {
    let (bias, score_matrix) = (None, scores(&qkv, call.spec.num_heads));
    let attempt = backward(&qkv, call, bias, &output, &d_o);
    let attempt = attempt.map(|(dqkv, _)| dqkv);
    kernel_or_scores("attention_backward", attempt, score_matrix, || {
        reference::attention_backward::<Cuda>(qkv, call, output, d_o)
    })
}

pub(crate) fn join_sinks(output: AttentionOutput<Cuda>, sinks: Float) -> AttentionOutput<Cuda> {
    let attempt = result(&output).with_sinks(&kernel_tensor(sinks.clone()));
    kernel_or("join_sinks", attempt.map(self::output), || reference::join_sinks::<Cuda>(output, sinks))
}

pub(crate) fn sinks_backward(output: &AttentionOutput<Cuda>, sinks: Float, d_o: Float) -> Float {
    let [logits, d] = [&sinks, &d_o].map(|x| kernel_tensor(x.clone()));
    let attempt = result(output).sinks_gradient(&logits, &d);
    kernel_or("sinks_backward", attempt.map(ToBurn::burn), || reference::sinks_backward::<Cuda>(output, sinks, d_o))
}

/// A packed tensor as the kernels take it.
pub(crate) fn packed(qkv: &Float, spec: AttentionSpec) -> Qkv {
    let qkv = kernel_tensor(qkv.clone()).under(spec.policy);
    Qkv::packed(&qkv, spec.num_heads, spec.num_kv_heads)
}

/// As [`packed`] for these numbers of query heads and KV heads, under the default policy.
pub(crate) fn packed_heads(qkv: &Float, [num_heads, num_kv_heads]: [usize; 2]) -> Qkv {
    Qkv::packed(&kernel_tensor(qkv.clone()), num_heads, num_kv_heads)
}

pub(crate) fn bounds(documents: &DocumentBounds<Cuda>) -> [CudaTensor; 2] {
    documents.clone().map(kernel_tensor)
}

/// The result of a kernel launch as Burn tensors.
pub(crate) fn output(result: AttentionResult) -> AttentionOutput<Cuda> {
    AttentionOutput {
        o: result.o.burn(),
        lse: result.lse.burn(),
        o_low: result.o_low.map(ToBurn::burn),
        base: result.base.map(ToBurn::burn),
    }
}

/// The inverse of [`output`]; o and lse are made contiguous.
pub(crate) fn result(output: &AttentionOutput<Cuda>) -> AttentionResult {
    AttentionResult {
        o: kernel_tensor(output.o.clone()).contiguous(),
        lse: kernel_tensor(output.lse.clone()).contiguous(),
        o_low: output.o_low.clone().map(kernel_tensor),
        base: output.base.clone().map(kernel_tensor),
    }
}

/// Calls `launch` with the operands of a backward kernel and a new tensor for dqkv; `launch` writes every element of
/// it. Returns dqkv and what `launch` returned.
pub(crate) fn with_gradients<T>(
    qkv: &Float,
    spec: AttentionSpec,
    output: &AttentionOutput<Cuda>,
    d_o: &Float,
    launch: impl FnOnce(AttentionGradients<'_>) -> Result<T, KernelError>,
) -> Result<(Float, T), KernelError> {
    let input = kernel_tensor(qkv.clone());
    let dqkv = input.empty_contiguous(input.shape(), input.dtype());
    let returned = launch(AttentionGradients {
        qkv: &packed(qkv, spec),
        result: &result(output),
        d_o: &kernel_tensor(d_o.clone()),
        grads: &Qkv::packed(&dqkv, spec.num_heads, spec.num_kv_heads),
        softmax_scale: spec.softmax_scale as f32,
    })?;
    Ok((dqkv.burn(), returned))
}

/// The forward kernel. `bias` is the bias of each key, and whether the kernel stores `o_low`.
pub(crate) fn forward(
    qkv: &Float,
    call: &AttentionCall<Cuda>,
    bias: Option<(&CudaTensor, KeepOLow)>,
) -> Result<AttentionOutput<Cuda>, KernelError> {
    let ([start, _], spec) = (bounds(&call.documents), call.spec);
    let (qkv, scale) = (packed(qkv, spec), spec.softmax_scale as f32);
    let result = match spec.far_window() {
        Some((window, far)) => qkv.far_attention_forward(&start, window, far, scale),
        None => qkv.attention_forward(&start, spec.window_size, scale, bias),
    };
    result.map(output)
}

/// Gradients `(dqkv, dbias)` of an attention call; dbias is `None` without a bias.
pub(crate) fn backward(
    qkv: &Float,
    call: &AttentionCall<Cuda>,
    bias: Option<&CudaTensor>,
    output: &AttentionOutput<Cuda>,
    d_o: &Float,
) -> Result<(Float, Option<CudaTensor>), KernelError> {
    let ([start, end], spec) = (bounds(&call.documents), call.spec);
    with_gradients(qkv, spec, output, d_o, |gradients| match spec.far_window() {
        Some((window, far)) => gradients.far_attention_backward([&start, &end], window, far).map(|()| None),
        None => gradients.attention_backward([&start, &end], spec.window_size, bias),
    })
}
