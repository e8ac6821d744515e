//! The fast way to encode with a byte-level BPE that splits as GPT-2 does: words are found without a regular
//! expression, and each thread caches the ids of words. The ids of a new word come from the `tokenizers` crate.

use std::sync::Mutex;

use serde_json::Value;
use tokenizers::{Model, ModelWrapper, Tokenizer as HfTokenizer};
use xxhash_rust::xxh3::xxh3_64;

use super::words::{byte_chars, in_byte_chars, words};

/// Encodes text exactly as the tokenizer that it was made from.
#[derive(Debug)]
pub(super) struct WordEncoder {
    model: ModelWrapper,
    byte_chars: [char; 256],
    /// One for each thread that is encoding; a text borrows one and returns it.
    caches: Mutex<Vec<WordCache>>,
}

impl WordEncoder {
    /// `None` when the tokenizer does more than split as GPT-2 and merge bytes. `json` is the tokenizer serialised.
    pub(super) fn for_tokenizer(tokenizer: &HfTokenizer, json: &str) -> Option<Self> {
        let json: Value = serde_json::from_str(json).ok()?;
        let (model, splitting) = (&json["model"], &json["pre_tokenizer"]);
        let absent = |key: &str| model[key].is_null() || model[key] == "" || model[key] == false || model[key] == 0.0;
        let fits = json["normalizer"].is_null()
            && splitting["type"] == "ByteLevel"
            && splitting["add_prefix_space"] == false
            && splitting["use_regex"] == true
            && model["type"] == "BPE"
            && ["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"]
                .into_iter()
                .all(absent)
            // An added token that is not special is looked for in every text.
            && json["added_tokens"].as_array()?.iter().all(|token| token["special"] == true);
        fits.then(|| Self {
            model: tokenizer.get_model().clone(),
            byte_chars: byte_chars(),
            caches: Mutex::new(Vec::new()),
        })
    }

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
        // A panic elsewhere leaves the list whole: caches are only ever put in or taken out.
        self.caches.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A cache of the ids of words. Each word maps to one slot, which a later word overwrites: no bookkeeping, bounded
/// memory.
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

/// 2^17 slots of 40 bytes: 5 MiB, and some 8 MiB of words.
const NUM_SLOTS: u64 = 1 << 17;
/// Longer words seldom come twice.
const MAX_WORD_BYTES: usize = 64;

impl WordCache {
    fn new() -> Self {
        Self {
            slots: std::iter::repeat_with(|| None).take(NUM_SLOTS as usize).collect(),
        }
    }

    /// Appends the ids of `word`, remembered or made by `encode`.
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
                *slot = Some(Slot {
                    hash,
                    word: word.into(),
                    ids: new.into(),
                });
            }
        }
        Ok(())
    }
}
