//! What a shell completes behind a flag: kinds, devices, recipes, a recipe's keys, checkpoints. The script of
//! `sieve completions` asks the program itself, so it offers what this program and this folder have.
use crate::shipped;
use clap::{Arg, Command};
use clap_complete::Shell;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter};
use clap_complete::env::{CompleteEnv, Shells};
use serde_json::Value;
use sieve_core::recipe::{AttentionKind, json_schema};
use std::ffi::OsStr;
use std::path::Path;

/// The environment variable by which the script asks.
const VARIABLE: &str = "SIEVE_COMPLETE";
/// Where runs lie without `--out`.
const RUNS: &str = "out";

/// Answers the script of a shell, and ends the program then. Does nothing in any other call.
pub(crate) fn answer(program: fn() -> Command) {
    CompleteEnv::with_factory(|| with_completers(program())).var(VARIABLE).complete();
}

/// The script for a shell. It calls the program by this name.
pub(crate) fn script(shell: Shell, program: &str) -> std::io::Result<Vec<u8>> {
    let mut script = Vec::new();
    let name = shell.to_string();
    let shells = Shells::builtins();
    let found = shells.completer(&name);
    let found = found.ok_or_else(|| std::io::Error::other(format!("there is no script for {name}")))?;
    found.write_registration(VARIABLE, "sieve", "sieve", program, &mut script)?;
    Ok(script)
}

/// Adds what is offered to every flag that takes such a value, by the flag's name.
fn with_completers(command: Command) -> Command {
    let with = |arg: Arg| {
        let completer = match arg.get_long().unwrap_or(arg.get_id().as_str()) {
            "recipe" => ArgValueCompleter::new(recipes),
            "set" | "sweep" => ArgValueCompleter::new(keys),
            "attention" | "kind" => ArgValueCompleter::new(kinds),
            "device" => ArgValueCompleter::new(devices),
            "checkpoint" | "branch-from" | "resume-from" | "compare" | "runs" => ArgValueCompleter::new(checkpoints),
            "selector" => ArgValueCompleter::new(selectors),
            _ => return arg,
        };
        arg.add(completer)
    };
    command.mut_args(with).mut_subcommands(with_completers)
}

/// The values that begin with what is typed.
fn beginning(current: &OsStr, all: impl IntoIterator<Item = String>) -> Vec<CompletionCandidate> {
    let typed = current.to_string_lossy();
    all.into_iter().filter(|value| value.starts_with(&*typed)).map(CompletionCandidate::new).collect()
}

fn kinds(current: &OsStr) -> Vec<CompletionCandidate> {
    beginning(current, AttentionKind::ALL.map(|kind| kind.name().to_owned()))
}

fn devices(current: &OsStr) -> Vec<CompletionCandidate> {
    beginning(current, ["auto", "cpu", "cuda", "cuda:0", "cuda:1"].map(str::to_owned))
}

fn selectors(current: &OsStr) -> Vec<CompletionCandidate> {
    beginning(current, sieve_select::ENTRIES.iter().map(|entry| entry.name.to_owned()))
}

/// Names inside the program, and TOML files.
fn recipes(current: &OsStr) -> Vec<CompletionCandidate> {
    let mut found = beginning(current, shipped::recipe_names().map(|name| name.trim_end_matches(".toml").to_owned()));
    let is_toml = |path: &Path| path.is_dir() || path.extension().is_some_and(|ending| ending == "toml");
    found.extend(PathCompleter::any().filter(is_toml).complete(current));
    found
}

/// Folders of runs in `out/`, then any folder.
fn checkpoints(current: &OsStr) -> Vec<CompletionCandidate> {
    let entries = std::fs::read_dir(RUNS).into_iter().flatten().flatten().map(|entry| entry.path());
    let runs = entries.filter(|path| path.join("config.toml").is_file() || path.join("sweep.json").is_file());
    let mut names: Vec<String> = runs.map(|path| path.to_string_lossy().into_owned()).collect();
    names.sort();
    let mut found = beginning(current, names.clone());
    let others = PathCompleter::dir().complete(current).into_iter();
    let is_run = |folder: &str| names.iter().any(|run| run == folder.trim_end_matches('/'));
    found.extend(others.filter(|other| !is_run(&other.get_value().to_string_lossy())));
    found
}

/// `section.key=` of every key, and the values that a key's name stands for.
fn keys(current: &OsStr) -> Vec<CompletionCandidate> {
    let schema: Value = serde_json::from_str(&json_schema()).unwrap_or_default();
    let mut all = Vec::new();
    if let Some(sections) = schema["properties"].as_object() {
        sections.iter().for_each(|(section, value)| add_keys(section, value, &mut all));
    }
    all.sort();
    all.dedup();
    beginning(current, all)
}

/// Adds the keys of a section or of a table in it, and the values of keys that list theirs.
fn add_keys(path: &str, value: &Value, all: &mut Vec<String>) {
    let forms = value["oneOf"].as_array().into_iter().flatten().chain([value]);
    for (name, key) in forms.filter_map(|form| form["properties"].as_object()).flatten() {
        let path = format!("{path}.{name}");
        let values = key["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
        all.extend(values.map(|value| format!("{path}={value}")));
        all.push(format!("{path}="));
        add_keys(&path, key, all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn values(found: Vec<CompletionCandidate>) -> Vec<String> {
        found.into_iter().map(|candidate| candidate.get_value().to_string_lossy().into_owned()).collect()
    }

    /// What is offered for the last of these words.
    fn offered(words: &[&str]) -> Vec<String> {
        let mut command = with_completers(crate::Cli::command());
        let words = words.iter().map(Into::into).collect::<Vec<_>>();
        let last = words.len() - 1;
        values(clap_complete::engine::complete(&mut command, words, last, None).expect("it completes"))
    }

    #[test]
    fn flags_offer_what_the_program_knows() {
        for (words, expected) in [
            (&["sieve", "import", "--attention", "inf"][..], &["infllm_v2"][..]),
            (&["sieve", "eval", "ppl", "--device", "cu"], &["cuda", "cuda:0", "cuda:1"]),
            (&["sieve", "train", "--recipe", "quicks"], &["quickstart"]),
            (&["sieve", "train", "--set", "attention.ki"], &["attention.kind="]),
            (&["sieve", "train", "--sweep", "optimizer.weight"], &["optimizer.weight_decay="]),
        ] {
            let found = offered(words);
            let missing =
                expected.iter().filter(|value| !found.iter().any(|found| found == *value)).collect::<Vec<_>>();
            assert!(missing.is_empty(), "{words:?}: {missing:?} is not among {found:?}");
        }
        assert!(offered(&["sieve", "train", "--set", ""]).len() > 100);
    }

    #[test]
    fn every_script_asks_the_program() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
            let script = String::from_utf8(script(shell, "/a/sieve").expect("a script")).expect("text");
            assert!(script.contains(VARIABLE) && script.contains("/a/sieve"), "{shell}: {script}");
        }
    }
}
