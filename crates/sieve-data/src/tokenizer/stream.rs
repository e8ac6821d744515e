//! Decodes token by token, for text that is shown while it is generated.

use super::{Tokenizer, is_byte_token};
use crate::error::DataError;

/// Decodes the ids that continue a prompt one by one. Text that later ids can change is held back: a character until
/// all of its bytes are there, and a run of byte tokens (`<0x0A>`, in Llama's and Gemma's tokenizers) until it ends,
/// because one invalid byte in the run turns every byte of it into U+FFFD.
///
/// Special tokens have no text. The texts returned for all ids, concatenated, are what [`Tokenizer::decode`] of prompt
/// and ids has behind the text of the prompt: many decoders drop the first space of a text, so a continuation that is
/// decoded alone would lose its own.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Ids whose text was returned or belongs to the prompt, then the ids whose text was not returned, or only in part.
    ids: Vec<u32>,
    /// The text of `ids` that was returned or belongs to the prompt.
    shown: String,
}

/// The most ids kept while the text ends inside a character. More ids mean a long run of bytes that are not UTF-8.
const MAX_PENDING: usize = 64;
/// Ids kept of a longer run. A character has at most four bytes, so earlier ids do not change how the last bytes
/// decode.
const PENDING_TAIL: usize = 8;
/// Ids in front of the next one that are decoded with it, so that it is not the first of its text. Most decoders need
/// only one such id.
const CONTEXT: usize = 8;
/// The most ids in front of the next one, where all nearer ones are blank: a decoder may strip several spaces from the
/// beginning of a text.
const MAX_CONTEXT: usize = 256;

impl<'a> DecodeStream<'a> {
    /// A stream whose first id follows `prompt`.
    pub(super) fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Self, DataError> {
        let mut stream = Self { tokenizer, ids: Vec::new(), shown: String::new() };
        stream.ids = prompt.iter().copied().filter(|&id| tokenizer.text_token(id).is_some()).collect();
        stream.forget()?;
        Ok(stream)
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
        let whole = text.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(&text);
        let piece = behind(whole, &self.shown).to_owned();
        if !piece.is_empty() {
            whole.clone_into(&mut self.shown);
        }
        if whole.len() == text.len() {
            if !piece.is_empty() {
                self.forget()?;
            }
        } else if self.ids.len() > MAX_PENDING {
            // A character or run that is unfinished after so many ids: only its last ids stay, with as many bytes held
            // back as before.
            let held_back = behind(&text, &self.shown).len();
            self.ids.drain(..self.ids.len() - PENDING_TAIL);
            self.shown = self.tokenizer.decode(&self.ids)?;
            let end = self.shown.len().saturating_sub(held_back);
            self.shown.truncate(self.shown.floor_char_boundary(end));
        }
        Ok(piece)
    }

    /// Ends the stream and returns the text held back; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// Ids that the tokenizer cannot decode.
    pub fn finish(self) -> Result<String, DataError> {
        self.held_back()
    }

    /// The text that is held back now, as it is if no id follows.
    ///
    /// # Errors
    /// Ids that the tokenizer cannot decode.
    pub fn held_back(&self) -> Result<String, DataError> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(behind(&text, &self.shown).to_owned())
    }

    /// The tokenizer that decodes.
    pub fn tokenizer(&self) -> &'a Tokenizer {
        self.tokenizer
    }

    /// Forgets ids when the text of all ids has been returned, but the last ids, which the next id is decoded with.
    fn forget(&mut self) -> Result<(), DataError> {
        // A run of byte tokens at the end is decoded together with the byte tokens that follow.
        let is_byte = |id: &&u32| self.tokenizer.text_token(**id).is_some_and(|token| is_byte_token(&token));
        let run = self.ids.iter().rev().take_while(is_byte).count();
        let mut num_kept = run + CONTEXT;
        loop {
            let first = self.ids.len().saturating_sub(num_kept);
            self.shown = self.tokenizer.decode(&self.ids[first..])?;
            let has_words = self.shown.contains(|c: char| !c.is_whitespace());
            if first == 0 || has_words || num_kept > run + MAX_CONTEXT {
                self.ids.drain(..first);
                return Ok(());
            }
            num_kept *= 2;
        }
    }
}

/// What `text` has behind the beginning that it shares with `shown`. That is all of `shown`, unless the prompt ends
/// inside a character or a run of byte tokens that the continuation changes.
fn behind<'t>(text: &'t str, shown: &str) -> &'t str {
    if let Some(rest) = text.strip_prefix(shown) {
        return rest;
    }
    let same = text.chars().zip(shown.chars()).take_while(|(one, other)| one == other);
    &text[same.map(|(c, _)| c.len_utf8()).sum()..]
}
