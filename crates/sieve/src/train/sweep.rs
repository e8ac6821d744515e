//! `sieve train --sweep`: one run for each value, and a table.
use super::{Ending, Session, TrainArgs, train_on};
use crate::terminal;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use sieve_core::Recipe;
use sieve_train::{RunFolder, Start, TrainError, last_validation};
use std::path::{Path, PathBuf};

/// More runs than this are refused: a list of values was likely meant otherwise.
const MAX_RUNS: usize = 1000;

/// One run of the sweep.
struct Run {
    /// `section.key=value` of every swept key.
    overrides: Vec<String>,
    recipe: Recipe,
    /// Says which text is read where the recipe leaves it open.
    text: Option<String>,
    out: PathBuf,
}

/// What came of it.
#[derive(Serialize)]
struct Row {
    overrides: Vec<String>,
    folder: PathBuf,
    /// Validation loss in nats; absent where the run diverged.
    loss: Option<f64>,
    perplexity: Option<f64>,
    /// Why there is no loss.
    error: Option<String>,
}

pub(super) fn run(args: TrainArgs) -> Result<Ending> {
    let base = args.out_folder();
    // Every recipe is read before the first run begins: a mistake in the last value costs nothing.
    let runs = runs(&args, &base)?;
    let session = Session::open(&args, None)?;
    let mut rows = Vec::new();
    for (number, run) in (1..).zip(&runs) {
        terminal::line(&format!(
            "sweep {number} of {}: {} in {}",
            runs.len(),
            run.overrides.join(" "),
            run.out.display()
        ));
        terminal::lines(&run.text);
        let start = match args.start(&run.out, None)? {
            // Runs that were not begun yet begin; the others go on.
            Start::Resume | Start::ResumeAlone if !RunFolder::holds_run(&run.out) => Start::New,
            start => start,
        };
        let error = match train_on(&session, &start, &run.recipe, &run.out) {
            Ok(Ending::Finished) => None,
            Ok(Ending::Interrupted) => {
                terminal::line("the sweep stops here; the same command with --resume goes on");
                return Ok(Ending::Interrupted);
            }
            // A value that does not train is a result of the sweep.
            Err(error) => match error.downcast_ref::<TrainError>() {
                Some(TrainError::Diverged { .. }) => Some(error.to_string()),
                _ => return Err(error).context(run.overrides.join(" ")),
            },
        };
        let report = error.is_none().then(|| last_validation(&run.out)).flatten();
        rows.push(Row {
            overrides: run.overrides.clone(),
            folder: run.out.clone(),
            loss: report.as_ref().map(|report| report.loss),
            perplexity: report.as_ref().map(|report| report.perplexity),
            error,
        });
    }
    let path = base.join("sweep.json");
    std::fs::write(&path, serde_json::to_string_pretty(&rows)?)
        .with_context(|| format!("writing {}", path.display()))?;
    terminal::lines(table(&rows));
    if rows.iter().all(|row| row.loss.is_none()) {
        bail!("no run of the sweep finished\n  hint: sweep other values");
    }
    Ok(Ending::Finished)
}

/// All combinations of the swept values.
fn runs(args: &TrainArgs, base: &Path) -> Result<Vec<Run>> {
    let mut combinations: Vec<Vec<String>> = vec![Vec::new()];
    let mut shares_data = true;
    for sweep in &args.sweep {
        let Some((key, values)) = sweep.split_once('=') else {
            bail!(
                "--sweep {sweep} is not written section.key=V1,V2,…\n  \
                 hint: for example --sweep optimizer.lr=1e-3,3e-3"
            );
        };
        let values = split(values);
        if values.is_empty() || values.iter().any(String::is_empty) {
            bail!("--sweep {sweep} has an empty value\n  hint: write {key}=V1,V2 without spaces");
        }
        shares_data &= !key.starts_with("data.") && !key.starts_with("tokenizer.");
        combinations = combinations
            .into_iter()
            .flat_map(|combination| {
                values.iter().map(move |value| {
                    let mut longer = combination.clone();
                    longer.push(format!("{key}={value}"));
                    longer
                })
            })
            .collect();
        if combinations.len() > MAX_RUNS {
            bail!("--sweep asks for more than {MAX_RUNS} runs\n  hint: give fewer values");
        }
    }
    let runs = combinations.into_iter().map(|overrides| {
        let mut recipe = args.recipe.clone();
        recipe.overrides.extend(overrides.iter().cloned());
        let (mut recipe, text) = recipe.load_with_text()?;
        if shares_data && recipe.data.cache_dir.is_none() {
            let shared = base.join("data").display().to_string();
            recipe.data.cache_dir = Some(shared.replace('$', "$$"));
        }
        let out = base.join(folder_name(&overrides));
        Ok(Run {
            overrides,
            recipe,
            text,
            out,
        })
    });
    let runs = runs.collect::<Result<Vec<_>>>()?;
    for (index, run) in runs.iter().enumerate() {
        if runs[..index].iter().any(|other| other.out == run.out) {
            bail!(
                "--sweep names {} twice\n  hint: give each value once",
                run.overrides.join(" ")
            );
        }
    }
    Ok(runs)
}

/// Values between commas; those inside brackets or quotes belong to one value.
fn split(values: &str) -> Vec<String> {
    let mut split = vec![String::new()];
    let (mut depth, mut quoted) = (0usize, false);
    for letter in values.chars() {
        match letter {
            '"' => quoted = !quoted,
            '[' | '{' if !quoted => depth += 1,
            ']' | '}' if !quoted => depth = depth.saturating_sub(1),
            ',' if !quoted && depth == 0 => {
                split.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(last) = split.last_mut() {
            last.push(letter);
        }
    }
    split
}

/// `lr=1e-3,beta2=0.9`, with nothing a file system would mind.
fn folder_name(overrides: &[String]) -> String {
    let short = overrides.iter().map(|item| {
        let (key, value) = item.split_once('=').unwrap_or((item, ""));
        let key = key.rsplit_once('.').map_or(key, |(_, last)| last);
        format!("{key}={value}")
    });
    let name = short.collect::<Vec<_>>().join(",");
    let plain = |letter: char| letter.is_alphanumeric() || "=,.-+_".contains(letter);
    name.chars()
        .map(|letter| if plain(letter) { letter } else { '_' })
        .collect()
}

fn table(rows: &[Row]) -> Vec<String> {
    let losses = rows.iter().filter_map(|row| row.loss);
    let best = losses.fold(f64::INFINITY, f64::min);
    let widths = rows.iter().map(|row| row.overrides.join(" ").chars().count());
    let width = widths.max().unwrap_or(0);
    let mut lines = vec![format!("{:<width$}  {:>10}  {:>12}", "sweep", "loss", "perplexity")];
    for row in rows {
        let name = row.overrides.join(" ");
        lines.push(match (row.loss, row.perplexity) {
            (Some(loss), Some(perplexity)) => {
                let mark = if loss == best { "  best" } else { "" };
                format!("{name:<width$}  {loss:>10.5}  {perplexity:>12.3}{mark}")
            }
            _ => format!("{name:<width$}  diverged"),
        });
    }
    if let Some(row) = rows.iter().find(|row| row.loss == Some(best)) {
        lines.push(format!("best: {}", row.folder.display()));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_split_at_commas_outside_brackets_and_quotes() {
        assert_eq!(split("1e-3,3e-3"), ["1e-3", "3e-3"]);
        assert_eq!(split("[1,2],[3]"), ["[1,2]", "[3]"]);
        assert_eq!(split("\"a,b\",c"), ["\"a,b\"", "c"]);
        assert_eq!(split(""), [""]);
    }

    #[test]
    fn folders_are_named_after_what_differs() {
        let overrides = ["optimizer.lr=1e-3", "data.paths=[\"a/b\"]"].map(str::to_owned);
        assert_eq!(folder_name(&overrides), "lr=1e-3,paths=__a_b__");
    }
}
