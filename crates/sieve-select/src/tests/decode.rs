//! Decode methods are compared with naive versions; their budgets, causality, and `prompt` and `stream` are checked.

mod causality;
mod dma_slots;
mod infinitehip_refresh;

use super::{file, parsed, prefill};
use crate::decode::dam::{DamCapture, DamConfig, DamMap, DamMaps};
use crate::test_data::TestCall;
use crate::{Call, DecodeSession, LayerShape, Method, Selector, oracle_dense};
use sieve_core::ShownPath;
use sieve_testing::{Random, assert_close_relative, refusal, wide};

const SMALL: &[&str] = &[
    "h2o:heavy=6,recent=4",
    "h2o:heavy=0.2,recent=0.1",
    "snapkv:window=4,capacity=12,kernel=3",
    "quest:page=4,budget=12,dense_layers=0",
    "infllm:init=4,local=8,block=4,topk=2,repr=2,chunk=1",
    "exact_top:k=7",
    "streamingllm:n_init=2,n_local=6",
    "streamingllm:n_init=2,n_local=6,reindex=true",
    "infinitehip:block=1,stride_1=1,chunk_1=8,budget_2=32,chunk_2=4,budget_3=16,chunk_3=2,budget=8,sink=4,window=6,\
     refresh_1=1,refresh_2=1,refresh_3=1,first_dense_layers=0",
    "infinitehip:chunk_1=8,budget_2=32,chunk_2=4,budget_3=16,chunk_3=2,budget=8,sink=4,window=6,refresh_1=8,\
     refresh_2=4,refresh_3=2,gqa=union,first_dense_layers=0",
    "dma:keep_window_size=7",
    "dma:keep_window_size=7,bias=linear",
    "dam:capture=32,density=0.3",
];

/// The same methods with settings that keep every key.
const EVERYTHING: &[&str] = &[
    "h2o:heavy=1000,recent=10",
    "snapkv:capacity=1000",
    "quest:budget=10000,dense_layers=0",
    "quest:budget=16,dense_layers=1",
    "infllm:local=1000",
    "exact_top:k=1000",
    "streamingllm:n_local=1000",
    "streamingllm:n_local=1000,reindex=true",
    "h2o:first_dense_layers=1,heavy=1,recent=1",
    "infinitehip:window=8,sink=8,budget=1000,budget_2=1000,budget_3=1000,first_dense_layers=0",
    "dma:keep_window_size=1000",
    "dam:capture=1000",
];

/// Every check that holds for all decode methods, as `METHOD::CHECK`.
macro_rules! decode_methods {
    ($($method:ident)*) => {$(
        mod $method {
            use super::super::of;
            use super::{EVERYTHING, SMALL};

            const NAME: &str = stringify!($method);

            checks! {
                of(EVERYTHING, NAME) => decode: everything_kept_equals_dense_in_stream_and_prompt_form;
                of(SMALL, NAME) => decode:
                    stream_is_causal_and_reads_no_more_than_its_budget
                    outputs_are_attention_over_the_keys_it_names
                    prompt_form_reads_what_the_stream_reads;
            }
        }
    )*};
}

decode_methods! { h2o snapkv quest infllm exact_top streamingllm infinitehip dma dam }

#[test]
fn every_decode_method_is_checked() {
    let tested: Vec<&str> = SMALL.iter().filter_map(|text| text.split(':').next()).collect();
    for name in crate::names_of(crate::Phase::Decode) {
        assert!(tested.contains(&name), "{name}");
    }
}

fn layer(data: &TestCall) -> LayerShape {
    LayerShape::new([data.shape.num_heads, data.shape.num_kv_heads], data.shape.head_dim, 0)
}

pub(super) fn session(text: &str, data: &TestCall) -> DecodeSession {
    let selector = parsed(text).for_rope_theta(1e4);
    DecodeSession::new(&selector, layer(data)).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// Feeds some tokens of the operands one by one.
fn feed(session: &mut DecodeSession, data: &TestCall, range: std::ops::Range<usize>) -> Vec<f32> {
    let [q, k, v] = data.tokens(range);
    session.stream(q, k, v).expect("the sizes fit")
}

/// Computes the first tokens as a prompt.
fn prompt(session: &mut DecodeSession, data: &TestCall, end: usize) -> Vec<f32> {
    let [q, k, v] = data.tokens(0..end);
    session.prompt(q, k, v).expect("the sizes fit").o
}

/// All outputs of a stream, and the keys that each token read, `[tokens][lists]`.
fn stream(text: &str, data: &TestCall) -> (Vec<f32>, Vec<Vec<Vec<u32>>>) {
    let mut session = session(text, data);
    let (mut o, mut kept) = (Vec::new(), Vec::new());
    for t in 0..data.shape.num_keys {
        o.extend(feed(&mut session, data, t..t + 1));
        kept.push(session.kept().to_vec());
    }
    (o, kept)
}

fn everything_kept_equals_dense_in_stream_and_prompt_form(texts: &[&str]) {
    let data = TestCall::random(&mut Random(91), 60, 60, [4, 2], 8);
    let dense = oracle_dense(&data.call());
    for text in texts {
        let (o, _) = stream(text, &data);
        assert_close_relative(text, &o, &dense.o, 2e-5);
        // A dense prompt, then decoding.
        let mut session = session(text, &data);
        let mut o = prompt(&mut session, &data, 41);
        o.extend(feed(&mut session, &data, 41..60));
        assert_close_relative(text, &o, &dense.o, 2e-5);
    }
}

fn stream_is_causal_and_reads_no_more_than_its_budget(texts: &[&str]) {
    let data = TestCall::structured(&mut Random(92), 120, [4, 2], 8);
    let other = data.changed_from(80, |x| x + 1.0);
    for text in texts {
        let ((a, kept), (b, kept_b)) = (stream(text, &data), stream(text, &other));
        assert_eq!(a[..80 * 32], b[..80 * 32], "{text}");
        assert_eq!(kept[..80], kept_b[..80], "{text}");
        assert_ne!(a[80 * 32..], b[80 * 32..], "{text}");
        for (t, lists) in kept.iter().enumerate() {
            for list in lists {
                assert!(list.windows(2).all(|w| w[0] < w[1]), "{text}, token {t}");
                // The token's own logit need not be among the largest, which `exact_top` keeps.
                assert!(list.contains(&(t as u32)) || text.starts_with("exact_top"), "{text}, token {t}");
                // h2o: 6 heavy keys, 4 recent ones and the new one. snapkv: capacity and window. infllm: first and
                // local keys, 2 blocks of 4, and up to 3 keys before the local ones that do not fill a block yet.
                let most = match text.split(':').next() {
                    Some("h2o") if text.contains("heavy=6") => 11,
                    Some("snapkv") => 16,
                    Some("quest") => 12,
                    Some("infllm") => 4 + 8 + 8 + 3,
                    Some("exact_top") => 7,
                    Some("streamingllm") => 8,
                    // Sink, window and budget; between refreshes also keys that left the window, and 2 heads' budgets.
                    Some("infinitehip") if text.contains("refresh_1=8") => 4 + 8 + 7 + 2 * 8,
                    Some("infinitehip") => 4 + 8 + 8,
                    Some("dma") => 7,
                    _ => t + 1,
                };
                assert!(list.len() <= most, "{text}, token {t}: {}", list.len());
            }
        }
    }
}

/// Outputs equal softmax attention in f64 over the keys that a step names, unless a method reads keys at other
/// distances.
fn outputs_are_attention_over_the_keys_it_names(texts: &[&str]) {
    let data = TestCall::structured(&mut Random(103), 90, [4, 2], 8);
    let call = data.call();
    for text in texts {
        let (o, kept) = stream(text, &data);
        let moves = text.starts_with("infllm") || text.contains("reindex=true");
        let mut moved = 0;
        for t in (0..90).step_by(7) {
            for head in 0..4 {
                let list = &kept[t][head * kept[t].len() / 4];
                let shown: Vec<bool> = (0..90).map(|j| list.contains(&j)).collect();
                let (expected, _) = crate::oracle::oracle_row(&call, head, t, &shown);
                let o = &o[(t * 4 + head) * 8..][..8];
                let same = o.iter().zip(&expected).all(|(o, e)| (f64::from(*o) - e).abs() < 2e-5);
                // Keys read at another distance change the output, unless their probabilities are tiny.
                assert!(same || (moves && t >= 8), "{text}, token {t}, head {head}");
                moved += usize::from(!same);
            }
        }
        assert_eq!(moved > 20, moves, "{text}: {moved}");
    }
}

/// After a `prompt` and in a `stream`, tokens read the same keys, if a method's choice depends on queries and keys
/// alone and not on earlier attention.
fn prompt_form_reads_what_the_stream_reads(texts: &[&str]) {
    let data = TestCall::structured(&mut Random(104), 100, [4, 2], 8);
    for text in texts {
        let history = ["h2o", "snapkv", "infllm"].iter().any(|name| text.starts_with(name));
        let (_, kept) = stream(text, &data);
        let mut session = session(text, &data);
        // A prompt of 64 tokens is a multiple of all refresh intervals, which count from its end.
        prompt(&mut session, &data, 64);
        for (t, kept) in kept.iter().enumerate().skip(64) {
            feed(&mut session, &data, t..t + 1);
            if history {
                assert!(session.kept()[0].contains(&(t as u32)), "{text}, token {t}");
            } else {
                assert_eq!(session.kept(), kept, "{text}, token {t}");
            }
        }
    }
}

#[test]
fn snapkv_keeps_its_choice_of_a_prompt() {
    let data = TestCall::structured(&mut Random(95), 100, [2, 1], 8);
    let mut session = session("snapkv:window=4,capacity=10,kernel=3", &data);
    prompt(&mut session, &data, 60);
    let mut first = Vec::new();
    for t in 60..100 {
        feed(&mut session, &data, t..t + 1);
        let kept = &session.kept()[0];
        first = if t == 60 { kept[..10].to_vec() } else { first };
        assert_eq!(kept[..10], first, "token {t}");
        assert_eq!(kept[10..], (60..=t as u32).collect::<Vec<_>>(), "token {t}");
    }
    // `take_prompt`, after a prompt computed elsewhere, keeps the same keys as `prompt`.
    let [mut taken, mut computed] =
        [(); 2].map(|()| self::session("snapkv:window=4,capacity=10,kernel=3,pool=max", &data));
    let [q, k, v] = data.tokens(0..60);
    taken.take_prompt(q, k, v).expect("valid");
    prompt(&mut computed, &data, 60);
    assert_eq!(feed(&mut taken, &data, 60..61), feed(&mut computed, &data, 60..61));
    assert!(taken.take_prompt(q, k, v).is_err());
    // A prompt shorter than the capacity keeps all keys.
    let mut session = self::session("snapkv", &data);
    prompt(&mut session, &data, 99);
    feed(&mut session, &data, 99..100);
    assert_eq!(session.kept()[0].len(), 100);
}

#[test]
fn exact_top_keeps_the_later_of_equal_logits() {
    let mut data = TestCall::random(&mut Random(96), 40, 40, [2, 1], 8);
    data.k.fill(0.5);
    let (_, kept) = stream("exact_top:k=3", &data);
    assert_eq!(kept[39], [[37, 38, 39], [37, 38, 39]]);
}

#[test]
fn streamingllm_decode_agrees_with_its_prefill_mask() {
    let data = TestCall::random(&mut Random(98), 80, 80, [2, 1], 8);
    let prefill = prefill("streamingllm:n_init=3,n_local=9", &data.call());
    let (o, _) = stream("streamingllm:n_init=3,n_local=9", &data);
    assert_close_relative("streamingllm", &o, &wide(&prefill.output.o), 1e-5);
    let (moved, _) = stream("streamingllm:n_init=3,n_local=9,reindex=true", &data);
    assert_eq!(o[..12 * 16], moved[..12 * 16]);
    assert_ne!(o[20 * 16..], moved[20 * 16..]);
}

#[test]
fn infllm_with_huge_settings_reads_all_keys() {
    let data = TestCall::random(&mut Random(97), 20, 20, [2, 1], 8);
    let most = u64::MAX;
    for sizes in [
        format!("init={most},local=5,block=4"),
        format!("init=2,local={most},block=4"),
        format!("init=2,local=5,block={most}"),
    ] {
        let text = format!("infllm:{sizes},topk=9,repr=2");
        let (o, kept) = stream(&text, &data);
        assert!(o.iter().all(|x| x.is_finite()), "{text}");
        assert_eq!(kept[19], [(0..20).collect::<Vec<u32>>()], "{text}");
    }
}

#[test]
fn infllm_with_a_chunk_of_queries_has_finite_outputs() {
    // The whole stream is one feed: chunks of 20 queries choose their blocks at their first query.
    let data = TestCall::structured(&mut Random(99), 100, [2, 1], 8);
    let mut session = session("infllm:init=4,local=8,block=4,topk=2,repr=2,chunk=20", &data);
    let o = feed(&mut session, &data, 0..data.shape.num_keys);
    assert!(o.iter().all(|x| x.is_finite()));
}

fn dam_maps(calibration: DamConfig, call: &Call<'_>) -> Vec<DamMap> {
    let mut capture = DamCapture::new(calibration, call.shape.num_heads).expect("valid");
    capture.add(call).expect("valid");
    capture.maps()
}

#[test]
fn dam_maps_meet_their_density_and_extend() {
    let data = TestCall::structured(&mut Random(100), 64, [2, 1], 8);
    let calibration = DamConfig { capture: 64, density: 0.3, ..DamConfig::default() };
    let maps = DamMaps { layers: vec![dam_maps(calibration, &data.call())] };
    for map in &maps.layers[0] {
        let on: usize = map.rows.iter().map(Vec::len).sum();
        // The sink's four keys and each row's own key are added to the density's pairs.
        assert!(on >= (0.3 * 64.0 * 65.0 / 2.0) as usize && on < (0.3 * 64.0 * 65.0 / 2.0) as usize + 64 * 5);
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
    let written = file("");
    maps.write(written.path()).expect("a temporary file");
    let selector = Selector::parse(&format!("dam:map={}", written.path().shown())).expect("valid");
    assert!(matches!(&selector.method, Method::Dam(config) if config.maps.as_ref() == Some(&maps)));
    let long = TestCall::structured(&mut Random(101), 90, [2, 1], 8);
    let mut session = DecodeSession::new(&selector, layer(&long)).expect("valid");
    let o = feed(&mut session, &long, 0..90);
    assert!(o.iter().all(|x| x.is_finite()));
    assert_eq!(session.kept()[0], maps.layers[0][0].keys(89, 4));
    let four_heads = TestCall::structured(&mut Random(101), 90, [4, 2], 8);
    refusal(DecodeSession::new(&selector, layer(&four_heads)), "the maps of layer 0 are of 2 heads, the model has 4");
}

#[test]
fn dam_maps_that_name_keys_outside_their_rows_are_refused() {
    let whole = r#"{"rows": [[0], [0, 1]], "columns": [0], "offsets": [0, 1]}"#;
    let faults = [
        ("[0, 1]], \"columns", "[0, 2]], \"columns", "row 1 has keys"),
        ("[[0], [0, 1]]", "[[0], [1, 0]]", "row 1 has keys"),
        ("\"columns\": [0]", "\"columns\": [2]", "columns do not ascend"),
        ("\"offsets\": [0, 1]", "\"offsets\": [7]", "offsets do not ascend"),
    ];
    let read = |map: &str| DamMaps::read(file(&format!(r#"{{"layers": [[{map}]]}}"#)).path());
    read(whole).expect("a good file");
    for (good, bad, words) in faults {
        assert!(whole.contains(good), "{good}");
        refusal(read(&whole.replace(good, bad)), &format!("layer 0, head 0 | {words}"));
    }
}

#[test]
fn dam_without_a_file_calibrates_on_the_first_tokens_of_the_text() {
    let data = TestCall::structured(&mut Random(115), 80, [2, 1], 8);
    let (_, kept) = stream("dam:capture=32,density=0.3,sink=3", &data);
    let calibration = DamConfig { capture: 32, density: 0.3, sink: 3, ..DamConfig::default() };
    let maps = dam_maps(calibration, &data.call().chunk(0..32));
    for (t, kept) in kept.iter().enumerate() {
        for (map, kept) in maps.iter().zip(kept) {
            let expected = if t < 32 { (0..=t as u32).collect() } else { map.keys(t, 3) };
            assert_eq!(*kept, expected, "token {t}");
        }
    }
    assert!(kept[79].iter().all(|list| list.len() < 60));
}

#[test]
fn prefill_methods_wrong_sizes_and_bad_settings_are_refused() {
    let data = TestCall::random(&mut Random(102), 10, 10, [2, 1], 8);
    refusal(DecodeSession::new(&Selector::parse("pbs").expect("valid"), layer(&data)), "pbs: acts in prefill");
    for text in ["infllm", "streamingllm:reindex=true"] {
        let selector = Selector::parse(text).expect("valid");
        refusal(DecodeSession::new(&selector, layer(&data)), "give rope_theta");
        let given = Selector::parse("infllm:rope_theta=500").expect("valid").for_rope_theta(9.0);
        assert!(given.to_string().contains("rope_theta=500"));
    }
    let mut session = session("h2o", &data);
    assert!(session.step(&data.q, &data.k, &data.v).is_err());
    session.prompt(&data.q, &data.k, &data.v).expect("valid");
    assert_eq!((session.len(), session.is_empty()), (10, false));
    assert_eq!(session.pairs_read(), 0);
    session.step(&data.q[..16], &data.k[..8], &data.v[..8]).expect("valid");
    // Of the ten keys one heavy and one recent stay, and the new key is read too, by two query heads.
    assert_eq!(session.pairs_read(), 2 * 3);
    refusal(session.prompt(&data.q, &data.k, &data.v), "a prompt for a session that has 11 tokens");
    for text in [
        "snapkv:kernel=4",
        "snapkv:capacity=32",
        "h2o:heavy=0",
        "quest:page=0",
        "exact_top:k=0",
        "dam:capture=0",
        "dam:capture=5000",
        "dam:density=1.5",
        "dam:floor=0",
        "infllm:repr=0",
        "infllm:rope_theta=0.5",
        "streamingllm:rope_theta=nan",
    ] {
        assert!(Selector::parse(text).is_err(), "{text}");
    }
}

/// InfLLM, token by token from its definition, in f64.
#[test]
fn infllm_equals_a_naive_version() {
    let (n, init, local, block, topk, repr) = (70, 3, 9, 4, 2, 2);
    let data = TestCall::random(&mut Random(113), n, n, [2, 1], 8);
    let text = format!("infllm:init={init},local={local},block={block},topk={topk},repr={repr},chunk=1");
    let (o, kept) = stream(&text, &data);
    let call = data.call();
    let rotated = |x: &[f32], by: i64| wide(&crate::decode::rope::rotate(x, by as f64, 1e4));
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut received = vec![0.0_f64; n];
    let mut representatives: Vec<Vec<f64>> = Vec::new();
    for t in 0..n {
        let first_local = (t + 1).saturating_sub(local);
        // Key `j` as if at position 0.
        let flat = |j: usize| rotated(call.key(0, j), -(j as i64));
        // A block that the local window has left keeps the mean of the `repr` keys that received the most attention.
        while init + (representatives.len() + 1) * block <= first_local {
            let start = init + representatives.len() * block;
            let mut keys: Vec<usize> = (start..start + block).collect();
            keys.sort_by(|&a, &b| received[b].total_cmp(&received[a]).then(a.cmp(&b)));
            let mut mean = vec![0.0; 8];
            for &j in &keys[..repr] {
                mean.iter_mut().zip(flat(j)).for_each(|(mean, x)| *mean += x / repr as f64);
            }
            representatives.push(mean);
        }
        // All far keys lie `local` tokens before the query.
        let far = |head: usize| rotated(call.query(head, t), local as i64 - t as i64);
        let mut order: Vec<usize> = (0..representatives.len()).collect();
        let score = |b: usize| (0..2).map(|head| product(&far(head), &representatives[b])).sum::<f64>();
        order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
        order.truncate(topk);
        let blocked = init + representatives.len() * block;
        let shown = |j: usize| j >= first_local || j < init || j >= blocked || order.contains(&((j - init) / block));
        let list: Vec<u32> = (0..=t as u32).filter(|&j| shown(j as usize)).collect();
        assert_eq!(kept[t][0], list, "token {t}");
        for head in 0..2 {
            let logits: Vec<f64> = list
                .iter()
                .map(|&j| {
                    let j = j as usize;
                    let logit = if j >= first_local {
                        product(&wide(call.query(head, t)), &wide(call.key(0, j)))
                    } else {
                        product(&far(head), &flat(j))
                    };
                    (logit / 8.0_f64.sqrt()).exp()
                })
                .collect();
            let sum: f64 = logits.iter().sum();
            for (&j, p) in list.iter().zip(&logits).filter(|(j, _)| **j as usize >= first_local) {
                received[j as usize] += p / sum;
            }
            for c in 0..8 {
                let expected: f64 =
                    list.iter().zip(&logits).map(|(&j, p)| p / sum * f64::from(call.value(0, j as usize)[c])).sum();
                assert!((f64::from(o[(t * 2 + head) * 8 + c]) - expected).abs() < 1e-4, "token {t}");
            }
        }
    }
}

#[test]
fn dam_threshold_of_a_density_is_the_same_for_every_transform() {
    // Box-Cox keeps the order, so the pairs above a density's threshold are those with the most attention.
    let data = TestCall::structured(&mut Random(114), 48, [1, 1], 8);
    let maps = |lambda: f64| {
        let calibration = DamConfig { capture: 48, density: 0.2, lambda, floor: 1e-12, ..DamConfig::default() };
        dam_maps(calibration, &data.call())
    };
    let (log, root) = (&maps(0.0)[0], &maps(0.5)[0]);
    let pairs = |map: &DamMap| -> usize { map.rows.iter().map(Vec::len).sum() };
    let both: usize = log.rows.iter().zip(&root.rows).map(|(a, b)| a.iter().filter(|j| b.contains(j)).count()).sum();
    // Scaling to [0, 1] in f32 may make a few different scores equal.
    let (log, root) = (pairs(log), pairs(root));
    assert!(both + 4 >= log && log.abs_diff(root) <= 4, "{both} {log} {root}");
}
