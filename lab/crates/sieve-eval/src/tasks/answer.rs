//! Generates a model's answers, and decides whether they are right.
use super::spec::Matching;
use super::text_scores::TextScore;
use crate::EvalError;
use sieve_infer::{Greedy, Selection, StopTexts, TaskModel, texts_together};
use sieve_ops::DeviceBackend;

/// The result of [`number_after`] without a number, as in lm-evaluation-harness. No answer equals it.
const NO_NUMBER: &str = "[invalid]";

/// The greedy continuation of each prompt, up to the first stop string, the end of the document or `max_new_tokens`.
/// Prompts are read one by one; several texts are decoded as one batch.
pub(super) fn answers<B: DeviceBackend>(
    model: &TaskModel<'_, B>,
    prompts: &[Vec<u32>],
    matching: &Matching,
    selection: Option<&mut Selection>,
    observe: &mut dyn FnMut(usize),
) -> Result<Vec<String>, EvalError> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let greedy = Greedy {
        max_new_tokens: &|_| matching.max_new_tokens,
        room: matching.max_new_tokens,
        together: texts_together(longest.max(1) + matching.max_new_tokens),
        stop: &StopTexts::new(&matching.stop, model.tokenizer),
        is_enough: &|_, _| false,
        after_prompt: &mut |_, _, _| Ok(()),
    };
    Ok(greedy.answers(model, prompts, selection, observe)?)
}

impl Matching {
    /// The score of a generated text from 0 to 1; `None` if the task's answers are simply right or wrong.
    pub(super) fn score(&self, text: &str, answers: &[String], classes: &[String]) -> Option<f64> {
        let text = if self.first_line { text.trim_start_matches('\n').split('\n').next().unwrap_or("") } else { text };
        match self.score {
            TextScore::ExactMatch => None,
            score => Some(score.best(text, answers, classes)),
        }
    }

    /// Whether a generated text is one of the answers.
    pub(super) fn is_right(&self, text: &str, answers: &[String]) -> bool {
        let text = self.normal(text);
        answers.iter().any(|answer| self.normal(answer) == text)
    }

    /// A text in the form in which answers are compared.
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

/// The first number directly after `mark`, without commas and a final dot; [`NO_NUMBER`] if there is none.
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
    }
}
