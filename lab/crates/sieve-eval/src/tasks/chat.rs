//! Questions as chats, with the messages of lm-evaluation-harness's `--apply_chat_template`.
use std::cell::Cell;
use std::fmt::{Debug, Formatter};

/// A message of a chat: its role (`system`, `user`, `assistant`) and its text.
pub type Turn<'a> = (&'static str, &'a str);

/// How the questions of tasks become chats: a system message, examples as turns, the question as the last message.
pub struct TaskChat<'a> {
    system: Option<&'a str>,
    render: &'a dyn Fn(&[Turn<'_>]) -> Result<String, String>,
    lacks_system: Cell<bool>,
}

impl<'a> TaskChat<'a> {
    /// `system` is the text before a task's own description in the system message. `render` is the model's template:
    /// the text of a chat up to where the answer begins, or why it refuses these messages.
    pub fn new(system: Option<&'a str>, render: &'a dyn Fn(&[Turn<'_>]) -> Result<String, String>) -> Self {
        Self { system, render, lacks_system: Cell::new(false) }
    }

    /// Whether the template refused a system message, which then was left out, as in lm-evaluation-harness.
    pub fn lacks_system(&self) -> bool {
        self.lacks_system.get()
    }

    /// The text of a question with its solved examples (prompt and answer).
    pub(super) fn text(&self, description: &str, shots: &[(String, String)], prompt: &str) -> Result<String, String> {
        let system = joined(self.system.unwrap_or(""), description);
        let shots = shots.iter().flat_map(|(prompt, answer)| {
            let answer = (!answer.is_empty()).then_some(("assistant", answer.as_str()));
            [Some(("user", prompt.as_str())), answer].into_iter().flatten()
        });
        let first = (!system.is_empty()).then_some(("system", system.as_str()));
        let turns = first.into_iter().chain(shots).chain([("user", prompt)]).collect::<Vec<Turn<'_>>>();
        match (self.render)(&turns) {
            Err(_) if first.is_some() => {
                let text = (self.render)(&turns[1..])?;
                self.lacks_system.set(true);
                Ok(text)
            }
            result => result,
        }
    }
}

impl Debug for TaskChat<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskChat").field("system", &self.system).finish_non_exhaustive()
    }
}

/// Two texts with a blank line between them, unless one is empty or white space already separates them.
fn joined(first: &str, second: &str) -> String {
    let is_apart = first.is_empty()
        || second.is_empty()
        || first.ends_with(char::is_whitespace)
        || second.starts_with(char::is_whitespace);
    format!("{first}{}{second}", if is_apart { "" } else { "\n\n" })
}
