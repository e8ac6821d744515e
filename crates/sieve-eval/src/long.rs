//! Synthetic long-context tasks: RULER's thirteen (arXiv:2404.06654), and passkey, key-value retrieval, copying,
//! selective copying and induction by the same code.
//!
//! In addition to the score of the generated text the rank of the answer's likelihood among ten wrong answers is
//! reported, which distinguishes small models that generate nothing right.
mod ask;
mod fit;
mod lists;
mod needles;
mod qa;
mod random;
mod recall;

pub use ask::{LongCell, LongReport, LongTaskReport, SampleScore, ask_long};
pub use fit::{LongTexts, long_texts};
pub use qa::QaData;
pub use random::Split;

use crate::EvalError;
use crate::needle::made_up_sentences;
use crate::sampler::different;
use needles::Needles;
use random::Random;
use serde::Serialize;

/// Wrong answers that the right answer is ranked among.
pub const NUM_WRONG: usize = 10;

/// Names of all tasks: RULER's thirteen, then the others.
pub const LONG_TASKS: [&str; 18] = [
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
    "passkey",
    "kv_retrieval",
    "copy",
    "select",
    "induce",
];

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

/// Text around the needles, for the tasks in which RULER uses essays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LongText {
    /// Name of the text in reports.
    pub name: String,
    /// Sentences of prose, or lines of code.
    pub parts: Vec<String>,
    /// Separator between two sentences or lines.
    pub joint: &'static str,
}

impl LongText {
    /// A text of random English sentences.
    pub fn made_up(split: Split) -> Self {
        Self {
            name: "made-up sentences".to_owned(),
            // The split is the seed.
            parts: made_up_sentences(8192, split as u64),
            joint: " ",
        }
    }

    /// Prose, split into sentences at `.`, `?` and `!` before white space. Each run of white space becomes one space.
    pub fn prose(name: String, text: &str) -> Self {
        let mut parts = vec![String::new()];
        for word in text.split_whitespace() {
            let part = parts.last_mut().expect("one is always there");
            if !part.is_empty() {
                part.push(' ');
            }
            part.push_str(word);
            if word.ends_with(['.', '?', '!']) {
                parts.push(String::new());
            }
        }
        parts.retain(|part| !part.is_empty());
        Self { name, parts, joint: " " }
    }

    /// A text of the lines of code in `text`.
    pub fn code(name: String, text: &str) -> Self {
        Self { name, parts: text.lines().map(str::to_owned).collect(), joint: "\n" }
    }

    /// The first `count` sentences or lines, repeated if there are fewer.
    fn first(&self, count: usize) -> Vec<&str> {
        let parts = self.parts.iter().map(String::as_str);
        parts.cycle().take(count).collect()
    }
}

/// Texts and questions that samples are made from.
#[derive(Clone, Debug)]
pub struct LongSource {
    /// The filler text, in place of RULER's essays.
    pub text: LongText,
    /// Questions of `qa_1` (SQuAD) and `qa_2` (HotpotQA); `None` without their file.
    pub qa: [Option<QaData>; 2],
}

/// A task of RULER's kind, with its settings.
#[derive(Clone, Copy, Debug)]
pub struct LongTask {
    name: &'static str,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Needles(Needles),
    VariableTracking,
    CommonWords,
    FrequentWords,
    /// Index in [`LongSource::qa`].
    Qa(usize),
    Passkey,
    KeyValue,
    Copy,
    Select,
    Induce,
}

/// How long a sample's text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    /// Number of sentences, needles, words or documents.
    parts: usize,
    /// Tokens of the whole sample, at most. Some tasks choose their settings by it.
    length: usize,
}

impl LongTask {
    /// The task with this name.
    ///
    /// # Errors
    /// An unknown name.
    pub fn new(name: &str) -> Result<Self, EvalError> {
        let Some(&name) = LONG_TASKS.iter().find(|known| **known == name) else {
            return Err(EvalError::unknown_task(name, &LONG_TASKS, ""));
        };
        let kind = match name {
            "vt" => Kind::VariableTracking,
            "cwe" => Kind::CommonWords,
            "fwe" => Kind::FrequentWords,
            "qa_1" => Kind::Qa(0),
            "qa_2" => Kind::Qa(1),
            "passkey" => Kind::Passkey,
            "kv_retrieval" => Kind::KeyValue,
            "copy" => Kind::Copy,
            "select" => Kind::Select,
            "induce" => Kind::Induce,
            niah => Kind::Needles(Needles::of(niah)),
        };
        Ok(Self { name, kind })
    }

    /// Name of the task, as `--tasks` takes it.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Tokens to generate for an answer, as in RULER.
    pub fn max_new_tokens(&self) -> usize {
        match self.kind {
            Kind::Needles(_) => 128,
            Kind::VariableTracking => 30,
            Kind::CommonWords => 120,
            Kind::FrequentWords | Kind::KeyValue | Kind::Copy | Kind::Select => 50,
            Kind::Qa(_) => 32,
            Kind::Passkey | Kind::Induce => 16,
        }
    }

    /// Name of what the task's text consists of.
    pub fn haystack<'a>(&self, source: &'a LongSource) -> &'a str {
        match self.kind {
            Kind::Needles(needles) => needles.haystack(source),
            Kind::VariableTracking | Kind::Passkey | Kind::Copy | Kind::Select => "noise",
            Kind::CommonWords => "words",
            Kind::FrequentWords => "coded words",
            Kind::Qa(_) => "documents",
            Kind::KeyValue => "pairs of UUIDs",
            Kind::Induce => "random words",
        }
    }

    /// `[fewest, most]` parts of a sample's text; see [`Size::parts`].
    fn bounds(&self, source: &LongSource) -> [usize; 2] {
        match self.kind {
            Kind::Needles(needles) => [needles.fewest(), usize::MAX],
            Kind::VariableTracking => [lists::CHAIN, usize::MAX],
            Kind::CommonWords => [lists::NUM_COMMON + 1, random::MAX_WORDS],
            Kind::FrequentWords => [lists::FEWEST_CODED, usize::MAX],
            Kind::Qa(which) => [1, source.qa[which].as_ref().map_or(1, QaData::num_documents)],
            Kind::KeyValue | Kind::Induce => [2, random::MAX_WORDS],
            Kind::Passkey => [1, usize::MAX],
            Kind::Copy | Kind::Select => [recall::NUM_COPIED, usize::MAX],
        }
    }

    /// Draws a sample. `source` has the questions of a question task.
    fn sample(&self, source: &LongSource, random: &mut Random, size: Size) -> LongSample {
        let parts = size.parts;
        match self.kind {
            Kind::Needles(needles) => needles.sample(&source.text, random, parts),
            Kind::VariableTracking => lists::variable_tracking(random, size),
            Kind::CommonWords => lists::common_words(random, size),
            Kind::FrequentWords => lists::frequent_words(random, size),
            Kind::Qa(which) => {
                let data = source.qa[which].as_ref();
                data.expect("checked before").sample(random, parts)
            }
            Kind::Passkey => recall::passkey(random, parts),
            Kind::KeyValue => recall::key_value(random, parts),
            Kind::Copy => recall::copy(random, parts),
            Kind::Select => recall::select(random, parts),
            Kind::Induce => recall::induce(random, parts),
        }
    }
}

/// [`NUM_WRONG`] different results of `draw` that do not occur in `text`.
fn wrong(text: &str, mut draw: impl FnMut() -> String) -> Vec<String> {
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
fn depth(place: usize, count: usize) -> Option<f64> {
    Some(100.0 * place as f64 / count.max(1) as f64)
}

#[cfg(test)]
mod tests;
