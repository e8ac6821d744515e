use super::*;
use burn_flex::Flex;
use sieve_core::{Attention, DmaShape, ModelShape};

const VOCAB_SIZE: usize = 19;

fn model(attention: Attention) -> Qwen3<Flex> {
    let shape = ModelShape {
        d_model: 12,
        d_ff: 20,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 6,
        vocab_size: VOCAB_SIZE,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_word_embeddings: true,
        max_seq_len: 16,
        initializer_range: 0.3,
        residual_scale: false,
        attention,
    };
    Qwen3::new(&shape, 3, &Default::default())
}

fn documents(lengths: &[usize]) -> Vec<EvalDocument> {
    let token = |n: usize| ((n * 7 + n * n * 3) % VOCAB_SIZE) as u32;
    lengths
        .iter()
        .enumerate()
        .map(|(n, &len)| EvalDocument {
            tokens: (0..len).map(|i| token(i + 31 * n)).collect(),
            num_bytes: 3 * len as u64,
            num_words: len as u64,
        })
        .collect()
}

fn run(model: &Qwen3<Flex>, config: &PerplexityConfig, lengths: &[usize]) -> PerplexityReport {
    let documents = documents(lengths).into_iter().map(Ok);
    perplexity(model, documents, config, &Default::default(), &mut |_| {}).expect("valid")
}

/// Each window alone, through [`crate::logits`] and an own softmax.
fn expected_nats(model: &Qwen3<Flex>, config: &PerplexityConfig, lengths: &[usize]) -> f64 {
    let mut nats = 0.0;
    for document in documents(lengths) {
        let tokens = document.tokens;
        for window in windows(tokens.len(), config.context, config.stride) {
            let input = &tokens[window.input.clone()];
            let logits = crate::logits(model, input, &Default::default()).expect("valid");
            let logits: Vec<f64> = logits.iter::<f64>().collect();
            for (row, position) in logits.chunks(VOCAB_SIZE).zip(window.input.clone()) {
                if position >= window.first_scored {
                    let sum: f64 = row.iter().map(|logit| logit.exp()).sum();
                    nats += sum.ln() - row[tokens[position + 1] as usize];
                }
            }
        }
    }
    nats
}

const ONE_BY_ONE: PerplexityConfig = PerplexityConfig {
    context: 9,
    stride: 4,
    max_tokens: None,
    batch_tokens: 9,
};

#[test]
fn packed_windows_equal_windows_alone_for_every_kind() {
    let dma = Attention::Dma(DmaShape {
        a_init: 0.7,
        ..DmaShape::published(3)
    });
    let swa = Attention::Swa { window_size: 4 };
    let lengths = [5, 2, 30, 1, 9, 10, 3, 17];
    for attention in [Attention::Mha, swa, dma] {
        let model = model(attention);
        for batch_tokens in [9, 40] {
            let config = PerplexityConfig {
                batch_tokens,
                ..ONE_BY_ONE
            };
            let report = run(&model, &config, &lengths);
            let expected = expected_nats(&model, &config, &lengths);
            assert_eq!(report.num_tokens, 77 - 8);
            assert!(
                (report.nats - expected).abs() < 1e-4 * expected,
                "{} is not {expected}",
                report.nats
            );
        }
    }
}

#[test]
fn the_units_agree() {
    let report = run(&model(Attention::Mha), &ONE_BY_ONE, &[30, 12]);
    assert_eq!((report.num_words, report.num_bytes), (42, 126));
    let bits = report.num_bytes as f64 * report.bits_per_byte;
    for nats in [
        bits * std::f64::consts::LN_2,
        report.num_tokens as f64 * report.token_perplexity.ln(),
        report.num_words as f64 * report.word_perplexity.ln(),
        report.num_bytes as f64 * report.byte_perplexity.ln(),
    ] {
        assert!((nats - report.nats).abs() < 1e-9 * report.nats);
    }
}

#[test]
fn max_tokens_ends_with_a_whole_document() {
    let model = model(Attention::Mha);
    let config = PerplexityConfig {
        max_tokens: Some(12),
        ..ONE_BY_ONE
    };
    assert_eq!(
        run(&model, &config, &[10, 10, 10]),
        run(&model, &ONE_BY_ONE, &[10, 10])
    );
}

#[test]
fn refuses_settings_and_documents_that_mean_nothing() {
    let model = model(Attention::Mha);
    let attempt = |config: PerplexityConfig, lengths: &[usize]| {
        let documents = documents(lengths).into_iter().map(Ok);
        let device = Default::default();
        perplexity(&model, documents, &config, &device, &mut |_| {})
            .expect_err("refused")
            .to_string()
    };
    let with = |context, stride| PerplexityConfig {
        context,
        stride,
        ..ONE_BY_ONE
    };
    assert!(attempt(with(17, 4), &[9]).contains("16"));
    assert!(attempt(with(0, 0), &[9]).contains("context"));
    assert!(attempt(with(9, 10), &[9]).contains("stride"));
    assert!(attempt(with(9, 0), &[9]).contains("stride"));
    assert!(attempt(ONE_BY_ONE, &[1, 1]).contains("2 documents"));
}
