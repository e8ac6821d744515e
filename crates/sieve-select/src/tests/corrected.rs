//! MOMO and the correction by differences between dense and sparse outputs of probe rows.

use super::{attend, prefill, select};
use crate::attention::dense_rows_attention;
use crate::test_data::TestCall;
use crate::{density, oracle_dense};
use sieve_testing::{Random, assert_close};

#[test]
fn momo_probe_rows_are_dense_and_correct_the_rows_after_them() {
    let data = TestCall::random(&mut Random(45), 130, 203, [2, 1], 16);
    let (call, chosen) = (data.call(), select("momo:gamma=8,beta=8,chi=16,k=2,k_exact=1,first_dense_layers=0", &data));
    let correction = chosen.correction.clone().expect("momo corrects");
    // The context is 73: probes are the first row, and rows 7, 15, … at positions 80, 88, ….
    assert_eq!(&correction.probe_rows[..3], [0, 7, 15]);
    let dense = oracle_dense(&call);
    let output = attend(&data, &chosen);
    let mut plain = chosen.clone();
    plain.correction = None;
    let sparse = attend(&data, &plain);
    for row in 0..130 {
        for c in 0..32 {
            let at = row * 32 + c;
            let probe = correction.probe_rows.iter().rev().find(|p| **p as usize <= row).expect("row 0 is one");
            let of_probe = *probe as usize * 32 + c;
            let expected = f64::from(sparse.o[at]) + dense.o[of_probe] - f64::from(sparse.o[of_probe]);
            assert!((f64::from(output.o[at]) - expected).abs() < 1e-5);
            if *probe as usize == row {
                assert!((f64::from(output.o[at]) - dense.o[at]).abs() < 1e-6);
            }
        }
    }
}

#[test]
fn momo_hybrid_with_all_slots_exact_equals_exact_and_tree() {
    let data = TestCall::structured(&mut Random(46), 400, [2, 1], 16);
    let of = |extra: &str| {
        let chosen = select(&format!("momo:gamma=8,beta=8,chi=16,k=6,first_dense_layers=0,{extra}"), &data);
        chosen.mask
    };
    assert_eq!(of("topk=hybrid,k_exact=6"), of("topk=exact"));
    assert_eq!(of("topk=tree"), of("topk=exact"));
    assert_ne!(of("topk=gauss"), of("topk=exact"));
}

#[test]
fn momo_row_cost_is_that_of_equation_9() {
    let (n, beta, k, gamma) = (4096, 16, 6, 16);
    let data = TestCall::random(&mut Random(160), n, n, [1, 1], 8);
    let chosen = select(&format!("momo:gamma={gamma},beta={beta},chi=16,k={k},k_exact=2,first_dense_layers=0"), &data);
    // A tile keeps k chosen blocks, one sink block, the last complete block before the probe, and the diagonal block.
    for i in 64..chosen.mask.tiles.num_query_tiles() {
        assert_eq!(chosen.mask.row(0, i).len(), k + 1 + 2, "tile {i}");
    }
    // One row in gamma is a probe, so probes compute a share of 1 / gamma of all pairs.
    let shares = density(&chosen);
    assert!((shares.probes * gamma as f64 - 1.0).abs() < 0.01, "{shares:?}");
    // A row sees whole the chosen blocks, the sink and the last complete block, and on average half of its own block.
    let row = |c: f64| ((beta * (k + 1)) as f64 + 24.0).min(c);
    let pairs: f64 = (1..=n).map(|c| row(c as f64)).sum();
    let expected = pairs / (n * (n + 1) / 2) as f64;
    assert!((shares.token / expected - 1.0).abs() < 0.03, "{shares:?} {expected}");
}

#[test]
fn momo_trims_the_union_of_its_probes() {
    let data = TestCall::random(&mut Random(161), 1024, 1024, [1, 1], 16);
    let rows = |k_trim: usize| {
        let text = format!("momo:gamma=4,beta=16,chi=64,k=4,topk=exact,k_trim={k_trim},first_dense_layers=0");
        let chosen = select(&text, &data);
        (10..16).map(|i| chosen.mask.row(0, i).to_vec()).collect::<Vec<_>>()
    };
    // Each tile keeps 4 chosen blocks, the sink block, the last complete block before the tile, and its own 4 blocks.
    let (trimmed, whole) = (rows(4), rows(1000));
    for (trimmed, whole) in trimmed.iter().zip(&whole) {
        assert_eq!(trimmed.len(), 4 + 1 + 5);
        assert!(whole.len() > trimmed.len() && trimmed.iter().all(|j| whole.contains(j)));
    }
}

#[test]
fn momo_list_of_a_probe_serves_the_tiles_up_to_the_next() {
    let data = TestCall::random(&mut Random(162), 512, 512, [1, 1], 16);
    let chosen = select("momo:gamma=64,beta=16,chi=16,k=3,topk=exact,first_dense_layers=0", &data);
    for probe in 1..8 {
        let far = |i: usize| -> Vec<i32> {
            let row = chosen.mask.row(0, i).iter().copied();
            row.filter(|&j| j < probe as i32 * 4 - 1).collect()
        };
        for i in probe * 4..probe * 4 + 4 {
            assert_eq!(far(i), far(probe * 4), "tile {i}");
        }
    }
}

#[test]
fn delta_probes_and_tail_are_dense_and_modes_differ() {
    let data = TestCall::random(&mut Random(48), 300, 300, [2, 1], 16);
    let call = data.call();
    let dense = oracle_dense(&call);
    let text = "delta:base=streamingllm,base.n_local=20,base.min_prefill_tokens=0,gamma=16";
    let done = prefill(text, &call);
    // The first rows see all keys before them, and the dense tail has 300 mod 16 + 128 rows.
    for row in (0..16).chain((0..160).step_by(16)).chain(160..300) {
        let columns = row * 32..(row + 1) * 32;
        assert_close(&format!("row {row}"), &done.output.o[columns.clone()], &dense.o[columns], 1e-5);
    }
    let sparse = prefill(&format!("{text},mode=sparse_only"), &call);
    let recompute = prefill(&format!("{text},mode=recompute"), &call);
    assert_eq!(sparse.output.o[65 * 32..66 * 32], recompute.output.o[65 * 32..66 * 32]);
    assert_ne!(sparse.output.o[65 * 32..66 * 32], done.output.o[65 * 32..66 * 32]);
    assert_ne!(sparse.output.o[64 * 32..65 * 32], recompute.output.o[64 * 32..65 * 32]);
}

#[test]
fn delta_probe_rows_are_the_dense_output_itself() {
    let data = TestCall::structured(&mut Random(163), 260, [4, 2], 16);
    let call = data.call();
    for base in ["streamingllm,base.n_local=20", "xattention,base.block=16,base.tau=0.3"] {
        let text = format!("delta:base={base},gamma=16,dense_tail=false,base.min_prefill_tokens=0");
        let done = prefill(&text, &call);
        let rows: Vec<usize> = (0..260).step_by(16).collect();
        let dense = dense_rows_attention(&call, &rows);
        for (index, row) in rows.into_iter().enumerate() {
            assert_eq!(
                done.output.o[row * 64..(row + 1) * 64],
                dense[index * 64..(index + 1) * 64],
                "{text}, row {row}"
            );
        }
    }
}

#[test]
fn delta_of_a_chunk_between_probes_adds_one_at_its_first_row() {
    let data = TestCall::random(&mut Random(164), 60, 101, [2, 1], 16);
    let chosen = select("delta:base=streamingllm,base.n_local=20,gamma=16,base.min_prefill_tokens=0", &data);
    // The context is 41: probes are the first row, and the rows at positions 48, 64, 80 and 96.
    let rows = chosen.correction.expect("delta corrects").probe_rows;
    assert_eq!(rows, [0, 7, 23, 39, 55]);
}
