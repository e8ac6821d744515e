//! Dense and sliding-window attention on the CPU, and what every attention there shares.
use super::{AttentionCall, AttentionOutput, AttentionSpec, reference};
use crate::DocumentBounds;
use crate::device::{contiguous, floats, from_vec, ints, unless_f32, zeros_like};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use sieve_cpu::AttentionShape;

pub(crate) fn attention(qkv: FlexTensor, call: &AttentionCall<Flex>) -> AttentionOutput<Flex> {
    unless_f32!(&qkv, call.spec.num_heads, "attention": reference::attention::<Flex>(qkv, call));
    forward(&contiguous(qkv), window(call.spec), call)
}

pub(crate) fn attention_backward(
    qkv: FlexTensor,
    call: &AttentionCall<Flex>,
    output: AttentionOutput<Flex>,
    d_o: FlexTensor,
) -> FlexTensor {
    unless_f32!(&qkv, call.spec.num_heads, "attention_backward":
        reference::attention_backward::<Flex>(qkv, call, output, d_o));
    let operands = [output.o, output.lse, d_o];
    backward(&contiguous(qkv), window(call.spec), call, operands, None)
}

/// Sizes of a packed tensor.
pub(crate) fn attention_shape(qkv: &FlexTensor, spec: AttentionSpec) -> AttentionShape {
    shape_of(qkv.shape().dims(), spec)
}

/// As [`attention_shape`] from the tensor's dimensions.
pub(crate) fn shape_of(dims: [usize; 4], spec: AttentionSpec) -> AttentionShape {
    AttentionShape {
        batch: dims[0],
        seq_len: dims[1],
        num_heads: spec.num_heads,
        num_kv_heads: spec.num_kv_heads,
        head_dim: dims[3],
        softmax_scale: spec.softmax_scale as f32,
    }
}

/// Room for o, `width` wide, and the log-sum-exp.
pub(crate) fn empty_output(shape: AttentionShape, width: usize) -> [Vec<f32>; 2] {
    let rows = shape.batch * shape.seq_len * shape.num_heads;
    [vec![0.0; rows * width], vec![0.0; rows]]
}

/// What a kernel wrote there.
pub(crate) fn output_of(shape: AttentionShape, width: usize, [o, lse]: [Vec<f32>; 2]) -> AttentionOutput<Flex> {
    let (batch, seq_len, heads) = (shape.batch, shape.seq_len, shape.num_heads);
    AttentionOutput::new(
        from_vec(o, [batch, seq_len, heads, width]),
        from_vec(lse, [batch, heads, seq_len]),
    )
}

pub(crate) fn window(spec: AttentionSpec) -> sieve_cpu::Mask<'static> {
    spec.window_size
        .map_or(sieve_cpu::Mask::Causal, sieve_cpu::Mask::Window)
}

pub(crate) fn contiguous_bounds([start, end]: &DocumentBounds<Flex>) -> [FlexTensor; 2] {
    [contiguous(start.clone()), contiguous(end.clone())]
}

pub(crate) fn documents(bounds: &[FlexTensor; 2]) -> sieve_cpu::Documents<'_> {
    sieve_cpu::Documents {
        start: ints(&bounds[0]),
        end: ints(&bounds[1]),
    }
}

/// Attention of a contiguous tensor; of the call's mask `mask` alone counts.
pub(crate) fn forward(
    qkv: &FlexTensor,
    mask: sieve_cpu::Mask<'_>,
    call: &AttentionCall<Flex>,
) -> AttentionOutput<Flex> {
    let bounds = contiguous_bounds(&call.documents);
    let shape = attention_shape(qkv, call.spec);
    let [mut o, mut lse] = empty_output(shape, shape.head_dim);
    sieve_cpu::attention_forward(shape, floats(qkv), documents(&bounds), mask, &mut o, &mut lse);
    output_of(shape, shape.head_dim, [o, lse])
}

/// Its gradient.
pub(crate) fn backward(
    qkv: &FlexTensor,
    mask: sieve_cpu::Mask<'_>,
    call: &AttentionCall<Flex>,
    [o, lse, d_o]: [FlexTensor; 3],
    d_delta: Option<&mut [f32]>,
) -> FlexTensor {
    let bounds = contiguous_bounds(&call.documents);
    let mut dqkv = zeros_like(qkv);
    let [o, lse, d_o] = [o, lse, d_o].map(contiguous);
    sieve_cpu::attention_backward(
        attention_shape(qkv, call.spec),
        floats(qkv),
        documents(&bounds),
        mask,
        floats(&o),
        floats(&lse),
        floats(&d_o),
        &mut dqkv,
        d_delta,
    );
    from_vec(dqkv, qkv.shape())
}
