//! The loss that each measured setting adds, against its density and against its time, as an SVG.
use super::Run;
use super::compare::Trained;
use super::table::Row;
use crate::eval::line_chart::{self, Axis, Curve, Plot};
use crate::eval::output;
use sieve_ops::SieveBackend;
use sieve_select::LayerSelectors;

/// One measured setting.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Point {
    density: f64,
    prefill_ms: f64,
    /// Nats per token beside the dense model's.
    added: f64,
}

/// The rows of the longest length; those that differ in the one key that trades density for recall are one curve.
pub(super) fn svg<B: SieveBackend>(run: &Run<'_, B>, rows: &[Row], trained: &[Trained]) -> String {
    let longest = run.tokens.len() - 1;
    let rows = || rows.iter().filter(|row| row.measure.num_tokens == longest);
    let mut curves: Vec<(String, Vec<Point>)> = Vec::new();
    let dense_loss = rows().next().map(|row| row.measure.dense_loss);
    if let Some(first) = rows().next() {
        let dense = Point {
            density: 1.0,
            prefill_ms: first.measure.dense_prefill_ms,
            added: 0.0,
        };
        curves.push(("dense".to_owned(), vec![dense]));
    }
    for Row { label, measure } in rows() {
        let name = curve_of(label).unwrap_or_else(|| label.clone());
        let point = Point {
            density: measure.density,
            prefill_ms: measure.prefill_ms,
            added: measure.loss - measure.dense_loss,
        };
        match curves.iter_mut().find(|curve| curve.0 == name) {
            Some(curve) => curve.1.push(point),
            None => curves.push((name, vec![point])),
        }
    }
    for row in trained.iter().filter(|row| row.measure.num_tokens == longest) {
        let point = Point {
            density: row.measure.density,
            prefill_ms: row.measure.prefill_ms,
            added: row.measure.loss - dense_loss.unwrap_or(row.measure.loss),
        };
        curves.push((format!("trained: {}", row.measure.attention), vec![point]));
    }
    let model = output::model_name(run.loaded);
    drawn(&format!("Loss added at {longest} tokens: {model}"), &curves)
}

/// A label without the key that its curve moves along.
fn curve_of(label: &str) -> Option<String> {
    let selectors = LayerSelectors::parse(label).ok()?;
    let selector = selectors.only()?;
    let key = selector.knob()?;
    Some(format!("{} ({key})", selector.label_without(key)))
}

fn drawn(title: &str, curves: &[(String, Vec<Point>)]) -> String {
    let all: Vec<Point> = curves.iter().flat_map(|curve| curve.1.clone()).collect();
    let most = |of: fn(&Point) -> f64| all.iter().map(of).fold(0.0, f64::max).max(1e-9);
    let densest = most(|point| point.density);
    // Dense is the first; what is much slower says no more than that.
    let dense_ms = all.first().map_or(1.0, |dense| dense.prefill_ms);
    let slowest = most(|point| point.prefill_ms).min(3.0 * dense_ms);
    let added = added_range(all.iter().map(|point| point.added).collect());
    let plot = |title, label, end: f64, text, of: fn(&Point) -> f64| Plot {
        title,
        x: Axis {
            label,
            range: 0.0..end,
            most_numbers: 6,
            text,
        },
        y: Axis {
            label: "nats per token more than dense; outliers at the edge",
            range: added.clone(),
            most_numbers: 8,
            text: &|value| format!("{value:.3}"),
        },
        curves: curves
            .iter()
            .map(|(name, points)| {
                let mut points: Vec<_> = points.iter().map(|one| (of(one), one.added)).collect();
                points.sort_by(|a, b| a.0.total_cmp(&b.0));
                Curve {
                    name: name.clone(),
                    points,
                }
            })
            .collect(),
    };
    line_chart::svg(&[
        plot(
            title,
            "density (computed pairs over causal pairs)",
            densest,
            &|value| format!("{value:.1}"),
            |point| point.density,
        ),
        plot(
            "the same against time",
            "milliseconds of the prompt, selection included; outliers at the edge",
            1.05 * slowest,
            &|value| format!("{value:.0}"),
            |point| point.prefill_ms,
        ),
    ])
}

/// Ends of the axis: all losses, but for those above four times the middle one of the positive ones.
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
        let of = curve_of;
        assert_eq!(of("xattention:tau=0.5"), of("xattention:tau=0.7"));
        let named = of("momo:k=16,k_exact=4");
        assert_eq!(named.as_deref(), Some("momo:k_exact=4 (k)"));
        assert_eq!(of("quest"), None);
        assert_eq!(of("0-1=dense/2-=xattention"), None);
    }

    #[test]
    fn both_plots_hold_every_point_and_outliers_do_not_flatten_the_rest() {
        let point = |density: f64, added: f64| Point {
            density,
            prefill_ms: 100.0 * density,
            added,
        };
        let curves = [
            ("dense".to_owned(), vec![point(1.0, 0.0)]),
            ("a".to_owned(), vec![point(0.5, 0.01), point(0.2, 0.02)]),
            ("b".to_owned(), vec![point(0.1, 5.0)]),
        ];
        let svg = drawn("t", &curves);
        // Four points in each plot, and a mark for each curve in the legend.
        assert_eq!(svg.matches("<polygon").count(), 2 * 4 + 3, "{svg}");
        assert!(svg.contains("the same against time") && svg.contains("\n0.02"));
        let range = added_range(vec![0.01, 5.0, 0.02, -0.01]);
        assert!(range.start < -0.01 && range.end > 0.02 && range.end < 0.1, "{range:?}");
    }
}
