//! What the readers of all formats share: the documents of a file, the checks on their text, the hints.

use std::path::Path;

use serde_json::{Map, Value};
use sieve_core::ShownPath;

use crate::chat::MESSAGES;
use crate::error::DataError;

/// The documents of one file, in order.
///
/// An error for which [`DataError::is_invalid_document`] holds concerns that document alone: the next call returns the
/// next document. After any other error the source is not used again.
pub(in crate::corpus) trait DocumentSource: Send {
    /// The next document's text and line, or `None` at the end.
    fn next_document(&mut self) -> Option<Result<(String, u64), DataError>>;

    /// The share of the file that was read; the file has about `num_bytes`, unpacked.
    fn share_read(&self, num_bytes: u64) -> f64;
}

/// What a column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holds {
    Text,
    /// A list of messages. The document's text is the JSON of [`chat_of`].
    Messages,
}

pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// The JSON of a chat, as [`ChatFormat::text`](crate::ChatFormat::text) takes it: its messages, and what is beside
/// them.
pub(super) fn chat_of(messages: Value, beside: Map<String, Value>) -> String {
    let mut chat = beside;
    chat.insert(MESSAGES.to_owned(), messages);
    Value::Object(chat).to_string()
}

/// Refuses a document of more than `max_bytes`.
pub(super) fn check_size(path: &Path, bytes: u64, max_bytes: u64) -> Result<(), DataError> {
    if bytes > max_bytes {
        let what = format!("a document of {bytes} bytes is over the limit of {max_bytes}");
        let hint = "raise data.max_document_bytes, split the document, or leave such documents out: \
            data.skip_invalid (eval ppl: --skip-invalid); a text file that a path names by itself may be larger";
        return Err(DataError::document(path, what, hint));
    }
    Ok(())
}

/// Refuses text that begins with a byte order mark of UTF-32 or UTF-16.
pub(super) fn check_encoding(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    // UTF-32 comes first, because its little-endian mark begins with UTF-16's.
    let marks: [(&[u8], _, _); 4] = [
        (b"\xFF\xFE\0\0", "UTF-32", "four"),
        (b"\0\0\xFE\xFF", "UTF-32", "four"),
        (b"\xFF\xFE", "UTF-16", "two"),
        (b"\xFE\xFF", "UTF-16", "two"),
    ];
    if let Some((_, name, count)) = marks.iter().find(|(mark, ..)| bytes.starts_with(mark)) {
        let what = format!("{name}, by its first {count} bytes; text is read as UTF-8");
        let path_shown = path.shown();
        let hint = format!(
            "iconv -f {name} -t UTF-8 {path_shown} > NEW.txt, or leave such documents out: skip_invalid \
             (eval ppl: --skip-invalid)"
        );
        return Err(DataError::document(path, what, hint));
    }
    Ok(())
}

/// The bytes of a file from `offset` on, as UTF-8 text.
pub(super) fn check_utf8<'a>(path: &Path, bytes: &'a [u8], offset: u64) -> Result<&'a str, DataError> {
    std::str::from_utf8(bytes).map_err(|error| {
        let what = format!("not UTF-8 at byte {}", offset + error.valid_up_to() as u64);
        let hint = "convert the file, or leave such documents out: skip_invalid (eval ppl: --skip-invalid)";
        DataError::document(path, what, hint)
    })
}

/// The error of a document whose text has a NUL at this byte.
pub(super) fn nul_byte(path: &Path, offset: usize) -> DataError {
    let what = format!("NUL at byte {offset} of the text, so this is probably not text");
    let hint = "leave the file out, or all such documents: skip_invalid (eval ppl: --skip-invalid)";
    DataError::document(path, what, hint)
}

impl Holds {
    /// The error of a column that holds something else in `row`, as "line 3"; `found` names its type, as "a number".
    pub(super) fn not_in_column(self, path: &Path, row: &str, column: &str, found: &str) -> DataError {
        let wanted = match self {
            Self::Text => "a string",
            Self::Messages => "a list of messages",
        };
        let what = format!("{row}: column {column:?} is {found}, not {wanted}");
        DataError::document(path, what, self.set_column_or_skip())
    }

    /// The hint about a file that has these columns and lacks the named one: `usual`, or one about what the columns'
    /// names say the rows are: chats, or questions and answers.
    pub(super) fn set_column_of<'a>(self, columns: impl Iterator<Item = &'a str>, usual: &'static str) -> &'static str {
        let columns: Vec<_> = columns.filter_map(|column| column.split('.').next()).collect();
        let has = |name: &&str| columns.contains(name);
        if self == Self::Text && has(&"messages") {
            SET_MESSAGES_OF_CHATS
        } else if QUESTIONS.iter().any(has) && ANSWERS.iter().any(has) {
            SET_QUESTIONS
        } else {
            usual
        }
    }

    /// The hint about a row without the column.
    pub(super) fn set_column_or_skip(self) -> &'static str {
        match self {
            Self::Text => SET_COLUMN_OR_SKIP,
            Self::Messages => SET_MESSAGES_OR_SKIP,
        }
    }
}

/// Hints about a text column that is missing or holds no text, for a file and for one document.
pub(super) const SET_COLUMN: &str = "name the column that holds the text: --set data.text_column=NAME with a recipe, \
    --text-column NAME without (the prompt's: data.prompt_column)";
pub(super) const SET_COLUMN_OR_SKIP: &str = "name the column that holds the text: --set data.text_column=NAME with a \
    recipe, --text-column NAME without (the prompt's: data.prompt_column), or leave such rows out: skip_invalid \
    (eval ppl: --skip-invalid)";
pub(super) const SET_MESSAGES_OF_CHATS: &str = "chats are for a model with a chat template: sieve import --from MODEL \
    --data FILE --set data.messages_column=messages writes a recipe that trains it on them (a new model takes that key \
    too, and a tokenizer.path in a folder with a template; eval ppl takes a --checkpoint with one). Else name the \
    column that holds the text: --set data.text_column=NAME";
/// Names that columns of questions and of answers have in public data sets.
const QUESTIONS: [&str; 5] = ["prompt", "question", "instruction", "query", "input"];
const ANSWERS: [&str; 6] = ["completion", "answer", "output", "response", "chosen", "target"];
pub(super) const SET_QUESTIONS: &str = "these rows look like questions and answers: --set data.prompt_column=NAME \
    names the question's column and --set data.text_column=NAME the answer's, without messages_column (a third column, \
    such as Alpaca's input, is to be joined to the question)";
pub(super) const SET_MESSAGES: &str = "name the column that holds lists of messages: data.messages_column";
pub(super) const SET_MESSAGES_OR_SKIP: &str = "name the column that holds lists of messages: data.messages_column, or \
    leave such rows out: skip_invalid";
