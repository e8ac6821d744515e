//! Asks a model the samples of long tasks, and sums up its scores.
use super::LongSource;
use super::fit::LongTexts;
use super::sample::{LongSample, NUM_WRONG};
use crate::EvalError;
use crate::needle::rank;
use serde::Serialize;
use sieve_infer::input::check_length;
use sieve_infer::{Greedy, LayerPath, Selection, SelectionTotals, StopTexts, TaskModel, TextsWithEndings};
use sieve_ops::DeviceBackend;

/// Depths are grouped into this many equal ranges.
const NUM_DEPTHS: usize = 5;

/// A model's answer to one sample, and its score.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SampleScore {
    /// Name of the task.
    pub task: &'static str,
    /// Tokens of prompt and answer, at most.
    pub length: usize,
    /// Percent of the text before the passage with the answer.
    pub depth: Option<f64>,
    /// Share of the references in the generated text, from 0 to 1.
    pub score: f64,
    /// Rank of the first reference's likelihood among wrong answers, from 1 (best). Equal likelihoods share a rank.
    pub rank: f64,
    /// Log-likelihood of the first reference per token.
    pub log_likelihood: f64,
    /// The answer that the model generated.
    pub answer: String,
    /// Strings that a right answer has to contain.
    pub references: Vec<String>,
}

/// Mean scores at one length, over all depths or in one range of depths.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LongCell {
    /// Tokens of prompt and answer, at most.
    pub length: usize,
    /// Middle of the range of depths in percent; `None` for all depths.
    pub depth: Option<f64>,
    /// Number of samples.
    pub num_samples: usize,
    /// Mean score of the samples, from 0 to 1.
    pub score: f64,
    /// Mean rank of the right answer by likelihood among wrong ones; 1 is the best.
    pub mean_rank: f64,
    /// Mean log-likelihood of the answer per token.
    pub log_likelihood: f64,
}

/// Scores of one task.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LongTaskReport {
    /// Name of the task.
    pub task: &'static str,
    /// Name of what the task's texts consist of.
    pub haystack: String,
    /// Mean score over all samples of the task.
    pub score: f64,
    /// Mean rank of the right answers, over all samples.
    pub mean_rank: f64,
    /// The mean rank that guessing would give.
    pub chance_rank: f64,
    /// Mean scores at each length, over all depths.
    pub lengths: Vec<LongCell>,
    /// One cell for each length and range of depths; empty if the task has no depths.
    pub cells: Vec<LongCell>,
}

/// Reports of all tasks under one selector.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LongReport {
    /// The selector with its settings; absent for the model's own attention.
    pub selector: Option<String>,
    /// The path that each layer took with the selector.
    pub paths: Vec<LayerPath>,
    /// What the selector computed; absent for the model's own attention.
    pub selection: Option<SelectionTotals>,
    /// The report of each task.
    pub tasks: Vec<LongTaskReport>,
}

/// Asks every sample; `observe` is called with the number of samples asked so far.
///
/// A prefill selector acts on the prompt only, and later tokens read every key; a decode selector acts on the tokens
/// after the prompt.
///
/// # Errors
/// Prompts longer than the model's context, tokens outside its vocabulary, a NaN or infinite output, operands that
/// the selector refuses.
pub fn ask_long<B: DeviceBackend>(
    model: &TaskModel<'_, B>,
    texts: &LongTexts,
    selection: Option<&mut Selection>,
    observe: &mut dyn FnMut(usize),
) -> Result<Vec<SampleScore>, EvalError> {
    let shape = model.model.shape();
    check_length(texts.length, shape)?;
    // The first ending of each sample is the right answer.
    let endings = texts.samples.iter().map(|(sample, _)| {
        let answers = sample.references.iter().take(1).chain(&sample.wrong);
        let endings = answers.map(|answer| model.tokenizer.encode(&format!(" {answer}")));
        endings.collect::<Result<Vec<Vec<u32>>, _>>()
    });
    let endings: Vec<_> = endings.collect::<Result<_, _>>()?;
    let longest = endings.iter().flatten().map(Vec::len).max().unwrap_or(0);
    let mut likelihoods = Vec::with_capacity(texts.samples.len());
    let prompts: Vec<&Vec<u32>> = texts.samples.iter().map(|(_, prompt)| prompt).collect();
    let size = TextsWithEndings::new(texts.length, NUM_WRONG + 1);
    let greedy = Greedy {
        max_new_tokens: &|_| texts.task.max_new_tokens(),
        room: longest.max(texts.task.max_new_tokens()),
        together: size.texts,
        stop: &StopTexts::default(),
        is_enough: &|n, answer| {
            let (sample, _) = &texts.samples[n];
            sample.matching.score(answer, &sample.references) >= 1.0
        },
        after_prompt: &mut |n, text, logits| {
            let found = text.endings(logits, &endings[n], size.endings)?;
            let of_endings: Vec<f64> = found.iter().map(|x| x.log_likelihood).collect();
            likelihoods.push((rank(&of_endings), of_endings[0] / endings[n][0].len() as f64));
            Ok(())
        },
    };
    let answers = greedy.answers(model, &prompts, selection, observe)?;
    let results = texts.samples.iter().zip(likelihoods).zip(answers);
    let score = |(((sample, _), (rank, log_likelihood)), answer): ((&(LongSample, Vec<u32>), _), String)| SampleScore {
        task: texts.task.name(),
        length: texts.length,
        depth: sample.depth,
        score: sample.matching.score(&answer, &sample.references),
        rank,
        log_likelihood,
        answer,
        references: sample.references.clone(),
    };
    Ok(results.map(score).collect())
}

impl LongTaskReport {
    /// The report of one task. `samples` are sorted by length. Panics without samples.
    pub fn new(texts: &LongTexts, source: &LongSource, samples: &[SampleScore]) -> Self {
        let mut lengths: Vec<usize> = samples.iter().map(|sample| sample.length).collect();
        lengths.dedup();
        let of = |length: usize| samples.iter().filter(move |sample| sample.length == length);
        let mut cells = Vec::new();
        for &length in &lengths {
            for part in 0..NUM_DEPTHS {
                let width = 100.0 / NUM_DEPTHS as f64;
                let number = |depth: f64| ((depth / width) as usize).min(NUM_DEPTHS - 1);
                let inside = of(length).filter(|one| one.depth.is_some_and(|d| number(d) == part));
                // The cell stands for the middle of its depths, in percent.
                let depth = Some(width * (part as f64 + 0.5));
                cells.extend(LongCell::new(length, depth, inside));
            }
        }
        // Only the means of this cell are used, not its length.
        let whole = LongCell::new(0, None, samples.iter()).expect("a sample at least");
        Self {
            task: texts.task.name(),
            haystack: texts.task.haystack(source).to_owned(),
            score: whole.score,
            mean_rank: whole.mean_rank,
            chance_rank: 1.0 + NUM_WRONG as f64 / 2.0,
            lengths: (lengths.iter()).filter_map(|&length| LongCell::new(length, None, of(length))).collect(),
            cells,
        }
    }
}

impl LongCell {
    /// The means of some samples; `None` without samples.
    fn new<'a>(length: usize, depth: Option<f64>, samples: impl Iterator<Item = &'a SampleScore>) -> Option<Self> {
        let samples: Vec<&SampleScore> = samples.collect();
        let count = samples.len() as f64;
        let mean = |value: fn(&SampleScore) -> f64| samples.iter().map(|sample| value(sample)).sum::<f64>() / count;
        (!samples.is_empty()).then(|| Self {
            length,
            depth,
            num_samples: samples.len(),
            score: mean(|sample| sample.score),
            mean_rank: mean(|sample| sample.rank),
            log_likelihood: mean(|sample| sample.log_likelihood),
        })
    }
}
