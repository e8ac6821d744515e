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
    /// Over exponents of two.
    pub(super) curves: Vec<Curve>,
}

impl Chart<'_> {
    /// The picture.
    pub(super) fn svg(self) -> String {
        let points = self.curves.iter().flat_map(|curve| &curve.points);
        let powers = points.map(|point| point.0);
        let low = powers.clone().reduce(f64::min).unwrap_or(0.0);
        let high = powers.reduce(f64::max).unwrap_or(1.0).max(low + 1.0);
        let power = Axis {
            label: self.name,
            range: low..high,
            most_numbers: (high - low) as usize + 1,
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
        line_chart::svg(&Plot {
            title: self.title,
            x: power,
            y: value,
            curves: self.curves,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_holds_every_line_and_point() {
        let line = |name: &str, points| Curve {
            name: name.to_owned(),
            points,
        };
        let chart = Chart {
            title: "a <b> & c",
            name: "tokens",
            value: "accuracy",
            ends: 0.0..1.0,
            label: |value| format!("{:.0} %", 100.0 * value),
            curves: vec![line("first", vec![(2.0, 1.0), (5.0, 0.5)]), line("second", vec![])],
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
