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
mod sample;
mod text;

pub use ask::{LongCell, LongReport, LongTaskReport, SampleScore, ask_long};
pub use fit::{LongTexts, long_texts};
pub use qa::QaData;
pub use random::Split;
pub use sample::{LongSample, Match, NUM_WRONG};
pub use text::LongText;

use crate::EvalError;
use needles::Needles;
use random::Random;
use sample::Size;

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
            Kind::Needles(needles) => needles.haystack(&source.text),
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

#[cfg(test)]
mod tests;
