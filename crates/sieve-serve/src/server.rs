//! What a server is made of: the model, names and limits, and what all requests share.
use crate::metrics::Metrics;
use crate::queue::Queue;
use crate::served::RequestLog;
use crate::web::Access;
use serde_json::{Value, json};
use sieve_core::ModelShape;
use sieve_data::Tokenizer;
use sieve_hf::ChatTemplate;
use sieve_infer::{Grammars, LogitRules, Sampling, Selection};
use sieve_nn::Qwen3;
use sieve_ops::DeviceBackend;
use std::sync::Arc;
use tokio::sync::{Semaphore, watch};

/// A model and what decoding with it needs.
#[derive(Debug)]
pub struct Engine<'a, B: DeviceBackend> {
    /// The model.
    pub model: &'a Qwen3<B>,
    /// The device that holds it.
    pub device: &'a B::Device,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Token ids that end a text.
    pub ends: Vec<u32>,
    /// The selector in place of dense attention. With it, `max_texts` is 1.
    pub selection: Option<Selection>,
}

impl<B: DeviceBackend> Engine<'_, B> {
    /// Tokens that may be sampled; embedding rows behind them are padding.
    pub(crate) fn num_tokens(&self) -> usize {
        self.tokenizer.vocab_size().min(self.model.shape().vocab_size)
    }
}

/// Names and limits of a server.
#[derive(Debug)]
pub struct Settings {
    /// The model's name in requests.
    pub name: String,
    /// The key that requests must send, if any.
    pub api_key: Option<String>,
    /// Names of the server, and pages that may use it.
    pub access: Access,
    /// Texts that are decoded as one batch, at most.
    pub max_texts: usize,
    /// Texts that wait, at most.
    pub max_queue: usize,
    /// Tokens of a sequence with its prompt, at most; no more than the model's context.
    pub context: usize,
    /// Rows of the model's embedding.
    pub vocab_size: usize,
    /// The token with which an empty prompt begins.
    pub eos_id: u32,
    /// The model's chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// How a request samples that does not say it. The seed is not used.
    pub sampling: Sampling,
    /// What changes the logits of a request that does not say it.
    pub rules: LogitRules,
    /// What `/v1/models` says about attention.
    pub attention: String,
    /// The selector, if any; its texts are decoded one at a time.
    pub selector: Option<String>,
    /// What hears of each request that was answered, except of `/health` and `/metrics`.
    pub log: Option<RequestLog>,
}

/// Asks a server to stop: it takes no more requests, and ends when those that it has are answered.
#[derive(Clone, Debug)]
pub struct Stop(watch::Sender<bool>);

impl Default for Stop {
    fn default() -> Self {
        Self(watch::Sender::new(false))
    }
}

impl Stop {
    /// Asks. A second call changes nothing.
    pub fn ask(&self) {
        self.0.send_replace(true);
    }

    pub(crate) fn receiver(&self) -> watch::Receiver<bool> {
        self.0.subscribe()
    }
}

/// What all requests share.
#[derive(Debug)]
pub(crate) struct Server {
    /// When the server began, in seconds since 1970.
    pub(crate) begun: u64,
    pub(crate) settings: Settings,
    /// The model's sizes, which say how many keys a token reads.
    pub(crate) shape: ModelShape,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Compiles the structures of answers.
    pub(crate) grammars: Grammars,
    pub(crate) queue: Queue,
    pub(crate) metrics: Arc<Metrics>,
    /// The most bytes of a text that one token stands for, if the tokenizer has such a bound.
    pub(crate) longest_token: Option<usize>,
    /// Turns of requests that take long to read.
    pub(crate) long_requests: Semaphore,
    /// Room for the log-probabilities that answers hold, one permit each.
    pub(crate) scores: Arc<Semaphore>,
}

impl Server {
    /// How many keys the last of `num_tokens` tokens has, and how many of them it reads, as a mean over the layers.
    /// Null with a selector, which chooses keys by what they hold.
    pub(crate) fn keys(&self, num_tokens: usize) -> Value {
        let read = (self.shape.keys_of_last_token(num_tokens) * 10.0).round() / 10.0;
        self.settings.selector.is_none().then(|| json!({"all": num_tokens, "read": read})).into()
    }
}
