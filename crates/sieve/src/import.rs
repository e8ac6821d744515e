//! `sieve import`.
use crate::out_of_memory::MemoryArgs;
use crate::terminal;
use anyhow::{Context, Result, bail};
use burn_flex::{Flex, FlexDevice};
use clap::Args;
use sieve_core::recipe::AttentionKind;
use sieve_data::Tokenizer;
use std::path::PathBuf;

/// Arguments of `sieve import`.
#[derive(Args, Debug)]
pub(crate) struct ImportArgs {
    /// Folder of a Qwen3 or Doge model in the Hugging Face layout: config.json, tokenizer.json, safetensors
    #[arg(long, value_name = "HF_DIR")]
    from: PathBuf,
    /// Folder to write the checkpoint step-0 into
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Give the model another attention: dma, swa or nsa; its sizes come by --set
    #[arg(long, value_name = "KIND")]
    attention: Option<String>,
    /// Set a key of the checkpoint's recipe, for example attention.keep_window_size=1024; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    memory: MemoryArgs,
}

/// Runs the command.
pub(crate) fn run(args: ImportArgs) -> Result<()> {
    let kind = args.attention.as_deref().map(kind).transpose()?;
    let tokenizer = args.from.join("tokenizer.json");
    Tokenizer::from_file(&tokenizer)
        .with_context(|| format!("{} has no usable tokenizer", args.from.display()))?;
    // A configuration that cannot be read is told below.
    if let Ok(shape) = sieve_hf::imported_shape(&args.from, kind, &args.overrides) {
        args.memory.check_import(&shape)?;
    }
    let report =
        sieve_hf::import::<Flex>(&args.from, &args.out, kind, &args.overrides, &FlexDevice)?;
    terminal::line(&format!(
        "imported {} parameters, attention {}, as {}",
        terminal::thousands(report.num_parameters),
        report.recipe.attention.kind().name(),
        report.path.display()
    ));
    if let [first, ..] = report.added.as_slice() {
        terminal::line(&format!(
            "{} parameters are new and start as in a new model: {first}, …",
            report.added.len()
        ));
    }
    for name in &report.ignored {
        terminal::line(&format!(
            "note: {name} says nothing new and was passed over"
        ));
    }
    terminal::line(&format!(
        "next:\n  sieve eval ppl --checkpoint {0} --data README.md\n  \
         sieve train --recipe RECIPE --branch-from {0} --out DIR",
        terminal::quoted(&report.path)
    ));
    Ok(())
}

fn kind(name: &str) -> Result<AttentionKind> {
    let found = AttentionKind::ALL
        .into_iter()
        .find(|kind| kind.name() == name);
    match found {
        Some(kind) => Ok(kind),
        None => bail!(
            "--attention {name} is not known\n  hint: one of {}",
            AttentionKind::ALL.map(AttentionKind::name).join(", ")
        ),
    }
}
