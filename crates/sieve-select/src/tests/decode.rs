//! Decode methods: against naive versions, budgets, causality, both forms.

use crate::decode::dam::{DamCalibration, DamCapture, DamMaps};
use crate::test_data::{Random, TestCall, assert_close};
use crate::{DecodeSession, LayerShape, Method, Selector, oracle_dense};

const SMALL: &[&str] = &[
    "h2o:heavy=6,recent=4",
    "h2o:heavy=0.2,recent=0.1",
    "snapkv:window=4,capacity=12,kernel=3",
    "quest:page=4,budget=12,dense_layers=0",
    "infllm:init=4,local=8,block=4,topk=2,repr=2,chunk=1",
    "exact_top:k=7",
    "streamingllm:n_init=2,n_local=6",
    "streamingllm:n_init=2,n_local=6,reindex=true",
];

fn layer(data: &TestCall) -> LayerShape {
    LayerShape {
        num_heads: data.shape.num_heads,
        num_kv_heads: data.shape.num_kv_heads,
        head_dim: data.shape.head_dim,
        layer: 0,
    }
}

fn session(text: &str, data: &TestCall) -> DecodeSession {
    let selector = Selector::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
    let selector = selector.for_rope_theta(1e4);
    DecodeSession::new(&selector, layer(data)).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// Tokens `range` of the operands.
fn tokens(data: &TestCall, range: std::ops::Range<usize>) -> [&[f32]; 3] {
    let (q, k) = (
        data.shape.num_heads * data.shape.head_dim,
        data.shape.num_kv_heads * data.shape.head_dim,
    );
    [
        &data.q[range.start * q..range.end * q],
        &data.k[range.start * k..range.end * k],
        &data.v[range.start * k..range.end * k],
    ]
}

/// All outputs of a stream with what each token read.
fn stream(text: &str, data: &TestCall) -> (Vec<f32>, Vec<Vec<Vec<u32>>>) {
    let mut session = session(text, data);
    let (mut o, mut kept) = (Vec::new(), Vec::new());
    for t in 0..data.shape.num_keys {
        let [q, k, v] = tokens(data, t..t + 1);
        o.extend(
            session
                .step(q, k, v)
                .unwrap_or_else(|e| panic!("{text}: {e}")),
        );
        kept.push(session.kept().to_vec());
    }
    (o, kept)
}

#[test]
fn decode_with_everything_kept_equals_dense() {
    let data = TestCall::random(&mut Random(91), 60, 60, [4, 2], 8);
    let dense = oracle_dense(&data.call());
    for text in [
        "h2o:heavy=1000,recent=10",
        "snapkv:capacity=1000",
        "quest:budget=10000,dense_layers=0",
        "quest:budget=16,dense_layers=1",
        "infllm:local=1000",
        "exact_top:k=1000",
        "streamingllm:n_local=1000",
        "streamingllm:n_local=1000,reindex=true",
        "h2o:first_dense_layers=1,heavy=1,recent=1",
    ] {
        let (o, _) = stream(text, &data);
        assert_close(text, &o, &dense.o, 2e-5);
        // The prompt form: dense prompt, then decoding.
        let mut session = session(text, &data);
        let [q, k, v] = tokens(&data, 0..41);
        let mut o = session
            .prompt(q, k, v)
            .unwrap_or_else(|e| panic!("{text}: {e}"))
            .o;
        let [q, k, v] = tokens(&data, 41..60);
        o.extend(
            session
                .stream(q, k, v)
                .unwrap_or_else(|e| panic!("{text}: {e}")),
        );
        assert_close(text, &o, &dense.o, 2e-5);
    }
}

#[test]
fn decode_streams_are_causal_and_read_no_more_than_their_budget() {
    let data = TestCall::structured(&mut Random(92), 120, [4, 2], 8);
    let mut other = data.clone();
    for x in [&mut other.k, &mut other.v, &mut other.q] {
        let from = x.len() / 120 * 80;
        x[from..].iter_mut().for_each(|x| *x += 1.0);
    }
    for text in SMALL {
        let ((a, kept), (b, kept_b)) = (stream(text, &data), stream(text, &other));
        assert_eq!(a[..80 * 32], b[..80 * 32], "{text}");
        assert_eq!(kept[..80], kept_b[..80], "{text}");
        assert_ne!(a[80 * 32..], b[80 * 32..], "{text}");
        for (t, lists) in kept.iter().enumerate() {
            for list in lists {
                assert!(list.windows(2).all(|w| w[0] < w[1]), "{text}, token {t}");
                // The largest logits need not include the token's own.
                assert!(
                    list.contains(&(t as u32)) || text.starts_with("exact_top"),
                    "{text}, token {t}"
                );
                let most = match text.split(':').next() {
                    Some("h2o") if text.contains("heavy=6") => 11,
                    Some("snapkv") => 16,
                    Some("quest") => 12,
                    Some("infllm") => 4 + 8 + 8 + 3,
                    Some("exact_top") => 7,
                    Some("streamingllm") => 8,
                    _ => t + 1,
                };
                assert!(list.len() <= most, "{text}, token {t}: {}", list.len());
            }
        }
    }
}

#[test]
fn h2o_equals_a_naive_version() {
    let data = TestCall::random(&mut Random(93), 50, 50, [2, 1], 8);
    let (_, kept) = stream("h2o:heavy=5,recent=3", &data);
    let call = data.call();
    let mut cache: Vec<(usize, f64)> = Vec::new();
    for (t, kept) in kept.iter().enumerate() {
        cache.push((t, 0.0));
        let keys: Vec<u32> = cache.iter().map(|x| x.0 as u32).collect();
        assert_eq!(kept[0], keys, "token {t}");
        for head in 0..2 {
            let logit = |j: u32| -> f64 {
                let dot: f32 = call
                    .query(head, t)
                    .iter()
                    .zip(call.key(0, j as usize))
                    .map(|(a, b)| a * b)
                    .sum();
                f64::from(dot) / 8.0_f64.sqrt()
            };
            let sum: f64 = keys.iter().map(|&j| logit(j).exp()).sum();
            cache
                .iter_mut()
                .for_each(|x| x.1 += logit(x.0 as u32).exp() / sum);
        }
        if cache.len() > 8 {
            let old = &cache[..cache.len() - 3];
            let worst = (0..old.len())
                .min_by(|a, b| old[*a].1.total_cmp(&old[*b].1))
                .expect("not empty");
            cache.remove(worst);
        }
    }
}

#[test]
fn h2o_prompt_keeps_the_column_sums_of_the_prompt() {
    let data = TestCall::structured(&mut Random(94), 90, [2, 2], 8);
    let mut session = session("h2o:heavy=5,recent=3", &data);
    let [q, k, v] = tokens(&data, 0..80);
    session.prompt(q, k, v).expect("valid");
    let [q, k, v] = tokens(&data, 80..81);
    session.step(q, k, v).expect("valid");
    let dense = data.chunk(0, 80);
    let call = dense.call();
    for head in 0..2 {
        let mut sums = vec![0.0; 80];
        for row in 0..80 {
            let all: Vec<bool> = (0..80).map(|j| j <= row).collect();
            let (_, lse) = crate::oracle::oracle_row(&call, head, row, &all);
            for (j, sum) in sums.iter_mut().enumerate().take(row + 1) {
                let dot: f32 = call
                    .query(head, row)
                    .iter()
                    .zip(call.key(head, j))
                    .map(|(a, b)| a * b)
                    .sum();
                *sum += (f64::from(dot) / 8.0_f64.sqrt() - lse).exp();
            }
        }
        let mut order: Vec<usize> = (0..77).collect();
        order.sort_by(|a, b| sums[*b].total_cmp(&sums[*a]));
        let mut expected: Vec<u32> = order[..5]
            .iter()
            .map(|&j| j as u32)
            .chain([77, 78, 79, 80])
            .collect();
        expected.sort_unstable();
        assert_eq!(session.kept()[head], expected);
    }
}

#[test]
fn snapkv_prompt_keeps_pooled_votes_and_the_window_once() {
    let data = TestCall::structured(&mut Random(95), 100, [2, 1], 8);
    for pool in ["avg", "max"] {
        let mut session = session(
            &format!("snapkv:window=4,capacity=10,kernel=3,pool={pool}"),
            &data,
        );
        let [q, k, v] = tokens(&data, 0..60);
        session.prompt(q, k, v).expect("valid");
        let mut votes = vec![0.0; 56];
        let short = data.chunk(0, 60);
        let call = short.call();
        for head in 0..2 {
            for row in 56..60 {
                let all: Vec<bool> = (0..60).map(|j| j <= row).collect();
                let (_, lse) = crate::oracle::oracle_row(&call, head, row, &all);
                for (j, vote) in votes.iter_mut().enumerate() {
                    let dot: f32 = call
                        .query(head, row)
                        .iter()
                        .zip(call.key(0, j))
                        .map(|(a, b)| a * b)
                        .sum();
                    *vote += (f64::from(dot) / 8.0_f64.sqrt() - lse).exp();
                }
            }
        }
        let smooth: Vec<f64> = (0..56_usize)
            .map(|j| {
                let near = &votes[j.saturating_sub(1)..(j + 2).min(56)];
                if pool == "avg" {
                    near.iter().sum::<f64>() / 3.0
                } else {
                    near.iter().copied().fold(f64::MIN, f64::max)
                }
            })
            .collect();
        let mut order: Vec<usize> = (0..56).collect();
        order.sort_by(|a, b| smooth[*b].total_cmp(&smooth[*a]));
        for t in 60..100 {
            let [q, k, v] = tokens(&data, t..t + 1);
            session.step(q, k, v).expect("valid");
            let mut expected: Vec<u32> = order[..6]
                .iter()
                .map(|&j| j as u32)
                .chain(56..=t as u32)
                .collect();
            expected.sort_unstable();
            assert_eq!(session.kept()[0], expected, "{pool}, token {t}");
        }
    }
    // A prompt computed elsewhere is kept alike.
    let [q, k, v] = tokens(&data, 0..60);
    let mut taken = session("snapkv:window=4,capacity=10,kernel=3,pool=max", &data);
    taken.take_prompt(q, k, v).expect("valid");
    let mut computed = session("snapkv:window=4,capacity=10,kernel=3,pool=max", &data);
    computed.prompt(q, k, v).expect("valid");
    let [q, k, v] = tokens(&data, 60..61);
    assert_eq!(
        taken.step(q, k, v).expect("valid"),
        computed.step(q, k, v).expect("valid")
    );
    assert!(taken.take_prompt(q, k, v).is_err());
    // Shorter than the capacity: all.
    let mut session = session("snapkv", &data);
    let [q, k, v] = tokens(&data, 0..99);
    session.prompt(q, k, v).expect("valid");
    let [q, k, v] = tokens(&data, 99..100);
    session.step(q, k, v).expect("valid");
    assert_eq!(session.kept()[0].len(), 100);
}

#[test]
fn exact_top_keeps_the_largest_logits_ties_to_the_later() {
    let mut data = TestCall::random(&mut Random(96), 40, 40, [2, 1], 8);
    data.k.fill(0.5);
    let (_, kept) = stream("exact_top:k=3", &data);
    assert_eq!(kept[39], [[37, 38, 39], [37, 38, 39]]);
    let data = TestCall::random(&mut Random(97), 40, 40, [2, 1], 8);
    let (exact, _) = stream("exact_top:k=12", &data);
    let dense = oracle_dense(&data.call());
    let error = |o: &[f32]| -> f64 {
        o.iter()
            .zip(&dense.o)
            .map(|(a, b)| (f64::from(*a) - b).powi(2))
            .sum()
    };
    let (recent, _) = stream("streamingllm:n_init=2,n_local=10", &data);
    assert!(error(&exact) < error(&recent));
}

#[test]
fn streamingllm_decode_agrees_with_its_prefill_mask() {
    let data = TestCall::random(&mut Random(98), 80, 80, [2, 1], 8);
    let mut selector = Selector::parse("streamingllm:n_init=3,n_local=9").expect("valid");
    selector.common.min_prefill_tokens = 0;
    let prefill = selector.prefill(&data.call()).expect("valid");
    let (o, _) = stream("streamingllm:n_init=3,n_local=9", &data);
    let expected: Vec<f64> = prefill.output.o.iter().map(|&x| f64::from(x)).collect();
    assert_close("streamingllm", &o, &expected, 1e-5);
    let (moved, _) = stream("streamingllm:n_init=3,n_local=9,reindex=true", &data);
    assert_eq!(o[..12 * 16], moved[..12 * 16]);
    assert_ne!(o[20 * 16..], moved[20 * 16..]);
}

#[test]
fn infllm_reads_init_blocks_and_local() {
    let data = TestCall::structured(&mut Random(99), 100, [2, 1], 8);
    let (_, kept) = stream("infllm:init=4,local=8,block=4,topk=2,repr=2,chunk=1", &data);
    for t in 30..100_u32 {
        let list = &kept[t as usize][0];
        assert!(
            (0..4).chain(t - 7..=t).all(|j| list.contains(&j)),
            "token {t}"
        );
        // Two whole blocks, and what has not become a block yet.
        let local = t + 1 - 8;
        let blocks = (local - 4) / 4;
        let between: Vec<u32> = list
            .iter()
            .copied()
            .filter(|&j| j >= 4 && j < 4 + 4 * blocks)
            .collect();
        assert_eq!(between.len(), 8, "token {t}: {list:?}");
        assert!(
            between
                .chunks(4)
                .all(|block| block[0] % 4 == 0 && block[3] == block[0] + 3)
        );
    }
    // A chunk of queries shares its blocks, all of them fixed at its start.
    let mut session = session(
        "infllm:init=4,local=8,block=4,topk=2,repr=2,chunk=20",
        &data,
    );
    let o = session.stream(&data.q, &data.k, &data.v).expect("valid");
    assert!(o.iter().all(|x| x.is_finite()));
}

#[test]
fn dam_maps_meet_their_density_and_extend() {
    let data = TestCall::structured(&mut Random(100), 64, [2, 1], 8);
    let calibration = DamCalibration {
        capture: 64,
        density: 0.3,
        ..DamCalibration::default()
    };
    let mut capture = DamCapture::new(calibration, 2).expect("valid");
    capture.add(&data.call()).expect("valid");
    let maps = DamMaps {
        layers: vec![capture.maps()],
    };
    for map in &maps.layers[0] {
        let on: usize = map.rows.iter().map(Vec::len).sum();
        // Sink and diagonal come on top.
        assert!(
            on >= (0.3 * 64.0 * 65.0 / 2.0) as usize
                && on < (0.3 * 64.0 * 65.0 / 2.0) as usize + 64 * 5
        );
        assert!(
            map.rows
                .iter()
                .enumerate()
                .all(|(i, row)| row.contains(&(i as u32)) && (i < 4 || row[..4] == [0, 1, 2, 3]))
        );
        assert!(map.offsets.contains(&0));
        let keys = map.keys(100, 4);
        assert!(keys.contains(&100) && keys.contains(&0) && keys.iter().all(|&key| key <= 100));
    }
    let path = std::env::temp_dir().join(format!("sieve-dam-{}.json", std::process::id()));
    maps.write(&path).expect("a temporary file");
    let selector = Selector::parse(&format!("dam:map={}", path.display())).expect("valid");
    std::fs::remove_file(&path).expect("it was there");
    assert!(matches!(&selector.method, Method::Dam(config) if config.maps.as_ref() == Some(&maps)));
    let long = TestCall::structured(&mut Random(101), 90, [2, 1], 8);
    let mut session = DecodeSession::new(&selector, layer(&long)).expect("valid");
    let o = session.stream(&long.q, &long.k, &long.v).expect("valid");
    assert!(o.iter().all(|x| x.is_finite()));
    assert_eq!(session.kept()[0], maps.layers[0][0].keys(89, 4));
    let error = DecodeSession::new(&Selector::parse("dam").expect("valid"), layer(&long))
        .expect_err("no map");
    assert!(error.to_string().contains("no map for layer 0"), "{error}");
}

#[test]
fn decode_mistakes_are_told() {
    let data = TestCall::random(&mut Random(102), 10, 10, [2, 1], 8);
    let error = DecodeSession::new(&Selector::parse("pbs").expect("valid"), layer(&data))
        .expect_err("prefill");
    assert!(
        error.to_string().contains("pbs: acts in prefill"),
        "{error}"
    );
    for text in ["infllm", "streamingllm:reindex=true"] {
        let selector = Selector::parse(text).expect("valid");
        let error = DecodeSession::new(&selector, layer(&data)).expect_err("no theta");
        assert!(error.to_string().contains("give rope_theta"), "{error}");
        let given = Selector::parse("infllm:rope_theta=500")
            .expect("valid")
            .for_rope_theta(9.0);
        assert!(given.to_string().contains("rope_theta=500"));
    }
    let mut session = session("h2o", &data);
    assert!(session.step(&data.q, &data.k, &data.v).is_err());
    session.prompt(&data.q, &data.k, &data.v).expect("valid");
    assert_eq!((session.len(), session.is_empty()), (10, false));
    assert_eq!(session.pairs_read(), 0);
    session
        .step(&data.q[..16], &data.k[..8], &data.v[..8])
        .expect("valid");
    // Heavy and recent keep one key each of the ten, and the new one is read too.
    assert_eq!(session.pairs_read(), 2 * 3);
    let error = session
        .prompt(&data.q, &data.k, &data.v)
        .expect_err("twice");
    assert!(
        error
            .to_string()
            .contains("a prompt for a session that has 11 tokens"),
        "{error}"
    );
    for text in [
        "snapkv:kernel=4",
        "snapkv:capacity=32",
        "h2o:heavy=0",
        "quest:page=0",
        "exact_top:k=0",
        "infllm:repr=0",
        "infllm:rope_theta=0.5",
        "streamingllm:rope_theta=nan",
    ] {
        assert!(Selector::parse(text).is_err(), "{text}");
    }
}
