//! The check lines of the specification, method by method; find a method's tests by its name.

use super::{select, selector};
use crate::call::{Call, Tiles};
use crate::oracle::{expanded_row, oracle_row};
use crate::prefill::ba_att::pooling_bound;
use crate::prefill::minference::{Pattern, PatternFile, search_patterns};
use crate::test_data::{Random, TestCall, assert_close};
use crate::{ListsPer, block_sparse_attention, density, oracle_dense};

/// Kept pairs of a row, as key positions.
fn shown(mask: &crate::SparseMask, head: usize, row: usize) -> Vec<usize> {
    let shown = expanded_row(mask, head, row);
    (0..shown.len()).filter(|&j| shown[j]).collect()
}

#[test]
fn bfla_band_is_absolute_and_on_tiles() {
    let data = TestCall::random(&mut Random(41), 100, 150, [1, 1], 8);
    let mask = select(
        "bfla:block=32,group=8,tile=8,keep_mass=0,local_tokens=24,sink_tiles=1",
        &data,
    );
    for i in 0..mask.tiles.num_query_tiles() {
        let (first, last) = (mask.tiles.first(i), mask.tiles.last(i));
        let row = mask.row(0, i);
        for j in (first - 24) / 8..=last / 8 {
            assert!(row.contains(&(j as i32)), "tile {i}: {row:?}");
        }
        assert!(row.contains(&0));
    }
}

#[test]
fn bfla_stride_rescues_one_of_eta_and_random_the_given_share() {
    let data = TestCall::random(&mut Random(42), 1024, 1024, [1, 1], 8);
    let base = "bfla:block=32,group=8,tile=8,keep_mass=0,local_tokens=0";
    let dropped = 1.0 - density(&select(base, &data)).tile;
    for (extra, expected) in [
        ("stride=4", 0.25),
        ("stride=8", 0.125),
        ("stride=16", 0.0625),
        ("prob=0.1", 0.1),
        ("prob=0.3", 0.3),
    ] {
        let rescued = density(&select(&format!("{base},{extra}"), &data)).tile - (1.0 - dropped);
        let share = rescued / dropped;
        assert!(
            (share - expected).abs() < 0.02 * (1.0 + expected),
            "{extra}: {share}"
        );
    }
}

#[test]
fn bfla_random_rescue_does_not_come_in_runs() {
    let neighbours = |hash: &str| {
        let data = TestCall::random(&mut Random(43), 1024, 1024, [1, 1], 8);
        let base = "bfla:block=32,group=8,tile=8,keep_mass=0,local_tokens=0";
        let (plain, mask) = (
            select(base, &data),
            select(&format!("{base},prob=0.3,hash={hash}"), &data),
        );
        let (mut both, mut one) = (0.0, 0.0);
        for i in 60..mask.tiles.num_query_tiles() {
            let row = mask.row(0, i);
            for j in 8..50 {
                let dropped = |j: i32| !plain.row(0, i).contains(&j);
                if row.contains(&j) && dropped(j) && dropped(j + 1) {
                    one += 1.0;
                    both += f64::from(u8::from(row.contains(&(j + 1))));
                }
            }
        }
        both / one
    };
    let (ours, published) = (neighbours("mix"), neighbours("linear"));
    assert!((ours - 0.3).abs() < 0.06, "{ours}");
    assert!(published > 0.8, "{published}");
}

#[test]
fn bfla_union_keeps_what_any_head_keeps() {
    let data = TestCall::structured(&mut Random(44), 256, [4, 2], 16);
    let settings = "block=32,group=8,tile=8,keep_mass=0.4,local_tokens=8";
    let each = select(&format!("bfla:{settings},gqa=per_query"), &data);
    let union = select(&format!("bfla:{settings}"), &data);
    assert_eq!(
        (each.lists, union.lists),
        (ListsPer::QueryHead, ListsPer::KvHead)
    );
    for i in 0..union.tiles.num_query_tiles() {
        let mut both = [each.row(2, i), each.row(3, i)].concat();
        both.sort_unstable();
        both.dedup();
        assert_eq!(union.row(1, i), both);
    }
}

#[test]
fn momo_probe_rows_are_dense_and_the_windows_shifted() {
    let data = TestCall::random(&mut Random(45), 130, 203, [2, 1], 16);
    let (call, mask) = (
        data.call(),
        select(
            "momo:gamma=8,beta=8,chi=16,k=2,k_exact=1,first_dense_layers=0",
            &data,
        ),
    );
    let correction = mask.correction.clone().expect("momo corrects");
    // Context 73: the first row is a probe, then absolute multiples of 8.
    assert_eq!(&correction.probe_rows[..3], [0, 7, 15]);
    let dense = oracle_dense(&call);
    let output = block_sparse_attention(&call, &mask).expect("valid");
    let mut plain = mask.clone();
    plain.correction = None;
    let sparse = block_sparse_attention(&call, &plain).expect("valid");
    for row in 0..130 {
        for c in 0..32 {
            let at = row * 32 + c;
            let probe = correction
                .probe_rows
                .iter()
                .rev()
                .find(|p| **p as usize <= row)
                .expect("row 0 is one");
            let of_probe = *probe as usize * 32 + c;
            let expected =
                f64::from(sparse.o[at]) + dense.o[of_probe] - f64::from(sparse.o[of_probe]);
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
        let mask = select(
            &format!("momo:gamma=8,beta=8,chi=16,k=6,first_dense_layers=0,{extra}"),
            &data,
        );
        (mask.row_ptr, mask.tile_idx)
    };
    assert_eq!(of("topk=hybrid,k_exact=6"), of("topk=exact"));
    assert_eq!(of("topk=tree"), of("topk=exact"));
    assert_ne!(of("topk=gauss"), of("topk=exact"));
}

#[test]
fn momo_keeps_sink_and_everything_since_the_first_probe() {
    let data = TestCall::random(&mut Random(47), 256, 256, [1, 1], 16);
    let mask = select(
        "momo:gamma=16,beta=8,chi=32,k=1,k_exact=1,first_dense_layers=0",
        &data,
    );
    for i in 0..8 {
        let row = mask.row(0, i);
        let complete = (32 * i as i32 + 1) / 8;
        assert!(row.contains(&0));
        assert!(
            ((complete - 1).max(0)..(32 * (i as i32 + 1)) / 8).all(|j| row.contains(&j)),
            "{i}: {row:?}"
        );
    }
}

#[test]
fn delta_probes_and_tail_are_dense_and_modes_differ() {
    let data = TestCall::random(&mut Random(48), 300, 300, [2, 1], 16);
    let call = data.call();
    let dense = oracle_dense(&call);
    let text = "delta:base=streamingllm,base.n_local=20,base.min_prefill_tokens=0,gamma=16";
    let done = selector(text).prefill(&call).expect("valid");
    let is_dense = |o: &[f32], row: usize| {
        (0..32).all(|c| (f64::from(o[row * 32 + c]) - dense.o[row * 32 + c]).abs() < 1e-5)
    };
    for row in 0..300 {
        // 300 mod 16 + 128 rows at the end.
        let expected = row % 16 == 0 || !(20..300 - 12 - 128).contains(&row);
        if expected {
            assert!(row >= 16 || is_dense(&done.output.o, row), "row {row}");
        }
    }
    assert!(
        (0..160)
            .step_by(16)
            .all(|row| is_dense(&done.output.o, row))
    );
    assert!((160..300).all(|row| is_dense(&done.output.o, row)));
    let sparse = selector(&format!("{text},mode=sparse_only"))
        .prefill(&call)
        .expect("valid");
    let recompute = selector(&format!("{text},mode=recompute"))
        .prefill(&call)
        .expect("valid");
    assert_eq!(
        sparse.output.o[65 * 32..66 * 32],
        recompute.output.o[65 * 32..66 * 32]
    );
    assert_ne!(
        sparse.output.o[65 * 32..66 * 32],
        done.output.o[65 * 32..66 * 32]
    );
    assert_ne!(
        sparse.output.o[64 * 32..65 * 32],
        recompute.output.o[64 * 32..65 * 32]
    );
}

#[test]
fn ba_att_bidirectional_equals_its_definition() {
    let data = TestCall::random(&mut Random(49), 150, 150, [4, 2], 16);
    let call = data.call();
    let everything = selector("ba_att:causal=false,sparsity=0,block=16,segment=32")
        .prefill(&call)
        .expect("valid");
    let all = vec![true; 150];
    let expected: Vec<f64> = (0..150)
        .flat_map(|row| (0..4).map(move |head| (head, row)))
        .flat_map(|(head, row)| oracle_row(&call, head, row, &all).0)
        .collect();
    assert_close("bidirectional", &everything.output.o, &expected, 2e-5);
    let mask = select(
        "ba_att:causal=false,sparsity=0.7,block=16,segment=32",
        &data,
    );
    // ceil(0.3 * 10) blocks of each row, sorted by norm.
    assert!((0..4).all(|head| (0..10).all(|i| mask.row(head, i).len() == 3)));
    let norm = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>();
    let order = mask.key_order_of(0).expect("sorted");
    assert!(
        order
            .windows(2)
            .all(|w| norm(call.key(0, w[0] as usize)) <= norm(call.key(0, w[1] as usize)))
    );
    assert!((1..150).all(|s| {
        norm(call.query(3, mask.query_row(3, s - 1))) <= norm(call.query(3, mask.query_row(3, s)))
    }));
    let output = block_sparse_attention(&call, &mask).expect("valid");
    assert_close(
        "sparse",
        &output.o,
        &crate::oracle_attention(&call, &mask).o,
        2e-5,
    );
    let error = selector("ba_att:causal=false")
        .select(&TestCall::random(&mut Random(1), 20, 30, [1, 1], 4).call());
    assert!(
        error
            .expect_err("a chunk")
            .to_string()
            .contains("causal=false needs all tokens at once")
    );
}

#[test]
fn ba_att_pooling_bound_holds() {
    let mut random = Random(50);
    let mut worst = 0.0_f32;
    for _ in 0..300 {
        let scale = 1.0 + random.below(5) as f32;
        let q: Vec<f32> = random.vector(8 * 12).iter().map(|x| x * scale).collect();
        let k = random.vector(8 * 12);
        let bound = pooling_bound(&q, &k, 12);
        let mean = |x: &[f32]| -> Vec<f32> {
            (0..12)
                .map(|c| x.iter().skip(c).step_by(12).sum::<f32>() / 8.0)
                .collect()
        };
        let dot = |a: &[f32], b: &[f32]| {
            a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>() / 12.0_f32.sqrt()
        };
        let pooled = dot(&mean(&q), &mean(&k));
        for a in q.chunks_exact(12) {
            for b in k.chunks_exact(12) {
                worst = worst.max((dot(a, b) - pooled).abs() / bound);
            }
        }
    }
    assert!(worst <= 1.0 && worst > 0.05, "{worst}");
}

#[test]
fn pbs_earlier_blocks_hold_no_future_and_the_remainder_stays() {
    let data = TestCall::structured(&mut Random(51), 250, [4, 2], 16);
    let mask = select("pbs:block=16,segment=64,tau=0.4", &data);
    for list in 0..4 {
        let order = mask.key_order_of(list).expect("permuted");
        assert!((192..250).all(|slot| order[slot] == slot as i32));
        for segment in 0..3 {
            let keys = &order[segment * 64..(segment + 1) * 64];
            assert!(keys.iter().all(|&key| key as usize / 64 == segment));
        }
        for i in 0..mask.tiles.num_query_tiles() {
            let own = mask.tiles.first(i) / 64 * 64;
            for &j in mask.row(list, i) {
                if (j as usize) * 16 < own {
                    let slots = mask.tiles.keys(j as usize);
                    assert!(
                        order[slots]
                            .iter()
                            .all(|&key| (key as usize) < mask.tiles.first(i))
                    );
                }
            }
            let token_0 = order.iter().position(|&key| key == 0).expect("there") / 16;
            assert!(mask.row(list, i).contains(&(token_0 as i32)));
        }
    }
    // One permutation per KV head, shared by its query heads.
    assert_eq!(mask.key_order.len(), 2 * 250);
    let mask = select("pbs:block=16,segment=64,tau=0.4,perm=query", &data);
    assert_eq!(mask.key_order.len(), 4 * 250);
}

#[test]
fn pbs_of_one_segment_is_dense_and_of_one_more_token_is_not() {
    for (n, dense) in [(32, true), (33, false)] {
        let data = TestCall::random(&mut Random(52), n, n, [1, 1], 8);
        assert_eq!(
            select("pbs:block=16,segment=32,tau=0.1", &data)
                .stats
                .dense_call,
            dense
        );
    }
}

#[test]
fn pbs_query_order_respects_segments_and_capacity() {
    let data = TestCall::structured(&mut Random(53), 200, [2, 1], 16);
    let mask = select("pbs:block=16,segment=32,tau=0.5,permute=queries", &data);
    assert!(mask.key_order.is_empty());
    for head in 0..2 {
        let order: Vec<usize> = (0..200).map(|slot| mask.query_row(head, slot)).collect();
        assert!(
            order
                .iter()
                .enumerate()
                .all(|(slot, row)| slot / 32 == row / 32)
        );
        assert!(order.iter().enumerate().any(|(slot, row)| slot != *row));
    }
}

#[test]
fn pbs_permuted_keys_need_fewer_blocks() {
    // What the method is for: important keys scattered over blocks come together.
    let mut random = Random(54);
    let mut data = TestCall::random(&mut random, 1024, 1024, [1, 1], 16);
    data.q.iter_mut().for_each(|x| *x *= 0.3);
    for token in data.q.chunks_exact_mut(16) {
        token[0] = 4.0;
    }
    for (t, token) in data.k.chunks_exact_mut(16).enumerate() {
        token[0] = if t % 16 == 3 { 6.0 } else { 0.0 };
    }
    let density = |text: &str| crate::density(&select(text, &data)).tile;
    let (plain, permuted) = (
        density("meanpool:block=16,tau=0.9"),
        density("pbs:block=16,segment=256,tau=0.9"),
    );
    assert!(permuted < 0.75 * plain, "{permuted} {plain}");
}

#[test]
fn xattention_antidiagonal_products_are_sums_over_the_antidiagonal() {
    let mut random = Random(55);
    let data = TestCall::random(&mut random, 8, 8, [1, 1], 5);
    let call = data.call();
    let config = crate::prefill::xattention::XattentionConfig {
        block: 8,
        stride: 4,
        ..Default::default()
    };
    let keys = config.cells_of_keys(&call, 0, 0..8, |key| key);
    let queries = config.cells_of_queries(&call, 0..2, |row| Some(call.query(0, row)));
    let cells = crate::prefill::xattention::cell_scores(&queries, &keys, 20, 1.0);
    for n in 0..2 {
        for m in 0..2 {
            let expected: f32 = (0..4)
                .map(|c| crate::vector::dot(call.query(0, n * 4 + 3 - c), call.key(0, m * 4 + c)))
                .sum();
            assert!((cells[n * 2 + m] - expected).abs() < 1e-4);
        }
    }
}

#[test]
fn xattention_forced_blocks_and_short_first_tile() {
    let data = TestCall::random(&mut Random(56), 90, 131, [1, 1], 8);
    let mask = select("xattention:block=16,stride=4,tau=0", &data);
    // Context 41: the first tile holds the 7 rows up to position 47.
    assert_eq!(mask.tiles.rows(0), 0..7);
    for i in 0..mask.tiles.num_query_tiles() {
        assert_eq!(mask.row(0, i), [0, mask.tiles.last(i) as i32 / 16]);
    }
}

#[test]
fn vertical_slash_follows_columns_and_diagonals() {
    let mut data = TestCall::random(&mut Random(57), 640, 640, [1, 1], 16);
    data.q.iter_mut().for_each(|x| *x *= 0.1);
    data.k.iter_mut().for_each(|x| *x *= 0.1);
    data.q.chunks_exact_mut(16).for_each(|q| q[0] = 4.0);
    data.k[333 * 16] = 40.0;
    let mask = select("vertical_slash:vertical=31,slash=50", &data);
    for row in 0..640 {
        let keys = shown(&mask, 0, row);
        assert!(keys.contains(&row), "the diagonal of {row}");
        assert!(row < 333 || keys.contains(&333), "the column of {row}");
        assert!(
            (0..30.min(row)).all(|j| keys.contains(&j)),
            "the first columns of {row}"
        );
    }
    assert!(!mask.col_idx.is_empty());
}

#[test]
fn a_shape_and_streamingllm_are_exact_to_the_token() {
    let data = TestCall::random(&mut Random(58), 150, 200, [2, 1], 8);
    for (text, init, local) in [
        ("a_shape:n_init=7,n_local=30", 7, 30),
        ("streamingllm:n_init=0,n_local=1", 0, 1),
        ("streamingllm", 4, 1024),
    ] {
        let mask = select(text, &data);
        for row in 0..150 {
            let a = 50 + row;
            let expected: Vec<usize> = (0..=a).filter(|&j| j < init || j + local > a).collect();
            assert_eq!(shown(&mask, 1, row), expected, "{text}, row {row}");
        }
    }
}

#[test]
fn tri_shape_ends_dense() {
    let data = TestCall::random(&mut Random(59), 150, 150, [2, 1], 8);
    let mask = select("tri_shape:n_init=7,n_local=30,n_last=100", &data);
    assert_eq!(mask.dense_rows, vec![50..150; 1]);
    assert_eq!(shown(&mask, 0, 120).len(), 121);
    assert_eq!(shown(&mask, 0, 49).len(), 37);
}

#[test]
fn flexprefill_takes_the_estimate_when_it_is_close() {
    let mut data = TestCall::random(&mut Random(60), 256, 256, [2, 1], 16);
    // Almost no preference: pooled columns and the estimate are both flat.
    data.q.iter_mut().for_each(|x| *x *= 0.01);
    let patterns = |text: &str| select(text, &data).stats.patterns;
    assert_eq!(
        patterns("flexprefill:block=16,min_budget=16")[0],
        ("query_aware", 2)
    );
    assert_eq!(
        patterns("flexprefill:block=16,min_budget=16,tau=0")[1],
        ("vertical_slash", 2)
    );
    let small = TestCall::random(&mut Random(61), 32, 32, [1, 1], 8);
    assert!(
        select("flexprefill:block=16,min_budget=16", &small)
            .stats
            .dense_call
    );
}

#[test]
fn infinitehip_budget_and_ranges() {
    let data = TestCall::random(&mut Random(62), 300, 300, [1, 1], 16);
    let text = "infinitehip:block=8,stride_1=2,chunk_1=16,budget_2=96,stride_2=2,chunk_2=8,budget_3=48,stride_3=1,chunk_3=4,budget=16,\
                sink=8,window=16,prefill_dense_below=0,first_dense_layers=0";
    let mask = select(text, &data);
    for row in 0..300_usize {
        let keys = shown(&mask, 0, row);
        assert!(
            (0..8.min(row + 1)).all(|j| keys.contains(&j)),
            "sink of {row}"
        );
        assert!(
            (row.saturating_sub(15)..=row).all(|j| keys.contains(&j)),
            "window of {row}"
        );
        // Sink, window with its tile, and the budget.
        assert!(keys.len() <= 8 + 16 + 8 + 4 + 16, "{row}: {}", keys.len());
    }
    // A chunk of one key is ranked exactly.
    let exact = text
        .replace("chunk_1=16", "chunk_1=1")
        .replace("chunk_2=8", "chunk_2=1")
        .replace("chunk_3=4", "chunk_3=1");
    let exact = exact
        .replace("stride_1=2", "stride_1=1")
        .replace("stride_2=2", "stride_2=1");
    let mask = select(&exact, &data);
    let call = data.call();
    let tiles: Tiles = mask.tiles;
    let i = 30;
    let rows: Vec<usize> = tiles.rows(i).collect();
    let candidates: Vec<(usize, usize)> =
        (8..tiles.first(i) + 1 - 16).map(|j| (j, j + 1)).collect();
    let best = crate::prefill::infinitehip::exact_chunk_order(&call, 0, &rows, &candidates);
    for &at in &best[..16] {
        assert!(mask.row(0, i).contains(&(candidates[at].0 as i32)));
    }
}

#[test]
fn minference_patterns_of_a_file_and_the_search() {
    let file = PatternFile {
        layers: vec![vec![
            Some(Pattern::AShape {
                n_init: 8,
                n_local: 40,
            }),
            Some(Pattern::VerticalSlash {
                vertical: 30,
                slash: 50,
            }),
            None,
            Some(Pattern::BlockSparse { topk: 2 }),
        ]],
    };
    let path = std::env::temp_dir().join(format!("sieve-patterns-{}.json", std::process::id()));
    std::fs::write(&path, file.to_json()).expect("a temporary file");
    assert_eq!(PatternFile::read(&path).expect("what it wrote"), file);
    let data = TestCall::random(&mut Random(63), 400, 400, [4, 2], 8);
    let mask = select(&format!("minference:pattern={}", path.display()), &data);
    std::fs::remove_file(&path).expect("it was there");
    assert_eq!(shown(&mask, 0, 300).len(), 48);
    assert_eq!(shown(&mask, 2, 300).len(), 301);
    assert!(mask.row(3, 5).len() <= 3);
    let a = block_sparse_attention(&data.call(), &mask).expect("valid");
    assert_close(
        "mixed",
        &a.o,
        &crate::oracle_attention(&data.call(), &mask).o,
        2e-5,
    );

    // A head that looks at the last tokens only, on a sample longer than the windows.
    let mut data = TestCall::random(&mut Random(64), 1400, 1400, [1, 1], 4);
    data.q.fill(0.0);
    data.k.fill(0.0);
    let found = search_patterns(&data.call()).expect("valid");
    assert!(found[0].1 > 0.3, "{found:?}");
    for bad in ["[{\"x\": [1]}]", "[{\"0\": [\"spiral\", 1, 2]}]", "{}"] {
        let path = std::env::temp_dir().join(format!("sieve-bad-{}.json", std::process::id()));
        std::fs::write(&path, bad).expect("a temporary file");
        assert!(PatternFile::read(&path).is_err(), "{bad}");
    }
}

#[test]
fn oracle_topk_keeps_the_heaviest_blocks() {
    let data = TestCall::structured(&mut Random(65), 200, [1, 1], 16);
    let mask = select("oracle_topk:block=8,k=4", &data);
    let call: Call<'_> = data.call();
    let i = 20;
    let mut mass = [0.0; 25];
    for row in mask.tiles.rows(i) {
        let all: Vec<bool> = (0..200).map(|j| j <= row).collect();
        let (_, lse) = oracle_row(&call, 0, row, &all);
        for j in 0..=row {
            let logit: f32 = call
                .query(0, row)
                .iter()
                .zip(call.key(0, j))
                .map(|(a, b)| a * b)
                .sum();
            mass[j / 8] += (f64::from(logit) / 4.0 - lse).exp();
        }
    }
    let mut order: Vec<usize> = (0..=i).collect();
    order.sort_by(|a, b| mass[*b].total_cmp(&mass[*a]));
    for best in &order[..4] {
        assert!(
            mask.row(0, i).contains(&(*best as i32)),
            "{order:?} {:?}",
            mask.row(0, i)
        );
    }
}
