//! The text that needles are hidden in.
use crate::EvalError;
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use sieve_data::Tokenizer;
use sieve_infer::{EvalDocument, InferError};
use std::collections::HashMap;
use std::ops::{Range, RangeInclusive};

/// Sentences of a paragraph of made-up text.
const PARAGRAPH: usize = 6;

const ADJECTIVES: [&str; 12] =
    ["quiet", "old", "narrow", "bright", "distant", "wooden", "gentle", "heavy", "early", "pale", "busy", "empty"];
const NOUNS: [&str; 16] = [
    "harbour",
    "teacher",
    "garden",
    "river",
    "market",
    "window",
    "letter",
    "mountain",
    "neighbour",
    "bridge",
    "lantern",
    "farmer",
    "station",
    "painter",
    "meadow",
    "kitchen",
];
const VERBS: [&str; 12] = [
    "looks over",
    "waits near",
    "reminds people of",
    "stands behind",
    "belongs to",
    "was built before",
    "is older than",
    "keeps a picture of",
    "leads to",
    "was named after",
    "lies below",
    "is seen from",
];
const ENDINGS: [&str; 8] = [
    "",
    " in the morning",
    " when it rains",
    " most of the year",
    ", as everyone knows",
    " on market days",
    " after a long winter",
    ", or so it is said",
];

/// Tokens of a text, and where its sentences end.
#[derive(Clone, Debug)]
pub struct Haystack {
    tokens: Vec<u32>,
    /// Positions after the last token of each sentence, ascending.
    ends: Vec<usize>,
}

impl Haystack {
    /// The first `num_tokens` tokens of the concatenated documents without their end-of-document tokens; fewer if the
    /// documents are shorter.
    ///
    /// # Errors
    /// A document that cannot be read.
    pub fn of_documents(
        documents: impl Iterator<Item = Result<EvalDocument, InferError>>,
        num_tokens: usize,
        tokenizer: &Tokenizer,
    ) -> Result<Self, EvalError> {
        let mut tokens = Vec::new();
        for document in documents {
            let mut document = document?.tokens;
            document.pop();
            tokens.extend(document);
            if tokens.len() >= num_tokens {
                break;
            }
        }
        tokens.truncate(num_tokens);
        Self::new(tokens, tokenizer)
    }

    /// `num_tokens` tokens of random English sentences, the same ones at each call.
    ///
    /// # Errors
    /// A tokenizer that cannot express English.
    pub fn made_up(num_tokens: usize, tokenizer: &Tokenizer) -> Result<Self, EvalError> {
        let mut random = ChaCha8Rng::seed_from_u64(0);
        let mut tokens = Vec::new();
        while tokens.len() < num_tokens {
            let paragraph = tokenizer.encode(&paragraph(&mut random))?;
            // The tokenizer has no token for such text, so further paragraphs would be empty too.
            if paragraph.is_empty() {
                break;
            }
            tokens.extend(paragraph);
        }
        tokens.truncate(num_tokens);
        Self::new(tokens, tokenizer)
    }

    /// Finds the ends of the sentences.
    fn new(tokens: Vec<u32>, tokenizer: &Tokenizer) -> Result<Self, EvalError> {
        let mut texts = HashMap::new();
        let mut ends = Vec::new();
        for (at, pair) in tokens.windows(2).enumerate() {
            let text = match texts.get(&pair[0]) {
                Some(text) => text,
                None => texts.entry(pair[0]).or_insert(tokenizer.decode(&pair[..1])?),
            };
            // A sentence ends at a dot before white space; the dot in `self.len` ends none.
            let dot = text.trim_end().ends_with('.');
            if dot && (text.ends_with(char::is_whitespace) || space_after(pair, tokenizer)?) {
                ends.push(at + 1);
            }
        }
        Ok(Self { tokens, ends })
    }

    /// Number of tokens of the haystack.
    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Refuses a haystack of fewer tokens.
    ///
    /// # Errors
    /// Too few tokens.
    pub(super) fn check(&self, needed: usize) -> Result<(), EvalError> {
        let got = self.num_tokens();
        if got >= needed {
            return Ok(());
        }
        let what = format!("the haystack has {got} tokens, and the longest length needs {needed}");
        Err(EvalError::refused(what, "give more text with --data, or shorter --lengths"))
    }

    /// The first `len` tokens with `needle` inserted, and the needle's position: at `depth` percent, moved back to the
    /// end of a sentence or else to the beginning. At 100 % it is after all tokens.
    pub(super) fn with_needle(&self, len: usize, depth: f64, needle: &[u32]) -> (Vec<u32>, usize) {
        let wanted = (len as f64 * depth / 100.0).round() as usize;
        let place = if wanted >= len { len } else { self.end_of_sentence(0..=wanted).unwrap_or(0) };
        (self.inserted(0..len, place, needle), place)
    }

    /// The last end of a sentence within a range of positions.
    pub(super) fn end_of_sentence(&self, within: RangeInclusive<usize>) -> Option<usize> {
        let before = self.ends.partition_point(|end| end <= within.end());
        let last = before.checked_sub(1).map(|last| self.ends[last]);
        last.filter(|end| within.contains(end))
    }

    /// A part of the haystack with `needle` inserted before the haystack's token `place`.
    pub(super) fn inserted(&self, part: Range<usize>, place: usize, needle: &[u32]) -> Vec<u32> {
        [&self.tokens[part.start..place], needle, &self.tokens[place..part.end]].concat()
    }
}

/// Whether the second token begins with white space.
fn space_after(pair: &[u32], tokenizer: &Tokenizer) -> Result<bool, EvalError> {
    let (first, both) = (tokenizer.decode(&pair[..1])?, tokenizer.decode(pair)?);
    let rest = both.get(first.len()..).unwrap_or("");
    Ok(rest.starts_with(char::is_whitespace))
}

fn paragraph(random: &mut ChaCha8Rng) -> String {
    let sentences = (0..PARAGRAPH).map(|_| sentence(random) + " ");
    sentences.collect::<String>() + "\n"
}

fn sentence(random: &mut ChaCha8Rng) -> String {
    let mut noun = || format!("{} {}", pick(random, &ADJECTIVES), pick(random, &NOUNS));
    let (first, second) = (noun(), noun());
    let (verb, ending) = (pick(random, &VERBS), pick(random, &ENDINGS));
    format!("The {first} {verb} the {second}{ending}.")
}

/// Random English sentences as filler.
pub(crate) fn made_up_sentences(count: usize, seed: u64) -> Vec<String> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| sentence(&mut random)).collect()
}

/// A random element of a list.
pub(super) fn pick<'a>(random: &mut ChaCha8Rng, list: &[&'a str]) -> &'a str {
    list[random.next_u32() as usize % list.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::needle::tests::tokenizer;

    #[test]
    fn needles_go_to_the_full_stop_before_their_depth() {
        let tokenizer = tokenizer();
        let text = "One two. Three self.len four? Five six seven. Eight nine ten eleven.";
        let tokens = tokenizer.encode(text).expect("bytes are enough");
        let haystack = Haystack::new(tokens.clone(), &tokenizer).expect("it decodes");
        let place = |depth| {
            let (with, place) = haystack.with_needle(tokens.len(), depth, &[7, 8]);
            assert_eq!(with[place..place + 2], [7, 8]);
            let rest = [&with[..place], &with[place + 2..]].concat();
            assert_eq!(rest, tokens);
            tokenizer.decode(&tokens[..place]).expect("it decodes")
        };
        assert_eq!(place(0.0), "");
        assert_eq!(place(5.0), "");
        // 40 % lies after `self.len`, whose dot ends no sentence.
        assert_eq!(place(40.0), "One two.");
        assert_eq!(place(70.0), "One two. Three self.len four? Five six seven.");
        assert_eq!(place(99.0), "One two. Three self.len four? Five six seven.");
        assert_eq!(place(100.0), text);
        let (with, place) = haystack.with_needle(4, 100.0, &[7]);
        assert_eq!((with.len(), place), (5, 4));
    }

    #[test]
    fn made_up_text_is_long_enough_and_the_same_every_time() {
        let tokenizer = tokenizer();
        let long = Haystack::made_up(3000, &tokenizer).expect("bytes are enough");
        let short = Haystack::made_up(1000, &tokenizer).expect("bytes are enough");
        assert_eq!(long.num_tokens(), 3000);
        assert_eq!(short.tokens, long.tokens[..1000]);
        assert!(long.ends.len() > 20);
        let text = tokenizer.decode(&long.tokens).expect("it decodes");
        assert!(!text.contains(|c: char| c.is_ascii_digit()), "{text}");
    }
}
