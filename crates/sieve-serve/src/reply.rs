//! Answers in OpenAI's form: as one JSON object, or as chunks of a stream.
use crate::error::ApiError;
use crate::queue::Piece;
use crate::request::{Asked, Form};
use crate::server::Server;
use serde_json::{Map, Value, json};
use sieve_eval::TokenScore;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

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
}

/// One text of the answer.
#[derive(Debug)]
struct Choice {
    /// Text that was not sent yet; without a stream, all text so far.
    text: String,
    tokens: Vec<ShownToken>,
    finish: Option<&'static str>,
    num_tokens: usize,
    has_begun: bool,
    /// The token before the next one, which may decide how that is written.
    last: Option<u32>,
    /// Characters before the next token.
    offset: usize,
}

/// A token with its text and log-probability.
#[derive(Debug)]
struct ShownToken {
    text: String,
    /// `None`: nothing precedes the token.
    log_probability: Option<f64>,
    top: Vec<(String, f64)>,
    offset: usize,
}

impl Reply {
    /// The answer to a request before its first text: an id, and an empty choice for each text.
    pub(crate) fn new(server: Arc<Server>, asked: Arc<Asked>) -> Self {
        let created = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
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
            has_begun: false,
            last: asked.prompt(text).tokens.last().copied().filter(|_| !asked.echo),
            offset: 0,
        };
        let choices = (0..asked.num_texts()).map(choice).collect();
        Self { server, id, created, choices, asked }
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
                choice.show(&self.server, prompt.tokens[0], None);
            }
        }
        match piece {
            Piece::Prompt(scores) => choice.show_all(&self.server, &scores),
            Piece::More(more, scores) => {
                choice.text += &more;
                choice.show_all(&self.server, &scores);
            }
            Piece::End { has_stopped, num_tokens } => {
                choice.num_tokens = num_tokens;
                choice.finish = Some(if has_stopped { "stop" } else { "length" });
            }
            Piece::Failed(error) => return Err(error),
        }
        Ok(())
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
        map
    }

    fn usage(&self) -> Value {
        let prompt: usize = self.asked.prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let new: usize = self.choices.iter().map(|choice| choice.num_tokens).sum();
        json!({"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new})
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
        let Asked { form, streams, num_top, .. } = *self.asked;
        let choice = &mut self.choices[index];
        let (text, tokens, finish) =
            (std::mem::take(&mut choice.text), std::mem::take(&mut choice.tokens), choice.finish);
        let logprobs = num_top.map(|_| match form {
            Form::Completion => completion_logprobs(&tokens),
            Form::Chat => chat_logprobs(&tokens),
        });
        match (form, streams) {
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
        }
    }
}

impl Choice {
    fn show_all(&mut self, server: &Server, scores: &[TokenScore]) {
        scores.iter().for_each(|score| self.show(server, score.token, Some(score)));
    }

    /// Adds a token with its log-probability. As with OpenAI, the likeliest tokens beside it include it in any case.
    fn show(&mut self, server: &Server, token: u32, score: Option<&TokenScore>) {
        let text_of = |token: u32| token_text(server, self.last, token);
        let text = text_of(token);
        let mut top: Vec<(String, f64)> = Vec::new();
        if let Some(score) = score {
            top.extend(score.top.iter().map(|&(token, log_probability)| (text_of(token), log_probability)));
            if score.top.iter().all(|one| one.0 != token) {
                top.push((text.clone(), score.log_probability));
            }
        }
        let (log_probability, offset) = (score.map(|score| score.log_probability), self.offset);
        self.offset += text.chars().count();
        self.last = Some(token);
        self.tokens.push(ShownToken { text, log_probability, top, offset });
    }
}

/// The text of a token after another one; what the vocabulary calls it, if it has no text or is part of a character.
fn token_text(server: &Server, before: Option<u32>, token: u32) -> String {
    let text = server.tokenizer.decode_behind(before.as_slice(), &[token]).unwrap_or_default();
    match text.is_empty() || text.contains(char::REPLACEMENT_CHARACTER) {
        true => server.tokenizer.id_token(token).unwrap_or(text),
        false => text,
    }
}

/// `logprobs` in the form of OpenAI's completions.
fn completion_logprobs(tokens: &[ShownToken]) -> Value {
    let top = |token: &ShownToken| {
        let mut map = Map::new();
        for (text, log_probability) in &token.top {
            // Several tokens may have the same text: the likeliest counts.
            map.entry(text.as_str()).or_insert((*log_probability).into());
        }
        token.log_probability.map(|_| map)
    };
    json!({
        "tokens": tokens.iter().map(|token| token.text.as_str()).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.log_probability).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": tokens.iter().map(|token| token.offset).collect::<Vec<_>>(),
    })
}

/// `logprobs` in the form of OpenAI's chats.
fn chat_logprobs(tokens: &[ShownToken]) -> Value {
    let one = |text: &str, log_probability: Option<f64>| {
        let bytes = text.as_bytes();
        json!({"token": text, "logprob": log_probability, "bytes": bytes})
    };
    let content = tokens.iter().map(|token| {
        let mut shown = one(&token.text, token.log_probability);
        let top = token.top.iter().map(|(text, log_probability)| one(text, Some(*log_probability)));
        shown["top_logprobs"] = top.collect::<Vec<_>>().into();
        shown
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}
