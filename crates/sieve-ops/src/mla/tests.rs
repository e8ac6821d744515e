//! MLA's ops against their references and finite differences, for contiguous inputs and views.
use super::*;
use crate::reference;
use crate::testing::{
    Ad, Float, Input, Random, RandomInput, check_finite_differences, check_parity, check_views, documents, float,
    primitive,
};
use burn::tensor::DType;
use sieve_core::KernelPolicy;

/// Sizes with the usual softmax scale.
fn spec(num_heads: usize, head_dim: usize, rope_dim: usize) -> MlaSpec {
    MlaSpec {
        num_heads,
        head_dim,
        rope_dim,
        softmax_scale: 1.0 / ((head_dim + rope_dim) as f64).sqrt(),
        policy: KernelPolicy::default(),
    }
}

/// q, kv and k_rope, and with norms the weights of queries and keys.
fn inputs(spec: MlaSpec, [batch, n]: [usize; 2], is_normed: bool, seed: u64) -> Vec<Input> {
    let mut random = Random(seed);
    let widths = [spec.num_heads * spec.key_dim(), spec.num_heads * 2 * spec.head_dim, spec.rope_dim];
    let mut inputs: Vec<Input> = widths.map(|width| random.input(&[batch, n, width])).into();
    if is_normed {
        inputs.extend([(); 2].map(|()| random.input(&[spec.key_dim()]).affine(0.3, 1.0)));
    }
    inputs
}

/// Large, so that a test fails if epsilon is added in another place.
const EPSILON: f64 = 0.25;

fn rope(spec: MlaSpec, dtype: DType) -> RotaryEmbedding<Ad> {
    RotaryEmbedding::with_dtype(spec.rope_dim, 80, 100.0, &Default::default(), dtype)
}

/// Both ops, as a layer runs them between its projections.
fn run(inputs: &[Float], lengths: &[usize], dims: [usize; 2], spec: MlaSpec) -> Float {
    let documents = documents::<Ad>(lengths, dims);
    let qkv = [0, 1, 2].map(|n| float::<3>(&inputs[n]));
    let rope = rope(spec, qkv[0].dtype());
    let norm = inputs.get(3..5).map(|weights| QkNorm {
        q_weight: float::<1>(&weights[0]),
        k_weight: float::<1>(&weights[1]),
        epsilon: EPSILON,
    });
    let (packed, _) = mla_pack(qkv, norm, documents.positions.clone(), &rope, spec);
    primitive(mla_attention(packed, &documents, spec))
}

/// The references of both ops.
fn run_reference(inputs: &[Float], lengths: &[usize], dims: [usize; 2], spec: MlaSpec) -> Float {
    let documents = documents::<Ad>(lengths, dims);
    let rope = rope(spec, float::<3>(&inputs[0]).dtype());
    let call = MlaPackCall {
        positions: documents.positions.clone().into_primitive(),
        rope: rope.tables(),
        norm: inputs.get(3..5).map(|weights| MlaNorm {
            q_weight: weights[0].clone(),
            k_weight: weights[1].clone(),
            epsilon: EPSILON,
        }),
        spec,
    };
    let qkv = [0, 1, 2].map(|n| inputs[n].clone());
    let (packed, _) = reference::mla_pack::<Ad>(qkv, call);
    reference::mla_attention::<Ad>(packed, &MlaCall::new(documents.bounds(), spec)).o
}

#[test]
fn mla_equals_the_reference() {
    for (dims, spec, lengths, is_normed) in [
        ([2, 23], spec(3, 6, 4), &[][..], false),
        ([2, 23], spec(3, 6, 4), &[], true),
        ([2, 63], spec(2, 16, 8), &[20, 1, 1, 30], true),
        ([1, 1], spec(1, 8, 2), &[], false),
        ([1, 70], spec(2, 64, 32), &[33], false),
        ([1, 70], spec(2, 64, 32), &[33], true),
        ([2, 9], spec(2, 3, 4), &[4], false),
        ([2, 9], spec(2, 3, 4), &[4], true),
    ] {
        let inputs = inputs(spec, dims, is_normed, 1);
        let op = |inputs: &[Float]| run(inputs, lengths, dims, spec);
        let reference = |inputs: &[Float]| run_reference(inputs, lengths, dims, spec);
        check_parity("mla", &inputs, &op, &reference);
        check_views("mla", &inputs, &op);
        if dims == [2, 9] {
            check_finite_differences("mla", &inputs, &op);
        }
    }
}
