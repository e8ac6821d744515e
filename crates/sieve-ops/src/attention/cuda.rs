//! Dense and sliding-window attention on CUDA, and the arguments that every attention kernel there takes.
use super::{AttentionCall, AttentionOutput, AttentionSpec, reference};
use crate::device::{kernel_or_scores, scores};
use crate::{Cuda, DocumentBounds};
use sieve_core::KeepOLow;
use sieve_kernels::{
    AttentionGradients, AttentionResult, CudaPrimitive as Float, CudaTensor, KernelError, Qkv, ToBurn, kernel_tensor,
};

pub(crate) fn attention(qkv: Float, call: &AttentionCall<Cuda>) -> AttentionOutput<Cuda> {
    let attempt = forward(&qkv, call, None);
    kernel_or_scores("attention", attempt, scores(&qkv, call.spec.num_heads), || {
        reference::attention::<Cuda>(qkv, call)
    })
}

pub(crate) fn attention_backward(
    qkv: Float,
    call: &AttentionCall<Cuda>,
    output: AttentionOutput<Cuda>,
    d_o: Float,
) -> Float {
    let attempt = backward(&qkv, call, None, &output, &d_o);
    let attempt = attempt.map(|(dqkv, _)| dqkv);
    let scores = scores(&qkv, call.spec.num_heads);
    kernel_or_scores("attention_backward", attempt, scores, || {
        reference::attention_backward::<Cuda>(qkv, call, output, d_o)
    })
}

/// A packed tensor as the kernels take it.
pub(crate) fn packed(qkv: &Float, spec: AttentionSpec) -> Qkv {
    let qkv = kernel_tensor(qkv.clone()).under(spec.policy);
    Qkv::packed(&qkv, spec.num_heads, spec.num_kv_heads)
}

/// The same for these numbers of query heads and KV heads.
pub(crate) fn packed_heads(qkv: &Float, [num_heads, num_kv_heads]: [usize; 2]) -> Qkv {
    Qkv::packed(&kernel_tensor(qkv.clone()), num_heads, num_kv_heads)
}

pub(crate) fn bounds(documents: &DocumentBounds<Cuda>) -> [CudaTensor; 2] {
    documents.clone().map(kernel_tensor)
}

/// Both names of one result.
pub(crate) fn output(result: AttentionResult) -> AttentionOutput<Cuda> {
    AttentionOutput {
        o: result.o.burn(),
        lse: result.lse.burn(),
        o_low: result.o_low.map(ToBurn::burn),
        base: result.base.map(ToBurn::burn),
    }
}

pub(crate) fn result(output: &AttentionOutput<Cuda>) -> AttentionResult {
    AttentionResult {
        o: kernel_tensor(output.o.clone()).contiguous(),
        lse: kernel_tensor(output.lse.clone()).contiguous(),
        o_low: output.o_low.clone().map(kernel_tensor),
        base: output.base.clone().map(kernel_tensor),
    }
}

/// The arguments of a backward call: `dqkv` is packed as the input, every element is written.
pub(crate) struct Backward {
    qkv: Qkv,
    result: AttentionResult,
    d_o: CudaTensor,
    grads: Qkv,
    softmax_scale: f32,
    pub(crate) dqkv: CudaTensor,
}

impl Backward {
    pub(crate) fn new(qkv: &Float, spec: AttentionSpec, output: &AttentionOutput<Cuda>, d_o: &Float) -> Self {
        let input = kernel_tensor(qkv.clone());
        let dqkv = input.empty_contiguous(input.shape(), input.dtype());
        Self {
            qkv: packed(qkv, spec),
            result: result(output),
            d_o: kernel_tensor(d_o.clone()),
            grads: Qkv::packed(&dqkv, spec.num_heads, spec.num_kv_heads),
            softmax_scale: spec.softmax_scale as f32,
            dqkv,
        }
    }

    pub(crate) fn call(&self) -> AttentionGradients<'_> {
        AttentionGradients {
            qkv: &self.qkv,
            result: &self.result,
            d_o: &self.d_o,
            grads: &self.grads,
            softmax_scale: self.softmax_scale,
        }
    }
}

pub(crate) fn forward(
    qkv: &Float,
    call: &AttentionCall<Cuda>,
    bias: Option<(&CudaTensor, KeepOLow)>,
) -> Result<AttentionOutput<Cuda>, KernelError> {
    let ([start, _], spec) = (bounds(&call.documents), call.spec);
    let scale = spec.softmax_scale as f32;
    packed(qkv, spec)
        .attention_forward(&start, spec.window_size, scale, bias)
        .map(output)
}

/// `(dqkv, dbias)`.
pub(crate) fn backward(
    qkv: &Float,
    call: &AttentionCall<Cuda>,
    bias: Option<&CudaTensor>,
    output: &AttentionOutput<Cuda>,
    d_o: &Float,
) -> Result<(Float, Option<CudaTensor>), KernelError> {
    let [start, end] = bounds(&call.documents);
    let backward = Backward::new(qkv, call.spec, output, d_o);
    let window = call.spec.window_size;
    let dbias = backward.call().attention_backward([&start, &end], window, bias)?;
    Ok((backward.dqkv.burn(), dbias))
}
