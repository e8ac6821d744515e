//! MLA on the CPU; f32 takes the kernels of `sieve-cpu`, any other dtype the reference.
use super::{MlaBackend, MlaSpec};
use crate::device::paths::scores;
use crate::flex::attention::{contiguous_bounds, documents};
use crate::flex::{contiguous, floats, from_vec, ints, is_f32, plain, plain_scores, zeros_like};
use crate::{AttentionOutput, DocumentBounds, RopeTables, reference};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use sieve_cpu::{AttentionShape, MlaPack};

fn shape_of(packed: &FlexTensor, spec: MlaSpec) -> AttentionShape {
    let dims = packed.shape();
    AttentionShape {
        batch: dims[0],
        seq_len: dims[1],
        num_heads: spec.num_heads,
        num_kv_heads: spec.num_heads,
        head_dim: spec.key_dim(),
        softmax_scale: spec.softmax_scale as f32,
    }
}

/// Tables and positions, contiguous.
struct Operands {
    cos: FlexTensor,
    sin: FlexTensor,
    positions: FlexTensor,
}

impl Operands {
    fn new(rope: &RopeTables<Flex>, positions: FlexTensor) -> Self {
        Self {
            cos: contiguous(rope.cos.clone()),
            sin: contiguous(rope.sin.clone()),
            positions: contiguous(positions),
        }
    }

    fn op(&self, spec: MlaSpec) -> MlaPack<'_> {
        MlaPack {
            num_heads: spec.num_heads,
            head_dim: spec.head_dim,
            rope_dim: spec.rope_dim,
            cos: floats(&self.cos),
            sin: floats(&self.sin),
            positions: ints(&self.positions),
        }
    }
}

impl MlaBackend for Flex {
    fn mla_pack(
        inputs: [FlexTensor; 3],
        positions: FlexTensor,
        rope: &RopeTables<Self>,
        spec: MlaSpec,
    ) -> FlexTensor {
        if !is_f32(&inputs[0]) {
            let [q, kv, k_rope] = inputs;
            return plain("mla_pack", || {
                reference::mla_pack::<Self>(q, kv, k_rope, positions, rope, spec)
            });
        }
        let [q, kv, k_rope] = inputs.map(contiguous);
        let operands = Operands::new(rope, positions);
        let shape = q.shape();
        let (batch, seq_len) = (shape[0], shape[1]);
        let mut packed = vec![0.0; batch * seq_len * spec.token_len()];
        sieve_cpu::mla_pack_forward(
            &operands.op(spec),
            floats(&q),
            floats(&kv),
            floats(&k_rope),
            &mut packed,
        );
        from_vec(packed, [batch, seq_len, spec.token_len()])
    }

    fn mla_pack_backward(
        positions: FlexTensor,
        rope: &RopeTables<Self>,
        spec: MlaSpec,
        dy: FlexTensor,
    ) -> [FlexTensor; 3] {
        if !is_f32(&dy) {
            return plain("mla_pack_backward", || {
                reference::mla_pack_backward::<Self>(positions, rope, spec, dy)
            });
        }
        let dy = contiguous(dy);
        let operands = Operands::new(rope, positions);
        let shape = dy.shape();
        let (batch, seq_len) = (shape[0], shape[1]);
        let widths = [
            spec.num_heads * spec.key_dim(),
            spec.num_heads * 2 * spec.head_dim,
            spec.rope_dim,
        ];
        let [mut dq, mut dkv, mut dk_rope] = widths.map(|width| vec![0.0; batch * seq_len * width]);
        sieve_cpu::mla_pack_backward(
            &operands.op(spec),
            floats(&dy),
            &mut dq,
            &mut dkv,
            &mut dk_rope,
        );
        let [q_width, kv_width, rope_width] = widths;
        [
            from_vec(dq, [batch, seq_len, q_width]),
            from_vec(dkv, [batch, seq_len, kv_width]),
            from_vec(dk_rope, [batch, seq_len, rope_width]),
        ]
    }

    fn mla_attention(
        packed: FlexTensor,
        bounds: &DocumentBounds<Self>,
        spec: MlaSpec,
    ) -> AttentionOutput<Self> {
        if !is_f32(&packed) {
            return plain_scores("mla_attention", scores(&packed, spec.num_heads), || {
                reference::mla_attention::<Self>(packed, bounds, spec)
            });
        }
        let (packed, bounds) = (contiguous(packed), contiguous_bounds(bounds));
        let shape = shape_of(&packed, spec);
        let rows = shape.batch * shape.seq_len * shape.num_heads;
        let (mut o, mut lse) = (vec![0.0; rows * spec.head_dim], vec![0.0; rows]);
        sieve_cpu::narrow_value_attention_forward(
            shape,
            spec.head_dim,
            floats(&packed),
            documents(&bounds),
            &mut o,
            &mut lse,
        );
        AttentionOutput {
            o: from_vec(
                o,
                [shape.batch, shape.seq_len, shape.num_heads, spec.head_dim],
            ),
            lse: from_vec(lse, [shape.batch, shape.num_heads, shape.seq_len]),
            o_rest: None,
        }
    }

    fn mla_attention_backward(
        packed: FlexTensor,
        bounds: &DocumentBounds<Self>,
        spec: MlaSpec,
        output: AttentionOutput<Self>,
        d_o: FlexTensor,
    ) -> FlexTensor {
        if !is_f32(&packed) {
            return plain_scores(
                "mla_attention_backward",
                scores(&packed, spec.num_heads),
                || reference::mla_attention_backward::<Self>(packed, bounds, spec, output, d_o),
            );
        }
        let (packed, bounds) = (contiguous(packed), contiguous_bounds(bounds));
        let [o, lse, d_o] = [output.o, output.lse, d_o].map(contiguous);
        let mut d_packed = zeros_like(&packed);
        sieve_cpu::narrow_value_attention_backward(
            shape_of(&packed, spec),
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
