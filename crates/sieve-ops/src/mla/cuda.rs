//! MLA on CUDA: a kernel packs and rotates, and the attention kernels read the packed tensor. The ops implement methods
//! of `DeviceBackend`; calls that a kernel refuses run the reference.
use super::{MlaCall, MlaPackCall, reference};
use crate::attention::cuda::{bounds, output, result};
use crate::device::{cast, kernel_or, kernel_or_scores, scores, tensors};
use crate::{AttentionOutput, Cuda};
use burn::tensor::DType;
use sieve_kernels::{AttentionGradients, CudaPrimitive as Float, KernelError, MlaNorm, MlaPack, ToBurn, kernel_tensor};

pub(crate) fn mla_pack(inputs: [Float; 3], call: MlaPackCall<Cuda>) -> (Float, Option<[Float; 2]>) {
    let [q, kv, k_rope] = tensors(inputs.each_ref());
    let attempt = with_kernel_call(&call, |call| call.mla_pack_forward([&q, &kv, &k_rope]));
    let attempt = attempt.map(|(packed, keys)| (packed.burn(), keys.map(|keys| keys.map(ToBurn::burn))));
    kernel_or("mla_pack", attempt, || reference::mla_pack(inputs, call))
}

pub(crate) fn mla_attention(packed: Float, call: &MlaCall<Cuda>) -> AttentionOutput<Cuda> {
    let attempt = attend(&packed, call);
    let score_matrix = scores(&packed, call.spec.num_heads);
    kernel_or_scores("mla_attention", attempt, score_matrix, || reference::mla_attention::<Cuda>(packed, call))
}

/// `dy` is the gradient of the packed tensor, and `normed` the forward pass's q, kv and k_rope, which only norms need.
/// Without norms the gradients of their weights are `None`.
pub(crate) fn mla_pack_backward(
    call: MlaPackCall<Cuda>,
    normed: Option<[Float; 3]>,
    dy: Float,
) -> ([Float; 3], Option<[Float; 2]>) {
    let d = kernel_tensor(dy.clone());
    let inputs = normed.as_ref().map(|inputs| tensors(inputs.each_ref()));
    let inputs = inputs.as_ref().map(|inputs| inputs.each_ref());
    let attempt = with_kernel_call(&call, |call| call.mla_pack_backward(inputs, &d));
    let attempt = attempt.map(|(gradients, weights)| {
        let weights = weights.map(|weights| weights.map(ToBurn::burn));
        (gradients.map(ToBurn::burn), weights)
    });
    kernel_or("mla_pack_backward", attempt, || reference::mla_pack_backward(call, normed, dy))
}

/// The gradient of the packed tensor, in its layout. Where the kernels refuse the call, the reference holds a score
/// matrix.
pub(crate) fn mla_attention_backward(
    packed: Float,
    call: &MlaCall<Cuda>,
    output: AttentionOutput<Cuda>,
    d_o: Float,
) -> Float {
    let attempt = gradient(&packed, call, &output, &d_o);
    let score_matrix = scores(&packed, call.spec.num_heads);
    kernel_or_scores("mla_attention_backward", attempt, score_matrix, || {
        reference::mla_attention_backward::<Cuda>(packed, call, output, d_o)
    })
}

/// Calls `launch` with the call's operands as kernels take them: CUDA tensors, with f32 tables.
fn with_kernel_call<T>(call: &MlaPackCall<Cuda>, launch: impl FnOnce(MlaPack<'_>) -> T) -> T {
    let norm = call.norm.as_ref();
    let weights = norm.map(|norm| tensors([&norm.q_weight, &norm.k_weight]));
    launch(MlaPack {
        num_heads: call.spec.num_heads,
        head_dim: call.spec.head_dim,
        rope_dim: call.spec.rope_dim,
        positions: &kernel_tensor(call.positions.clone()),
        cos: &cast(&call.rope.cos, DType::F32),
        sin: &cast(&call.rope.sin, DType::F32),
        norm: norm.zip(weights.as_ref()).map(|(norm, [q_weight, k_weight])| MlaNorm {
            q_weight,
            k_weight,
            epsilon: norm.epsilon as f32,
        }),
    })
}

/// Dense attention on the heads of the packed tensor.
fn attend(packed: &Float, call: &MlaCall<Cuda>) -> Result<AttentionOutput<Cuda>, KernelError> {
    let spec = call.spec;
    let packed = kernel_tensor(packed.clone()).under(spec.policy);
    let heads = MlaPack::heads(&packed, spec.num_heads, [spec.head_dim, spec.rope_dim])?;
    let [start, _] = bounds(&call.documents);
    let (window, scale, bias) = (None, spec.softmax_scale as f32, None);
    heads.attention_forward(&start, window, scale, bias).map(output)
}

/// The gradient of latent attention's packed tensor.
fn gradient(
    packed: &Float,
    call: &MlaCall<Cuda>,
    output: &AttentionOutput<Cuda>,
    d_o: &Float,
) -> Result<Float, KernelError> {
    let spec = call.spec;
    let widths = [spec.head_dim, spec.rope_dim];
    let packed = kernel_tensor(packed.clone()).under(spec.policy);
    let d_packed = packed.empty_contiguous(packed.shape(), packed.dtype());
    let backward = AttentionGradients {
        qkv: &MlaPack::heads(&packed, spec.num_heads, widths)?,
        result: &result(output),
        d_o: &kernel_tensor(d_o.clone()),
        grads: &MlaPack::heads(&d_packed, spec.num_heads, widths)?,
        softmax_scale: spec.softmax_scale as f32,
    };
    let ([start, end], window, bias) = (bounds(&call.documents), None, None);
    backward.attention_backward([&start, &end], window, bias)?;
    Ok(d_packed.burn())
}
