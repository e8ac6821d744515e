//! `sieve eval longbench`: LongBench's files as tasks of `sieve eval tasks`.
use super::tasks::{self, TasksArgs};
use anyhow::{Context, Result, bail};
use clap::Args;
use sieve_core::ShownPath;
use sieve_eval::READY_TASKS;
use std::path::PathBuf;

/// Prefix of the names of LongBench's tasks: `longbench_hotpotqa` reads the data set `hotpotqa`.
const PREFIX: &str = "longbench_";

/// Arguments of `sieve eval longbench`.
#[derive(Args, Debug)]
pub struct LongbenchArgs {
    /// The folder of LongBench's files (hotpotqa.jsonl and others), or else LongBench-E's (hotpotqa_e.jsonl). Data sets
    /// in Chinese are left out
    #[arg(long, value_name = "DIR", required_unless_present = "list")]
    folder: Option<PathBuf>,
    /// Data sets by name; all that are in the folder when absent
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    only: Vec<String>,
    #[command(flatten)]
    tasks: TasksArgs,
}

/// Runs `sieve eval longbench`: a model's scores on LongBench.
pub(crate) fn run(args: LongbenchArgs) -> Result<()> {
    if args.tasks.names_tasks() {
        bail!(
            "eval longbench reads only the data sets in --folder\n  \
             hint: --only NAME,… chooses among them; --data and --show are for sieve eval tasks"
        );
    }
    if args.tasks.list {
        return tasks::list(PREFIX);
    }
    let folder = args.folder.context("--folder is missing")?;
    if !folder.is_dir() {
        bail!("there is no folder {}\n  hint: unpack LongBench's data.zip and name its folder", folder.shown());
    }
    let names = READY_TASKS.iter().filter_map(|(name, _)| name.strip_prefix(PREFIX));
    let names: Vec<&str> = names.collect();
    if let Some(unknown) = args.only.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("{unknown} is not a data set of LongBench that is read here\n  hint: these are {}", names.join(", "));
    }
    let mut data = Vec::new();
    for name in names {
        if !args.only.is_empty() && !args.only.iter().any(|only| only == name) {
            continue;
        }
        let files = [format!("{name}.jsonl"), format!("{name}_e.jsonl")];
        let files = files.map(|file| folder.join(file));
        match files.iter().find(|file| file.is_file()) {
            Some(file) => data.push(format!("{PREFIX}{name}={}", file.shown())),
            // Without --only, a data set without a file is left out.
            None if args.only.is_empty() => {}
            None => bail!("there is no {}\n  hint: unpack LongBench's data.zip there", files[0].shown()),
        }
    }
    if data.is_empty() {
        bail!(
            "{} holds no file of LongBench\n  hint: unpack its data.zip there: hotpotqa.jsonl and others",
            folder.shown()
        );
    }
    tasks::run(args.tasks.with_data("longbench", data))
}
