mod gradients;
mod mask;
mod operands;

use super::{dma_bias, dma_rank, dynamic_mask_attention};
use crate::tensors::tensor;
use crate::testing::{Ad, Float, Input, Random, RandomInput, float, primitive};
use crate::{AttentionCall, AttentionSpec, DmaBias, DmaCall, DmaLayer, Documents, reference};
use burn::tensor::{DType, Int, Tensor};
use burn_flex::Flex;
use sieve_core::{DmaRecency, DmaShape};

/// Three KV heads with `group_size` query heads each.
fn spec(group_size: usize, head_dim: usize) -> AttentionSpec {
    AttentionSpec::dense([3 * group_size, 3], head_dim)
}

fn dma(keep_window_size: usize, bias: DmaBias) -> DmaShape {
    DmaShape { bias, ..DmaShape::published(keep_window_size) }
}

/// DMA with a recency term and a local window of a third of the keys.
fn with_recency(keep_window_size: usize) -> DmaShape {
    DmaShape {
        bias: DmaBias::Linear,
        recency: DmaRecency::Slope,
        shortest_period: Some(3.0),
        longest_period: Some(40.0),
        local_window_size: keep_window_size / 3,
        ..DmaShape::published(keep_window_size)
    }
}

/// The packed tensor, W_dt and A.
fn inputs(spec: AttentionSpec, [batch, seq_len, head_dim]: [usize; 3], seed: u64) -> [Input; 3] {
    let mut random = Random(seed);
    let width = spec.num_kv_heads * head_dim;
    [
        random.input(&[batch, seq_len, spec.packed_heads(), head_dim]),
        random.input(&[spec.num_kv_heads, width]).affine(1.0 / (width as f64).sqrt(), 0.0),
        random.input(&[spec.num_kv_heads]).affine(0.5, 0.0),
    ]
}

fn layer(inputs: &[Float], spec: DmaShape) -> DmaLayer<Ad> {
    let (w_dt, a) = (float(&inputs[1]), float(&inputs[2]));
    DmaLayer { w_dt, a, spec }
}

fn run(inputs: &[Float], documents: &Documents<Ad>, spec: AttentionSpec, dma: DmaShape) -> Float {
    let found = dynamic_mask_attention(float(&inputs[0]), layer(inputs, dma), documents, spec);
    primitive(found.expect("fits").o)
}

/// Scores, brute-force selection and attention with the whole score matrix, in plain Burn ops.
pub(crate) fn reference_run(inputs: &[Float], documents: &Documents<Ad>, spec: AttentionSpec, dma: DmaShape) -> Float {
    let (qkv, bounds) = (inputs[0].clone(), documents.bounds());
    let z = reference::dma_scores(&layer(inputs, dma).scores(qkv.clone(), spec));
    let rank = dma_rank(float::<3>(&z), documents.positions.clone(), dma.slopes(spec.num_kv_heads));
    let selection = reference::dma_select::<Ad>(primitive(rank.clone()), &bounds, dma.window());
    let call = DmaCall::<Ad> {
        qkv,
        delta: primitive(dma_bias(rank, dma.bias)),
        selection,
        attention: AttentionCall::new(bounds, spec),
    };
    reference::dma_attention(&call).o
}

#[test]
fn at_131072_tokens_a_rank_is_off_by_two_roundings() {
    let (len, periods) = (131_072, [64.0, 8192.0]);
    let z = Random(3).input(&[1, 2, len]);
    let positions = Tensor::<Flex, 1, Int>::arange(0..len as i64, &Default::default()).unsqueeze::<2>();
    let slopes = periods.map(|period| 1.0 / period).to_vec();
    let scores = tensor::<Flex, 3>(z.tensor(DType::F32));
    let rank: Vec<f32> = dma_rank(scores, positions, Some(slopes)).into_data().iter().collect();
    let z: Vec<f64> = z.values.iter().map(|&z| f64::from(z as f32)).collect();
    for (head, period) in periods.into_iter().enumerate() {
        let off = (0..len).map(|at| {
            let exact = z[head * len + at] + at as f64 / period;
            (f64::from(rank[head * len + at]) - exact).abs()
        });
        // Half an ulp of the recency term, and half an ulp of the sum, whose exponent may be larger by 1.
        let share = len as f64 / period;
        let bound = 1.5 * share * f64::from(f32::EPSILON);
        let largest = off.fold(0.0, f64::max);
        assert!(largest <= bound && largest > bound / 8.0, "head {head}: {largest} of {bound}");
    }
}
