use super::{dma, inputs, run, spec};
use crate::tensors::ints;
use crate::testing::{
    Ad, Random, RandomInput, check_later_tokens_change_nothing, check_other_documents_change_nothing, documents, host,
    host_ints, primitive,
};
use crate::{
    AttentionCall, DeviceBackend, DmaBias, DmaCall, DmaScoresCall, DmaSelection, Documents, dma_select, reference,
};
use burn::tensor::{DType, Tensor, TensorData};
use burn_flex::Flex;
use proptest::prelude::*;
use sieve_core::{DmaWindow, KeepOLow};

fn scores(values: &[f32], dims: [usize; 3]) -> Tensor<Flex, 3> {
    Tensor::from_data(TensorData::new(values.to_vec(), dims), &Default::default())
}

/// The keys that a query sees, by DMA's definition: the last `local_window_size` ones, and of the older ones those with
/// the largest scores `z`.
fn visible(z: &[f32], start: usize, query: usize, window: DmaWindow) -> Vec<usize> {
    let local = (query + 1).saturating_sub(window.local_window_size).max(start);
    let mut keys: Vec<usize> = (start..local).collect();
    // Larger score first, then later key; == so that -0 ties with +0.
    keys.sort_by(|&a, &b| if z[a] == z[b] { b.cmp(&a) } else { z[b].total_cmp(&z[a]) });
    keys.truncate(window.num_ranked());
    keys.extend(local..=query);
    keys
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_query_sees_its_last_keys_and_the_highest_ranked_older_ones(
        picks in prop::collection::vec((0usize..9, any::<f32>()), 1..70),
        lengths in prop::collection::vec(1usize..20, 0..6),
        keep_window_size in 1usize..24,
        local in 0usize..3,
        ties in any::<bool>(),
    ) {
        // No local window, a part of the window, all of it.
        let local_window_size = [0, keep_window_size / 2, keep_window_size][local];
        let window = DmaWindow { keep_window_size, local_window_size };
        // Few different scores, so that many keys tie; they include both zeros and the ends of f32's range.
        let levels = [0.0, -0.0, 1.0, -1.0, 1.0 + f32::EPSILON, f32::MIN_POSITIVE, -3.0, 60.0, f32::MAX];
        // Two KV heads: the picks and their reverse.
        let one: Vec<f32> = picks
            .iter()
            .map(|&(level, free)| if ties || !free.is_finite() { levels[level] } else { free })
            .collect();
        let seq_len = one.len();
        let z: Vec<f32> = one.iter().chain(one.iter().rev()).copied().collect();
        let documents = documents::<Flex>(&lengths, [1, seq_len]);
        let expire = host_ints(dma_select(scores(&z, [1, 2, seq_len]), &documents, window).expect("fits"));
        let oracle = reference::dma_select::<Flex>(
            primitive(scores(&z, [1, 2, seq_len])), &documents.bounds(), window);
        prop_assert_eq!(&expire, &host_ints::<Flex, 3>(Tensor::from_primitive(oracle.expire)));
        let (start, end) = (host_ints(documents.start), host_ints(documents.end));
        for head in 0..2 {
            let (z, expire) = (&z[head * seq_len..][..seq_len], &expire[head * seq_len..][..seq_len]);
            for (query, &first) in start.iter().enumerate() {
                let first = first as usize;
                let kept = visible(z, first, query, window);
                for (key, &expire) in expire.iter().enumerate() {
                    let active = first <= key && key <= query && (query as i64) < expire;
                    prop_assert_eq!(active, kept.contains(&key), "head {} query {} key {}", head, query, key);
                }
                prop_assert!(expire[query] >= query as i64 && expire[query] <= end[query]);
            }
        }
    }
}

#[test]
fn a_query_that_sees_nothing_gives_zeros() {
    let (seq_len, head_dim) = (40, 16);
    let spec = spec(2, head_dim);
    let mut random = Random(2);
    let qkv = random.input(&[1, seq_len, spec.packed_heads(), head_dim]);
    let delta = random.input(&[1, 3, seq_len]);
    let documents = documents::<Flex>(&[], [1, seq_len]);
    // KV head 0 sees no key, head 1 only keys from 20 on, head 2 all keys.
    let expire = (0..3 * seq_len as i32).map(|n| match (n / seq_len as i32, n % seq_len as i32) {
        (0, key) => key,
        (1, key) if key < 20 => key,
        _ => seq_len as i32,
    });
    let expire = ints::<Flex, 3>(expire.collect(), [1, 3, seq_len], &Default::default()).into_primitive();
    for dtype in [DType::F32, DType::F64] {
        let call = DmaCall::<Flex> {
            qkv: qkv.tensor(dtype),
            delta: delta.tensor(dtype),
            selection: DmaSelection::of_expire(expire.clone()),
            attention: AttentionCall::new(documents.bounds(), spec),
        };
        let output = Flex::dma_attention(&call, KeepOLow::Never);
        let d_o = Random(9).input(&[1, seq_len, spec.num_heads, head_dim]);
        let [dqkv, d_delta] = Flex::dma_attention_backward(&call, output.clone(), d_o.tensor(dtype)).map(host);
        let (o, lse) = (host(output.o), host(output.lse));
        let finite = o.iter().chain(&dqkv).chain(&d_delta);
        assert!(finite.into_iter().all(|x| x.is_finite()));
        for token in 0..seq_len {
            for head in 0..6 {
                let row = &o[(token * 6 + head) * head_dim..][..head_dim];
                let blind = head < 2 || (head < 4 && token < 20);
                let sum = lse[head * seq_len + token];
                assert_eq!(row.iter().all(|&x| x == 0.0), blind, "{token} {head}");
                assert_eq!(sum == f64::NEG_INFINITY, blind, "{token} {head}");
                let dq = &dqkv[(token * 12 + head) * head_dim..][..head_dim];
                assert!(!blind || dq.iter().all(|&x| x == 0.0));
            }
        }
    }
}

// Other tokens may change in which groups a row's terms are summed, and so their rounding.
#[test]
fn later_tokens_and_other_documents_change_rows_by_rounding_errors_at_most() {
    let spec = spec(2, 16);
    let op = |inputs: &[crate::testing::Float], documents: &Documents<Ad>| {
        run(inputs, documents, spec, dma(9, DmaBias::Exp))
    };
    let tolerance = 8.0 * f64::from(f32::EPSILON) * 4.0;
    check_later_tokens_change_nothing(inputs(spec, [1, 150, 16], 5), tolerance, &op);
    check_other_documents_change_nothing(inputs(spec, [1, 120, 16], 6), tolerance, &op);
}

#[test]
fn scores_of_a_token_do_not_depend_on_its_neighbours() {
    // Decoding computes the score of one token at a time. With another rounding than in a whole pass it could rank two
    // nearly equal keys differently.
    let spec = spec(2, 16);
    let [qkv, w_dt, a] = inputs(spec, [2, 37, 16], 7).map(|input| input.tensor(DType::F32));
    let scores_of = |qkv| {
        let (w_dt, a) = (w_dt.clone(), a.clone());
        host(Flex::dma_scores(&DmaScoresCall { qkv, w_dt, a, spec }))
    };
    let z = scores_of(qkv.clone());
    for (batch, token) in [(0, 0), (0, 5), (1, 17), (1, 36)] {
        let one = qkv.narrow(0, batch, 1).narrow(1, token, 1);
        for (head, alone) in scores_of(one).iter().enumerate() {
            assert_eq!(*alone, z[(batch * 3 + head) * 37 + token]);
        }
    }
}
