//! Needles at every phase: the position of the number's first token modulo a period, such as the size of a block.
//!
//! A needle is asked once at each phase. From one time to the next the text before it loses its first token, and the
//! text after it gains one at its end. So the needle, its neighbours, the length and the question's position stay; the
//! needle moves away from the question by at most `period - 1` tokens. Each needle has another part of the haystack, so
//! that no phase has the same first tokens, or the same distance to the question, for all needles.

use super::sample::{Sample, samples};
use super::{CHANCE_RANK, Haystack, NeedleConfig, NeedleExample, Reader, example};
use crate::EvalError;
use crate::phases::{Better, PhaseGap, phase_gap};
use crate::seeded::seeded;
use chacha20::rand_core::Rng;
use serde::Serialize;
use sieve_infer::{LayerPath, Selection, TaskModel};
use sieve_ops::DeviceBackend;

/// Results of needles that were asked at every phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NeedlePhases {
    /// The selector with its settings; absent for the model's own attention.
    pub selector: Option<String>,
    /// The path that each layer took with the selector.
    pub paths: Vec<LayerPath>,
    /// Number of needles of all lengths and depths, each asked at every phase.
    pub num_needles: usize,
    /// Computed pairs over causal pairs of the prompts, for a prefill selector.
    pub density: Option<f64>,
    /// The mean rank that guessing would give.
    pub chance_rank: f64,
    /// Share of needles whose number the greedy continuation contains.
    pub found: PhaseGap,
    /// Rank of the answers, 1 is the best.
    pub rank: PhaseGap,
    /// Log-likelihood of the answers, in nats per token.
    pub log_likelihood: PhaseGap,
    /// Texts of the first needle, as an example.
    pub example: NeedleExample,
}

impl NeedleConfig {
    /// Checks that every needle can move by a whole period.
    ///
    /// # Errors
    /// A period below 2; a depth with fewer than `period - 1` tokens of haystack before it.
    pub fn check_period(&self, period: usize) -> Result<(), EvalError> {
        if period < 2 {
            return Err(EvalError::setting("phases", period, "a period has at least two phases"));
        }
        for &length in &self.lengths {
            for &depth in &self.depths {
                let before = wanted(length - self.buffer, depth);
                if before + 1 < period {
                    let what = format!(
                        "a needle moves back by {} tokens to reach all phases of {period}, and {depth} % of {} tokens \
                         of haystack are {before}",
                        period - 1,
                        length - self.buffer
                    );
                    return Err(EvalError::refused(what, "use deeper --depths, longer --lengths, or fewer --phases"));
                }
            }
        }
        Ok(())
    }

    /// Tokens of haystack that the needles are put in at all phases of a period: twice the longest text's, so that
    /// needles have different parts of it.
    pub fn haystack_tokens_of(&self, period: usize) -> usize {
        2 * self.haystack_tokens() + period - 1
    }
}

/// Tokens before a depth.
fn wanted(len: usize, depth: f64) -> usize {
    (len as f64 * depth / 100.0).round() as usize
}

/// Asks for every needle of the grid at each phase; `observe` is called with the number of questions asked so far, and
/// how often the needles before this one were found.
///
/// # Errors
/// Those of [`needle`](super::needle()), and what [`NeedleConfig::check_period`] refuses.
pub fn needle_by_phase<B: DeviceBackend>(
    model: &TaskModel<'_, B>,
    haystack: &Haystack,
    config: &NeedleConfig,
    period: usize,
    selection: Option<&Selection>,
    observe: &mut dyn FnMut(usize, usize),
) -> Result<NeedlePhases, EvalError> {
    config.check(model.model.shape().max_seq_len)?;
    config.check_period(period)?;
    haystack.check(config.haystack_tokens() + period - 1)?;
    let samples = samples(config, model.tokenizer)?;
    let mut reader = Reader::new(model, selection);
    let [mut found, mut ranks, mut likelihoods] = [const { Vec::new() }; 3];
    let mut num_found = 0;
    for (at, sample) in samples.iter().enumerate() {
        let len = sample.length - config.buffer;
        let span = Span::of(haystack, len, sample.depth, period, &mut seeded(stream(config, sample, at)));
        let number_at = usize::from(model.tokenizer.bos_id().is_some()) + sample.number_at(model.tokenizer)?;
        let texts = (0..period).map(|moved| span.text(haystack, moved, &sample.statement));
        let prompts: Vec<Vec<u32>> = texts.map(|text| reader.prompt(text, sample)).collect();
        let answers = reader.ask(&prompts, &vec![sample; period], &mut |n| observe(at * period + n, num_found))?;
        let mut rows = [vec![0.0; period], vec![0.0; period], vec![0.0; period]];
        for (moved, answer) in answers.iter().enumerate() {
            let phase = (number_at + span.before(moved)) % period;
            rows[0][phase] = f64::from(u8::from(answer.is_found));
            rows[1][phase] = answer.rank;
            rows[2][phase] = answer.log_likelihood;
            num_found += usize::from(answer.is_found);
        }
        let [row_found, row_ranks, row_likelihoods] = rows;
        found.push(row_found);
        ranks.push(row_ranks);
        likelihoods.push(row_likelihoods);
    }
    let phases: Vec<usize> = (0..period).collect();
    let of = |scores: &[Vec<f64>], better| {
        phase_gap(scores, &phases, period, better, config.seed).expect("the grid has a needle, and a period two phases")
    };
    Ok(NeedlePhases {
        selector: selection.map(|selection| selection.selectors().to_string()),
        paths: reader.paths(),
        num_needles: samples.len(),
        density: reader.density(),
        chance_rank: CHANCE_RANK,
        found: of(&found, Better::High),
        rank: of(&ranks, Better::Low),
        log_likelihood: of(&likelihoods, Better::High),
        example: example(config.seed, &samples[0]),
    })
}

/// Seed of the draw of a needle's part of the haystack, apart from the seeds of its texts.
fn stream(config: &NeedleConfig, sample: &Sample, at: usize) -> [u64; 4] {
    [config.seed, sample.length as u64, sample.depth.to_bits(), !(at as u64)]
}

/// The part of a haystack around one needle.
struct Span {
    /// The part's first token where the needle has not moved.
    first: usize,
    /// Tokens of the part.
    len: usize,
    /// The needle is inserted before this token of the haystack.
    place: usize,
}

impl Span {
    /// Draws the part's beginning. The needle is at `depth` percent, moved back to the end of a sentence that leaves
    /// `period - 1` tokens before it, where there is one.
    fn of(haystack: &Haystack, len: usize, depth: f64, period: usize, random: &mut impl Rng) -> Self {
        let room = haystack.num_tokens() - (len + period - 1);
        let first = (random.next_u64() % (room as u64 + 1)) as usize;
        let wanted = first + wanted(len, depth);
        let place = haystack.end_of_sentence(first + period - 1..=wanted).unwrap_or(wanted);
        Self { first, len, place }
    }

    /// Tokens of haystack before the needle once it has moved by `moved` tokens.
    fn before(&self, moved: usize) -> usize {
        self.place - self.first - moved
    }

    fn text(&self, haystack: &Haystack, moved: usize, needle: &[u32]) -> Vec<u32> {
        let first = self.first + moved;
        haystack.inserted(first..first + self.len, self.place, needle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::needle::tests::tokenizer;

    #[test]
    fn a_needle_is_at_every_phase_among_the_same_words() {
        let tokenizer = tokenizer();
        let config = NeedleConfig { lengths: vec![400], depths: vec![50.0], num_needles: 4, buffer: 130, seed: 3 };
        let haystack = Haystack::made_up(config.haystack_tokens_of(16), &tokenizer).expect("English");
        let samples = samples(&config, &tokenizer).expect("they fit");
        let mut firsts = Vec::new();
        for (at, sample) in samples.iter().enumerate() {
            let span = Span::of(&haystack, 270, 50.0, 16, &mut seeded(stream(&config, sample, at)));
            let number = sample.number_at(&tokenizer).expect("it decodes");
            let texts: Vec<Vec<u32>> = (0..16).map(|moved| span.text(&haystack, moved, &sample.statement)).collect();
            let mut phases = Vec::new();
            for (moved, text) in texts.iter().enumerate() {
                assert_eq!(text.len(), 270 + sample.statement.len());
                let start = span.before(moved);
                assert_eq!(text[start..][..sample.statement.len()], sample.statement);
                let digit = tokenizer.decode(&text[start + number..=start + number]).expect("it decodes");
                let before = tokenizer.decode(&text[start..start + number]).expect("it decodes");
                assert!(digit.contains(|x: char| x.is_ascii_digit()) && !before.contains(|x: char| x.is_ascii_digit()));
                // All but the first and the last tokens are the same.
                assert_eq!(text[..text.len() - moved], texts[0][moved..]);
                phases.push((start + number) % 16);
            }
            phases.sort_unstable();
            assert_eq!(phases, (0..16).collect::<Vec<_>>());
            firsts.push(span.first);
        }
        firsts.dedup();
        assert_eq!(firsts.len(), 4, "each needle has its own part");
    }

    #[test]
    fn a_needle_without_tokens_before_it_is_refused() {
        let config = NeedleConfig { lengths: vec![300], depths: vec![50.0], num_needles: 1, buffer: 200, seed: 3 };
        assert!(config.check_period(51).is_ok());
        sieve_testing::refusal(config.check_period(52), "50 % of 100 tokens of haystack are 50");
        sieve_testing::refusal(config.check_period(1), "at least two phases");
    }
}
