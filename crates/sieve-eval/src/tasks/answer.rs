//! Generates a model's answers, and decides whether they are right.
use super::TaskModel;
use super::spec::Matching;
use super::text_scores::TextScore;
use crate::continuation::{Continuation, texts_together};
use crate::input::check_vocabulary;
use crate::{EvalError, Selection};
use sieve_data::DecodeStream;
use sieve_ops::DeviceBackend;
use sieve_ops::first_of_largest;

/// The result of [`number_after`] without a number, as in lm-evaluation-harness. No answer equals it.
const NO_NUMBER: &str = "[invalid]";

/// The greedy continuation of each prompt, up to the first stop string, the end of the document or `max_new_tokens`.
/// Prompts are read one by one; several texts are decoded as one batch.
pub(super) fn answers<B: DeviceBackend>(
    model: &TaskModel<'_, B>,
    prompts: &[Vec<u32>],
    matching: &Matching,
    mut selection: Option<&mut Selection>,
    observe: &mut dyn FnMut(usize),
) -> Result<Vec<String>, EvalError> {
    let tokenizer = model.tokenizer;
    let prefix_id = tokenizer.prefix_id()?;
    let num_tokens = tokenizer.vocab_size().min(model.model.shape().vocab_size);
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let room = longest + matching.max_new_tokens;
    let empty = Continuation::new(model.model, room, model.device);
    let mut answers = vec![String::new(); prompts.len()];
    let (mut going, mut next, mut done): (Vec<Going<'_, '_, B>>, _, _) = (Vec::new(), 0, 0);
    while done < prompts.len() {
        while going.len() < texts_together(room) && next < prompts.len() {
            let prompt = match &prompts[next][..] {
                [] => &[prefix_id][..],
                prompt => prompt,
            };
            check_vocabulary(prompt, model.model.shape().vocab_size)?;
            let mut text = empty.clone().with_copy_of(selection.as_deref());
            let logits = text.read(prompt)?;
            going.push(Going {
                number: next,
                text,
                logits,
                stream: tokenizer.decode_stream(),
                said: String::new(),
                num_said: 0,
            });
            next += 1;
        }
        let mut tokens = Vec::with_capacity(going.len());
        let mut still = Vec::with_capacity(going.len());
        for mut one in going {
            match one.say(num_tokens, model.ends, matching)? {
                Some(token) => {
                    tokens.push(token);
                    still.push(one);
                }
                None => {
                    one.text.add_totals_to(selection.as_deref_mut());
                    let number = one.number;
                    answers[number] = one.ended(&matching.stop)?;
                    done += 1;
                    observe(done);
                }
            }
        }
        going = still;
        let mut texts: Vec<_> = going.iter_mut().map(|one| &mut one.text).collect();
        let logits = Continuation::read_each(&mut texts, &tokens)?;
        for (one, logits) in going.iter_mut().zip(logits) {
            one.logits = logits;
        }
    }
    Ok(answers)
}

/// An answer that is being generated.
struct Going<'a, 't, B: DeviceBackend> {
    number: usize,
    text: Continuation<'a, B>,
    /// Logits of the next token.
    logits: Vec<f32>,
    stream: DecodeStream<'t>,
    said: String,
    num_said: usize,
}

impl<B: DeviceBackend> Going<'_, '_, B> {
    /// Appends the likeliest token and returns it; `None` at the end of the text.
    fn say(&mut self, num_tokens: usize, ends: &[u32], matching: &Matching) -> Result<Option<u32>, EvalError> {
        let token =
            first_of_largest(&self.logits[..num_tokens]).ok_or(EvalError::NotFinite(self.text.cache().num_tokens))?;
        if ends.contains(&token) || self.num_said == matching.max_new_tokens {
            return Ok(None);
        }
        self.num_said += 1;
        self.said += &self.stream.push(token)?;
        let goes_on = end(&self.said, &matching.stop).is_none() && self.num_said < matching.max_new_tokens;
        Ok(goes_on.then_some(token))
    }

    fn ended(mut self, stop: &[String]) -> Result<String, EvalError> {
        self.said += &self.stream.finish()?;
        if let Some(end) = end(&self.said, stop) {
            self.said.truncate(end);
        }
        Ok(self.said)
    }
}

/// Position of the first stop string.
fn end(text: &str, stop: &[String]) -> Option<usize> {
    stop.iter().filter_map(|stop| text.find(stop)).min()
}

impl Matching {
    /// The score of a generated text from 0 to 1; `None` if the task's answers are simply right or wrong.
    pub(super) fn score(&self, text: &str, answers: &[String], classes: &[String]) -> Option<f64> {
        let text = match self.first_line {
            true => text.trim_start_matches('\n').split('\n').next().unwrap_or(""),
            false => text,
        };
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

/// The first number directly after `mark`, without commas and a final dot.
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
