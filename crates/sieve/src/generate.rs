//! `sieve generate`: text as it comes.
use crate::device::{Device, DeviceChoice};
use crate::out_of_memory::MemoryArgs;
use crate::{loaded, selector, terminal};
use anyhow::{Context, Result};
use burn::tensor::DType;
use burn_cuda::CudaDevice;
use burn_flex::{Flex, FlexDevice};
use clap::Args;
use sieve_data::Tokenizer;
use sieve_eval::{GenerateConfig, Generator, Sampling, Selection, StopTexts};
use sieve_ops::{Cuda, SieveBackend};
use sieve_plan::InferenceSize;
use sieve_select::LayerSelectors;
use std::path::PathBuf;
use std::time::Instant;

/// New tokens when nothing is said and the context has room for them.
const DEFAULT_NEW_TOKENS: usize = 128;

/// Bytes of text that a token stands for, about: enough to tell the memory of a prompt before there is a tokenizer.
const BYTES_A_TOKEN: usize = 4;

/// Arguments of `sieve generate`.
#[derive(Args, Debug)]
pub(crate) struct GenerateArgs {
    /// A checkpoint (step-N), a run folder (then its latest), an export, or another Hugging Face folder of Qwen3 or
    /// Doge
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Text to continue; when empty, the text begins at a document's start; `-` reads standard input
    #[arg(long, value_name = "TEXT", required_unless_present = "prompt_file")]
    prompt: Option<String>,
    /// Continue the text of this file
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Tokens after the prompt, at most; 128 when absent, or what the context still holds
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<usize>,
    /// 0 takes the likeliest token each time; higher is more varied
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f64,
    /// Draw only from the likeliest tokens that together have this probability
    #[arg(long, default_value_t = 0.95)]
    top_p: f64,
    /// Draw only from the N likeliest tokens
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// End where this text would come; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// How many texts to write, each with the next seed
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    samples: u64,
    /// Print one JSON object a text
    #[arg(long)]
    json: bool,
    /// The same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[arg(long, value_name = "NAME:…", value_parser = selector::parse, help = selector::ABOUT)]
    selector: Option<LayerSelectors>,
    #[arg(long, value_name = "N", requires = "selector", help = selector::ABOUT_CHUNK)]
    chunk: Option<usize>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    #[command(flatten)]
    memory: MemoryArgs,
}

/// Runs the command.
pub(crate) fn run(args: GenerateArgs) -> Result<()> {
    let prompt = prompt(&args)?;
    let device = loaded::device(args.device, &args.checkpoint)?;
    (args.memory).check_inference(&args.checkpoint, &device, |_, _| {
        let prompt = prompt.len() / BYTES_A_TOKEN + 1;
        let new = args.max_new_tokens.unwrap_or(DEFAULT_NEW_TOKENS);
        InferenceSize {
            rows: 1,
            seq_len: prompt,
            cached_tokens: prompt.saturating_add(new),
            num_caches: 1,
            logit_tokens: 0,
        }
    })?;
    match device {
        Device::Cpu => run_on::<Flex>((&args, &prompt), &FlexDevice, DType::F32),
        Device::Cuda(gpu) => {
            run_on::<Cuda>((&args, &prompt), &CudaDevice::new(gpu.index), DType::BF16)
        }
    }
}

/// The text to continue.
fn prompt(args: &GenerateArgs) -> Result<String> {
    match (&args.prompt_file, args.prompt.as_deref()) {
        (Some(path), _) => std::fs::read_to_string(path)
            .with_context(|| format!("reading the prompt {}", path.display())),
        (None, Some("-")) => std::io::read_to_string(std::io::stdin())
            .context("reading the prompt from standard input"),
        (None, prompt) => Ok(prompt.unwrap_or_default().to_owned()),
    }
}

fn run_on<B: SieveBackend>(
    (args, prompt): (&GenerateArgs, &str),
    device: &B::Device,
    dtype: DType,
) -> Result<()> {
    let (loaded, tokenizer) = loaded::load::<B>(&args.checkpoint, device, dtype)?;
    let tokens = tokenizer.encode_marked(prompt)?;
    // An empty prompt takes one position for the token it starts from.
    let room = loaded.shape.max_seq_len.saturating_sub(tokens.len().max(1));
    for sample in 0..args.samples {
        let seed = args.seed.wrapping_add(sample);
        let config = GenerateConfig {
            max_new_tokens: args
                .max_new_tokens
                .unwrap_or(room.clamp(1, DEFAULT_NEW_TOKENS)),
            sampling: Sampling {
                temperature: args.temperature,
                top_p: args.top_p,
                top_k: args.top_k,
                seed,
            },
            eos_id: tokenizer.eos_id()?,
            num_tokens: tokenizer.vocab_size(),
        };
        let mut generator = Generator::new(&loaded.model, &tokens, config, device)?;
        if let Some(selector) = &args.selector {
            let selection = selector::selection(selector, args.chunk, &loaded.shape)?;
            generator = generator.with_selection(selection);
        }
        if args.samples > 1 && !args.json {
            let number = sample + 1;
            terminal::line(&format!(
                "--- sample {number} of {}, seed {seed}",
                args.samples
            ));
        }
        let written = write(args, prompt, &tokenizer, &mut generator)?;
        if args.json {
            let selector = args.selector.as_ref().map(ToString::to_string);
            let json = serde_json::json!({
                "prompt": prompt, "text": written.text, "seed": seed, "stopped": written.stopped,
                "prompt_tokens": tokens.len(), "new_tokens": written.num_tokens,
                "prompt_seconds": written.prompt_seconds, "tokens_per_second": written.tokens_per_second(),
                "selector": selector,
                "paths": generator.selection().map(Selection::paths),
            });
            terminal::line(&json.to_string());
        } else {
            terminal::remark(&written.speed(tokens.len()));
        }
        if let Some(selection) = generator.selection() {
            let totals = selection.totals();
            if totals.dense_calls == totals.calls {
                terminal::warning(&format!(
                    "{} left nothing out of so short a text: all {} calls of attention ran dense, so this is the dense \
                     model's text",
                    selection.selectors().name(),
                    totals.calls
                ));
            } else {
                terminal::remark(&selector::summary(selection));
            }
        }
    }
    Ok(())
}

/// What came of one sample.
struct Written {
    text: String,
    num_tokens: usize,
    /// What ended it: a stop text, the end of the document, or the number of tokens.
    stopped: &'static str,
    prompt_seconds: f64,
    seconds: f64,
}

impl Written {
    /// Of the tokens after the first, which the prompt's pass gives.
    fn tokens_per_second(&self) -> f64 {
        self.num_tokens.saturating_sub(1) as f64 / self.seconds.max(1e-9)
    }

    fn speed(&self, num_prompt_tokens: usize) -> String {
        format!(
            "{} tokens, {:.1} a second; the prompt of {num_prompt_tokens} took {:.2} s",
            self.num_tokens,
            self.tokens_per_second(),
            self.prompt_seconds
        )
    }
}

/// Prints one sample as it comes, or gathers it for `--json`.
fn write<B: SieveBackend>(
    args: &GenerateArgs,
    prompt: &str,
    tokenizer: &Tokenizer,
    generator: &mut Generator<'_, B>,
) -> Result<Written> {
    let show = |text: &str| {
        if !args.json {
            terminal::text(text);
        }
    };
    show(prompt);
    let mut stream = tokenizer.decode_stream();
    let mut stop = StopTexts::new(&args.stop);
    let mut written = Written {
        text: String::new(),
        num_tokens: 0,
        stopped: "max_new_tokens",
        prompt_seconds: 0.0,
        seconds: 0.0,
    };
    let mut started = Instant::now();
    let result = loop {
        let token = match generator.next() {
            Some(Ok(token)) => token,
            Some(Err(error)) => break Err(error.into()),
            None if written.num_tokens < generator.max_new_tokens() => {
                written.stopped = "end of document";
                break Ok(());
            }
            None => break Ok(()),
        };
        if written.num_tokens == 0 {
            written.prompt_seconds = started.elapsed().as_secs_f64();
            started = Instant::now();
        }
        written.num_tokens += 1;
        let (text, is_met) = stop.push(&stream.push(token)?);
        show(&text);
        written.text += &text;
        if is_met {
            written.stopped = "stop text";
            break Ok(());
        }
    };
    written.seconds = started.elapsed().as_secs_f64();
    if written.stopped != "stop text" {
        let (text, is_met) = stop.push(&stream.finish()?);
        let rest = if is_met { String::new() } else { stop.finish() };
        for text in [text, rest] {
            show(&text);
            written.text += &text;
        }
    }
    show("\n");
    result.map(|()| written)
}
