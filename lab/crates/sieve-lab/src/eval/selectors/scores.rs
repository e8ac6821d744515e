//! `--scores`: an SVG of the loss that each selector adds to the dense model's, over its density and over its time.
use super::compare::Trained;
use super::run::Run;
use super::table::Row;
use crate::draw::panels::{self, Panel, Section};
use sieve_host::evaluation::output;
use sieve_host::line_chart::Axis;
use sieve_ops::DeviceBackend;
use sieve_select::LayerSelectors;

/// The measures of one selector on a curve.
#[derive(Clone, Debug, PartialEq)]
struct Point {
    /// The varied key's value.
    value: String,
    density: f64,
    prefill_ms: f64,
    /// Loss minus the dense model's loss, in nats per token.
    added: f64,
}

/// Selectors that differ in the value of one key.
struct Curve {
    name: String,
    /// The setting in which the points differ.
    key: String,
    points: Vec<Point>,
}

/// The SVG of the rows of the longest length. Selectors that differ only in their knob, the key that trades density for
/// recall, form one curve.
pub(super) fn svg<B: DeviceBackend>(run: &Run<'_, B>, rows: &[Row], trained: &[Trained]) -> String {
    let longest = run.tokens.len() - 1;
    let mut curves: Vec<Curve> = Vec::new();
    let (mut dense_ms, mut dense_loss) = (0.0, None);
    for Row { label, measure } in rows.iter().filter(|row| row.measure.num_tokens == longest) {
        (dense_ms, dense_loss) = (measure.dense_prefill_ms, Some(measure.dense_loss));
        let [name, key, value] = place_of(label);
        let point = Point {
            value,
            density: measure.density,
            prefill_ms: measure.prefill_ms,
            added: measure.loss - measure.dense_loss,
        };
        match curves.iter_mut().find(|curve| curve.name == name) {
            Some(curve) => curve.points.push(point),
            None => curves.push(Curve { name, key, points: vec![point] }),
        }
    }
    for Trained { measure, .. } in trained.iter().filter(|row| row.measure.num_tokens == longest) {
        let point = Point {
            value: String::new(),
            density: measure.density,
            prefill_ms: measure.prefill_ms,
            added: measure.loss - dense_loss.unwrap_or(measure.loss),
        };
        let (name, key) = measure.attention.split_once(", ").unwrap_or((&measure.attention, ""));
        curves.push(Curve { name: format!("trained: {name}"), key: key.to_owned(), points: vec![point] });
    }
    let model = output::model_name(run.loaded);
    drawn(&format!("Nats per token more than dense at {longest} tokens: {model}"), dense_ms, curves)
}

/// `[curve, key, value]` of a selector's label: the label without its knob, the knob, and the knob's value. A selector
/// without a knob has a curve of its own.
fn place_of(label: &str) -> [String; 3] {
    let selectors = LayerSelectors::parse(label).ok();
    let selector = selectors.as_ref().and_then(LayerSelectors::only);
    let Some((selector, key)) = selector.and_then(|one| Some((one, one.knob()?))) else {
        return [label.to_owned(), String::new(), String::new()];
    };
    let settings = label.split_once(':').map_or("", |(_, settings)| settings);
    let values = settings.split(',').filter_map(|one| one.split_once('='));
    let value = values.filter(|(name, _)| *name == key).map(|(_, value)| value).next();
    [selector.label_without(key), key.to_owned(), value.unwrap_or("default").to_owned()]
}

/// Draws two sections with a panel for each curve: the added loss over density, and over the prompt's time.
fn drawn(title: &str, dense_ms: f64, curves: Vec<Curve>) -> String {
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let densest = all().map(|point| point.density).fold(1.0, f64::max);
    // Points slower than three times dense attention are drawn at the edge.
    let slowest = all().map(|point| point.prefill_ms).fold(dense_ms, f64::max).min(3.0 * dense_ms);
    let added = added_range(all().map(|point| point.added).collect());
    let section = |heading, end: f64, text, dense: f64, of: fn(&Point) -> f64| Section {
        heading,
        x: Axis { label: "", range: 0.0..end.max(1e-9), most_numbers: 6, text },
        y: Axis { label: "", range: added.clone(), most_numbers: 5, text: &|value| format!("{value:.3}") },
        dense: (dense, 0.0),
        panels: curves.iter().map(|curve| panel(curve, of)).collect(),
    };
    let sections = [
        section(
            "Against density: computed pairs over causal pairs. Cross: dense attention; grey: all other settings; at \
             the edge: outliers",
            densest,
            &|value| format!("{value:.1}"),
            1.0,
            |point| point.density,
        ),
        section(
            "Against milliseconds of the prompt, selection included",
            1.05 * slowest,
            &|value| format!("{value:.0}"),
            dense_ms,
            |point| point.prefill_ms,
        ),
    ];
    panels::svg(title, &sections)
}

/// The panel of a curve; `of` gives a point's x value.
fn panel(curve: &Curve, of: fn(&Point) -> f64) -> Panel {
    let mut points: Vec<&Point> = curve.points.iter().collect();
    points.sort_by(|a, b| of(a).total_cmp(&of(b)));
    let values: Vec<&str> = points.iter().map(|point| &point.value[..]).collect();
    Panel {
        name: curve.name.clone(),
        says: format!("{} {}", curve.key, values.join(", ")),
        points: points.iter().map(|point| (of(point), point.added)).collect(),
    }
}

/// Range of the loss axis. Losses above four times the median of the positive ones do not widen it.
fn added_range(mut added: Vec<f64>) -> std::ops::Range<f64> {
    added.sort_by(f64::total_cmp);
    let low = added.first().copied().unwrap_or(0.0).min(0.0);
    let positive: Vec<f64> = added.iter().copied().filter(|x| *x > 0.0).collect();
    let middle = positive.get(positive.len() / 2).copied().unwrap_or(1e-3);
    let high = added.last().copied().unwrap_or(0.0).min(4.0 * middle);
    let margin = 0.05 * (high - low).max(1e-3);
    low - margin..high + margin
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_one_key_are_one_curve() {
        let of = |label| place_of(label);
        assert_eq!(of("xattention:tau=0.5"), ["xattention", "tau", "0.5"]);
        assert_eq!(of("xattention"), ["xattention", "tau", "default"]);
        assert_eq!(of("momo:k=16,k_exact=4"), ["momo:k_exact=4", "k", "16"]);
        let layers = "0-1=dense/2-=xattention";
        assert_eq!(of("quest"), ["quest", "", ""]);
        assert_eq!(of(layers), [layers, "", ""]);
    }

    #[test]
    fn both_sections_hold_every_point_and_outliers_do_not_flatten_the_rest() {
        let point = |value: &str, density: f64, added: f64| Point {
            value: value.to_owned(),
            density,
            prefill_ms: 100.0 * density,
            added,
        };
        let curve = |name: &str, points| Curve { name: name.to_owned(), key: "k".to_owned(), points };
        let curves = vec![
            curve("a", vec![point("8", 0.5, 0.01), point("4", 0.2, 0.02)]),
            curve("b", vec![point("2", 0.1, 5.0)]),
        ];
        let svg = drawn("t", 100.0, curves);
        // Each section has a panel a curve, with the three points of all behind its own.
        let circles = |radius: u32| svg.matches(&format!("r=\"{radius}\"")).count();
        assert_eq!((circles(2), circles(4)), (2 * 2 * 3, 2 * 3), "{svg}");
        assert!(svg.contains("k 4, 8") && svg.contains("\n0.02"), "{svg}");
        let range = added_range(vec![0.01, 5.0, 0.02, -0.01]);
        assert!(range.start < -0.01 && range.end > 0.02 && range.end < 0.1, "{range:?}");
    }
}
