//! MLA on the CPU; f32 takes the kernels of `sieve-cpu`, any other dtype the reference.
use super::backend::{MlaBackend, MlaGradients, MlaPackCall, MlaSpec};
use super::reference;
use crate::attention::AttentionOutput;
use crate::attention::flex::{contiguous_bounds, documents, empty_output, output_of, shape_of};
use crate::device::flex::{contiguous, floats, from_vec, ints, is_f32, plain, plain_scores, zeros_like};
use crate::device::paths::scores;
use crate::documents::DocumentBounds;
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
    }
}

impl MlaBackend for Flex {
    fn mla_pack(inputs: [FlexTensor; 3], call: MlaPackCall<Self>) -> FlexTensor {
        if !is_f32(&inputs[0]) {
            return plain("mla_pack", || reference::mla_pack(inputs, call));
        }
        let [q, kv, k_rope] = inputs.map(contiguous);
        let (call, shape) = (contiguous_call(call), q.shape());
        let sizes = [shape[0], shape[1], call.spec.token_len()];
        let mut packed = vec![0.0; sizes.iter().product()];
        let [q, kv, k_rope] = [&q, &kv, &k_rope].map(floats);
        sieve_cpu::mla_pack_forward(&pack(&call), q, kv, k_rope, &mut packed);
        from_vec(packed, sizes)
    }

    fn mla_attention(packed: FlexTensor, bounds: &DocumentBounds<Self>, spec: MlaSpec) -> AttentionOutput<Self> {
        if !is_f32(&packed) {
            let scores = scores(&packed, spec.num_heads);
            return plain_scores("mla_attention", scores, || {
                reference::mla_attention::<Self>(packed, bounds, spec)
            });
        }
        let (packed, bounds) = (contiguous(packed), contiguous_bounds(bounds));
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
}

impl MlaGradients for Flex {
    fn mla_pack_backward(call: MlaPackCall<Self>, dy: FlexTensor) -> [FlexTensor; 3] {
        if !is_f32(&dy) {
            return plain("mla_pack_backward", || reference::mla_pack_backward(call, dy));
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
        sieve_cpu::mla_pack_backward(&pack(&call), floats(&dy), &mut dq, &mut dkv, &mut dk);
        let [q, kv, k_rope] = sizes;
        [from_vec(dq, q), from_vec(dkv, kv), from_vec(dk, k_rope)]
    }

    fn mla_attention_backward(
        packed: FlexTensor,
        bounds: &DocumentBounds<Self>,
        spec: MlaSpec,
        output: AttentionOutput<Self>,
        d_o: FlexTensor,
    ) -> FlexTensor {
        if !is_f32(&packed) {
            let scores = scores(&packed, spec.num_heads);
            return plain_scores("mla_attention_backward", scores, || {
                reference::mla_attention_backward::<Self>(packed, bounds, spec, output, d_o)
            });
        }
        let (packed, bounds) = (contiguous(packed), contiguous_bounds(bounds));
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
}
