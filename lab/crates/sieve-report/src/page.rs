//! Builds the HTML page. Tables are HTML; charts are drawn in the browser by uPlot.
use crate::evaluations::Scores;
use crate::groups::{Look, groups, looks, name_of};
use crate::series::{Knots, Series};
use crate::tables::{by_loss, commands, config, escaped, members, models, pictures, samples, scores, summary};
use crate::{ReportError, Run};
use serde::Serialize;
use std::collections::BTreeMap;

const TEMPLATE: &str = include_str!("../assets/compare.html");
const STYLE: &str = include_str!("../assets/compare.css");
const SCRIPT: &str = include_str!("../assets/compare.js");
const UPLOT: &str = include_str!("../assets/uPlot.iife.min.js");
const UPLOT_STYLE: &str = include_str!("../assets/uPlot.min.css");
const UPLOT_LICENSE: &str = include_str!("../assets/uPlot-LICENSE");

/// A run's data for the charts, embedded in the page as JSON.
#[derive(Serialize)]
struct Charted<'a> {
    name: &'a str,
    /// Whether the run diverged; its name on the page says so.
    diverged: bool,
    group: usize,
    /// The name of the run's group.
    family: String,
    #[serde(flatten)]
    look: Look,
    knots: Knots,
    series: BTreeMap<&'a str, Series>,
    /// `FILE: path` of an array of bins in `eval/FILE.json` to (first token, value) of each bin.
    curves: BTreeMap<String, &'a [(f64, f64)]>,
}

/// A page that compares `runs`: recipes' differences, curves, speed, memory, evaluations, samples. Runs are sorted by
/// their loss, seeds of one recipe together. Behind the numbers of the other runs stands their difference to the run
/// called `against`, or to the run of the same seed, where `against` names several seeds of one recipe.
///
/// # Errors
/// No run; two runs with the same name; no run called `against`.
pub fn page(runs: Vec<Run>, against: Option<&str>) -> Result<String, ReportError> {
    if runs.is_empty() {
        return Err(ReportError::Nothing);
    }
    let runs = by_loss(runs);
    for (idx, run) in runs.iter().enumerate() {
        if runs[..idx].iter().any(|other| other.name == run.name) {
            return Err(ReportError::SameName { name: run.name.clone() });
        }
    }
    let groups = groups(&runs);
    let families: Vec<String> = members(&groups).iter().map(|members| name_of(&runs, members)).collect();
    let against = against.map(|name| {
        let run = runs.iter().position(|run| run.name == name);
        let found = run.or_else(|| groups.iter().position(|&group| families[group] == name));
        found.ok_or_else(|| ReportError::NoSuchRun {
            name: name.to_owned(),
            names: runs.iter().map(|run| run.name.clone()).collect(),
        })
    });
    let against = against.transpose()?;
    let looks = looks(&runs, &groups);
    let charted: Vec<Charted<'_>> = (runs.iter().enumerate())
        .map(|(idx, run)| charted(run, groups[idx], families[groups[idx]].clone(), looks[idx]))
        .collect();
    // The data is inside a <script> element, where a name with "</script" or "<!--" would move its end.
    let data = serde_json::to_string(&charted)
        .map_err(|error| ReportError::content("the page".as_ref(), error.to_string()))?
        .replace('<', "\\u003c");
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let parts = [
        ("TITLE", escaped(&names.join(", "))),
        ("UPLOT_LICENSE", UPLOT_LICENSE.to_owned()),
        ("UPLOT_STYLE", UPLOT_STYLE.to_owned()),
        ("STYLE", STYLE.to_owned()),
        ("SUMMARY", summary(&runs, &groups, against)),
        ("MODELS", models(&runs, &groups)),
        ("CONFIG", config(&runs, &groups)),
        ("SCORES", scores(&runs)),
        ("PICTURES", pictures(&runs)),
        ("SAMPLES", samples(&runs)),
        ("COMMANDS", commands(&runs)),
        ("UPLOT", UPLOT.to_owned()),
        ("SCRIPT", SCRIPT.to_owned()),
        ("DATA", data),
    ];
    Ok(filled(TEMPLATE, &parts))
}

/// The template with each `{{NAME}}` replaced. Replacements are not searched for further names.
fn filled(template: &str, parts: &[(&str, String)]) -> String {
    let mut html = String::with_capacity(parts.iter().map(|(_, text)| text.len()).sum::<usize>() + template.len());
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        html.push_str(before);
        let (name, after) = after.split_once("}}").unwrap_or((after, ""));
        html.push_str(parts.iter().find(|(known, _)| *known == name).map_or("", |(_, text)| text));
        rest = after;
    }
    html + rest
}

/// The series of a run for the page's charts: logged steps, validations and evaluations.
fn charted(run: &Run, group: usize, family: String, look: Look) -> Charted<'_> {
    let narrow = |values: &[f64]| -> Vec<f32> { values.iter().map(|&value| value as f32).collect() };
    let mut series: BTreeMap<&str, Series> = BTreeMap::new();
    for (name, values) in &run.numbers {
        let values = narrow(values);
        let of_name = match name.as_str() {
            // The tokens of each step are in `knots`.
            "tokens_seen" => continue,
            "loss" => Series::whole(&run.steps, &values),
            _ => Series::binned(&run.steps, &values),
        };
        series.insert(name, of_name);
    }
    let steps: Vec<f32> = run.validations.iter().map(|check| check.step as f32).collect();
    let mut add = |name: &'static str, values: Vec<f64>| {
        if values.iter().any(|value| value.is_finite()) {
            series.insert(name, Series::whole(&steps, &narrow(&values)));
        }
    };
    add("validation loss", run.validations.iter().map(|check| check.loss).collect());
    add("validation bits per byte", run.validations.iter().map(|check| check.bits_per_byte).collect());
    let of_file = |scores: &'_ Scores, name: &str| format!("{}: {}", scores.file, name.replace('_', " "));
    let curves = run.scores.iter().flat_map(|scores| {
        let of = scores.curves.iter();
        of.map(move |(name, points)| (of_file(scores, name), points.as_slice()))
    });
    Charted {
        name: &run.name,
        diverged: run.has_diverged(),
        group,
        family,
        look,
        knots: Knots::new(&run.steps, &run.sums()),
        series,
        curves: curves.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::tests::{STEP, folder};

    #[test]
    fn the_page_holds_everything_and_asks_no_network() {
        let recipe = folder("[attention]\nkind = \"dma\"\n", STEP);
        let runs = vec![Run::open(recipe.path(), Some("</script>one")).unwrap()];
        let html = page(runs, None).unwrap();
        assert!(!html.contains("{{"), "a part is missing");
        assert!(html.contains("&lt;/script&gt;one") && !html.contains("</script>one"));
        let outside = ["src=\"http", "href=\"http", "@import", "url(http"];
        for pattern in outside {
            assert!(!html.contains(pattern), "{pattern}");
        }
        assert!(html.contains("Leon Sorokin"), "uPlot's licence goes with it");
    }

    /// In a `<script>` element, `<!--` and `<script` make the browser look for a second end of the element.
    #[test]
    fn no_text_of_a_run_begins_an_element_in_the_data() {
        let runs = vec![Run::open(folder("", STEP).path(), Some("<!--<script><svg></SCRIPT >")).unwrap()];
        let html = page(runs, None).unwrap();
        let (_, data) = html.split_once(r#"<script type="application/json" id="data">"#).unwrap();
        let (data, _) = data.split_once("</script>").unwrap();
        assert!(!data.contains('<'), "{data}");
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(data[0]["name"], "<!--<script><svg></SCRIPT >");
    }

    #[test]
    fn no_run_and_two_of_one_name_are_refused() {
        assert!(matches!(page(Vec::new(), None), Err(ReportError::Nothing)));
        let open = || Run::open(folder("", STEP).path(), Some("a")).unwrap();
        let error = page(vec![open(), open()], None).unwrap_err().to_string();
        assert!(error.contains("two runs are called a") && error.contains("NAME=FOLDER"), "{error}");
        let error = page(vec![open()], Some("b")).unwrap_err().to_string();
        assert!(error.contains("no run is called b") && error.contains("one of a"), "{error}");
    }

    #[test]
    fn text_that_is_filled_in_is_not_searched_for_placeholders() {
        let parts = [("A", "{{B}}".to_owned()), ("B", "b".to_owned())];
        assert_eq!(filled("x{{A}}y{{B}}z", &parts), "x{{B}}ybz");
    }
}
