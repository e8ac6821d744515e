//! Decoding token by token, for text that is shown while it is generated.

use super::Tokenizer;
use crate::error::DataError;

/// Turns ids into text as they arrive. A character whose bytes lie in several tokens is held back until it is whole.
///
/// Special tokens give no text. All pieces together equal [`Tokenizer::decode`] of all ids (except that in a run of
/// more than 16 tokens of invalid UTF-8 replacement characters may be placed differently).
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The ids of the last piece, as context (some tokenizers treat a first token differently), then those not yet
    /// returned.
    ids: Vec<u32>,
    num_context: usize,
}

/// Tokens held back at most. A character has at most four bytes, so more means that the bytes are not UTF-8.
const MAX_PENDING: usize = 16;

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            ids: Vec::new(),
            num_context: 0,
        }
    }

    /// Adds one id and returns the text that is now complete, possibly empty.
    ///
    /// # Errors
    /// An id that the tokenizer cannot express.
    pub fn push(&mut self, id: u32) -> Result<String, DataError> {
        self.ids.push(id);
        let text = self.pending_text()?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && self.ids.len() - self.num_context <= MAX_PENDING {
            return Ok(String::new());
        }
        if !text.is_empty() {
            self.ids.drain(..self.num_context);
            self.num_context = self.ids.len();
        }
        Ok(text)
    }

    /// Ends the stream and returns what was held back; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// Ids that the tokenizer cannot express.
    pub fn finish(self) -> Result<String, DataError> {
        self.pending_text()
    }

    /// The text behind the context.
    fn pending_text(&self) -> Result<String, DataError> {
        let context = self.tokenizer.decode(&self.ids[..self.num_context])?;
        let mut text = self.tokenizer.decode(&self.ids)?;
        // Shorter only while an unfinished character hides some of the context; nothing is whole then.
        if !text.is_char_boundary(context.len()) {
            return Ok(char::REPLACEMENT_CHARACTER.to_string());
        }
        Ok(text.split_off(context.len()))
    }
}
