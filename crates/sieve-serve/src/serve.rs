//! Starts the server's threads, and ends them.
use crate::error::ServeError;
use crate::listen;
use crate::metrics::Metrics;
use crate::queue::Queue;
use crate::worker::Worker;
use sieve_data::Tokenizer;
use sieve_eval::Selection;
use sieve_hf::ChatTemplate;
use sieve_nn::Qwen3;
use sieve_ops::DeviceBackend;
use std::net::TcpListener;
use std::sync::Arc;
use tokio::sync::watch;

/// Threads that check requests and cut their texts into tokens.
const READERS: usize = 4;

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
    /// Texts that are decoded as one batch, at most.
    pub max_texts: usize,
    /// Texts that wait, at most.
    pub max_queue: usize,
    /// Tokens of a text with its prompt, at most; no more than the model's context.
    pub context: usize,
    /// Rows of the model's embedding.
    pub vocab_size: usize,
    /// The token with which an empty prompt begins.
    pub eos_id: u32,
    /// The model's chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// What `/v1/models` says about attention.
    pub attention: String,
    /// The selector, if any; its texts are decoded one at a time.
    pub selector: Option<String>,
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
    pub(crate) settings: Settings,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) queue: Queue,
    pub(crate) metrics: Arc<Metrics>,
}

/// Answers requests at `listener` until `stop` asks for the end. The calling thread computes.
///
/// # Errors
/// The system gives no thread.
pub fn serve<B: DeviceBackend>(
    listener: TcpListener,
    engine: &Engine<'_, B>,
    settings: Settings,
    stop: &Stop,
) -> Result<(), ServeError> {
    let (queue, texts, waiting) = Queue::new(settings.max_queue);
    let (size, metrics) = ([settings.max_texts, settings.context], Arc::new(Metrics::default()));
    let server = Arc::new(Server { settings, tokenizer: engine.tokenizer.clone(), queue, metrics: metrics.clone() });
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(READERS)
        .build()?;
    let stop = stop.receiver();
    let requests = std::thread::Builder::new().name("requests".to_owned()).spawn(move || {
        let done = runtime.block_on(listen::accept(listener, server, stop));
        // Drops unanswered requests, and with them the sending end of the queue, so that the worker ends.
        runtime.shutdown_background();
        done
    })?;
    Worker::new(engine, size, &metrics, (texts, waiting)).run();
    match requests.join() {
        Ok(done) => Ok(done?),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
