//! Decoding token by token with the KV cache gives the same logits as the full forward pass.
use crate::random_model::{VOCAB_SIZE, generated, greedy, ids, kinds, max_difference, random_model, recipe, tokens};
use burn_flex::Flex;
use sieve_core::Attention;
use sieve_core::model::test_shapes::with_keys;
use sieve_core::recipe::AttentionKind;
use sieve_infer::{BatchGenerator, GenerateConfig, Generator, Sampling, logits};
use sieve_nn::{KvCache, Qwen3};

/// Number of tokens of a text; the models' windows are 7 and 5 tokens.
const LEN: usize = 48;

/// Logits of the full forward pass, one row for each token.
fn full_rows(model: &Qwen3<Flex>, tokens: &[u32]) -> Vec<Vec<f32>> {
    let data = logits(model, tokens, &Default::default()).expect("tokens of the vocabulary");
    let values: Vec<f32> = data.to_vec().expect("f32");
    values.chunks(VOCAB_SIZE).map(<[f32]>::to_vec).collect()
}

fn argmax(row: &[f32]) -> usize {
    (0..row.len()).fold(0, |best, n| if row[n] > row[best] { n } else { best })
}

/// Number of keys that a cache may hold after `num_tokens` tokens.
fn expected_keys(attention: Attention, num_tokens: usize) -> usize {
    attention.as_kind().num_kept().map_or(num_tokens, |kept| num_tokens.min(kept))
}

#[test]
fn step_by_step_decoding_equals_the_full_forward_pass() {
    for [kind, model_lines, attention] in kinds() {
        for seed in [1, 2] {
            let recipe = recipe(model_lines, attention);
            let model = random_model(&recipe, seed);
            let tokens = tokens(LEN, seed);
            let rows = full_rows(&model, &tokens);
            let rope = model.rope(LEN, &Default::default());
            // Prompts shorter than, as long as and longer than each window.
            for prompt in [1, 3, 5, 7, 8, 29] {
                let mut cache = KvCache::new(model.layers.len());
                for end in prompt..=LEN {
                    let start = if end == prompt { 0 } else { end - 1 };
                    let next = model.next_logits(ids(&tokens[start..end]), &mut cache, &rope);
                    let next: Vec<f32> = next.into_data().to_vec().expect("f32");
                    let row = &rows[end - 1];
                    let difference = max_difference(&next, row);
                    assert!(difference <= 1e-4, "{kind}, prompt {prompt}, row {}: {difference}", end - 1);
                    assert_eq!(argmax(&next), argmax(row), "{kind}, prompt {prompt}, {end}");
                    assert_eq!(cache.num_tokens, end);
                    for (index, layer) in cache.layers.iter().enumerate() {
                        let expected = expected_keys(model.shape().of_layer(index).attention, end);
                        assert_eq!(layer.num_keys(), expected, "{kind} after {end} tokens");
                    }
                }
            }
        }
    }
}

#[test]
fn the_window_matters_at_these_sizes() {
    // Checks that a cache that kept or dropped other keys would show: with a window that holds all tokens the last
    // logits are others, but for kinds that read all keys anyway.
    for [kind, model_lines, attention] in kinds() {
        let recipe = recipe(model_lines, attention);
        let model = random_model(&recipe, 1);
        let sparse = full_rows(&model, &tokens(LEN, 1));
        let wide = recipe_with_window(&recipe);
        let dense = full_rows(&random_model(&wide, 1), &tokens(LEN, 1));
        let difference = max_difference(&sparse[LEN - 1], &dense[LEN - 1]);
        let dense_anyway = attention == "kind = \"mha\"" || kind.starts_with("mla");
        assert_eq!(difference > 0.05, !dense_anyway, "{kind}: {difference}");
    }
}

/// The recipe with a window that holds all tokens.
fn recipe_with_window(recipe: &sieve_core::Recipe) -> sieve_core::Recipe {
    let mut wide = recipe.clone();
    let own = wide.attention.own;
    wide.attention.own = match own.kind() {
        // Its window alone is wide, and its blocks stay as they are.
        AttentionKind::Nsa => with_keys(own, &[("window_size", LEN)]),
        AttentionKind::Cowa => with_keys(own, &[("near_window", LEN)]),
        _ => with_keys(own, &[("num_selected_blocks", LEN), ("sliding_window", LEN), ("keep_window_size", LEN)]),
    };
    wide
}

#[test]
fn greedy_generation_takes_the_tokens_of_the_full_forward_pass() {
    for [kind, model_lines, attention] in kinds() {
        let model = random_model(&recipe(model_lines, attention), 3);
        for prompt in [1, 20] {
            let mut text = tokens(prompt, 4);
            let generated = generated(&model, &text, greedy(24));
            for _ in 0..24 {
                let rows = full_rows(&model, &text);
                text.push(argmax(&rows[text.len() - 1]) as u32);
            }
            assert_eq!(generated, text[prompt..], "{kind}, prompt {prompt}");
        }
    }
}

/// 24 new tokens at most, drawn from a seed.
fn sampled(seed: u64, eos_id: u32) -> GenerateConfig {
    let sampling = Sampling { temperature: 0.9, top_p: 0.95, top_k: None, seed };
    GenerateConfig { sampling, eos_id, ..greedy(24) }
}

/// The tokens of each of `N` texts that grow together.
fn texts_of<const N: usize>(together: BatchGenerator<'_, Flex>) -> [Vec<u32>; N] {
    let mut texts = [const { Vec::new() }; N];
    for step in together {
        for (text, token) in texts.iter_mut().zip(step.expect("finite")) {
            text.extend(token);
        }
    }
    texts
}

#[test]
fn texts_that_grow_together_are_those_that_grow_alone() {
    for [kind, model_lines, attention] in kinds() {
        let model = random_model(&recipe(model_lines, attention), 3);
        let (prompt, device) = (tokens(11, 4), Default::default());
        let alone = |seed, eos_id| generated(&model, &prompt, sampled(seed, eos_id));
        // One of the texts ends early: its end-of-document token is one that it generates.
        let eos = alone(7, VOCAB_SIZE as u32)[9];
        let expected = [6, 7, 8].map(|seed| alone(seed, eos));
        let together = BatchGenerator::new(&model, &prompt, sampled(6, eos), 3, &device);
        let texts = texts_of(together.expect("it fits"));
        assert_eq!(texts, expected, "{kind}");
        assert!(texts[1].len() < 10, "{kind}");

        let mut cut = BatchGenerator::new(&model, &prompt, sampled(6, VOCAB_SIZE as u32), 2, &device).expect("it fits");
        assert!(cut.next().expect("a token").expect("finite")[0].is_some());
        cut.end(0);
        let step = cut.next().expect("the other goes on").expect("finite");
        assert!(step[0].is_none() && step[1].is_some(), "{kind}");
        cut.end(1);
        assert!(cut.next().is_none(), "{kind}");
    }
}

#[test]
fn texts_of_several_prompts_are_those_of_each_alone() {
    for [kind, model_lines, attention] in kinds() {
        let model = random_model(&recipe(model_lines, attention), 3);
        let (all, device) = (tokens(40, 4), Default::default());
        let prompts = [0..29, 3..4, 5..5, 11..22].map(|range| all[range].to_vec());
        // One of the texts ends before the others.
        let eos = generated(&model, &prompts[0], sampled(6, VOCAB_SIZE as u32))[9];
        let expected = prompts.each_ref().map(|prompt| generated(&model, prompt, sampled(6, eos)));
        let together = BatchGenerator::of_prompts(&model, &prompts, sampled(6, eos), &device);
        let texts = texts_of(together.expect("they fit"));
        assert_eq!(texts, expected, "{kind}");
        assert!(texts[0].len() < 10, "{kind}");
    }
    let model = random_model(&recipe(kinds()[0][1], kinds()[0][2]), 3);
    let long = [vec![1], tokens(60, 1)];
    let error = BatchGenerator::of_prompts(&model, &long, greedy(5), &Default::default()).expect_err("too long");
    assert!(error.to_string().contains("at most 4 new tokens"), "{error}");
}

#[test]
fn generation_ends_at_the_end_of_a_document_and_within_the_context() {
    let [_, model_lines, attention] = kinds()[2];
    let model = random_model(&recipe(model_lines, attention), 3);
    let device = Default::default();
    let config = |max_new_tokens, eos_id| GenerateConfig { eos_id, ..greedy(max_new_tokens) };
    let start = tokens(4, 9);
    let never = VOCAB_SIZE as u32;
    let free = generated(&model, &start, config(30, never));
    assert_eq!(free.len(), 30);
    let eos = free[12];
    let first = free.iter().position(|&token| token == eos).expect("there");
    assert_eq!(generated(&model, &start, config(30, eos)), free[..first]);
    // Several tokens may end a text, for one text and for a batch of texts.
    let several = Generator::new(&model, &start, config(30, never), &device).expect("fits");
    let ended: Result<Vec<u32>, _> = several.ending_at(&[96, eos]).collect();
    assert_eq!(ended.expect("finite"), free[..first]);
    let together = BatchGenerator::new(&model, &start, config(30, never), 2, &device).expect("fits");
    let steps: Vec<_> = together.ending_at(&[96, eos]).map(|step| step.expect("finite")).collect();
    assert_eq!((steps.len(), &steps[first]), (first + 1, &vec![None, None]));

    // With an empty prompt, generation starts from the end-of-document token.
    assert_eq!(generated(&model, &[], config(5, 6)), generated(&model, &[6], config(5, 6)));

    let error = |prompt: usize, new| {
        Generator::new(&model, &tokens(prompt, 1), config(new, 0), &device).expect_err("too long").to_string()
    };
    assert!(error(60, 5).contains("at most 4 new tokens"), "{}", error(60, 5));
    assert!(error(65, 1).contains("context of 64"), "{}", error(65, 1));
    let unknown = Generator::new(&model, &[1, 97], config(1, 0), &device).expect_err("unknown");
    assert!(unknown.to_string().contains("token 97"), "{unknown}");
}
