//! Where the assistant speaks in the text of a chat.
//!
//! A template says it by `{% generation %}` blocks, which `transformers` reads for `return_assistant_tokens_mask`.
//! Without them, the chat is rendered twice for each message of the assistant: up to the message, and up to the one
//! before it with the beginning of an answer. The answer is what the first text has behind the second.

use super::{ChatMessage, ChatTemplate};
use minijinja::{Error, ErrorKind};
use std::ops::Range;

/// The text of a chat, and the bytes of it that the assistant writes.
pub(super) type Marked = (String, Vec<Range<usize>>);

/// What stands for the beginning and the end of a `{% generation %}` block while a template is rendered: characters
/// that Unicode promises never to assign.
const MARKS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// Name of the filter that `{% generation %}` becomes.
const FILTER: &str = "sieve_generation";

/// The filter of a `{% generation %}` block: its text between two marks.
pub(super) fn marked(text: &str) -> String {
    format!("{}{text}{}", MARKS[0], MARKS[1])
}

/// The template with each `{% generation %}` block, which Jinja does not know, as a block of a filter, and whether it
/// has any.
pub(super) fn with_generation_filter(template: &str) -> (String, bool) {
    let (mut text, mut rest, mut has_any) = (String::with_capacity(template.len()), template, false);
    while let Some((before, after)) = rest.split_once("{%") {
        text += before;
        text += "{%";
        rest = after;
        let Some((inside, _)) = after.split_once("%}") else {
            break;
        };
        let word = inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let plain = match word {
            "generation" => format!("filter {FILTER}"),
            "endgeneration" => "endfilter".to_owned(),
            _ => continue,
        };
        has_any = true;
        text += &inside.replacen(word, &plain, 1);
        rest = &after[inside.len()..];
    }
    (text + rest, has_any)
}

/// The name of the filter for the environment.
pub(super) const fn filter() -> &'static str {
    FILTER
}

/// Refuses messages with a character of [`MARKS`].
pub(super) fn check(messages: &[ChatMessage<'_>]) -> Result<(), Error> {
    match messages.iter().any(|message| message.content.contains(MARKS) || message.role.contains(MARKS)) {
        true => Err(invalid("a message holds U+FDD0 or U+FDD1, which are no characters".to_owned())),
        false => Ok(()),
    }
}

/// A rendered text without its marks, and the bytes between them. A block inside another one is part of the outer one.
pub(super) fn take_marks(rendered: &str) -> Marked {
    let (mut text, mut answers, mut starts) = (String::with_capacity(rendered.len()), Vec::new(), Vec::new());
    let mut rest = rendered;
    while let Some(at) = rest.find(MARKS) {
        text += &rest[..at];
        if rest[at..].starts_with(MARKS[0]) {
            starts.push(text.len());
        } else if let (Some(start), true) = (starts.pop(), starts.is_empty()) {
            answers.push(start..text.len());
        }
        rest = &rest[at + MARKS[0].len_utf8()..];
    }
    (text + rest, answers)
}

impl ChatTemplate {
    /// Whether the template itself says where the assistant speaks, by `{% generation %}` blocks.
    pub fn marks_answers(&self) -> bool {
        with_generation_filter(&self.text).1
    }

    /// The text of a whole chat, and the bytes of it that the assistant writes: the `{% generation %}` blocks of the
    /// template, or else what each message of the assistant adds to the chat before it.
    ///
    /// # Errors
    /// In words: a template that is not valid Jinja, refuses the messages, marks no answer, or, without marks, renders
    /// a chat's beginning otherwise than the whole chat begins.
    pub fn answers(&self, messages: &[ChatMessage<'_>]) -> Result<(String, Vec<Range<usize>>), String> {
        let words = |error: Error| format!("the chat template cannot be applied: {error}");
        let begins_answer = false;
        let (text, answers) = self.marked(messages, begins_answer).map_err(words)?;
        let answers = match self.marks_answers() {
            true => answers,
            false => self.answers_by_prefixes(messages, &text).map_err(words)?,
        };
        match answers.iter().any(|answer| !answer.is_empty()) {
            true => Ok((text, answers)),
            false => Err("the chat template writes no word of the assistant's".to_owned()),
        }
    }

    /// The bytes that each message of the assistant adds to the chat before it with the beginning of an answer. White
    /// space that the template puts behind the token that ends a message is not the answer's.
    fn answers_by_prefixes(&self, messages: &[ChatMessage<'_>], text: &str) -> Result<Vec<Range<usize>>, Error> {
        let mut answers = Vec::new();
        for (index, message) in messages.iter().enumerate().filter(|(_, message)| message.role == "assistant") {
            let prefix = |messages: &[ChatMessage<'_>], begins_answer: bool| {
                let (found, _) = self.marked(messages, begins_answer)?;
                match text.starts_with(&found) {
                    true => Ok(found.len()),
                    false => Err(invalid(not_a_prefix(index, begins_answer))),
                }
            };
            let start = prefix(&messages[..index], true)?;
            let end = match index + 1 == messages.len() {
                true => text.len(),
                false => prefix(&messages[..=index], false)?,
            };
            let answer = text.get(start..end).ok_or_else(|| invalid(not_a_prefix(index, true)))?;
            let without_space = answer.trim_end();
            let words = message.content.trim_end();
            let ends_by_message = !words.is_empty() && without_space.ends_with(words);
            answers.push(start..if ends_by_message { end } else { start + without_space.len() });
        }
        Ok(answers)
    }
}

/// Why a template without `{% generation %}` does not say where message `index` is.
fn not_a_prefix(index: usize, begins_answer: bool) -> String {
    let number = index + 1;
    let part = match begins_answer {
        true => "before",
        false => "up to",
    };
    format!(
        "it has no {{% generation %}} blocks, and the chat {part} message {number} is not how the whole chat begins, \
         so where the assistant speaks is unknown; put its words into {{% generation %}} … {{% endgeneration %}}"
    )
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_generation_become_blocks_of_a_filter() {
        let (text, has_any) =
            with_generation_filter("a{%- generation -%}b{% endgeneration +%}{% generations %}{% if x %}{% c");
        assert_eq!(text, "a{%- filter sieve_generation -%}b{% endfilter +%}{% generations %}{% if x %}{% c");
        assert!(has_any);
        assert_eq!(with_generation_filter("{% if x %}{% endif %}"), ("{% if x %}{% endif %}".to_owned(), false));
    }

    #[test]
    fn marks_are_taken_from_a_text() {
        let inner = marked("é");
        let (text, answers) = take_marks(&format!("a{}b{}", marked(&format!("x{inner}y")), marked("")));
        assert_eq!((text.as_str(), answers), ("axéyb", vec![1..5, 6..6]));
    }
}
