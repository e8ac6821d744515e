//! `sieve compare`.
use crate::terminal;
use anyhow::{Result, bail};
use clap::Args;
use sieve_report::{Run, page};
use std::path::{Path, PathBuf};

/// Arguments of `sieve compare`.
#[derive(Args, Debug)]
pub(crate) struct CompareArgs {
    /// Folders that `sieve train --out` wrote; NAME=FOLDER gives a run another name
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<String>,
    /// The page; it opens in any browser and needs no network
    #[arg(long, value_name = "FILE", default_value = "compare.html")]
    out: PathBuf,
}

/// Runs the command.
pub(crate) fn run(args: &CompareArgs) -> Result<()> {
    crate::eval::output::check_replaceable(&args.out)?;
    let runs = args.runs.iter().map(|text| open(text)).collect::<Result<Vec<Run>>>()?;
    let html = page(&runs)?;
    crate::eval::output::write(&args.out, &html)?;
    terminal::line(&format!(
        "{}: {} runs, {}",
        args.out.display(),
        runs.len(),
        terminal::bytes(html.len() as u64)
    ));
    Ok(())
}

/// A run by its folder, or by NAME=FOLDER where no folder has the whole text as its name.
fn open(text: &str) -> Result<Run> {
    let whole = Path::new(text);
    match text.split_once('=') {
        Some(("", _)) if !whole.exists() => {
            bail!("{text}: the name before = is empty\n  hint: NAME=FOLDER");
        }
        Some((name, folder)) if !whole.exists() => Ok(Run::open(Path::new(folder), Some(name))?),
        _ => Ok(Run::open(whole, None)?),
    }
}
