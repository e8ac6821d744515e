//! Answers that a model generates, and whether they are right.
use super::TaskModel;
use super::spec::Matching;
use crate::{EvalError, GenerateConfig, Generator, Sampling, Selection};
use sieve_ops::SieveBackend;

/// What a number that is not there is called; never an answer.
const NO_NUMBER: &str = "[invalid]";

/// Greedy text after a prompt: up to the first stop string, the end of the document or `max_new_tokens`.
pub(super) fn answer<B: SieveBackend>(
    model: &TaskModel<'_, B>,
    prompt: &[u32],
    matching: &Matching,
    selection: Option<&mut Selection>,
) -> Result<String, EvalError> {
    let tokenizer = model.tokenizer;
    let config = GenerateConfig {
        max_new_tokens: matching.max_new_tokens,
        sampling: Sampling::GREEDY,
        eos_id: tokenizer.eos_id()?,
        num_tokens: tokenizer.vocab_size(),
    };
    let mut generator = Generator::new(model.model, prompt, config, model.device)?;
    if let Some(selection) = &selection {
        generator = generator.with_selection((**selection).clone());
    }
    let (mut stream, mut text) = (tokenizer.decode_stream(), String::new());
    for token in generator.by_ref() {
        text += &stream.push(token?)?;
        if end(&text, &matching.stop).is_some() {
            break;
        }
    }
    if let (Some(kept), Some(used)) = (selection, generator.selection()) {
        kept.take_totals(used);
    }
    text += &stream.finish()?;
    if let Some(end) = end(&text, &matching.stop) {
        text.truncate(end);
    }
    Ok(text)
}

/// Where the first stop string begins.
fn end(text: &str, stop: &[String]) -> Option<usize> {
    stop.iter().filter_map(|stop| text.find(stop)).min()
}

impl Matching {
    /// Whether a generated text is one of the answers.
    pub(super) fn is_right(&self, text: &str, answers: &[String]) -> bool {
        let text = self.normal(text);
        answers.iter().any(|answer| self.normal(answer) == text)
    }

    fn normal(&self, text: &str) -> String {
        let mut text = match &self.number_after {
            Some(mark) => number_after(text, mark),
            None => text.trim().to_owned(),
        };
        if self.ignore_case {
            text = text.to_lowercase();
        }
        if self.ignore_punctuation {
            text.retain(|c| !c.is_ascii_punctuation());
        }
        text
    }
}

/// The first number directly behind a mark, without commas and without a dot at its end.
fn number_after(text: &str, mark: &str) -> String {
    for (at, _) in text.match_indices(mark) {
        let rest = &text[at + mark.len()..];
        let (sign, digits) = match rest.strip_prefix('-') {
            Some(digits) => ("-", digits),
            None => ("", rest),
        };
        let len = digits.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == ','));
        let digits = &digits[..len.unwrap_or(digits.len())];
        if !digits.is_empty() {
            let digits = digits.replace(',', "");
            return format!("{sign}{}", digits.strip_suffix('.').unwrap_or(&digits));
        }
    }
    NO_NUMBER.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::Task;

    #[test]
    fn answers_match_as_their_task_says() {
        let right = |task: &str, text: &str, answers: &[&str]| {
            let answers: Vec<String> = answers.iter().map(|&answer| answer.into()).collect();
            let task = Task::ready(task).expect("ready");
            task.matching.is_right(text, &answers)
        };
        assert!(right("triviaqa", " St. John's", &["x", "st johns"]));
        assert!(!right("triviaqa", " St John", &["x", "st johns"]));
        let sum = "2 + 2 = <<2+2=4>>4\n#### 1,234";
        for (text, expected) in [
            (" so\n#### 1234.", true),
            ("#### x #### 1,234 apples", true),
            ("#### -1234", false),
            ("1234", false),
            ("#### $1234", false),
        ] {
            assert_eq!(right("gsm8k", text, &[sum]), expected, "{text}");
        }
        assert_eq!(end("ab\nc.", &[".".into(), "\n".into()]), Some(2));
    }
}
