//! Accuracy on multi-query associative recall (arXiv:2312.04927), by kind of sample and by distance.

mod by_phase;

pub use by_phase::RecallByPhase;

use crate::EvalError;
use crate::weights::{attention_weights, check_length as check_weights};
use burn::tensor::{Int, Tensor, TensorData};
use serde::Serialize;
use sieve_core::kinds::Chooses;
use sieve_data::{Mqar, MqarConfig, MqarSplit};
use sieve_infer::input::{check_length, check_vocabulary, ids};
use sieve_nn::{LayerContext, Qwen3};
use sieve_ops::{DeviceBackend, Documents};

/// Samples of a kind, at most, of which [`RecallOfKind::reads`] is measured.
const READ_SAMPLES: u64 = 8;

/// Number of questions and of right answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Answers {
    /// Number of questions asked.
    pub num_queries: u64,
    /// Questions whose value had the largest logit of the whole vocabulary.
    pub num_correct: u64,
}

impl Answers {
    /// Share of right answers; 0 without questions.
    pub fn accuracy(&self) -> f64 {
        self.num_correct as f64 / self.num_queries.max(1) as f64
    }

    fn count(&mut self, correct: bool) {
        self.num_queries += 1;
        self.num_correct += u64::from(correct);
    }
}

/// Answers to questions whose distance is in `[from, to)`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DistanceAnswers {
    /// Smallest distance: tokens between the value and the question.
    pub from: usize,
    /// Largest distance of a question, plus 1.
    pub to: usize,
    /// Numbers of questions and of right answers.
    #[serde(flatten)]
    pub answers: Answers,
    /// Right answers divided by questions.
    pub accuracy: f64,
}

/// Answers to the samples of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecallOfKind {
    /// Tokens of each sample.
    pub seq_len: usize,
    /// Pairs of key and value in a sample; each is asked for once.
    pub num_pairs: usize,
    /// Number of token ids that samples are drawn from.
    pub vocab_size: usize,
    /// Number of samples.
    pub num_samples: u64,
    /// Numbers of questions and of right answers.
    #[serde(flatten)]
    pub answers: Answers,
    /// Right answers divided by questions.
    pub accuracy: f64,
    /// Answers by distance, in powers of two; ranges without a question are left out.
    pub by_distance: Vec<DistanceAnswers>,
    /// The keys that the questions of some samples read, one for each layer that chooses keys. Empty also where a layer
    /// of a sample has more than 2^26 weights.
    pub reads: Vec<ValuesRead>,
    /// Accuracy by the key's position modulo [`RecallRun::period`]; absent without one, and where the pairs of a sample
    /// are shorter than a period.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by_phase: Option<RecallByPhase>,
}

/// Which keys a layer chose for the questions of a sample: means over query heads and questions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ValuesRead {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Share of the keys read that are values of the sample's pairs.
    pub values: f64,
    /// The same share of all tokens up to the question: what a choice at random would read.
    pub values_of_all: f64,
    /// Share of heads and questions that read the value which is asked for.
    pub answers: f64,
}

/// Answers to the samples of all kinds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecallReport {
    /// Results of each kind, in the order asked.
    pub kinds: Vec<RecallOfKind>,
    /// Answers to the samples of all kinds together.
    pub all: Answers,
    /// Share of right answers over all kinds.
    pub accuracy: f64,
}

/// How the samples of every kind are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecallRun {
    /// Samples of each kind, from the test split.
    pub num_samples: u64,
    /// Tokens of a forward pass, at most.
    pub batch_tokens: usize,
    /// Tokens of a period, by whose phases the answers are grouped too; `None`: by none.
    pub period: Option<usize>,
}

/// Asks samples of each kind; `observe` is called with the number of samples done so far, once a forward pass.
///
/// # Errors
/// A kind that cannot be drawn, samples longer than the model's context, a vocabulary larger than the model's.
pub fn recall<B: DeviceBackend>(
    model: &Qwen3<B>,
    kinds: &[MqarConfig],
    run: RecallRun,
    device: &B::Device,
    observe: &mut dyn FnMut(u64),
) -> Result<RecallReport, EvalError> {
    let made = kinds
        .iter()
        .map(|config| {
            check(model, config)?;
            Ok(Mqar::new(*config)?)
        })
        .collect::<Result<Vec<_>, EvalError>>()?;
    let RecallRun { num_samples, batch_tokens, period } = run;
    let (mut report, mut all, mut done) = (Vec::new(), Answers::default(), 0);
    for mqar in &made {
        let seq_len = mqar.config().seq_len;
        let per_batch = (batch_tokens / seq_len).max(1) as u64;
        let mut counts = Counts::new(seq_len);
        for first in (0..num_samples).step_by(per_batch as usize) {
            let count = per_batch.min(num_samples - first);
            ask(model, mqar, first, count, device, &mut counts)?;
            done += count;
            observe(done);
        }
        all.num_queries += counts.all.num_queries;
        all.num_correct += counts.all.num_correct;
        report.push(RecallOfKind {
            seq_len,
            num_pairs: mqar.config().num_pairs,
            vocab_size: mqar.config().vocab_size,
            num_samples,
            answers: counts.all,
            accuracy: counts.all.accuracy(),
            by_distance: counts.by_distance(),
            reads: values_read(model, mqar, num_samples.min(READ_SAMPLES), device)?,
            by_phase: period.and_then(|period| RecallByPhase::of(&counts.answered, mqar.config(), period)),
        });
    }
    Ok(RecallReport { kinds: report, all, accuracy: all.accuracy() })
}

/// Refuses samples that are longer than the context, or whose vocabulary is larger than the model's.
fn check<B: DeviceBackend>(model: &Qwen3<B>, config: &MqarConfig) -> Result<(), EvalError> {
    let shape = model.shape();
    check_length(config.seq_len, shape)?;
    if config.vocab_size > shape.vocab_size {
        return Err(EvalError::setting(
            "vocab-size",
            format!("{}, the model has {} tokens", config.vocab_size, shape.vocab_size),
            "ask with the vocabulary that the model was trained on",
        ));
    }
    Ok(())
}

/// The keys that each choosing layer reads, over the first `num_samples` samples; see [`RecallOfKind::reads`].
fn values_read<B: DeviceBackend>(
    model: &Qwen3<B>,
    mqar: &Mqar,
    num_samples: u64,
    device: &B::Device,
) -> Result<Vec<ValuesRead>, EvalError> {
    let (shape, MqarConfig { seq_len, num_pairs, .. }) = (model.shape(), *mqar.config());
    let chooses = |&layer: &usize| shape.attention_of(layer).kind().facts().chooses != Chooses::Nothing;
    let choosing: Vec<usize> = (0..shape.num_layers).filter(chooses).collect();
    if choosing.is_empty() || check_weights(shape, seq_len).is_err() {
        return Ok(Vec::new());
    }
    let of_layer = |&layer: &usize| ValuesRead { layer, ..ValuesRead::default() };
    let mut means: Vec<ValuesRead> = choosing.iter().map(of_layer).collect();
    for index in 0..num_samples {
        let sample = mqar.sample(MqarSplit::Test, index);
        let layers = attention_weights(model, &sample.tokens, &choosing, device, &mut |_| {})?;
        for (mean, layer) in means.iter_mut().zip(&layers) {
            let share = 1.0 / (num_samples as usize * layer.heads.len() * num_pairs) as f64;
            for query in &sample.queries {
                mean.values_of_all += share * (layer.heads.len() * num_pairs) as f64 / (query.position + 1) as f64;
                for head in &layer.heads {
                    let row = &head.weights[query.position * seq_len..][..=query.position];
                    // Pair p is the sample's tokens 2 p (the key) and 2 p + 1 (the value).
                    let is_read = |pair: usize| row[2 * pair + 1] > 0.0;
                    let num_read = row.iter().filter(|&&weight| weight > 0.0).count();
                    let values = (0..num_pairs).filter(|&pair| is_read(pair)).count();
                    mean.values += share * values as f64 / num_read.max(1) as f64;
                    mean.answers += share * f64::from(u8::from(is_read(query.pair)));
                }
            }
        }
    }
    Ok(means)
}

/// The answer to one question.
#[derive(Clone, Copy)]
struct Answered {
    distance: usize,
    is_correct: bool,
}

/// Answers to one kind of sample: all of them, and by the binary logarithm of the distance, rounded down.
struct Counts {
    all: Answers,
    by_power: Vec<Answers>,
    /// Each answer: of each sample in turn, in the order of its pairs.
    answered: Vec<Answered>,
}

impl Counts {
    fn new(seq_len: usize) -> Self {
        let by_power = vec![Answers::default(); seq_len.ilog2() as usize + 1];
        Self { all: Answers::default(), by_power, answered: Vec::new() }
    }

    fn count(&mut self, answer: Answered) {
        let Answered { distance, is_correct } = answer;
        self.all.count(is_correct);
        self.by_power[distance.max(1).ilog2() as usize].count(is_correct);
        self.answered.push(answer);
    }

    /// The answers by the distance in tokens from key to question, in powers of two; none without a question.
    fn by_distance(&self) -> Vec<DistanceAnswers> {
        let powers = self.by_power.iter().enumerate();
        powers
            .filter(|(_, answers)| answers.num_queries > 0)
            .map(|(power, &answers)| DistanceAnswers {
                from: 1 << power,
                to: 2 << power,
                answers,
                accuracy: answers.accuracy(),
            })
            .collect()
    }
}

/// One forward pass over `count` samples. Logits are computed only at the questions.
fn ask<B: DeviceBackend>(
    model: &Qwen3<B>,
    mqar: &Mqar,
    first: u64,
    count: u64,
    device: &B::Device,
    counts: &mut Counts,
) -> Result<(), EvalError> {
    let seq_len = mqar.config().seq_len;
    let shape = [count as usize, seq_len];
    let (mut tokens, mut rows, mut questions) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..count {
        let sample = mqar.sample(MqarSplit::Test, first + row);
        check_vocabulary(&sample.tokens, model.shape().vocab_size)?;
        tokens.extend_from_slice(&sample.tokens);
        for query in sample.queries {
            rows.push((row as usize * seq_len + query.position) as i32);
            questions.push((query.distance(), query.value));
        }
    }
    let documents = Documents::whole_rows(shape, device);
    let rope = model.rope(seq_len, device);
    let context = LayerContext::new(&documents, &rope);
    let hidden = model.hidden(ids(&tokens, shape, device), &context);
    let num_rows = rows.len();
    let rows = Tensor::<B, 1, Int>::from_data(TensorData::new(rows, [num_rows]), device);
    let asked = hidden.flatten::<2>(0, 1).select(0, rows).unsqueeze_dim(0);
    let logits = model.logits_of(asked);
    let best = logits.flatten::<2>(0, 1).argmax(1).into_data();
    for (best, (distance, value)) in best.iter::<i64>().zip(questions) {
        counts.count(Answered { distance, is_correct: best == i64::from(value) });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_model::tiny_shape;
    use burn_flex::Flex;
    use sieve_core::{Attention, DmaShape, ModelShape};
    use sieve_testing::refusal;

    fn model(vocab_size: usize) -> Qwen3<Flex> {
        let shape = ModelShape {
            num_layers: 1,
            num_heads: 2,
            num_kv_heads: 1,
            vocab_size,
            initializer_range: 0.1,
            ..tiny_shape(Attention::Mha, 64)
        };
        Qwen3::new(&shape, 3, &Default::default())
    }

    fn kind(seq_len: usize, num_pairs: usize) -> MqarConfig {
        MqarConfig { vocab_size: 80, ..MqarConfig::new(seq_len, num_pairs, 1) }
    }

    /// Two samples of 32 tokens in a forward pass.
    fn asked(num_samples: u64) -> RecallRun {
        RecallRun { num_samples, batch_tokens: 64, period: None }
    }

    #[test]
    fn answers_are_the_argmax_of_the_full_logits_at_each_question() {
        let model = model(80);
        let device = Default::default();
        let config = kind(32, 3);
        let mut heard = Vec::new();
        // Five samples, two in each forward pass.
        let report = recall(&model, &[config], asked(5), &device, &mut |n| heard.push(n)).expect("it fits");
        assert_eq!(heard, [2, 4, 5]);
        let mqar = Mqar::new(config).expect("valid");
        let (mut correct, mut by_distance) = (0, vec![0; 6]);
        for index in 0..5 {
            let sample = mqar.sample(MqarSplit::Test, index);
            let logits = sieve_infer::logits(&model, &sample.tokens, &device).expect("known tokens");
            let logits: Vec<f32> = logits.to_vec().expect("f32");
            for query in sample.queries {
                let row = &logits[query.position * 80..(query.position + 1) * 80];
                let better = row.iter().filter(|&&x| x > row[query.value as usize]);
                correct += u64::from(better.count() == 0);
                by_distance[query.distance().ilog2() as usize] += 1;
            }
        }
        let of_kind = &report.kinds[0];
        assert_eq!((of_kind.answers.num_queries, report.all.num_queries), (15, 15));
        assert_eq!(of_kind.answers.num_correct, correct);
        for bin in &of_kind.by_distance {
            let power = bin.from.ilog2() as usize;
            assert_eq!(bin.answers.num_queries, by_distance[power]);
            assert_eq!(bin.to, 2 * bin.from);
        }
        let asked: u64 = of_kind.by_distance.iter().map(|bin| bin.answers.num_queries).sum();
        assert_eq!(asked, 15);
    }

    /// With A = 0 DMA keeps the newest keys, so what it reads is known without a model.
    #[test]
    fn values_read_are_those_among_the_kept_keys() {
        let device = Default::default();
        let dma = |window| {
            let shape = ModelShape { vocab_size: 80, ..tiny_shape(Attention::Dma(DmaShape::published(window)), 64) };
            Qwen3::<Flex>::new(&shape, 3, &device)
        };
        let (config, num_samples) = (kind(32, 4), 3);
        let run =
            |model: &Qwen3<Flex>| recall(model, &[config], asked(num_samples), &device, &mut |_| {}).expect("it fits");
        let mqar = Mqar::new(config).expect("valid");
        for window in [6, 12, 32] {
            // Means over 12 questions: three samples of four pairs, whose values are tokens 1, 3, 5 and 7.
            let (mut values, mut of_all, mut answers) = (0.0, 0.0, 0.0);
            for index in 0..num_samples {
                for query in mqar.sample(MqarSplit::Test, index).queries {
                    let kept = (query.position + 1).saturating_sub(window)..=query.position;
                    let among = [1, 3, 5, 7].iter().filter(|value| kept.contains(value)).count();
                    values += among as f64 / kept.clone().count() as f64 / 12.0;
                    of_all += 4.0 / (query.position + 1) as f64 / 12.0;
                    answers += f64::from(u8::from(kept.contains(&(2 * query.pair + 1)))) / 12.0;
                }
            }
            let model = dma(window);
            let report = run(&model);
            let reads = &report.kinds[0].reads;
            assert_eq!(reads.iter().map(|read| read.layer).collect::<Vec<_>>(), [0, 1]);
            for read in reads {
                let found = [read.values, read.values_of_all, read.answers];
                let is_near = found.iter().zip([values, of_all, answers]).all(|(a, b)| (a - b).abs() < 1e-9);
                assert!(is_near, "window {window}: {found:?}, not {:?}", [values, of_all, answers]);
            }
        }
        assert!(run(&model(80)).kinds[0].reads.is_empty(), "dense attention chooses nothing");
    }

    #[test]
    fn a_period_groups_the_answers_and_changes_none() {
        let (model, device, config) = (model(80), Default::default(), kind(32, 8));
        let run = |period| {
            let run = RecallRun { period, ..asked(9) };
            recall(&model, &[config], run, &device, &mut |_| {}).expect("it fits").kinds.remove(0)
        };
        let (plain, phased) = (run(None), run(Some(8)));
        assert_eq!((plain.answers, plain.by_phase), (phased.answers, None));
        let by_phase = phased.by_phase.expect("16 tokens of pairs");
        assert_eq!((by_phase.num_pairs, by_phase.accuracy.num_rows), (8, 9));
        let mean = by_phase.accuracy.phases.iter().map(|score| score.mean).sum::<f64>() / 4.0;
        assert!((mean - phased.accuracy).abs() < 1e-12, "{by_phase:?}");
        assert!(run(Some(32)).by_phase.is_none(), "a period is longer than the pairs");
    }

    #[test]
    fn samples_beyond_the_context_the_vocabulary_or_their_own_length_are_refused() {
        let device = Default::default();
        let run = |kind| recall(&model(80), &[kind], asked(1), &device, &mut |_| {});
        refusal(run(kind(66, 3)), "context of 64");
        refusal(run(MqarConfig { vocab_size: 82, ..kind(32, 3) }), "the model has 80 tokens");
        refusal(run(kind(32, 9)), "do not fit");
    }
}
