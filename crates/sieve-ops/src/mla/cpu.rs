//! MLA on the CPU: attention in f32 takes the kernels of `sieve-cpu`, any other dtype the reference; packing is plain
//! Burn operations.
use super::{MlaCall, MlaSpec, reference};
use crate::AttentionOutput;
use crate::attention::cpu::{contiguous_bounds, documents, empty_output, output_of, shape_of};
use crate::device::{contiguous, floats, from_vec, unless_f32, zeros_like};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use sieve_cpu::AttentionShape;

pub(crate) use super::reference::{mla_pack, mla_pack_backward};

fn attention_shape(packed: &FlexTensor, spec: MlaSpec) -> AttentionShape {
    let dims = packed.shape();
    let packed_heads = spec.attention().packed_heads();
    shape_of([dims[0], dims[1], packed_heads, spec.key_dim()], spec.attention())
}

pub(crate) fn mla_attention(packed: FlexTensor, call: &MlaCall<Flex>) -> AttentionOutput<Flex> {
    let spec = call.spec;
    unless_f32!(&packed, spec.num_heads, "mla_attention": reference::mla_attention::<Flex>(packed, call));
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

pub(crate) fn mla_attention_backward(
    packed: FlexTensor,
    call: &MlaCall<Flex>,
    output: AttentionOutput<Flex>,
    d_o: FlexTensor,
) -> FlexTensor {
    let spec = call.spec;
    unless_f32!(&packed, spec.num_heads, "mla_attention_backward":
        reference::mla_attention_backward::<Flex>(packed, call, output, d_o));
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
