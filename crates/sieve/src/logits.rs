//! `sieve logits`: raw model output for parity checks by other programs.
use anyhow::{Context, Result, ensure};
use clap::{ArgGroup, Args};
use sieve_core::ShownPath;
use sieve_hf::{Kept, NamedTensor, load_model, write_tensor_file};
use sieve_host::loaded::{PlaceArgs, on_device};
use sieve_host::out_file::OutFile;
use sieve_host::{hub, terminal};
use sieve_ops::DeviceBackend;
use sieve_plan::InferenceSize;
use std::path::PathBuf;

/// Arguments of `sieve logits`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("input").required(true).args(["tokens", "tokens_file"]))]
pub(crate) struct LogitsArgs {
    /// A checkpoint (step-N), or a run folder: then its latest; or hf://OWNER/NAME
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Token ids, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "ID,…", value_parser = token)]
    tokens: Vec<u32>,
    /// A file of token ids, separated by commas or white space
    #[arg(long, value_name = "FILE")]
    tokens_file: Option<PathBuf>,
    /// The safetensors file to write: "logits", f32 [1, tokens, vocabulary]
    #[arg(long, value_name = "FILE")]
    out: OutFile,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Runs `sieve logits`: writes the logits of a checkpoint for given tokens to `--out`.
pub(crate) fn run(mut args: LogitsArgs) -> Result<()> {
    args.checkpoint = hub::folder(&args.checkpoint)?;
    let tokens = match &args.tokens_file {
        Some(path) => {
            let reading = || format!("reading token ids from {}", path.shown());
            parse(&sieve_files::read_text(path).with_context(reading)?).with_context(reading)?
        }
        None => args.tokens.clone(),
    };
    let place = (args.place).for_checkpoint(&args.checkpoint, |_, _| InferenceSize {
        logit_tokens: tokens.len(),
        ..InferenceSize::rows_of(tokens.len(), tokens.len())
    })?;
    on_device!(place, run_on(&args, &tokens))
}

/// Loads the model on `device` with its parameters as `kept` says, and writes its logits of `tokens`.
fn run_on<B: DeviceBackend>(args: &LogitsArgs, tokens: &[u32], device: &B::Device, kept: Kept) -> Result<()> {
    let loaded = load_model::<B>(&args.checkpoint, device, kept)?;
    let data = sieve_infer::logits(&loaded.model, tokens, device)?;
    let shape = data.shape.to_vec();
    let name = "logits".to_owned();
    let tensors = [NamedTensor { name, data }];
    args.out.write(|file| write_tensor_file(file, &tensors, None))?;
    let step = loaded.step().map_or(String::new(), |step| format!(" of step {step}"));
    terminal::line(&format!("wrote logits {shape:?}{step} to {}", args.out.shown()));
    Ok(())
}

/// Parses token ids that are separated by commas or white space.
fn parse(text: &str) -> Result<Vec<u32>> {
    let words = text.split(|c: char| c == ',' || c.is_whitespace());
    let tokens = words
        .filter(|word| !word.is_empty())
        .map(|word| token(word).map_err(anyhow::Error::msg))
        .collect::<Result<Vec<u32>>>()?;
    ensure!(
        !tokens.is_empty(),
        "there is not a token id\n  hint: write whole numbers, with commas or white space between them"
    );
    Ok(tokens)
}

fn token(word: &str) -> Result<u32, String> {
    let parsed = word.trim().parse();
    parsed.map_err(|_| format!("{word:?} is not a token id\n  hint: ids are whole numbers from 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_files_take_commas_and_lines() {
        assert_eq!(parse("1, 2\n3,\n").expect("numbers"), [1, 2, 3]);
        assert!(parse("1 x").is_err());
        assert!(parse(" \n").is_err());
    }
}
