#![allow(clippy::single_range_in_vec_init, reason = "a document may have one answer")]
use super::*;
use crate::document::TextSize;
use crate::test_model::tiny_shape;
use crate::words::WordUse;
use burn_flex::Flex;
use sieve_core::{Attention, DmaShape, ModelShape};
use sieve_testing::refusal;

const VOCAB_SIZE: usize = 19;

fn model(attention: Attention) -> Qwen3<Flex> {
    let shape = ModelShape {
        d_model: 12,
        d_ff: 20,
        head_dim: 6,
        vocab_size: VOCAB_SIZE,
        initializer_range: 0.3,
        ..tiny_shape(attention, 16)
    };
    Qwen3::new(&shape, 3, &Default::default())
}

/// Documents of so many tokens, with made-up sizes and words.
fn documents(lengths: &[usize]) -> Vec<EvalDocument> {
    let token = |n: usize| ((n * 7 + n * n * 3) % VOCAB_SIZE) as u32;
    lengths
        .iter()
        .enumerate()
        .map(|(n, &len)| EvalDocument {
            tokens: (0..len).map(|i| token(i + 31 * n)).collect(),
            predicted: None,
            num_bytes: 3 * len as u64,
            num_words: len as u64,
            text: TextSize { num_tokens: len.saturating_sub(1), num_bytes: 3 * len as u64 + 2, num_words: len as u64 },
            // Words have two tokens, and each is used again ten tokens later.
            word_uses: (0..len)
                .map(|i| match i {
                    _ if i % 5 > 1 => WordUse::NoWord,
                    0..10 => WordUse::New,
                    _ => WordUse::Again { distance: 10 },
                })
                .collect(),
        })
        .collect()
}

fn run(model: &Qwen3<Flex>, config: &PerplexityConfig, lengths: &[usize]) -> PerplexityReport {
    let documents = documents(lengths).into_iter().map(Ok);
    perplexity(model, documents, config, &Default::default(), None, &mut |_, _| {}).expect("valid")
}

/// Logits `[input, VOCAB_SIZE]` of one full forward pass.
fn logits(model: &Qwen3<Flex>, input: &[u32]) -> Vec<f64> {
    let logits = crate::logits(model, input, &Default::default()).expect("valid");
    logits.iter().collect()
}

/// Cross-entropy of a token under logits, in nats.
fn loss(logits: &[f64], token: u32) -> f64 {
    let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
    sum.ln() - logits[token as usize]
}

/// The rolling likelihood of each text, token by token: each sees the prefix or `context` inputs at the end of its
/// window, and windows end after every `context` tokens and at the end of the text.
fn expected_rolling(model: &Qwen3<Flex>, config: &PerplexityConfig, lengths: &[usize]) -> f64 {
    let mut nats = 0.0;
    for document in documents(lengths) {
        let text = &document.tokens[..document.text.num_tokens];
        let text: Vec<u32> = config.rolling_bos.into_iter().chain(text.iter().copied()).collect();
        let tokens = [&[config.rolling_prefix.expect("given")], &text[..]].concat();
        for target in 1..tokens.len() {
            let end = (target.div_ceil(config.context) * config.context).min(text.len());
            let input = &tokens[end.saturating_sub(config.context)..target];
            let row = &logits(model, input)[(input.len() - 1) * VOCAB_SIZE..];
            nats += loss(row, tokens[target]);
        }
    }
    nats
}

/// The summed loss, computed window by window from [`crate::logits`] by [`loss`].
fn expected_nats(model: &Qwen3<Flex>, config: &PerplexityConfig, lengths: &[usize]) -> f64 {
    let mut nats = 0.0;
    for document in documents(lengths) {
        let tokens = document.tokens;
        for window in windows(tokens.len(), config.context, config.stride) {
            let logits = logits(model, &tokens[window.input.clone()]);
            for (row, position) in logits.chunks(VOCAB_SIZE).zip(window.input.clone()) {
                if position >= window.first_scored {
                    nats += loss(row, tokens[position + 1]);
                }
            }
        }
    }
    nats
}

/// One window in each forward pass.
const ONE_BY_ONE: PerplexityConfig = PerplexityConfig {
    context: 9,
    stride: 4,
    batch_tokens: 9,
    far: Vec::new(),
    rolling_prefix: Some(4),
    rolling_bos: None,
};

#[test]
fn packed_windows_equal_windows_alone_for_every_kind() {
    let dma = Attention::Dma(DmaShape { a_init: 0.7, ..DmaShape::published(3) });
    let swa = Attention::swa(4);
    let lengths = [5, 2, 30, 1, 9, 10, 3, 17];
    for attention in [Attention::Mha, swa, dma] {
        let model = model(attention);
        for (batch_tokens, rolling_bos) in [(9, None), (40, Some(5))] {
            let config = PerplexityConfig { batch_tokens, rolling_bos, ..ONE_BY_ONE };
            let report = run(&model, &config, &lengths);
            let expected = expected_nats(&model, &config, &lengths);
            // The eight documents have 77 tokens, and the first of each is not predicted.
            assert_eq!(report.num_tokens, 77 - 8);
            // The rolling likelihood does not predict the end-of-document token, which is a document's last token.
            let rolling = report.lm_eval_rolling.expect("a prefix is given");
            let num_bos = rolling_bos.map_or(0, |_| 8);
            assert_eq!((rolling.num_tokens, rolling.num_words), (77 - 8 + num_bos, 77));
            let alone = expected_rolling(&model, &config, &lengths);
            let error = (rolling.log_likelihood + alone).abs();
            assert!(error < 1e-4 * alone, "{rolling:?} is not {alone}");
            let bits = rolling.num_bytes as f64 * rolling.bits_per_byte.expect("bytes");
            for nats in [
                bits * std::f64::consts::LN_2,
                rolling.num_words as f64 * rolling.word_perplexity.expect("words").ln(),
                rolling.num_bytes as f64 * rolling.byte_perplexity.expect("bytes").ln(),
            ] {
                assert!((nats + rolling.log_likelihood).abs() < 1e-9 * nats);
            }
            assert!((report.nats - expected).abs() < 1e-4 * expected, "{} is not {expected}", report.nats);
        }
    }
}

#[test]
fn perplexities_per_token_word_and_byte_come_from_the_same_nats() {
    let report = run(&model(Attention::Mha), &ONE_BY_ONE, &[30, 12]);
    assert_eq!((report.num_words, report.num_bytes), (42, 126));
    let bits = report.num_bytes as f64 * report.bits_per_byte.expect("bytes");
    for nats in [
        bits * std::f64::consts::LN_2,
        report.num_tokens as f64 * report.token_perplexity.ln(),
        report.num_words as f64 * report.word_perplexity.expect("words").ln(),
        report.num_bytes as f64 * report.byte_perplexity.expect("bytes").ln(),
    ] {
        assert!((nats - report.nats).abs() < 1e-9 * report.nats);
    }
}

#[test]
fn of_a_document_with_answers_their_tokens_are_predicted_and_all_are_read() {
    let model = model(Attention::swa(4));
    // Two answers; a beginning that cannot be predicted; a document without an answer.
    let answers = [vec![3..5, 25..29], vec![1..4], Vec::new()];
    let documents = documents(&[30, 4, 6]).into_iter().zip(answers);
    let documents: Vec<_> =
        documents.map(|(document, predicted)| EvalDocument { predicted: Some(predicted), ..document }).collect();
    for config in [ONE_BY_ONE, PerplexityConfig { batch_tokens: 40, ..ONE_BY_ONE }] {
        let mut nats = 0.0;
        for document in &documents {
            let predicted = document.predicted.clone().unwrap_or_default();
            for window in windows(document.tokens.len(), config.context, config.stride) {
                let logits = logits(&model, &document.tokens[window.input.clone()]);
                for (row, position) in logits.chunks(VOCAB_SIZE).zip(window.input.clone()) {
                    let is_answer = predicted.iter().any(|range| range.contains(&(position + 1)));
                    if position >= window.first_scored && is_answer {
                        nats += loss(row, document.tokens[position + 1]);
                    }
                }
            }
        }
        let read = documents.iter().cloned().map(Ok);
        let report = perplexity(&model, read, &config, &Default::default(), None, &mut |_, _| {}).expect("valid");
        assert_eq!((report.num_tokens, report.num_read_tokens), (2 + 4 + 3, Some(40)));
        assert!((report.nats - nats).abs() < 1e-4 * nats, "{} is not {nats}", report.nats);
        // The rolling likelihood is of whole texts.
        assert_eq!(report.lm_eval_rolling, None);
    }
    let whole = run(&model, &ONE_BY_ONE, &[30]);
    assert_eq!(whole.num_read_tokens, None);
    let read = documents.into_iter().map(Ok);
    let refused = extrapolation(&model, &mut { read }, &[4, 8], (8, 9), &Default::default(), &mut |_| {});
    refusal(refused, "only the answers are predicted | --text-column");
}

#[test]
fn tokens_without_text_have_a_loss_and_nothing_per_byte_or_word() {
    // A document of one token: only the end-of-document token is predicted, which has no text.
    let document = EvalDocument {
        num_bytes: 0,
        num_words: 0,
        text: TextSize { num_tokens: 1, num_bytes: 0, num_words: 0 },
        ..documents(&[2]).remove(0)
    };
    let model = model(Attention::Mha);
    let report =
        perplexity(&model, std::iter::once(Ok(document)), &ONE_BY_ONE, &Default::default(), None, &mut |_, _| {});
    let report = report.expect("one prediction");
    assert!(report.num_tokens == 1 && report.loss > 0.0 && report.token_perplexity > 1.0);
    assert_eq!([report.word_perplexity, report.byte_perplexity, report.bits_per_byte], [None; 3]);
    let rolling = report.lm_eval_rolling.expect("a prefix is given");
    assert_eq!([rolling.word_perplexity, rolling.byte_perplexity, rolling.bits_per_byte], [None; 3]);
    assert!(serde_json::to_value(&report).expect("numbers")["bits_per_byte"].is_null());
}

#[test]
fn parts_of_the_loss_sum_to_it_and_a_use_outside_the_window_counts_as_new() {
    let model = model(Attention::Mha);
    let far = |context, far: &[usize]| {
        let config = PerplexityConfig { context, stride: 4, far: far.to_vec(), ..ONE_BY_ONE };
        run(&model, &config, &[30, 12])
    };
    let report = far(16, &[9, 10]);
    let count = |parts: &[MeanLoss]| parts.iter().map(|part| part.num_tokens).sum::<u64>();
    let nats = |parts: &[MeanLoss]| parts.iter().map(|part| part.num_tokens as f64 * part.loss).sum::<f64>();
    let WordLoss { again, new, no_word } = &report.by_word;
    let by_word = [again[0].far, again[0].near, *new, *no_word];
    let by_position: Vec<MeanLoss> = report.by_position.iter().map(|bin| bin.mean).collect();
    for parts in [&by_word[..], &by_position] {
        assert_eq!(count(parts), report.num_tokens);
        assert!((nats(parts) - report.nats).abs() < 1e-9 * report.nats);
    }
    // Words are used again at tokens 10, 11, 15, 16, 20, 21, 25, 26 of the first document and 10, 11 of the second.
    assert_eq!((again[0].far.num_tokens, again[0].near.num_tokens), (10, 0));
    assert_eq!((again[1].far.num_tokens, again[1].near.num_tokens), (0, 10));
    assert_eq!(again[0].far, again[1].near);
    assert_eq!(report.by_position[0].from, 1);
    assert!(report.by_position.iter().all(|bin| bin.to == 2 * bin.from));
    // In windows of eight tokens, a use ten tokens back is not seen: all words are new.
    let short = far(8, &[9]).by_word;
    assert_eq!(count(&[short.again[0].far, short.again[0].near]), 0);
    assert_eq!(short.new.num_tokens, new.num_tokens + 10);
}

#[test]
fn settings_out_of_range_and_documents_without_a_prediction_are_refused() {
    let model = model(Attention::Mha);
    let with = |context, stride| PerplexityConfig { context, stride, ..ONE_BY_ONE };
    for (config, lengths, words) in [
        (with(17, 4), &[9][..], "16"),
        (with(0, 0), &[9], "context"),
        (with(9, 10), &[9], "stride"),
        (with(9, 0), &[9], "stride"),
        (ONE_BY_ONE, &[1, 1], "2 in all"),
    ] {
        let documents = documents(lengths).into_iter().map(Ok);
        let found = perplexity(&model, documents, &config, &Default::default(), None, &mut |_, _| {});
        refusal(found, words);
    }
}

#[test]
fn longer_contexts_predict_the_same_tokens() {
    let model = model(Attention::Mha);
    let run = |lengths: &[usize], contexts: &[usize]| {
        let documents = documents(lengths).into_iter().map(Ok);
        extrapolation(&model, documents, contexts, (32, usize::MAX), &Default::default(), &mut |_| {})
    };
    let found = run(&[40, 9, 17], &[4, 8, 16]).expect("two pieces of 17 and one");
    assert_eq!(found.len(), 3);
    for (row, context) in found.iter().zip([4, 8, 16]) {
        // Two tokens are predicted in each piece: two pieces of the first document and one of the last.
        assert_eq!((row.context, row.num_tokens), (context, 6));
        assert!((row.ratio - row.perplexity / found[0].perplexity).abs() < 1e-9);
    }
    assert_eq!(found[0].ratio, 1.0);
    assert!(found[1].loss != found[0].loss && found[2].loss != found[1].loss);
    // The loss on the document's last two tokens after a context of eight, computed as a difference.
    let document = &documents(&[17])[0];
    let config = PerplexityConfig { context: 8, stride: 8, batch_tokens: 8, rolling_prefix: None, ..ONE_BY_ONE };
    let of = |tokens: &[u32]| {
        let part = EvalDocument {
            tokens: tokens.to_vec(),
            word_uses: vec![WordUse::NoWord; tokens.len()],
            ..document.clone()
        };
        let parts = std::iter::once(Ok(part));
        let report = perplexity(&model, parts, &config, &Default::default(), None, &mut |_, _| {});
        report.expect("tokens").nats
    };
    // Tokens 8..17 give eight predictions; the six of tokens 8..15 are subtracted.
    let by_hand = of(&document.tokens[8..17]) - of(&document.tokens[8..15]);
    let found = run(&[17], &[4, 8]).expect("one piece of nine and one more");
    assert_eq!(found[0].num_tokens, 2);
    let piece = run(&[17], &[4, 8, 16]).expect("one piece");
    assert!((piece[1].loss - by_hand / 2.0).abs() < 1e-5, "{piece:?} {by_hand}");
    refusal(run(&[9, 16], &[4, 16]), "no document has 17 tokens; the longest of 2 has 16");
    assert!(run(&[40], &[4, 17]).is_err());
}
