//! Selectors on a tiny model.
use super::*;
use crate::test_model::{tiny_model, words as window};
use burn_flex::Flex;
use sieve_core::model::{RopeScaling, RopeType};
use sieve_core::{Attention, ModelShape};
use sieve_nn::LayerOperands;
use sieve_testing::refusal;

fn model(attention: Attention) -> Qwen3<Flex> {
    tiny_model(attention, 512)
}

fn selection(text: &str) -> Selection {
    let selector = LayerSelectors::parse(text).expect("valid");
    Selection::new(selector, model(Attention::Mha).shape()).expect("it fits")
}

fn measured(selectors: &[&str]) -> Vec<SelectorMeasure> {
    let selections: Vec<Selection> = selectors.iter().map(|text| selection(text)).collect();
    measured_with(&selections)
}

fn measured_with(selections: &[Selection]) -> Vec<SelectorMeasure> {
    let measures = measured_each(selections).into_iter();
    measures.map(|measure| measure.expect("valid")).collect()
}

/// Measures each selection on two prompts of 300 tokens; a selection that fails gives its error.
fn measured_each(selections: &[Selection]) -> Vec<Result<SelectorMeasure, EvalError>> {
    let windows = [window(301), window(301)[1..].iter().chain(&[3]).copied().collect()];
    measure_selectors(&model(Attention::Mha), &windows, selections, &Default::default(), &mut |_| {}).expect("valid")
}

#[test]
fn a_selector_that_fails_leaves_the_others_their_measures() {
    // The bidirectional form needs all tokens in one call.
    let failing = selection("ba_att:causal=false,block=16,segment=32,min_prefill_tokens=0");
    let selections = ["meanpool:block=16,tau=0.5,min_prefill_tokens=0", "meanpool:tau=1"].map(selection);
    let [good, all] = selections;
    let cut = |selection: &Selection| selection.clone().in_chunks(256).expect("a prefill method");
    let found = measured_each(&[cut(&good), cut(&failing), cut(&all)]);
    let [Ok(a), Err(error), Ok(b)] = &found[..] else {
        panic!("{found:?}");
    };
    assert!(error.to_string().contains("causal=false needs all tokens"), "{error}");
    assert_eq!(vec![a.clone().name, b.clone().name], ["meanpool"; 2]);
    let alone = &measured_with(&[cut(&good)])[0];
    assert_eq!((a.density, a.loss), (alone.density, alone.loss));
    assert!((b.density - 1.0).abs() < 1e-12);

    let selectors = ["h2o", "meanpool:block=16"].map(|text| LayerSelectors::parse(text).expect("valid"));
    let masks = selector_masks(&model(Attention::Mha), &window(301), &selectors, &Default::default());
    let masks = masks.expect("a dense model");
    assert!(masks[0].is_err());
    let layers = masks[1].as_ref().expect("valid").iter().map(|mask| mask.layer);
    assert_eq!(layers.collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn the_mass_of_a_layers_heads_is_its_recall() {
    let texts = ["meanpool:block=16,tau=0.5,min_prefill_tokens=0", "pbs:block=16,min_prefill_tokens=0", "dense"];
    let selectors = texts.map(|text| LayerSelectors::parse(text).expect("valid"));
    let model = model(Attention::Mha);
    let masks = selector_masks(&model, &window(301), &selectors, &Default::default()).expect("a dense model");
    let measured = measure_selectors(&model, &[window(301)], &texts.map(selection), &Default::default(), &mut |_| {});
    for ((text, masks), measure) in texts.iter().zip(masks).zip(measured.expect("valid")) {
        let (masks, measure) = (masks.expect("prefill"), measure.expect("prefill"));
        assert_eq!(masks.len(), measure.layers.len());
        for (mask, layer) in masks.iter().zip(&measure.layers) {
            let mean = mask.mass.iter().sum::<f64>() / mask.mass.len() as f64;
            assert_eq!(mask.mass.len(), mask.selected.mask.shape.num_heads, "{text}");
            assert!((mean - layer.recall.expect("prefill")).abs() < 1e-6, "{text}: {mean}, {layer:?}");
            assert!(*text == "dense" || mean < 0.999, "{text}: {mean}");
        }
    }
}

#[test]
fn keeping_every_key_gives_the_dense_loss_and_keeping_fewer_an_error() {
    let all = measured(&[
        "meanpool:tau=1",
        "streamingllm:n_init=2,n_local=40",
        "exact_top:k=1000",
        "h2o:heavy=20,recent=20",
        "momo:first_dense_layers=0,gamma=8,beta=16,chi=32,k=2,k_exact=1",
    ]);
    for full in [&all[0], &all[2]] {
        assert!((full.loss - full.dense_loss).abs() < 1e-5, "{full:?}");
        assert!((full.density - 1.0).abs() < 1e-9 && full.output_error < 1e-5, "{full:?}");
    }
    assert!((all[0].recall.expect("prefill") - 1.0).abs() < 1e-5);
    assert_eq!(all[2].recall, None);
    for part in [&all[1], &all[3], &all[4]] {
        assert!(part.density < 0.6 && part.output_error > 1e-4, "{part:?}");
        assert!(part.loss.is_finite() && part.layers.len() == 2);
    }
    assert!(all[1].recall.expect("prefill") < 0.9);
    assert!(all[1].causal && !all[0].causal && all[3].causal);
}

/// Compared with the definitions in f64, on the logits and layer outputs of two passes.
#[test]
fn predictions_and_layers_are_compared_with_the_dense_model() {
    let (model, device, prompt) = (model(Attention::Mha), Default::default(), window(301));
    let values = |x: burn::tensor::TensorData| x.iter::<f64>().collect::<Vec<f64>>();
    let pass = |selection: &mut Selection| {
        let mut layers = Vec::new();
        let attend = &mut |operands: &LayerOperands<Flex>| {
            let o = selection.attend(operands)?;
            layers.push(values(o.clone().into_data()));
            Ok(o)
        };
        let hidden = layers_pass(&model, &prompt, &device, attend).expect("valid").hidden;
        let logits = model.head.logits(hidden.clone(), &model.embed_tokens).into_data();
        let (vocab, logits) = (logits.shape[2], values(logits));
        let rows = logits.chunks(vocab).map(|row| {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            row.iter().map(|x| x - sum.ln()).collect::<Vec<f64>>()
        });
        (rows.collect::<Vec<_>>(), values(hidden.into_data()), layers)
    };
    let cosine = |a: &[f64], b: &[f64]| {
        let rows = a.chunks(a.len() / 300).zip(b.chunks(b.len() / 300));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        rows.map(|(a, b)| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()).sum::<f64>() / 300.0
    };
    let first = |row: &[f64]| (0..row.len()).fold(0, |best, n| if row[n] > row[best] { n } else { best });
    let (p, hidden, layers) = pass(&mut selection("dense"));
    for text in ["streamingllm:n_init=2,n_local=8", "exact_top:k=5", "meanpool:tau=1"] {
        let prefill = !text.starts_with("exact");
        let text = format!("{text}{}", if prefill { ",min_prefill_tokens=0" } else { "" });
        let prompts = std::slice::from_ref(&prompt);
        let found = measure_selectors(&model, prompts, &[selection(&text)], &device, &mut |_| {});
        let found = found.expect("valid").remove(0).expect("valid");
        let (q, sparse, sparse_layers) = pass(&mut selection(&text));
        let (mut kl, mut same) = (0.0, 0.0);
        for (p, q) in p.iter().zip(&q) {
            kl += p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>() / 300.0;
            same += f64::from(u8::from(first(p) == first(q))) / 300.0;
        }
        let close = |a: f64, b: f64, what: &str| assert!((a - b).abs() < 1e-5, "{text} {what}: {a} {b}");
        close(found.kl, kl, "KL");
        close(found.top1, same, "top-1");
        close(found.cosine, cosine(&hidden, &sparse), "cosine");
        for (layer, (a, b)) in found.layers.iter().zip(layers.iter().zip(&sparse_layers)) {
            close(layer.cosine.expect("the model ran"), cosine(a, b), "layer");
        }
        let keeps_all = text.starts_with("meanpool");
        assert_eq!(found.kl < 1e-5 && found.cosine > 0.99999, keeps_all, "{found:?}");
    }
}

#[test]
fn a_warm_up_on_the_first_prompt_is_not_counted() {
    let selections = ["meanpool:tau=1", "exact_top:k=1000"].map(selection);
    let mut seen = Vec::new();
    let found =
        measure_selectors(&model(Attention::Mha), &[window(301)], &selections, &Default::default(), &mut |name| {
            seen.push(name.to_owned())
        });
    assert_eq!(seen, ["meanpool", "exact_top"].repeat(2));
    for measure in found.expect("valid") {
        let measure = measure.expect("valid");
        // If the warm-up were counted too, these would be twice as large.
        assert!((measure.density - 1.0).abs() < 1e-9, "{measure:?}");
        assert!((measure.loss - measure.dense_loss).abs() < 1e-5);
        let [least, most] = measure.attention_ms_range;
        assert_eq!([least, most], [measure.attention_ms; 2]);
    }
}

#[test]
fn the_seconds_on_the_host_include_dense_layers() {
    for text in ["meanpool", "dense", "exact_top:k=9"] {
        let mut selection = selection(text);
        let model = model(Attention::Mha);
        let attend = &mut |operands: &LayerOperands<Flex>| selection.attend(operands);
        let pass = layers_pass(&model, &window(301), &Default::default(), attend);
        let (all, totals) = (pass.expect("valid").prefill_ms, selection.totals());
        let [least, most] = [totals.select_seconds, 1e-3 * all];
        assert!(totals.seconds > 0.0 && (least..most).contains(&totals.seconds), "{text}: {totals:?}, {all} ms");
    }
}

#[test]
fn a_selector_of_some_layers_leaves_the_others_as_they_are() {
    let found = measured(&["streamingllm:n_init=2,n_local=40", "0=dense/1-=streamingllm:n_init=2,n_local=40"]);
    let [every, last] = &found[..] else {
        panic!("two rows");
    };
    assert_eq!(last.layers[0].density, 1.0);
    assert!(last.layers[0].output_error < 1e-6 && last.layers[0].recall.expect("prefill") > 0.999_999);
    // Only the cosine depends on the layers before, since it is measured in the whole model: here layer 0 is dense.
    let [own, below_sparse] = [last, every].map(|measure| LayerMeasure { cosine: None, ..measure.layers[1] });
    assert_eq!(own, below_sparse);
    assert!(last.layers[1].cosine > every.layers[1].cosine, "{found:?}");
    assert!(last.density > every.density && last.name == "streamingllm");
    let paths: Vec<&str> = last.paths.iter().map(|path| &path.path[..]).collect();
    assert_eq!(paths, ["dense on the CPU", "streamingllm on the CPU"]);
}

#[test]
fn a_wider_window_raises_density_and_recall() {
    let selections = [40, 80, 160].map(|local| selection(&format!("streamingllm:n_local={local}")));
    let points = sweep_selectors(&model(Attention::Mha), &window(301), &selections, &Default::default());
    let points: Result<Vec<(f64, f64)>, EvalError> = points.expect("valid").into_iter().collect();
    let points = points.expect("valid");
    assert!(points.windows(2).all(|w| w[0].0 < w[1].0 && w[0].1 < w[1].1), "{points:?}");
}

#[test]
fn chunks_of_whole_blocks_measure_as_the_whole_prompt_does() {
    for text in [
        "meanpool:block=16,tau=0.5,min_prefill_tokens=0",
        "xattention:block=16,stride=4,tau=0.6,min_prefill_tokens=0",
        "oracle_topk:block=16,k=3,min_prefill_tokens=0",
        "streamingllm:n_init=2,n_local=40,min_prefill_tokens=0",
    ] {
        let (whole, cut) = (selection(text), selection(text));
        let cut = cut.in_chunks(64).expect("a prefill method");
        let [a, b] = &measured_with(&[whole, cut])[..] else {
            panic!("two were given");
        };
        assert_eq!((a.chunk, b.chunk), (None, Some(64)));
        assert!((a.density - b.density).abs() < 1e-12, "{a:?} {b:?}");
        assert!((a.output_error - b.output_error).abs() < 1e-5, "{a:?} {b:?}");
        assert!((a.loss - b.loss).abs() < 1e-5, "{a:?} {b:?}");
        let recalls = a.recall.zip(b.recall).expect("prefill methods");
        assert!((recalls.0 - recalls.1).abs() < 1e-5, "{a:?} {b:?}");
    }
    // These chunks do not end at blocks, so the lists differ; with every key kept, the loss is the model's own.
    let text = "pbs:block=16,segment=64,tau=0.5,min_prefill_tokens=0";
    let cut = selection(text).in_chunks(100).expect("a prefill method");
    let found = measured_with(&[selection(text), cut]);
    assert!(found[0].density != found[1].density, "{found:?}");
    let all = selection("meanpool:tau=1,min_prefill_tokens=0").in_chunks(100);
    let all = &measured_with(&[all.expect("a prefill method")])[0];
    assert!((all.density - 1.0).abs() < 1e-12 && (all.loss - all.dense_loss).abs() < 1e-5);
}

#[test]
fn methods_that_rotate_keys_are_refused_where_rope_is_scaled() {
    let shape = ModelShape {
        rope_scaling: Some(RopeScaling {
            rope_type: RopeType::Linear,
            factor: 2.0,
            original_max_position_embeddings: None,
            low_freq_factor: None,
            high_freq_factor: None,
            beta_fast: None,
            beta_slow: None,
            attention_factor: None,
        }),
        ..model(Attention::Mha).shape().clone()
    };
    let new = |text: &str| Selection::new(LayerSelectors::parse(text).expect("valid"), &shape);
    for text in [
        "infllm",
        "infllm:rope_theta=10000",
        "streamingllm:reindex=true",
        "0=dense/1-=streamingllm:reindex=true,rope_theta=10000",
    ] {
        refusal(new(text), "rotates keys to other positions | scaled (model.rope_scaling)");
    }
    new("streamingllm").expect("keys stay where they are");
}

#[test]
fn selectors_refuse_models_with_sinks() {
    let shape = ModelShape { attention_sinks: true, ..model(Attention::Mha).shape().clone() };
    let selector = LayerSelectors::parse("streamingllm").expect("valid");
    refusal(Selection::new(selector, &shape), "this model's softmax also includes sinks (model.attention_sinks)");
}
