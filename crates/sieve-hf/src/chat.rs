//! The chat template of a model in the Hugging Face layout: the text that a chat's messages become.
//!
//! A template is a Jinja program in the model's folder. It is rendered as `apply_chat_template` of `transformers`
//! renders it: the same files, options, functions and variables, and values printed as Python prints them.

mod answers;
mod jinja;
mod reader;

pub use reader::{Chat, ChatRefusal};

use crate::export::tokenizer_files::{self, Templates};
use crate::{Checkpoint, CheckpointError};
use jinja::{Budget, Fallible, Fault, FaultKind, Input, Mark, Program};
use serde_json::{Value as Json, json};
use sieve_core::{Recipe, ShownPath};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Changes whenever the same template and chat may give other tokens or labels than before.
const READING: u32 = 2;

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
    /// The Jinja program as it is written.
    text: String,
    /// The program, once it was read.
    program: Arc<OnceLock<Fallible<Program>>>,
    /// Names and texts of special tokens, such as `bos_token`.
    special_tokens: serde_json::Map<String, Json>,
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
        if crate::odd_folders::is_of_transformers(path) {
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

    /// A text that differs where the template, its special tokens or the way that chats are read differ.
    pub fn source(&self) -> String {
        let special_tokens = Json::Object(self.special_tokens.clone());
        format!("{READING}\n{special_tokens}\n{}", self.text)
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
        let program = Arc::default();
        Ok(Some(Self { text: text.to_owned(), program, special_tokens, folder: folder.to_owned() }))
    }

    /// Refuses a template that is not valid Jinja.
    ///
    /// # Errors
    /// That one.
    pub fn check(&self) -> Result<(), CheckpointError> {
        self.program().map(|_| ()).map_err(|fault| self.failed(&fault))
    }

    /// The program, which is read once.
    fn program(&self) -> Fallible<&Program> {
        let read = || jinja::on_own_stack(|| Program::parse(&self.text));
        self.program.get_or_init(read).as_ref().map_err(Clone::clone)
    }

    /// The error of a template that is not valid, or refuses messages.
    fn failed(&self, fault: &Fault) -> CheckpointError {
        let hint = match fault.kind {
            FaultKind::Template | FaultKind::Limit => {
                "correct the template, or take the one that was published with the model"
            }
            FaultKind::Messages => {
                "change the messages (some templates take no system message), or write the text of the chat yourself, \
                 without the template"
            }
        };
        CheckpointError::refused(format!("{}: {}", self.folder.shown(), words(fault)), hint)
    }

    /// The text that ends where the model's answer to `messages` begins.
    ///
    /// # Errors
    /// A template that is not valid Jinja, or refuses these messages.
    pub fn render(&self, messages: &[ChatMessage<'_>]) -> Result<String, CheckpointError> {
        let object = |message: &ChatMessage<'_>| json!({"role": message.role, "content": message.content});
        let chat = Chat::of_messages(messages.iter().map(object).collect());
        self.question(&chat).map_err(|fault| self.failed(&fault))
    }

    /// The text that ends where the model's answer to `chat` begins.
    ///
    /// # Errors
    /// As [`render`](Self::render), in words that name no folder.
    pub fn render_chat(&self, chat: &Chat) -> Result<String, String> {
        self.question(chat).map_err(|fault| words(&fault))
    }

    /// The text of all messages and the beginning of an answer, rendered on a stack of its own and within a budget of
    /// its own.
    fn question(&self, chat: &Chat) -> Fallible<String> {
        let program = self.program()?;
        let (text, _) = jinja::on_own_stack(|| {
            let [begins_answer, needs_marks] = [true, false];
            let budget = Budget::until(Budget::end_from_now());
            self.rendered(program, chat, chat.messages(), [begins_answer, needs_marks], &budget)
        })?;
        Ok(text)
    }

    /// The text of some messages of a chat, with the beginning of an answer behind them if `begins_answer`, and what
    /// its `{% generation %}` blocks wrote, which must be found if `needs_marks`.
    fn rendered(
        &self,
        program: &Program,
        chat: &Chat,
        messages: &[Json],
        [begins_answer, needs_marks]: [bool; 2],
        budget: &Budget,
    ) -> Fallible<(String, Vec<Mark>)> {
        let given = ["tools", "documents"].map(|name| (name, &Json::Null));
        let special_tokens = self.special_tokens.iter().map(|(name, token)| (name.as_str(), token));
        let variables = special_tokens.chain(given).chain(chat.beside()).collect::<Vec<_>>();
        program.render(Input { messages, variables: &variables, begins_answer, needs_marks }, budget)
    }
}

/// A fault as a sentence.
fn words(fault: &Fault) -> String {
    format!("the chat template cannot be applied: {fault}")
}

#[cfg(test)]
mod tests;
