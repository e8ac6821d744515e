//! Starts the server's threads, and ends them.
use crate::error::ServeError;
use crate::http;
use crate::listen;
use crate::metrics::Metrics;
use crate::queue::Queue;
use crate::reply::seconds_since_1970;
use crate::request::MOST_SCORES;
use crate::server::{Engine, Server, Settings, Stop};
use crate::worker::Worker;
use sieve_infer::Grammars;
use sieve_ops::DeviceBackend;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, watch};

/// Threads that check requests and cut their texts into tokens.
const READERS: usize = 4;
/// Of these, how many read long requests.
const LONG_READERS: usize = 2;

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
    let begun = seconds_since_1970();
    let tokenizer = engine.tokenizer.clone();
    let long_requests = Semaphore::new(LONG_READERS);
    let longest_token = tokenizer.longest_token_bytes();
    let shape = engine.model.shape().clone();
    let grammars = Grammars::new(tokenizer.clone(), engine.num_tokens(), &engine.ends);
    let server = Arc::new(Server {
        begun,
        settings,
        shape,
        tokenizer,
        grammars,
        queue,
        metrics: metrics.clone(),
        longest_token,
        long_requests,
        scores: Arc::new(Semaphore::new(MOST_SCORES as usize)),
    });
    listener.set_nonblocking(true)?;
    let runtime = runtime()?;
    let stop = stop.receiver();
    let requests = std::thread::Builder::new().name("requests".to_owned()).spawn(move || {
        // A reader may run on, so it is not the last holder that ends the queue.
        let end_answers = || server.queue.end();
        let done = runtime.block_on(listen::accept(listener, http::router(server.clone()), stop, end_answers));
        server.queue.end();
        // Drops unanswered requests.
        runtime.shutdown_background();
        done
    })?;
    Worker::new(engine, size, &metrics, (texts, waiting)).run();
    match requests.join() {
        Ok(done) => Ok(done?),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Answers `GET /metrics` at `listener` with what `text` says then, in a thread that ends with the process.
///
/// # Errors
/// The system gives no thread.
pub fn serve_metrics(
    listener: TcpListener,
    text: impl Fn() -> String + Clone + Send + Sync + 'static,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let runtime = runtime()?;
    let serve = move || {
        let (_stop, never) = watch::channel(false);
        runtime.block_on(listen::accept(listener, http::metrics_alone(text), never, || ()))
    };
    std::thread::Builder::new().name("sieve-metrics".to_owned()).spawn(serve)?;
    Ok(())
}

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_io().enable_time().max_blocking_threads(READERS).build()
}
