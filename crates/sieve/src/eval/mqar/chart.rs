//! Accuracy by distance as a picture.
use crate::eval::output::escape;
use sieve_eval::RecallReport;
use std::fmt::Write;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
/// Room for the axes' labels; more at the right for the legend.
const LEFT: f64 = 60.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;

/// Told apart in grey too: Okabe and Ito's palette.
const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];

/// An SVG with one line a kind of sample: accuracy over the distance from value to question, in powers of two.
pub(super) fn accuracy_by_distance(title: &str, report: &RecallReport) -> String {
    let bins = report.kinds.iter().flat_map(|kind| &kind.by_distance);
    let powers: Vec<u32> = bins.map(|bin| bin.from.ilog2()).collect();
    let low = powers.iter().copied().min().unwrap_or(0);
    let high = powers.iter().copied().max().unwrap_or(1).max(low + 1);
    let x =
        |power: u32| LEFT + (WIDTH - LEFT - RIGHT) * f64::from(power - low) / f64::from(high - low);
    let y = |accuracy: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * accuracy;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"20\">MQAR accuracy, {}</text>\n",
        escape(title)
    );
    let mut put = |text: String| {
        svg.push_str(&text);
        svg.push('\n');
    };
    for step in 0..=5 {
        let accuracy = f64::from(step) / 5.0;
        let at = y(accuracy);
        put(format!(
            "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{} %</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            at + 4.0,
            step * 20
        ));
    }
    for power in low..=high {
        put(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            x(power),
            HEIGHT - BOTTOM + 18.0,
            1u64 << power
        ));
    }
    put(format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">tokens between value and question, at least</text>",
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 12.0
    ));
    for (n, kind) in report.kinds.iter().enumerate() {
        let colour = COLOURS[n % COLOURS.len()];
        let mut points = String::new();
        for bin in &kind.by_distance {
            let (x, y) = (x(bin.from.ilog2()), y(bin.accuracy));
            let _ = write!(points, "{x:.1},{y:.1} ");
            put(format!(
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"
            ));
        }
        put(format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            points.trim_end()
        ));
        let at = TOP + 18.0 * n as f64;
        put(format!(
            "<text x=\"{:.1}\" y=\"{at:.1}\" fill=\"{colour}\">{} tokens, {} pairs</text>",
            WIDTH - RIGHT + 12.0,
            kind.seq_len,
            kind.num_pairs
        ));
    }
    svg.push_str("</svg>\n");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_eval::{Answers, DistanceAnswers, RecallOfKind};

    #[test]
    fn the_picture_holds_every_kind_and_bin() {
        let bin = |from, accuracy| DistanceAnswers {
            from,
            to: 2 * from,
            answers: Answers::default(),
            accuracy,
        };
        let kind = |seq_len, by_distance| RecallOfKind {
            seq_len,
            num_pairs: 4,
            num_samples: 1,
            answers: Answers::default(),
            accuracy: 0.0,
            by_distance,
        };
        let report = RecallReport {
            kinds: vec![kind(64, vec![bin(4, 1.0), bin(32, 0.5)]), kind(8, vec![])],
            all: Answers::default(),
            accuracy: 0.0,
        };
        let svg = accuracy_by_distance("a <b> & c", &report);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("a &lt;b&gt; &amp; c"));
        assert_eq!(svg.matches("<circle").count(), 2);
        assert_eq!(svg.matches("<polyline").count(), 2);
        // Full accuracy is at the top, at the left end of the axis; half in the middle, at the right end.
        assert!(svg.contains("cx=\"60.0\" cy=\"40.0\""));
        assert!(svg.contains("cx=\"490.0\" cy=\"195.0\""));
    }
}
