//! Ends a generated text at the first stop text, wherever its tokens end.
use crate::InferError;
use sieve_data::{DecodeStream, Tokenizer};
use std::sync::Arc;

/// Texts at which a generated text ends. The text ends as soon as one of them is complete, as if it came character by
/// character; of several that are complete at the same character, the longest counts. So the end does not depend on
/// how the text is divided into tokens.
///
/// Special tokens have no text. A stop text that holds the name of one is met where the model writes that token, and
/// also where it spells the name.
#[derive(Clone, Debug, Default)]
pub struct StopTexts {
    patterns: Arc<[Pattern]>,
}

/// A part of a text: a byte, or a special token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Symbol {
    Byte(u8),
    Special(u32),
}

/// A stop text, searched by Knuth, Morris and Pratt's algorithm: its state is the length of the longest beginning of
/// the stop text with which the text so far ends.
#[derive(Debug)]
struct Pattern {
    symbols: Vec<Symbol>,
    /// For each beginning of the symbols, the length of its longest shorter end that is a beginning too.
    borders: Vec<u32>,
    has_special: bool,
}

impl StopTexts {
    /// Stops at the first of `texts`; `tokenizer` has the special tokens. Empty texts are ignored.
    pub fn new(texts: &[String], tokenizer: &Tokenizer) -> Self {
        let mut patterns = Vec::new();
        for text in texts.iter().filter(|text| !text.is_empty()) {
            patterns.push(Pattern::new(bytes(text).collect()));
            let names = tokenizer.special_names(text);
            if names.is_empty() {
                continue;
            }
            let (mut symbols, mut end) = (Vec::new(), 0);
            for (name, id) in names {
                symbols.extend(bytes(&text[end..name.start]));
                symbols.push(Symbol::Special(id));
                end = name.end;
            }
            symbols.extend(bytes(&text[end..]));
            patterns.push(Pattern::new(symbols));
        }
        Self { patterns: patterns.into() }
    }

    /// The text of the tokens that `stream` decodes, up to the first stop text.
    pub fn until<'t>(&self, stream: DecodeStream<'t>) -> StoppedText<'t> {
        StoppedText {
            stream,
            patterns: self.patterns.clone(),
            states: vec![0; self.patterns.len()],
            waiting: String::new(),
            num_ahead: 0,
            is_met: false,
        }
    }
}

fn bytes(text: &str) -> impl Iterator<Item = Symbol> {
    text.bytes().map(Symbol::Byte)
}

impl Pattern {
    /// The pattern of these symbols, with the state to fall back to from each of its places (Knuth, Morris and Pratt).
    fn new(symbols: Vec<Symbol>) -> Self {
        let has_special = symbols.iter().any(|symbol| matches!(symbol, Symbol::Special(_)));
        let mut this = Self { borders: vec![0; symbols.len()], symbols, has_special };
        let mut state = 0;
        for at in 1..this.symbols.len() {
            state = this.next(state, this.symbols[at]);
            this.borders[at] = state as u32;
        }
        this
    }

    /// The state after one more symbol. Once all symbols were met, there is no next state.
    fn next(&self, mut state: usize, symbol: Symbol) -> usize {
        while self.symbols[state] != symbol {
            match state.checked_sub(1) {
                Some(last) => state = self.borders[last] as usize,
                None => return 0,
            }
        }
        state + 1
    }

    fn is_met(&self, state: usize) -> bool {
        state == self.symbols.len()
    }

    /// The bytes of text that this state has met.
    fn num_bytes(&self, state: usize) -> usize {
        if !self.has_special {
            state
        } else {
            self.symbols[..state].iter().filter(|symbol| matches!(symbol, Symbol::Byte(_))).count()
        }
    }
}

/// Decodes the tokens that continue a prompt, up to the first stop text. Text that may begin a stop text is held back
/// until later tokens decide.
#[derive(Debug)]
pub struct StoppedText<'t> {
    stream: DecodeStream<'t>,
    patterns: Arc<[Pattern]>,
    /// The state of each pattern.
    states: Vec<usize>,
    /// Decoded text that was not returned, because a stop text may begin in it.
    waiting: String,
    /// Bytes that the stream holds back, and that the patterns with special tokens have met already: they came before
    /// the last special token.
    num_ahead: usize,
    /// Whether a stop text was met.
    is_met: bool,
}

impl StoppedText<'_> {
    /// Takes a token. Returns the text that can be shown now, and whether a stop text follows it. Behind a stop text
    /// there is no more text.
    ///
    /// # Errors
    /// A token that the tokenizer cannot decode.
    pub fn push(&mut self, id: u32) -> Result<(String, bool), InferError> {
        if self.is_met {
            return Ok((String::new(), true));
        }
        if self.stream.tokenizer().is_special(id) {
            return self.push_special(id);
        }
        let piece = self.stream.push(id)?;
        Ok(self.add(&piece))
    }

    /// The text still held back when the text has ended, and whether a stop text follows it.
    ///
    /// # Errors
    /// Tokens that the tokenizer cannot decode.
    pub fn finish(mut self) -> Result<(String, bool), InferError> {
        if self.is_met {
            return Ok((String::new(), true));
        }
        let rest = self.stream.held_back()?;
        let (mut shown, is_met) = self.add(&rest);
        shown += &self.waiting;
        Ok((shown, is_met))
    }

    /// Adds decoded text.
    fn add(&mut self, piece: &str) -> (String, bool) {
        for (at, byte) in piece.bytes().enumerate() {
            let mut longest = None;
            for (pattern, state) in self.patterns.iter().zip(&mut self.states) {
                if pattern.has_special && at < self.num_ahead {
                    continue;
                }
                *state = pattern.next(*state, Symbol::Byte(byte));
                if pattern.is_met(*state) {
                    longest = longest.max(Some(pattern.num_bytes(*state)));
                }
            }
            if let Some(num_bytes) = longest {
                self.waiting += &piece[..piece.floor_char_boundary(at + 1)];
                return (self.end_before(num_bytes), true);
            }
        }
        self.num_ahead = self.num_ahead.saturating_sub(piece.len());
        self.waiting += piece;
        let held_back = self.patterns.iter().zip(&self.states).map(|(pattern, state)| {
            if pattern.has_special { pattern.num_bytes(*state).saturating_sub(self.num_ahead) } else { *state }
        });
        let shown = self.waiting.len().saturating_sub(held_back.max().unwrap_or(0));
        let rest = self.waiting.split_off(self.waiting.floor_char_boundary(shown));
        (std::mem::replace(&mut self.waiting, rest), false)
    }

    /// Takes a special token, which comes behind all text so far, the text that the stream holds back included.
    fn push_special(&mut self, id: u32) -> Result<(String, bool), InferError> {
        if !self.patterns.iter().any(|pattern| pattern.has_special) {
            return Ok((String::new(), false));
        }
        let pending = self.stream.held_back()?;
        let new = pending.bytes().skip(self.num_ahead).map(Symbol::Byte).chain([Symbol::Special(id)]);
        let new = new.collect::<Vec<_>>();
        let first = self.num_ahead.min(pending.len());
        // Where the first stop text with a special token is complete, in bytes of `pending`, and its bytes of text.
        let mut met: Option<(usize, usize)> = None;
        for (pattern, state) in self.patterns.iter().zip(&mut self.states).filter(|(pattern, _)| pattern.has_special) {
            for (at, symbol) in new.iter().enumerate() {
                *state = pattern.next(*state, *symbol);
                if pattern.is_met(*state) {
                    let (end, num_bytes) = ((first + at + 1).min(pending.len()), pattern.num_bytes(*state));
                    let is_first = met.is_none_or(|(other, most)| end < other || (end == other && num_bytes > most));
                    met = if is_first { Some((end, num_bytes)) } else { met };
                    break;
                }
            }
        }
        self.num_ahead = pending.len();
        let Some((end, num_bytes)) = met else {
            return Ok((String::new(), false));
        };
        // A stop text without a special token may be complete before.
        let (shown, is_met) = self.add(&pending[..pending.floor_char_boundary(end)]);
        if is_met {
            return Ok((shown, true));
        }
        self.waiting.insert_str(0, &shown);
        Ok((self.end_before(num_bytes), true))
    }

    /// Ends the text, and returns the waiting text without its last bytes, which are those of a stop text.
    fn end_before(&mut self, num_bytes: usize) -> String {
        self.is_met = true;
        let end = self.waiting.len().saturating_sub(num_bytes);
        self.waiting.truncate(self.waiting.floor_char_boundary(end));
        std::mem::take(&mut self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chacha20::ChaCha8Rng;
    use chacha20::rand_core::{Rng, SeedableRng};
    use serde_json::{Map, Value, json};

    /// Special tokens. The second one's name begins with the first one's.
    const SPECIAL: [&str; 2] = ["<s>", "<s>>"];
    /// Characters of the tests' texts: letters, a character of two bytes, and those of the special tokens' names.
    const CHARS: [&str; 5] = ["a", "b", "é", "<s>", ">"];

    /// A tokenizer with a token for each text of up to three of [`CHARS`], and for each byte; byte level, or with
    /// tokens such as `<0x61>` for bytes. Each text has many tokenisations in it.
    fn tokenizer(is_byte_level: bool) -> Tokenizer {
        let mut words = vec![String::new()];
        for _ in 0..3 {
            let longer: Vec<String> = words.iter().flat_map(|word| CHARS.map(|c| format!("{word}{c}"))).collect();
            words.extend(longer);
            words.sort();
            words.dedup();
        }
        // In GPT-2's alphabet é is written as the characters of its two bytes.
        let written = |word: &str| if is_byte_level { word.replace('é', "Ã©") } else { word.to_owned() };
        let single = if is_byte_level {
            ["Ã", "©", "<", "s"].map(str::to_owned).to_vec()
        } else {
            "abé<s>".bytes().map(|byte| format!("<0x{byte:02X}>")).chain(["<", "s"].map(str::to_owned)).collect()
        };
        let mut vocab = Map::new();
        for token in SPECIAL.map(str::to_owned).into_iter().chain(single).chain(words.iter().map(|word| written(word)))
        {
            let id = vocab.len();
            if !token.is_empty() {
                vocab.entry(token).or_insert(id.into());
            }
        }
        let added: Vec<Value> = SPECIAL
            .iter()
            .map(|name| {
                json!({"id": vocab[*name], "content": name, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true})
            })
            .collect();
        let decoder = if is_byte_level {
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})
        } else {
            json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]})
        };
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "added_tokens": added,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": decoder,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"},
        });
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, json.to_string()).expect("writable");
        Tokenizer::from_file(&path).expect("a tokenizer")
    }

    /// Divides a text into tokens of up to `longest` bytes at random.
    fn tokens(text: &[Symbol], tokenizer: &Tokenizer, longest: usize, random: &mut ChaCha8Rng) -> Vec<u32> {
        let is_byte_level = tokenizer.is_byte_level();
        let (mut ids, mut at) = (Vec::new(), 0);
        while at < text.len() {
            if let Symbol::Special(id) = text[at] {
                ids.push(id);
                at += 1;
                continue;
            }
            let bytes: Vec<u8> = text[at..]
                .iter()
                .map_while(|symbol| match symbol {
                    Symbol::Byte(byte) => Some(*byte),
                    Symbol::Special(_) => None,
                })
                .collect();
            let wanted = 1 + random.next_u32() as usize % longest;
            let found = (1..=wanted.min(bytes.len())).rev().find_map(|len| {
                let word = std::str::from_utf8(&bytes[..len]);
                let token = match (word, len) {
                    (Ok(word), _) if is_byte_level => word.replace('é', "Ã©"),
                    // Byte tokens and words take turns.
                    (Ok(word), _) if len > 1 || random.next_u32().is_multiple_of(2) => word.to_owned(),
                    (_, 1) if is_byte_level => char::from(bytes[0]).to_string(),
                    (_, 1) => format!("<0x{:02X}>", bytes[0]),
                    _ => return None,
                };
                let id = tokenizer.token_id(&token).filter(|id| !tokenizer.is_special(*id))?;
                Some((len, id))
            });
            let (len, id) = found.expect("each byte has a token");
            ids.push(id);
            at += len;
        }
        ids
    }

    /// The text before the first stop text, by the definition: at each end of the text so far, from the shortest.
    fn expected(text: &[Symbol], stops: &[String], tokenizer: &Tokenizer) -> (String, bool) {
        let visible = |symbols: &[Symbol]| -> Vec<u8> {
            let byte = |symbol: &Symbol| match symbol {
                Symbol::Byte(byte) => Some(*byte),
                Symbol::Special(_) => None,
            };
            symbols.iter().filter_map(byte).collect()
        };
        let text_of = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("whole characters");
        for end in 1..=text.len() {
            let (so_far, shown) = (&text[..end], visible(&text[..end]));
            let spelled = stops
                .iter()
                .filter(|stop| matches!(so_far[end - 1], Symbol::Byte(_)) && shown.ends_with(stop.as_bytes()));
            let spelled = spelled.map(|stop| stop.len());
            let named = stops.iter().filter_map(|stop| {
                let (mut symbols, mut rest) = (Vec::new(), stop.as_str());
                while let Some(first) = rest.chars().next() {
                    // The longer name first.
                    let name = SPECIAL.iter().rev().find(|name| rest.starts_with(**name));
                    match name {
                        Some(name) => symbols.push(Symbol::Special(tokenizer.token_id(name).expect("a token"))),
                        None => symbols.extend(bytes(&rest[..first.len_utf8()])),
                    }
                    rest = &rest[name.map_or(first.len_utf8(), |name| name.len())..];
                }
                let is_named = symbols.iter().any(|symbol| matches!(symbol, Symbol::Special(_)));
                (is_named && so_far.ends_with(&symbols)).then(|| visible(&symbols).len())
            });
            if let Some(most) = spelled.chain(named).max() {
                return (text_of(&shown[..shown.len() - most]), true);
            }
        }
        (text_of(&visible(text)), false)
    }

    /// What is shown of a text token by token, and whether it was stopped.
    fn shown(ids: &[u32], stops: &StopTexts, tokenizer: &Tokenizer) -> (Vec<String>, bool) {
        let mut text = stops.until(tokenizer.decode_stream(&[]).expect("a stream"));
        let mut shown = Vec::new();
        for id in ids {
            let (piece, is_met) = text.push(*id).expect("a token");
            shown.push(piece);
            if is_met {
                return (shown, true);
            }
        }
        let (rest, is_met) = text.finish().expect("known tokens");
        shown.push(rest);
        (shown, is_met)
    }

    /// 8000 texts: letters, characters of two bytes, special tokens and their names spelled out, divided into tokens
    /// in several ways, against one to six stop texts, of which some hold, begin or end others.
    #[test]
    fn where_a_text_ends_does_not_depend_on_its_tokens() {
        let mut random = ChaCha8Rng::seed_from_u64(11);
        let mut num_stopped = 0;
        for is_byte_level in [true, false] {
            let tokenizer = tokenizer(is_byte_level);
            for round in 0..2000 {
                let mut below = |most: usize| random.next_u32() as usize % most;
                let mut text = Vec::new();
                for _ in 0..below(14) {
                    match below(7) {
                        at @ 0..5 => text.extend(bytes(CHARS[at])),
                        name => text.push(Symbol::Special(tokenizer.token_id(SPECIAL[name - 5]).expect("a token"))),
                    }
                }
                let count = 1 + below(6);
                let stops: Vec<String> = (0..count)
                    .map(|_| (0..1 + below(4)).map(|_| [CHARS.as_slice(), &SPECIAL[1..]].concat()[below(6)]).collect())
                    .collect();
                let wanted = expected(&text, &stops, &tokenizer);
                num_stopped += usize::from(wanted.1);
                let compiled = StopTexts::new(&stops, &tokenizer);
                for longest in [1, 2, 4, 9] {
                    let ids = tokens(&text, &tokenizer, longest, &mut random);
                    let (pieces, is_met) = shown(&ids, &compiled, &tokenizer);
                    assert_eq!((pieces.concat(), is_met), wanted, "{round}: {text:?} {stops:?} {ids:?} {pieces:?}");
                }
            }
        }
        assert!((1000..3500).contains(&num_stopped), "{num_stopped}");
    }

    #[test]
    fn a_text_ends_before_a_stop_text_and_is_held_back_where_one_may_begin() {
        let tokenizer = tokenizer(true);
        let found = |stops: &[&str], tokens: &[&str]| {
            let ids = tokens.iter().map(|token| tokenizer.token_id(token).expect(token)).collect::<Vec<_>>();
            let stops = stops.iter().map(|stop| (*stop).to_owned()).collect::<Vec<_>>();
            let (pieces, is_met) = shown(&ids, &StopTexts::new(&stops, &tokenizer), &tokenizer);
            (pieces.join("|"), is_met)
        };
        let pieces = |text: &str, is_met| (text.to_owned(), is_met);
        assert_eq!(found(&[], &["a", "b"]), pieces("a|b|", false));
        assert_eq!(found(&["bab"], &["ab", "a", "ba"]), pieces("a||", true));
        // Text that only began like a stop text is shown later, or by `finish` when the text ends.
        assert_eq!(found(&["bba"], &["bb", "b", "b"]), pieces("|b|b|bb", false));
        assert_eq!(found(&["", ">", "bb"], &["aba", "a>b"]), pieces("aba|a", true));
        assert_eq!(found(&["é>"], &["aÃ©", "b", "Ã", "©", ">"]), pieces("a|éb|||", true));
        // One that lies inside another one is complete before it, whatever the tokens are.
        assert_eq!(found(&["abba", "bb"], &["a", "bba"]), found(&["abba", "bb"], &["ab", "b", "a"]));
        assert_eq!(found(&["abba", "bb"], &["a", "bba"]), pieces("|a", true));
        // A special token is met as a token, as its name, and within a stop text; alone it is in no text.
        assert_eq!(found(&["<s>"], &["a", "<s>", "b"]), pieces("a|", true));
        assert_eq!(found(&["b<s>>a"], &["ab", "<s>>", "ab"]), pieces("a||", true));
        assert_eq!(found(&["b<s>>a"], &["ab", "<s>", "ab"]), pieces("a||ba|b", false));
        assert_eq!(found(&["s", ">"], &["a", "<s>", "b"]), pieces("a||b|", false));
        assert_eq!(found(&["ab"], &["a", "<s>", "b"]), pieces("||", true));
    }
}
