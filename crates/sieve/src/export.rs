//! `sieve export`: a trained model in the Hugging Face layout.
use anyhow::Result;
use clap::{Args, ValueEnum};
use sieve_core::recipe::TokenizerSource;
use sieve_core::{Recipe, ShownPath};
use sieve_hf::{Checkpoint, DEFAULT_SHARD_BYTES, ExportDtype, ExportForm, ExportOptions, export};
use sieve_host::ask::Ask;
use sieve_host::device::DtypeArg;
use sieve_host::loaded;
use sieve_host::out_file::on_this_machine;
use sieve_host::terminal::{self, FolderBar};
use std::path::{Path, PathBuf};

/// Arguments of `sieve export`.
#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    /// A checkpoint (step-N), or a run folder: then its latest
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Folder to write: new, empty, or an earlier export, which is replaced
    #[arg(long, value_name = "DIR", value_parser = on_this_machine())]
    out: PathBuf,
    /// Number type of the weights
    #[arg(long, value_enum, default_value = "f32")]
    dtype: DtypeArg,
    /// Class that computes it, for MSA and for DMA as published; when absent, transformers' own class if it has one
    #[arg(long, visible_alias = "format", value_enum)]
    form: Option<FormArg>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormArg {
    /// transformers' own class, which keeps whichever of keys with equal scores torch.topk returns
    Doge,
    /// modeling_sieve.py, which keeps the later of keys with equal scores, as in training
    Sieve,
    /// MSA as MiniMaxM3VLForCausalLM, MiniMax-M3's text class in transformers
    M3,
    /// MSA as MiniMaxM3SparseForCausalLM, that class in vLLM
    M3Vllm,
}

/// Runs `sieve export`: writes a checkpoint as a model of transformers.
pub(crate) fn run(args: ExportArgs) -> Result<()> {
    let checkpoint = Checkpoint::open_model(&args.checkpoint)?;
    let (recipe, shape) = checkpoint.recipe_and_shape()?;
    let tokenizer = loaded::tokenizer(&checkpoint.tokenizer_path(), &recipe, &shape)?;
    let options = ExportOptions {
        dtype: match args.dtype {
            DtypeArg::F32 => ExportDtype::F32,
            DtypeArg::Bf16 => ExportDtype::Bf16,
        },
        max_shard_bytes: DEFAULT_SHARD_BYTES,
        form: args.form.map(|form| match form {
            FormArg::Doge => ExportForm::Doge,
            FormArg::Sieve => ExportForm::Sieve,
            FormArg::M3 => ExportForm::M3,
            FormArg::M3Vllm => ExportForm::M3Vllm,
        }),
        eos_token_id: tokenizer.eos_id()?,
        pad_token_id: tokenizer.pad_id(),
    };
    let bytes_of_one = match args.dtype {
        DtypeArg::F32 => 4,
        DtypeArg::Bf16 => 2,
    };
    let bar = FolderBar::new(&args.out, shape.parameters().total() * bytes_of_one);
    let report = export(&checkpoint, &args.out, &options);
    drop(bar);
    let report = report?;
    terminal::line(&format!(
        "exported step {} as {}: {} parameters, {} of weights, {} in {}",
        checkpoint.state.step,
        report.architecture,
        terminal::thousands(report.num_parameters),
        terminal::bytes(report.num_bytes),
        terminal::counted(report.files.len() as u64, "file"),
        args.out.shown()
    ));
    if report.leaves_ties_open {
        terminal::note(TIES);
    }
    if report.counts_padding {
        terminal::note(PADDING);
    }
    if report.replaces_tokenizer {
        terminal::note(OTHER_TOKENIZER);
    }
    if let Some(reason) = report.not_stock {
        terminal::line(&format!("as modeling_sieve.py: {reason}"));
    }
    let ask = ask(&recipe, checkpoint.answers_chats(&recipe));
    terminal::line(&format!(
        "{}\n  {}",
        terminal::next(&[format!("{} --checkpoint {}", ask.command(), terminal::quoted(&args.out))]),
        if report.is_for_vllm {
            format!("vllm serve {}", terminal::quoted(&args.out))
        } else {
            python_command(&args.out, report.is_remote_code, report.replaces_tokenizer, &ask)
        }
    ));
    Ok(())
}

/// Printed if the exported class keeps an arbitrary one of several keys with equal scores.
const TIES: &str = "note: Doge keeps whichever of equal keys torch.topk returns, and equal tokens are equal keys in \
    the first layer: beyond keep_window_size tokens logits may differ by some tenths from Sieve's\n  \
    hint: --form sieve writes modeling_sieve.py, which keeps the later key as Sieve does";

/// Printed if the exported class counts padding as tokens of a block.
const PADDING: &str = "note: this class of transformers counts blocks of keys from the padding: of a batch padded \
    on the left, shorter prompts get other text than the model's\n  hint: give it one prompt at a time";

/// Printed if AutoTokenizer of `transformers` replaces the export's tokenizer.
const OTHER_TOKENIZER: &str = "note: AutoTokenizer of transformers 5 opens a Qwen2 folder with Qwen2's own splitting \
    of words, which this tokenizer.json does not have: the same text would become other tokens\n  \
    hint: PreTrainedTokenizerFast.from_pretrained reads the tokenizer as it is";

/// Words that the model can be asked with.
fn ask(recipe: &Recipe, is_chat: bool) -> Ask {
    let words = match recipe.tokenizer.source() {
        TokenizerSource::Numbers(_) => Some("1 2 3"),
        // Prompts of a run on text are no messages.
        _ if is_chat && recipe.data.messages_column.is_none() => None,
        _ => recipe.generation.prompts.first().map(String::as_str),
    };
    Ask::with(is_chat, words)
}

/// A command that lets the exported model write a few words.
fn python_command(folder: &Path, is_remote_code: bool, replaces_tokenizer: bool, ask: &Ask) -> String {
    // A JSON string is also a valid Python string, and so is an object of strings.
    let folder = serde_json::Value::from(folder.to_string_lossy().into_owned());
    let (prompt, written) = if ask.is_chat() {
        (serde_json::json!([{ "role": "user", "content": ask.words() }]), "[\"generated_text\"][-1][\"content\"]")
    } else {
        (ask.words().into(), "[\"generated_text\"]")
    };
    let trust = if is_remote_code { ", trust_remote_code=True" } else { "" };
    let (import, tokenizer) = if replaces_tokenizer {
        (", PreTrainedTokenizerFast", format!(", tokenizer=PreTrainedTokenizerFast.from_pretrained({folder})"))
    } else {
        ("", String::new())
    };
    let code = format!(
        "from transformers import pipeline{import}; print(pipeline(\"text-generation\", {folder}{tokenizer}{trust})\
         ({prompt}, max_new_tokens=20)[0]{written})"
    );
    format!("python3 -c {}", terminal::shell_word(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_python_command_trusts_remote_code_and_quotes_the_folder() {
        let once = Ask::with(false, Some("Once"));
        let plain = python_command(Path::new("out"), false, false, &once);
        assert_eq!(
            plain,
            "python3 -c 'from transformers import pipeline; print(pipeline(\"text-generation\", \"out\")\
             (\"Once\", max_new_tokens=20)[0][\"generated_text\"])'"
        );
        let asked = Ask::with(false, Some("a \"b\""));
        let remote = python_command(Path::new("it's \"mine\""), true, false, &asked);
        let folder = r#"pipeline("text-generation", "it'\''s \"mine\"", trust_remote_code=True)"#;
        assert!(remote.contains(folder), "{remote}");
        assert!(remote.contains(r#"("a \"b\"", max_new_tokens"#), "{remote}");
        let chat = python_command(Path::new("out"), false, false, &Ask::with(true, Some("What?")));
        let message =
            r#"([{"role":"user","content":"What?"}], max_new_tokens=20)[0]["generated_text"][-1]["content"])"#;
        assert!(chat.contains(message), "{chat}");
        let other = python_command(Path::new("out"), false, true, &once);
        let tokenizer = r#""out", tokenizer=PreTrainedTokenizerFast.from_pretrained("out"))("Once""#;
        assert!(other.contains("import pipeline, PreTrainedTokenizerFast;"), "{other}");
        assert!(other.contains(tokenizer), "{other}");
    }
}
