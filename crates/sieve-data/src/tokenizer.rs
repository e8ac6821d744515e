//! Text to token ids and back: any Hugging Face `tokenizer.json`, or a byte-level BPE trained here.

mod numbers;
mod stream;
mod token_bytes;
mod train;
mod word_encoder;
mod words;
mod written;

use sieve_core::ShownPath;
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use serde_json::Value;
use tokenizers::Tokenizer as HfTokenizer;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::ModelWrapper;
use xxhash_rust::xxh3::xxh3_128;

use crate::error::DataError;
use crate::guard::guarded;
use sieve_files::{in_place_of, read_file, write_atomically};
pub use stream::DecodeStream;
use token_bytes::TokenBytes;
pub use train::BpeConfig;
use word_encoder::WordEncoder;
use words::byte_chars;

/// Name of the end-of-document token in the tokenizers that Sieve trains.
const END_OF_TEXT: &str = "<|endoftext|>";
/// Name of the padding token, which no query attends to and no label names.
const PAD: &str = "<|pad|>";

/// Names of the end-of-document token in published tokenizers, most likely first.
const END_OF_DOCUMENT_NAMES: [&str; 7] =
    [END_OF_TEXT, "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>"];

/// A BPE tokenizer. Threads can share it by reference.
#[derive(Debug)]
pub struct Tokenizer {
    /// Encodes the names of special tokens in a text as plain text.
    plain: HfTokenizer,
    /// Encodes a text in which names of special tokens become these tokens.
    marked: HfTokenizer,
    /// Encodes as `plain` does, many times faster; `None` for tokenizers that it does not support.
    fast: Option<WordEncoder>,
    /// The bytes of each token, made when a text is first decoded token by token; `None` inside where tokens are not
    /// bytes.
    byte_table: OnceLock<Option<TokenBytes>>,
    vocab_size: usize,
    /// Number of ids below `vocab_size` that no token has.
    num_missing: usize,
    /// The JSON of its model, if ids of the model are missing.
    model_with_gaps: Option<Value>,
    hash: u128,
    /// A token of letters or digits, which [`token_bytes`](Self::token_bytes) puts before another token; `None` if the
    /// vocabulary has none.
    plain_token: Option<u32>,
    /// The token before a text's first one; `None` if the tokenizer's template has none.
    bos_id: Option<u32>,
    /// Name of the end-of-document token, if the user gave one.
    eos_token: Option<String>,
    /// The file's BPE dropout, the share of merges that its training left out at random, if not 0; it is off here.
    dropout: Option<f32>,
}

/// A warning names a file in which more than `1 / MISSING_PARTS` of the ids have no token.
const MISSING_PARTS: usize = 2;

/// Makes a BPE apply all of its merges. Returns the share that it would have left out at random, if it would have.
fn switch_dropout_off(model: &mut ModelWrapper) -> Option<f32> {
    let ModelWrapper::BPE(model) = model else {
        return None;
    };
    // 0 leaves out none.
    let dropout = model.dropout.filter(|dropout| *dropout != 0.0)?;
    model.dropout = None;
    Some(dropout)
}

impl Tokenizer {
    /// Loads a Hugging Face `tokenizer.json`. Settings for its training are switched off: truncation would lose
    /// text, and with BPE dropout, which a warning names, the same text would have other tokens each time.
    ///
    /// # Errors
    /// A file that cannot be read, or that the `tokenizers` crate does not accept.
    pub fn from_file(path: &Path) -> Result<Self, DataError> {
        let bytes = read_file(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                let (folder, repository) = home_of(path);
                let hint = format!(
                    "hf download {repository} tokenizer.json --local-dir {folder} fetches a model's; of a recipe, \
                     --set tokenizer.path=hf://{repository} does, and --set \
                     'tokenizer.train={{vocab_size=8192}}' trains one (docs/own-data.md)"
                );
                DataError::refused(format!("there is no tokenizer {}", path.shown()), hint)
            }
            _ => DataError::io("read", path)(error),
        })?;
        let tokenizer = Self::from_bytes(&bytes).map_err(|reason| {
            if let Some((what, hint)) = in_place_of(&bytes) {
                return DataError::file(path, what, hint);
            }
            let what = format!("not a usable tokenizer.json: {reason}");
            let hint = "name the tokenizer.json of a Hugging Face model, or one of sieve tokenizer train";
            DataError::file(path, what, hint)
        })?;
        if let Some(dropout) = tokenizer.dropout {
            log::warn!(
                "{}: dropout = {dropout} of its merges was for its training and is off here: a text always gets the \
                 same tokens",
                path.shown()
            );
        }
        let (missing, ids) = (tokenizer.num_missing, tokenizer.vocab_size);
        if missing > ids / MISSING_PARTS {
            log::warn!(
                "{}: {missing} of its {ids} ids have no token; a model has a row of weights for each of them",
                path.shown()
            );
        }
        Ok(tokenizer)
    }

    /// Reads a `tokenizer.json`; the error is the reason alone, without a path. A panic of the `tokenizers` crate is an
    /// error, too.
    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        // The `tokenizers` crate panics on some damaged files.
        let loaded = guarded(|| {
            let inner = HfTokenizer::from_bytes(bytes).map_err(|error| error.to_string())?;
            let ids = written::ids(&inner)?;
            let model_with_gaps = written::model_with_gaps(&inner, bytes)?;
            Self::from_inner(inner, &ids, model_with_gaps)
        });
        loaded.unwrap_or_else(|| Err("its parts contradict one another".to_owned()))
    }

    /// The tokenizer without truncation, padding and dropout, with the fields that follow from its vocabulary and
    /// template. `ids` and `model_with_gaps` are the results of the functions of these names in [`written`].
    fn from_inner(mut inner: HfTokenizer, ids: &[u32], model_with_gaps: Option<Value>) -> Result<Self, String> {
        inner.with_truncation(None).map_err(|error| error.to_string())?;
        inner.with_padding(None);
        let mut model = inner.get_model().clone();
        let dropout = switch_dropout_off(&mut model);
        inner.with_model(model);
        inner.set_encode_special_tokens(false);
        // Ids may have gaps, so the largest id can exceed the number of tokens.
        let vocab_size = ids.last().map_or(0, |&id| id as usize + 1);
        let is_pretty = false;
        let canonical = written::json(&inner, model_with_gaps.as_ref(), is_pretty)?;
        let mut plain = inner.clone();
        plain.set_encode_special_tokens(true);
        let mut tokenizer = Self {
            fast: WordEncoder::for_tokenizer(&plain, &canonical),
            byte_table: OnceLock::new(),
            plain,
            marked: inner,
            vocab_size,
            num_missing: vocab_size - ids.len(),
            model_with_gaps,
            hash: xxh3_128(canonical.as_bytes()),
            plain_token: None,
            bos_id: None,
            eos_token: None,
            dropout,
        };
        tokenizer.plain_token = tokenizer.find_plain_token(ids);
        tokenizer.bos_id = tokenizer.find_bos();
        Ok(tokenizer)
    }

    /// The token that the tokenizer's template puts before a text; `None` if it puts none.
    fn find_bos(&self) -> Option<u32> {
        let text = self.decode(&[self.plain_token?]).ok()?;
        let ids = |with_template| self.plain.encode_fast(text.as_str(), with_template).ok();
        let (plain, whole) = (ids(false)?, ids(true)?);
        let (&first, rest) = whole.get_ids().split_first()?;
        rest.starts_with(plain.get_ids()).then_some(first)
    }

    /// Writes a `tokenizer.json` atomically; `transformers` reads it (`PreTrainedTokenizerFast(tokenizer_file=…)`).
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), DataError> {
        Ok(write_atomically(path, self.to_json()?.as_bytes())?)
    }

    /// The text of its `tokenizer.json`.
    ///
    /// # Errors
    /// A tokenizer that cannot be written as JSON.
    pub fn to_json(&self) -> Result<String, DataError> {
        let is_pretty = true;
        let json = written::json(&self.marked, self.model_with_gaps.as_ref(), is_pretty);
        json.map_err(|error| DataError::Failed(format!("the tokenizer cannot write its tokenizer.json: {error}")))
    }

    /// The token ids of a document's text. No tokens are added, and names of special tokens in the text are plain text.
    ///
    /// # Errors
    /// A text that the tokenizer cannot encode.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match &self.fast {
            Some(fast) => fast.encode(text).map_err(|error| encode_error(text, &*error)),
            None => encode(&self.plain, text),
        }
    }

    /// [`bos_id`](Self::bos_id), if any, and the ids of [`encode`](Self::encode), as lm-evaluation-harness encodes a
    /// context.
    ///
    /// # Errors
    /// A text that the tokenizer cannot encode.
    pub fn encode_with_bos(&self, text: &str) -> Result<Vec<u32>, DataError> {
        Ok(self.bos_id.into_iter().chain(self.encode(text)?).collect())
    }

    /// The token ids of a prompt. No tokens are added, and names of special tokens in the text become these tokens.
    ///
    /// # Errors
    /// A text that the tokenizer cannot encode.
    pub fn encode_marked(&self, text: &str) -> Result<Vec<u32>, DataError> {
        encode(&self.marked, text)
    }

    /// The token ids that [`encode_marked`](Self::encode_marked) makes of a chat's text, in parts: those outside
    /// `answers`, which are ascending ranges of bytes, and those in them, in turn. A token with a byte of an answer is
    /// of the answer, as `return_assistant_tokens_mask` of transformers has it. A part may be empty, and their number
    /// is even.
    ///
    /// # Errors
    /// A text that the tokenizer cannot encode.
    pub fn encode_parts(&self, text: &str, answers: &[Range<usize>]) -> Result<Vec<Vec<u32>>, DataError> {
        let add_special_tokens = false;
        let encoding = self.marked.encode(text, add_special_tokens).map_err(|error| encode_error(text, &*error))?;
        let (mut parts, mut answers) = (vec![Vec::new()], answers.iter().peekable());
        for (&id, &(start, end)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
            while answers.next_if(|answer| start >= answer.end).is_some() {}
            let is_answer = answers.peek().is_some_and(|answer| end > answer.start);
            // Parts with an even index lie outside answers.
            if is_answer == (parts.len() % 2 == 1) {
                parts.push(Vec::new());
            }
            parts.last_mut().expect("never empty").push(id);
        }
        if parts.len() % 2 == 1 {
            parts.push(Vec::new());
        }
        Ok(parts)
    }

    /// The token ids of a text that a chat template wrote, as lm-evaluation-harness encodes it: names of special tokens
    /// become these tokens, and [`bos_id`](Self::bos_id) comes first, unless the text begins with it.
    ///
    /// # Errors
    /// A text that the tokenizer cannot encode.
    pub fn encode_chat(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let ids = self.encode_marked(text)?;
        let bos = self.bos_id.filter(|bos| ids.first() != Some(bos));
        Ok(bos.into_iter().chain(ids).collect())
    }

    /// The text of token ids without special tokens; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// Ids that the tokenizer cannot decode.
    pub fn decode(&self, ids: &[u32]) -> Result<String, DataError> {
        let failed = |error| DataError::Failed(format!("the tokenizer cannot decode {} ids: {error}", ids.len()));
        let skip_special_tokens = true;
        self.marked.decode(ids, skip_special_tokens).map_err(failed)
    }

    /// A decoder that takes the ids that continue `prompt` one by one and returns only whole characters.
    ///
    /// # Errors
    /// A prompt that the tokenizer cannot decode.
    pub fn decode_stream(&self, prompt: &[u32]) -> Result<DecodeStream<'_>, DataError> {
        DecodeStream::new(self, prompt)
    }

    /// The text that `ids` add to `prompt`.
    ///
    /// # Errors
    /// Ids that the tokenizer cannot decode.
    pub fn decode_behind(&self, prompt: &[u32], ids: &[u32]) -> Result<String, DataError> {
        let mut stream = self.decode_stream(prompt)?;
        let pieces = ids.iter().map(|&id| stream.push(id));
        let text = pieces.collect::<Result<String, _>>()?;
        Ok(text + &stream.finish()?)
    }

    /// The largest id plus one, added tokens included: the fewest rows of an embedding for all tokens.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The largest id plus one, added tokens excluded. A model may lack rows for added tokens as long as no text holds
    /// such a token.
    pub fn num_base_tokens(&self) -> usize {
        let with_added_tokens = false;
        self.marked.get_vocab(with_added_tokens).values().max().map_or(0, |&id| id as usize + 1)
    }

    /// The id of a token, special or not.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.marked.token_to_id(token)
    }

    /// The token of an id as the vocabulary writes it; byte-level tokenizers write a space as `Ġ`.
    pub fn id_token(&self, id: u32) -> Option<String> {
        self.marked.id_to_token(id)
    }

    /// Whether each character of a token in the vocabulary stands for one byte, in GPT-2's alphabet.
    pub fn is_byte_level(&self) -> bool {
        matches!(self.marked.get_decoder(), Some(DecoderWrapper::ByteLevel(_)))
    }

    /// The most bytes of a text that one token stands for; `None` where a token may stand for any number of them: with
    /// a normalizer, which may shorten a text, with unknown words, or with special tokens that take white space along.
    pub fn longest_token_bytes(&self) -> Option<usize> {
        // Only such tokenizers are known to keep every byte.
        self.fast.as_ref()?;
        let added = self.marked.get_added_tokens_decoder();
        if added.values().any(|token| token.lstrip || token.rstrip || token.normalized) {
            return None;
        }
        let of_special = added.values().map(|token| token.content.len());
        of_special.chain([self.byte_table()?.longest()]).max()
    }

    /// Number of bytes that a token contributes to a text; 0 for special tokens. A token can contribute less as the
    /// first token of a text (`is_first`): SentencePiece's `▁the` has no space there.
    ///
    /// # Errors
    /// An id that the tokenizer cannot decode.
    pub fn token_bytes(&self, id: u32, is_first: bool) -> Result<usize, DataError> {
        let before = self.plain_token.filter(|_| !is_first);
        let num_before = before.map_or(Ok(0), |before| self.decode(&[before]).map(|text| text.len()))?;
        let text = self.decode(&before.into_iter().chain([id]).collect::<Vec<_>>())?;
        let text = text.get(num_before..).unwrap_or_default();
        let is_part = text.contains(char::REPLACEMENT_CHARACTER);
        Ok(match self.id_token(id).filter(|_| is_part) {
            // U+FFFD is a part of a character; its length is the length of the token's bytes.
            Some(token) if is_byte_token(&token) => 1,
            Some(token) if self.is_byte_level() => token.chars().count(),
            _ => text.len(),
        })
    }

    /// The bytes that a token adds to a text behind another token, also where they are a part of a character; `None`
    /// for unknown ids and special tokens, which are in no text, and where the vocabulary does not say which bytes.
    pub fn bytes_behind(&self, before: Option<u32>, id: u32) -> Option<Vec<u8>> {
        let token = self.text_token(id)?;
        let is_added = self.marked.get_added_vocabulary().get_vocab().contains_key(&token);
        if let Some(byte) = byte_of_token(&token).filter(|_| !is_added) {
            return Some(vec![byte]);
        }
        if self.is_byte_level() && !is_added {
            let chars = byte_chars();
            let byte = |c: char| chars.iter().position(|known| *known == c).map(|byte| byte as u8);
            return token.chars().map(byte).collect();
        }
        let text = self.decode_behind(before.as_slice(), &[id]).ok()?;
        (!text.contains(char::REPLACEMENT_CHARACTER)).then(|| text.into_bytes())
    }

    /// The bytes that each token adds to a text behind other text, by id: none for special tokens, for ids without a
    /// token, and where the vocabulary does not say which bytes. `None` if the text of all tokens is not the bytes of
    /// each behind one another, as with decoders that clean a text up (WordPiece) or end words (`</w>`).
    pub fn bytes_of_tokens(&self) -> Option<Vec<Vec<u8>>> {
        let ids = 0..self.vocab_size as u32;
        if let Some(table) = self.byte_table() {
            return Some(ids.map(|id| table.of_id(id).to_vec()).collect());
        }
        let is_joined = self.marked.get_decoder().is_none_or(joins_bytes);
        is_joined.then(|| ids.map(|id| self.bytes_behind(self.plain_token, id).unwrap_or_default()).collect())
    }

    /// Whether an id belongs to a special token. Special tokens have no text.
    pub fn is_special(&self, id: u32) -> bool {
        self.id_token(id).is_some_and(|token| self.marked.get_added_vocabulary().is_special_token(&token))
    }

    /// The special tokens whose names a text holds, in their order: the bytes of each name, and the token's id. Where
    /// several names begin at one place, the longest counts.
    pub fn special_names(&self, text: &str) -> Vec<(Range<usize>, u32)> {
        let tokens = self.marked.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.special);
        let mut names = tokens.map(|(id, token)| (token.content, id)).collect::<Vec<_>>();
        names.retain(|(name, _)| !name.is_empty() && text.contains(name.as_str()));
        names.sort_by_key(|(name, id)| (std::cmp::Reverse(name.len()), *id));
        let (mut found, mut end) = (Vec::new(), 0);
        for (at, _) in text.char_indices() {
            if at >= end
                && let Some((name, id)) = names.iter().find(|(name, _)| text[at..].starts_with(name.as_str()))
            {
                end = at + name.len();
                found.push((at..end, *id));
            }
        }
        found
    }

    /// The bytes of each token, for tokenizers whose tokens are bytes.
    fn byte_table(&self) -> Option<&TokenBytes> {
        let table = || TokenBytes::new((0..self.vocab_size as u32).map(|id| self.text_token(id).unwrap_or_default()));
        self.byte_table.get_or_init(|| self.is_byte_level().then(table)).as_ref()
    }

    /// The token of an id; `None` for unknown ids and special tokens, which have no text.
    fn text_token(&self, id: u32) -> Option<String> {
        let added = self.marked.get_added_vocabulary();
        self.id_token(id).filter(|token| !added.is_special_token(token))
    }

    /// A token that decodes to ASCII letters or digits only. A token decoded after it is not the first of its text.
    fn find_plain_token(&self, ids: &[u32]) -> Option<u32> {
        let is_plain = |text: String| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        ids.iter().copied().find(|&id| {
            let has_text = self.text_token(id).is_some_and(|token| !is_byte_token(&token));
            has_text && self.decode(&[id]).is_ok_and(is_plain)
        })
    }

    /// Sets the name of the end-of-document token; with `None`, [`eos_id`](Self::eos_id) looks for a known name.
    #[must_use]
    pub fn with_eos_token(self, name: Option<&str>) -> Self {
        Self { eos_token: name.map(str::to_owned), ..self }
    }

    /// The id of the end-of-document token: of the name [given](Self::with_eos_token), or else of the first known name
    /// that the vocabulary has (`<|endoftext|>`, `<|end_of_text|>`, `</s>`, …).
    ///
    /// # Errors
    /// An unknown token; the message lists the special tokens.
    pub fn eos_id(&self) -> Result<u32, DataError> {
        let name = self.eos_token.as_deref();
        let found = match name {
            Some(name) => self.token_id(name),
            None => END_OF_DOCUMENT_NAMES.iter().find_map(|name| self.token_id(name)),
        };
        found.ok_or_else(|| {
            let token = name.unwrap_or(END_OF_TEXT);
            let special = self.special_tokens().into_iter().take(16).collect::<Vec<_>>();
            let hint =
                format!("name its end-of-document token by tokenizer.eos_token; its special tokens are {special:?}");
            DataError::refused(format!("the tokenizer has no token {token:?}"), hint)
        })
    }

    /// The token that the template in `tokenizer.json` puts before each text (Llama's and Mistral's `<s>`), if any.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    /// The token to put before a text that has no context: [`bos_id`](Self::bos_id), or else the end-of-document token.
    ///
    /// # Errors
    /// The template has no such token, and the vocabulary no end-of-document token.
    pub fn prefix_id(&self) -> Result<u32, DataError> {
        self.bos_id.map_or_else(|| self.eos_id(), Ok)
    }

    /// The id of `<|pad|>`, if the vocabulary has it.
    pub fn pad_id(&self) -> Option<u32> {
        self.token_id(PAD)
    }

    /// A hash of everything that the token ids depend on. A saved and reloaded tokenizer has the same hash.
    pub fn hash(&self) -> u128 {
        self.hash
    }

    fn special_tokens(&self) -> Vec<String> {
        let added = self.marked.get_added_tokens_decoder();
        let mut special = added.into_iter().filter(|(_, token)| token.special).collect::<Vec<_>>();
        special.sort_by_key(|&(id, _)| id);
        special.into_iter().map(|(_, token)| token.content).collect()
    }
}

/// Owners of the tokenizers that shipped recipes name, by the name of their folder.
const OWNERS: [(&str, &str); 3] =
    [("gpt-neox-20b", "EleutherAI"), ("gpt2", "openai-community"), ("SmolLM2-135M", "HuggingFaceTB")];

/// The folder of a `tokenizer.json`, quoted for a shell, and its model's name on the hub, as far as it is known.
fn home_of(path: &Path) -> (String, String) {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let owner = OWNERS.iter().find(|(known, _)| *known == name);
    let repository = owner.map_or("OWNER/NAME".to_owned(), |(name, owner)| format!("{owner}/{name}"));
    let folder = folder.to_string_lossy().into_owned();
    let is_plain = folder.chars().all(|c| c.is_ascii_alphanumeric() || "/._-+".contains(c));
    (if is_plain { folder } else { format!("'{folder}'") }, repository)
}

/// Whether a decoder writes each token's text in the same way behind any other.
fn joins_bytes(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::BPE(_) | DecoderWrapper::WordPiece(_) | DecoderWrapper::CTC(_) => false,
        DecoderWrapper::Sequence(sequence) => sequence.get_decoders().iter().all(joins_bytes),
        _ => true,
    }
}

/// Whether a token of the vocabulary is a single byte in SentencePiece's form `<0x0A>`.
fn is_byte_token(token: &str) -> bool {
    byte_of_token(token).is_some()
}

/// The byte of a token in that form.
fn byte_of_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.filter(|digits| digits.len() == 2).and_then(|digits| u8::from_str_radix(digits, 16).ok())
}

fn encode(tokenizer: &HfTokenizer, text: &str) -> Result<Vec<u32>, DataError> {
    // `encode_fast` leaves out the tokens' offsets in the text, which are not needed here.
    let add_special_tokens = false;
    let encoding = tokenizer.encode_fast(text, add_special_tokens);
    encoding.map(|encoding| encoding.get_ids().to_vec()).map_err(|error| encode_error(text, &*error))
}

/// The error when training a tokenizer failed.
fn not_trained(reason: String) -> DataError {
    DataError::Failed(format!("the tokenizer could not be trained: {reason}"))
}

/// The error of a text that the tokenizer has no tokens for.
fn encode_error(text: &str, error: &dyn std::error::Error) -> DataError {
    let beginning = text.chars().take(40).collect::<String>();
    let reason = error.to_string();
    // A tokenizer that knows whole words and no parts of them, such as the one of MQAR's numbers.
    let hint = if reason.contains("Missing [UNK] token") {
        "\n  hint: it knows whole words alone (--prompt '1 2 3' for a run of MQAR, whose questions sieve eval mqar \
         asks): name another checkpoint, or such words"
    } else {
        ""
    };
    DataError::Failed(format!("the tokenizer cannot encode the text that begins {beginning:?}: {reason}{hint}"))
}

#[cfg(test)]
mod tests;
