//! `sieve train --sweep`: one run for each value, and a table.
mod combinations;
mod run;
mod starts;

use super::arguments::TrainArgs;
use super::one::{Process, train_on};
use crate::recipe::useless::useless_settings;
use anyhow::{Context, Result, anyhow, bail};
use combinations::{Planned, planned};
use run::Run;
use serde::{Deserialize, Serialize};
use sieve_core::recipe::other_losses;
use sieve_core::{Recipe, ShownPath, covered_words};
use sieve_host::exit::Exit;
use sieve_host::interrupt::Interrupt;
use sieve_host::out_file::write_text;
use sieve_host::terminal;
use sieve_train::{TrainError, last_validation};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Beginning of an override of the seed. Seeds are averaged over: no seed is called best.
const SEED: &str = "training.seed=";

/// Result of one run of the sweep.
#[derive(Deserialize, Serialize)]
struct Row {
    overrides: Vec<String>,
    folder: PathBuf,
    /// Validation loss in nats; absent where the run diverged.
    loss: Option<f64>,
    perplexity: Option<f64>,
    /// Why the run has no loss; `None` if it has one.
    error: Option<String>,
}

impl Row {
    /// Whether the sweep varies a key by which the run trains another model: one of `[attention]` or `[model]`.
    fn is_of_another_model(&self) -> bool {
        self.overrides.iter().any(|item| item.starts_with("attention.") || item.starts_with("model."))
    }

    /// The row of a run that has ended, with the last validation of its log; `error` is the reason if it diverged.
    fn of(run: &Run, error: Option<String>) -> Self {
        let report = error.is_none().then(|| last_validation(&run.request.out)).flatten();
        let report = report.filter(|report| report.loss.is_finite() && report.perplexity.is_finite());
        let not_finite = "the last validation's loss or perplexity is not finite";
        let error = error.or_else(|| report.is_none().then(|| not_finite.to_owned()));
        Self {
            overrides: run.overrides.clone(),
            folder: run.request.out.clone(),
            loss: report.as_ref().map(|report| report.loss),
            perplexity: report.as_ref().map(|report| report.perplexity),
            error,
        }
    }
}

/// Trains one run after the other, then writes sweep.json and prints the table. Entries of an earlier sweep into the
/// same folder stay in sweep.json.
pub(super) fn run(args: TrainArgs) -> Result<Exit> {
    let base = args.out_folder();
    // Every recipe is read before the first run begins: a mistake in the last value costs nothing.
    let Planned { runs, unused, num_combinations } = planned(&args, &base)?;
    check_hidden_keys(&args, &runs)?;
    unused.iter().for_each(|words| terminal::warning(words));
    if num_combinations > runs.len() {
        let (runs, all) = (terminal::counted(runs.len() as u64, "run"), num_combinations);
        terminal::status(&format!("sweep: {runs} of {all} combinations; the others would train the same again"));
    }
    for (words, of) in warnings(&runs) {
        let place = if of.len() == runs.len() { String::new() } else { format!("\n  in {}", of.join(", ")) };
        terminal::warning(&format!("{words}{place}"));
    }
    let path = base.join("sweep.json");
    let earlier = earlier_rows(&path, &runs)?;
    let (mesh, prints) = (None, true);
    let process = Process::open(&args, &runs[0].recipe, mesh, Interrupt::install(prints)?)?;
    starts::check(&process, &runs)?;
    let mut rows = Vec::new();
    let begun = Instant::now();
    let texts: BTreeSet<&String> = runs.iter().filter_map(|run| run.text.as_ref()).collect();
    texts.iter().for_each(|text| terminal::status(text));
    for (number, run) in (1..).zip(&runs) {
        let error = match train_on(&process, &run.request, &run.recipe) {
            Ok(Exit::Done) => None,
            Ok(stopped) => {
                terminal::line("the sweep stops here; the same command with --resume continues");
                return Ok(stopped);
            }
            // A run that diverges is a result of the sweep, not an error.
            Err(error) => match error.downcast_ref::<TrainError>() {
                Some(TrainError::Diverged(_)) => Some(error.to_string()),
                _ => return Err(error).context(run.overrides.join(" ")),
            },
        };
        let row = Row::of(run, error);
        terminal::status(&line_of(&row, [number, runs.len()], begun.elapsed().as_secs_f64()));
        rows.push(row);
    }
    let all = earlier.iter().chain(&rows).collect::<Vec<_>>();
    write_text(&path, &serde_json::to_string_pretty(&all)?)?;
    terminal::lines(table(&rows));
    if rows.iter().all(|row| row.loss.is_none()) {
        bail!("no run of the sweep finished\n  hint: sweep other values");
    }
    let compare = format!("compare {}", terminal::quoted(&base));
    terminal::status(&terminal::next(&[compare]));
    Ok(Exit::Done)
}

/// The line of a run that has ended: its place, its values, its loss, and how long all runs behind it will take if each
/// takes as long as the mean of those before.
fn line_of(row: &Row, [number, of]: [usize; 2], seconds: f64) -> String {
    let loss = row.loss.map_or("diverged".to_owned(), |loss| format!("loss {loss:.5}"));
    let left = match of - number {
        0 => format!("all in {}", terminal::duration(seconds)),
        more => format!("{} left", terminal::duration(seconds / number as f64 * more as f64)),
    };
    format!("sweep {number} of {of}: {}  {loss}  ({left})", row.overrides.join(" "))
}

/// Refuses a sweep over keys of `[attention]` in none of whose runs attention hides a key: all of them would train
/// dense attention. A sweep over kinds that are dense by definition (mha, mla) alone is not refused.
fn check_hidden_keys(args: &TrainArgs, runs: &[Run]) -> Result<()> {
    let mut keys = args.sweep.iter().map(|sweep| sweep.split('=').next().unwrap_or_default());
    let Some(key) = keys.find(|key| key.starts_with("attention.")) else {
        return Ok(());
    };
    let is_dense_kind = |recipe: &Recipe| recipe.attention.as_kind().reads_words().is_none();
    let covers = |run: &Run| run.recipe.covers_rows();
    let Some(first) = runs.iter().find(|run| covers(run)) else {
        return Ok(());
    };
    if !runs.iter().all(|run| covers(run) || is_dense_kind(&run.recipe)) {
        return Ok(());
    }
    let longest = first.recipe.stages().iter().map(|stage| stage.section.seq_len).max().unwrap_or_default();
    bail!(
        "--sweep {key}: no value hides a key, so every run would train dense attention; {} {}\n  \
         hint: sweep smaller values, or take longer rows (training.seq_len)",
        first.overrides.join(" "),
        covered_words(longest)
    )
}

/// Warnings about the runs' settings, each with the overrides of the runs that it is about.
fn warnings(runs: &[Run]) -> Vec<(String, Vec<String>)> {
    let mut all: Vec<(String, Vec<String>)> = Vec::new();
    for run in runs {
        for words in useless_settings(&run.recipe) {
            let name = run.overrides.join(" ");
            match all.iter_mut().find(|(known, _)| *known == words) {
                Some((_, of)) => of.push(name),
                None => all.push((words, vec![name])),
            }
        }
    }
    all
}

/// The rows of sweep.json, if the folder has one, but for the runs of this sweep.
fn earlier_rows(path: &Path, runs: &[Run]) -> Result<Vec<Row>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = sieve_files::read_file(path).with_context(|| format!("reading {}", path.shown()))?;
    let mut rows: Vec<Row> = serde_json::from_slice(&text).map_err(|error| {
        let path = path.shown();
        anyhow!("{path} is not the table of a sweep: {error}\n  hint: remove it, or name another folder with --out")
    })?;
    rows.retain(|row| runs.iter().all(|run| run.request.out.file_name() != row.folder.file_name()));
    Ok(rows)
}

/// Runs that differ only in their seed.
struct Seeds<'a> {
    /// The runs' overrides without the seed; empty if only the seed is swept.
    name: String,
    rows: Vec<&'a Row>,
}

impl<'a> Seeds<'a> {
    /// Groups rows by their overrides without the seed, in the order of each group's first run.
    fn of(rows: &'a [Row]) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for row in rows {
            let rest = row.overrides.iter().filter(|item| !item.starts_with(SEED));
            let name = rest.map(String::as_str).collect::<Vec<_>>().join(" ");
            match all.iter_mut().find(|seeds| seeds.name == name) {
                Some(seeds) => seeds.rows.push(row),
                None => all.push(Self { name, rows: vec![row] }),
            }
        }
        all
    }

    /// Mean and sample standard deviation (0 for one seed) of the losses; `None` if a run diverged.
    fn mean_and_spread(&self) -> Option<(f64, f64)> {
        let losses = self.rows.iter().map(|row| row.loss).collect::<Option<Vec<_>>>()?;
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        let squares: f64 = losses.iter().map(|loss| (loss - mean).powi(2)).sum();
        let spread = (squares / (losses.len().max(2) - 1) as f64).sqrt();
        Some((mean, spread))
    }
}

/// A group of seeds with its mean loss and spread.
type Ranked<'a> = (&'a Seeds<'a>, (f64, f64));

/// The keys that have different values in the rows.
fn swept(rows: &[Row]) -> BTreeSet<&str> {
    let all = || rows.iter().flat_map(|row| row.overrides.iter().map(String::as_str));
    let is_of_all = |item: &str| rows.iter().all(|row| row.overrides.iter().any(|own| own == item));
    all().filter(|item| !is_of_all(item)).filter_map(|item| Some(item.split_once('=')?.0)).collect()
}

/// The printed table: each run's loss, the means over seeds, and the best combination of values. If only the seed is
/// swept, nothing is best; nor is one of losses on other texts, or of other models' with one seed.
fn table(rows: &[Row]) -> Vec<String> {
    let groups = Seeds::of(rows);
    let has_seeds = groups.iter().any(|seeds| seeds.rows.len() > 1);
    let mut ranked: Vec<Ranked<'_>> =
        groups.iter().filter_map(|seeds| Some((seeds, seeds.mean_and_spread()?))).collect();
    ranked.sort_by(|(_, (a, _)), (_, (b, _))| a.total_cmp(b));
    let other = other_losses(swept(rows));
    let differs_by_seed = other.is_none() && !has_seeds && rows.len() > 1 && rows.iter().any(Row::is_of_another_model);
    let best = ranked.first().filter(|_| other.is_none() && !differs_by_seed && (groups.len() > 1 || !has_seeds));
    let mut lines = table_lines(rows, &groups, best.map(|(group, _)| group.name.as_str()));
    if let Some(reason) = other {
        lines.push(format!(
            "{reason}, so their losses do not compare and none is named\n  \
             hint: sweep one text at a time, or measure all runs on one text: sieve eval ppl --data"
        ));
    }
    if differs_by_seed {
        lines.push(
            "one seed: the losses of such models differ by their seeds too, so none is named\n  \
             hint: add --sweep training.seed=0,1,2"
                .to_owned(),
        );
    }
    if let Some(best) = best {
        lines.extend(best_lines(best, ranked.get(1), has_seeds));
    }
    lines
}

/// A line for each run, then one for each group of several seeds. The group called `best` is marked: in the line of its
/// mean, or of its run where no group has several seeds.
fn table_lines(rows: &[Row], groups: &[Seeds<'_>], best: Option<&str>) -> Vec<String> {
    let has_seeds = groups.iter().any(|seeds| seeds.rows.len() > 1);
    let mark = |group: &Seeds<'_>| if best == Some(&group.name) { "  best" } else { "" };
    let name_of = |row: &Row| row.overrides.join(" ");
    let names = rows.iter().map(name_of).chain(groups.iter().map(|seeds| seeds.name.clone()));
    let width = names.map(|name| name.chars().count()).max().unwrap_or(0).max(15);
    let mut lines = vec![format!("{:<width$}  {:>10}  {:>12}", "sweep", "loss", "perplexity")];
    for row in rows {
        let name = name_of(row);
        // Without several seeds each group is one run.
        let own_group = groups.iter().find(|group| !has_seeds && std::ptr::eq(group.rows[0], row));
        lines.push(match (row.loss, row.perplexity) {
            (Some(loss), Some(perplexity)) => {
                let perplexity = terminal::perplexity(perplexity, 3);
                format!("{name:<width$}  {loss:>10.5}  {perplexity:>12}{}", own_group.map_or("", mark))
            }
            _ => format!("{name:<width$}  diverged"),
        });
    }
    if !has_seeds {
        return lines;
    }
    lines.push(format!("{:<width$}  {:>10}  {:>12}", "mean of seeds", "loss", "spread"));
    for group in groups {
        let name = if group.name.is_empty() { "all" } else { &group.name };
        lines.push(match group.mean_and_spread() {
            Some((mean, spread)) => format!("{name:<width$}  {mean:>10.5}  {spread:>12.5}{}", mark(group)),
            None => format!("{name:<width$}  diverged for a seed"),
        });
    }
    lines
}

/// The lines about the best group, and whether it is ahead of the `next` one by more than the seeds' spread.
fn best_lines((best, (mean, spread)): &Ranked<'_>, next: Option<&Ranked<'_>>, has_seeds: bool) -> Vec<String> {
    if !has_seeds {
        return vec![format!("best: {}", best.rows[0].folder.shown())];
    }
    let mut lines = vec![format!("best: {}, by the mean of {} seeds", best.name, best.rows.len())];
    if let Some((_, (next_mean, next_spread))) = next {
        let (ahead, spread) = (next_mean - mean, spread.max(*next_spread));
        if ahead < spread {
            lines.push(format!(
                "  {ahead:.5} below the next, less than the seeds' spread of {spread:.5}: try more seeds"
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(overrides: &str, loss: Option<f64>) -> Row {
        Row {
            overrides: overrides.split(' ').map(str::to_owned).collect(),
            folder: PathBuf::from(format!("out/{overrides}")),
            loss,
            perplexity: loss.map(f64::exp),
            error: None,
        }
    }

    #[test]
    fn a_run_that_ended_is_one_line_with_the_time_of_the_others() {
        let run = row("optimizer.lr=1e-3", Some(2.5));
        assert_eq!(line_of(&run, [2, 5], 60.0), "sweep 2 of 5: optimizer.lr=1e-3  loss 2.50000  (1m 30s left)");
        let run = row("optimizer.lr=1", None);
        assert_eq!(line_of(&run, [5, 5], 150.0), "sweep 5 of 5: optimizer.lr=1  diverged  (all in 2m 30s)");
    }

    #[test]
    fn a_seed_is_never_best() {
        let [low, high] = ["training.seed=0 optimizer.lr=1e-3", "training.seed=1 optimizer.lr=1e-3"];
        let [other, another] = ["training.seed=0 optimizer.lr=3e-3", "training.seed=1 optimizer.lr=3e-3"];
        // The lowest of the four losses belongs to the value with the higher mean.
        let rows = [row(low, Some(1.0)), row(high, Some(3.0)), row(other, Some(1.4)), row(another, Some(1.6))];
        let text = table(&rows).join("\n");
        for words in [
            "optimizer.lr=1e-3                     2.00000       1.41421\n",
            "optimizer.lr=3e-3                     1.50000       0.14142  best\n",
            "best: optimizer.lr=3e-3, by the mean of 2 seeds\n",
        ] {
            assert!(text.contains(words), "{text}");
        }
        let end = "0.50000 below the next, less than the seeds' spread of 1.41421: try more seeds";
        assert!(text.ends_with(end), "{text}");
        assert_eq!(text.matches("  best").count(), 1, "{text}");

        let rows = [row("training.seed=0", Some(1.0)), row("training.seed=1", Some(1.5))];
        let text = table(&rows).join("\n");
        assert!(text.ends_with("all                 1.25000       0.35355") && !text.contains("best"), "{text}");

        // A value with a diverged run has no mean and is not best.
        let rows = [row(low, Some(1.0)), row(high, None), row(other, Some(2.0)), row(another, Some(2.0))];
        let text = table(&rows).join("\n");
        assert!(text.contains("diverged for a seed\n") && text.contains("best: optimizer.lr=3e-3"), "{text}");

        // Losses on other texts do not compare, with seeds or without; a text that all runs read is none of them.
        for (key, reason) in [
            ("tokenizer.train.vocab_size", "their tokenizers differ"),
            ("tokenizer.path", "their tokenizers differ"),
            ("data.paths", "their texts differ"),
            ("data.validation_fraction", "their texts differ"),
            ("stage.1.paths", "their texts differ"),
            ("validation.tokens", "their texts differ"),
        ] {
            let of = |value: u32, seed: u32| format!("training.seed={seed} {key}={value} optimizer.lr={value}");
            let rows = [row(&of(1, 0), Some(2.0)), row(&of(1, 1), Some(2.1)), row(&of(2, 0), Some(1.0))];
            for rows in [&rows[1..], &rows] {
                let text = table(rows).join("\n");
                assert!(!text.contains("best") && text.contains(reason), "{text}");
            }
            let same = rows.map(|row| Row {
                overrides: row.overrides.iter().map(|item| item.replace("=2", "=1")).collect(),
                ..row
            });
            assert!(!table(&same).join("\n").contains("do not compare"), "{key}");
        }

        // One seed names no best among kinds and models, several do.
        for other in ["attention.kind=mha", "model.hidden_size=8", "optimizer.lr=1e-3 attention.keep_window_size=8"] {
            let rows = [row("attention.kind=dma", Some(2.0)), row(other, Some(1.0))];
            let text = table(&rows).join("\n");
            assert!(!text.contains("best") && text.ends_with("hint: add --sweep training.seed=0,1,2"), "{text}");
        }
        let [dma, mha] = ["dma", "mha"].map(|kind| format!("training.seed=0 attention.kind={kind}"));
        let more = dma.replace("seed=0", "seed=1");
        let text = table(&[row(&dma, Some(2.0)), row(&more, Some(2.1)), row(&mha, Some(1.0))]).join("\n");
        assert!(text.contains("best: attention.kind=mha"), "{text}");

        let rows = [row("optimizer.lr=1e-3", Some(2.0)), row("optimizer.lr=3e-3", Some(1.0))];
        let text = table(&rows).join("\n");
        assert!(text.ends_with("2.718  best\nbest: out/optimizer.lr=3e-3"), "{text}");
    }
}
