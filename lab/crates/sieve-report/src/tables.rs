//! Builds the page's tables in HTML.
use crate::Run;
use crate::groups::{are_other_models, differences, name_of, num_seeds, other_text};
use crate::paired::{differences as differences_by_seed, pairs};
use sieve_core::{Recipe, quoted};
use std::collections::BTreeSet;
use std::fmt::Write;

/// `text` with HTML's special characters escaped.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A number with three significant digits; whole numbers and large ones with all digits before the point.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        _ if !value.is_finite() => "–".to_owned(),
        size if size >= 1e4 => thousands(value),
        _ if value.fract() == 0.0 => format!("{value}"),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        size if size >= 0.1 => format!("{value:.3}"),
        size if size >= 1e-3 => format!("{value:.4}"),
        _ => format!("{value:.2e}"),
    }
}

/// A loss or another score, with three digits behind the point.
fn score_digits(value: f64) -> String {
    match value.abs() {
        size if (1e-3..100.0).contains(&size) && value.fract() != 0.0 => format!("{value:.3}"),
        _ => digits(value),
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
    /// The run's value; NaN if it has none.
    of: fn(&Run) -> f64,
    /// Divides a value of this size for printing, and names the unit.
    unit: fn(f64) -> (f64, &'static str),
    /// Words behind a run's value.
    remark: fn(&Run) -> Option<String>,
    /// How one value can be better than another; `None` for columns in which no value is better.
    better: Option<Better>,
}

/// When a value counts as better than another, beside the seeds' spread.
#[derive(Clone, Copy)]
struct Better {
    is_less: bool,
    /// Two values nearer than this share of them are level: runs of one recipe differ by as much.
    level_within: f64,
    /// Whether the value is a loss, which is comparable on the same text and through the same tokenizer alone.
    is_loss: bool,
}

impl Column {
    fn is_loss(&self) -> bool {
        self.better.is_some_and(|better| better.is_loss)
    }

    /// The value of all runs, if it is the same and no value is better: then it needs no column.
    fn common(&self, runs: &[Run]) -> Option<f64> {
        let first = (self.of)(runs.first()?);
        let is_same = runs.len() > 1 && runs.iter().all(|run| (self.of)(run) == first);
        (self.better.is_none() && is_same).then_some(first)
    }

    const fn plain(title: &'static str, about: &'static str, of: fn(&Run) -> f64) -> Self {
        Self { title, about, of, unit: |_| (1.0, ""), remark: |_| None, better: None }
    }

    const fn loss(title: &'static str, about: &'static str, of: fn(&Run) -> f64) -> Self {
        Self {
            better: Some(Better { is_less: true, level_within: 0.0, is_loss: true }),
            ..Self::plain(title, about, of)
        }
    }

    const fn cost(title: &'static str, about: &'static str, of: fn(&Run) -> f64, is_less: bool, within: f64) -> Self {
        let better = Some(Better { is_less, level_within: within, is_loss: false });
        Self { better, ..Self::plain(title, about, of) }
    }

    const fn with_remark(self, remark: fn(&Run) -> Option<String>) -> Self {
        Self { remark, ..self }
    }

    const fn in_units(self, unit: fn(f64) -> (f64, &'static str)) -> Self {
        Self { unit, ..self }
    }
}

const LATE: &str = "mean of the last tenth of the logged steps, nats per token";
const VALIDATED: &str = "of the last validation, nats per token";
const TIME: &str = "of training up to the last logged step, without validation and checkpoints";
const SPEED: &str = "tokens divided by training time, up to the last logged step, all devices together";
const MFU: &str = "executed FLOPs as a share of the device's peak, mean over the training time";

/// Share by which the speeds of equal runs on one machine may differ.
const LEVEL_SPEED: f64 = 0.05;
/// Share by which the memory of equal runs may differ.
const LEVEL_MEMORY: f64 = 0.01;

const COLUMNS: [Column; 11] = [
    Column::plain("parameters", "of the whole model", parameters),
    Column::plain("steps", "done", Run::num_done),
    Column::plain("tokens", "trained on", Run::num_tokens),
    Column::plain("time", TIME, |run| sum(run, 1)).in_units(duration),
    Column::loss("training loss", LATE, late_loss),
    Column::loss("validation loss", VALIDATED, validation_loss).with_remark(validated_early),
    Column::loss("bits per byte", "of the last validation", bits_per_byte).with_remark(validated_early),
    Column::cost("tokens/s", SPEED, |run| sum(run, 0) / sum(run, 1), false, LEVEL_SPEED),
    Column::plain("MFU %", MFU, mfu),
    Column::cost("memory GiB", "most in use at a logged step", memory, true, LEVEL_MEMORY),
    Column::plain("skipped", "steps that the guard left out", |run| run.num_skipped as f64),
];

/// The tokens (`which` 0), seconds (1) or FLOPs (2) up to the last logged step.
fn sum(run: &Run, which: usize) -> f64 {
    run.sums().last().map_or(f64::NAN, |sums| sums[which])
}

/// The unit of a time in seconds: seconds, minutes or hours.
fn duration(seconds: f64) -> (f64, &'static str) {
    match seconds {
        x if x < 120.0 => (1.0, " s"),
        x if x < 7200.0 => (60.0, " min"),
        _ => (3600.0, " h"),
    }
}

pub(crate) fn validation_loss(run: &Run) -> f64 {
    run.validations.last().map_or(f64::NAN, |check| check.loss)
}

pub(crate) fn bits_per_byte(run: &Run) -> f64 {
    run.validations.last().map_or(f64::NAN, |check| check.bits_per_byte)
}

/// The step of the last validation, if it is not the run's last one.
fn validated_early(run: &Run) -> Option<String> {
    let step = run.validations.last()?.step;
    (step != run.num_done()).then(|| format!("of step {step}"))
}

/// Mean MFU over the training time.
fn mfu(run: &Run) -> f64 {
    let (mut weighted, mut all, mut before) = (0.0, 0.0, 0.0);
    for (sums, mfu) in run.sums().iter().zip(run.column("mfu_percent")) {
        let elapsed = sums[1] - before;
        before = sums[1];
        if mfu.is_finite() {
            weighted += mfu * elapsed;
            all += elapsed;
        }
    }
    weighted / all
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

pub(crate) fn late_loss(run: &Run) -> f64 {
    let loss = run.column("loss");
    let late = &loss[loss.len() - loss.len().div_ceil(10)..];
    late.iter().sum::<f64>() / late.len() as f64
}

/// Mean and sample standard deviation, which is `None` for one value.
pub(crate) fn mean_and_spread(values: &[f64]) -> (f64, Option<f64>) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (values.len() > 1).then(|| (squares / (values.len() - 1) as f64).sqrt()))
}

/// How far a value is from the chosen run's: the difference of losses, the share of costs. `None` for columns without a
/// better value, and where the numbers are not finite.
fn difference(column: &Column, value: f64, base: f64) -> Option<String> {
    let better = column.better?;
    let size = if better.is_loss { value - base } else { 100.0 * (value / base - 1.0) };
    let sign = if size < 0.0 { "−" } else { "+" };
    size.is_finite()
        .then(|| if better.is_loss { format!("{sign}{:.3}", size.abs()) } else { format!("{sign}{:.1} %", size.abs()) })
}

/// Mean of the values of a group's runs, with their spread if they differ.
fn value_text(column: &Column, values: &[f64]) -> String {
    let (mean, spread) = mean_and_spread(values);
    let (size, unit) = if mean.is_finite() { (column.unit)(mean) } else { (1.0, "") };
    let digits = if column.is_loss() { score_digits } else { digits };
    match spread {
        Some(spread) if spread > 0.0 => format!("{} ± {}{unit}", digits(mean / size), digits(spread / size)),
        _ => format!("{}{unit}", digits(mean / size)),
    }
}

/// The name of a run or of its group, after a mark in the run's colour.
pub(crate) fn swatch(name: &str, idx: usize) -> String {
    format!("<span class=\"swatch\" data-run=\"{idx}\"></span>{}", escaped(name))
}

/// Marks of a run that diverged, or that did not do all of its steps.
fn marks(run: &Run) -> String {
    let mut html = String::new();
    if run.has_diverged() {
        html += "<span class=\"mark bad\">diverged</span>";
    } else if let Some((step, loss)) = run.worst_spike() {
        let _ = write!(html, "<span class=\"mark bad\">loss {} at step {step}</span>", digits(loss));
    }
    if run.is_short() {
        let _ = write!(html, "<span class=\"mark\">{} of {} steps</span>", run.num_done(), run.num_steps);
    }
    html
}

/// The indices of the runs in each group.
pub(crate) fn members(groups: &[usize]) -> Vec<Vec<usize>> {
    let num = groups.iter().max().map_or(0, |most| most + 1);
    (0..num).map(|group| (0..groups.len()).filter(|&idx| groups[idx] == group).collect()).collect()
}

/// The loss by which runs are sorted: of the last validation, else of training.
fn ranking_loss(run: &Run) -> f64 {
    let loss = validation_loss(run);
    if loss.is_finite() { loss } else { late_loss(run) }
}

/// The groups from the lowest mean loss; those without a loss come last.
pub(crate) fn best_first(runs: &[Run], groups: &[Vec<usize>]) -> Vec<usize> {
    let mean = |group: usize| {
        let losses: Vec<f64> = groups[group].iter().map(|&idx| ranking_loss(&runs[idx])).collect();
        let (mean, _) = mean_and_spread(&losses);
        if mean.is_finite() { mean } else { f64::INFINITY }
    };
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by(|&a, &b| mean(a).total_cmp(&mean(b)));
    order
}

/// The runs sorted by the mean loss of their group, the seeds of one recipe behind each other. Runs whose losses do not
/// compare stay as they are.
pub(crate) fn by_loss(runs: Vec<Run>) -> Vec<Run> {
    if other_text(&runs).is_some() {
        return runs;
    }
    let groups = members(&crate::groups::groups(&runs));
    let order = best_first(&runs, &groups).into_iter().flat_map(|group| groups[group].clone());
    let mut places: Vec<Option<Run>> = runs.into_iter().map(Some).collect();
    order.collect::<Vec<_>>().into_iter().filter_map(|idx| places[idx].take()).collect()
}

/// The group whose mean is the best of a column; `None` if another group is level with it: the means differ by no more
/// than the spread of either group's seeds, or by less than equal runs do. A group with a diverged run is never the
/// best.
fn best(column: &Column, runs: &[Run], groups: &[Vec<usize>], losses_compare: bool) -> Option<usize> {
    let better = column.better.filter(|better| losses_compare || !better.is_loss)?;
    let sound = groups.iter().enumerate().filter(|(_, members)| !members.iter().any(|&idx| runs[idx].has_diverged()));
    let means = sound.map(|(group, members)| (group, mean_and_spread(&values(column, runs, members))));
    let mut means: Vec<_> = means.filter(|(_, (mean, _))| mean.is_finite()).collect();
    means.sort_by(|(_, (a, _)), (_, (b, _))| if better.is_less { a.total_cmp(b) } else { b.total_cmp(a) });
    let (&(group, (mean, spread)), others) = means.split_first()?;
    let is_level = |&(_, (other, other_spread)): &(usize, (f64, Option<f64>))| {
        let spread = spread.unwrap_or(0.0).max(other_spread.unwrap_or(0.0));
        (other - mean).abs() <= spread.max(better.level_within * mean.abs())
    };
    (!others.is_empty() && !others.iter().any(is_level)).then_some(group)
}

/// Why no loss is marked as the best; `None` if losses compare.
fn why_no_best_loss(runs: &[Run], groups: &[Vec<usize>]) -> Option<String> {
    if let Some(reason) = other_text(runs) {
        return Some(format!("No loss is bold: {reason}."));
    }
    let is_one_seed = groups.iter().any(|members| num_seeds(runs, members) == 1);
    (is_one_seed && are_other_models(runs)).then(|| {
        "No loss is bold: losses of other attentions and models differ by their seeds too; train each with several \
         (<code>--sweep training.seed=0,1,2</code>)."
            .to_owned()
    })
}

/// The table of runs: size, progress, loss, speed and memory; columns without a value are left out. A group of several
/// seeds has a further row of means, and only that row can be the best. Behind the numbers stands the difference to the
/// run `against`; behind a mean, the difference to the mean of that run's group. Losses on other texts have none.
pub(crate) fn summary(runs: &[Run], groups: &[usize], against: Option<usize>) -> String {
    let groups = members(groups);
    let why_not = why_no_best_loss(runs, &groups);
    let base = against.map(|run| Base::new(runs, &groups, run));
    let has_value =
        |column: &&Column| runs.iter().any(|run| !(column.of)(run).is_nan()) && column.common(runs).is_none();
    // Each column with its best group.
    let with_best = |column| (column, best(column, runs, &groups, why_not.is_none()));
    let columns: Vec<(&Column, Option<usize>)> = COLUMNS.iter().filter(has_value).map(with_best).collect();

    let mut html = String::from("<div class=\"scroll\"><table class=\"wide\"><thead><tr><th>run</th>");
    for (column, _) in &columns {
        let _ = write!(html, "<th title=\"{}\">{}</th>", escaped(column.about), column.title);
    }
    html.push_str("</tr></thead><tbody>");
    let cells = |members: &[usize], can_be_best: Option<usize>| {
        let cell = |(column, best): &(&Column, Option<usize>)| {
            let is_best = can_be_best.is_some() && *best == can_be_best;
            table_cell(column, runs, members, is_best, base.as_ref())
        };
        columns.iter().map(cell).collect::<String>()
    };
    for (group, members) in groups.iter().enumerate() {
        let has_seeds = members.len() > 1;
        for &idx in members {
            let title = swatch(&runs[idx].name, idx) + &marks(&runs[idx]);
            let _ = write!(html, "<tr><th>{title}</th>{}</tr>", cells(&[idx], (!has_seeds).then_some(group)));
        }
        if has_seeds {
            let of = match num_seeds(runs, members) {
                1 => format!("{} runs of one seed", members.len()),
                count if count == members.len() => format!("{count} seeds"),
                count => format!("{} runs with {count} seeds", members.len()),
            };
            let title = format!("{}, mean of {of}", escaped(&name_of(runs, members)));
            let _ = write!(html, "<tr class=\"mean\"><th>{title}</th>{}</tr>", cells(members, Some(group)));
        }
    }
    html.push_str("</tbody></table></div>");
    html += &in_all(runs);
    html += &hint(against.map(|run| &runs[run]), why_not.filter(|_| groups.len() > 1));
    html + &differences_by_seed(runs, &groups, against)
}

/// The numbers that are the same in all runs.
fn in_all(runs: &[Run]) -> String {
    let common = COLUMNS.iter().filter_map(|column| Some((column.title, column.common(runs)?)));
    let common = common.filter(|&(title, value)| title != "skipped" || value > 0.0);
    let words: Vec<String> = common.map(|(title, value)| format!("{} {title}", digits(value))).collect();
    if words.is_empty() { String::new() } else { format!("<p class=\"hint\">In all runs: {}.</p>", words.join(", ")) }
}

/// What the numbers of a table are compared with.
struct Base {
    /// The chosen run.
    run: usize,
    /// The runs of its group: other seeds of the same recipe.
    group: Vec<usize>,
    /// Whether losses have no difference, because the runs were trained or validated on other texts.
    texts_differ: bool,
}

impl Base {
    fn new(runs: &[Run], groups: &[Vec<usize>], run: usize) -> Self {
        let group = groups.iter().find(|members| members.contains(&run)).expect("every run is in a group");
        Self { run, group: group.clone(), texts_differ: other_text(runs).is_some() }
    }

    /// The runs with which a row of `members` is compared: a run with that of the same seed, else with the chosen one;
    /// a mean with the mean of the chosen run's group.
    fn of(&self, runs: &[Run], members: &[usize]) -> Vec<usize> {
        match members {
            [_] => pairs(runs, members, &self.group).first().map_or(vec![self.run], |&(_, base)| vec![base]),
            _ => self.group.clone(),
        }
    }

    /// How far a row's value is from the base's; `None` for the base itself, and where the two do not compare.
    fn difference(&self, column: &Column, runs: &[Run], members: &[usize]) -> Option<String> {
        let base = self.of(runs, members);
        if members == base || (self.texts_differ && column.is_loss()) {
            return None;
        }
        let mean = |members: &[usize]| mean_and_spread(&values(column, runs, members)).0;
        difference(column, mean(members), mean(&base))
    }
}

/// The values of some runs in a column.
fn values(column: &Column, runs: &[Run], members: &[usize]) -> Vec<f64> {
    members.iter().map(|&idx| (column.of)(&runs[idx])).collect()
}

/// One cell of the table: the value of a run, or the mean of several, the difference to `base`, a run's remark.
fn table_cell(column: &Column, runs: &[Run], members: &[usize], is_best: bool, base: Option<&Base>) -> String {
    let value = value_text(column, &values(column, runs, members));
    let value = if is_best { format!("<b>{value}</b>") } else { value };
    let apart = base.and_then(|base| base.difference(column, runs, members));
    let apart = apart.map_or(String::new(), |words| format!(" <small>{words}</small>"));
    let remark = match members {
        [idx] => (column.remark)(&runs[*idx]),
        _ => None,
    };
    let remark = remark.map_or(String::new(), |words| format!(" <small>{}</small>", escaped(&words)));
    format!("<td>{value}{apart}{remark}</td>")
}

/// The words under the table: what bold means, with which run numbers are compared, why no loss is the best.
fn hint(against: Option<&Run>, why_no_best_loss: Option<String>) -> String {
    let mut html =
        String::from("<p class=\"hint\">Bold is ahead of all others by more than the seeds' spread, and by ");
    let _ = write!(html, "{} % in tokens/s and {} % in memory.", 100.0 * LEVEL_SPEED, 100.0 * LEVEL_MEMORY);
    if let Some(run) = against {
        let _ = write!(html, " Small numbers with a sign are differences to {}", escaped(&run.name));
        html.push_str(", or to its recipe's run of the same seed.");
    }
    if let Some(words) = why_no_best_loss {
        let _ = write!(html, " {words}");
    }
    html + "</p>"
}

/// What each run trained, a line each; of several seeds, the first one's.
pub(crate) fn models(runs: &[Run], groups: &[usize]) -> String {
    let mut html = String::from("<table class=\"wide models\"><tbody>");
    for members in members(groups) {
        let title = swatch(&name_of(runs, &members), members[0]);
        let _ = write!(html, "<tr><th>{title}</th><td>{}</td></tr>", escaped(&runs[members[0]].model));
    }
    html + "</tbody></table>"
}

/// The table of keys in which the recipes differ, with a column for each group of seeds.
pub(crate) fn config(runs: &[Run], groups: &[usize]) -> String {
    let found = differences(runs);
    if found.is_empty() {
        return "<p>All recipes are the same.</p>".to_owned();
    }
    let groups = members(groups);
    let names: Vec<(String, usize)> = groups.iter().map(|members| (name_of(runs, members), members[0])).collect();
    let mut html = head("key", &names);
    for (key, values) in found {
        let _ = write!(html, "<tr><th>{}</th>", escaped(key));
        for members in &groups {
            let mut of_group: Vec<String> = Vec::new();
            for text in members.iter().map(|&idx| values[idx].map_or("–".to_owned(), escaped)) {
                if !of_group.contains(&text) {
                    of_group.push(text);
                }
            }
            let _ = write!(html, "<td>{}</td>", of_group.join(", "));
        }
        html.push_str("</tr>");
    }
    html + "</tbody></table>"
}

/// The beginning of a table with a column for each run or group: its name, and a run in whose colour it stands.
fn head(title: &str, names: &[(String, usize)]) -> String {
    let mut html = format!("<table class=\"wide keys\"><thead><tr><th>{title}</th>");
    for (name, idx) in names {
        let _ = write!(html, "<th>{}</th>", swatch(name, *idx));
    }
    html + "</tr></thead><tbody>"
}

/// A table of scores for each file name in the runs' `eval` folders.
pub(crate) fn scores(runs: &[Run]) -> String {
    let files = runs.iter().flat_map(|run| &run.scores).map(|scores| &*scores.file);
    let mut html = String::new();
    let all: Vec<(String, usize)> = runs.iter().map(|run| run.name.clone()).zip(0..).collect();
    for file in files.collect::<BTreeSet<_>>() {
        let rows_of_runs: Vec<&[(String, f64)]> = runs
            .iter()
            .map(|run| {
                let scores = run.scores.iter().find(|scores| scores.file == file);
                scores.map_or(&[][..], |scores| &scores.rows)
            })
            .collect();
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in rows_of_runs.iter().copied().flatten() {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        let _ = write!(html, "<details open><summary>{}</summary>{}", escaped(file), head("measure", &all));
        for name in names {
            let _ = write!(html, "<tr><th>{}</th>", escaped(name));
            for rows in &rows_of_runs {
                let value = rows.iter().find(|(known, _)| known == name).map_or(f64::NAN, |(_, value)| *value);
                let _ = write!(html, "<td>{}</td>", score_digits(value));
            }
            html.push_str("</tr>");
        }
        html.push_str("</tbody></table></details>");
    }
    html
}

/// Pictures of the runs' `eval` folders; pictures with the same file name are side by side.
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
                    swatch(&run.name, idx)
                );
            }
        }
        html.push_str("</div>");
    }
    html
}

/// The texts that each run's model wrote at its end.
pub(crate) fn samples(runs: &[Run]) -> String {
    let mut html = String::new();
    for (idx, run) in runs.iter().enumerate().filter(|(_, run)| !run.samples.is_empty()) {
        let _ = write!(html, "<h3>{}{}</h3>", swatch(&run.name, idx), marks(run));
        for sample in &run.samples {
            let _ = write!(html, "<pre class=\"sample\">{}</pre>", escaped(sample));
        }
    }
    if html.is_empty() {
        "<p>No run has one: <code>generation.prompts</code> of the recipe asks for them.</p>".to_owned()
    } else {
        html
    }
}

/// The command that trains as `run` did, from its first step.
fn again(run: &Run) -> String {
    let launch = match run.num_processes {
        1 => String::new(),
        count => format!("launch --nproc {count} -- "),
    };
    let flags = [(run.began.fresh_optimizer, " --fresh-optimizer"), (run.began.drops, " --drop")];
    let flags: String = flags.into_iter().filter_map(|(is_set, flag)| is_set.then_some(flag)).collect();
    format!("sieve {launch}train --recipe {} --out NEW_FOLDER{flags}", quoted(&run.folder.join("config.toml")))
}

/// A list of the commands that reproduce each run.
pub(crate) fn commands(runs: &[Run]) -> String {
    let mut html = String::from("<ul class=\"commands\">");
    for (idx, run) in runs.iter().enumerate() {
        let _ = write!(html, "<li>{}<code>{}</code></li>", swatch(&run.name, idx), escaped(&again(run)));
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
            (2.34567, "2.35"),
            (12.0, "12"),
            (1_234_567.0, "1,234,567"),
            (12_345.6, "12,346"),
            (100.0, "100"),
            (234.56, "235"),
            (41.1385, "41.1"),
            (0.25, "0.250"),
            (0.000_123_4, "1.23e-4"),
            (f64::NAN, "–"),
            (-1_234_567.0, "−1,234,567"),
        ];
        for (value, text) in cases {
            assert_eq!(digits(value), text);
        }
    }

    /// A run of this recipe whose last validation, at its last logged step, has this loss.
    fn run_of(recipe: &str, loss: &str, name: &str) -> Run {
        let check = format!("{{\"kind\":\"validation\",\"step\":10,\"loss\":{loss}}}");
        Run::open(folder(recipe, &format!("{STEP}\n{check}\n")).path(), Some(name)).unwrap()
    }

    #[test]
    fn seeds_get_a_row_of_means_and_names_are_escaped() {
        let run = |seed: u32, loss: &str, name: &str| run_of(&format!("[training]\nseed = {seed}\n"), loss, name);
        let runs = [run(0, "2.0", "a<b"), run(1, "3.0", "c")];
        let html = summary(&runs, &[0, 0], None);
        assert!(html.contains("a&lt;b") && html.contains(", mean of 2 seeds"), "{html}");
        assert!(html.contains("<td>2.500 ± 0.707</td>"), "{html}");
        assert!(!html.contains("<b>"), "no seed is best: {html}");
        let apart = summary(&runs, &[0, 1], None);
        assert!(!apart.contains("mean of 2") && apart.contains("<td><b>2</b></td>"), "{apart}");
        // A recipe is best by the mean of its seeds, though another has the lowest of all losses.
        let runs = [run(0, "1.0", "a"), run(1, "6.0", "b"), run(0, "2.0", "c"), run(1, "2.1", "d")];
        let html = summary(&runs, &[0, 0, 1, 1], None);
        assert!(!html.contains("<b>"), "the means are nearer than a group's seeds: {html}");
        let runs = [run(0, "5.9", "a"), run(1, "6.0", "b"), run(0, "2.0", "c"), run(1, "2.5", "d")];
        let html = summary(&runs, &[0, 0, 1, 1], None);
        assert!(html.contains("<td><b>2.250 ± 0.354</b></td>"), "{html}");
        assert_eq!(html.matches("<b>").count(), 1, "{html}");
        assert!(config(&runs[..2], &[0, 1]).contains("<th>training.seed</th><td>0</td><td>1</td>"));
    }

    #[test]
    fn numbers_have_their_difference_to_the_chosen_run() {
        let run = |lr: &str, seed: u32, loss: &str, name: &str| {
            run_of(&format!("[optimizer]\nlr = {lr}\n[training]\nseed = {seed}\n"), loss, name)
        };
        let runs = [run("1.0", 0, "2.5", "a"), run("2.0", 0, "2.25", "b<"), run("2.0", 1, "2.75", "c")];
        let html = summary(&runs, &[0, 1, 1], Some(0));
        assert!(html.contains("<td>2.250 <small>−0.250</small></td>"), "{html}");
        assert!(html.contains("<td>2.750 <small>+0.250</small></td>"), "{html}");
        assert!(html.contains("2.500 ± 0.354 <small>+0.000</small>") && html.contains("differences to a,"), "{html}");
        // The mean of the chosen run's own group has no difference.
        let html = summary(&runs, &[0, 1, 1], Some(1));
        assert!(html.contains("<td>2.500 <small>+0.250</small></td>") && html.contains("to b&lt;,"), "{html}");
        assert!(html.contains("2.500 ± 0.354</td>"), "{html}");
        let other = run_of("[data]\npaths = [\"z\"]", "3.0", "d");
        let html = summary(&[run("1.0", 0, "2.5", "a"), other], &[0, 1], Some(0));
        assert!(!html.contains("+0.5"), "losses on other texts: {html}");
    }

    #[test]
    fn samples_are_those_at_the_end_of_the_log() {
        let folder = folder("", STEP);
        let log = "sample:\n  old\nstep 2\nsample:\n  <b>one\n  two\nsample:\n  \n  three\nnext: sieve\n  generate\n";
        std::fs::write(folder.path().join("log"), log).unwrap();
        let run = Run::open(folder.path(), Some("a")).unwrap();
        assert_eq!(run.samples, ["<b>one\ntwo", "three"]);
        assert!(samples(&[run]).contains("<pre class=\"sample\">&lt;b&gt;one\ntwo</pre>"));
    }

    #[test]
    fn losses_that_do_not_compare_have_no_best() {
        let pair = |of: [&str; 2]| {
            let runs = [run_of(of[0], "2.0", "a"), run_of(of[1], "3.0", "b")];
            summary(&runs, &[0, 1], None)
        };
        assert!(pair(["[optimizer]\nlr = 1.0", "[optimizer]\nlr = 2.0"]).contains("<td><b>2</b></td>"));
        for (key, other, words) in [
            ("[data]\npaths = [\"a\"]", "[data]\npaths = [\"b\"]", "their texts differ"),
            ("[validation]\npaths = [\"a\"]", "[validation]\ntokens = 3", "their texts differ"),
            ("[tokenizer]\npath = \"a\"", "[tokenizer]\nnumbers = 7", "their tokenizers differ"),
            ("[attention]\nkind = \"mha\"", "[attention]\nkind = \"dma\"", "differ by their seeds too"),
            ("[model]\nhidden_size = 4", "[model]\nhidden_size = 8", "differ by their seeds too"),
        ] {
            let html = pair([key, other]);
            assert!(!html.contains("<b>") && html.contains(words), "{key}: {html}");
        }
    }

    /// A run with a logged step for each (step, tokens seen, tokens a second since the last one), of 40 planned.
    fn run_logged(lines: &[(u64, u64, f64)], name: &str) -> Run {
        let lines = lines.iter().map(|(step, tokens, speed)| {
            format!(
                "{{\"kind\":\"step\",\"step\":{step},\"num_steps\":40,\"loss\":2.0,\"tokens_seen\":{tokens},\
                 \"tokens_per_second\":{speed},\"memory_bytes\":{}}}",
                (1 << 30) + step * 100_000
            )
        });
        Run::open(folder("", &lines.collect::<Vec<_>>().join("\n")).path(), Some(name)).unwrap()
    }

    #[test]
    fn speed_is_tokens_divided_by_time() {
        // The intervals of `slow` have the higher median: its two fast ones are the shorter time.
        let slow = run_logged(&[(10, 1000, 100.0), (20, 2000, 100.0), (30, 3000, 5000.0), (40, 4000, 5000.0)], "slow");
        let fast = run_logged(&[(10, 1000, 400.0), (20, 2000, 400.0), (30, 3000, 400.0), (40, 4000, 400.0)], "fast");
        let html = summary(&[slow, fast], &[0, 1], None);
        // 20.4 and 10 seconds for 4000 tokens.
        assert!(html.contains("<td>196</td>") && html.contains("<td><b>400</b></td>"), "{html}");
        assert!(html.contains("<td>20.4 s</td>") && html.contains("<td>10 s</td>"), "{html}");
        // Memory of 1 GiB is level within 1 %, speed within 5 %.
        assert_eq!(html.matches("<b>").count(), 1, "{html}");
        let near = [run_logged(&[(40, 4000, 400.0)], "a"), run_logged(&[(40, 4000, 410.0)], "b")];
        assert!(!summary(&near, &[0, 1], None).contains("<b>"));
        for (seconds, text) in [(90.0, "90 s"), (150.0, "2.50 min"), (9000.0, "2.50 h")] {
            let run = run_logged(&[(40, 9000, 9000.0 / seconds)], "a");
            assert!(summary(&[run], &[0], None).contains(&format!("<td>{text}</td>")), "{text}");
        }
    }

    #[test]
    fn a_run_that_diverged_or_stopped_is_marked() {
        let check = |step: u32, loss: f64, bits: f64| {
            format!(
                "{{\"kind\":\"validation\",\"step\":{step},\"loss\":{loss},\"bits_per_byte\":{bits},\
                 \"unigram_bits_per_byte\":2.0}}"
            )
        };
        let step = |step: u32, loss: &str| {
            format!("{{\"kind\":\"step\",\"step\":{step},\"num_steps\":40,\"loss\":{loss},\"tokens_seen\":{step}}}")
        };
        let marks_of = |lines: &[String], log: &str| {
            let folder = folder("", &lines.join("\n"));
            std::fs::write(folder.path().join("log"), log).unwrap();
            marks(&Run::open(folder.path(), None).unwrap())
        };
        // The unigram loss is 6 nats.
        let begun = [check(0, 9.0, 3.0), step(20, "8.0")];
        for (last, log, is_so) in [
            (step(40, "5.0"), "", false),
            (step(40, "11.0"), "", false),
            (step(40, "34.0"), "", true),
            (step(40, "null"), "", true),
            (step(40, "5.0"), "step 40\nerror: step 40: the loss is inf: training diverged\n  hint: start\n", true),
            (step(40, "5.0"), "error: training diverged\n  hint: start\nstep 1\nstep 2\nstep 3\n", false),
        ] {
            let lines = [&begun[..], std::slice::from_ref(&last)].concat();
            assert_eq!(marks_of(&lines, log).contains("diverged"), is_so, "{last} {log}");
        }
        let spike = [&begun[..], &[step(30, "4e6"), step(40, "5.0")]].concat();
        assert_eq!(marks_of(&spike, ""), "<span class=\"mark bad\">loss 4,000,000 at step 30</span>");
        // A run that was stopped at step 37, where it wrote a checkpoint; the last step that it logged is 20.
        let stopped = folder("", &begun.join("\n"));
        for number in [30, 37] {
            let checkpoint = stopped.path().join(format!("checkpoint/step-{number}"));
            std::fs::create_dir_all(&checkpoint).unwrap();
            let state = format!("{{\"step\":{number},\"tokens_seen\":{}}}", 10 * number);
            std::fs::write(checkpoint.join("state.json"), state).unwrap();
        }
        let html = summary(&[Run::open(stopped.path(), None).unwrap()], &[0], None);
        for part in ["37 of 40 steps", "<td>37</td><td>370</td>", "<td>9 <small>of step 0</small></td>"] {
            assert!(html.contains(part), "{part}: {html}");
        }
    }

    #[test]
    fn the_trained_model_is_described_also_for_older_runs() {
        let said = Run::open(folder("# model: 7 parameters, attention <dma>\n[a]\n", STEP).path(), Some("a")).unwrap();
        assert!(models(&[said], &[0]).contains("<td>7 parameters, attention &lt;dma&gt;</td>"));
        // The config.toml of an older run lacks this comment; then the recipe alone says what it trained.
        let recipe = include_str!("../../../../recipes/quickstart.toml");
        let before = Run::open(folder(recipe, STEP).path(), Some("a")).unwrap();
        let html = models(&[before], &[0]);
        assert!(html.contains("attention dma, keeps 64") && html.contains("weights not recorded"), "{html}");
    }

    #[test]
    fn one_value_has_no_spread() {
        assert_eq!(mean_and_spread(&[2.0]), (2.0, None));
        let (mean, spread) = mean_and_spread(&[1.0, 2.0, 3.0]);
        assert_eq!((mean, spread), (2.0, Some(1.0)));
    }
}
