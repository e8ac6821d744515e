//! `sieve generate`: continues a prompt and prints each token as it is generated.
use anyhow::{Context, Result, bail};
use clap::Args;
use sieve_core::ShownPath;
use sieve_data::Tokenizer;
use sieve_hf::{ChatMessage, ChatTemplate, Kept, LoadedModel, peek_model};
use sieve_host::environment::{LAUNCHED, variable};
use sieve_host::exit::Exit;
use sieve_host::loaded::{PlaceArgs, checkpoint_help, on_device};
use sieve_host::model_ranks::{ModelBackend, ModelRanks, PlacedModel, own_place, with_ranks};
use sieve_host::same_bits::SameBitsArgs;
use sieve_host::{hub, loaded, selector, terminal};
use sieve_infer::{
    BatchGenerator, Drawn, GenerateConfig, Generator, Sampler, Sampling, Selection, StopTexts, StoppedText, prompt_part,
};
use sieve_ops::DeviceBackend;
use sieve_plan::InferenceSize;
use std::path::PathBuf;
use std::time::Instant;

/// New tokens without `--max-new-tokens`, if the context has room for them.
const DEFAULT_NEW_TOKENS: usize = 128;

/// The value of `--top-p` unless given.
const DEFAULT_TOP_P: f64 = 0.95;

/// Samples decoded as one batch, at most. The bound keeps their KV caches small beside the model, and lets the first
/// samples be printed before all are done.
const MOST_TOGETHER: u64 = 64;

/// Assumed bytes of text per token, to estimate the memory of a prompt before the tokenizer is loaded.
const BYTES_A_TOKEN: usize = 4;

/// Arguments of `sieve generate`.
#[derive(Args, Debug)]
pub(crate) struct GenerateArgs {
    #[arg(long, value_name = "DIR", help = checkpoint_help())]
    checkpoint: PathBuf,
    /// Prompt to continue; an empty one begins a document; `-` reads standard input; may be repeated: up to 64
    /// sequences are generated at once, one token of each per pass
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_file")]
    prompt: Vec<String>,
    /// Read the prompt from this file; `-` reads standard input
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Put the prompt, as a user's message, into the chat template of the model's folder, and print only the answer
    #[arg(long)]
    chat: bool,
    /// With --chat: the system message before the prompt
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Tokens after the prompt, at most; 128 when absent, or what the context has room for
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<usize>,
    /// 0 takes the likeliest token each time; higher is more varied
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f64,
    /// Draw only from the likeliest tokens that together have this probability
    #[arg(long, default_value_t = DEFAULT_TOP_P)]
    top_p: f64,
    /// Draw only from the N likeliest tokens
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Stop string: end where it would come; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Completions of each prompt, each with the next seed; without a selector up to 64 at once, one token of each
    /// per pass
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    samples: u64,
    /// Print one JSON object per completion
    #[arg(long)]
    json: bool,
    /// With --json: also the ids of all tokens, and the log-probability of each new one, as a later training step can
    /// use them
    #[arg(long, requires = "json")]
    logprobs: bool,
    /// The same seed gives the same completion
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    sparse: selector::SelectorArgs,
    #[command(flatten)]
    same_bits: SameBitsArgs,
    #[command(flatten)]
    place: PlaceArgs,
}

impl GenerateArgs {
    /// How tokens are drawn.
    fn sampling(&self) -> Sampling {
        Sampling { temperature: self.temperature, top_p: self.top_p, top_k: self.top_k, seed: self.seed }
    }
}

/// Runs `sieve generate`: continues a prompt with a checkpoint's model, by one process or several.
pub(crate) fn run(args: GenerateArgs) -> Result<Exit> {
    with_ranks(|ranks| run_as(args, ranks))
}

/// Runs the command as one process, or as one of `ranks`.
fn run_as(mut args: GenerateArgs, ranks: Option<&ModelRanks>) -> Result<()> {
    terminal::end_with_reader();
    // A temperature that no text can be drawn at is refused before a model is loaded.
    Sampler::new(args.sampling())?;
    if variable(LAUNCHED).is_some()
        && (args.prompt == ["-"] || args.prompt_file.as_ref().is_some_and(|path| path.as_os_str() == "-"))
    {
        bail!("standard input: the processes of sieve launch cannot read it\n  hint: --prompt-file FILE");
    }
    // A prompt that cannot be read is said before a model is fetched.
    let prompts = prompts(&args)?;
    args.checkpoint = hub::folder(&args.checkpoint)?;
    let chats = chats(&args, &prompts)?;
    let is_single = prompts.len() == 1;
    anyhow::ensure!(
        is_single || args.sparse.selector.is_none(),
        "--selector acts on one --prompt, and there are {}\n  hint: run the command once for each prompt",
        prompts.len()
    );
    let draws = args.samples > 1 || args.top_p != DEFAULT_TOP_P || args.top_k.is_some() || args.seed != 0;
    if args.temperature == 0.0 && draws {
        terminal::warning(
            "at --temperature 0 the likeliest token is taken: --samples are alike, --top-k, --top-p and --seed unused",
        );
    }
    let place = own_place(args.place, ranks)?.for_checkpoint(&args.checkpoint, |_, shape| {
        let texts = chats.as_ref().unwrap_or(&prompts);
        let prompt = texts.iter().map(String::len).max().unwrap_or(0) / BYTES_A_TOKEN + 1;
        let new = args.max_new_tokens.unwrap_or(DEFAULT_NEW_TOKENS);
        let part = prompt_part(shape, prompt);
        InferenceSize {
            cached_tokens: prompt.saturating_add(new),
            num_caches: match args.sparse.selector {
                None if is_single => args.samples.min(MOST_TOGETHER) as usize,
                // One cache more than texts that are decoded together: a prompt is first read into its own.
                None => prompts.len().min(MOST_TOGETHER as usize) + 1,
                Some(_) => 1,
            },
            ranks: ranks.map_or(1, ModelRanks::size),
            ..InferenceSize::rows_of(part, part)
        }
    })?;
    let shape = || Ok(peek_model(&args.checkpoint)?.1);
    args.same_bits.check(&place.device, args.sparse.selector.is_some(), shape)?;
    on_device!(place, run_on(&args, &prompts, chats.as_deref(), ranks))
}

/// With `--chat`, the text of each prompt as a chat.
fn chats(args: &GenerateArgs, prompts: &[String]) -> Result<Option<Vec<String>>> {
    if !args.chat {
        return Ok(None);
    }
    let template = loaded::chat_template(&args.checkpoint, "leave --chat out")?;
    let system = args.system.as_deref().map(|content| ChatMessage { role: "system", content });
    let texts = prompts.iter().map(|content| {
        let user = ChatMessage { role: "user", content };
        template.render(&system.into_iter().chain([user]).collect::<Vec<_>>())
    });
    Ok(Some(texts.collect::<Result<_, _>>()?))
}

/// The texts that the flags say to continue.
fn prompts(args: &GenerateArgs) -> Result<Vec<String>> {
    let text = match (&args.prompt_file, args.prompt.as_slice()) {
        (Some(path), _) if path.as_os_str() != "-" => {
            sieve_files::read_text(path).with_context(|| format!("reading the prompt {}", path.shown()))
        }
        (None, prompts) if prompts != ["-"] => {
            anyhow::ensure!(
                !prompts.iter().any(|prompt| prompt == "-"),
                "--prompt -: standard input can be only one prompt, and there are {}\n  hint: give only -",
                prompts.len()
            );
            return Ok(prompts.to_vec());
        }
        _ => std::io::read_to_string(std::io::stdin()).context("reading the prompt from standard input"),
    };
    Ok(vec![text?])
}

/// Loads the model and continues the prompts, in batches or, for one text or with a selector, one by one.
fn run_on<B: ModelBackend>(
    args: &GenerateArgs,
    prompts: &[String],
    chats: Option<&[String]>,
    ranks: Option<&ModelRanks>,
    device: &B::Device,
    kept: Kept,
) -> Result<()> {
    let mut placed = PlacedModel::<B>::load(&args.checkpoint, device, kept, ranks)?;
    placed.loaded = args.same_bits.of(placed.loaded);
    let loaded = &placed.loaded;
    let tokenizer = loaded::tokenizer(&loaded.tokenizer_path, &loaded.recipe, &loaded.shape)?;
    // The text on standard output may be another program's input.
    terminal::remark(&terminal::model_line(&loaded.line()));
    let tokens = chats.unwrap_or(prompts).iter().map(|prompt| tokenizer.encode_marked(prompt));
    let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
    let longest = tokens.iter().map(Vec::len).max().unwrap_or(0);
    // An empty prompt takes one position for the token it starts from.
    let num_left = loaded.shape.max_seq_len.saturating_sub(longest.max(1));
    let eos_id = tokenizer.eos_id()?;
    let run = Run {
        args,
        prompts,
        chats,
        tokens,
        config: GenerateConfig {
            max_new_tokens: args.max_new_tokens.unwrap_or(num_left.clamp(1, DEFAULT_NEW_TOKENS)),
            sampling: args.sampling(),
            eos_id,
            num_tokens: tokenizer.vocab_size(),
        },
        ends: loaded.end_ids(eos_id)?,
        stop: StopTexts::new(&args.stop, &tokenizer),
        loaded,
        tokenizer: &tokenizer,
        device,
    };
    placed.checked(if prompts.len() > 1 || (args.samples > 1 && args.sparse.selector.is_none()) {
        run.in_batches()
    } else {
        run.one_by_one()
    })
}

/// Model, prompts and settings of one run of the command.
struct Run<'a, B: DeviceBackend> {
    args: &'a GenerateArgs,
    prompts: &'a [String],
    /// With `--chat`, the text of each prompt as a chat.
    chats: Option<&'a [String]>,
    /// Token ids of each prompt, or of its chat.
    tokens: Vec<Vec<u32>>,
    /// Generation settings of the first sample.
    config: GenerateConfig,
    /// Token ids that end a text.
    ends: Vec<u32>,
    /// Texts that end a text.
    stop: StopTexts,
    loaded: &'a LoadedModel<B>,
    tokenizer: &'a Tokenizer,
    device: &'a B::Device,
}

impl<B: DeviceBackend> Run<'_, B> {
    /// Generation settings of a sample, with a seed of its own.
    fn config(&self, sample: u64) -> GenerateConfig {
        let seed = self.args.seed.wrapping_add(sample);
        let sampling = Sampling { seed, ..self.config.sampling };
        GenerateConfig { sampling, ..self.config }
    }

    /// Decodes up to [`MOST_TOGETHER`] texts at once: samples of one prompt, or one sample of several prompts.
    fn in_batches(&self) -> Result<()> {
        // Tokens after each text's first one, which the pass over the prompt gives.
        let (mut later_tokens, mut seconds) = (0, 0.0);
        let (model, num_prompts) = (&self.loaded.model, self.prompts.len());
        let num_texts = num_prompts * self.args.samples as usize;
        // (index of the prompt, number of the sample) of a text.
        let place = |text: usize| (text % num_prompts, (text / num_prompts) as u64);
        let mut first = 0;
        while first < num_texts {
            let (prompt, sample) = place(first);
            let config = self.config(sample);
            let most = match num_prompts {
                1 => num_texts - first,
                _ => num_prompts - prompt,
            };
            let count = most.min(MOST_TOGETHER as usize);
            let generator = match num_prompts {
                1 => BatchGenerator::new(model, &self.tokens[0], config, count, self.device)?,
                _ => BatchGenerator::of_prompts(model, &self.tokens[prompt..prompt + count], config, self.device)?,
            };
            let prompts: Vec<usize> = (first..first + count).map(|text| place(text).0).collect();
            let generator = generator.ending_at(&self.ends).with_scores(self.args.logprobs);
            let texts = self.write_together(generator, &prompts)?;
            for (text, written) in (first..).zip(&texts) {
                let (prompt, sample) = place(text);
                self.print_head(prompt, sample);
                if !self.args.json {
                    terminal::text(&format!("{}{}\n", self.shown_prompt(prompt), written.text));
                }
                let selection = None;
                self.print_numbers(prompt, sample, written, selection);
                later_tokens += written.token_times.len().saturating_sub(1);
            }
            seconds += texts.iter().map(Written::seconds).fold(0.0, f64::max);
            first += count;
        }
        if !self.args.json {
            let speed = later_tokens as f64 / f64::max(seconds, 1e-9);
            terminal::remark(&format!("all completions together: {speed:.1} tokens a second"));
        }
        Ok(())
    }

    /// Decodes the samples of the only prompt one after the other, with `--selector` if it is given.
    fn one_by_one(&self) -> Result<()> {
        for sample in 0..self.args.samples {
            let (model, config) = (&self.loaded.model, self.config(sample));
            let generator = Generator::new(model, &self.tokens[0], config, self.device)?.ending_at(&self.ends);
            let mut generator = generator.with_scores(self.args.logprobs);
            if let Some(selection) = self.args.sparse.selection(&self.loaded.shape)? {
                generator = generator.with_selection(selection);
            }
            self.print_head(0, sample);
            let written = self.write(&mut generator)?;
            self.print_numbers(0, sample, &written, generator.selection());
            let Some(selection) = generator.selection() else {
                continue;
            };
            let totals = selection.totals();
            let is_dense = selection.selectors().iter().all(|one| one.name() == "dense");
            if totals.dense_calls == totals.calls && !is_dense {
                terminal::warning(&format!(
                    "{} left nothing out of so short a sequence: all {} calls of attention ran dense, so this is the \
                     dense model's completion",
                    selection.selectors().name(),
                    totals.calls
                ));
            } else {
                terminal::remark(&selector::summary(selection));
            }
        }
        Ok(())
    }

    /// What is printed before the text that a prompt is continued with: with `--chat` the answer is printed alone.
    fn shown_prompt(&self, prompt: usize) -> &str {
        match self.chats {
            Some(_) => "",
            None => &self.prompts[prompt],
        }
    }

    /// Generates a sample of each of `prompts` in one batch.
    fn write_together(&self, mut generator: BatchGenerator<'_, B>, prompts: &[usize]) -> Result<Vec<Written>> {
        let texts = prompts.iter().map(|prompt| Growing::new(&self.stop, self.tokenizer, &self.tokens[*prompt]));
        let mut texts = texts.collect::<Result<Vec<_>>>()?;
        while let Some(tokens) = generator.next() {
            for (at, token) in tokens?.into_iter().enumerate() {
                let text = &mut texts[at];
                match token {
                    Some(_) if text.push(generator.last_drawn(at))?.1 => generator.end(at),
                    None if text.written.stopped == "max_new_tokens" => text.written.end(generator.last_drawn(at)),
                    _ => {}
                }
            }
        }
        let finished = texts.into_iter().map(Growing::finish);
        finished.map(|text| Ok(text?.0)).collect()
    }

    /// Generates one sample of the only prompt. Without `--json`, prints its text token by token.
    fn write(&self, generator: &mut Generator<'_, B>) -> Result<Written> {
        let show = |text: &str| {
            if !self.args.json {
                terminal::text(text);
            }
        };
        show(self.shown_prompt(0));
        let mut growing = Growing::new(&self.stop, self.tokenizer, &self.tokens[0])?;
        let result = loop {
            match generator.next() {
                Some(Ok(_)) => {}
                Some(Err(error)) => break Err(error.into()),
                None if growing.written.token_times.len() < generator.max_new_tokens() => {
                    growing.written.end(generator.last_drawn());
                    break Ok(());
                }
                None => break Ok(()),
            }
            let (text, is_met) = growing.push(generator.last_drawn())?;
            show(&text);
            if is_met {
                break Ok(());
            }
        };
        let (written, rest) = growing.finish()?;
        show(&format!("{rest}\n"));
        result.map(|()| written)
    }

    /// Prints the line above a text, if there are several texts.
    fn print_head(&self, prompt: usize, sample: u64) {
        if self.prompts.len() > 1 && !self.args.json {
            terminal::line(&format!("--- prompt {} of {}", prompt + 1, self.prompts.len()));
        }
        if self.args.samples > 1 && !self.args.json {
            let (number, all) = (sample + 1, self.args.samples);
            let seed = self.args.seed.wrapping_add(sample);
            terminal::line(&format!("--- sample {number} of {all}, seed {seed}"));
        }
    }

    /// Prints a sample's numbers, as JSON with its text or as a line.
    fn print_numbers(&self, index: usize, sample: u64, written: &Written, selection: Option<&Selection>) {
        // An empty prompt is one token, the end of a document.
        let read = match self.tokens[index].as_slice() {
            [] => &[self.config.eos_id],
            tokens => tokens,
        };
        let num_prompt_tokens = read.len();
        if written.token_times.is_empty() && written.stopped == "end of document" {
            self.warn_of_empty_text();
        }
        if !self.args.json {
            return terminal::remark(&written.speed(num_prompt_tokens));
        }
        let chat = self.chats.map(|chats| &chats[index]);
        let (seed, prompt) = (self.args.seed.wrapping_add(sample), &self.prompts[index]);
        let selector = self.args.sparse.selector.as_ref().map(ToString::to_string);
        let mut json = serde_json::json!({
            "prompt": prompt, "chat": chat, "text": written.text, "seed": seed, "stopped": written.stopped,
            "prompt_tokens": num_prompt_tokens, "new_tokens": written.token_times.len(),
            "prompt_seconds": written.prompt_seconds(), "tokens_per_second": written.tokens_per_second(),
            "median_token_seconds": written.median_token_seconds(),
            "selector": selector, "paths": selection.map(Selection::paths),
        });
        if self.args.logprobs {
            json["prompt_token_ids"] = serde_json::json!(read);
            json["token_ids"] = written.drawn.iter().map(|drawn| drawn.token).collect();
            json["token_logprobs"] = written.drawn.iter().map(|drawn| drawn.log_probability).collect();
        }
        terminal::line(&json.to_string());
    }

    /// Warns that the model ended the text before its first token, with a hint at `--chat` where it has a chat
    /// template.
    fn warn_of_empty_text(&self) {
        let hint = match ChatTemplate::of_model(&self.args.checkpoint) {
            Ok(Some(_)) if !self.args.chat => "it has a chat template: --chat",
            _ => "a different prompt, a higher --temperature or a different --seed may give some",
        };
        terminal::warning(&format!("the model ended the completion at once; {hint}"));
    }
}

/// A finished sample, as it is printed.
struct Written {
    text: String,
    /// Why the sample ended: "stop text", "end of document" or "max_new_tokens".
    stopped: &'static str,
    begun: Instant,
    /// When each token was generated. The forward pass over the prompt gives the first token.
    token_times: Vec<Instant>,
    /// The tokens, and the end token where the model drew one.
    drawn: Vec<Drawn>,
}

impl Written {
    /// The model ended the text with this token.
    fn end(&mut self, drawn: Option<Drawn>) {
        self.stopped = "end of document";
        self.drawn.extend(drawn);
    }

    fn prompt_seconds(&self) -> f64 {
        let first = self.token_times.first();
        first.map_or(0.0, |first| (*first - self.begun).as_secs_f64())
    }

    /// Seconds from the first token to the last.
    fn seconds(&self) -> f64 {
        let ends = self.token_times.first().zip(self.token_times.last());
        ends.map_or(0.0, |(first, last)| (*last - *first).as_secs_f64())
    }

    fn tokens_per_second(&self) -> f64 {
        self.token_times.len().saturating_sub(1) as f64 / self.seconds().max(1e-9)
    }

    /// Median seconds between tokens. Unlike the mean, it leaves out the first tokens of a process, which wait for
    /// kernels to load and caches to grow.
    fn median_token_seconds(&self) -> Option<f64> {
        let between = self.token_times.windows(2).map(|pair| pair[1] - pair[0]);
        let mut seconds: Vec<f64> = between.map(|time| time.as_secs_f64()).collect();
        seconds.sort_by(f64::total_cmp);
        seconds.get(seconds.len() / 2).copied()
    }

    /// The line about a sample: its tokens, their speed, and the time of the prompt.
    fn speed(&self, num_prompt_tokens: usize) -> String {
        format!(
            "{} tokens, {:.1} a second; the prompt of {num_prompt_tokens} took {:.2} s",
            self.token_times.len(),
            self.tokens_per_second(),
            self.prompt_seconds()
        )
    }
}

/// A sample that is still being generated.
struct Growing<'t> {
    text: StoppedText<'t>,
    written: Written,
}

impl<'t> Growing<'t> {
    /// A sample that continues the tokens of `prompt`.
    fn new(stop: &StopTexts, tokenizer: &'t Tokenizer, prompt: &[u32]) -> Result<Self> {
        Ok(Self {
            text: stop.until(tokenizer.decode_stream(prompt)?),
            written: Written {
                text: String::new(),
                stopped: "max_new_tokens",
                begun: Instant::now(),
                token_times: Vec::new(),
                drawn: Vec::new(),
            },
        })
    }

    /// The text that a token adds, and whether a stop text follows it.
    fn push(&mut self, drawn: Option<Drawn>) -> Result<(String, bool)> {
        self.written.token_times.push(Instant::now());
        let Some((drawn, token)) = drawn.and_then(|drawn| Some((drawn, drawn.token?))) else {
            bail!("a text has no token after a step");
        };
        self.written.drawn.push(drawn);
        let (text, is_met) = self.text.push(token)?;
        self.written.text += &text;
        if is_met {
            self.written.stopped = "stop text";
        }
        Ok((text, is_met))
    }

    /// The finished sample, and the end of its text that was held back as a possible stop text.
    fn finish(mut self) -> Result<(Written, String)> {
        let (text, is_met) = self.text.finish()?;
        self.written.text += &text;
        if is_met {
            self.written.stopped = "stop text";
        }
        Ok((self.written, text))
    }
}
