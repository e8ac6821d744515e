//! MLA on CUDA: a kernel packs and rotates, the attention kernels walk the packed tensor.
use super::{MlaCall, MlaPackCall, MlaSpec, reference};
use crate::attention::cuda::{bounds, output, result};
use crate::device::{cast, kernel_or, kernel_or_scores, scores, tensors};
use crate::{AttentionOutput, Cuda};
use burn::tensor::DType;
use sieve_kernels::{
    AttentionGradients, CudaPrimitive as Float, CudaTensor, KernelError, MlaNorm, MlaPack, ToBurn, kernel_tensor,
};

pub(crate) fn mla_pack(inputs: [Float; 3], call: MlaPackCall<Cuda>) -> (Float, Option<[Float; 2]>) {
    let [q, kv, k_rope] = tensors(inputs.each_ref());
    let attempt = Rotation::new(&call).forward([&q, &kv, &k_rope]);
    kernel_or("mla_pack", attempt, || reference::mla_pack(inputs, call))
}

pub(crate) fn mla_attention(packed: Float, call: &MlaCall<Cuda>) -> AttentionOutput<Cuda> {
    let attempt = attend(&packed, call);
    let scores = scores(&packed, call.spec.num_heads);
    kernel_or_scores("mla_attention", attempt, scores, || {
        reference::mla_attention::<Cuda>(packed, call)
    })
}

pub(crate) fn mla_pack_backward(
    call: MlaPackCall<Cuda>,
    normed: Option<[Float; 3]>,
    dy: Float,
) -> ([Float; 3], Option<[Float; 2]>) {
    let attempt = Rotation::new(&call).backward(&normed, &dy);
    kernel_or("mla_pack_backward", attempt, || {
        reference::mla_pack_backward(call, normed, dy)
    })
}

pub(crate) fn mla_attention_backward(
    packed: Float,
    call: &MlaCall<Cuda>,
    output: AttentionOutput<Cuda>,
    d_o: Float,
) -> Float {
    let attempt = gradient(&packed, call, &output, &d_o);
    let scores = scores(&packed, call.spec.num_heads);
    kernel_or_scores("mla_attention_backward", attempt, scores, || {
        reference::mla_attention_backward::<Cuda>(packed, call, output, d_o)
    })
}

/// The tensors of a pack call, as the kernels take them.
struct Rotation {
    spec: MlaSpec,
    positions: CudaTensor,
    cos: CudaTensor,
    sin: CudaTensor,
    /// Weights of queries and keys, and what is added to the mean square.
    norm: Option<([CudaTensor; 2], f32)>,
}

impl Rotation {
    fn new(call: &MlaPackCall<Cuda>) -> Self {
        Self {
            spec: call.spec,
            positions: kernel_tensor(call.positions.clone()),
            cos: cast(&call.rope.cos, DType::F32),
            sin: cast(&call.rope.sin, DType::F32),
            norm: call.norm.as_ref().map(|norm| {
                let weights = tensors([&norm.q_weight, &norm.k_weight]);
                (weights, norm.epsilon as f32)
            }),
        }
    }

    fn args(&self) -> MlaPack<'_> {
        MlaPack {
            num_heads: self.spec.num_heads,
            head_dim: self.spec.head_dim,
            rope_dim: self.spec.rope_dim,
            positions: &self.positions,
            cos: &self.cos,
            sin: &self.sin,
            norm: self.norm.as_ref().map(|([q_weight, k_weight], epsilon)| MlaNorm {
                q_weight,
                k_weight,
                epsilon: *epsilon,
            }),
        }
    }

    fn forward(&self, inputs: [&CudaTensor; 3]) -> Result<(Float, Option<[Float; 2]>), KernelError> {
        let (packed, keys) = self.args().mla_pack_forward(inputs)?;
        Ok((packed.burn(), keys.map(|keys| keys.map(ToBurn::burn))))
    }

    fn backward(
        &self,
        normed: &Option<[Float; 3]>,
        dy: &Float,
    ) -> Result<([Float; 3], Option<[Float; 2]>), KernelError> {
        let dy = kernel_tensor(dy.clone());
        let normed = normed.as_ref().map(|inputs| tensors(inputs.each_ref()));
        let normed = normed.as_ref().map(|inputs| inputs.each_ref());
        let (gradients, weights) = self.args().mla_pack_backward(normed, &dy)?;
        let weights = weights.map(|weights| weights.map(ToBurn::burn));
        Ok((gradients.map(ToBurn::burn), weights))
    }
}

fn attend(packed: &Float, call: &MlaCall<Cuda>) -> Result<AttentionOutput<Cuda>, KernelError> {
    let spec = call.spec;
    let packed = kernel_tensor(packed.clone()).under(spec.policy);
    let heads = MlaPack::heads(&packed, spec.num_heads, [spec.head_dim, spec.rope_dim])?;
    let [start, _] = bounds(&call.documents);
    let scale = spec.softmax_scale as f32;
    heads.attention_forward(&start, None, scale, None).map(output)
}

/// The gradient of the packed tensor, every element of it.
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
    let [start, end] = bounds(&call.documents);
    backward.attention_backward([&start, &end], None, None)?;
    Ok(d_packed.burn())
}
