//! Answers in OpenAI's form: as one JSON object, or as chunks of a stream.
use crate::error::ApiError;
use crate::queue::Piece;
use crate::request::{Asked, Form};
use crate::served::Serving;
use crate::server::Server;
use serde_json::{Map, Value, json};
use sieve_infer::TokenScore;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;
use tokio::sync::OwnedSemaphorePermit;

/// Numbers of the answers so far, for their ids.
static ANSWERS: AtomicU64 = AtomicU64::new(0);

/// An answer in the making.
#[derive(Debug)]
pub(crate) struct Reply {
    server: Arc<Server>,
    asked: Arc<Asked>,
    id: String,
    created: u64,
    choices: Vec<Choice>,
    /// What is logged of the request, if anything is.
    serving: Option<Arc<Serving>>,
    /// The room of its log-probabilities, given back when the answer is dropped.
    _room: OwnedSemaphorePermit,
}

/// One text of the answer.
#[derive(Debug)]
struct Choice {
    /// Text that was not sent yet; without a stream, all text so far.
    text: String,
    tokens: Vec<ShownToken>,
    finish: Option<&'static str>,
    num_tokens: usize,
    /// Tokens of the prompt that were not read again.
    num_kept: usize,
    has_begun: bool,
    /// The token before the next one, which may decide how that is written.
    last: Option<u32>,
    /// Characters of the text before the next token, and the bytes of one that it goes on with.
    offset: usize,
    unfinished: Vec<u8>,
}

/// A token with its log-probability.
#[derive(Debug)]
struct ShownToken {
    id: u32,
    token: Spelled,
    /// `None`: nothing precedes the token.
    log_probability: Option<f64>,
    top: Vec<(Spelled, f64)>,
    offset: usize,
}

/// How a token is written.
#[derive(Clone, Debug)]
struct Spelled {
    text: String,
    /// What it adds to a text; `None` for special tokens, which are not in a text.
    bytes: Option<Vec<u8>>,
}

/// The time of this moment, as OpenAI writes it.
pub(crate) fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Reply {
    /// The answer to a request before its first text: an id, and an empty choice for each text.
    pub(crate) fn new(
        server: Arc<Server>,
        asked: Arc<Asked>,
        serving: Option<Arc<Serving>>,
        room: OwnedSemaphorePermit,
    ) -> Self {
        let created = seconds_since_1970();
        let prefix = match asked.form {
            Form::Completion => "cmpl",
            Form::Chat => "chatcmpl",
        };
        let id = format!("{prefix}-{created:x}-{}", ANSWERS.fetch_add(1, Relaxed));
        let choice = |text: usize| Choice {
            text: String::new(),
            tokens: Vec::new(),
            finish: None,
            num_tokens: 0,
            num_kept: 0,
            has_begun: false,
            last: asked.prompt(text).tokens.last().copied().filter(|_| !asked.echo),
            offset: 0,
            unfinished: Vec::new(),
        };
        let choices = (0..asked.num_texts()).map(choice).collect();
        if let Some(serving) = &serving {
            serving.has_prompts(asked.prompts.iter().map(|prompt| prompt.tokens.len()).sum());
        }
        Self { server, id, created, choices, asked, serving, _room: room }
    }

    /// Adds what happened to a text.
    ///
    /// # Errors
    /// The text cannot be continued.
    pub(crate) fn add(&mut self, text: usize, piece: Piece) -> Result<(), ApiError> {
        let (prompt, num_top) = (self.asked.prompt(text), self.asked.num_top);
        let choice = &mut self.choices[text];
        if !choice.has_begun {
            choice.has_begun = true;
            choice.text += prompt.text.as_deref().unwrap_or("");
            if self.asked.echo && num_top.is_some() {
                choice.show(&self.server, prompt.tokens[0], None, prompt.has_special_names);
            }
        }
        match piece {
            Piece::Prompt(scores) => choice.show_all(&self.server, &scores, prompt.has_special_names),
            Piece::More(more, scores) => {
                choice.text += &more;
                choice.show_all(&self.server, &scores, false);
            }
            Piece::End { has_stopped, num_tokens, num_kept } => {
                choice.num_tokens = num_tokens;
                choice.num_kept = num_kept;
                choice.finish = Some(if has_stopped { "stop" } else { "length" });
            }
            Piece::Failed(error) => return Err(error),
        }
        if let Some(serving) = &self.serving {
            serving.has_text();
            if choice.finish.is_some() {
                serving.has_ended(choice.num_tokens);
                if self.is_whole() {
                    serving.is_whole();
                }
            }
        }
        Ok(())
    }

    /// The answer's stream ends with an error.
    pub(crate) fn has_failed(&self, error: &ApiError) {
        if let Some(serving) = &self.serving {
            serving.has_failed(error);
        }
    }

    /// Whether every text has ended.
    pub(crate) fn is_whole(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish.is_some())
    }

    /// The answer, or a chunk of it, with these choices.
    fn object(&self, choices: Vec<Value>) -> Map<String, Value> {
        let object = match (self.asked.form, self.asked.streams) {
            (Form::Completion, _) => "text_completion",
            (Form::Chat, false) => "chat.completion",
            (Form::Chat, true) => "chat.completion.chunk",
        };
        let mut map = Map::new();
        map.insert("id".to_owned(), self.id.as_str().into());
        map.insert("object".to_owned(), object.into());
        map.insert("created".to_owned(), self.created.into());
        map.insert("model".to_owned(), self.server.settings.name.as_str().into());
        map.insert("choices".to_owned(), choices.into());
        // Of a stream, the last chunk alone has numbers.
        if self.asked.has_usage {
            map.insert("usage".to_owned(), Value::Null);
        }
        map
    }

    /// The tokens of all prompts and answers, those that were kept from before, and the keys that a query of the
    /// longest text reads.
    fn usage(&self) -> Value {
        let prompt: usize = self.asked.prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let new: usize = self.choices.iter().map(|choice| choice.num_tokens).sum();
        // As of `prompt_tokens`, a prompt's samples count it once.
        let of_prompt = |samples: &[Choice]| samples.iter().map(|choice| choice.num_kept).max();
        let kept: usize = self.choices.chunks(self.asked.num_samples).filter_map(of_prompt).sum();
        // The token that is drawn last is not read.
        let read = |(text, choice): (usize, &Choice)| {
            self.asked.prompt(text).tokens.len() + choice.num_tokens.saturating_sub(1)
        };
        let longest = self.choices.iter().enumerate().map(read).max().unwrap_or(0);
        json!({
            "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": kept}, "keys": self.server.keys(longest),
        })
    }

    /// The whole answer.
    pub(crate) fn whole(&mut self) -> Value {
        let choices = (0..self.choices.len()).map(|index| self.choice(index)).collect();
        let mut map = self.object(choices);
        map.insert("usage".to_owned(), self.usage());
        map.into()
    }

    /// The chunks that a stream begins with.
    pub(crate) fn first_chunks(&self) -> Vec<Value> {
        let role = |index: usize| {
            let delta = json!({"role": "assistant", "content": ""});
            let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            self.object(vec![choice]).into()
        };
        match self.asked.form {
            Form::Completion => Vec::new(),
            Form::Chat => (0..self.choices.len()).map(role).collect(),
        }
    }

    /// A chunk of what is new in a text; `None` if nothing is.
    pub(crate) fn chunk(&mut self, index: usize) -> Option<Value> {
        let choice = &self.choices[index];
        let is_new = !choice.text.is_empty() || !choice.tokens.is_empty() || choice.finish.is_some();
        is_new.then(|| {
            let choice = self.choice(index);
            self.object(vec![choice]).into()
        })
    }

    /// The chunk after all texts, if the request asks for the number of tokens.
    pub(crate) fn last_chunk(&self) -> Option<Value> {
        self.asked.has_usage.then(|| {
            let mut map = self.object(Vec::new());
            map.insert("usage".to_owned(), self.usage());
            map.into()
        })
    }

    /// A text as JSON, with what was added to it since the last call.
    fn choice(&mut self, index: usize) -> Value {
        let Asked { form, streams, num_top, has_ids, .. } = *self.asked;
        let choice = &mut self.choices[index];
        let (text, tokens, finish) =
            (std::mem::take(&mut choice.text), std::mem::take(&mut choice.tokens), choice.finish);
        let logprobs = num_top.map(|num_top| match form {
            Form::Completion => completion_logprobs(&tokens),
            Form::Chat => chat_logprobs(&tokens, num_top > 0),
        });
        let mut shown = match (form, streams) {
            (Form::Completion, _) => {
                json!({"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish})
            }
            (Form::Chat, false) => {
                let message = json!({"role": "assistant", "content": text, "refusal": null});
                json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
            }
            (Form::Chat, true) => {
                let delta = if text.is_empty() { json!({}) } else { json!({"content": text}) };
                json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish})
            }
        };
        if has_ids {
            shown["token_ids"] = tokens.iter().map(|token| token.id).collect();
            shown["prompt_token_ids"] = self.asked.prompt(index).tokens.iter().copied().collect();
        }
        shown
    }
}

impl Choice {
    fn show_all(&mut self, server: &Server, scores: &[TokenScore], has_special_names: bool) {
        scores.iter().for_each(|score| self.show(server, score.token, Some(score), has_special_names));
    }

    /// Adds a token with its log-probability. As with OpenAI, the likeliest tokens beside it include it in any case.
    /// `has_special_names`: whether special tokens are in the text, by name.
    fn show(&mut self, server: &Server, id: u32, score: Option<&TokenScore>, has_special_names: bool) {
        let spell = |id: u32| Spelled::new(server, self.last, id);
        let token = spell(id);
        let mut top: Vec<(Spelled, f64)> = Vec::new();
        if let Some(score) = score {
            top.extend(score.top.iter().map(|&(id, log_probability)| (spell(id), log_probability)));
            if score.top.iter().all(|one| one.0 != id) {
                top.push((token.clone(), score.log_probability));
            }
        }
        let (log_probability, offset) = (score.map(|score| score.log_probability), self.offset);
        match &token.bytes {
            Some(bytes) => self.advance(bytes),
            None if has_special_names => self.advance(token.text.as_bytes()),
            None => {}
        }
        self.last = Some(id);
        self.tokens.push(ShownToken { id, token, log_probability, top, offset });
    }

    /// Counts the characters that these bytes finish; a byte that is not UTF-8 becomes one character.
    fn advance(&mut self, bytes: &[u8]) {
        self.unfinished.extend_from_slice(bytes);
        let begun = match self.unfinished.utf8_chunks().last() {
            // These bytes may be the beginning of a character.
            Some(last) if is_begun(last.invalid()) => last.invalid().len(),
            _ => 0,
        };
        let whole = self.unfinished.len() - begun;
        self.offset += String::from_utf8_lossy(&self.unfinished[..whole]).chars().count();
        self.unfinished.drain(..whole);
    }
}

/// Whether these bytes are the beginning of a character, which more bytes would complete.
fn is_begun(bytes: &[u8]) -> bool {
    !bytes.is_empty() && std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

impl Spelled {
    /// A token behind another one. One without a text, or of a part of a character, is named as the vocabulary does.
    fn new(server: &Server, before: Option<u32>, id: u32) -> Self {
        let bytes = server.tokenizer.bytes_behind(before, id);
        let text = bytes.clone().and_then(|bytes| String::from_utf8(bytes).ok()).filter(|text| !text.is_empty());
        Self { text: text.or_else(|| server.tokenizer.id_token(id)).unwrap_or_default(), bytes }
    }
}

/// `logprobs` in the form of OpenAI's completions.
fn completion_logprobs(tokens: &[ShownToken]) -> Value {
    let top = |token: &ShownToken| {
        let mut map = Map::new();
        for (spelled, log_probability) in &token.top {
            // Several tokens may have the same text: the likeliest counts.
            map.entry(spelled.text.as_str()).or_insert((*log_probability).into());
        }
        token.log_probability.map(|_| map)
    };
    json!({
        "tokens": tokens.iter().map(|token| token.token.text.as_str()).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.log_probability).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": tokens.iter().map(|token| token.offset).collect::<Vec<_>>(),
    })
}

/// `logprobs` in the form of OpenAI's chats; `has_top`: whether the likeliest tokens were asked for. Their lists are
/// empty where they were not.
fn chat_logprobs(tokens: &[ShownToken], has_top: bool) -> Value {
    let one = |token: &Spelled, log_probability: Option<f64>| {
        let Spelled { text, bytes } = token;
        json!({"token": text, "logprob": log_probability, "bytes": bytes})
    };
    let content = tokens.iter().map(|token| {
        let mut shown = one(&token.token, token.log_probability);
        let top =
            token.top.iter().filter(|_| has_top).map(|(token, log_probability)| one(token, Some(*log_probability)));
        shown["top_logprobs"] = top.collect::<Vec<_>>().into();
        shown
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}
