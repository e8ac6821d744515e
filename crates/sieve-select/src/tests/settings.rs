//! The common settings have an effect in every method that accepts them.

use super::{SMALL, select};
use crate::test_data::TestCall;
use crate::{DecodeSession, Selector};
use sieve_testing::Random;

#[test]
fn every_shared_key_of_a_prefill_method_acts() {
    let data = TestCall::structured(&mut Random(170), 400, [4, 2], 16);
    for small in SMALL.iter().map(|texts| texts[0]) {
        let with = |item: &str| if small.contains(':') { format!("{small},{item}") } else { format!("{small}:{item}") };
        assert!(!select(small, &data).stats.dense_call, "{small}");
        let keys = Selector::parse(small).expect("valid").common_keys();
        for key in keys {
            match *key {
                "first_dense_layers" => {
                    let dense = with("first_dense_layers=1").replace("first_dense_layers=0,", "");
                    let dense = dense.replace(",first_dense_layers=0", "");
                    assert!(select(&dense, &data).stats.dense_call, "{dense}");
                }
                "last_dense_rows" => {
                    let chosen = select(&with("last_dense_rows=7"), &data);
                    assert!((393..400).all(|row| chosen.mask.is_dense_row(row)), "{small}");
                }
                "gqa" => {
                    let union = if small.contains("gqa=") { small.to_owned() } else { with("gqa=union") };
                    assert_eq!(select(&union, &data).mask.heads_per_list, 2, "{union}");
                }
                "min_prefill_tokens" => {
                    let text = with("min_prefill_tokens=401");
                    let selector = Selector::parse(&text).expect("valid");
                    let chosen = selector.select(&data.call()).expect("valid");
                    assert!(chosen.stats.dense_call, "{text}");
                }
                other => panic!("{other} is not tested"),
            }
        }
    }
}

#[test]
fn first_dense_layers_acts_in_decode() {
    let shape = |layer| crate::LayerShape::new([2, 1], 8, layer);
    let data = TestCall::structured(&mut Random(171), 60, [2, 1], 8);
    for text in [
        "h2o:heavy=4,recent=4",
        "snapkv:window=4,capacity=8",
        "quest:page=4,budget=12,dense_layers=0",
        "infllm:init=2,local=8,block=4,topk=1,repr=2",
        "dam:capture=16,density=0.2",
        "exact_top:k=5",
        "dma:keep_window_size=6",
    ] {
        let selector = Selector::parse(&format!("{text},first_dense_layers=3")).expect("valid");
        let selector = selector.for_rope_theta(1e4);
        for (layer, is_dense) in [(2, true), (3, false)] {
            let mut session = DecodeSession::new(&selector, shape(layer)).expect("valid");
            session.stream(&data.q, &data.k, &data.v).expect("valid");
            let all = session.kept().iter().all(|list| list.len() == 60);
            assert_eq!(all, is_dense, "{text}, layer {layer}");
        }
    }
}
