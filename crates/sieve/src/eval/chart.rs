//! Lines over powers of two as a picture.
use crate::eval::line_chart::{self, Axis, Curve, Plot};
use std::ops::Range;

/// What is drawn.
pub(super) struct Chart<'a> {
    pub(super) title: &'a str,
    /// Of the horizontal axis.
    pub(super) name: &'a str,
    /// Of the vertical axis.
    pub(super) value: &'a str,
    /// Lower and upper end of the vertical axis.
    pub(super) ends: Range<f64>,
    /// A value of the vertical axis in words.
    pub(super) label: fn(f64) -> String,
    pub(super) lines: Vec<Line>,
}

/// One line of a chart.
pub(super) struct Line {
    pub(super) name: String,
    /// Exponents of two, and values.
    pub(super) points: Vec<(u32, f64)>,
}

impl Chart<'_> {
    /// The picture.
    pub(super) fn svg(&self) -> String {
        let powers: Vec<u32> = self
            .lines
            .iter()
            .flat_map(|line| &line.points)
            .map(|point| point.0)
            .collect();
        let low = powers.iter().copied().min().unwrap_or(0);
        let high = powers.iter().copied().max().unwrap_or(1).max(low + 1);
        let power = Axis {
            label: self.name,
            range: f64::from(low)..f64::from(high),
            most_numbers: (high - low + 1) as usize,
            text: &|power| match power.fract() {
                0.0 => format!("{}", 1u64 << power as u32),
                _ => String::new(),
            },
        };
        let value = Axis {
            label: self.value,
            range: self.ends.clone(),
            most_numbers: 6,
            text: &|value| (self.label)(value),
        };
        let curve = |line: &Line| Curve {
            name: line.name.clone(),
            points: line
                .points
                .iter()
                .map(|&(power, value)| (f64::from(power), value))
                .collect(),
        };
        let curves: Vec<Curve> = self.lines.iter().map(curve).collect();
        line_chart::svg(&[Plot {
            title: self.title,
            x: power,
            y: value,
            curves,
        }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_holds_every_line_and_point() {
        let line = |name: &str, points| Line {
            name: name.to_owned(),
            points,
        };
        let chart = Chart {
            title: "a <b> & c",
            name: "tokens",
            value: "accuracy",
            ends: 0.0..1.0,
            label: |value| format!("{:.0} %", 100.0 * value),
            lines: vec![line("first", vec![(2, 1.0), (5, 0.5)]), line("second", vec![])],
        };
        let svg = chart.svg();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("a &lt;b&gt; &amp; c"));
        assert!(svg.contains("first") && svg.contains("second"));
        for number in ["4", "8", "16", "32", "0 %", "100 %"] {
            assert!(svg.contains(&format!("\n{number}\n")), "{number}: {svg}");
        }
        // Full accuracy is at the top of the left end, half in the middle of the right end.
        let [first, second, ..] = line_chart::marks(&svg)[..] else {
            panic!("two marks: {svg}");
        };
        assert!(first[0] < 80 && first[1] < 50, "{first:?}");
        assert!(second[0] > 600 && (200..300).contains(&second[1]), "{second:?}");
    }
}
