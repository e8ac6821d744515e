//! `sieve serve`: an OpenAI-compatible server for a trained model.
use anyhow::{Context, Result, ensure};
use clap::Args;
use sieve_core::{ModelShape, Recipe, attention_label};
use sieve_host::device::Place;
use sieve_host::interrupt::{Asked, Signals};
use sieve_host::loaded::{PlaceArgs, checkpoint_help, on_device};
use sieve_host::out_of_memory::inference_plan;
use sieve_host::same_bits::SameBitsArgs;
use sieve_host::{hub, loaded, selector, terminal};

use sieve_hf::{ChatTemplate, Kept, SamplingDefaults, peek_model};
use sieve_infer::{LogitRules, Sampling, prompt_part, texts_together};
use sieve_ops::DeviceBackend;
use sieve_plan::{InferenceSize, MemoryVerdict};
use sieve_serve::{Access, Engine, RequestLog, Settings, Stop};
use std::io::IsTerminal;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

/// The variable that holds the key where `--api-key` is absent: other users can read a command line.
const API_KEY: &str = "SIEVE_API_KEY";

/// Arguments of `sieve serve`.
#[derive(Args, Debug)]
pub(crate) struct ServeArgs {
    #[arg(long, value_name = "DIR", help = checkpoint_help())]
    checkpoint: PathBuf,
    /// Address to listen at; only this machine reaches the default, 0.0.0.0 is open to the network
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen at; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// The key that requests must send; the variable SIEVE_API_KEY when absent
    #[arg(long, value_name = "KEY", value_parser = api_key)]
    api_key: Option<String>,
    /// A further host name that a server on a loopback address accepts, such as the one that a proxy passes on; may be
    /// repeated
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    allow_host: Vec<String>,
    /// An origin (scheme and host, as a browser sends it) whose web pages may use the server; may be repeated
    #[arg(long, value_name = "ORIGIN", value_parser = origin)]
    allow_origin: Vec<String>,
    /// The model's name in requests; the folder's name when absent
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// A tokenizer.json in place of the model's own
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Tokens of a sequence with its prompt, at most; the model's context when absent
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_context: Option<u64>,
    /// Sequences that are decoded as one batch, at most; by context and memory when absent, up to 64
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    max_texts: Option<u64>,
    /// Sequences that wait, at most; a request beyond them gets status 429
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..))]
    max_queue: u64,
    /// Print each request as a line of JSON: method, path, status, tokens, seconds, never a text. A terminal, and -v,
    /// show the same in words
    #[arg(long)]
    log_requests: bool,
    #[command(flatten)]
    sparse: selector::SelectorArgs,
    #[command(flatten)]
    same_bits: SameBitsArgs,
    #[command(flatten)]
    place: PlaceArgs,
}

/// A host name as a request's `Host` has it.
fn host_name(text: &str) -> Result<String> {
    ensure!(
        !text.is_empty() && !text.contains(['/', '*', ' ', '?', '#', '@']),
        "a host name has no scheme and no path, such as chat.example"
    );
    Ok(text.to_owned())
}

/// An origin as browsers send it: a scheme, a name and perhaps a port.
fn origin(text: &str) -> Result<String> {
    let name = ["http://", "https://"].into_iter().find_map(|scheme| text.strip_prefix(scheme));
    ensure!(
        name.is_some_and(|name| !name.is_empty() && !name.contains(['/', '*', ' ', '?', '#'])),
        "an origin is http:// or https://, a name and perhaps a port, such as https://chat.example"
    );
    Ok(text.to_owned())
}

/// Texts at once where `--max-texts` is absent, at most, and the tokens of all of them: as many as one batch of
/// `sieve generate` has, of 2048 tokens each.
const USUAL_TEXTS: usize = 64;
const USUAL_TOKENS: usize = USUAL_TEXTS * 2048;

/// A key that a client can send in a header.
fn api_key(key: &str) -> Result<String, String> {
    if key.is_empty() {
        return Err("a value is required".to_owned());
    }
    if key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(key.to_owned());
    }
    let problem = "a key that clients can send in a header has visible ASCII characters, no spaces and no line's end";
    Err(problem.to_owned())
}

/// The key of the environment.
///
/// # Errors
/// The variable is empty, as where a secret could not be read: the server would be open. A key that no client can send.
fn key_of_variable() -> Result<Option<String>> {
    let key = sieve_host::environment::secret(API_KEY)?;
    let key = key.map(|key| api_key(&key)).transpose();
    key.map_err(|problem| anyhow::anyhow!("{API_KEY}: {problem}"))
}

/// The work of `texts` texts of `context` tokens.
fn work(shape: &ModelShape, [context, texts]: [usize; 2]) -> InferenceSize {
    let part = prompt_part(shape, context);
    // One cache more: a prompt is read into a cache of its own.
    InferenceSize { cached_tokens: context, num_caches: texts + 1, ..InferenceSize::rows_of(part, part) }
}

impl ServeArgs {
    /// Texts at once where nothing says how many: up to [`USUAL_TEXTS`], halved until the memory plan says that they
    /// fit, but no fewer than other commands decode together.
    fn usual_texts(&self, shape: &ModelShape, context: usize, place: &Place) -> usize {
        let least = texts_together(context);
        let fits = |texts: usize| {
            let plan = inference_plan(shape, work(shape, [context, texts]), place);
            plan.verdict == MemoryVerdict::Fits
        };
        let most = (USUAL_TOKENS / context.max(1)).clamp(1, USUAL_TEXTS);
        let halved = std::iter::successors(Some(most), |texts| Some(texts / 2)).take_while(|&texts| texts > least);
        halved.into_iter().find(|&texts| fits(texts)).unwrap_or(least)
    }

    /// Tokens of a text.
    fn context(&self, shape: &ModelShape) -> Result<usize> {
        let context = loaded::context(self.max_context, shape)?;
        let has_selector = self.sparse.selector.is_some();
        ensure!(
            !has_selector || self.max_texts.is_none_or(|texts| texts == 1),
            "--max-texts is above 1, and a selector decodes one sequence at a time\n  hint: leave --max-texts out"
        );
        Ok(context)
    }

    /// Texts at once on this device.
    fn texts(&self, shape: &ModelShape, context: usize, place: &Place) -> usize {
        match self.max_texts {
            _ if self.sparse.selector.is_some() => 1,
            Some(texts) => texts as usize,
            None => self.usual_texts(shape, context, place),
        }
    }

    /// The model's name in requests.
    fn model_name(&self) -> String {
        let folder = || {
            let path = self.checkpoint.canonicalize().unwrap_or_else(|_| self.checkpoint.clone());
            path.file_name().map_or_else(|| "sieve".to_owned(), |name| name.to_string_lossy().into_owned())
        };
        self.name.clone().unwrap_or_else(folder)
    }
}

/// Runs `sieve serve`: answers requests until a signal asks for the end.
pub(crate) fn run(mut args: ServeArgs) -> Result<()> {
    if let Some(model) = hub::model(&args.checkpoint)? {
        args.checkpoint = model.path;
        args.name.get_or_insert(model.name);
    }
    if args.api_key.is_none() {
        args.api_key = key_of_variable()?;
    }
    let (_, shape) = peek_model(&args.checkpoint)?;
    let context = args.context(&shape)?;
    // A port in use is said before the device is opened, which a process does once.
    let listener = sieve_serve::listen(&args.host, args.port)?;
    ensure!(
        is_local(&listener) || args.allow_host.is_empty(),
        "--allow-host is for a server on a loopback address, and one on {} answers to every name\n  hint: leave \
         --allow-host out",
        args.host
    );
    let place = args.place.place(&args.checkpoint)?;
    args.same_bits.check(&place.device, args.sparse.selector.is_some(), || Ok(shape.clone()))?;
    let max_texts = args.texts(&shape, context, &place);
    let of_all = |_: &Recipe, shape: &ModelShape| work(shape, [context, max_texts]);
    let planned = args.place.memory.check_inference(&args.checkpoint, &place, of_all);
    planned.with_context(|| {
        format!(
            "planning for {} of {} tokens\n  hint: lower --max-texts or --max-context",
            terminal::counted(max_texts as u64, "sequence"),
            terminal::thousands(context as u64)
        )
    })?;
    on_device!(place, run_on(&args, [context, max_texts], listener))
}

/// Whether only this machine reaches the server.
fn is_local(listener: &TcpListener) -> bool {
    listener.local_addr().is_ok_and(|address| address.ip().is_loopback())
}

/// Loads the model and serves it on the bound `listener` until a signal.
fn run_on<B: DeviceBackend>(
    args: &ServeArgs,
    [context, max_texts]: [usize; 2],
    listener: TcpListener,
    device: &B::Device,
    kept: Kept,
) -> Result<()> {
    let (loaded, own) = loaded::load::<B>(&args.checkpoint, device, kept)?;
    let loaded = args.same_bits.of(loaded);
    let tokenizer = match &args.tokenizer {
        Some(path) => loaded::tokenizer(path, &loaded.recipe, &loaded.shape)?,
        None => own,
    };
    terminal::line(&terminal::model_line(&loaded.line()));
    let eos_id = tokenizer.eos_id()?;
    let (sampling, rules) = sampling(&loaded.sampling_defaults()?);
    let engine = Engine {
        model: &loaded.model,
        device,
        ends: loaded.end_ids(eos_id)?,
        tokenizer: Arc::new(tokenizer),
        selection: args.sparse.selection(&loaded.shape)?,
    };
    let template = ChatTemplate::of_model(&args.checkpoint)?;
    // A template that no chat can be written with is refused here, and not at the first request.
    template.as_ref().map_or(Ok(()), ChatTemplate::check)?;
    let (log, wait_for_lines) = request_log(args.log_requests)?;
    let settings = Settings {
        name: args.model_name(),
        api_key: args.api_key.clone(),
        access: Access {
            is_local: is_local(&listener),
            hosts: std::iter::once(args.host.clone()).chain(args.allow_host.clone()).collect(),
            origins: args.allow_origin.clone(),
        },
        max_texts,
        max_queue: args.max_queue as usize,
        context,
        vocab_size: loaded.shape.vocab_size,
        eos_id,
        template,
        sampling,
        rules,
        attention: attention_label(&loaded.shape),
        selector: args.sparse.selector.as_ref().map(ToString::to_string),
        log,
    };
    let address = listener.local_addr().context("reading the address")?;
    if !settings.access.is_local && settings.api_key.is_none() {
        terminal::warning(&format!("anyone who reaches {address} can use this server; --api-key asks for a key"));
    }
    let stop = Stop::default();
    stop_at_signals(&stop)?;
    terminal::line(&format!(
        "serving {} at http://{address}/v1: {} of {} tokens at once, {} more wait; stop with Ctrl-C",
        settings.name,
        terminal::counted(max_texts as u64, "sequence"),
        terminal::thousands(context as u64),
        terminal::thousands(settings.max_queue as u64)
    ));
    terminal::line(&format!("a page to talk to it: http://{address}/"));
    sieve_serve::serve(listener, &engine, settings, &stop)?;
    wait_for_lines();
    terminal::line("stopped; every request that had begun was answered, or waited for 30 seconds");
    Ok(())
}

/// Lines of requests that wait to be printed, at most.
const MOST_LINES: usize = 4096;
/// Time for them at the end, in which a terminal or a pipe may take none.
const LAST_LINES: Duration = Duration::from_secs(1);

/// What the thread that prints requests is sent.
enum ToPrint {
    Line(String),
    /// The lines before this were printed.
    Last(SyncSender<()>),
}

/// Prints a line of each request: of JSON, or of words on a terminal and with `-v`. A thread prints, so that requests
/// do not wait for a terminal or a pipe that takes no more; lines for which there is no place are counted.
/// The function waits for the lines so far.
fn request_log(as_json: bool) -> Result<(Option<RequestLog>, impl FnOnce())> {
    let (lines, printed) = sync_channel::<ToPrint>(MOST_LINES);
    let last = lines.clone();
    let wait = move || {
        let (done, is_done) = sync_channel(1);
        if last.try_send(ToPrint::Last(done)).is_ok() {
            // An error, too, is an end of the wait.
            let _ = is_done.recv_timeout(LAST_LINES);
        }
    };
    if !as_json && !terminal::is_verbose() && !std::io::stdout().is_terminal() {
        return Ok((None, wait));
    }
    let lost = Arc::new(AtomicU64::new(0));
    let counted = lost.clone();
    let print = move || {
        for next in printed {
            let line = match next {
                ToPrint::Line(line) => line,
                ToPrint::Last(done) => {
                    let _ = done.try_send(());
                    continue;
                }
            };
            if as_json {
                terminal::line(&line);
            } else {
                terminal::status(&line);
            }
            let lost = counted.swap(0, Relaxed);
            if lost > 0 {
                terminal::warning(&format!("{lost} requests have no line, because nobody read the lines before"));
            }
        }
    };
    std::thread::Builder::new().name("request-log".to_owned()).spawn(print).context("starting a thread that prints")?;
    let log = RequestLog::new(move |request| {
        let line = if as_json { request.json().to_string() } else { request.to_string() };
        if lines.try_send(ToPrint::Line(line)).is_err() {
            lost.fetch_add(1, Relaxed);
        }
    });
    Ok((Some(log), wait))
}

/// How a request samples that does not say it: as `generation_config.json` says, of which a line tells, else from the
/// model's own distribution.
fn sampling(defaults: &SamplingDefaults) -> (Sampling, LogitRules) {
    let SamplingDefaults { temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens } = defaults;
    let all = |top_k: &Option<usize>| top_k.map_or_else(|| "all".to_owned(), |top_k| top_k.to_string());
    let set = [
        temperature.map(|value| format!("temperature {value}")),
        top_p.map(|value| format!("top_p {value}")),
        top_k.as_ref().map(|value| format!("top_k {}", all(value))),
        min_p.map(|value| format!("min_p {value}")),
        repetition_penalty.map(|value| format!("repetition_penalty {value}")),
    ];
    let set = set.into_iter().flatten().collect::<Vec<_>>();
    if !set.is_empty() {
        let set = set.join(", ");
        terminal::line(&format!("sampling of requests that do not set it: {set} (generation_config.json)"));
    }
    if let Some(max_new_tokens) = max_new_tokens {
        terminal::warning(&format!(
            "generation_config.json has max_new_tokens = {max_new_tokens}, which this server does not follow"
        ));
    }
    let [temperature, top_p] = [temperature, top_p].map(|value| value.unwrap_or(1.0));
    let rules = loaded::logit_rules(defaults);
    (Sampling { temperature, top_p, top_k: top_k.flatten(), seed: 0 }, rules)
}

/// The first signal lets open requests end, a later one ends the process.
fn stop_at_signals(stop: &Stop) -> Result<()> {
    let (stop, signals) = (stop.clone(), Signals::default());
    let ask = move || match signals.count() {
        Asked::Stop => {
            // First, since printing may wait for whoever reads the output.
            stop.ask();
            terminal::line("stopping when the open requests are answered; once more to quit at once");
        }
        Asked::Same => {}
        Asked::QuitAtOnce => sieve_host::exit::Exit::Interrupted.at_once(),
    };
    ctrlc::set_handler(ask).context("installing the signal handler")
}
