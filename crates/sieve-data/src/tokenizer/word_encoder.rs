//! Fast encoding for byte-level BPE tokenizers that split text into words as GPT-2 does. Words are found without a
//! regular expression, and their ids are cached; the `tokenizers` crate encodes words that are not in the cache.

use std::sync::Mutex;

use serde_json::Value;
use tokenizers::{Model, ModelWrapper, Tokenizer as HfTokenizer};
use xxhash_rust::xxh3::xxh3_64;

use super::words::{byte_chars, in_byte_chars, words};

/// Encodes text with the same ids as the tokenizer that it was created from.
#[derive(Debug)]
pub(super) struct WordEncoder {
    model: ModelWrapper,
    byte_chars: [char; 256],
    /// Idle caches. A call takes one, or creates one if there is none, and returns it at its end.
    caches: Mutex<Vec<WordCache>>,
}

impl WordEncoder {
    /// The encoder of a tokenizer, whose serialised form is `json`; `None` if the tokenizer does more than split as
    /// GPT-2 does and merge bytes.
    pub(super) fn for_tokenizer(tokenizer: &HfTokenizer, json: &str) -> Option<Self> {
        let json: Value = serde_json::from_str(json).ok()?;
        let (model, splitting) = (&json["model"], &json["pre_tokenizer"]);
        // Whether the model lacks this setting or has it off.
        let absent = |key: &str| model[key].is_null() || model[key] == "" || model[key] == false || model[key] == 0.0;
        let fits = json["normalizer"].is_null()
            && splitting["type"] == "ByteLevel"
            && splitting["add_prefix_space"] == false
            && splitting["use_regex"] == true
            && model["type"] == "BPE"
            && ["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"]
                .into_iter()
                .all(absent)
            // The tokenizers crate looks for non-special added tokens in every text; this encoder does not.
            && json["added_tokens"].as_array()?.iter().all(|token| token["special"] == true);
        fits.then(|| Self {
            model: tokenizer.get_model().clone(),
            byte_chars: byte_chars(),
            caches: Mutex::new(Vec::new()),
        })
    }

    /// The ids of all words of a text, one word after the other, by a cache that no other call has meanwhile.
    pub(super) fn encode(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        let mut cache = self.caches().pop().unwrap_or_else(WordCache::new);
        let mut ids = Vec::with_capacity(text.len() / 3);
        for word in words(text) {
            cache.ids(word, &mut ids, |word| self.encode_word(word))?;
        }
        self.caches().push(cache);
        Ok(ids)
    }

    fn encode_word(&self, word: &str) -> tokenizers::Result<Vec<u32>> {
        let chars = in_byte_chars(word, &self.byte_chars);
        Ok(self.model.tokenize(&chars)?.into_iter().map(|token| token.id).collect())
    }

    fn caches(&self) -> std::sync::MutexGuard<'_, Vec<WordCache>> {
        // The list stays valid if a thread panics, because caches are only pushed and popped.
        self.caches.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A direct-mapped cache of the ids of words: a word's hash selects its slot, and a new word overwrites the slot.
#[derive(Debug)]
struct WordCache {
    slots: Vec<Option<Slot>>,
}

#[derive(Debug)]
struct Slot {
    hash: u64,
    word: Box<str>,
    ids: Box<[u32]>,
}

/// 2^17 slots of 40 bytes are 5 MiB; the words and ids in them take some 8 MiB.
const NUM_SLOTS: u64 = 1 << 17;
/// Longer words are not cached, because they seldom occur twice.
const MAX_WORD_BYTES: usize = 64;

impl WordCache {
    fn new() -> Self {
        Self { slots: std::iter::repeat_with(|| None).take(NUM_SLOTS as usize).collect() }
    }

    /// Appends the ids of `word`, which `encode` computes if they are not in the cache.
    fn ids(
        &mut self,
        word: &str,
        ids: &mut Vec<u32>,
        encode: impl Fn(&str) -> tokenizers::Result<Vec<u32>>,
    ) -> tokenizers::Result<()> {
        if word.len() > MAX_WORD_BYTES {
            ids.extend(encode(word)?);
            return Ok(());
        }
        let hash = xxh3_64(word.as_bytes());
        let slot = &mut self.slots[(hash % NUM_SLOTS) as usize];
        match slot {
            Some(slot) if slot.hash == hash && *slot.word == *word => ids.extend_from_slice(&slot.ids),
            _ => {
                let new = encode(word)?;
                ids.extend_from_slice(&new);
                *slot = Some(Slot { hash, word: word.into(), ids: new.into() });
            }
        }
        Ok(())
    }
}
