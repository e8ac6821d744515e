//! A tokenizer for synthetic tasks, whose tokens are the decimal numbers of their ids.

use serde_json::{Map, Value, json};

use super::{END_OF_TEXT, Tokenizer, not_trained};
use crate::error::DataError;

impl Tokenizer {
    /// A tokenizer with `count` tokens. Token n is the word "n", and words are separated by white space; token 0, the
    /// padding of synthetic tasks, is `<|endoftext|>`. Encoding fails for a text with another word.
    ///
    /// # Errors
    /// A `count` below 2.
    pub fn numbers(count: usize) -> Result<Self, DataError> {
        if count < 2 {
            let reason = format!("{count} is too small: token 0 ends a text");
            return Err(DataError::setting("numbers", reason));
        }
        let words = (1..count).map(|number| (number.to_string(), Value::from(number)));
        let vocab = [(END_OF_TEXT.to_owned(), Value::from(0))].into_iter().chain(words).collect::<Map<_, _>>();
        let end = json!({
            "id": 0, "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        });
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": null,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
        });
        Self::from_bytes(tokenizer.to_string().as_bytes()).map_err(not_trained)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_their_numbers() {
        let tokenizer = Tokenizer::numbers(8192).unwrap();
        assert_eq!(tokenizer.vocab_size(), 8192);
        assert_eq!(tokenizer.encode("17 4099\n8191  1").unwrap(), [17, 4099, 8191, 1]);
        assert_eq!(tokenizer.decode(&[5, 8191, 0]).unwrap(), "5 8191");
        assert_eq!(tokenizer.eos_id().unwrap(), 0);
        for text in ["8192", "0", "-1", "word"] {
            assert!(tokenizer.encode(text).is_err(), "{text}");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        tokenizer.save(&path).unwrap();
        assert_eq!(Tokenizer::from_file(&path).unwrap().hash(), tokenizer.hash());
        assert!(Tokenizer::numbers(1).is_err());
    }
}
