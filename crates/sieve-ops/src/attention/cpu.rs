//! Dense and sliding-window attention on the CPU, and code for all attention there. Dtypes but f32 run the reference.
use super::{AttentionCall, AttentionOutput, AttentionSpec, reference};
use crate::DocumentBounds;
use crate::device::{contiguous, floats, from_vec, ints, unless_f32, zeros_like};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use sieve_cpu::{Mask, ScaledShape};

pub(crate) fn attention(qkv: FlexTensor, call: &AttentionCall<Flex>) -> AttentionOutput<Flex> {
    attention_of_last(qkv, call, 0)
}

pub(crate) fn attention_of_last(qkv: FlexTensor, call: &AttentionCall<Flex>, first: usize) -> AttentionOutput<Flex> {
    unless_f32!(&qkv, call.spec.num_heads, "attention": reference::attention::<Flex>(qkv, call));
    let qkv = contiguous(qkv);
    forward_from(first, &qkv, attention_shape(&qkv, call.spec), mask(call.spec), &call.documents)
}

/// `dqkv`, packed as `qkv`, of attention without a bias per key; of `output` only o and lse are read.
pub(crate) fn attention_backward(
    qkv: FlexTensor,
    call: &AttentionCall<Flex>,
    output: AttentionOutput<Flex>,
    d_o: FlexTensor,
) -> FlexTensor {
    unless_f32!(&qkv, call.spec.num_heads, "attention_backward":
        reference::attention_backward::<Flex>(qkv, call, output, d_o));
    let qkv = contiguous(qkv);
    let shape = attention_shape(&qkv, call.spec);
    let (operands, d_delta) = ([output.o, output.lse, d_o], None);
    backward(&qkv, shape, mask(call.spec), &call.documents, operands, d_delta)
}

/// New o, `[batch, seq_len, num_heads, head_dim]`, and lse, `[batch, num_heads, seq_len]`, as if each row's softmax had
/// its head's sink as one more logit, whose value is zero.
pub(crate) fn join_sinks(output: AttentionOutput<Flex>, sinks: FlexTensor) -> AttentionOutput<Flex> {
    unless_f32!(&output.o, "join_sinks": reference::join_sinks::<Flex>(output, sinks));
    let (o_shape, lse_shape) = (output.o.shape(), output.lse.shape());
    let seq_len = lse_shape[2];
    let [o, lse, sinks] = [output.o, output.lse, sinks].map(contiguous);
    let [mut o, mut lse] = [o, lse].map(|x| floats(&x).to_vec());
    sieve_cpu::join_sinks(seq_len, floats(&sinks), &mut o, &mut lse);
    AttentionOutput::new(from_vec(o, o_shape), from_vec(lse, lse_shape))
}

pub(crate) fn sinks_backward(output: &AttentionOutput<Flex>, sinks: FlexTensor, d_o: FlexTensor) -> FlexTensor {
    unless_f32!(&output.o, "sinks_backward": reference::sinks_backward::<Flex>(output, sinks, d_o));
    let seq_len = output.lse.shape()[2];
    let [o, lse, d_o, sinks] = [output.o.clone(), output.lse.clone(), d_o, sinks].map(contiguous);
    let gradient = sieve_cpu::sinks_backward(seq_len, floats(&sinks), floats(&o), floats(&lse), floats(&d_o));
    from_vec(gradient, sinks.shape())
}

/// Sizes of an attention call, from a packed tensor of q, k and v heads.
pub(crate) fn attention_shape(qkv: &FlexTensor, spec: AttentionSpec) -> ScaledShape {
    shape_of(qkv.shape().dims(), spec)
}

/// Like [`attention_shape`], from the packed tensor's dimensions.
pub(crate) fn shape_of([batch, seq_len, _, head_dim]: [usize; 4], spec: AttentionSpec) -> ScaledShape {
    ScaledShape {
        softmax_scale: spec.softmax_scale as f32,
        ..ScaledShape::new([batch, seq_len], [spec.num_heads, spec.num_kv_heads], head_dim)
    }
}

fn mask(spec: AttentionSpec) -> Mask<'static> {
    match (spec.window_size, spec.far) {
        (None, _) => Mask::Causal,
        (Some(window_size), None) => Mask::Window(window_size),
        (Some(window_size), Some(far)) => Mask::Far(window_size, far),
    }
}

pub(crate) fn contiguous_bounds(bounds: &DocumentBounds<Flex>) -> [FlexTensor; 2] {
    bounds.clone().map(contiguous)
}

pub(crate) fn documents([start, end]: &[FlexTensor; 2]) -> sieve_cpu::Documents<'_> {
    sieve_cpu::Documents::new(ints(start), ints(end))
}

/// Forward attention of a contiguous packed tensor.
pub(crate) fn forward(
    qkv: &FlexTensor,
    shape: ScaledShape,
    mask: Mask<'_>,
    bounds: &DocumentBounds<Flex>,
) -> AttentionOutput<Flex> {
    forward_from(0, qkv, shape, mask, bounds)
}

/// As [`forward`], of the tokens from `first` on in each row; the outputs of the others may hold anything.
fn forward_from(
    first: usize,
    qkv: &FlexTensor,
    shape: ScaledShape,
    mask: Mask<'_>,
    bounds: &DocumentBounds<Flex>,
) -> AttentionOutput<Flex> {
    let bounds = contiguous_bounds(bounds);
    let (batch, seq_len, heads) = (shape.batch, shape.seq_len, shape.num_heads);
    let mut lse = vec![0.0; batch * seq_len * heads];
    let mut o = sieve_cpu::zeros(lse.len() * shape.head_dim_v);
    sieve_cpu::attention_from(first, shape, floats(qkv), documents(&bounds), mask, &mut o, &mut lse);
    AttentionOutput::new(from_vec(o, [batch, seq_len, heads, shape.head_dim_v]), from_vec(lse, [batch, heads, seq_len]))
}

/// `dqkv` of [`forward`]. For a mask with a bias per key, writes the biases' gradient to `d_delta`.
pub(crate) fn backward(
    qkv: &FlexTensor,
    shape: ScaledShape,
    mask: Mask<'_>,
    bounds: &DocumentBounds<Flex>,
    o_lse_and_d_o: [FlexTensor; 3],
    d_delta: Option<&mut [f32]>,
) -> FlexTensor {
    let bounds = contiguous_bounds(bounds);
    let mut dqkv = zeros_like(qkv);
    let [o, lse, d_o] = o_lse_and_d_o.map(contiguous);
    sieve_cpu::attention_backward(
        shape,
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
