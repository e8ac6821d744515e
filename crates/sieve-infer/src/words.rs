//! Finds the words of a document and how far back each was last used. A low loss on words last used far back shows
//! long-range recall.
use sieve_data::Tokenizer;
use std::collections::HashMap;
use std::ops::Range;

/// Letters of a word, at least. Shorter words (`i`, `fn`, `of`) can be guessed without looking back.
const SHORTEST: usize = 3;

/// Whether a token belongs to a word, and whether the word was used before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordUse {
    /// White space, punctuation, or a word of fewer than three characters.
    NoWord,
    /// A word that does not occur before in the document.
    New,
    /// A word that occurs before in the document.
    Again {
        /// Tokens from the first token of the word's last use to this token.
        distance: u32,
    },
}

/// The [`WordUse`] of each token. A word is a run of at least three ASCII letters, digits and underscores, and may have
/// several tokens. A token with parts of two words counts for the later one.
pub(crate) fn word_uses(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<WordUse> {
    let texts = tokens.iter().map(|&token| tokenizer.id_token(token));
    uses(texts.map(Option::unwrap_or_default))
}

/// A word of the text, and the range of tokens that contain parts of it.
struct Word {
    text: String,
    tokens: Range<usize>,
}

/// As [`word_uses`], from the texts of the tokens.
fn uses(tokens: impl Iterator<Item = String>) -> Vec<WordUse> {
    let (mut words, mut in_word, mut len) = (Vec::<Word>::new(), false, 0);
    for (n, token) in tokens.enumerate() {
        len = n + 1;
        // Special tokens and SentencePiece's byte tokens (`<0x0A>`) are no text.
        let is_text = !(token.len() > 2 && token.starts_with('<') && token.ends_with('>'));
        for character in if is_text { token.as_str() } else { " " }.chars() {
            let begins = !in_word;
            in_word = character.is_ascii_alphanumeric() || character == '_';
            if in_word && begins {
                words.push(Word { text: String::new(), tokens: n..n });
            }
            if let Some(word) = words.last_mut().filter(|_| in_word) {
                word.text.push(character);
                word.tokens.end = n + 1;
            }
        }
    }
    let mut uses = vec![WordUse::NoWord; len];
    let mut last_use: HashMap<String, usize> = HashMap::new();
    for Word { text, tokens } in words {
        if text.len() < SHORTEST {
            continue;
        }
        let last = last_use.insert(text, tokens.start);
        for token in tokens {
            uses[token] = last.map_or(WordUse::New, |last| WordUse::Again { distance: (token - last) as u32 });
        }
    }
    uses
}

#[cfg(test)]
mod tests {
    use super::*;
    use WordUse::{Again, New, NoWord};

    #[test]
    fn the_last_use_of_a_word_is_found_however_tokens_divide_it() {
        let tokens = "let Ġcou nter = 7 ; <|endoftext|> counter + let".split(' ');
        let (n, w) = (New, NoWord);
        let again = |distance| Again { distance };
        let expected = [n, n, n, w, w, w, w, again(6), w, again(9)];
        assert_eq!(uses(tokens.map(str::to_owned)), expected);
    }

    #[test]
    fn a_token_of_two_words_counts_for_the_later_one_and_short_words_do_not_count() {
        let tokens = ["abc.d", "ef(ab", ")abc,", "def"];
        let expected = [New, New, Again { distance: 2 }, Again { distance: 3 }];
        assert_eq!(uses(tokens.map(str::to_owned).into_iter()), expected);
        let tokens = ["abc(", "def", ",", "abc)", ".abc", "_"];
        let expected = [New, New, NoWord, Again { distance: 3 }, New, New];
        assert_eq!(uses(tokens.map(str::to_owned).into_iter()), expected);
        assert_eq!(uses(std::iter::empty()), []);
    }
}
