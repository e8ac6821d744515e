//! Density against recall as an SVG.
use crate::eval::output::escape;

/// One method over its setting.
pub(super) struct Curve {
    /// For the legend.
    pub(super) name: String,
    /// (density, recall), both in [0, 1].
    pub(super) points: Vec<(f64, f64)>,
}

const HEIGHT: f64 = 520.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 40.0;
const PLOT_WIDTH: f64 = 560.0;
const PLOT_HEIGHT: f64 = 420.0;

/// Colours that stay apart for most eyes, and dashes once they run out.
const COLOURS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31",
];

/// The picture. Recall begins at the lowest value that occurs, rounded down to a tenth.
pub(super) fn svg(title: &str, curves: &[Curve]) -> String {
    let points = curves.iter().flat_map(|curve| &curve.points);
    let low = points.fold(1.0_f64, |low, point| low.min(point.1));
    let low = ((low * 10.0).floor() / 10.0).clamp(0.0, 0.9);
    let x = |density: f64| LEFT + density.clamp(0.0, 1.0) * PLOT_WIDTH;
    let y = |recall: f64| TOP + (1.0 - recall.clamp(low, 1.0)) / (1.0 - low) * PLOT_HEIGHT;
    // Room for the longest name, at 7 pixels a letter.
    let longest = curves.iter().map(|curve| curve.name.len()).max();
    let width = LEFT + PLOT_WIDTH + (60.0 + 7.0 * longest.unwrap_or(0) as f64).max(240.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{}</text>\n",
        escape(title)
    );
    for step in 0..=5 {
        let share = f64::from(step) / 5.0;
        let recall = low + share * (1.0 - low);
        svg += &format!(
            "<line x1=\"{0:.1}\" y1=\"{TOP}\" x2=\"{0:.1}\" y2=\"{1:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{0:.1}\" y=\"{2:.1}\" text-anchor=\"middle\">{share:.1}</text>\
             <line x1=\"{LEFT}\" y1=\"{3:.1}\" x2=\"{4:.1}\" y2=\"{3:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{5:.1}\" y=\"{6:.1}\" text-anchor=\"end\">{recall:.2}</text>\n",
            x(share),
            TOP + PLOT_HEIGHT,
            TOP + PLOT_HEIGHT + 16.0,
            y(recall),
            LEFT + PLOT_WIDTH,
            LEFT - 6.0,
            y(recall) + 4.0,
        );
    }
    svg += &format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">density (computed pairs over causal pairs)</text>\n\
         <text x=\"14\" y=\"{:.1}\" transform=\"rotate(-90 14 {:.1})\" text-anchor=\"middle\">recall of the dense mass</text>\n",
        LEFT + PLOT_WIDTH / 2.0,
        TOP + PLOT_HEIGHT + 36.0,
        TOP + PLOT_HEIGHT / 2.0,
        TOP + PLOT_HEIGHT / 2.0,
    );
    for (index, curve) in curves.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let dash = if index < COLOURS.len() {
            ""
        } else {
            " stroke-dasharray=\"5 3\""
        };
        let mut points = curve.points.clone();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let path: Vec<String> = points
            .iter()
            .map(|p| format!("{:.1},{:.1}", x(p.0), y(p.1)))
            .collect();
        svg += &format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"{dash}/>\n",
            path.join(" ")
        );
        for (density, recall) in points {
            svg += &format!(
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{}: density {density:.4}, recall {recall:.4}</title></circle>\n",
                x(density),
                y(recall),
                escape(&curve.name)
            );
        }
        let (at, line) = (LEFT + PLOT_WIDTH + 20.0, TOP + 16.0 * index as f64 + 6.0);
        svg += &format!(
            "<line x1=\"{at}\" y1=\"{line}\" x2=\"{}\" y2=\"{line}\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>\
             <text x=\"{}\" y=\"{}\">{}</text>\n",
            at + 24.0,
            at + 30.0,
            line + 4.0,
            escape(&curve.name)
        );
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_holds_every_point_inside_its_frame() {
        let curves: Vec<Curve> = (0..10)
            .map(|n| Curve {
                name: format!("a<b {n}"),
                points: vec![(0.1 * f64::from(n), 0.55), (1.0, 1.0)],
            })
            .collect();
        let svg = svg("t & u", &curves);
        assert_eq!(svg.matches("<circle").count(), 20);
        assert_eq!(svg.matches("<polyline").count(), 10);
        assert!(svg.contains("a&lt;b 9") && svg.contains("t &amp; u") && svg.ends_with("</svg>\n"));
        for part in svg.split("cy=\"").skip(1) {
            let y: f64 = part
                .split('"')
                .next()
                .and_then(|y| y.parse().ok())
                .expect("a number");
            assert!((TOP..=TOP + PLOT_HEIGHT).contains(&y), "{y}");
        }
    }
}
