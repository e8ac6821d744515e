//! Decoding by `dma`: the keys in its slots, their scores, and the file of score weights.

use super::{file, layer, stream};
use crate::decode::dma::{DmaLayerWeights, DmaWeights};
use crate::test_data::TestCall;
use crate::{DecodeSession, Method, Selector};
use sieve_core::ShownPath;
use sieve_cpu::reference::{Key, Rounding, attend};
use sieve_testing::{Random, assert_close, assert_close_relative, refusal, wide};

/// `dma` reads the `w` keys with the largest (z, position) so far, and adds their biases: compared with sorting all
/// keys at every token.
#[test]
fn dma_decode_equals_a_sort_of_all_keys() {
    let data = TestCall::structured(&mut Random(108), 70, [4, 2], 8);
    let mut random = Random(109);
    let weights = DmaLayerWeights { a: vec![0.4, -0.7], w_dt: random.vector(2 * 16) };
    let z = |t: usize, head: usize| -> f64 {
        let v = &data.v[t * 16..(t + 1) * 16];
        let x: f64 =
            v.iter().zip(&weights.w_dt[head * 16..(head + 1) * 16]).map(|(v, w)| f64::from(*v) * f64::from(*w)).sum();
        f64::from(weights.a[head]) * x.exp().ln_1p()
    };
    for (bias, w) in [("exp", 9), ("linear", 9), ("exp", 1)] {
        let mut selector = Selector::parse(&format!("dma:keep_window_size={w},bias={bias}")).expect("valid");
        if let Method::Dma(config) = &mut selector.method {
            config.weights = Some(DmaWeights { layers: vec![weights.clone()] });
        }
        let mut session = DecodeSession::new(&selector, layer(&data)).expect("valid");
        let mut unseen = 0;
        for t in 0..70 {
            let [q, k, v] = data.tokens(t..t + 1);
            let o = session.step(q, k, v).expect("valid");
            for head in 0..2 {
                let mut order: Vec<usize> = (0..=t).collect();
                order.sort_by(|&a, &b| z(b, head).total_cmp(&z(a, head)).then(b.cmp(&a)));
                order.truncate(w);
                order.sort_unstable();
                let expected: Vec<u32> = order.iter().map(|&j| j as u32).collect();
                assert_eq!(session.kept()[head], expected, "token {t}, head {head}");
                unseen += usize::from(!order.contains(&t));
                for p in head * 2..head * 2 + 2 {
                    let key = |&j: &usize| Key {
                        k: data.call().key(head, j),
                        v: data.call().value(head, j),
                        bias: if bias == "exp" { z(j, head).exp() } else { z(j, head) },
                    };
                    let keys: Vec<_> = order.iter().map(key).collect();
                    let mut expected = vec![0.0; 8];
                    let q = &q[p * 8..(p + 1) * 8];
                    attend(q, &keys, 1.0 / 8.0_f64.sqrt(), Rounding::None, &mut expected);
                    assert_close("o", &o[p * 8..(p + 1) * 8], &expected, 1e-4);
                }
            }
        }
        // By DMA's definition, a token whose own score is the smallest does not see itself; this is common.
        assert!(unseen > 20, "{unseen}");
    }
}

#[test]
fn dma_without_scores_is_a_sliding_window() {
    let data = TestCall::random(&mut Random(110), 60, 60, [4, 2], 8);
    let (a, kept) = stream("dma:keep_window_size=9", &data);
    let (b, window) = stream("streamingllm:n_init=0,n_local=9", &data);
    assert_eq!(kept, window);
    assert_close_relative("dma", &a, &wide(&b), 1e-5);
}

#[test]
fn dma_scores_come_from_a_checkpoint_or_its_export() {
    let written = file("");
    let path = written.path().to_owned();
    let (a, w_dt): (Vec<u8>, Vec<u8>) = (
        [0.5_f32, -1.0].iter().flat_map(|x| x.to_le_bytes()).collect(),
        (0..32).flat_map(|i| (i as f32).to_le_bytes()).collect(),
    );
    let text = format!("dma:keep_window_size=5,scores={}", path.shown());
    for (prefix, name) in [("", "a"), ("model.", "A")] {
        let view = |shape: Vec<usize>, data| {
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, data).expect("whole")
        };
        let tensors = [
            (format!("{prefix}layers.0.self_attn.{name}"), view(vec![2], &a)),
            (format!("{prefix}layers.0.self_attn.dt_proj.weight"), view(vec![2, 16], &w_dt)),
        ];
        std::fs::write(&path, safetensors::serialize(tensors, None).expect("small")).expect("a temporary file");
        let selector = Selector::parse(&text).expect("valid");
        let Method::Dma(config) = &selector.method else {
            panic!("another method");
        };
        let layers = &config.weights.as_ref().expect("read").layers;
        assert_eq!((layers.len(), &layers[0].a[..], layers[0].w_dt[31]), (1, &[0.5, -1.0][..], 31.0));
        let data = TestCall::random(&mut Random(111), 20, 20, [4, 2], 8);
        let mut session = DecodeSession::new(&selector, layer(&data)).expect("valid");
        session.stream(&data.q, &data.k, &data.v).expect("valid");
        assert_ne!(session.kept()[0], session.kept()[1]);
        let wrong = TestCall::random(&mut Random(112), 20, 20, [2, 1], 8);
        refusal(DecodeSession::new(&selector, layer(&wrong)), "are of 2 KV heads, the model has 1 of 8");
    }
    std::fs::write(&path, [0; 8]).expect("a temporary file");
    assert!(Selector::parse(&text).is_err());
    written.close().expect("it was there");
    refusal(Selector::parse(&text), "model.safetensors of a DMA checkpoint");
    assert!(Selector::parse("dma:keep_window_size=0").is_err());
}
