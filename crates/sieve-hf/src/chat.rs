//! The chat template of a model in the Hugging Face layout: the text that a chat's messages become.
//!
//! A template is a Jinja program in the model's folder. It is rendered as `apply_chat_template` of `transformers`
//! renders it: the same files, options, functions and variables, and values printed as Python prints them. One thing
//! differs: a dictionary that a template itself writes is in the order of its keys.

mod answers;
mod python;

use crate::export::tokenizer_files::{self, Templates};
use crate::{Checkpoint, CheckpointError};
use answers::Marked;
use minijinja::value::{Enumerator, Object};
use minijinja::{Environment, Error, ErrorKind, Value};
use sieve_core::{Recipe, ShownPath};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Instructions that a template may execute: a chat needs thousands, an endless loop has no end.
const MOST_INSTRUCTIONS: u64 = 50_000_000;

/// One message of a chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatMessage<'a> {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: &'a str,
    /// The message.
    pub content: &'a str,
}

/// A model's chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    /// The Jinja program.
    text: String,
    /// Names and texts of special tokens, such as `bos_token`.
    special_tokens: serde_json::Map<String, serde_json::Value>,
    /// The folder that holds the template.
    folder: PathBuf,
}

impl ChatTemplate {
    /// The chat template of the model that [`load_model`](crate::load_model) would load; `None` if it has none. A
    /// model that was trained from an import has the import's.
    ///
    /// # Errors
    /// No checkpoint in the folder; a file that cannot be read; several templates without a default one.
    pub fn of_model(path: &Path) -> Result<Option<Self>, CheckpointError> {
        if crate::loaded_model::is_of_transformers(path) {
            return Self::read(path);
        }
        let checkpoint = Checkpoint::peek(path)?;
        let (recipe, _) = checkpoint.recipe_and_shape()?;
        Self::read(&tokenizer_files::folder(&checkpoint.path, &recipe))
    }

    /// The chat template in the folder of a `tokenizer.json`; `None` if it has none.
    ///
    /// # Errors
    /// A file that cannot be read; several templates without a default one.
    pub fn beside(tokenizer: &Path) -> Result<Option<Self>, CheckpointError> {
        Self::read(tokenizer.parent().unwrap_or(Path::new("")))
    }

    /// The chat template that a checkpoint whose recipe is `recipe` trains with: an import's, or the one beside the
    /// recipe's tokenizer; `None` if it has none.
    ///
    /// # Errors
    /// As [`beside`](Self::beside).
    pub fn of_checkpoint(checkpoint: &Checkpoint, recipe: &Recipe) -> Result<Option<Self>, CheckpointError> {
        Self::read(&tokenizer_files::folder(&checkpoint.path, recipe))
    }

    /// A text that differs where the template or its special tokens differ.
    pub fn source(&self) -> String {
        let special_tokens = serde_json::Value::Object(self.special_tokens.clone());
        format!("{special_tokens}\n{}", self.text)
    }

    /// The default chat template in a folder of `transformers`; `None` in a folder without any template.
    fn read(folder: &Path) -> Result<Option<Self>, CheckpointError> {
        let templates = Templates::read(folder)?;
        let Some(text) = templates.default() else {
            return match templates.names() {
                names if names.is_empty() => Ok(None),
                names => Err(CheckpointError::refused(
                    format!("{} has chat templates for {names}, and none by default", folder.shown()),
                    "copy the one that is meant to chat_template.jinja in this folder",
                )),
            };
        };
        let special_tokens = tokenizer_files::special_tokens(folder)?;
        Ok(Some(Self { text: text.to_owned(), special_tokens, folder: folder.to_owned() }))
    }

    /// Refuses a template that is not valid Jinja.
    ///
    /// # Errors
    /// That one.
    pub fn check(&self) -> Result<(), CheckpointError> {
        let (text, _) = answers::with_generation_filter(&self.text);
        environment().template_from_named_str("chat_template", &text).map(|_| ()).map_err(|error| self.failed(&error))
    }

    /// The error of a template that is not valid, or refuses messages.
    fn failed(&self, error: &Error) -> CheckpointError {
        // Without the debug feature this is one line: kind, detail, place.
        let what = format!("{}: the chat template cannot be applied: {error}", self.folder.shown());
        let hint = match error.kind() {
            ErrorKind::SyntaxError => "correct the template, or take the one that was published with the model",
            _ => {
                "change the messages (some templates take no system message), or write the text of the chat yourself, \
                 without the template"
            }
        };
        CheckpointError::refused(what, hint)
    }

    /// The text that ends where the model's answer to `messages` begins.
    ///
    /// # Errors
    /// A template that is not valid Jinja, or refuses these messages.
    pub fn render(&self, messages: &[ChatMessage<'_>]) -> Result<String, CheckpointError> {
        let begins_answer = true;
        Ok(self.marked(messages, begins_answer).map_err(|error| self.failed(&error))?.0)
    }

    /// The text of `messages`, with the beginning of an answer behind them if `begins_answer`, and the bytes of its
    /// `{% generation %}` blocks.
    fn marked(&self, messages: &[ChatMessage<'_>], begins_answer: bool) -> Result<Marked, Error> {
        answers::check(messages)?;
        let (text, _) = answers::with_generation_filter(&self.text);
        let environment = environment();
        let template = environment.template_from_named_str("chat_template", &text)?;
        let special_tokens = self.special_tokens.iter();
        let mut variables: BTreeMap<&str, Value> =
            special_tokens.map(|(name, token)| (name.as_str(), Value::from_serialize(token))).collect();
        let messages = messages.iter().map(|message| Value::from_object(Message::from(*message)));
        variables.extend([
            ("messages", messages.collect()),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(begins_answer)),
        ]);
        Ok(answers::take_marks(&template.render(variables)?))
    }
}

/// A message as a template sees it: a dictionary that keeps its order.
#[derive(Debug)]
struct Message {
    role: String,
    content: String,
}

impl From<ChatMessage<'_>> for Message {
    fn from(message: ChatMessage<'_>) -> Self {
        Self { role: message.role.to_owned(), content: message.content.to_owned() }
    }
}

impl Object for Message {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str()? {
            "role" => Some(Value::from(self.role.as_str())),
            "content" => Some(Value::from(self.content.as_str())),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Str(&["role", "content"])
    }
}

/// Jinja with the options and functions that `transformers` gives its templates.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(MOST_INSTRUCTIONS));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, state, value| match python::printed(value) {
        Some(text) => Ok(out.write_str(&text)?),
        None => minijinja::escape_formatter(out, state, value),
    });
    environment.add_filter("tojson", python::json);
    environment.add_filter("title", python::title);
    environment.add_filter(answers::filter(), |text: String| answers::marked(&text));
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
        let mut text = String::new();
        write!(text, "{}", chrono::Local::now().format(&format))
            .map_err(|_| Error::new(ErrorKind::InvalidOperation, format!("{format:?} is no format of a time")))?;
        Ok(text)
    });
    environment
}

#[cfg(test)]
mod tests;
