//! `--plot`: an SVG of recall over density.
use sieve_host::line_chart::{self, Axis, Curve, Plot};

/// The SVG's text. The curves' points are (density, recall), both in [0, 1]. The axis of recall begins at the lowest
/// value, rounded down to a tenth.
pub(super) fn svg(title: &str, curves: Vec<Curve>) -> String {
    let sorted = |mut curve: Curve| {
        curve.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        curve
    };
    let curves: Vec<Curve> = curves.into_iter().map(sorted).collect();
    let points = curves.iter().flat_map(|curve| &curve.points);
    let low = points.fold(1.0_f64, |low, point| low.min(point.1));
    let density = Axis {
        label: "density (computed pairs over causal pairs)",
        range: 0.0..1.0,
        most_numbers: 6,
        text: &|value| format!("{value:.1}"),
    };
    let recall = Axis {
        label: "recall of the dense mass",
        range: ((low * 10.0).floor() / 10.0).clamp(0.0, 0.9)..1.0,
        most_numbers: 6,
        text: &|value| format!("{value:.2}"),
    };
    line_chart::svg(&Plot { title, x: density, y: recall, curves })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recall_begins_at_the_tenth_below_the_lowest() {
        let curve = |points| Curve { name: "a".to_owned(), points, errors: Vec::new() };
        let svg = svg("t", vec![curve(vec![(1.0, 1.0), (0.1, 0.75)])]);
        assert!(svg.contains("\n0.70\n") && svg.contains("\n1.00\n"), "{svg}");
        assert!(!svg.contains("\n0.60\n"), "{svg}");
    }
}
