//! Decodes token by token, for text that is shown while it is generated.

use super::token_bytes::TokenBytes;
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
    form: Form<'a>,
}

/// What a stream keeps of its ids.
#[derive(Debug)]
enum Form<'a> {
    /// Bytes that later ones may make a character of, where each token stands for bytes.
    Bytes(Pending<'a>),
    /// Ids that later ones are decoded with, by any other decoder.
    Ids(Ids<'a>),
}

/// Bytes behind the last whole character.
#[derive(Debug)]
struct Pending<'a> {
    of_tokens: &'a TokenBytes,
    bytes: Vec<u8>,
    /// Whether `bytes` begin in the prompt, whose text ends with U+FFFD in their place.
    begin_in_prompt: bool,
}

/// The most bytes of a character that is not whole.
const MOST_UNFINISHED: usize = 3;

impl<'a> Pending<'a> {
    /// Begins with the bytes at the prompt's end that are not a whole character yet, at most [`MOST_UNFINISHED`].
    fn new(of_tokens: &'a TokenBytes, prompt: &[u32]) -> Self {
        let mut tail = Vec::new();
        for &id in prompt.iter().rev() {
            tail.splice(..0, of_tokens.of_id(id).iter().copied());
            if tail.len() >= MOST_UNFINISHED {
                break;
            }
        }
        let last = &tail[tail.len().saturating_sub(MOST_UNFINISHED)..];
        let unfinished = (0..last.len()).map(|at| &last[at..]).find(|bytes| is_unfinished(bytes));
        let bytes = unfinished.unwrap_or_default().to_vec();
        Self { of_tokens, begin_in_prompt: !bytes.is_empty(), bytes }
    }

    /// Takes an id and returns the characters that its bytes complete, with U+FFFD for bytes that are none. Bytes that
    /// begin in the prompt get none: its text has one for them already.
    fn push(&mut self, id: u32) -> String {
        self.bytes.extend(self.of_tokens.of_id(id));
        let (mut text, mut num_read, mut num_kept) = (String::new(), 0, 0);
        for chunk in self.bytes.utf8_chunks() {
            text += chunk.valid();
            let invalid = chunk.invalid();
            num_read += chunk.valid().len() + invalid.len();
            // Only the last bytes can still become a character.
            if num_read == self.bytes.len() && is_unfinished(invalid) {
                num_kept = invalid.len();
                break;
            }
            let is_of_prompt = self.begin_in_prompt && text.is_empty();
            if !invalid.is_empty() && !is_of_prompt {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            self.begin_in_prompt = false;
        }
        self.begin_in_prompt &= text.is_empty();
        self.bytes.drain(..self.bytes.len() - num_kept);
        text
    }

    fn held_back(&self) -> String {
        if self.bytes.is_empty() || self.begin_in_prompt { String::new() } else { char::REPLACEMENT_CHARACTER.into() }
    }
}

/// Whether bytes are the beginning of one character, which further bytes may complete.
fn is_unfinished(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
}

/// Ids of a decoder whose tokens are not bytes.
#[derive(Debug)]
struct Ids<'a> {
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
        let form = match tokenizer.byte_table() {
            Some(of_tokens) => Form::Bytes(Pending::new(of_tokens, prompt)),
            None => Form::Ids(Ids::new(tokenizer, prompt)?),
        };
        Ok(Self { tokenizer, form })
    }

    /// Takes the next id and returns the text that later ids cannot change any more, which may be empty.
    ///
    /// # Errors
    /// An id that the tokenizer cannot decode.
    pub fn push(&mut self, id: u32) -> Result<String, DataError> {
        match &mut self.form {
            Form::Bytes(pending) => Ok(pending.push(id)),
            Form::Ids(ids) => ids.push(id),
        }
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
        match &self.form {
            Form::Bytes(pending) => Ok(pending.held_back()),
            Form::Ids(ids) => ids.held_back(),
        }
    }

    /// The tokenizer that decodes.
    pub fn tokenizer(&self) -> &'a Tokenizer {
        self.tokenizer
    }
}

impl<'a> Ids<'a> {
    fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Self, DataError> {
        let mut stream = Self { tokenizer, ids: Vec::new(), shown: String::new() };
        stream.ids = prompt.iter().copied().filter(|&id| tokenizer.text_token(id).is_some()).collect();
        stream.forget()?;
        Ok(stream)
    }

    /// Takes an id and returns the text that is complete now and that `shown`, of the ids before it, lacks. A byte
    /// token returns none: its run waits for the next other token.
    fn push(&mut self, id: u32) -> Result<String, DataError> {
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
            // A character, or a run of bytes that are not UTF-8, that is unfinished after so many ids: only its last
            // ids stay, with as many bytes held back as before.
            let held_back = behind(&text, &self.shown).len();
            self.ids.drain(..self.ids.len() - PENDING_TAIL);
            self.shown = self.tokenizer.decode(&self.ids)?;
            let end = self.shown.len().saturating_sub(held_back);
            self.shown.truncate(self.shown.floor_char_boundary(end));
        }
        Ok(piece)
    }

    fn held_back(&self) -> Result<String, DataError> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(behind(&text, &self.shown).to_owned())
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

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::Random;

    /// All that a stream returns for `ids`.
    fn streamed(form: Form<'_>, tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let mut stream = DecodeStream { tokenizer, form };
        let mut text: String = ids.iter().map(|&id| stream.push(id).expect("it decodes")).collect();
        text += &stream.finish().expect("it decodes");
        text
    }

    /// Ids of a vocabulary of bytes and merges are cut anywhere, so that prompts end inside characters, bytes are no
    /// UTF-8, and special tokens stand between them.
    #[test]
    fn bytes_of_tokens_give_the_text_of_the_whole_decoder() {
        let texts = ["größe 語彙 😀 naïve ".repeat(40), "plain words and more".to_owned()];
        let tokenizer = Tokenizer::train_on(texts.iter().map(String::as_str), 280).expect("trains");
        let table = tokenizer.byte_table().expect("byte-level");
        let written: Vec<u32> = tokenizer.encode(&texts[0]).expect("it encodes");
        let mut random = Random(3);
        for round in 0..4000 {
            let ids: Vec<u32> = match round % 2 {
                0 => (0..1 + random.below(12)).map(|_| random.below(tokenizer.vocab_size() + 3) as u32).collect(),
                // A part of a text whose characters have two to four bytes.
                _ => {
                    let first = random.below(written.len() - 12);
                    written[first..first + 12].to_vec()
                }
            };
            let (prompt, rest) = ids.split_at(random.below(ids.len() + 1));
            let by_ids = streamed(Form::Ids(Ids::new(&tokenizer, prompt).expect("decodes")), &tokenizer, rest);
            let by_bytes = streamed(Form::Bytes(Pending::new(table, prompt)), &tokenizer, rest);
            assert_eq!(by_bytes, by_ids, "{prompt:?} then {rest:?}");
        }
    }
}
