//! Where the assistant speaks in the text of a chat.
//!
//! A template says it by `{% generation %}` blocks, which `transformers` reads for `return_assistant_tokens_mask`.
//! Without them, the chat is rendered twice for each message of the assistant: up to the message, and up to the one
//! before it with the beginning of an answer. The answer is what the first text has behind the second.

use super::jinja::{Budget, Fallible, Fault, Mark, Program, on_own_stack};
use super::{Chat, ChatRefusal, ChatTemplate};
use serde_json::Value as Json;
use std::ops::Range;
use std::time::Instant;

/// The text of a chat, and the bytes of it that the assistant writes.
type Answers = (String, Vec<Range<usize>>);

impl ChatTemplate {
    /// Whether the template itself says where the assistant speaks, by `{% generation %}` blocks.
    pub fn marks_answers(&self) -> bool {
        self.program().is_ok_and(Program::has_generation)
    }

    /// The text of a whole chat, and the bytes of it that the assistant writes and that are trained on: the blocks
    /// `{% generation %}` of the template, or else what each message of the assistant adds to the chat before it.
    ///
    /// # Errors
    /// A chat of which nothing is trained on; a template that is not valid Jinja, refuses the messages, marks no
    /// answer, or, without marks, renders a chat's beginning otherwise than the whole chat begins.
    pub fn answers(&self, chat: &Chat) -> Result<Answers, ChatRefusal> {
        chat.check_trains()?;
        let refused = |fault: Box<Fault>| ChatRefusal::of_fault(&fault);
        let program = self.program().map_err(refused)?;
        let (text, answers) = on_own_stack(|| self.find(program, chat)).map_err(refused)?;
        if answers.iter().all(Range::is_empty) {
            return Err(ChatRefusal::of_answers("the chat template writes no word of the assistant's"));
        }
        Ok((text, answers))
    }

    /// Renders the whole chat and finds the answers in it: by the template's own blocks, or else by renderings of its
    /// beginnings, which all end by one time.
    fn find(&self, program: &Program, chat: &Chat) -> Fallible<Answers> {
        let end = Budget::end_from_now();
        let [begins_answer, needs_marks] = [false, program.has_generation()];
        let budget = Budget::until(end);
        let (text, marks) = self.rendered(program, chat, chat.messages(), [begins_answer, needs_marks], &budget)?;
        let answers = if needs_marks {
            in_order(trained(chat, marks)?)
        } else {
            self.answers_by_prefixes(program, chat, &text, end)?
        };
        Ok((text, answers))
    }

    /// The bytes that each message of the assistant adds to the chat before it with the beginning of an answer. White
    /// space that the template puts behind the token that ends a message is not the answer's.
    fn answers_by_prefixes(
        &self,
        program: &Program,
        chat: &Chat,
        text: &str,
        end_of_time: Instant,
    ) -> Fallible<Vec<Range<usize>>> {
        let messages = chat.messages();
        let mut answers = Vec::new();
        for index in (0..messages.len()).filter(|index| chat.is_trained(*index)) {
            let prefix = |messages: &[Json], begins_answer: bool| {
                let budget = Budget::until(end_of_time);
                let needs_marks = false;
                let (found, _) = self.rendered(program, chat, messages, [begins_answer, needs_marks], &budget)?;
                if text.starts_with(&found) { Ok(found.len()) } else { Err(not_a_prefix(index, begins_answer)) }
            };
            let start = prefix(&messages[..index], true)?;
            let end = if index + 1 == messages.len() { text.len() } else { prefix(&messages[..=index], false)? };
            let answer = text.get(start..end).ok_or_else(|| not_a_prefix(index, true))?;
            let without_space = answer.trim_end();
            let words = messages[index].get("content").and_then(Json::as_str).unwrap_or_default().trim_end();
            let ends_by_message = !words.is_empty() && without_space.ends_with(words);
            answers.push(start..if ends_by_message { end } else { start + without_space.len() });
        }
        Ok(answers)
    }
}

/// The blocks of messages that are trained on.
///
/// # Errors
/// A chat with a message that is not, and blocks that cannot be told apart.
fn trained(chat: &Chat, marks: Vec<Mark>) -> Fallible<Vec<Mark>> {
    let answers = (0..chat.messages().len()).filter(|at| chat.is_answer(*at)).collect::<Vec<_>>();
    if answers.iter().all(|at| chat.is_trained(*at)) {
        return Ok(marks);
    }
    let message = |number: usize, mark: &Mark| match mark.message {
        Some(message) if chat.is_answer(message) => Some(message),
        // Without a loop over the answers, there is a block for each of them, in their order.
        _ if marks.len() == answers.len() => Some(answers[number]),
        _ => None,
    };
    let messages = marks.iter().enumerate().map(|(number, mark)| message(number, mark)).collect::<Option<Vec<_>>>();
    let Some(messages) = messages else {
        return Err(Fault::refused(
            "a message is not to be trained on, and it is unclear which {% generation %} block of the template is its",
        ));
    };
    let marks = marks.into_iter().zip(messages);
    Ok(marks.filter(|(_, message)| chat.is_trained(*message)).map(|(mark, _)| mark).collect())
}

/// The bytes of blocks, in order and without those inside others.
fn in_order(marks: Vec<Mark>) -> Vec<Range<usize>> {
    let mut answers = marks.into_iter().map(|mark| mark.bytes).collect::<Vec<_>>();
    answers.sort_by_key(|answer| (answer.start, std::cmp::Reverse(answer.end)));
    let mut end = 0;
    answers.retain(|answer| {
        let is_outside = answer.start >= end;
        end = end.max(answer.end);
        is_outside
    });
    answers
}

/// Why a template without `{% generation %}` does not say where message `index` is.
fn not_a_prefix(index: usize, begins_answer: bool) -> Box<Fault> {
    let number = index + 1;
    let part = if begins_answer { "before" } else { "up to" };
    Fault::refused(format!(
        "it has no {{% generation %}} blocks, and the chat {part} message {number} is not how the whole chat begins, \
         so where the assistant speaks is unknown; put its words into {{% generation %}} … {{% endgeneration %}}"
    ))
}
