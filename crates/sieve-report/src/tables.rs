//! Builds the page's tables in HTML.
use crate::Run;
use crate::groups::differences;
use sieve_core::Recipe;
use std::collections::BTreeSet;
use std::fmt::Write;

/// `text` with HTML's special characters escaped.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A number with four or five significant digits.
fn digits(value: f64) -> String {
    match value.abs() {
        _ if !value.is_finite() => "–".to_owned(),
        size if size >= 1e4 => thousands(value),
        _ if value.fract() == 0.0 => format!("{value}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size < 1e-3 => format!("{value:.2e}"),
        _ => format!("{value:.4}"),
    }
}

/// A whole number with commas: `12,345`.
fn thousands(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::from(if value < 0.0 { "−" } else { "" });
    for (idx, digit) in digits.chars().enumerate() {
        if idx > 0 && (digits.len() - idx).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A column of the table of runs.
struct Column {
    title: &'static str,
    /// Tooltip of the title.
    about: &'static str,
    /// Chooses the better of two values (`f64::min` or `f64::max`); the best one is printed bold. `None`: no value is.
    best: Option<fn(f64, f64) -> f64>,
    /// The run's value; NaN if it has none.
    of: fn(&Run) -> f64,
}

impl Column {
    const fn plain(title: &'static str, about: &'static str, of: fn(&Run) -> f64) -> Self {
        let best = None;
        Self { title, about, best, of }
    }

    const fn best(self, best: fn(f64, f64) -> f64) -> Self {
        let best = Some(best);
        Self { best, ..self }
    }
}

const LATE: &str = "mean of the last tenth of the logged steps, nats per token";
const VALIDATED: &str = "of the last validation, nats per token";
const HOURS: &str = "of training, without validation and checkpoints";
const SPEED: &str = "median of the logged steps, all devices together";
const MFU: &str = "median: executed FLOPs as a share of the device's peak";

const COLUMNS: [Column; 11] = [
    Column::plain("parameters", "of the whole model", parameters),
    Column::plain("steps", "done", |run| run.steps.last().map_or(f64::NAN, |&step| f64::from(step))),
    Column::plain("tokens", "trained on", |run| sum(run, 0)),
    Column::plain("hours", HOURS, |run| sum(run, 1) / 3600.0),
    Column::plain("training loss", LATE, late_loss).best(f64::min),
    Column::plain("validation loss", VALIDATED, validation_loss).best(f64::min),
    Column::plain("bits per byte", "of the last validation", bits_per_byte).best(f64::min),
    Column::plain("tokens/s", SPEED, |run| median(run.column("tokens_per_second"))).best(f64::max),
    Column::plain("MFU %", MFU, |run| median(run.column("mfu_percent"))),
    Column::plain("memory GiB", "most in use at a logged step", memory).best(f64::min),
    Column::plain("skipped", "steps that the guard left out", |run| run.num_skipped as f64),
];

/// The tokens (`which` 0), seconds (1) or FLOPs (2) up to the last logged step.
fn sum(run: &Run, which: usize) -> f64 {
    run.sums().last().map_or(f64::NAN, |sums| sums[which])
}

fn validation_loss(run: &Run) -> f64 {
    run.validations.last().map_or(f64::NAN, |check| check.loss)
}

fn bits_per_byte(run: &Run) -> f64 {
    run.validations.last().map_or(f64::NAN, |check| check.bits_per_byte)
}

fn memory(run: &Run) -> f64 {
    let bytes = run.column("memory_bytes").iter().copied();
    bytes.fold(f64::NAN, f64::max) / f64::from(1 << 30)
}

/// Number of the model's parameters; NaN if the recipe or the vocabulary's size is not known.
fn parameters(run: &Run) -> f64 {
    let shape = Recipe::load(&run.recipe, "config.toml", &[]).ok().and_then(|recipe| {
        // The run's own size comes first: a trained tokenizer may have fewer tokens than the recipe asks for.
        let vocab_size = run.vocab_size.or_else(|| recipe.stated_vocab_size())?;
        recipe.model_shape(vocab_size).ok()
    });
    shape.map_or(f64::NAN, |shape| shape.parameters().total() as f64)
}

fn late_loss(run: &Run) -> f64 {
    let loss = run.column("loss");
    let late = &loss[loss.len() - loss.len().div_ceil(10)..];
    late.iter().sum::<f64>() / late.len() as f64
}

fn median(values: &[f64]) -> f64 {
    let mut finite: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
    finite.sort_by(f64::total_cmp);
    finite.get(finite.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Mean and sample standard deviation, which is `None` for one value.
fn mean_and_spread(values: &[f64]) -> (f64, Option<f64>) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (values.len() > 1).then(|| (squares / (values.len() - 1) as f64).sqrt()))
}

/// Mean of the values of a group's runs, with their spread if they differ.
fn cell(values: &[f64]) -> String {
    match mean_and_spread(values) {
        (mean, Some(spread)) if spread > 0.0 => format!("{} ± {}", digits(mean), digits(spread)),
        (mean, _) => digits(mean),
    }
}

/// Name of a run, after a mark in the run's colour.
fn swatch(run: &Run, idx: usize) -> String {
    format!("<span class=\"swatch\" data-run=\"{idx}\"></span>{}", escaped(&run.name))
}

/// The indices of the runs in each group.
fn members(groups: &[usize]) -> Vec<Vec<usize>> {
    let num = groups.iter().max().map_or(0, |most| most + 1);
    (0..num).map(|group| (0..groups.len()).filter(|&idx| groups[idx] == group).collect()).collect()
}

/// The table of runs: size, progress, loss, speed and memory. A group of several seeds has a further row of means, and
/// only that row can be the best.
pub(crate) fn summary(runs: &[Run], groups: &[usize]) -> String {
    let mut html = String::from("<table class=\"wide\"><thead><tr><th>run</th>");
    for column in &COLUMNS {
        let _ = write!(html, "<th title=\"{}\">{}</th>", escaped(column.about), column.title);
    }
    html.push_str("</tr></thead><tbody>");
    let groups = members(groups);
    let values_of = |column: &Column, members: &[usize]| -> Vec<f64> {
        members.iter().map(|&idx| (column.of)(&runs[idx])).collect()
    };
    let best: Vec<f64> = COLUMNS
        .iter()
        .map(|column| {
            let means = groups.iter().map(|members| mean_and_spread(&values_of(column, members)).0);
            let values: Vec<f64> = means.filter(|value| value.is_finite()).collect();
            let differ = values.iter().any(|value| *value != values[0]);
            let best = column.best.filter(|_| differ);
            best.map_or(f64::NAN, |best| values.into_iter().fold(f64::NAN, best))
        })
        .collect();
    let mut row = |class: &str, title: &str, members: &[usize], may_be_best: bool| {
        let _ = write!(html, "<tr{class}><th>{title}</th>");
        for (column, best) in COLUMNS.iter().zip(&best) {
            let values = values_of(column, members);
            let is_best = may_be_best && mean_and_spread(&values).0 == *best;
            let (open, close) = if is_best { ("<b>", "</b>") } else { ("", "") };
            let _ = write!(html, "<td>{open}{}{close}</td>", cell(&values));
        }
        html.push_str("</tr>");
    };
    for members in &groups {
        let has_seeds = members.len() > 1;
        for &idx in members {
            row("", &swatch(&runs[idx], idx), &[idx], !has_seeds);
        }
        if has_seeds {
            let title = format!("mean of {} seeds", members.len());
            let may_be_best = true;
            row(" class=\"mean\"", &title, members, may_be_best);
        }
    }
    html.push_str("</tbody></table>");
    html
}

/// The table of keys in which the recipes differ.
pub(crate) fn config(runs: &[Run]) -> String {
    let found = differences(runs);
    if found.is_empty() {
        return "<p>All recipes are the same.</p>".to_owned();
    }
    let mut html = head("key", runs);
    for (key, values) in found {
        let _ = write!(html, "<tr><th>{}</th>", escaped(key));
        for value in values {
            let _ = write!(html, "<td>{}</td>", value.map_or("–".to_owned(), escaped));
        }
        html.push_str("</tr>");
    }
    html + "</tbody></table>"
}

/// The beginning of a table with a column for each run.
fn head(title: &str, runs: &[Run]) -> String {
    let mut html = format!("<table class=\"wide\"><thead><tr><th>{title}</th>");
    for (idx, run) in runs.iter().enumerate() {
        let _ = write!(html, "<th>{}</th>", swatch(run, idx));
    }
    html + "</tr></thead><tbody>"
}

/// A table of scores for each file name in the runs' `eval` folders.
pub(crate) fn scores(runs: &[Run]) -> String {
    let files = runs.iter().flat_map(|run| &run.scores).map(|scores| &*scores.file);
    let mut html = String::new();
    for file in files.collect::<BTreeSet<_>>() {
        let of: Vec<&[(String, f64)]> = runs
            .iter()
            .map(|run| {
                let scores = run.scores.iter().find(|scores| scores.file == file);
                scores.map_or(&[][..], |scores| &scores.rows)
            })
            .collect();
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in of.iter().copied().flatten() {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        let _ = write!(html, "<details open><summary>{}</summary>{}", escaped(file), head("measure", runs));
        for name in names {
            let _ = write!(html, "<tr><th>{}</th>", escaped(name));
            for rows in &of {
                let value = rows.iter().find(|(known, _)| known == name).map_or(f64::NAN, |(_, value)| *value);
                let _ = write!(html, "<td>{}</td>", digits(value));
            }
            html.push_str("</tr>");
        }
        html.push_str("</tbody></table></details>");
    }
    html
}

/// Pictures of the runs' `eval` folders; those with the same file name are side by side.
pub(crate) fn pictures(runs: &[Run]) -> String {
    let files = runs.iter().flat_map(|run| &run.pictures).map(|picture| &*picture.file);
    let mut html = String::new();
    for file in files.collect::<BTreeSet<_>>() {
        let _ = write!(html, "<h3>{}</h3><div class=\"pictures\">", escaped(file));
        for (idx, run) in runs.iter().enumerate() {
            for picture in run.pictures.iter().filter(|picture| picture.file == file) {
                let _ = write!(
                    html,
                    "<figure><img alt=\"{0} of {1}\" src=\"{2}\"><figcaption>{3}</figcaption></figure>",
                    escaped(file),
                    escaped(&run.name),
                    picture.uri,
                    swatch(run, idx)
                );
            }
        }
        html.push_str("</div>");
    }
    html
}

/// A list of the commands that reproduce each run.
pub(crate) fn commands(runs: &[Run]) -> String {
    let mut html = String::from("<ul class=\"commands\">");
    for (idx, run) in runs.iter().enumerate() {
        let _ = write!(
            html,
            "<li>{}<code>sieve train --recipe {} --out NEW_FOLDER</code></li>",
            swatch(run, idx),
            escaped(&run.folder.join("config.toml").display().to_string())
        );
    }
    html + "</ul>"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::{STEP, folder};

    #[test]
    fn numbers_are_short() {
        let cases = [
            (0.0, "0"),
            (2.34567, "2.3457"),
            (12.0, "12"),
            (1_234_567.0, "1,234,567"),
            (12_345.6, "12,346"),
            (100.0, "100"),
            (234.56, "234.6"),
            (0.000_123_4, "1.23e-4"),
            (f64::NAN, "–"),
            (-1_234_567.0, "−1,234,567"),
        ];
        for (value, text) in cases {
            assert_eq!(digits(value), text);
        }
    }

    #[test]
    fn seeds_get_a_row_of_means_and_names_are_escaped() {
        let run = |seed: u32, loss: &str, name: &str| {
            let check = format!("{{\"kind\":\"validation\",\"step\":10,\"loss\":{loss}}}");
            Run::open(folder(&format!("[training]\nseed = {seed}\n"), &format!("{STEP}\n{check}\n")).path(), Some(name))
                .unwrap()
        };
        let runs = [run(0, "2.0", "a<b"), run(1, "3.0", "c")];
        let html = summary(&runs, &[0, 0]);
        assert!(html.contains("a&lt;b") && html.contains("mean of 2 seeds"), "{html}");
        assert!(html.contains("<td>2.5000 ± 0.7071</td>"), "{html}");
        assert!(!html.contains("<b>"), "no seed is best: {html}");
        let apart = summary(&runs, &[0, 1]);
        assert!(!apart.contains("mean of 2") && apart.contains("<td><b>2</b></td>"), "{apart}");
        // A recipe is best by the mean of its seeds, though another has the lowest of all losses.
        let runs = [run(0, "1.0", "a"), run(1, "4.0", "b"), run(0, "2.0", "c"), run(1, "2.5", "d")];
        let html = summary(&runs, &[0, 0, 1, 1]);
        assert!(html.contains("<td><b>2.2500 ± 0.3536</b></td>"), "{html}");
        assert_eq!(html.matches("<b>").count(), 1, "{html}");
        assert!(config(&runs[..2]).contains("<th>training.seed</th><td>0</td><td>1</td>"));
    }

    #[test]
    fn one_value_has_no_spread() {
        assert_eq!(mean_and_spread(&[2.0]), (2.0, None));
        let (mean, spread) = mean_and_spread(&[1.0, 2.0, 3.0]);
        assert_eq!((mean, spread), (2.0, Some(1.0)));
    }
}
