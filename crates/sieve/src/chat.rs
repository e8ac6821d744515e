//! `sieve chat`: a conversation with a model in the terminal.
use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::json;
use sieve_core::ShownPath;
use sieve_data::Tokenizer;
use sieve_hf::{ChatMessage, ChatTemplate, Kept, peek_model};
use sieve_host::exit::Exit;
use sieve_host::loaded::{PlaceArgs, checkpoint_help, on_device};
use sieve_host::{hub, loaded, terminal};
use sieve_infer::{AnswerConfig, Conversation, Sampler, Sampling, StopTexts, prompt_part};
use sieve_ops::DeviceBackend;
use sieve_plan::InferenceSize;
use std::fs::OpenOptions;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

/// What `/help` prints, and the head of a conversation on a terminal.
const HELP: &str = "/reset begins again, /save FILE appends the conversation to FILE as a line of a chat data set, \
                    /help prints this, /quit ends\na line that ends with \\ goes on in the next one; Ctrl-C stops an \
                    answer";

/// How answers are drawn where neither a flag nor the model's `generation_config.json` says it.
const TEMPERATURE: f64 = 0.8;
const TOP_P: f64 = 0.95;

/// Arguments of `sieve chat`.
#[derive(Args, Debug)]
pub(crate) struct ChatArgs {
    #[arg(long, value_name = "DIR", help = checkpoint_help())]
    checkpoint: PathBuf,
    /// The system message, with which the conversation begins
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Tokens of an answer, at most; what the context has room for when absent
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_new_tokens: Option<u64>,
    /// Tokens of the conversation, at most; the model's context when absent
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..))]
    max_context: Option<u64>,
    /// 0 takes the likeliest token each time; the model's generation_config.json when absent, else 0.8
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Draw only from the likeliest tokens that together have this probability; generation_config.json when absent,
    /// else 0.95
    #[arg(long)]
    top_p: Option<f64>,
    /// Draw only from the N likeliest tokens; generation_config.json when absent, else all
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// The same seed and the same messages give the same answers
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Runs `sieve chat`: reads messages from standard input and answers each.
pub(crate) fn run(mut args: ChatArgs) -> Result<()> {
    // A temperature that no text can be drawn at is refused before a model is loaded.
    Sampler::new(Sampling {
        temperature: args.temperature.unwrap_or(TEMPERATURE),
        top_p: args.top_p.unwrap_or(TOP_P),
        top_k: args.top_k,
        seed: args.seed,
    })?;
    args.checkpoint = hub::folder(&args.checkpoint)?;
    // A model without a template is said before it is loaded.
    let template = loaded::chat_template(&args.checkpoint, "sieve generate continues a text")?;
    let context = loaded::context(args.max_context, &peek_model(&args.checkpoint)?.1)?;
    let place = args.place.for_checkpoint(&args.checkpoint, |_, shape| {
        let part = prompt_part(shape, context);
        InferenceSize { cached_tokens: context, num_caches: 1, ..InferenceSize::rows_of(part, part) }
    });
    let place = place.context("planning for a conversation that fills the context\n  hint: lower --max-context")?;
    let (checkpoint, asked) = (
        args.checkpoint,
        Settings {
            system: args.system,
            max_new_tokens: args.max_new_tokens.map_or(usize::MAX, |tokens| tokens as usize),
            max_context: context,
            temperature: args.temperature,
            top_p: args.top_p,
            top_k: args.top_k,
            seed: args.seed,
        },
    );
    on_device!(place, run_on(&checkpoint, &asked, &template))
}

/// The flags that say how to answer.
struct Settings {
    system: Option<String>,
    max_new_tokens: usize,
    max_context: usize,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<usize>,
    seed: u64,
}

/// Loads the model and talks until the input ends.
fn run_on<B: DeviceBackend>(
    checkpoint: &Path,
    asked: &Settings,
    template: &ChatTemplate,
    device: &B::Device,
    kept: Kept,
) -> Result<()> {
    let (loaded, tokenizer) = loaded::load::<B>(checkpoint, device, kept)?;
    terminal::remark(&terminal::model_line(&loaded.line()));
    let own = loaded.sampling_defaults()?;
    let eos_id = tokenizer.eos_id()?;
    let config = AnswerConfig {
        max_new_tokens: asked.max_new_tokens,
        sampling: Sampling {
            temperature: asked.temperature.or(own.temperature).unwrap_or(TEMPERATURE),
            top_p: asked.top_p.or(own.top_p).unwrap_or(TOP_P),
            top_k: asked.top_k.or(own.top_k.flatten()),
            seed: asked.seed,
        },
        rules: loaded::logit_rules(&own),
        ends: loaded.end_ids(eos_id)?,
        num_tokens: tokenizer.vocab_size(),
    };
    let mut talk = Talk {
        conversation: Conversation::new(&loaded.model, asked.max_context, device),
        tokenizer: &tokenizer,
        template,
        config,
        system: asked.system.clone(),
        said: Vec::new(),
        answering: Answering::install()?,
    };
    let is_person = std::io::stdin().is_terminal();
    if is_person {
        terminal::remark(HELP);
    }
    let mut input = std::io::stdin().lock();
    while let Some(line) = message(&mut input, is_person)? {
        let Ok(line) = line else {
            terminal::warning("the message is not UTF-8 or has a NUL, so it was not answered");
            continue;
        };
        match line.split_once([' ', '\t']).map_or((line.trim(), ""), |(command, rest)| (command, rest.trim())) {
            ("", _) => {}
            ("/quit" | "/exit", "") => break,
            ("/help", "") => terminal::line(HELP),
            ("/reset", "") => {
                talk.said.clear();
                terminal::line("the conversation begins again");
            }
            ("/save", file) if !file.is_empty() => match talk.save(Path::new(file)) {
                Ok(saved) => terminal::line(&saved),
                Err(error) => terminal::warning(&format!("{error:#}")),
            },
            ("/save", _) => terminal::warning("/save lacks the file\n  hint: /save chats.jsonl"),
            (command @ ("/quit" | "/exit" | "/help" | "/reset"), rest) => {
                terminal::warning(&format!("{command} stands alone, and {rest:?} follows it"));
            }
            (command, _) if command.starts_with('/') => terminal::warning(&format!("no command {line}\n{HELP}")),
            _ => talk.answer(line)?,
        }
    }
    Ok(())
}

/// A line that cannot be a message: it has a NUL, or bytes that are not UTF-8.
struct NoText;

/// The next message; `None` at the end of the input. A line that ends with `\` goes on in the next one.
fn message(input: &mut impl BufRead, is_person: bool) -> Result<Option<Result<String, NoText>>> {
    let mut message = Vec::new();
    let text = |message: Vec<u8>| match String::from_utf8(message) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(NoText),
    };
    loop {
        if is_person {
            terminal::text(if message.is_empty() { "> " } else { "  " });
        }
        let mut line = Vec::new();
        let num_bytes = input.read_until(b'\n', &mut line).context("reading a message from standard input")?;
        let ends = line.iter().rev().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
        let line = &line[..line.len() - ends];
        let (line, goes_on) = line.strip_suffix(b"\\").map_or((line, false), |line| (line, true));
        message.extend_from_slice(line);
        if num_bytes == 0 {
            return Ok((!message.is_empty()).then(|| text(message)));
        }
        if !goes_on {
            return Ok(Some(text(message)));
        }
        message.push(b'\n');
    }
}

/// A conversation and what answering takes.
struct Talk<'a, B: DeviceBackend> {
    conversation: Conversation<'a, B>,
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    config: AnswerConfig,
    system: Option<String>,
    /// The messages of the person and the answers, in turns.
    said: Vec<String>,
    answering: Answering,
}

impl<B: DeviceBackend> Talk<'_, B> {
    /// The messages so far, with their roles.
    fn messages(&self) -> Vec<ChatMessage<'_>> {
        let system = self.system.as_deref().map(|content| ChatMessage { role: "system", content });
        let roles = ["user", "assistant"].into_iter().cycle();
        let said = self.said.iter().zip(roles).map(|(content, role)| ChatMessage { role, content });
        system.into_iter().chain(said).collect()
    }

    /// Answers a message and prints the answer while it is written. A message that leaves no room for an answer, or
    /// that the template refuses, is taken back.
    fn answer(&mut self, message: String) -> Result<()> {
        self.said.push(message);
        let begun = Instant::now();
        let take_back = |said: &mut Vec<String>, error: anyhow::Error| {
            said.pop();
            terminal::warning(&format!("{error:#}\n  /reset begins again; the message was not answered"));
        };
        let text = self.template.render(&self.messages()).map_err(anyhow::Error::from);
        let tokens = match text.and_then(|text| Ok(self.tokenizer.encode_marked(&text)?)) {
            Ok(tokens) => tokens,
            Err(error) => {
                take_back(&mut self.said, error);
                return Ok(());
            }
        };
        let mut answer = match self.conversation.answer(&tokens, &self.config) {
            Ok(answer) => answer,
            Err(error) => {
                take_back(&mut self.said, error.into());
                return Ok(());
            }
        };
        let (num_unread, mut num_new) = (answer.num_unread(), 0);
        let mut stream = StopTexts::new(&[], self.tokenizer).until(self.tokenizer.decode_stream(&tokens)?);
        let mut written = String::new();
        let mut show = |text: &str| {
            written += text;
            terminal::text(text);
        };
        self.answering.begin();
        let mut result = Ok(());
        for token in answer.by_ref() {
            match token.and_then(|token| stream.push(token)) {
                Ok((text, _)) => show(&text),
                Err(error) => result = Err(error.into()),
            }
            num_new += 1;
            if self.answering.was_stopped() {
                break;
            }
        }
        let was_stopped = self.answering.end();
        let is_full = answer.remaining() == 0 && num_new > 0 && self.config.max_new_tokens > num_new;
        drop(answer);
        show(&stream.finish()?.0);
        terminal::text("\n");
        let is_short = is_full && tokens.len() + num_new >= self.conversation.context();
        self.said.push(written);
        let seconds = begun.elapsed().as_secs_f64();
        if terminal::is_verbose() {
            terminal::remark(&format!(
                "{num_new} tokens in {seconds:.2} s; {num_unread} of {} tokens before them were read",
                tokens.len()
            ));
        }
        if was_stopped {
            terminal::remark("stopped");
        } else if is_short {
            terminal::warning("the answer ends where the context does; /reset begins again");
        }
        result
    }

    /// Appends the conversation to a file, as one line of a chat data set; returns what to print.
    fn save(&self, file: &Path) -> Result<String> {
        let messages = self.messages();
        ensure!(!self.said.is_empty(), "nothing was said yet\n  hint: /save comes after an answer");
        let messages = messages.iter().map(|one| json!({"role": one.role, "content": one.content})).collect::<Vec<_>>();
        let line = json!({"messages": messages}).to_string() + "\n";
        let saving = || format!("saving to {}", file.shown());
        let mut out = OpenOptions::new().create(true).append(true).open(file).with_context(saving)?;
        out.write_all(line.as_bytes()).with_context(saving)?;
        Ok(format!("{} messages are a line of {} now", messages.len(), file.shown()))
    }
}

/// Whether an answer is being written, so that Ctrl-C stops it, and whether it was to stop. Without an answer Ctrl-C
/// ends the program.
#[derive(Clone, Default)]
struct Answering {
    is_on: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
}

impl Answering {
    /// Installs the signal handler.
    fn install() -> Result<Self> {
        let answering = Self::default();
        let handled = answering.clone();
        let stop = move || {
            // A second signal during one answer ends the program, in case a token takes long.
            if !handled.is_on.load(Relaxed) || handled.stop.swap(true, Relaxed) {
                terminal::text("\n");
                Exit::Interrupted.at_once();
            }
        };
        ctrlc::set_handler(stop).context("installing the signal handler")?;
        Ok(answering)
    }

    fn begin(&self) {
        self.stop.store(false, Relaxed);
        self.is_on.store(true, Relaxed);
    }

    fn was_stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// Ends the answer; returns whether it was to stop.
    fn end(&self) -> bool {
        self.is_on.store(false, Relaxed);
        self.was_stopped()
    }
}
