//! Chats: rows whose column holds a list of messages, which a model's template makes into one text.

use std::fmt::Debug;
use std::ops::Range;

/// The key of the messages in the JSON of a chat, whatever their column is called.
pub(crate) const MESSAGES: &str = "messages";

/// The text of a chat.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatText {
    /// All messages, as the template writes them.
    pub text: String,
    /// The bytes of `text` that the assistant writes and that are trained on, in order; they do not overlap.
    pub answers: Vec<Range<usize>>,
}

/// Why a chat cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatError {
    /// What is wrong, in words.
    pub what: String,
    /// How to mend it.
    pub hint: String,
    /// Whether no other chat would fare better: the template is at fault.
    pub is_of_template: bool,
}

/// Makes one text of the messages of a chat.
pub trait ChatFormat: Debug + Send + Sync {
    /// Columns beside the messages that are read where a row has them, such as `tools`.
    fn columns(&self) -> Vec<String>;

    /// The text of a chat, and where the assistant speaks. `row` is the JSON of an object: the list `messages`, and the
    /// values of the row in [`columns`](Self::columns).
    ///
    /// # Errors
    /// Messages that are not valid; a template that refuses them, or does not say where the assistant speaks.
    fn text(&self, row: &str) -> Result<ChatText, ChatError>;

    /// A hash of everything that the texts depend on.
    fn hash(&self) -> u128;

    /// Whether the template itself says where the assistant speaks; else that follows from what each message adds to
    /// the text of the messages before it.
    fn marks_answers(&self) -> bool;
}
