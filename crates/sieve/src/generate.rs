//! `sieve generate`: text as it comes.
use crate::device::{Device, DeviceChoice};
use crate::out_of_memory::MemoryArgs;
use crate::{loaded, selector, terminal};
use anyhow::Result;
use burn::tensor::DType;
use burn_cuda::CudaDevice;
use burn_flex::{Flex, FlexDevice};
use clap::Args;
use sieve_eval::{GenerateConfig, Generator, Sampling};
use sieve_ops::{Cuda, SieveBackend};
use sieve_plan::InferenceSize;
use sieve_select::Selector;
use std::path::PathBuf;

/// New tokens when nothing is said and the context has room for them.
const DEFAULT_NEW_TOKENS: usize = 128;

/// Bytes of text that a token stands for, about: enough to tell the memory of a prompt before there is a tokenizer.
const BYTES_A_TOKEN: usize = 4;

/// Arguments of `sieve generate`.
#[derive(Args, Debug)]
pub(crate) struct GenerateArgs {
    /// A checkpoint (step-N), or a run folder: then its latest
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Text to continue; when empty, the text begins at a document's start
    #[arg(long)]
    prompt: String,
    /// Tokens after the prompt, at most; 128 when absent, or what the context still holds
    #[arg(long, value_name = "N")]
    max_new_tokens: Option<usize>,
    /// 0 takes the likeliest token each time; higher is more varied
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Draw only from the likeliest tokens that together have this probability
    #[arg(long, default_value_t = 0.95)]
    top_p: f64,
    /// The same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[arg(long, value_name = "NAME:…", value_parser = selector::parse, help = selector::ABOUT)]
    selector: Option<Selector>,
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
    let device = loaded::device(args.device, &args.checkpoint)?;
    (args.memory).check_inference(&args.checkpoint, &device, |_, _| {
        let prompt = args.prompt.len() / BYTES_A_TOKEN + 1;
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
        Device::Cpu => run_on::<Flex>(&args, &FlexDevice, DType::F32),
        Device::Cuda(gpu) => run_on::<Cuda>(&args, &CudaDevice::new(gpu.index), DType::BF16),
    }
}

fn run_on<B: SieveBackend>(args: &GenerateArgs, device: &B::Device, dtype: DType) -> Result<()> {
    let (loaded, tokenizer) = loaded::load::<B>(&args.checkpoint, device, dtype)?;
    let prompt = tokenizer.encode_marked(&args.prompt)?;
    // An empty prompt takes one position for the token it starts from.
    let room = loaded.shape.max_seq_len.saturating_sub(prompt.len().max(1));
    let config = GenerateConfig {
        max_new_tokens: args
            .max_new_tokens
            .unwrap_or(room.clamp(1, DEFAULT_NEW_TOKENS)),
        sampling: Sampling {
            temperature: args.temperature,
            top_p: args.top_p,
            seed: args.seed,
        },
        eos_id: tokenizer.eos_id()?,
        num_tokens: tokenizer.vocab_size(),
    };
    let mut generator = Generator::new(&loaded.model, &prompt, config, device)?;
    if let Some(selector) = &args.selector {
        let selection = selector::selection(selector, args.chunk, &loaded.shape)?;
        generator = generator.with_selection(selection);
    }
    terminal::text(&args.prompt);
    let mut stream = tokenizer.decode_stream();
    for token in generator {
        match token {
            Ok(token) => terminal::text(&stream.push(token)?),
            Err(error) => {
                terminal::line("");
                return Err(error.into());
            }
        }
    }
    terminal::line(&stream.finish()?);
    Ok(())
}
