//! Splits text into words as GPT-2 does, without a regular expression engine.
//!
//! The pattern is `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+` (Radford et al., 2019),
//! where the first matching alternative counts. Every character matches some alternative, so the words cover the text.

use std::sync::LazyLock;

use tokenizers::utils::SysRegex;

/// The classes of characters in the pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Other,
    Letter,
    Number,
    Space,
}

const NUM_CHARS: usize = 0x11_0000;

/// The class of every character, computed with the regex engine of the `tokenizers` crate, so that Sieve and this crate
/// use the same version of Unicode.
static CLASSES: LazyLock<Vec<Class>> = LazyLock::new(|| {
    let every_char = (0..NUM_CHARS as u32).filter_map(char::from_u32).collect::<String>();
    let mut classes = vec![Class::Other; NUM_CHARS];
    for (pattern, class) in [(r"\p{L}+", Class::Letter), (r"\p{N}+", Class::Number), (r"\s+", Class::Space)] {
        let regex = SysRegex::new(pattern).expect("a valid pattern");
        for (start, end) in regex.find_iter(&every_char) {
            every_char[start..end].chars().for_each(|char| classes[char as usize] = class);
        }
    }
    classes
});

/// Divides `text` into words, without gaps between them.
pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    let classes: &[Class] = &CLASSES;
    let mut rest = text;
    std::iter::from_fn(move || {
        let (word, others) = rest.split_at(word_len(rest, classes));
        rest = others;
        (!word.is_empty()).then_some(word)
    })
}

/// Length in bytes of the first word of `text`; 0 only for an empty text.
fn word_len(text: &str, classes: &[Class]) -> usize {
    let class_of = |char: char| classes[char as usize];
    let mut chars = text.chars();
    let Some(first) = chars.next() else {
        return 0;
    };
    if first == '\''
        && let Some(ending) =
            ["s", "t", "re", "ve", "m", "ll", "d"].iter().find(|&ending| chars.as_str().starts_with(ending))
    {
        return 1 + ending.len();
    }
    let second = chars.clone().next().map(class_of);
    let (start, class) = match (first, class_of(first), second) {
        // A single space belongs to the word after it.
        (' ', _, Some(class)) if class != Class::Space => (1, class),
        (_, Class::Space, _) => return space_len(text, classes),
        (_, class, _) => (0, class),
    };
    let len = text[start..].find(|char| class_of(char) != class);
    len.map_or(text.len(), |len| start + len)
}

/// Length in bytes of a word of white space at the start of `text`: the whole run if the text ends after it, else the
/// run without its last character, which belongs to the next word; but at least one character.
fn space_len(text: &str, classes: &[Class]) -> usize {
    let is_space = |char: char| classes[char as usize] == Class::Space;
    let Some(run) = text.find(|char| !is_space(char)) else {
        return text.len();
    };
    let last = text[..run].chars().next_back().map_or(0, char::len_utf8);
    if run == last { run } else { run - last }
}

/// GPT-2's characters for the 256 bytes: a printable byte stands for itself, the others map to U+0100 and following.
pub(super) fn byte_chars() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| {
        let code = match byte {
            0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => byte as u32,
            _ => {
                next += 1;
                next - 1
            }
        };
        char::from_u32(code).expect("far below the surrogates")
    })
}

/// A word as the vocabulary of a byte-level BPE writes it, with one character for each byte.
pub(super) fn in_byte_chars(word: &str, byte_chars: &[char; 256]) -> String {
    word.bytes().map(|byte| byte_chars[usize::from(byte)]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    /// The words that the `tokenizers` crate finds with its regex.
    fn by_regex(text: &str) -> Vec<String> {
        let mut split = PreTokenizedString::from(text);
        ByteLevel::new(false, false, true).pre_tokenize(&mut split).unwrap();
        let splits = split.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits
            .into_iter()
            .map(|(_, (start, end), _)| text[start..end].to_owned())
            .filter(|word| !word.is_empty())
            .collect()
    }

    #[test]
    fn words_match_each_alternative_of_the_pattern() {
        let text = "it's we'LL they'll 've  two   spaces\n\n\tx 12 3½ a1 !?'s ''t\u{3000}\u{a0}y \n z  ";
        let wanted = [
            "it", "'s", " we", "'", "LL", " they", "'ll", " '", "ve", " ", " two", "  ", " spaces", "\n\n", "\t", "x",
            " 12", " 3½", " a", "1", " !?'", "s", " ''", "t", "\u{3000}", "\u{a0}", "y", " \n", " z", "  ",
        ];
        assert_eq!(words(text).collect::<Vec<_>>(), wanted);
        assert_eq!(by_regex(text), wanted);
    }

    /// Every character of Unicode, next to spaces, a letter and a digit.
    #[test]
    fn every_character_is_split_as_by_the_regex() {
        let all = (1..NUM_CHARS as u32).filter_map(char::from_u32);
        let text = all.flat_map(|char| [' ', char, 'a', char, ' ', ' ', char, '1']).collect::<String>();
        let regex = SysRegex::new(PATTERN).unwrap();
        let wanted = regex.find_iter(&text).map(|(start, end)| &text[start..end]);
        assert!(words(&text).eq(wanted));
    }

    const PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        #[test]
        fn words_are_those_of_the_regex(text: String, likely in "['strevmld LSé世\\n\\t\u{a0}0½_!\u{301}]{0,60}") {
            for text in [text, likely] {
                prop_assert_eq!(words(&text).collect::<Vec<_>>(), by_regex(&text));
            }
        }
    }
}
