//! MLA's ops against their references, against differences, and for every way a tensor can lie in memory.
use super::*;
use crate::reference;
use crate::testing::{
    Ad, Float, Input, Random, RandomInput, check_finite_differences, check_parity, check_views, documents, float,
    primitive,
};
use burn::tensor::DType;

fn spec(num_heads: usize, head_dim: usize, rope_dim: usize) -> MlaSpec {
    MlaSpec {
        num_heads,
        head_dim,
        rope_dim,
        softmax_scale: 1.0 / ((head_dim + rope_dim) as f64).sqrt(),
    }
}

fn inputs(spec: MlaSpec, [batch, n]: [usize; 2], seed: u64) -> Vec<Input> {
    let mut random = Random(seed);
    [
        spec.num_heads * spec.key_dim(),
        spec.num_heads * 2 * spec.head_dim,
        spec.rope_dim,
    ]
    .map(|width| random.input(&[batch, n, width]))
    .into()
}

fn rope(spec: MlaSpec, dtype: DType) -> RotaryEmbedding<Ad> {
    RotaryEmbedding::with_dtype(spec.rope_dim, 80, 100.0, &Default::default(), dtype)
}

/// The whole layer between projections.
fn run(inputs: &[Float], lengths: &[usize], dims: [usize; 2], spec: MlaSpec) -> Float {
    let documents = documents::<Ad>(lengths, dims);
    let [q, kv, k_rope] = [0, 1, 2].map(|n| float::<3>(&inputs[n]));
    let rope = rope(spec, q.dtype());
    let packed = mla_pack(q, kv, k_rope, documents.positions.clone(), &rope, spec);
    primitive(mla_attention(packed, &documents, spec))
}

fn run_reference(inputs: &[Float], lengths: &[usize], dims: [usize; 2], spec: MlaSpec) -> Float {
    let documents = documents::<Ad>(lengths, dims);
    let rope = rope(spec, float::<3>(&inputs[0]).dtype());
    let [q, kv, k_rope] = [0, 1, 2].map(|n| inputs[n].clone());
    let call = MlaPackCall {
        positions: documents.positions.clone().into_primitive(),
        rope: rope.tables(),
        spec,
    };
    let packed = reference::mla_pack::<Ad>([q, kv, k_rope], call);
    reference::mla_attention::<Ad>(packed, &documents.bounds(), spec).o
}

#[test]
fn mla_equals_the_reference() {
    for (dims, spec, lengths) in [
        ([2, 23], spec(3, 6, 4), &[][..]),
        ([2, 63], spec(2, 16, 8), &[20, 1, 1, 30]),
        ([1, 1], spec(1, 8, 2), &[]),
        ([1, 70], spec(2, 64, 32), &[33]),
    ] {
        let inputs = inputs(spec, dims, 1);
        let op = |inputs: &[Float]| run(inputs, lengths, dims, spec);
        check_parity("mla", &inputs, &op, &|inputs| {
            run_reference(inputs, lengths, dims, spec)
        });
        check_views("mla", &inputs, &op);
    }
}

#[test]
fn mla_gradients_are_those_of_the_function() {
    let (dims, spec) = ([2, 9], spec(2, 3, 4));
    check_finite_differences("mla", &inputs(spec, dims, 2), &|inputs| run(inputs, &[4], dims, spec));
}
