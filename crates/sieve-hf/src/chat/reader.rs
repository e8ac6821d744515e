//! The messages of a chat, as training and `serve` read them: what is not known of a message is refused by its name, so
//! that nothing is dropped that a template would print.

use super::{ChatTemplate, FaultKind, words};
use serde_json::{Map, Value as Json, json};

/// Who may speak in a chat.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
/// The role whose messages are predicted.
const ASSISTANT: &str = "assistant";
/// Keys that say whether an assistant's message is trained on, as files of OpenAI, Mistral and axolotl have them.
const WEIGHTS: [&str; 3] = ["weight", "train", "trainable"];
/// Keys about a message that are not said in it: numbers, times, and what WildChat notes of its speakers.
const NOT_SAID: [&str; 13] = [
    "id",
    "message_id",
    "date",
    "timestamp",
    "created_at",
    "turn_identifier",
    "language",
    "country",
    "state",
    "hashed_ip",
    "header",
    "redacted",
    "toxic",
];
/// Keys of a message's thoughts, in the order in which `transformers` looks for them. Whichever is given, a template
/// finds it as `reasoning_content` and `thinking`.
const THOUGHTS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Variables that are not a row's: a row with such a key would take their place.
const OWN_VARIABLES: [&str; 2] = ["messages", "add_generation_prompt"];

const MESSAGES: &str =
    "write [{\"role\": \"user\", \"content\": \"…\"}, {\"role\": \"assistant\", \"content\": \"…\"}]";
const NO_ANSWER: &str = "the loss covers only the assistant's messages: give the chat one";
const NOT_PRINTED: &str = "remove the key, or write what the model is to say into \"content\" as its template would";
const WEIGHT: &str = "write 0 or false for an answer that is read and not predicted, and 1 or true for the others";
const MESSAGES_OR_TEMPLATE: &str = "change the messages or the chat template next to the tokenizer (some take no \
    system message, or only alternating roles)";
const LEFT_OUT: &str = "leave such rows out: skip_invalid";
const TEMPLATE: &str = "correct the chat template next to the tokenizer, or take the one that was published with the \
    model";

/// The messages of a chat, and the variables beside them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    messages: Vec<Json>,
    beside: Vec<(String, Json)>,
    /// Whether each message is the assistant's and is trained on.
    is_trained: Vec<bool>,
}

/// Why a chat cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatRefusal {
    /// The message, counted from 0, if it is one.
    pub message: Option<usize>,
    /// The key of the message, if it is one.
    pub key: Option<String>,
    /// What is wrong, in words; of a message, what it has or is.
    what: String,
    /// How to mend it.
    pub hint: &'static str,
    /// Whether no other chat would fare better: the template is at fault.
    pub is_of_template: bool,
}

impl ChatRefusal {
    fn of_chat(what: impl Into<String>, hint: &'static str) -> Self {
        Self { message: None, key: None, what: what.into(), hint, is_of_template: false }
    }

    fn of_message(at: usize, key: Option<&str>, what: impl AsRef<str>, hint: &'static str) -> Self {
        let what = what.as_ref().to_owned();
        Self { message: Some(at), key: key.map(str::to_owned), what, hint, is_of_template: false }
    }

    /// What is wrong with a row of a data set. It counts messages from 1.
    pub fn of_row(&self) -> String {
        match self.message {
            Some(at) => format!("message {} {}", at + 1, self.what),
            None => self.what.clone(),
        }
    }

    /// How to mend a row of a data set, or do without it.
    pub fn hint_of_row(&self) -> String {
        let hint = self.hint;
        match hint {
            _ if self.is_of_template => hint.to_owned(),
            MESSAGES => format!("{hint}, name the column that has such lists by data.messages_column, or {LEFT_OUT}"),
            _ => format!("{hint}, or {LEFT_OUT}"),
        }
    }

    /// What is wrong with the field `messages` of a request, by its place, and how to mend it.
    pub fn of_request(&self) -> (String, String) {
        let at = self.message.map(|at| format!("messages[{at}]"));
        let place = at.map_or("messages".to_owned(), |at| self.key.iter().fold(at, |at, key| format!("{at}.{key}")));
        let whose = if self.message.is_some() { "the message " } else { "" };
        let words = format!("{place}: {whose}{}; {}", self.what, self.hint);
        (place, words)
    }

    /// A template that refuses a chat.
    pub(super) fn of_fault(fault: &super::Fault) -> Self {
        let is_of_template = fault.kind != FaultKind::Messages;
        let hint = if is_of_template { TEMPLATE } else { MESSAGES_OR_TEMPLATE };
        Self { is_of_template, ..Self::of_chat(words(fault), hint) }
    }

    /// A template that says nothing of the assistant's.
    pub(super) fn of_answers(what: impl Into<String>) -> Self {
        Self::of_chat(what, MESSAGES_OR_TEMPLATE)
    }
}

impl Chat {
    /// Messages that were made here, and are known to be right.
    pub(super) fn of_messages(messages: Vec<Json>) -> Self {
        Self { messages, ..Self::default() }
    }

    pub(super) fn messages(&self) -> &[Json] {
        &self.messages
    }

    pub(super) fn beside(&self) -> impl Iterator<Item = (&str, &Json)> {
        self.beside.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Whether a message is the assistant's.
    pub(super) fn is_answer(&self, at: usize) -> bool {
        is_answer(&self.messages[at])
    }

    /// Whether a message is the assistant's and is trained on.
    pub(super) fn is_trained(&self, at: usize) -> bool {
        self.is_trained.get(at).copied().unwrap_or(false)
    }

    /// Refuses a chat that teaches nothing.
    ///
    /// # Errors
    /// A chat without a message of the assistant's, or whose messages of the assistant's are all not to be trained on.
    pub(super) fn check_trains(&self) -> Result<(), ChatRefusal> {
        if self.is_trained.contains(&true) {
            return Ok(());
        }
        let (num_messages, has_answer) = (self.messages.len(), self.messages.iter().any(is_answer));
        let whose = if has_answer { "the assistant's with a weight" } else { "the assistant's" };
        Err(ChatRefusal::of_chat(format!("none of its {num_messages} messages is {whose}"), NO_ANSWER))
    }
}

fn is_answer(message: &Json) -> bool {
    message.get("role").and_then(Json::as_str) == Some(ASSISTANT)
}

impl ChatTemplate {
    /// Variables beside the messages that the template reads: a row's values of these names are given to it.
    pub fn variables(&self) -> Vec<String> {
        let own = |name: &&str| !OWN_VARIABLES.contains(name) && !self.special_tokens.contains_key(*name);
        let found = self.program().map(|program| program.variables().filter(own).map(str::to_owned).collect());
        found.unwrap_or_default()
    }

    /// The chat of a row: its list of messages, and the values beside it.
    ///
    /// # Errors
    /// What is no list of messages, has a role or a key that is not known, or that this template does not print.
    pub fn read_chat(&self, messages: Json, beside: Vec<(String, Json)>) -> Result<Chat, ChatRefusal> {
        let program = self.program().map_err(|fault| ChatRefusal::of_fault(&fault))?;
        let Json::Array(messages) = messages else {
            return Err(ChatRefusal::of_chat("it is not a list of messages", MESSAGES));
        };
        let mut chat = Chat::default();
        let known = Known(&|key| program.names_key(key));
        for (at, message) in messages.into_iter().enumerate() {
            let Json::Object(mut message) = message else {
                return Err(ChatRefusal::of_message(at, None, "is not an object", MESSAGES));
            };
            // As in transformers: null says nothing, and a template would print "None".
            message.retain(|_, value| !value.is_null());
            chat.is_trained.push(known.check(at, &message)?);
            chat.messages.push(Json::Object(with_thoughts(message)));
        }
        for (name, value) in beside.iter().filter(|(_, value)| !value.is_null()) {
            check_beside(name, value)?;
        }
        chat.beside = beside.into_iter().filter(|(_, value)| !value.is_null()).collect();
        Ok(chat)
    }

    /// The chat of a request in OpenAI's form, as [`read_chat`](Self::read_chat) reads it: a list of parts that are
    /// texts is one text, and a developer is a system, unless the template knows them.
    ///
    /// # Errors
    /// As [`read_chat`](Self::read_chat).
    pub fn read_request(&self, mut messages: Json) -> Result<Chat, ChatRefusal> {
        let names = |key: &str| self.program().is_ok_and(|program| program.names_key(key));
        for message in messages.as_array_mut().into_iter().flatten() {
            let Some(message) = message.as_object_mut() else {
                continue;
            };
            if message.get("role").and_then(Json::as_str) == Some("developer") && !names("developer") {
                message.insert("role".to_owned(), json!("system"));
            }
            if let Some(text) = message.get("content").and_then(joined).filter(|_| !names("text")) {
                message.insert("content".to_owned(), json!(text));
            }
        }
        self.read_chat(messages, Vec::new())
    }
}

/// The text of a list of parts that are texts.
fn joined(content: &Json) -> Option<String> {
    content.as_array()?.iter().map(text_of_part).collect()
}

fn text_of_part(part: &Json) -> Option<&str> {
    let is_text = part.get("type").and_then(Json::as_str) == Some("text");
    part.get("text").and_then(Json::as_str).filter(|_| is_text)
}

/// Whether a value says nothing.
fn is_empty(value: &Json) -> bool {
    match value {
        Json::Null => true,
        Json::String(text) => text.is_empty(),
        Json::Array(items) => items.is_empty(),
        Json::Object(pairs) => pairs.is_empty(),
        Json::Bool(_) | Json::Number(_) => false,
    }
}

/// The keys that a template names.
struct Known<'a>(&'a dyn Fn(&str) -> bool);

impl Known<'_> {
    /// Whether a message is trained on.
    ///
    /// # Errors
    /// What is not known of it.
    fn check(&self, at: usize, message: &Map<String, Json>) -> Result<bool, ChatRefusal> {
        let role = self.role(at, message)?;
        for (key, value) in message.iter().filter(|(_, value)| !is_empty(value)) {
            let is_thought = THOUGHTS.contains(&key.as_str()) && THOUGHTS[..2].iter().any(|key| (self.0)(key));
            let is_known = ["role", "content"].contains(&key.as_str())
                || NOT_SAID.contains(&key.as_str())
                || WEIGHTS.contains(&key.as_str())
                || is_thought
                || (self.0)(key);
            if !is_known {
                let shown: String = key.chars().take(64).collect();
                let what = format!("has {shown:?}, which the chat template does not print");
                return Err(ChatRefusal::of_message(at, Some(&shown), what, NOT_PRINTED));
            }
            if let Some(hidden) = Self::nul(value) {
                let what = format!("has a NUL at byte {hidden}, so this is probably not text");
                return Err(ChatRefusal::of_message(at, Some(key), what, MESSAGES));
            }
        }
        self.content(at, role, message)?;
        weight(at, role, message)
    }

    /// The role of the message with number `at`; one with the keys of ShareGPT, `from` and `value`, gets a hint of its
    /// own.
    fn role<'m>(&self, at: usize, message: &'m Map<String, Json>) -> Result<&'m str, ChatRefusal> {
        let has_sharegpt_keys = ["from", "value"].iter().all(|key| message.contains_key(*key));
        let hint = if has_sharegpt_keys {
            "rename \"from\" and \"value\" to \"role\" and \"content\", and \"human\" and \"gpt\" to \"user\" and \
            \"assistant\""
        } else {
            MESSAGES
        };
        let refused = |what: String, hint| ChatRefusal::of_message(at, Some("role"), what, hint);
        match message.get("role") {
            Some(Json::String(role)) if ROLES.contains(&role.as_str()) => Ok(role),
            Some(Json::String(role)) => {
                let role: String = role.chars().take(64).collect();
                let hint = "roles are system, developer, user, assistant and tool: rename it";
                Err(refused(format!("has the role {role:?}"), hint))
            }
            None => Err(refused("has no \"role\"".to_owned(), hint)),
            Some(_) => Err(refused("has a \"role\" that is not a string".to_owned(), hint)),
        }
    }

    /// Refuses a content that this template does not take.
    fn content(&self, at: usize, role: &str, message: &Map<String, Json>) -> Result<(), ChatRefusal> {
        let refused = |what: String| ChatRefusal::of_message(at, Some("content"), what, MESSAGES);
        let no_string = || refused(format!("has a \"content\" that is not a string ({role})"));
        let calls = ["tool_calls", "function_call"];
        let is_call = calls.iter().any(|key| (self.0)(key) && message.get(*key).is_some_and(|value| !is_empty(value)));
        match message.get("content") {
            Some(Json::String(_)) => Ok(()),
            // An answer that is a call needs no words.
            None if is_call && role == ASSISTANT => Ok(()),
            None => Err(refused(format!("has no \"content\" ({role})"))),
            Some(Json::Array(parts)) => match parts.iter().enumerate().find(|(_, part)| text_of_part(part).is_none()) {
                Some((at, part)) => {
                    let kind = part.get("type").and_then(Json::as_str).unwrap_or("none");
                    let kind: String = kind.chars().take(64).collect();
                    let at = at + 1;
                    Err(refused(format!("has a \"content\" whose part {at} is no text (its type is {kind:?}; {role})")))
                }
                None if (self.0)("text") => Ok(()),
                None => Err(no_string()),
            },
            Some(_) => Err(no_string()),
        }
    }

    /// The byte of a NUL in a text, or in the texts of a list or object.
    fn nul(value: &Json) -> Option<usize> {
        match value {
            Json::String(text) => text.find('\0'),
            Json::Array(items) => items.iter().find_map(Self::nul),
            Json::Object(pairs) => pairs.values().find_map(Self::nul),
            _ => None,
        }
    }
}

/// Whether a message is the assistant's and is trained on, as its weight says.
fn weight(at: usize, role: &str, message: &Map<String, Json>) -> Result<bool, ChatRefusal> {
    let mut is_trained = role == ASSISTANT;
    for key in WEIGHTS {
        let says = match message.get(key) {
            None => continue,
            Some(Json::Bool(says)) => Some(*says),
            Some(value) if value.as_f64() == Some(0.0) => Some(false),
            Some(value) if value.as_f64() == Some(1.0) => Some(true),
            Some(_) => None,
        };
        let refused = |what: String| Err(ChatRefusal::of_message(at, Some(key), what, WEIGHT));
        match says {
            Some(true) if role != ASSISTANT => {
                return refused(format!("has a {key:?}, and it is the {role}'s: the loss covers only the assistant's"));
            }
            Some(says) => is_trained &= says,
            None => return refused(format!("has a {key:?} that is neither 0 nor 1, and neither false nor true")),
        }
    }
    Ok(is_trained)
}

/// The message with its thoughts under each name that a template may have for them, as `transformers` gives them.
fn with_thoughts(message: Map<String, Json>) -> Map<String, Json> {
    let thoughts = THOUGHTS.iter().find_map(|key| message.get(*key)).cloned();
    let Some(thoughts) = thoughts else {
        return message;
    };
    let mut with = Map::new();
    with.insert("thinking".to_owned(), thoughts.clone());
    with.extend(message);
    with.insert("reasoning_content".to_owned(), thoughts);
    with
}

/// Refuses values beside the messages that `apply_chat_template` would refuse.
fn check_beside(name: &str, value: &Json) -> Result<(), ChatRefusal> {
    let hint = "write a list of objects, as apply_chat_template takes it, or leave such rows out: skip_invalid";
    let is_objects = || value.as_array().is_some_and(|items| items.iter().all(Json::is_object));
    if ["tools", "documents"].contains(&name) && !is_objects() {
        return Err(ChatRefusal::of_chat(format!("{name:?} next to the messages is not a list of objects"), hint));
    }
    if let Some(at) = Known::nul(value) {
        let what = format!("{name:?} next to the messages has a NUL at byte {at}, so this is probably not text");
        return Err(ChatRefusal::of_chat(what, hint));
    }
    Ok(())
}
