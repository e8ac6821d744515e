//! Checks of each method against its paper, for methods without a test file of their own.

use super::{attend, file, prefill, select, selector};
use crate::density;
use crate::keep::{falling, keep_mass_forced};
use crate::oracle::expanded_row;
use crate::prefill::minference::{Pattern, PatternFile, search_patterns};
use crate::test_data::TestCall;
use sieve_core::ShownPath;
use sieve_testing::{Random, assert_close_relative, refusal};

/// Kept pairs of a row, as key positions.
fn shown(chosen: &crate::Selected, head: usize, row: usize) -> Vec<usize> {
    let shown = expanded_row(&chosen.mask, head, row);
    (0..shown.len()).filter(|&j| shown[j]).collect()
}

/// A selector that drops every tile it may, so that only the rescue keeps tiles.
const BFLA: &str = "bfla:block=32,group=8,tile=8,keep_mass=0,local_tokens=0";

#[test]
fn bfla_stride_rescues_one_of_eta_and_random_the_given_share() {
    let data = TestCall::random(&mut Random(42), 1024, 1024, [1, 1], 8);
    let dropped = 1.0 - density(&select(BFLA, &data)).tile;
    for (extra, expected) in
        [("stride=4", 0.25), ("stride=8", 0.125), ("stride=16", 0.0625), ("prob=0.1", 0.1), ("prob=0.3", 0.3)]
    {
        let rescued = density(&select(&format!("{BFLA},{extra}"), &data)).tile - (1.0 - dropped);
        let share = rescued / dropped;
        assert!((share - expected).abs() < 0.02 * (1.0 + expected), "{extra}: {share}");
    }
}

#[test]
fn bfla_random_rescue_does_not_come_in_runs() {
    let neighbours = |hash: &str| {
        let data = TestCall::random(&mut Random(43), 1024, 1024, [1, 1], 8);
        let (plain, chosen) = (select(BFLA, &data), select(&format!("{BFLA},prob=0.3,hash={hash}"), &data));
        let (mut both, mut one) = (0.0, 0.0);
        for i in 60..chosen.mask.tiles.num_query_tiles() {
            let row = chosen.mask.row(0, i);
            for j in 8..50 {
                let dropped = |j: i32| !plain.mask.row(0, i).contains(&j);
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
fn ranges_are_exact_to_the_token() {
    let data = TestCall::random(&mut Random(58), 150, 200, [2, 1], 8);
    for (text, init, local, last) in [
        ("a_shape:n_init=7,n_local=30", 7, 30, 0),
        ("streamingllm:n_init=0,n_local=1", 0, 1, 0),
        ("streamingllm", 4, 1024, 0),
        ("tri_shape:n_init=7,n_local=30,n_last=40", 7, 30, 40),
    ] {
        let chosen = select(text, &data);
        for row in 0..150 {
            // The 150 queries follow 50 earlier keys.
            let a = 50 + row;
            let is_last = row + last >= 150;
            let expected: Vec<usize> = (0..=a).filter(|&j| is_last || j < init || j + local > a).collect();
            assert_eq!(shown(&chosen, 1, row), expected, "{text}, row {row}");
        }
    }
}

#[test]
fn flexprefill_takes_the_estimate_when_it_is_close() {
    let mut data = TestCall::random(&mut Random(60), 256, 256, [2, 1], 16);
    // Queries are so short that attention is almost uniform, in the probe and in the estimate.
    data.q.iter_mut().for_each(|x| *x *= 0.01);
    let patterns = |text: &str| select(text, &data).stats.patterns;
    assert_eq!(patterns("flexprefill:block=16,min_budget=16")[0], ("query_aware", 2));
    assert_eq!(patterns("flexprefill:block=16,min_budget=16,tau=0")[1], ("vertical_slash", 2));
    let small = TestCall::random(&mut Random(61), 32, 32, [1, 1], 8);
    assert!(select("flexprefill:block=16,min_budget=16", &small).stats.dense_call);
}

#[test]
fn minference_patterns_of_a_file_and_the_search() {
    let patterns = PatternFile {
        layers: vec![vec![
            Some(Pattern::AShape { n_init: 8, n_local: 40 }),
            Some(Pattern::VerticalSlash { vertical: 30, slash: 50 }),
            None,
            Some(Pattern::BlockSparse { topk: 2 }),
        ]],
    };
    let written = file(&patterns.to_json());
    assert_eq!(PatternFile::read(written.path()).expect("what it wrote"), patterns);
    let data = TestCall::random(&mut Random(63), 400, 400, [4, 2], 8);
    let chosen = select(&format!("minference:pattern={}", written.path().shown()), &data);
    assert_eq!(shown(&chosen, 0, 300).len(), 48);
    assert_eq!(shown(&chosen, 2, 300).len(), 301);
    assert!(chosen.mask.row(3, 5).len() <= 3);
    let a = attend(&data, &chosen);
    assert_close_relative("mixed", &a.o, &crate::oracle_attention(&data.call(), &chosen).o, 2e-5);

    for bad in ["[{\"x\": [1]}]", "[{\"0\": [\"spiral\", 1, 2]}]", "{}"] {
        assert!(PatternFile::read(file(bad).path()).is_err(), "{bad}");
    }
}

#[test]
fn bfla_rescue_on_blocks_takes_whole_blocks() {
    let data = TestCall::random(&mut Random(140), 512, 512, [1, 1], 8);
    let chosen = select(&format!("{BFLA},prob=0.3,rescue_grid=block"), &data);
    for i in 0..chosen.mask.tiles.num_query_tiles() {
        let row = chosen.mask.row(0, i);
        // A block before the diagonal keeps all its four tiles or none; block 0 is skipped, since it has the sink tile.
        for block in 1..i as i32 / 4 {
            let kept = (block * 4..block * 4 + 4).filter(|j| row.contains(j)).count();
            assert!(kept == 0 || kept == 4, "tile {i}, block {block}: {row:?}");
        }
    }
}

#[test]
fn bfla_sink_tiles_stay() {
    let data = TestCall::random(&mut Random(141), 256, 256, [1, 1], 8);
    let chosen = select(&format!("{BFLA},sink_tiles=3"), &data);
    for i in 0..chosen.mask.tiles.num_query_tiles() {
        let row = chosen.mask.row(0, i);
        assert!((0..3.min(i as i32 + 1)).all(|j| row.contains(&j)), "tile {i}");
    }
}

/// The published loop puts the forced blocks first and the others by falling score after them, and keeps each block
/// whose predecessors sum to less than the goal.
#[test]
fn xattention_forced_first_equals_the_published_loop() {
    let mut random = Random(142);
    for _ in 0..5000 {
        let len = 2 + random.below(40);
        let p: Vec<f32> = random.vector(len).iter().map(|x| x * x).collect();
        let tau = random.below(100) as f64 / 100.0;
        let goal = tau as f32 * p.iter().sum::<f32>();
        let forced = [0, len - 1];
        let others = falling(&p).into_iter().filter(|j| !forced.contains(j));
        let mut before: f32 = forced.iter().map(|&j| p[j]).sum();
        let mut expected = forced.to_vec();
        for j in others {
            if before < goal {
                expected.push(j);
            }
            before += p[j];
        }
        expected.sort_unstable();
        assert_eq!(keep_mass_forced(&p, &forced, tau), expected, "{p:?} {tau}");
    }
}

#[test]
fn xattention_thresholds_of_a_file_and_the_norm() {
    let taus = file("[[0.0, 1.0], [0.3, 0.3], [0.5, 0.5]]");
    let path = taus.path().to_owned();
    let text = format!("xattention:block=16,stride=4,tau=0.5,taus={}", path.shown());
    let data = TestCall::structured(&mut Random(143), 256, [2, 1], 16);
    let select_in = |text: &str, layer: usize| selector(text).select(&data.call().in_layer(layer, 3)).expect("valid");
    let chosen = select_in(&text, 0);
    assert!((0..16).all(|i| chosen.mask.row(0, i).len() <= 2 && chosen.mask.row(1, i).len() == i + 1));
    let (chosen, plain) = (select_in(&text, 1), select_in("xattention:block=16,stride=4,tau=0.3", 1));
    assert!((0..16).all(|i| chosen.mask.row(0, i) == plain.mask.row(0, i)));
    let plain = select_in("xattention:block=16,stride=4,tau=0.5", 2);
    assert_eq!(select_in(&text, 2).mask, plain.mask);
    // Files of thresholds for another model are refused.
    for (layers, layer, wanted) in [
        (2, 0, "taus has 3 layers and 2 heads in layer 0, for 2 layers of 2 query heads"),
        (4, 3, "taus has 3 layers and 0 heads in layer 3, for 4 layers of 2 query heads"),
    ] {
        refusal(selector(&text).select(&data.call().in_layer(layer, layers)), wanted);
    }
    let wide = TestCall::structured(&mut Random(143), 256, [4, 1], 16);
    let wanted = "taus has 3 layers and 2 heads in layer 0, for a model of 4 query heads";
    refusal(selector(&text).select(&wide.call()), wanted);
    std::fs::write(&path, "[[1.5]]").expect("a temporary file");
    for text in [text.clone(), format!("{text},gqa=mean")] {
        refusal(crate::Selector::parse(&text), "outside [0, 1]");
    }
    std::fs::write(&path, "{}").expect("a temporary file");
    assert!(crate::Selector::parse(&text).is_err());
    taus.close().expect("it was there");
    refusal(crate::Selector::parse(&text), "one list per layer");
    // A larger norm flattens the estimate, so that the same mass needs more blocks.
    let kept = |norm: &str| density(&select_in(&format!("xattention:block=16,stride=4,tau=0.7,norm={norm}"), 0)).tile;
    assert!(kept("4") > kept("1") && kept("1") > kept("0.1"));
}

#[test]
fn a_shape_and_streamingllm_outputs_depend_on_no_later_token() {
    let data = TestCall::random(&mut Random(144), 150, 150, [2, 1], 8);
    let other = data.changed_from(90, |x| -x);
    for text in ["a_shape:n_init=7,n_local=30", "streamingllm:n_init=3,n_local=20"] {
        assert!(selector(text).is_causal_map());
        let [a, b] = [&data, &other].map(|data| prefill(text, &data.call()).output.o);
        assert_eq!(a[..90 * 16], b[..90 * 16], "{text}");
        assert_ne!(a[90 * 16..], b[90 * 16..], "{text}");
    }
    // Methods whose choice depends on later rows are no causal maps.
    for text in ["bfla", "pbs", "vertical_slash", "tri_shape", "infinitehip"] {
        assert!(!selector(text).is_causal_map(), "{text}");
    }
}

#[test]
fn flexprefill_with_gamma_1_keeps_everything_however_sums_round() {
    let data = TestCall::random(&mut Random(145), 3000, 3000, [2, 1], 8);
    for tau in ["0", "1"] {
        let chosen = select(&format!("flexprefill:block=32,gamma=1,min_budget=32,tau={tau}"), &data);
        assert!(chosen.mask.keeps_everything(), "tau={tau}");
    }
}

#[test]
fn infinitehip_short_prompts_are_dense() {
    let data = TestCall::random(&mut Random(146), 300, 300, [1, 1], 8);
    for (below, dense) in [("300", false), ("301", true)] {
        let chosen = select(&format!("infinitehip:first_dense_layers=0,prefill_dense_below={below}"), &data);
        assert_eq!(chosen.stats.dense_call, dense);
    }
}

#[test]
fn a_mask_that_keeps_everything_runs_dense_and_says_so() {
    let data = TestCall::random(&mut Random(147), 300, 300, [4, 2], 8);
    for (text, dense) in [
        ("meanpool:block=16,tau=1", true),
        ("streamingllm:n_local=300", true),
        ("streamingllm:n_local=299", false),
        ("meanpool:block=16,tau=0.5", false),
        ("momo:first_dense_layers=0", false),
    ] {
        let done = prefill(text, &data.call());
        assert_eq!(done.selected.stats.dense_call, dense, "{text}");
    }
}

#[test]
fn minference_search_finds_the_candidate_with_the_most_mass() {
    // Head 0 attends to certain early keys, head 1 to near keys, head 2 to random keys.
    let mut data = TestCall::random(&mut Random(148), 1500, 1500, [3, 3], 4);
    data.q.chunks_exact_mut(12).for_each(|q| q[0] = 5.0);
    for (t, k) in data.k.chunks_exact_mut(12).enumerate() {
        let wanted = (100..400).contains(&t) && t % 7 == 5;
        k[0] = if wanted { 6.0 } else { 0.0 };
        let angle = t as f32 / 200.0;
        k[4..8].copy_from_slice(&[9.0 * angle.cos(), 9.0 * angle.sin(), 0.0, 0.0]);
    }
    for (t, q) in data.q.chunks_exact_mut(12).enumerate() {
        let angle = t as f32 / 200.0;
        q[4..8].copy_from_slice(&[9.0 * angle.cos(), 9.0 * angle.sin(), 0.0, 0.0]);
        q[8..12].fill(0.0);
    }
    let call = data.call();
    let found = search_patterns(&call).expect("valid");
    let dense = crate::dense_attention(&call).expect("valid");
    let slashes = [(30, 800), (100, 750), (500, 700), (3500, 100)];
    let candidates = slashes
        .map(|(vertical, slash)| Pattern::VerticalSlash { vertical, slash })
        .into_iter()
        .chain([Pattern::AShape { n_init: 100, n_local: 800 }, Pattern::BlockSparseEighth]);
    let mut masses: [Vec<f64>; 3] = Default::default();
    for pattern in candidates {
        let mut selector = selector("minference");
        if let crate::Method::Minference(config) = &mut selector.method {
            config.patterns.layers = vec![vec![Some(pattern); 3]];
        }
        let done = selector.prefill(&call).expect("valid");
        for (head, masses) in masses.iter_mut().enumerate() {
            let rows = head * 1500..(head + 1) * 1500;
            let mass = crate::recall(&done.output.lse[rows.clone()], &dense.lse[rows]);
            masses.push(mass);
            if found[head].0 == pattern {
                assert!((found[head].1 - mass).abs() < 1e-6, "{head} {pattern:?}");
            }
        }
    }
    for (found, masses) in found.iter().zip(masses) {
        let best = masses.iter().copied().fold(0.0, f64::max);
        assert!((found.1 - best).abs() < 1e-6, "{found:?} {masses:?}");
        assert!(masses.iter().any(|mass| *mass < best - 0.05), "{masses:?}");
    }
}

/// Each head keeps the same keys as the method of its pattern. Vertical-slash is not compared here but in the tests on
/// stored lists.
#[test]
fn minference_gives_each_head_the_keys_of_its_pattern() {
    let data = TestCall::structured(&mut Random(163), 700, [4, 2], 8);
    let vertical_slash = Pattern::VerticalSlash { vertical: 40, slash: 60 };
    let patterns = [
        (Pattern::BlockSparse { topk: 3 }, "block_sparse:topk=3"),
        (vertical_slash, "vertical_slash:vertical=40,slash=60"),
        (Pattern::AShape { n_init: 9, n_local: 70 }, "a_shape:n_init=9,n_local=70"),
        (Pattern::BlockSparse { topk: 2 }, "block_sparse:topk=2"),
    ];
    let pattern_file = PatternFile { layers: vec![patterns.iter().map(|(pattern, _)| Some(*pattern)).collect()] };
    let written = file(&pattern_file.to_json());
    let chosen = select(&format!("minference:pattern={}", written.path().shown()), &data);
    for (head, (_, text)) in patterns.iter().enumerate() {
        let alone = select(text, &data);
        let mut hidden = 0;
        for row in 0..700 {
            let shown = expanded_row(&chosen.mask, head, row);
            assert_eq!(shown, expanded_row(&alone.mask, head, row), "{text}, row {row}");
            hidden += shown[..=row].iter().filter(|&&shown| !shown).count();
        }
        assert!(hidden > 50_000, "{text}: {hidden}");
    }
}
