//! Decodes token by token, for text that is shown while it is generated.

use super::{Tokenizer, is_byte_token};
use crate::error::DataError;

/// Decodes ids one by one. Text that later ids can change is held back: a character until all of its bytes are there,
/// and a run of byte tokens (`<0x0A>`, in Llama's and Gemma's tokenizers) until it ends, because one invalid byte in
/// the run turns every byte of it into U+FFFD.
///
/// Special tokens have no text. The texts returned for all ids, concatenated, equal [`Tokenizer::decode`] of all ids.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// `num_context` ids whose text was returned, then the ids whose text was not, or only in part. The former are kept
    /// because some tokenizers decode the first token of a text differently.
    ids: Vec<u32>,
    num_context: usize,
    /// Number of bytes of the text of `ids` that were returned.
    num_shown: usize,
}

/// The most ids kept while the text ends inside a character. More ids mean a long run of bytes that are not UTF-8.
const MAX_PENDING: usize = 64;
/// Ids kept of a longer run. A character has at most four bytes, so earlier ids do not change how the last bytes
/// decode.
const PENDING_TAIL: usize = 8;

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), num_context: 0, num_shown: 0 }
    }

    /// Takes the next id and returns the text that later ids cannot change any more, which may be empty.
    ///
    /// # Errors
    /// An id that the tokenizer cannot decode.
    pub fn push(&mut self, id: u32) -> Result<String, DataError> {
        let Some(token) = self.tokenizer.text_token(id) else {
            return Ok(String::new());
        };
        self.ids.push(id);
        if is_byte_token(&token) {
            return Ok(String::new());
        }
        let text = self.tokenizer.decode(&self.ids)?;
        // An unfinished character at the end decodes as one U+FFFD.
        let num_whole = text.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(&text).len();
        let piece = text.get(self.num_shown..num_whole).unwrap_or_default().to_owned();
        self.num_shown += piece.len();
        if num_whole == text.len() {
            if !piece.is_empty() {
                self.ids.drain(..self.num_context);
                self.num_context = self.ids.len();
                self.num_shown = self.tokenizer.decode(&self.ids)?.len();
            }
        } else if self.ids.len() > MAX_PENDING {
            self.ids.drain(..self.ids.len() - PENDING_TAIL);
            self.num_context = 0;
            let held_back = text.len() - self.num_shown;
            self.num_shown = self.tokenizer.decode(&self.ids)?.len().saturating_sub(held_back);
        }
        Ok(piece)
    }

    /// Ends the stream and returns the text held back; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// Ids that the tokenizer cannot decode.
    pub fn finish(self) -> Result<String, DataError> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(text.get(self.num_shown..).unwrap_or_default().to_owned())
    }
}
