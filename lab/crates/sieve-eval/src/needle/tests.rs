use super::*;
use crate::test_model::{NSA, llama_tokenizer, tiny_shape};
use burn_flex::{Flex, FlexDevice};
use sieve_core::model::test_shapes::block_kinds;
use sieve_core::{Attention, DmaShape, MlaShape, ModelShape};
use sieve_data::Tokenizer;
use sieve_nn::Qwen3;
use sieve_select::Selector;
use sieve_testing::refusal;

/// A byte-level tokenizer with a few merges.
pub(crate) fn tokenizer() -> Tokenizer {
    let texts = ["The secret number of the red falcon is here. Nothing else is. "; 8];
    Tokenizer::train_on(texts.into_iter(), 280).expect("enough text")
}

const VOCAB_SIZE: usize = 296;

fn model(attention: Attention) -> Qwen3<Flex> {
    let shape = ModelShape {
        num_kv_heads: if matches!(attention, Attention::Mla(_)) { 4 } else { 2 },
        vocab_size: VOCAB_SIZE,
        ..tiny_shape(attention, 256)
    };
    Qwen3::new(&shape, 4, &Default::default())
}

fn task_model<'a>(model: &'a Qwen3<Flex>, tokenizer: &'a Tokenizer) -> TaskModel<'a, Flex> {
    TaskModel { model, tokenizer, ends: &[0], device: &FlexDevice }
}

/// Kinds of attention whose windows and blocks are shorter than the texts.
fn kinds() -> [Attention; 8] {
    let [pooled, by_head, indexed] = block_kinds(&[
        ("compress_block_size", 8),
        ("compress_stride", 4),
        ("select_block_size", 8),
        ("num_selected_blocks", 4),
        ("num_local_blocks", 2),
    ]);
    [
        Attention::Mha,
        Attention::swa(20),
        Attention::Dma(DmaShape { a_init: 0.5, ..DmaShape::published(20) }),
        Attention::Mla(MlaShape { kv_lora_rank: 12, qk_rope_head_dim: 4, qk_norm: true }),
        Attention::Nsa(NSA),
        pooled,
        by_head,
        indexed,
    ]
}

fn config() -> NeedleConfig {
    NeedleConfig { lengths: vec![160, 250], depths: vec![0.0, 60.0, 100.0], num_needles: 2, buffer: 130, seed: 5 }
}

/// The report on the needles of `config`, asked of a tiny model.
fn asked(attention: Attention, config: &NeedleConfig, selector: Option<&str>) -> Result<NeedleReport, EvalError> {
    asked_in(&tokenizer(), attention, config, selector)
}

/// As [`asked`], with another tokenizer.
fn asked_in(
    tokenizer: &Tokenizer,
    attention: Attention,
    config: &NeedleConfig,
    selector: Option<&str>,
) -> Result<NeedleReport, EvalError> {
    let model = model(attention);
    let haystack = Haystack::made_up(config.haystack_tokens(), tokenizer)?;
    let selection =
        selector.map(|text| Selection::new(Selector::parse(text).expect("a selector"), model.shape())).transpose()?;
    let mut heard = Vec::new();
    let model = task_model(&model, tokenizer);
    let report = needle(&model, &haystack, config, selection.as_ref(), &mut |n, _| heard.push(n))?;
    assert_eq!(heard, (1..=report.num_needles).collect::<Vec<_>>());
    Ok(report)
}

#[test]
fn ranks_are_those_of_whole_passes_for_every_kind() {
    let (own, llama, config) = (tokenizer(), llama_tokenizer(), config());
    let kinds = kinds().map(|kind| (kind, &own)).into_iter();
    // The Llama tokenizer's template puts a BOS token first.
    for (attention, tokenizer) in kinds.chain([(Attention::Mha, &llama)]) {
        let haystack = Haystack::made_up(config.haystack_tokens(), tokenizer).expect("English");
        let report = asked_in(tokenizer, attention, &config, None).expect("it fits");
        assert_eq!((report.cells.len(), report.num_needles), (6, 12));
        let model = model(attention);
        let mut cells = report.cells.iter();
        for of_cell in samples(&config, tokenizer).expect("they fit").chunks(2) {
            let cell = cells.next().expect("one for each");
            let mut ranks = 0.0;
            for sample in of_cell {
                let len = cell.length - config.buffer;
                let (mut text, _) = haystack.with_needle(len, cell.depth, &sample.statement);
                text.splice(0..0, tokenizer.bos_id());
                text.extend_from_slice(&sample.question);
                let likelihood = |candidate: &Vec<u32>| -> f64 {
                    let all = [&text[..], candidate].concat();
                    let logits = sieve_infer::logits(&model, &all, &Default::default()).expect("it is short");
                    let logits: Vec<f32> = logits.to_vec().expect("f32");
                    let rows = logits.chunks(VOCAB_SIZE).skip(text.len() - 1).zip(candidate);
                    rows.map(|(row, &token)| {
                        let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
                        f64::from(row[token as usize]) - sum.ln()
                    })
                    .sum()
                };
                let all: Vec<f64> = sample.candidates.iter().map(likelihood).collect();
                ranks += rank(&all);
            }
            assert_eq!(cell.mean_rank, ranks / 2.0, "{attention:?} {cell:?}");
        }
    }
}

#[test]
fn a_model_that_knows_nothing_ranks_as_a_guess_does() {
    let config = NeedleConfig { lengths: vec![140], depths: linear_grid(0.0, 100.0, 5), num_needles: 20, ..config() };
    let report = asked(Attention::Mha, &config, None).expect("it fits");
    assert_eq!((report.num_needles, report.chance_rank), (100, 6.0));
    assert!(report.sigmas.abs() < 4.0 && report.found == 0.0, "{report:?}");
    let from_cells: f64 = report.cells.iter().map(|cell| cell.mean_rank / 5.0).sum();
    assert!((from_cells - report.mean_rank).abs() < 1e-9);
}

#[test]
fn selectors_change_the_results_unless_they_keep_everything() {
    let own = asked(Attention::Mha, &config(), None).expect("it fits");
    let with = |text| asked(Attention::Mha, &config(), Some(text)).expect("it fits");
    let all = with("meanpool:tau=1,min_prefill_tokens=0");
    assert_eq!((&all.cells, all.density), (&own.cells, Some(1.0)));
    let part = with("streamingllm:n_init=2,n_local=10,min_prefill_tokens=0");
    assert!(part.density.is_some_and(|density| density < 0.3));
    assert_ne!(part.cells, own.cells);
    let decode = with("exact_top:k=1000");
    assert_eq!((&decode.cells, decode.density), (&own.cells, None));
    assert_ne!(with("exact_top:k=2").cells, own.cells);
}

#[test]
fn a_selector_that_keeps_everything_has_the_phases_of_the_model() {
    let (tokenizer, model) = (tokenizer(), model(Attention::Mha));
    let config = NeedleConfig { lengths: vec![200], depths: vec![60.0], ..config() };
    let haystack = Haystack::made_up(config.haystack_tokens_of(4), &tokenizer).expect("English");
    let asked = |selector: Option<&str>| {
        let parsed = selector.map(|text| Selector::parse(text).expect("a selector"));
        let selection = parsed.map(|selector| Selection::new(selector, model.shape()).expect("it fits"));
        let mut heard = Vec::new();
        let mut observe = |asked, _| heard.push(asked);
        let model = task_model(&model, &tokenizer);
        let report = needle_by_phase(&model, &haystack, &config, 4, selection.as_ref(), &mut observe).expect("it fits");
        assert_eq!(heard, (1..=8).collect::<Vec<_>>());
        assert_eq!((report.num_needles, report.rank.num_rows, report.rank.phases.len()), (2, 2, 4));
        report
    };
    let own = asked(None);
    let all = asked(Some("meanpool:tau=1,min_prefill_tokens=0"));
    assert_eq!((&all.log_likelihood, &all.rank, all.density), (&own.log_likelihood, &own.rank, Some(1.0)));
    let part = asked(Some("streamingllm:n_init=2,n_local=10,min_prefill_tokens=0"));
    assert_ne!(part.log_likelihood, own.log_likelihood);
    // Nats per token of a model that knows nothing, of 296 tokens.
    let means = own.log_likelihood.phases.iter().map(|score| score.mean);
    assert!(means.into_iter().all(|mean| (-9.0..-3.0).contains(&mean)), "{own:?}");
}

#[test]
fn equal_likelihoods_share_their_ranks() {
    assert_eq!(rank(&[0.0, -1.0, -2.0]), 1.0);
    assert_eq!(rank(&[-3.0, -1.0, -2.0]), 3.0);
    assert_eq!(rank(&[0.0; 11]), 6.0);
}

#[test]
fn linear_grids_include_both_ends() {
    assert_eq!(linear_grid(0.0, 100.0, 5), [0.0, 25.0, 50.0, 75.0, 100.0]);
    assert_eq!(linear_grid(0.0, 100.0, 1), [100.0]);
    assert!(linear_grid(0.0, 100.0, 0).is_empty());
    assert_eq!(linear_grid(3.0, 10.0, 35).last(), Some(&10.0));
}

/// The command line's tests have the other refusals.
#[test]
fn an_empty_list_of_lengths_is_refused() {
    let none = NeedleConfig { lengths: Vec::new(), ..config() };
    refusal(asked(Attention::Mha, &none, None), "at least one");
}
