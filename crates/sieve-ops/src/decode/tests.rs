use super::{DmaCache, DmaToken, KeyCache, attention_decode, dma_decode, reference};
use crate::tensors::{primitive, tensor};
use crate::testing::{Random, RandomInput, assert_close, documents, host, host_ints};
use crate::{
    AttentionCall, AttentionSpec, DeviceBackend, DmaBias, DmaCall, DmaSelection, attention, dma_bias, dma_select,
};
use burn::tensor::{DType, Int, Tensor};
use burn_flex::{Flex, FlexTensor};
use sieve_core::{DmaWindow, Draw, KeepOLow, KernelPolicy};

const HEAD_DIM: usize = 16;
const KV_HEADS: usize = 3;

fn spec(group_size: usize) -> AttentionSpec {
    AttentionSpec::dense([KV_HEADS * group_size, KV_HEADS], HEAD_DIM)
}

/// The query of token `at`, and the keys of the tokens up to it.
fn last_query(qkv: &Tensor<Flex, 4>, at: usize, spec: AttentionSpec) -> (Tensor<Flex, 3>, KeyCache<Flex>) {
    let batch = qkv.dims()[0];
    let heads = spec.num_heads;
    let q = qkv.clone().narrow(1, at, 1).narrow(2, 0, heads);
    let keys = qkv.clone().narrow(1, 0, at + 1);
    (
        q.reshape([batch, heads, HEAD_DIM]),
        KeyCache::new(keys.clone().narrow(2, heads, KV_HEADS), keys.narrow(2, heads + KV_HEADS, KV_HEADS)),
    )
}

#[test]
fn one_query_gives_the_row_of_the_whole_pass() {
    for (group_size, seq_len) in [(1, 1), (2, 37), (4, 130)] {
        let spec = spec(group_size);
        let qkv = Random(1).input(&[2, seq_len, spec.packed_heads(), HEAD_DIM]);
        let qkv = tensor::<Flex, 4>(qkv.tensor(DType::F32));
        let rows = attention(qkv.clone(), &documents(&[], [2, seq_len]), spec);
        for at in [0, seq_len / 2, seq_len - 1] {
            let (q, keys) = last_query(&qkv, at, spec);
            let row = attention_decode(q, &keys, None, spec.softmax_scale, &mut ());
            let expected = rows.clone().narrow(1, at, 1);
            assert_close(&format!("row {at}"), &host(primitive(row)), &host(primitive(expected)), 4e-6);
        }
    }
}

#[test]
fn a_bias_per_key_equals_the_reference() {
    let spec = spec(2);
    let qkv = Random(2).input(&[2, 29, spec.packed_heads(), HEAD_DIM]);
    let delta = Random(3).input(&[2, KV_HEADS, 29]);
    let run = |dtype| {
        let (q, keys) = last_query(&tensor(qkv.tensor(dtype)), 28, spec);
        let delta = Some(tensor(delta.tensor(dtype)));
        let o = attention_decode(q, &keys, delta, spec.softmax_scale, &mut ());
        host(primitive(o))
    };
    assert_close("o", &run(DType::F32), &run(DType::F64), 2e-6);
}

/// Scores of five different values, so that many keys have equal scores.
fn tied_scores(seq_len: usize, seed: u64) -> FlexTensor {
    let mut random = Random(seed);
    let mut scores = random.input(&[2, KV_HEADS, seq_len]);
    let levels = [0.0, -0.0, 1.0, -1.0, 0.5];
    for value in &mut scores.values {
        *value = levels[random.below(levels.len())];
    }
    scores.tensor(DType::F32)
}

#[test]
fn dma_decodes_the_rows_of_the_whole_pass_with_ties() {
    let (seq_len, keep_window_size) = (48, 5);
    for (group_size, bias, local_window_size) in
        [(1, DmaBias::Exp, 0), (2, DmaBias::Linear, 2), (4, DmaBias::Exp, 1), (1, DmaBias::Linear, 5)]
    {
        let window = DmaWindow { keep_window_size, local_window_size };
        let spec = spec(group_size);
        let heads = spec.num_heads;
        let qkv = Random(4).input(&[2, seq_len, spec.packed_heads(), HEAD_DIM]);
        let qkv = qkv.tensor(DType::F32);
        let z = tied_scores(seq_len, 5);
        let all = documents::<Flex>(&[], [2, seq_len]);
        let expire = dma_select(tensor::<Flex, 3>(z.clone()), &all, window).expect("fits");
        let call = DmaCall {
            qkv: qkv.clone(),
            delta: primitive(dma_bias(tensor::<Flex, 3>(z.clone()), bias)),
            selection: DmaSelection::of_expire(expire.clone().into_primitive()),
            attention: AttentionCall::new(all.bounds(), spec),
        };
        let rows = Flex::dma_attention(&call, KeepOLow::Never).o;
        let expire = host_ints(expire);

        let token = |at: usize| qkv.narrow(1, at, 1);
        let first =
            [heads, heads + KV_HEADS].map(|head| tensor::<Flex, 4>(token(0)).narrow(2, head, KV_HEADS).swap_dims(1, 2));
        let position = Tensor::zeros([2, KV_HEADS, 1], &Default::default());
        let mut cache = DmaCache::<Flex>::new(first, tensor(z.narrow(2, 0, 1)), position, window);
        let mut plain = cache.clone();
        for at in 1..seq_len {
            let offered = DmaToken {
                policy: KernelPolicy::default(),
                q: token(at).narrow(2, 0, heads).reshape([2, heads, HEAD_DIM].into()),
                k: token(at).narrow(2, heads, KV_HEADS).reshape([2, KV_HEADS, HEAD_DIM].into()),
                v: token(at).narrow(2, heads + KV_HEADS, KV_HEADS).reshape([2, KV_HEADS, HEAD_DIM].into()),
                rank: z.narrow(2, at, 1).reshape([2, KV_HEADS].into()),
                position: at,
            };
            let plain_o = reference::dma_decode(&mut plain, offered.clone(), spec.softmax_scale, bias, &mut ());
            let o = dma_decode(&mut cache, offered, spec.softmax_scale, bias, &mut ()).expect("fits");
            let o_host = host(primitive(o));
            assert_close(&format!("plain row {at}, {bias:?}"), &o_host, &host(plain_o), 4e-6);
            assert_eq!(host_ints(cache.positions.tokens()), host_ints(plain.positions.tokens()), "row {at}");
            assert_close(&format!("row {at}, {bias:?}"), &o_host, &host(rows.narrow(1, at, 1)), 4e-6);
            // The slots hold exactly the keys that the mask shows to the query `at`.
            let positions = host_ints(cache.positions.tokens());
            let slots = positions.len() / (2 * KV_HEADS);
            for (head, held) in positions.chunks(slots).enumerate() {
                let mut held = held.to_vec();
                held.sort_unstable();
                let seen = (0..=at as i64).filter(|&key| expire[head * seq_len + key as usize] > at as i64);
                assert_eq!(held, seen.collect::<Vec<_>>(), "row {at}, head {head}");
            }
        }
    }
}

#[test]
fn drawing_takes_the_first_of_equal_logits_and_nothing_from_a_row_with_nan_or_infinity() {
    let none = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    let mut rows = vec![vec![-3.0, 2.0, -0.0, 2.0, 9.0], vec![-3.0, -0.0, 0.0, -1.0, f32::NAN]];
    rows.extend(none.map(|x| vec![1.0, x, 2.0, 3.0, 0.0]));
    let expected = [Some(1), Some(1), None, None, None];
    let count = rows.len();
    let data = burn::tensor::TensorData::new(rows.concat(), [count, 5]);
    let logits = Tensor::<Flex, 2>::from_data(data, &Default::default());
    let greedy = vec![Draw::LIKELIEST; count];
    assert_eq!(crate::draw(logits.clone(), &greedy, 4), expected);
    // Where the rows' draws differ, each has its own. The first row has two likeliest tokens.
    let mut mixed = greedy;
    mixed[0] = Draw::new(0.01, None, 1.0, u64::MAX);
    let of_mixed = [Some(3), expected[1], None, None, None];
    assert_eq!(crate::draw(logits.clone(), &mixed, 4), of_mixed);
    assert_eq!(crate::draw_on_host(&rows[0][..4], &mixed[0]), Some(3));
    let ids = super::reference::likeliest::<Flex>(primitive(logits), 4);
    let ids = Tensor::<Flex, 2, Int>::from_primitive(ids);
    assert_eq!(host_ints(ids), [1, 1, -1, -1, -1]);
}
