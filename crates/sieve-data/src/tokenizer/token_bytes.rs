//! The bytes that tokens of a byte-level tokenizer stand for.
use super::words::byte_chars;
use std::collections::HashMap;

/// The bytes of each token; none of special tokens and of ids without a token.
#[derive(Debug)]
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// Where each id's bytes end.
    ends: Vec<usize>,
}

impl TokenBytes {
    /// The table of `tokens`, by id, as the vocabulary writes them: a character of GPT-2's alphabet for each byte.
    pub(super) fn new(tokens: impl Iterator<Item = String>) -> Self {
        let byte_of: HashMap<char, u8> = byte_chars().into_iter().zip(0..=u8::MAX).collect();
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for token in tokens {
            // A token with another character stands for its own text, as an added one does.
            match token.chars().map(|char| byte_of.get(&char).copied()).collect::<Option<Vec<u8>>>() {
                Some(of_chars) => bytes.extend(of_chars),
                None => bytes.extend(token.bytes()),
            }
            ends.push(bytes.len());
        }
        Self { bytes, ends }
    }

    /// Bytes of the longest token.
    pub(super) fn longest(&self) -> usize {
        (0..self.ends.len() as u32).map(|id| self.of_id(id).len()).max().unwrap_or(0)
    }

    /// The bytes of an id.
    pub(super) fn of_id(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let end = |id: usize| self.ends.get(id).copied().unwrap_or(self.bytes.len());
        &self.bytes[id.checked_sub(1).map_or(0, end)..end(id)]
    }
}
