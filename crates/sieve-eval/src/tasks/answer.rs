//! Generates a model's answers, and decides whether they are right.
use super::TaskModel;
use super::spec::Matching;
use super::text_scores::TextScore;
use crate::continuation::{Continuation, rows_of_texts, texts_together};
use crate::input::check_vocabulary;
use crate::{EvalError, Selection};
use sieve_data::DecodeStream;
use sieve_ops::DeviceBackend;

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
    let prefix_id = model.tokenizer.prefix_id()?;
    // Logits beyond the tokenizer's vocabulary are padding.
    let num_tokens = model.tokenizer.vocab_size().min(model.model.shape().vocab_size);
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let room = longest + matching.max_new_tokens;
    let empty = Continuation::new(model.model, room, model.device);
    let num_rows = texts_together(room).min(prompts.len());
    let acts_in_decode = selection.as_ref().is_some_and(|selection| selection.acts_in_decode());
    let mut rows = match acts_in_decode {
        // The texts then have caches of their own.
        true => None,
        false => rows_of_texts(model.model.shape(), num_rows, room),
    };
    let mut answers = vec![String::new(); prompts.len()];
    let (mut open, mut num_done) = (Vec::<OpenAnswer<'_, '_, B>>::new(), 0);
    let mut unread = prompts.iter().enumerate();
    while num_done < prompts.len() {
        let num_free = texts_together(room) - open.len();
        for (prompt_idx, prompt) in unread.by_ref().take(num_free) {
            let prompt = match prompt.is_empty() {
                true => std::slice::from_ref(&prefix_id),
                false => prompt,
            };
            check_vocabulary(prompt, model.model.shape().vocab_size)?;
            let mut text = empty.clone().with_copy_of(selection.as_deref());
            let next = text.read_likeliest(prompt, num_tokens)?;
            text.join(&mut rows);
            open.push(OpenAnswer {
                prompt_idx,
                text,
                next,
                stream: model.tokenizer.decode_stream(),
                answer: String::new(),
                num_tokens: 0,
            });
        }
        let (mut tokens, mut still_open) = (Vec::new(), Vec::new());
        for mut answer in open {
            if let Some(token) = answer.next_token(model.ends, matching)? {
                tokens.push(token);
                still_open.push(answer);
                continue;
            }
            answer.text.leave(&mut rows);
            answer.text.add_totals_to(selection.as_deref_mut());
            let prompt_idx = answer.prompt_idx;
            answers[prompt_idx] = answer.finish(&matching.stop)?;
            num_done += 1;
            observe(num_done);
        }
        open = still_open;
        if open.is_empty() {
            continue;
        }
        let mut texts: Vec<_> = open.iter_mut().map(|answer| &mut answer.text).collect();
        let next = Continuation::read_each_likeliest(&mut texts, &tokens, &mut rows, num_tokens)?;
        for (answer, next) in open.iter_mut().zip(next) {
            answer.next = next;
        }
    }
    Ok(answers)
}

/// A text whose answer is still being generated.
struct OpenAnswer<'a, 't, B: DeviceBackend> {
    prompt_idx: usize,
    /// Prompt and answer, without the answer's last token.
    text: Continuation<'a, B>,
    /// The likeliest next token; `None` after a NaN logit.
    next: Option<u32>,
    stream: DecodeStream<'t>,
    answer: String,
    /// Number of tokens generated so far.
    num_tokens: usize,
}

impl<B: DeviceBackend> OpenAnswer<'_, '_, B> {
    /// Appends the likeliest token to the answer and returns it; `None` if the answer is complete.
    fn next_token(&mut self, ends: &[u32], matching: &Matching) -> Result<Option<u32>, EvalError> {
        let token = self.next.ok_or(EvalError::NotFinite(self.text.cache().num_tokens))?;
        if ends.contains(&token) || self.num_tokens == matching.max_new_tokens {
            return Ok(None);
        }
        self.num_tokens += 1;
        self.answer += &self.stream.push(token)?;
        let continues = end(&self.answer, &matching.stop).is_none() && self.num_tokens < matching.max_new_tokens;
        Ok(continues.then_some(token))
    }

    /// The answer up to the first stop string.
    fn finish(mut self, stop: &[String]) -> Result<String, EvalError> {
        self.answer += &self.stream.finish()?;
        if let Some(end) = end(&self.answer, stop) {
            self.answer.truncate(end);
        }
        Ok(self.answer)
    }
}

/// Byte at which the first stop string begins.
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
