//! Methods that call themselves causal maps are causal in `stream`, which scores texts.

use super::super::parsed;
use super::{SMALL, layer};
use crate::test_data::TestCall;
use crate::{DecodeSession, LayerShape, Phase, names_of};
use sieve_testing::Random;

/// Whether the method is said to be causal, and whether it is: the rows before `at` are bit-equal after every token
/// from `at` on is replaced.
fn says_and_does(text: &str, num_tokens: usize, at: usize) -> (bool, bool) {
    let data = TestCall::structured(&mut Random(116), num_tokens, [2, 1], 4);
    let other = data.changed_from(at, |x| 0.5 - x);
    let selector = parsed(text).for_rope_theta(1e4);
    let [a, b] = [&data, &other].map(|data| {
        // Layer 9 is not dense in any method's defaults.
        let shape = LayerShape { layer: 9, ..layer(data) };
        let mut session = DecodeSession::new(&selector, shape).unwrap_or_else(|e| panic!("{text}: {e}"));
        let o = session.stream(&data.q, &data.k, &data.v);
        o.unwrap_or_else(|e| panic!("{text}: {e}"))
    });
    let row = 2 * 4;
    assert_ne!(a[at * row..], b[at * row..], "{text}");
    (selector.is_causal_map(), a[..at * row] == b[..at * row])
}

#[test]
fn what_is_called_causal_is_causal_at_default_settings() {
    let mut causal = Vec::new();
    for name in names_of(Phase::Decode) {
        // From 6272 tokens on, infllm reads only some of its blocks. A chunk of 512 queries, as in its paper, begins at
        // 6656.
        let (num_tokens, at) = match name {
            "infllm" => (6800, 6700),
            _ => (3200, 3100),
        };
        let (says, does) = says_and_does(name, num_tokens, at);
        assert!(does || !says, "{name}: rows change with later tokens");
        if says {
            causal.push(name);
        }
    }
    let expected = "streamingllm h2o snapkv quest infllm dam exact_top dma";
    assert_eq!(causal.join(" "), expected);
}

#[test]
fn what_is_called_causal_is_causal_at_small_settings() {
    for text in SMALL {
        let (says, does) = says_and_does(text, 120, 85);
        assert!(does || !says, "{text}: rows change with later tokens");
    }
}

#[test]
fn infllm_with_a_chunk_of_queries_is_not_called_causal() {
    let text = "infllm:init=4,local=8,block=4,topk=2,repr=2,chunk=20";
    assert_eq!(says_and_does(text, 120, 85), (false, false));
}
