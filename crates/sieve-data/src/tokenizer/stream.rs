//! Decoding token by token, for text that is shown while it is generated.

use super::{Tokenizer, is_byte_token};
use crate::error::DataError;

/// Turns ids into text as they arrive. A character whose bytes lie in several tokens is held back until it is whole,
/// and a run of tokens of one byte each (`<0x0A>`, of Llama's and Gemma's tokenizers) until it ends: one bad byte in
/// such a run makes U+FFFD of every byte in it.
///
/// Special tokens give no text. All pieces together are what [`Tokenizer::decode`] gives for all ids.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The ids of the last piece, which set the context (some tokenizers treat a first token differently), then the
    /// ids whose text is not shown yet, or not all of it.
    ids: Vec<u32>,
    num_context: usize,
    /// Bytes of the text of `ids` that were shown.
    num_shown: usize,
}

/// Ids kept while the text ends inside a character. More of them are a long run of bytes outside UTF-8.
const MAX_PENDING: usize = 64;
/// Ids kept of such a run. A character has at most four bytes, so earlier ids do not change how the last bytes decode.
const PENDING_TAIL: usize = 8;

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            ids: Vec::new(),
            num_context: 0,
            num_shown: 0,
        }
    }

    /// Takes one more id and gives the text that no later id can change, possibly none.
    ///
    /// # Errors
    /// An id that the tokenizer cannot express.
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

    /// Ends the stream and returns what was held back; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// Ids that the tokenizer cannot express.
    pub fn finish(self) -> Result<String, DataError> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(text.get(self.num_shown..).unwrap_or_default().to_owned())
    }
}
