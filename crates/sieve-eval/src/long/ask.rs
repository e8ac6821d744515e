//! Asks a model about long texts.
use super::{LongSource, LongTexts, NUM_WRONG};
use crate::continuation::Continuation;
use crate::input::{check_length, check_vocabulary};
use crate::needle::rank;
use crate::{EvalError, LayerPath, Selection, TaskModel};
use serde::Serialize;
use sieve_ops::DeviceBackend;
use sieve_ops::first_of_largest;

/// Stretches of depth that scores are given by.
const NUM_DEPTHS: usize = 5;

/// What one sample gave.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SampleScore {
    /// The task.
    pub task: &'static str,
    /// Tokens of the whole.
    pub length: usize,
    /// Percent of the text before what is asked for.
    pub depth: Option<f64>,
    /// From 0 to 1.
    pub score: f64,
    /// Of the answer's likelihood, 1 is the best; equal ones share a rank.
    pub rank: f64,
    /// Of the first reference, divided by its tokens.
    pub log_likelihood: f64,
    /// What was generated.
    pub answer: String,
    /// What it should hold.
    pub references: Vec<String>,
}

/// Scores at one length, in one stretch of depth where the task has depths.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LongCell {
    /// Tokens of the whole.
    pub length: usize,
    /// Middle of the stretch, in percent.
    pub depth: Option<f64>,
    /// Samples in it.
    pub num_samples: usize,
    /// Mean score.
    pub score: f64,
    /// Mean rank.
    pub mean_rank: f64,
    /// Mean log-likelihood of the answer a token.
    pub log_likelihood: f64,
}

/// A task's scores.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LongTaskReport {
    /// The task.
    pub task: &'static str,
    /// What its texts are made of.
    pub haystack: String,
    /// Over all lengths.
    pub score: f64,
    /// Over all lengths.
    pub mean_rank: f64,
    /// The mean rank of a guess.
    pub chance_rank: f64,
    /// Length by length, over all depths.
    pub lengths: Vec<LongCell>,
    /// Length by length and depth by depth; empty where the task has no depths.
    pub cells: Vec<LongCell>,
}

/// All tasks under one method.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LongReport {
    /// The selector with its settings; absent for the model's own attention.
    pub selector: Option<String>,
    /// The path that each layer took under it.
    pub paths: Vec<LayerPath>,
    /// Task by task.
    pub tasks: Vec<LongTaskReport>,
}

/// Asks for every sample; `observe` is called with the number asked so far.
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
    mut selection: Option<&mut Selection>,
    observe: &mut dyn FnMut(usize),
) -> Result<Vec<SampleScore>, EvalError> {
    let shape = model.model.shape();
    check_length(texts.length, shape)?;
    let tokenizer = model.tokenizer;
    let most = texts.task.max_new_tokens();
    let num_tokens = tokenizer.vocab_size().min(shape.vocab_size);
    let mut scores = Vec::with_capacity(texts.samples.len());
    for (sample, prompt) in &texts.samples {
        check_vocabulary(prompt, shape.vocab_size)?;
        let answers = sample.references.iter().take(1).chain(&sample.wrong);
        let endings = answers.map(|answer| tokenizer.encode(&format!(" {answer}")));
        let endings: Vec<Vec<u32>> = endings.collect::<Result<_, _>>()?;
        let longest = endings.iter().map(Vec::len).max().unwrap_or(0).max(most);
        let text = Continuation::new(model.model, prompt.len() + longest, model.device);
        let mut text = text.with_selection(selection.as_deref().map(Selection::uncounted));
        let mut logits = text.read(prompt)?;
        let slices: Vec<&[u32]> = endings.iter().map(Vec::as_slice).collect();
        let found = text.endings(&logits, &slices)?;
        let likelihoods: Vec<f64> = found.iter().map(|x| x.log_likelihood).collect();
        let mut said = Vec::new();
        let (mut answer, mut score) = (String::new(), 0.0);
        while said.len() < most && score < 1.0 {
            let token = first_of_largest(&logits[..num_tokens]).ok_or(EvalError::NotFinite(text.cache().num_tokens))?;
            if model.ends.contains(&token) {
                break;
            }
            said.push(token);
            answer = tokenizer.decode(&said)?;
            score = sample.matching.score(&answer, &sample.references);
            if said.len() < most && score < 1.0 {
                logits = text.read(&[token])?;
            }
        }
        if let (Some(kept), Some(used)) = (&mut selection, text.selection()) {
            kept.add_totals(used);
        }
        scores.push(SampleScore {
            task: texts.task.name(),
            length: texts.length,
            depth: sample.depth,
            score,
            rank: rank(&likelihoods),
            log_likelihood: likelihoods[0] / endings[0].len() as f64,
            answer,
            references: sample.references.clone(),
        });
        observe(scores.len());
    }
    Ok(scores)
}

impl LongTaskReport {
    /// The report of one task. Samples of one length stand together. Panics when there are no samples.
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
                let depth = Some(width * (part as f64 + 0.5));
                cells.extend(LongCell::new(length, depth, inside));
            }
        }
        let whole = LongCell::new(0, None, samples.iter()).expect("a sample at least");
        Self {
            task: texts.task.name(),
            haystack: texts.task.haystack(source).to_owned(),
            score: whole.score,
            mean_rank: whole.mean_rank,
            chance_rank: 1.0 + NUM_WRONG as f64 / 2.0,
            lengths: (lengths.iter())
                .filter_map(|&length| LongCell::new(length, None, of(length)))
                .collect(),
            cells,
        }
    }
}

impl LongCell {
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
