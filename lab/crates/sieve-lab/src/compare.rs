//! `sieve compare`: an HTML page of runs side by side.
use anyhow::{Result, bail};
use clap::Args;
use sieve_core::ShownPath;
use sieve_host::out_file::OutFile;
use sieve_host::terminal;
use sieve_report::{Run, page};
use std::path::Path;

/// Arguments of `sieve compare`.
#[derive(Args, Debug)]
pub struct CompareArgs {
    /// Folders that `sieve train --out` wrote, of runs or of sweeps; NAME=FOLDER gives a run another name
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<String>,
    /// Also print each number's difference from this run, by its name
    #[arg(long, value_name = "NAME")]
    against: Option<String>,
    /// The page; it opens in any browser and needs no network
    #[arg(long, value_name = "FILE", default_value = "compare.html")]
    out: OutFile,
}

/// Runs `sieve compare`: draws the metrics of several runs on one page.
///
/// # Errors
/// Folders that hold no run, and files that cannot be written.
pub fn run(args: &CompareArgs) -> Result<()> {
    let mut named = args.runs.iter().filter(|text| !lies_beside_runs(Path::new(text))).peekable();
    let runs: Vec<Run> = match named.peek() {
        Some(_) => {
            let runs = named.map(|text| open(text)).collect::<Result<Vec<_>>>()?;
            runs.into_iter().flatten().collect()
        }
        // Every argument is a sweep's own file or folder: opening the first one gives the error to print.
        None => args.runs.first().map_or(Ok(Vec::new()), |text| open(text))?,
    };
    let runs_in_words = terminal::counted(runs.len() as u64, "run");
    let html = page(runs, args.against.as_deref())?;
    args.out.write_text(&html)?;
    let (runs, size) = (runs_in_words, terminal::bytes(html.len() as u64));
    terminal::line(&format!("{}: {runs}, {size}", args.out.shown()));
    Ok(())
}

/// Whether `path` is the `sweep.json` or the `data` folder that a sweep writes beside its runs. The shell expands
/// SWEEP/* to them too; they are no runs.
fn lies_beside_runs(path: &Path) -> bool {
    let is_named = |name: &str| path.file_name().is_some_and(|own| own == name);
    is_named("sweep.json") && path.is_file() || is_named("data") && path.is_dir() && !path.join("config.toml").exists()
}

/// Opens a run, or the runs of a sweep, from FOLDER or NAME=FOLDER. A folder whose own name contains `=` is found as
/// FOLDER.
fn open(text: &str) -> Result<Vec<Run>> {
    let whole = Path::new(text);
    match text.split_once('=') {
        Some(("", _)) if !whole.exists() => {
            bail!("{text}: the name before = is empty\n  hint: NAME=FOLDER");
        }
        Some((name, folder)) if !whole.exists() => Ok(Run::open_all(Path::new(folder), Some(name))?),
        _ => Ok(Run::open_all(whole, None)?),
    }
}
