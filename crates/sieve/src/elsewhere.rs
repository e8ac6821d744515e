//! What users of other programs type, and what is meant here: commands, flags, files without a flag.
use clap::Command;
use clap::error::{ContextKind, ErrorKind};
use sieve_host::out_file::CannotWrite;
use sieve_host::terminal::{print_error, quoted, shell_word};
use std::any::TypeId;
use std::error::Error;
use std::num::ParseIntError;
use std::path::Path;

/// Commands of other programs that a user may type, and the hint for each: the command of `sieve`.
const COMMANDS: [(&str, &str); 20] = [
    ("init", "recipe new"),
    ("new", "recipe new"),
    ("config", "recipe show --all RECIPE"),
    ("selectors", "eval selectors, and eval ppl --selector help for their names"),
    ("doctor", "info"),
    ("env", "info"),
    ("version", "--version"),
    ("bench", "kernels bench"),
    ("resume", "train --recipe R --resume"),
    ("finetune", "import --from MODEL --data FILE writes a recipe that begins with its weights; then train --recipe"),
    ("sft", "import --from MODEL --data FILE writes a recipe that begins with its weights; then train --recipe"),
    ("convert", "import --from DIR reads a model in the Hugging Face layout; export --checkpoint RUN writes one"),
    ("download", "import --from hf://OWNER/NAME fetches a model from the Hugging Face hub"),
    ("pull", "import --from hf://OWNER/NAME fetches a model from the Hugging Face hub"),
    ("web", "serve --checkpoint MODEL answers over HTTP, as OpenAI's API does"),
    ("api", "serve --checkpoint MODEL answers over HTTP, as OpenAI's API does"),
    ("sample", "generate"),
    ("prepare", "data prepare"),
    ("evaluate", "eval ppl, and eval --help for the others"),
    ("test", "eval ppl, and eval --help for the others"),
];

/// Commands that read a recipe, or make one.
const OF_RECIPES: &[&str] = &["train", "launch", "plan", "recipe", "import", "data"];
/// Commands that read a trained model.
const OF_MODELS: &[&str] = &["generate", "chat", "serve", "eval", "export", "logits"];

/// A flag of other programs.
struct Flag {
    /// Its names, without `--` and with `-` between words.
    names: &'static [&'static str],
    /// The commands with which it may be typed.
    commands: &'static [&'static str],
    /// What is meant. `{}` stands for the flag's value, or for the word behind the colon where it has none.
    hint: &'static str,
}

const fn flag(commands: &'static [&'static str], names: &'static [&'static str], hint: &'static str) -> Flag {
    Flag { names, commands, hint }
}

/// Flags of other programs, mostly trainers, and the hint for each.
const FLAGS: [Flag; 67] = [
    flag(OF_RECIPES, &["lr", "learning-rate"], "--set optimizer.lr={:RATE}"),
    flag(
        OF_RECIPES,
        &["epochs", "num-epochs", "num-train-epochs", "max-epochs"],
        "--set training.steps=N; sieve plan prints how often the text is then read",
    ),
    flag(
        OF_RECIPES,
        &["steps", "max-steps", "num-steps", "train-steps", "train-iters", "iters", "max-iters"],
        "--set training.steps={:N}",
    ),
    flag(
        OF_RECIPES,
        &["batch-size", "bs", "global-batch-size", "train-batch-size"],
        "--set training.global_batch_size={:ROWS}; training.local_batch_size is a micro-batch",
    ),
    flag(
        OF_RECIPES,
        &["micro-batch-size", "device-batch-size", "per-device-train-batch-size", "local-batch-size"],
        "--set training.local_batch_size={:ROWS}",
    ),
    flag(
        OF_RECIPES,
        &["gradient-accumulation-steps", "grad-accum", "accumulate-grad-batches"],
        "training.global_batch_size over training.local_batch_size: --set either",
    ),
    flag(
        OF_RECIPES,
        &["seq-len", "seq-length", "block-size", "max-length", "max-seq-length", "context-length"],
        "--set training.seq_len={:TOKENS}",
    ),
    flag(OF_RECIPES, &["seed"], "--set training.seed={:N}"),
    flag(OF_RECIPES, &["warmup", "warmup-steps"], "--set lr_scheduler.warmup_steps={:N}"),
    flag(OF_RECIPES, &["weight-decay", "wd"], "--set optimizer.weight_decay={:N}"),
    flag(OF_RECIPES, &["optimizer", "optim"], "--set optimizer.name={:NAME}"),
    flag(OF_RECIPES, &["clip", "grad-clip", "max-grad-norm", "gradient-clip-val"], "--set training.max_norm={:N}"),
    flag(OF_RECIPES, &["eval-interval", "eval-steps", "eval-every"], "--set validation.interval={:N}"),
    flag(OF_RECIPES, &["save-interval", "save-steps", "save-every"], "--set checkpoint.interval={:N}"),
    flag(OF_RECIPES, &["log-interval", "logging-steps", "log-every"], "--set metrics.log_freq={:N}"),
    flag(
        OF_RECIPES,
        &["dtype", "precision", "fp16", "bf16", "amp", "mixed-precision"],
        "a GPU computes in bf16, a CPU in f32; --set training.precision=fp8 for GEMMs in fp8",
    ),
    flag(
        OF_RECIPES,
        &["compile", "no-compile", "flash-attn", "flash-attention"],
        "leave it out: the kernels are the program's own",
    ),
    flag(&["import"], &["model", "model-name", "model-name-or-path", "checkpoint", "input"], "--from {:MODEL}"),
    flag(&["recipe"], &["model"], "--size SIZE and --kind KIND; sieve recipe new --help lists them"),
    flag(&["recipe"], &["text-column"], "--set data.text_column={:NAME}"),
    flag(
        &["train", "launch", "plan"],
        &["model", "model-name", "model-name-or-path"],
        "--recipe R names the model's sizes; sieve import --from DIR makes a recipe of a published model",
    ),
    flag(
        &["train", "launch"],
        &["gpus", "num-gpus", "ngpus", "devices", "nproc-per-node", "num-processes", "world-size"],
        "sieve launch --nproc {:N} -- train --recipe R",
    ),
    flag(&["train"], &["nproc"], "sieve launch --nproc {:N} -- train --recipe R"),
    flag(
        &["train", "launch"],
        &["wandb", "use-wandb", "wandb-project", "report-to", "tensorboard", "logdir", "log-dir"],
        "curves are written to OUT/tb, for tensorboard --logdir OUT/tb, and sieve compare OUT makes a page of them",
    ),
    flag(
        &["train", "launch"],
        &["dry-run", "test-run", "fast-dev-run"],
        "sieve plan --recipe R prints what a run needs; --stop-after 5 tries five steps",
    ),
    flag(&["train", "launch"], &["force", "overwrite-output-dir", "restart", "clean", "from-scratch"], "--overwrite"),
    flag(
        &["train", "launch"],
        &["checkpoint", "ckpt", "load", "init-from", "pretrained", "resume-from-checkpoint", "weights"],
        "--branch-from {:DIR} begins a new run with its weights, --resume-from {:DIR} continues its run",
    ),
    flag(
        &["train", "launch", "import", "recipe"],
        &["output", "output-dir", "save-dir", "run-name", "name"],
        "--out {:DIR}",
    ),
    flag(&["train", "launch"], &["local-rank"], "leave it out: RANK and LOCAL_RANK in the environment set it"),
    flag(&["train", "launch", "plan", "data"], &["config", "config-file", "cfg", "recipe-file"], "--recipe {:FILE}"),
    flag(
        &["train", "launch", "plan", "data"],
        &["data", "dataset", "dataset-name", "train-data", "train-file", "data-path", "input"],
        "--set data.paths={:FILE} with a recipe; sieve recipe new --data {:FILE} --out NAME.toml makes one",
    ),
    flag(&["train", "launch", "plan", "data"], &["tokenizer", "tokenizer-path"], "--set tokenizer.path={:FILE}"),
    flag(&["train", "launch", "plan"], &["attention", "kind", "attn-implementation"], "--set attention.kind={:KIND}"),
    flag(
        OF_MODELS,
        &["model", "model-name", "model-name-or-path", "model-path", "ckpt", "load", "run"],
        "--checkpoint {:MODEL}",
    ),
    flag(&["eval tasks"], &["tasks", "task"], "--data {:TASK}=FILE, once for each task"),
    flag(
        &["generate", "chat"],
        &["max-tokens", "num-tokens", "max-length", "length", "n-predict", "tokens"],
        "--max-new-tokens {:N}",
    ),
    flag(&["generate", "chat"], &["temp", "t"], "--temperature {:N}"),
    flag(&["generate"], &["n", "num-samples", "num-return-sequences"], "--samples {:N}"),
    flag(&["generate"], &["text", "input", "message"], "--prompt {:TEXT}"),
    flag(&["generate"], &["system-prompt", "system-message"], "--chat --system {:TEXT}"),
    flag(&["chat"], &["system-prompt", "system-message"], "--system {:TEXT}"),
    flag(&["chat"], &["prompt", "message", "text"], "leave it out: messages are read line by line from standard input"),
    flag(&["generate"], &["apply-chat-template", "chat-template"], "--chat"),
    flag(
        &["generate"],
        &["template", "chat-template-file"],
        "--chat; the chat template is in the model's folder: chat_template.jinja",
    ),
    flag(&["generate"], &["messages", "user", "question"], "--chat --prompt {:TEXT}; sieve chat is a conversation"),
    flag(&["export"], &["output", "output-dir"], "--out {:DIR}"),
    flag(
        &["export"],
        &["gguf", "onnx", "quantize", "outtype"],
        "leave it out: an export is safetensors; llama.cpp's converter makes GGUF of dense ones",
    ),
    flag(
        &["export"],
        &["push-to-hub", "hub-model-id", "repo-id", "upload"],
        "leave it out: hf upload OWNER/NAME DIR sends the folder to the hub",
    ),
    flag(
        &["serve", "chat"],
        &["max-model-len", "ctx-size", "context-length", "max-seq-len", "max-length", "max-total-tokens"],
        "--max-context {:TOKENS}",
    ),
    flag(
        &["serve"],
        &["max-num-seqs", "max-running-requests", "max-batch-size", "batch-size", "parallel"],
        "--max-texts {:N}",
    ),
    flag(&["serve"], &["served-model-name", "model-id", "alias"], "--name {:NAME}"),
    flag(&["serve"], &["hostname", "bind", "listen", "address"], "--host {:ADDRESS}, and --port N"),
    flag(
        &["serve"],
        &["tensor-parallel-size", "tp", "tp-size", "num-gpus", "gpus", "pipeline-parallel-size", "data-parallel-size"],
        "leave it out: one GPU holds the model; --device cuda:N names it",
    ),
    flag(
        &["generate"],
        &["tensor-parallel-size", "tp", "tp-size", "num-gpus", "gpus"],
        "sieve launch --nproc {:N} -- generate divides the weights of a model that one GPU does not hold",
    ),
    flag(
        &["serve"],
        &["gpu-memory-utilization", "mem-fraction-static", "kv-cache-memory"],
        "leave it out: memory is planned for --max-texts sequences of --max-context tokens",
    ),
    flag(
        &["serve"],
        &["ssl-certfile", "ssl-keyfile", "ssl", "tls", "root-path"],
        "leave it out: put a proxy with TLS in front of the server",
    ),
    flag(&["serve"], &["cors", "allowed-origins", "cors-origins"], "--allow-origin {:ORIGIN}"),
    flag(
        &["serve"],
        &[
            "workers",
            "num-workers",
            "api-server-count",
            "enable-prefix-caching",
            "enable-chunked-prefill",
            "cont-batching",
        ],
        "leave it out: one process decodes all sequences together",
    ),
    flag(
        &["serve"],
        &[
            "temperature",
            "temp",
            "top-p",
            "top-k",
            "max-new-tokens",
            "max-tokens",
            "n-predict",
            "seed",
            "stop",
            "prompt",
        ],
        "leave it out: each request sets it",
    ),
    flag(&["serve"], &["chat"], "leave it out: chats are answered at /v1/chat/completions"),
    flag(&["serve"], &["enable-lora", "lora-modules", "lora", "adapter"], "leave it out: adapters are not read"),
    flag(&["serve", "generate", "export"], &["recipe", "config"], "--checkpoint OUT, the folder of the recipe's run"),
    flag(
        &["serve", "generate"],
        &["threads", "num-threads"],
        "RAYON_NUM_THREADS={:N} in the environment; all cores are used without it",
    ),
    flag(
        &["serve"],
        &["reload", "debug", "log-level"],
        "leave it out: --log-requests prints a line for each request; /metrics has counters",
    ),
    flag(OF_MODELS, &["trust-remote-code"], "leave it out: no code of a model is run"),
    flag(
        &["serve"],
        &["chat-template", "jinja"],
        "leave it out: chats are written by the chat template in the model's folder",
    ),
    flag(
        &["serve", "generate"],
        &["quantization", "load-in-4bit", "load-in-8bit"],
        "leave it out: weights are bf16 on a GPU, and f32 or bf16 on a CPU (--dtype)",
    ),
];

/// What is meant by a command line of `cli` that `error` refuses; `None` where clap's own message is the best.
pub(crate) fn meant(cli: &Command, error: &clap::Error, words: &[String]) -> Option<String> {
    let typed = |kind| error.get(kind).map(ToString::to_string);
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let typed = typed(ContextKind::InvalidSubcommand)?;
            let (name, here) = COMMANDS.iter().find(|(name, _)| *name == typed)?;
            Some(format!("there is no command {name}\n  hint: sieve {here}"))
        }
        ErrorKind::UnknownArgument => {
            let typed = typed(ContextKind::InvalidArg)?;
            // Flags of all commands may come before the command.
            let command = words.iter().skip(1).find(|word| cli.find_subcommand(word).is_some())?;
            if typed.starts_with('-') {
                value_meant(cli, &typed, words).or_else(|| flag_meant(&typed, command, words))
            } else {
                switch_meant(cli, &typed, words).or_else(|| file_meant(&typed, command))
            }
        }
        // A form of export that other programs have as a flag.
        ErrorKind::InvalidValue => {
            let (argument, value) = (typed(ContextKind::InvalidArg)?, typed(ContextKind::InvalidValue)?);
            let command = words.iter().skip(1).find(|word| cli.find_subcommand(word).is_some())?;
            let is_known =
                |flag: &&Flag| flag.commands.contains(&command.as_str()) && flag.names.contains(&value.as_str());
            let hint = FLAGS.iter().find(is_known)?.hint;
            (!hint.contains("{:")).then(|| format!("{value:?} is not a valid value for {argument}\n  hint: {hint}"))
        }
        ErrorKind::ValueValidation => {
            let (argument, value) = (typed(ContextKind::InvalidArg)?, typed(ContextKind::InvalidValue)?);
            let number = match value.bytes().all(|byte| byte.is_ascii_digit()) {
                true => numbers_of_range(&error.to_string())?,
                // The file's name only looks like a short form of a number.
                false if error.source().is_some_and(|why| why.is::<CannotWrite>()) => return None,
                false if is_negative(&value) && error.source().is_some_and(|why| why.is::<ParseIntError>()) => {
                    let name = argument.split(' ').next()?;
                    let start = format!("{name}=");
                    let at = words.iter().position(|word| word.starts_with(&start))?;
                    whole_number(cli, &words[..at], name)
                }
                false => sieve_core::number_of_short_form(&value)?,
            };
            Some(format!("{value:?} is not a valid value for {argument}\n  hint: write {number}"))
        }
        _ => None,
    }
}

/// The numbers that a flag takes, in words, from clap's message of one that is too small. `None` for a range with an
/// upper end, which the message says well, unless the number is 0 and the flag counts from 1.
fn numbers_of_range(message: &str) -> Option<String> {
    let (number, range) = message.split_once(" is not in ")?;
    let (least, most) = range.lines().next()?.split_once("..")?;
    let is_meant = most == u64::MAX.to_string() || (least == "1" && number.ends_with(" 0"));
    is_meant.then(|| format!("{least} or more"))
}

/// Whether a value is a whole number below 0.
fn is_negative(value: &str) -> bool {
    value.strip_prefix('-').is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What the flag `name`, which takes whole numbers without a sign, takes at least, in words. `before`: the words of the
/// command line before the flag. clap says where the numbers begin only of a number that is too small.
fn whole_number(cli: &Command, before: &[String], name: &str) -> String {
    let words = before.iter().cloned().chain([format!("{name}=0")]);
    let error = cli.clone().try_get_matches_from(words).err().map(|error| error.to_string()).unwrap_or_default();
    let range = error.split_once(" is not in ").and_then(|(_, range)| range.split_once(".."));
    format!("a whole number of at least {}", range.map_or("0", |(least, _)| least))
}

/// The hint for the value of a flag that begins with one dash, such as a prompt that is an item of a list, and for a
/// file with such a name. clap reads it as short flags, and names the first of them alone.
fn value_meant(cli: &Command, typed: &str, words: &[String]) -> Option<String> {
    let is_meant = |word: &String| word.starts_with(typed) && !word.starts_with("--");
    let at = words.iter().position(is_meant)?;
    let (value, before) = (shell_word(&words[at]), words.get(at.checked_sub(1)?)?);
    let command = command_of(cli, &words[..at]);
    let takes_value = |argument: &clap::Arg| {
        before.strip_prefix("--").is_some_and(|name| argument.get_long() == Some(name))
            && argument.get_action().takes_values()
    };
    let hint = match command.get_arguments().find(|argument| takes_value(argument)) {
        Some(argument) if is_negative(&words[at]) && takes_no_sign(argument) => {
            let number = whole_number(cli, &words[..at - 1], before);
            // clap prints an argument only once its command is built.
            let value_name = argument.get_value_names().and_then(<[_]>::first).map(|name| format!(" <{name}>"));
            let flag = format!("{before}{}", value_name.unwrap_or_default());
            return Some(format!("{:?} is not a valid value for {flag}\n  hint: write {number}", words[at]));
        }
        Some(_) => format!("{before}={value}"),
        None if Path::new(&words[at]).exists() => quoted(Path::new(&words[at])),
        None => return None,
    };
    Some(format!("{value} begins with a dash and is read as a flag\n  hint: write {hint}"))
}

/// Whether an argument takes whole numbers of a type without a sign.
fn takes_no_sign(argument: &clap::Arg) -> bool {
    let own = argument.get_value_parser().type_id();
    [TypeId::of::<u64>(), TypeId::of::<u32>(), TypeId::of::<u16>(), TypeId::of::<usize>()].iter().any(|id| own == *id)
}

/// The hint for a flag of other programs.
fn flag_meant(typed: &str, command: &str, words: &[String]) -> Option<String> {
    let name = typed.trim_start_matches('-').split('=').next()?.replace('_', "-").to_lowercase();
    // The command, and with a command below it: eval, eval tasks.
    let below = words.iter().skip_while(|word| *word != command).nth(1);
    let both = below.map_or(String::new(), |below| format!("{command} {below}"));
    let is_of = |flag: &Flag| flag.commands.iter().any(|one| *one == command || *one == both);
    let known = |flag: &&Flag| is_of(flag) && flag.names.contains(&name.as_str());
    let flag = FLAGS.iter().find(known)?;
    // clap names the flag alone; its value is part of the same word, or the next one.
    let at = words.iter().position(|word| word.split('=').next() == typed.split('=').next())?;
    let value = match words[at].split_once('=') {
        Some((_, value)) => Some(value),
        None => words.get(at + 1).map(String::as_str).filter(|next| !next.starts_with('-')),
    };
    let mut hint = String::new();
    let mut rest = flag.hint;
    while let Some((before, after)) = rest.split_once("{:") {
        let (word, after) = after.split_once('}')?;
        hint += before;
        // Other programs take a model of the hub by its name alone.
        let is_of_hub = word == "MODEL" && value.is_some_and(names_hub_model);
        hint += if is_of_hub { "hf://" } else { "" };
        hint += &value.map_or_else(|| word.to_owned(), shell_word);
        rest = after;
    }
    Some(format!("sieve {command} has no flag {}\n  hint: {hint}{rest}", typed.split('=').next().unwrap_or(typed)))
}

/// Whether a text that is no folder here has the form OWNER/NAME.
fn names_hub_model(text: &str) -> bool {
    let is_name = |part: &str| {
        let is_usual = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        !part.is_empty() && !part.starts_with('.') && part.bytes().all(is_usual)
    };
    let parts = text.split_once('/');
    parts.is_some_and(|(owner, name)| is_name(owner) && is_name(name)) && !Path::new(text).exists()
}

/// The hint for "yes" or "no" behind a flag that takes no value.
fn switch_meant(cli: &Command, typed: &str, words: &[String]) -> Option<String> {
    let is_on = match typed.to_lowercase().as_str() {
        "yes" | "true" | "on" | "1" => true,
        "no" | "false" | "off" | "0" => false,
        _ => return None,
    };
    let is_switch = |at: usize| {
        let name = words[at].strip_prefix("--");
        let arguments = || command_of(cli, &words[..at]).get_arguments();
        name.is_some_and(|name| {
            arguments().any(|argument| argument.get_long() == Some(name) && !argument.get_action().takes_values())
        })
    };
    let flag = &words[(1..words.len() - 1).find(|&at| words[at + 1] == typed && is_switch(at))?];
    let hint = if is_on { format!("{flag} alone turns it on") } else { format!("leave {flag} out") };
    Some(format!("{flag} takes no value, and {typed} stands behind it\n  hint: {hint}"))
}

/// The command that the words before a flag name.
fn command_of<'a>(cli: &'a Command, before: &[String]) -> &'a Command {
    let subcommands = before.iter().skip(1).filter(|word| !word.starts_with('-'));
    subcommands.fold(cli, |command, word| command.find_subcommand(word).unwrap_or(command))
}

/// The hint for a file or folder that was typed without a flag.
fn file_meant(typed: &str, command: &str) -> Option<String> {
    let (path, word) = (Path::new(typed), shell_word(typed));
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
    let is_model = path.is_dir() || typed.starts_with("hf://");
    let is_text = || path.is_dir() || ending.as_deref().is_some_and(|ending| TEXTS.contains(&ending));
    let hint = match command {
        "train" | "plan" if ending.as_deref() == Some("toml") => format!("--recipe {word}"),
        "data" if ending.as_deref() == Some("toml") => format!("--recipe {word}"),
        "recipe" if is_text() => format!("--data {word}"),
        "train" | "plan" | "data" if is_text() => {
            format!("sieve recipe new --data {word} --out NAME.toml makes a recipe for it")
        }
        "import" => format!("--from {word}"),
        "generate" if is_model => format!("--checkpoint {word}"),
        "generate" => format!("--prompt {word}"),
        "serve" if names_hub_model(typed) => format!("--checkpoint hf://{word}"),
        "serve" => format!("--checkpoint {word}"),
        "eval" | "export" | "logits" if is_model => format!("--checkpoint {word}"),
        "eval" if is_text() => format!("--data {word}"),
        _ => return None,
    };
    Some(format!("sieve {command} takes no {word} without a flag\n  hint: {hint}"))
}

/// Endings of files that are texts or tables, not recipes.
pub(crate) const TEXTS: [&str; 11] =
    ["txt", "md", "rs", "py", "json", "jsonl", "ndjson", "csv", "parquet", "gz", "zst"];

/// Prints clap's error, or what was meant by the words of the command line, and ends the program.
pub(crate) fn refuse(cli: &Command, error: &clap::Error, words: &[String]) -> ! {
    if let Some(text) = meant(cli, error, words) {
        print_error(&anyhow::anyhow!(text));
        std::process::exit(2);
    }
    sieve_host::terminal::end_with(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::{CommandFactory, Parser};

    /// The flags in a hint, and the commands of `sieve` in it.
    fn flags_of(hint: &str) -> Vec<&str> {
        let end = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
        hint.split("--").skip(1).filter_map(|rest| rest.split(end).next()).filter(|name| !name.is_empty()).collect()
    }

    #[test]
    fn every_flag_is_unknown_and_every_hint_is_a_flag_of_this_program() {
        let cli = Cli::command();
        let mut known = Vec::new();
        let mut open = vec![&cli];
        while let Some(command) = open.pop() {
            known.extend(command.get_arguments().filter_map(clap::Arg::get_long));
            open.extend(command.get_subcommands());
        }
        for flag in &FLAGS {
            for name in flags_of(flag.hint) {
                assert!(known.contains(&name) || ["help", "logdir"].contains(&name), "{name} in {}", flag.hint);
            }
            for command in flag.commands {
                // Where it has subcommands, one of them may have the flag.
                let find = |found: &'_ Command, word: &str| found.find_subcommand(word).cloned();
                let own = command.split(' ').try_fold(cli.clone(), |found, word| find(&found, word));
                let own = own.unwrap_or_else(|| panic!("there is no {command}"));
                for name in flag.names {
                    let has = own.get_arguments().any(|argument| argument.get_long() == Some(name));
                    assert!(!has, "{command} has --{name}");
                }
            }
        }
    }

    #[test]
    fn a_value_with_a_dash_is_written_behind_an_equals_sign() {
        let cli = Cli::command();
        let hint = |words: &[&str]| {
            let words = words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
            let error = Cli::try_parse_from(&words).err().expect("a dash");
            let found = meant(&cli, &error, &words)?;
            Some(found.split_once("hint: ").expect("a hint").1.to_owned())
        };
        for (words, written) in [
            (&["sieve", "generate", "--checkpoint", "c", "--prompt", "- item"][..], "write --prompt='- item'"),
            (&["sieve", "-q", "generate", "--checkpoint", "-runs/a", "--prompt", "x"], "write --checkpoint=-runs/a"),
            (&["sieve", "eval", "ppl", "--checkpoint", "c", "--data", "-text.txt"], "write --data=-text.txt"),
            (&["sieve", "train", "--recipe", "r", "--out", "-a"], "write --out=-a"),
        ] {
            assert_eq!(hint(words).as_deref(), Some(written), "{words:?}");
        }
        // A number below 0, in both spellings.
        for (command, number) in [
            (&["sieve", "generate", "--checkpoint", "c", "--seed"][..], "a whole number of at least 0"),
            (&["sieve", "generate", "--checkpoint", "c", "--samples"], "a whole number of at least 1"),
            (&["sieve", "-q", "train", "--recipe", "r", "--stop-after"], "a whole number of at least 1"),
            (&["sieve", "serve", "--checkpoint", "c", "--max-texts"], "a whole number of at least 1"),
        ] {
            let (name, before) = command.split_last().expect("a flag");
            let spelled = format!("{name}=-5");
            for end in [&[*name, "-5"][..], &[&spelled]] {
                let words = [before, end].concat();
                assert_eq!(hint(&words), Some(format!("write {number}")), "{words:?}");
            }
        }
        // A word behind a flag that takes no value, beside a flag with the same value.
        for (words, flag) in [
            (&["sieve", "serve", "--checkpoint", "c", "--same-bits", "no"][..], "leave --same-bits out"),
            (&["sieve", "serve", "--max-texts", "1", "--same-bits", "1"], "--same-bits alone turns it on"),
            (&["sieve", "train", "--recipe", "r", "--overwrite", "TRUE"], "--overwrite alone turns it on"),
        ] {
            assert_eq!(hint(words).as_deref(), Some(flag), "{words:?}");
        }
        // A short flag that does not exist, behind one that takes no value.
        assert_eq!(hint(&["sieve", "train", "--recipe", "r", "--overwrite", "-x"]), None);
    }

    #[test]
    fn a_key_in_a_hint_is_a_key_of_a_recipe() {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        for flag in &FLAGS {
            let Some((_, set)) = flag.hint.split_once("--set ").filter(|(_, set)| set.contains('.')) else {
                continue;
            };
            let key = set.split('=').next().expect("a key").trim();
            let page = sieve_core::recipe::keys_page();
            let (section, name) = key.split_once('.').expect("section.key");
            assert!(page.contains(&format!("`{name}`")) && page.contains(&format!("[{section}]")), "{key}");
        }
        let text = words("sieve eval tasks --checkpoint c --tasks hellaswag");
        let error = Cli::try_parse_from(&text).err().expect("an unknown flag");
        let found = meant(&Cli::command(), &error, &text).expect("lm_eval's flag");
        assert!(found.ends_with("hint: --data hellaswag=FILE, once for each task"), "{found}");
        let text = words("sieve train --recipe r --lr=1e-3");
        let error = Cli::try_parse_from(&text).err().expect("an unknown flag");
        let found = meant(&Cli::command(), &error, &text).expect("a known one of other programs");
        assert_eq!(found, "sieve train has no flag --lr\n  hint: --set optimizer.lr=1e-3");
    }
}
