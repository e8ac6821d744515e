//! A sample of a long task: a question with its text, and how its answer is scored.
use crate::seeded::different;
use serde::Serialize;

/// Wrong answers that the right answer is ranked among.
pub const NUM_WRONG: usize = 10;

/// How a generated text is scored: the share of the references that it holds, or whether it holds one of them; upper
/// and lower case are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Match {
    /// All references must be found: RULER's `string_match_all`.
    All,
    /// One found reference is enough: RULER's `string_match_part`.
    Any,
}

impl Match {
    /// Score of a generated text, from 0 to 1.
    pub fn score(self, text: &str, references: &[String]) -> f64 {
        let text = text.to_lowercase();
        let holds = |reference: &&String| text.contains(&reference.to_lowercase());
        let found = references.iter().filter(holds).count();
        match self {
            Self::All => found as f64 / references.len().max(1) as f64,
            Self::Any => f64::from(u8::from(found > 0)),
        }
    }
}

/// A question with its long text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LongSample {
    /// Text, question, and the first words of the answer's sentence. The answer itself follows after a space.
    pub prompt: String,
    /// Strings that a right answer has to contain.
    pub references: Vec<String>,
    /// Whether an answer needs all references or one.
    pub matching: Match,
    /// Percent of the text before the passage with the answer. `None` if the question is about the whole text or the
    /// passage is not known.
    pub depth: Option<f64>,
    /// [`NUM_WRONG`] wrong answers, among which the first reference is ranked.
    pub wrong: Vec<String>,
}

/// How long a sample's text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    /// Number of sentences, needles, words or documents.
    pub(super) parts: usize,
    /// Tokens of the whole sample, at most. Some tasks choose their settings by it.
    pub(super) length: usize,
}

/// [`NUM_WRONG`] different results of `draw` that do not occur in `text`.
pub(super) fn wrong(text: &str, mut draw: impl FnMut() -> String) -> Vec<String> {
    different(NUM_WRONG, || {
        loop {
            let one = draw();
            if !text.contains(&one) {
                return one;
            }
        }
    })
}

/// Percent of `count` parts before the one at `place`.
pub(super) fn depth(place: usize, count: usize) -> Option<f64> {
    Some(100.0 * place as f64 / count.max(1) as f64)
}
