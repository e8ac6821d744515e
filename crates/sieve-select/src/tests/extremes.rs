//! Inputs at the edge: equal scores, huge norms, zeros, one finite score, NaN; thresholds at their ends.

use super::{attend, prefill, select, selector};
use crate::test_data::TestCall;
use crate::{KeyMask, Reads, Tiles, density, oracle_attention};
use sieve_testing::{Random, assert_close_relative, cases};

fn agrees_with_the_oracle(text: &str, data: &TestCall) {
    let (call, chosen) = (data.call(), select(text, data));
    let output = attend(data, &chosen);
    assert_close_relative(text, &output.o, &oracle_attention(&call, &chosen).o, 2e-5);
}

#[test]
fn threshold_zero_keeps_the_forced_blocks_only() {
    let data = TestCall::random(&mut Random(31), 200, 200, [2, 1], 16);
    // Each case: a selector, and the most tiles that a row keeps.
    for (text, most) in [
        ("bfla:keep_mass=0,local_tokens=0,sink_tiles=1,block=16,group=8,tile=16", 4),
        ("xattention:tau=0,block=16,stride=4", 2),
        ("meanpool:tau=0,block=16", 3),
        ("meanpool:top_k=0,block=16", 2),
        ("block_sparse:topk=0,block=16", 1),
        ("oracle_topk:k=0,block=16", 1),
    ] {
        let chosen = select(text, &data);
        for list in 0..chosen.mask.num_lists() {
            for i in 0..chosen.mask.tiles.num_query_tiles() {
                assert!(chosen.mask.row(list, i).len() <= most, "{text}: {:?}", chosen.mask.row(list, i));
            }
        }
        agrees_with_the_oracle(text, &data);
    }
}

pub(super) fn equal_scores_zeros_and_a_huge_key(texts: &[&str]) {
    let mut random = Random(32);
    for text in texts {
        let mut data = TestCall::random(&mut random, 120, 150, [2, 1], 16);
        data.q.fill(0.5);
        data.k.fill(0.25);
        agrees_with_the_oracle(text, &data);

        let mut data = TestCall::random(&mut random, 120, 150, [2, 2], 16);
        data.q.chunks_exact_mut(32).for_each(|token| token[..16].fill(0.0));
        data.k.chunks_exact_mut(32).for_each(|token| token[..16].fill(0.0));
        agrees_with_the_oracle(text, &data);

        let mut data = TestCall::random(&mut random, 120, 150, [2, 1], 16);
        data.k[40 * 16..41 * 16].iter_mut().for_each(|x| *x *= 1e4);
        let chosen = select(text, &data);
        let output = attend(&data, &chosen);
        assert!(output.o.iter().all(|x| x.is_finite()), "{text}");
        assert_eq!(chosen.stats.nan_lists, 0, "{text}");
    }
}

pub(super) fn one_finite_score_takes_everything(texts: &[&str]) {
    // All products are about -1e30 but one, which is 0 and takes the whole softmax.
    let mut data = TestCall::random(&mut Random(33), 128, 128, [1, 1], 16);
    data.q.fill(1.0);
    data.k.fill(-1e30);
    data.k[16 * 20..16 * 21].fill(0.0);
    for text in texts {
        let chosen = select(text, &data);
        let output = attend(&data, &chosen);
        assert!(output.o.iter().all(|x| x.is_finite()), "{text}");
    }
}

pub(super) fn a_nan_makes_its_head_dense_and_leaves_the_others_alone(texts: &[&str]) {
    let clean = TestCall::structured(&mut Random(34), 256, [2, 2], 16);
    let mut data = clean.clone();
    // The last queries of head 1 are NaN; every method's probe rows include some of them.
    for row in 192..256 {
        data.q[(row * 2 + 1) * 16] = f32::NAN;
    }
    for text in texts {
        // Methods that keep fixed ranges read no query, and so find no NaN.
        let counts = selector(text).reads(0, 256) != Reads::Nothing;
        let (dirty, good) = (select(text, &data), select(text, &clean));
        if counts && !text.contains("mode=recompute") {
            assert!(dirty.stats.nan_lists >= 1, "{text}");
        }
        if dirty.mask.num_lists() == 2 && dirty.mask.query_order().is_empty() {
            for i in 0..good.mask.tiles.num_query_tiles() {
                assert_eq!(dirty.mask.row(0, i), good.mask.row(0, i), "{text}: head 0 changed");
            }
        }
        let done = prefill(text, &data.call());
        for (row, o) in done.output.o.chunks_exact(32).enumerate() {
            assert!(o[..16].iter().all(|x| x.is_finite()), "{text}: head 0, row {row}");
        }
    }
}

#[test]
fn density_grows_with_every_threshold() {
    let mut data = TestCall::structured(&mut Random(35), 512, [2, 1], 16);
    // The scores are so flat that no single block reaches a threshold.
    data.q.iter_mut().for_each(|x| *x *= 0.1);
    for [form, values] in cases(
        r#"
        bfla:block=32,group=8,tile=8,local_tokens=8,keep_mass= => 0.2 0.6 0.95
        bfla:block=32,group=8,tile=8,keep_mass=0.3,local_tokens= => 0 32 128
        bfla:block=32,group=8,tile=8,local_tokens=8,keep_mass=0.3,prob= => 0 0.1 0.5
        bfla:block=32,group=8,tile=8,local_tokens=8,keep_mass=0.3,stride= => 16 8 4
        xattention:block=16,stride=4,tau= => 0.2 0.5 0.9
        pbs:block=16,segment=32,tau= => 0.2 0.5 0.9
        meanpool:block=16,tau= => 0.2 0.5 0.9
        momo:gamma=4,beta=8,chi=16,first_dense_layers=0,k_exact=0,k= => 2 8 32
        flexprefill:block=16,min_budget=16,gamma= => 0.3 0.6 0.95
        vertical_slash:vertical=30,slash= => 50 200 400
        oracle_topk:block=16,k= => 2 6 12
    "#,
    ) {
        let densities = values.split(' ').map(|v| density(&select(&format!("{form}{v}"), &data)).token);
        let densities: Vec<f64> = densities.collect();
        assert_eq!(densities.len(), 3, "{form}");
        assert!(densities[0] < densities[1] && densities[1] < densities[2], "{form}: {densities:?}");
    }
}

#[test]
fn a_mask_with_as_many_tiles_as_a_dense_one_need_not_be_dense() {
    let shape = TestCall::random(&mut Random(3), 32, 32, [1, 1], 8).call().shape;
    let tiles = Tiles::new(shape, 16, 16);
    let chosen = |rows: [Vec<i32>; 2]| {
        let rows = rows.map(|row| [row, Vec::new()]);
        KeyMask::new(shape, tiles, 1, rows)
    };
    assert!(chosen([vec![0], vec![0, 1]]).keeps_everything());
    assert!(!chosen([vec![0, 1], vec![1]]).keeps_everything());
    assert!(!chosen([vec![1], vec![0, 1]]).keeps_everything());
}
