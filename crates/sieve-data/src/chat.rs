//! Chats: rows whose column holds a list of messages, which a model's template makes into one text.

use std::fmt::Debug;
use std::ops::Range;

use serde_json::{Map, Value};

/// Who may speak in a chat.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
/// The role whose messages are predicted.
const ASSISTANT: &str = "assistant";
/// Keys of a message that templates print and that are not read here. Null counts as absent.
const NOT_READ: [&str; 4] = ["tool_calls", "reasoning_content", "reasoning", "thinking"];

/// One message of a chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatTurn {
    /// Who speaks: `system`, `developer`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The message.
    pub content: String,
}

impl ChatTurn {
    /// Whether the model is trained to write this message.
    pub fn is_answer(&self) -> bool {
        self.role == ASSISTANT
    }
}

/// The text of a chat.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatText {
    /// All messages, as the template writes them.
    pub text: String,
    /// The bytes of `text` that the assistant writes, in order; they do not overlap.
    pub answers: Vec<Range<usize>>,
}

/// Makes one text of the messages of a chat.
pub trait ChatFormat: Debug + Send + Sync {
    /// The text of these messages, and where the assistant speaks.
    ///
    /// # Errors
    /// In words: a template that refuses the messages, or does not say where the assistant speaks.
    fn text(&self, chat: &[ChatTurn]) -> Result<ChatText, String>;

    /// A hash of everything that the texts depend on.
    fn hash(&self) -> u128;

    /// Whether the template itself says where the assistant speaks; else that follows from what each message adds to
    /// the text of the messages before it.
    fn marks_answers(&self) -> bool;
}

/// The messages of a row, from the JSON of its column.
///
/// # Errors
/// What is wrong, and a hint.
pub(crate) fn turns(json: &str) -> Result<Vec<ChatTurn>, (String, &'static str)> {
    let value: Value = serde_json::from_str(json).map_err(|error| (error.to_string(), MESSAGES))?;
    let Value::Array(messages) = value else {
        return Err(("it is no list of messages".to_owned(), MESSAGES));
    };
    let turns = messages.iter().enumerate().map(|(index, message)| {
        let number = index + 1;
        let message = message.as_object().ok_or((format!("message {number} is no object"), MESSAGES))?;
        turn(number, message)
    });
    let turns = turns.collect::<Result<Vec<_>, _>>()?;
    match turns.iter().any(ChatTurn::is_answer) {
        true => Ok(turns),
        false => Err((format!("none of its {} messages is the assistant's", turns.len()), NO_ANSWER)),
    }
}

const MESSAGES: &str = "write [{\"role\": \"user\", \"content\": \"…\"}, {\"role\": \"assistant\", \"content\": \
    \"…\"}], name the column that holds such a list by data.messages_column, or leave such rows out: skip_invalid";
const NO_ANSWER: &str = "loss is taken of the assistant's messages alone: give the chat one, or leave such rows out: \
    skip_invalid";

/// One message, `number` counted from 1; or what is wrong with it, and a hint.
fn turn(number: usize, message: &Map<String, Value>) -> Result<ChatTurn, (String, &'static str)> {
    let text = |key: &str| match message.get(key) {
        Some(Value::String(text)) => Ok(text.as_str()),
        Some(Value::Null) | None => Err(format!("message {number} has no {key:?}")),
        Some(_) => Err(format!("message {number} has a {key:?} that is no string")),
    };
    let has_sharegpt_keys = ["from", "value"].iter().all(|key| message.contains_key(*key));
    let role_hint = match has_sharegpt_keys {
        true => {
            "rename \"from\" and \"value\" to \"role\" and \"content\", and \"human\" and \"gpt\" to \"user\" and \
            \"assistant\""
        }
        false => MESSAGES,
    };
    let role = text("role").map_err(|what| (what, role_hint))?;
    if !ROLES.contains(&role) {
        let hint = "roles are system, developer, user, assistant and tool: rename it, or leave such rows out: \
            skip_invalid";
        return Err((format!("message {number} has the role {role:?}"), hint));
    }
    if let Some(key) = NOT_READ.iter().find(|key| message.get(**key).is_some_and(|value| !value.is_null())) {
        let hint = "write what the model is to say into \"content\" as its template would, or leave such rows out: \
            skip_invalid";
        return Err((format!("message {number} has {key:?}, which is not read"), hint));
    }
    let content = text("content").map_err(|what| (format!("{what} ({role})"), MESSAGES))?;
    if let Some(at) = content.find('\0') {
        return Err((format!("message {number} has a NUL at byte {at}, so this is probably not text"), MESSAGES));
    }
    Ok(ChatTurn { role: role.to_owned(), content: content.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_in_their_order() {
        let json = r#"[{"content": "Be\nbrief", "role": "system"}, {"role": "user", "content": ""},
            {"role": "assistant", "content": "é", "tool_calls": null, "id": 7}]"#;
        let found = turns(json).unwrap();
        let found: Vec<_> = found.iter().map(|turn| (turn.role.as_str(), turn.content.as_str())).collect();
        assert_eq!(found, [("system", "Be\nbrief"), ("user", ""), ("assistant", "é")]);
    }

    #[test]
    fn lists_that_are_no_chat_are_refused_with_the_reason() {
        for (json, words) in [
            ("\"text\"", "no list of messages"),
            ("[]", "none of its 0 messages is the assistant's"),
            (r#"[{"role": "user", "content": "a"}]"#, "none of its 1 messages"),
            ("[7]", "message 1 is no object"),
            (r#"[{"role": "user", "content": "a"}, {"content": "b"}]"#, "message 2 has no \"role\""),
            (r#"[{"role": 1, "content": "a"}]"#, "message 1 has a \"role\" that is no string"),
            (r#"[{"role": "bot", "content": "a"}]"#, "message 1 has the role \"bot\""),
            (r#"[{"role": "assistant"}]"#, "message 1 has no \"content\" (assistant)"),
            (r#"[{"role": "assistant", "content": null}]"#, "message 1 has no \"content\" (assistant)"),
            (r#"[{"role": "assistant", "content": ["a"]}]"#, "\"content\" that is no string"),
            (r#"[{"role": "assistant", "content": "a\u0000"}]"#, "NUL at byte 1"),
            (r#"[{"role": "assistant", "content": "", "tool_calls": [{}]}]"#, "\"tool_calls\", which is not read"),
        ] {
            let (what, hint) = turns(json).unwrap_err();
            assert!(what.contains(words), "{json}: {what}");
            assert!(!hint.is_empty());
        }
        let (what, hint) = turns(r#"[{"from": "human", "value": "a"}]"#).unwrap_err();
        assert!(what.contains("no \"role\"") && hint.contains("rename \"from\""), "{what} {hint}");
    }
}
