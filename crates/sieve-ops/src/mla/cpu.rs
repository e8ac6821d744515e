//! MLA on the CPU; f32 takes the kernels of `sieve-cpu`, any other dtype the reference.
use super::{MlaCall, MlaNorm, MlaPackCall, MlaSpec, reference};
use crate::attention::AttentionOutput;
use crate::attention::cpu::{contiguous_bounds, documents, empty_output, output_of, shape_of};
use crate::device::flex::{contiguous, floats, from_vec, ints, is_f32, plain, plain_scores, zeros_like};
use crate::device::paths::scores;
use crate::rope::RopeTables;
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use sieve_cpu::{AttentionShape, MlaPack};

fn attention_shape(packed: &FlexTensor, spec: MlaSpec) -> AttentionShape {
    let dims = packed.shape();
    let packed_heads = spec.attention().packed_heads();
    shape_of([dims[0], dims[1], packed_heads, spec.key_dim()], spec.attention())
}

/// A call with contiguous tensors.
fn contiguous_call(call: MlaPackCall<Flex>) -> MlaPackCall<Flex> {
    MlaPackCall {
        positions: contiguous(call.positions),
        rope: RopeTables {
            cos: contiguous(call.rope.cos),
            sin: contiguous(call.rope.sin),
        },
        norm: call.norm.map(|norm| MlaNorm {
            q_weight: contiguous(norm.q_weight),
            k_weight: contiguous(norm.k_weight),
            epsilon: norm.epsilon,
        }),
        spec: call.spec,
    }
}

/// A contiguous call as the kernels take it.
fn pack(call: &MlaPackCall<Flex>) -> MlaPack<'_> {
    MlaPack {
        num_heads: call.spec.num_heads,
        head_dim: call.spec.head_dim,
        rope_dim: call.spec.rope_dim,
        cos: floats(&call.rope.cos),
        sin: floats(&call.rope.sin),
        positions: ints(&call.positions),
        norm: call.norm.as_ref().map(|norm| sieve_cpu::MlaNorm {
            q_weight: floats(&norm.q_weight),
            k_weight: floats(&norm.k_weight),
            eps: norm.epsilon as f32,
        }),
    }
}

pub(crate) fn mla_pack(inputs: [FlexTensor; 3], call: MlaPackCall<Flex>) -> (FlexTensor, Option<[FlexTensor; 2]>) {
    if !is_f32(&inputs[0]) {
        return plain("mla_pack", || reference::mla_pack(inputs, call));
    }
    let [q, kv, k_rope] = inputs.map(contiguous);
    let (call, shape) = (contiguous_call(call), q.shape());
    let sizes = [shape[0], shape[1], call.spec.token_len()];
    let mut packed = vec![0.0; sizes.iter().product()];
    let [q, kv, k_rope] = [&q, &kv, &k_rope].map(floats);
    let keys = sieve_cpu::mla_pack_forward(&pack(&call), [q, kv, k_rope], &mut packed);
    let keys = keys.map(|[rotated, scale]| {
        [(rotated, call.spec.rope_dim), (scale, call.spec.num_heads)]
            .map(|(values, width)| from_vec(values, [shape[0], shape[1], width]))
    });
    (from_vec(packed, sizes), keys)
}

pub(crate) fn mla_attention(packed: FlexTensor, call: &MlaCall<Flex>) -> AttentionOutput<Flex> {
    let spec = call.spec;
    if !is_f32(&packed) {
        let scores = scores(&packed, spec.num_heads);
        return plain_scores("mla_attention", scores, || {
            reference::mla_attention::<Flex>(packed, call)
        });
    }
    let (packed, bounds) = (contiguous(packed), contiguous_bounds(&call.documents));
    let shape = attention_shape(&packed, spec);
    let [mut o, mut lse] = empty_output(shape, spec.head_dim);
    sieve_cpu::mla_attention_forward(
        shape,
        spec.head_dim,
        floats(&packed),
        documents(&bounds),
        &mut o,
        &mut lse,
    );
    output_of(shape, spec.head_dim, [o, lse])
}

pub(crate) fn mla_pack_backward(
    call: MlaPackCall<Flex>,
    normed: Option<[FlexTensor; 3]>,
    dy: FlexTensor,
) -> ([FlexTensor; 3], Option<[FlexTensor; 2]>) {
    if !is_f32(&dy) {
        return plain("mla_pack_backward", || reference::mla_pack_backward(call, normed, dy));
    }
    let (dy, call) = (contiguous(dy), contiguous_call(call));
    let (shape, spec) = (dy.shape(), call.spec);
    let widths = [
        spec.num_heads * spec.key_dim(),
        spec.num_heads * 2 * spec.head_dim,
        spec.rope_dim,
    ];
    let sizes = widths.map(|width| [shape[0], shape[1], width]);
    let [mut dq, mut dkv, mut dk] = sizes.map(|sizes| vec![0.0; sizes.iter().product()]);
    let normed = normed.map(|inputs| inputs.map(contiguous));
    let normed = normed.as_ref().map(|inputs| inputs.each_ref().map(floats));
    let op = pack(&call);
    let weights = sieve_cpu::mla_pack_backward(&op, normed, floats(&dy), [&mut dq, &mut dkv, &mut dk]);
    let weights = weights.map(|weights| weights.map(|weight| from_vec(weight, [spec.key_dim()])));
    let [q, kv, k_rope] = sizes;
    ([from_vec(dq, q), from_vec(dkv, kv), from_vec(dk, k_rope)], weights)
}

pub(crate) fn mla_attention_backward(
    packed: FlexTensor,
    call: &MlaCall<Flex>,
    output: AttentionOutput<Flex>,
    d_o: FlexTensor,
) -> FlexTensor {
    let spec = call.spec;
    if !is_f32(&packed) {
        let scores = scores(&packed, spec.num_heads);
        return plain_scores("mla_attention_backward", scores, || {
            reference::mla_attention_backward::<Flex>(packed, call, output, d_o)
        });
    }
    let (packed, bounds) = (contiguous(packed), contiguous_bounds(&call.documents));
    let [o, lse, d_o] = [output.o, output.lse, d_o].map(contiguous);
    let mut d_packed = zeros_like(&packed);
    sieve_cpu::mla_attention_backward(
        attention_shape(&packed, spec),
        spec.head_dim,
        floats(&packed),
        documents(&bounds),
        floats(&o),
        floats(&lse),
        floats(&d_o),
        &mut d_packed,
    );
    from_vec(d_packed, packed.shape())
}
