//! InfiniteHiP while decoding: which keys it chooses, and at which steps it chooses again.

use super::super::select;
use super::{SMALL, stream};
use crate::Selector;
use crate::test_data::TestCall;
use sieve_testing::{Random, refusal};

#[test]
fn infinitehip_decode_chooses_as_its_prefill_with_blocks_of_one() {
    let text = SMALL.iter().find(|text| text.starts_with("infinitehip:block=1,")).expect("it is there");
    let data = TestCall::structured(&mut Random(105), 120, [4, 2], 8);
    let (_, kept) = stream(text, &data);
    let prefill = select(&format!("{text},prefill_dense_below=0"), &data);
    for (t, kept) in kept.iter().enumerate() {
        for (head, kept) in kept.iter().enumerate() {
            let shown = crate::oracle::expanded_row(&prefill.mask, head, t);
            let expected: Vec<u32> = (0..120).filter(|&j| shown[j as usize]).collect();
            assert_eq!(*kept, expected, "token {t}, head {head}");
        }
    }
}

#[test]
fn infinitehip_decode_refreshes_each_stage_at_its_own_steps() {
    let data = TestCall::random(&mut Random(106), 200, 200, [1, 1], 8);
    let stages = |refresh: &str| {
        format!(
            "infinitehip:chunk_1=8,budget_2=32,chunk_2=4,budget_3=16,chunk_3=2,budget=8,sink=4,window=6,\
             first_dense_layers=0,{refresh}"
        )
    };
    let chosen = |refresh: &str| -> Vec<Vec<u32>> {
        let (_, kept) = stream(&stages(refresh), &data);
        let far = |(t, lists): (usize, &Vec<Vec<u32>>)| -> Vec<u32> {
            // The chosen keys: without the sink, the window of 6, and up to 16 keys that left it since a refresh.
            let keys = lists[0].iter().copied();
            keys.filter(|&j| j >= 4 && (j as usize) + 6 + 16 < t).collect()
        };
        kept.iter().enumerate().map(far).collect()
    };
    let (fresh, third, first) = (
        chosen("refresh_1=1,refresh_2=1,refresh_3=1"),
        chosen("refresh_1=16,refresh_2=8,refresh_3=4"),
        chosen("refresh_1=16,refresh_2=16,refresh_3=16"),
    );
    let changes = |lists: &[Vec<u32>], every: usize| {
        (101..200)
            .filter(|t| t % every != 0)
            .filter(|&t| {
                let gone = |j: &u32| !lists[t].contains(j);
                // Between refreshes, keys that leave the window may be added; no key may disappear.
                lists[t - 1].iter().any(gone)
            })
            .count()
    };
    assert!(changes(&fresh, 1000) > 80);
    assert_eq!(changes(&third, 4), 0);
    assert!(changes(&third, 8) > 5);
    assert_eq!(changes(&first, 16), 0);
    // At steps that refresh all stages, the choice equals that of refreshing at every step.
    assert!((96..200).step_by(16).all(|t| first[t] == fresh[t] && third[t] == fresh[t]));
    for (text, wanted) in [
        ("infinitehip:refresh_2=5", "refresh_2=5 does not divide refresh_1=32"),
        ("infinitehip:refresh_3=0", "refresh_3=0 makes no sense"),
    ] {
        refusal(Selector::parse(text), wanted);
    }
}

#[test]
fn infinitehip_decode_reads_everything_when_a_score_is_nan() {
    let mut data = TestCall::random(&mut Random(107), 80, 80, [2, 1], 8);
    data.q[(60 * 2 + 1) * 8] = f32::NAN;
    let text = SMALL.iter().find(|text| text.contains("refresh_1=1,")).expect("it is there");
    let (_, kept) = stream(text, &data);
    assert_eq!(kept[60][1].len(), 61);
    assert!(kept[60][0].len() < 30 && kept[61][1].len() < 30);
}
