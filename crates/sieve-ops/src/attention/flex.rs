//! Dense and sliding-window attention on the CPU, and what every attention there shares.
use super::backend::{AttentionBackend, AttentionGradients, AttentionOutput, AttentionSpec};
use super::reference;
use crate::device::flex::{contiguous, floats, from_vec, ints, is_f32, plain_scores, zeros_like};
use crate::device::paths::scores;
use crate::documents::DocumentBounds;
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

impl AttentionBackend for Flex {
    fn attention(
        qkv: FlexTensor,
        bounds: &DocumentBounds<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self> {
        if !is_f32(&qkv) {
            return plain_scores("attention", scores(&qkv, spec.num_heads), || {
                reference::attention::<Self>(qkv, bounds, spec)
            });
        }
        forward(
            &contiguous(qkv),
            &contiguous_bounds(bounds),
            window(spec),
            spec,
        )
    }
}

impl AttentionGradients for Flex {
    fn attention_backward(
        qkv: FlexTensor,
        bounds: &DocumentBounds<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: FlexTensor,
    ) -> FlexTensor {
        if !is_f32(&qkv) {
            return plain_scores("attention_backward", scores(&qkv, spec.num_heads), || {
                reference::attention_backward::<Self>(qkv, bounds, spec, output, d_o)
            });
        }
        let (qkv, bounds) = (contiguous(qkv), contiguous_bounds(bounds));
        let operands = [output.o, output.lse, d_o];
        backward(&qkv, &bounds, window(spec), spec, operands, None)
    }
}

/// Sizes of a packed tensor.
pub(crate) fn attention_shape(qkv: &FlexTensor, spec: AttentionSpec) -> sieve_cpu::AttentionShape {
    let shape = qkv.shape();
    sieve_cpu::AttentionShape {
        batch: shape[0],
        seq_len: shape[1],
        num_heads: spec.num_heads,
        num_kv_heads: spec.num_kv_heads,
        head_dim: shape[3],
        softmax_scale: spec.softmax_scale as f32,
    }
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

pub(crate) fn forward(
    qkv: &FlexTensor,
    bounds: &[FlexTensor; 2],
    mask: sieve_cpu::Mask<'_>,
    spec: AttentionSpec,
) -> AttentionOutput<Flex> {
    let shape = attention_shape(qkv, spec);
    let (batch, seq_len, heads) = (shape.batch, shape.seq_len, shape.num_heads);
    let mut o = vec![0.0; batch * seq_len * heads * shape.head_dim];
    let mut lse = vec![0.0; batch * heads * seq_len];
    sieve_cpu::attention_forward(
        shape,
        floats(qkv),
        documents(bounds),
        mask,
        &mut o,
        &mut lse,
    );
    AttentionOutput {
        o: from_vec(o, [batch, seq_len, heads, shape.head_dim]),
        lse: from_vec(lse, [batch, heads, seq_len]),
        o_rest: None,
    }
}

pub(crate) fn backward(
    qkv: &FlexTensor,
    bounds: &[FlexTensor; 2],
    mask: sieve_cpu::Mask<'_>,
    spec: AttentionSpec,
    [o, lse, d_o]: [FlexTensor; 3],
    d_delta: Option<&mut [f32]>,
) -> FlexTensor {
    let mut dqkv = zeros_like(qkv);
    let [o, lse, d_o] = [o, lse, d_o].map(contiguous);
    sieve_cpu::attention_backward(
        attention_shape(qkv, spec),
        floats(qkv),
        documents(bounds),
        mask,
        floats(&o),
        floats(&lse),
        floats(&d_o),
        &mut dqkv,
        d_delta,
    );
    from_vec(dqkv, qkv.shape())
}
