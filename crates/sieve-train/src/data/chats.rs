//! The chat template of a recipe's tokenizer, for text whose rows are chats.
use super::tokenizer_file;
use crate::TrainError;
use sieve_core::recipe::TokenizerSource;
use sieve_core::{Recipe, ShownPath};
use sieve_data::{ChatError, ChatFormat, ChatText, Surroundings};
use sieve_hf::{ChatTemplate, Checkpoint};
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_128;

/// A chat template as the data reads it.
#[derive(Debug)]
struct Template(ChatTemplate);

impl ChatFormat for Template {
    fn columns(&self) -> Vec<String> {
        self.0.variables()
    }

    fn text(&self, row: &str) -> Result<ChatText, ChatError> {
        let row = serde_json::from_str::<serde_json::Map<_, _>>(row);
        let mut row = row.map_err(|error| ChatError {
            what: error.to_string(),
            hint: "correct the row, or leave such rows out: skip_invalid".to_owned(),
            is_of_template: false,
        })?;
        let messages = row.shift_remove("messages").unwrap_or_default();
        let found = self.0.read_chat(messages, row.into_iter().collect()).and_then(|chat| self.0.answers(&chat));
        let (text, answers) = found.map_err(|refusal| ChatError {
            what: refusal.of_row(),
            hint: refusal.hint_of_row(),
            is_of_template: refusal.is_of_template,
        })?;
        Ok(ChatText { text, answers })
    }

    fn hash(&self) -> u128 {
        xxh3_128(self.0.source().as_bytes())
    }

    fn marks_answers(&self) -> bool {
        self.0.marks_answers()
    }
}

/// What makes texts of chats by a recipe's [`chat_template`]; `None` for a recipe whose text is no chats.
///
/// # Errors
/// Those of [`chat_template`].
pub fn chat_format(
    recipe: &Recipe,
    checkpoint: Option<&Checkpoint>,
    around: &Surroundings<'_>,
) -> Result<Option<Arc<dyn ChatFormat>>, TrainError> {
    Ok(chat_template(recipe, checkpoint, around)?.map(chat_format_of))
}

/// What makes texts of chats by this template.
pub fn chat_format_of(template: ChatTemplate) -> Arc<dyn ChatFormat> {
    Arc::new(Template(template))
}

/// The chat template of the recipe's tokenizer, or of the checkpoint that the run begins with; `None` for a recipe
/// whose text is no chats.
///
/// # Errors
/// A tokenizer whose folder has no chat template; a template file that cannot be read.
pub fn chat_template(
    recipe: &Recipe,
    checkpoint: Option<&Checkpoint>,
    around: &Surroundings<'_>,
) -> Result<Option<ChatTemplate>, TrainError> {
    if recipe.data.messages_column.is_none() {
        return Ok(None);
    }
    let TokenizerSource::Path(path) = recipe.tokenizer.source() else {
        return Err(no_template(Path::new("the recipe's tokenizer")));
    };
    let path = tokenizer_file(path, around)?;
    let mut found = ChatTemplate::beside(&path)?;
    if let (None, Some(checkpoint)) = (&found, checkpoint) {
        found = ChatTemplate::of_checkpoint(checkpoint, recipe)?;
    }
    found.ok_or_else(|| no_template(path.parent().unwrap_or(Path::new("")))).map(Some)
}

/// The error of a tokenizer's folder without a chat template.
fn no_template(folder: &Path) -> TrainError {
    let what = format!("{} has no chat template, which data.messages_column needs", folder.shown());
    let hint = "put the model's chat_template.jinja and tokenizer_config.json next to its tokenizer.json, as hf \
        download OWNER/NAME --include 'tokenizer*' 'chat_template*' --local-dir DIR does";
    TrainError::refused(what, hint)
}

#[cfg(test)]
mod tests;
