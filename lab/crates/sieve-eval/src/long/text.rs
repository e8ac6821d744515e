//! The text around what is asked for.
use super::random::Split;
use crate::needle::made_up_sentences;

/// The filler sentences of RULER's noise haystack.
pub(super) const NOISE: &str =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

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
    pub(super) fn first(&self, count: usize) -> Vec<&str> {
        let parts = self.parts.iter().map(String::as_str);
        parts.cycle().take(count).collect()
    }
}
