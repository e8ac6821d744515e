//! Trains a byte-level BPE tokenizer.

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer as HfTokenizer, Trainer};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::words::{byte_chars, in_byte_chars, words};
use super::{END_OF_TEXT, PAD, Tokenizer, not_trained, written};
use crate::corpus::Corpus;
use crate::error::DataError;

/// Settings of a byte-level BPE that splits text into words as GPT-2 does. Its tokens are `<|endoftext|>` (id 0),
/// `<|pad|>` (id 1), the 256 bytes, and `vocab_size - 258` merges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BpeConfig {
    /// Number of tokens of the vocabulary, at least 258.
    pub vocab_size: usize,
    /// The most bytes of text to train on, and about as many if the corpus has them: a sample of chunks of documents,
    /// drawn by a hash of the chunk.
    pub sample_bytes: u64,
}

/// The 256 bytes and two special tokens.
const MIN_VOCAB_SIZE: usize = 258;
/// Documents are sampled in chunks of at most this many bytes.
const CHUNK_BYTES: usize = 1 << 16;
/// Seed of the hash that decides whether a chunk is in the sample.
const SAMPLE_SEED: u64 = 0x7461_736B_656E;

impl Tokenizer {
    /// Trains a tokenizer on a sample of a corpus. The same documents give the same tokenizer.
    ///
    /// # Errors
    /// A `vocab_size` that is too small, or larger than the text gives merges for; the corpus's own errors.
    pub fn train(corpus: &Corpus, config: BpeConfig) -> Result<Self, DataError> {
        let sample = sample(corpus, config)?;
        Self::train_on(sample.iter().map(String::as_str), config.vocab_size)
    }

    /// The number of tokens that training gives: `config.vocab_size`, or fewer if the text has no more merges.
    ///
    /// # Errors
    /// A `vocab_size` that is too small; the corpus's own errors.
    pub fn num_trained(corpus: &Corpus, config: BpeConfig) -> Result<usize, DataError> {
        let sample = sample(corpus, config)?;
        Ok(Self::fitted(sample.iter().map(String::as_str), config.vocab_size)?.vocab_size())
    }

    /// Trains a tokenizer on all of `texts`; their order does not matter.
    ///
    /// # Errors
    /// A `vocab_size` that is too small, or larger than the text gives merges for.
    pub fn train_on<'a>(texts: impl Iterator<Item = &'a str> + Send, vocab_size: usize) -> Result<Self, DataError> {
        let tokenizer = Self::fitted(texts, vocab_size)?;
        if tokenizer.vocab_size() != vocab_size {
            return Err(not_trained(format!(
                "this text yields a vocabulary of only {found} of the requested {vocab_size} tokens\n  \
                 hint: lower vocab_size to {found}, or train on more text",
                found = tokenizer.vocab_size()
            )));
        }
        Ok(tokenizer)
    }

    /// As [`train_on`](Self::train_on), with fewer tokens where the text gives no more.
    fn fitted<'a>(texts: impl Iterator<Item = &'a str> + Send, vocab_size: usize) -> Result<Self, DataError> {
        if vocab_size < MIN_VOCAB_SIZE {
            let reason = format!(
                "{vocab_size} is too small: 256 bytes and 2 special tokens take {MIN_VOCAB_SIZE}\n  \
                 hint: use {MIN_VOCAB_SIZE} or more"
            );
            return Err(DataError::setting("vocab_size", reason));
        }
        let is_special = true;
        let special_tokens = [END_OF_TEXT, PAD].map(|token| AddedToken::from(token, is_special));
        let special_tokens = special_tokens.to_vec();
        let mut trainer = BpeTrainer::builder()
            .vocab_size(vocab_size)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(special_tokens.clone())
            .build();
        // The result does not depend on the order of hash maps: the trainer sorts the alphabet and breaks ties by ids.
        let byte_chars = byte_chars();
        let mut model = BPE::default();
        trainer
            .feed(texts, |text| Ok(words(text).map(|word| in_byte_chars(word, &byte_chars)).collect()))
            .and_then(|()| trainer.train(&mut model))
            .map_err(|error| not_trained(error.to_string()))?;

        // Without a space before each text, decoding returns exactly the text that was encoded.
        let (add_prefix_space, trim_offsets, use_regex) = (false, false, true);
        let byte_level = ByteLevel::new(add_prefix_space, trim_offsets, use_regex);
        let mut inner = HfTokenizer::new(model);
        inner.with_pre_tokenizer(Some(byte_level));
        inner.with_decoder(Some(byte_level));
        inner.add_special_tokens(&special_tokens);
        let ids = written::ids(&inner).map_err(not_trained)?;
        let model_with_gaps = None;
        Self::from_inner(inner, &ids, model_with_gaps).map_err(not_trained)
    }
}

/// Chunks of a corpus's documents, which a tokenizer is trained on.
fn sample(corpus: &Corpus, config: BpeConfig) -> Result<Vec<String>, DataError> {
    // Other columns of a table are no text.
    let share = config.sample_bytes as f64 / corpus.text_bytes().max(1) as f64;
    let mut sample = Vec::new();
    let mut free_bytes = config.sample_bytes;
    for document in corpus.documents() {
        let document = document?;
        let texts = document.prompt.iter().chain([&document.text]);
        for chunk in texts.flat_map(|text| chunks(text)) {
            let drawn = xxh3_64_with_seed(chunk.as_bytes(), SAMPLE_SEED) as f64 / 2f64.powi(64);
            if drawn < share && chunk.len() as u64 <= free_bytes {
                free_bytes -= chunk.len() as u64;
                sample.push(chunk.to_owned());
            }
        }
    }
    Ok(sample)
}

/// Cuts a text between characters into chunks of at most [`CHUNK_BYTES`].
fn chunks(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let (chunk, rest) = text.split_at(text.floor_char_boundary(CHUNK_BYTES));
        text = rest;
        (!chunk.is_empty()).then_some(chunk)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_the_whole_text_cut_between_characters() {
        let text = "a世👩".repeat(40_000);
        let cut = chunks(&text).collect::<Vec<_>>();
        assert_eq!(cut.concat(), text);
        assert_eq!(cut.len(), text.len().div_ceil(CHUNK_BYTES - 3));
        assert_eq!(chunks("").count(), 0);
    }
}
