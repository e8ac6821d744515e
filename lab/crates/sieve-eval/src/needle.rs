//! A needle in a haystack: a sentence with a number hidden in a long text, asked for at its end.
//!
//! There are two scores: whether the greedy continuation contains the number, and the rank of the number's likelihood
//! among numbers that do not occur in the text. The rank is for small models, which rarely generate the number; a guess
//! has the middle rank on average.

mod by_phase;
mod haystack;
mod sample;

pub use by_phase::{NeedlePhases, needle_by_phase};
pub use haystack::Haystack;
pub(crate) use haystack::made_up_sentences;

use crate::EvalError;
use sample::{Sample, samples, texts};
use serde::Serialize;
use sieve_infer::{Greedy, LayerPath, Selection, StopTexts, TaskModel, TextsWithEndings};
use sieve_ops::DeviceBackend;

/// Wrong numbers that the answer is ranked among.
pub const NUM_DISTRACTORS: usize = 10;

/// Lengths and depths at which needles are hidden.
#[derive(Clone, Debug, PartialEq)]
pub struct NeedleConfig {
    /// Tokens of the whole text, question and answer included.
    pub lengths: Vec<usize>,
    /// Positions of the needle in percent of the haystack: 0 is before all of it, 100 after all of it.
    pub depths: Vec<f64>,
    /// Needles at each length and depth.
    pub num_needles: usize,
    /// Tokens of each length that are reserved for needle, question and answer; the rest is haystack.
    pub buffer: usize,
    /// Seed of the needles' numbers and places.
    pub seed: u64,
}

/// Results of the needles at one length and depth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct NeedleCell {
    /// Tokens of the whole text, needle included.
    pub length: usize,
    /// Percent of the haystack before the needle.
    pub depth: f64,
    /// Number of needles at this length and depth.
    pub num_needles: usize,
    /// Needles whose number the greedy continuation contains.
    pub num_found: usize,
    /// Mean rank of the answer's likelihood, from 1 (the best) to `NUM_DISTRACTORS + 1`; equal likelihoods share a
    /// rank.
    pub mean_rank: f64,
}

/// One needle and its answer, as an example for reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NeedleExample {
    /// The sentence that is hidden in the text.
    pub statement: String,
    /// The beginning of the sentence, to be continued.
    pub question: String,
    /// The number that completes the question.
    pub answer: String,
}

/// Results of the needles at all lengths and depths.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NeedleReport {
    /// The selector with its settings; absent for the model's own attention.
    pub selector: Option<String>,
    /// The path that each layer took with the selector.
    pub paths: Vec<LayerPath>,
    /// Number of needles at each length and depth.
    pub num_needles: usize,
    /// Share of needles whose number the greedy continuation contains.
    pub found: f64,
    /// Mean rank of the answers, 1 is the best.
    pub mean_rank: f64,
    /// Share of needles whose answer ranks first.
    pub first: f64,
    /// The mean rank that guessing would give.
    pub chance_rank: f64,
    /// How far the mean rank is better than a guess, in standard errors of guesses; negative when worse.
    pub sigmas: f64,
    /// Computed pairs over causal pairs of the prompts, for a prefill selector.
    pub density: Option<f64>,
    /// The result at each length and depth; depths vary fastest.
    pub cells: Vec<NeedleCell>,
    /// Texts of the first needle, as an example.
    pub example: NeedleExample,
}

impl NeedleReport {
    /// The value of [`sigmas`](Self::sigmas) if every answer ranked first.
    pub fn best_sigmas(&self) -> f64 {
        sigmas(1.0, self.num_needles)
    }
}

/// Number of ranks that an answer can have among the distractors.
const NUM_RANKS: f64 = (NUM_DISTRACTORS + 1) as f64;
/// Mean rank of guesses.
const CHANCE_RANK: f64 = (NUM_RANKS + 1.0) / 2.0;

/// How far a mean rank is better than a guess, in standard errors of guesses.
fn sigmas(mean_rank: f64, num_needles: usize) -> f64 {
    // Standard deviation of a uniformly distributed rank.
    let deviation = ((NUM_RANKS * NUM_RANKS - 1.0) / 12.0).sqrt();
    (CHANCE_RANK - mean_rank) / (deviation / (num_needles as f64).sqrt())
}

/// `count` numbers from `first` to `last` in equal steps, both included. One number is `last`.
pub fn linear_grid(first: f64, last: f64, count: usize) -> Vec<f64> {
    match count {
        0 => Vec::new(),
        1 => vec![last],
        _ => {
            let step = (last - first) / (count - 1) as f64;
            let at = |n| if n + 1 == count { last } else { first + step * n as f64 };
            (0..count).map(at).collect()
        }
    }
}

impl NeedleConfig {
    /// Checks the grid against a model's context.
    ///
    /// # Errors
    /// No length, no depth or no needle; a length beyond the context, or too short for a haystack beside the needle; a
    /// depth outside 0 to 100.
    pub fn check(&self, max_seq_len: usize) -> Result<(), EvalError> {
        let bad = |name, value: String, hint| Err(EvalError::setting(name, value, hint));
        for (name, count) in
            [("lengths", self.lengths.len()), ("depths", self.depths.len()), ("needles", self.num_needles)]
        {
            if count == 0 {
                return bad(name, "none".to_owned(), "ask for at least one");
            }
        }
        if let Some(length) = self.lengths.iter().find(|&&length| length > max_seq_len) {
            return bad(
                "lengths",
                format!("{length}, and the model's positions end at {max_seq_len}"),
                "use lengths up to the model's max_position_embeddings",
            );
        }
        if let Some(length) = self.lengths.iter().find(|&&length| length <= self.buffer) {
            return bad(
                "lengths",
                format!(
                    "{length}, of which {} tokens are kept for needle, question and answer, so that no haystack is \
                     left",
                    self.buffer
                ),
                "use longer lengths, or a smaller --buffer",
            );
        }
        match self.depths.iter().find(|d| !(0.0..=100.0).contains(*d)) {
            Some(depth) => bad("depths", depth.to_string(), "depths are percent of the haystack, from 0 to 100"),
            None => Ok(()),
        }
    }

    /// Lengths and depths in rising order, each once.
    #[must_use]
    pub fn sorted(mut self) -> Self {
        self.lengths.sort_unstable();
        self.lengths.dedup();
        self.depths.sort_by(f64::total_cmp);
        self.depths.dedup();
        self
    }

    /// Tokens of haystack in the longest text.
    pub fn haystack_tokens(&self) -> usize {
        let longest = self.lengths.iter().max().copied().unwrap_or(0);
        longest.saturating_sub(self.buffer)
    }
}

/// Asks for every needle of the grid; `observe` is called with the number of needles asked so far, and the results of
/// the lengths and depths that are done.
///
/// A prefill selector acts on haystack, needle and question, and later tokens read every key; a decode selector acts on
/// the tokens after the question.
///
/// # Errors
/// What [`NeedleConfig::check`] refuses; a haystack that is too short; needles longer than `buffer`; a model whose
/// output is not finite; operands that the selector refuses.
pub fn needle<B: DeviceBackend>(
    model: &TaskModel<'_, B>,
    haystack: &Haystack,
    config: &NeedleConfig,
    selection: Option<&Selection>,
    observe: &mut dyn FnMut(usize, &[NeedleCell]),
) -> Result<NeedleReport, EvalError> {
    config.check(model.model.shape().max_seq_len)?;
    haystack.check(config.haystack_tokens())?;
    let samples = samples(config, model.tokenizer)?;
    let mut reader = Reader::new(model, selection);
    let mut cells = Vec::new();
    let (mut ranks, mut num_first) = (0.0, 0);
    for of_cell in samples.chunks(config.num_needles) {
        let mut cell = NeedleCell {
            length: of_cell[0].length,
            depth: of_cell[0].depth,
            num_needles: of_cell.len(),
            num_found: 0,
            mean_rank: 0.0,
        };
        let asked = cells.len() * config.num_needles;
        let prompt = |sample: &Sample| {
            let text = haystack.with_needle(sample.length - config.buffer, sample.depth, &sample.statement);
            reader.prompt(text.0, sample)
        };
        let prompts: Vec<Vec<u32>> = of_cell.iter().map(prompt).collect();
        let of_cell: Vec<&Sample> = of_cell.iter().collect();
        for NeedleAnswer { rank, is_found, .. } in
            reader.ask(&prompts, &of_cell, &mut |n| observe(asked + n, &cells))?
        {
            cell.num_found += usize::from(is_found);
            cell.mean_rank += rank / of_cell.len() as f64;
            num_first += usize::from(rank == 1.0);
            ranks += rank;
        }
        cells.push(cell);
    }
    let count = samples.len() as f64;
    let num_found: usize = cells.iter().map(|cell| cell.num_found).sum();
    let mean_rank = ranks / count;
    Ok(NeedleReport {
        selector: selection.map(|selection| selection.selectors().to_string()),
        paths: reader.paths(),
        num_needles: samples.len(),
        found: num_found as f64 / count,
        mean_rank,
        first: num_first as f64 / count,
        chance_rank: CHANCE_RANK,
        sigmas: sigmas(mean_rank, samples.len()),
        density: reader.density(),
        cells,
        example: example(config.seed, &samples[0]),
    })
}

/// The texts of the first needle of all.
fn example(seed: u64, first: &Sample) -> NeedleExample {
    let texts = texts(seed, first.length, first.depth, 0);
    NeedleExample {
        statement: texts.statement.trim().to_owned(),
        question: texts.question.trim().to_owned(),
        answer: texts.answer,
    }
}

/// Asks the model for needles.
struct Reader<'a, B: DeviceBackend> {
    model: &'a TaskModel<'a, B>,
    /// The selector, with the statistics of its calls.
    selection: Option<Selection>,
    /// `[computed pairs, pairs of dense attention]` of the prompts.
    pairs: [f64; 2],
}

/// What the model answered to one needle.
struct NeedleAnswer {
    /// Rank of the right answer's likelihood among the candidates.
    rank: f64,
    /// Whether the greedy continuation contains the answer.
    is_found: bool,
    /// Log-likelihood of the right answer, in nats per token.
    log_likelihood: f64,
}

impl<'a, B: DeviceBackend> Reader<'a, B> {
    fn new(model: &'a TaskModel<'a, B>, selection: Option<&Selection>) -> Self {
        Self { model, selection: selection.map(Selection::uncounted), pairs: [0.0; 2] }
    }

    /// The path that each layer took so far.
    fn paths(&self) -> Vec<LayerPath> {
        self.selection.as_ref().map_or(Vec::new(), Selection::paths)
    }

    /// Computed pairs over causal pairs of the prompts so far, for a prefill selector.
    fn density(&self) -> Option<f64> {
        let is_prefill = self.selection.as_ref().is_some_and(|selection| !selection.is_token_by_token());
        is_prefill.then(|| self.pairs[0] / self.pairs[1].max(1.0))
    }

    /// The tokens before the answer: a BOS token if the tokenizer has one, the text with the needle, the question.
    fn prompt(&self, text: Vec<u32>, sample: &Sample) -> Vec<u32> {
        let bos_id = self.model.tokenizer.bos_id();
        bos_id.into_iter().chain(text).chain(sample.question.iter().copied()).collect()
    }

    /// The answers to several prompts of one length; `samples` has the needle of each.
    fn ask(
        &mut self,
        prompts: &[Vec<u32>],
        samples: &[&Sample],
        observe: &mut dyn FnMut(usize),
    ) -> Result<Vec<NeedleAnswer>, EvalError> {
        let size = TextsWithEndings::new(samples[0].length, NUM_DISTRACTORS + 1);
        let (mut scores, pairs) = (Vec::new(), &mut self.pairs);
        let greedy = Greedy {
            max_new_tokens: &|n| samples[n].max_new_tokens(),
            room: samples.iter().map(|sample| sample.max_new_tokens()).max().unwrap_or(0),
            together: size.texts,
            stop: &StopTexts::default(),
            is_enough: &|n, text| text.contains(&samples[n].answer),
            after_prompt: &mut |n, text, logits| {
                if let Some(selection) = text.selection() {
                    let totals = selection.totals();
                    pairs[0] += totals.pairs;
                    pairs[1] += totals.dense_pairs;
                }
                let candidates = &samples[n].candidates;
                let endings = text.endings(logits, candidates, size.endings)?;
                let likelihoods: Vec<f64> = endings.iter().map(|x| x.log_likelihood).collect();
                scores.push((rank(&likelihoods), likelihoods[0] / candidates[0].len() as f64));
                Ok(())
            },
        };
        let answers = greedy.answers(self.model, prompts, self.selection.as_mut(), observe)?;
        let answered = |((&sample, text), (rank, log_likelihood)): ((&&Sample, String), (f64, f64))| NeedleAnswer {
            rank,
            is_found: text.contains(&sample.answer),
            log_likelihood,
        };
        Ok(samples.iter().zip(answers).zip(scores).map(answered).collect())
    }
}

/// Rank of the first value among all, 1 for the largest. Equal values share the mean of their ranks.
pub(crate) fn rank(likelihoods: &[f64]) -> f64 {
    let (answer, others) = (likelihoods[0], &likelihoods[1..]);
    let above = others.iter().filter(|&&x| x > answer).count();
    let equal = others.iter().filter(|&&x| x == answer).count();
    1.0 + above as f64 + equal as f64 / 2.0
}

#[cfg(test)]
pub(crate) mod tests;
