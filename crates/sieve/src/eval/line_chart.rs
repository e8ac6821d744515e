//! Lines over two axes, with a legend, as an SVG.
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;

/// One line.
pub(super) struct Curve {
    /// For the legend.
    pub(super) name: String,
    /// Points from left to right.
    pub(super) points: Vec<(f64, f64)>,
}

/// One direction of the picture.
pub(super) struct Axis<'a> {
    pub(super) label: &'a str,
    pub(super) range: Range<f64>,
    /// Most numbers that are written beside it.
    pub(super) most_numbers: usize,
    /// Text of one of them.
    pub(super) text: &'a dyn Fn(f64) -> String,
}

const HEIGHT: u32 = 520;
const PLOT_WIDTH: u32 = 640;
const ROW_HEIGHT: i32 = 18;
const FONT: &str = "sans-serif";

/// Okabe and Ito's palette, whose colours stay apart for most eyes and in grey.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x00, 0x00, 0x00),
    RGBColor(0x8c, 0x6d, 0x31),
];

/// The picture. Points outside the axes are drawn at their edge. Past eight curves colours begin again, with open circles.
pub(super) fn svg(title: &str, x: &Axis<'_>, y: &Axis<'_>, curves: &[Curve]) -> String {
    let mut svg = String::new();
    // Room for the longest name, at 7 pixels a letter.
    let longest = curves.iter().map(|curve| curve.name.len()).max();
    let legend_width = (50 + 7 * longest.unwrap_or(0) as u32).max(200);
    let root = SVGBackend::with_string(&mut svg, (PLOT_WIDTH + legend_width, HEIGHT));
    draw(&root.into_drawing_area(), title, x, y, curves).expect("a string takes every picture");
    svg
}

fn draw(
    root: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    x: &Axis<'_>,
    y: &Axis<'_>,
    curves: &[Curve],
) -> Result<(), Box<dyn std::error::Error>> {
    root.fill(&WHITE)?;
    let (plot, legend) = root.split_horizontally(PLOT_WIDTH);
    let mut chart = ChartBuilder::on(&plot)
        .caption(title, (FONT, 17))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(x.range.clone(), y.range.clone())?;
    chart
        .configure_mesh()
        .axis_style(TRANSPARENT)
        .bold_line_style(RGBColor(0xdd, 0xdd, 0xdd))
        .light_line_style(TRANSPARENT)
        .label_style((FONT, 15))
        .axis_desc_style((FONT, 15))
        .x_desc(x.label)
        .y_desc(y.label)
        .x_labels(x.most_numbers)
        .y_labels(y.most_numbers)
        .x_label_formatter(&|value| (x.text)(*value))
        .y_label_formatter(&|value| (y.text)(*value))
        .draw()?;
    let inside = |value: f64, axis: &Axis<'_>| value.clamp(axis.range.start, axis.range.end);
    let text = TextStyle::from((FONT, 15).into_font()).pos(Pos::new(HPos::Left, VPos::Center));
    for (n, curve) in curves.iter().enumerate() {
        let colour = COLOURS[n % COLOURS.len()];
        let mark = match n < COLOURS.len() {
            true => colour.filled(),
            false => colour.stroke_width(2),
        };
        let points = curve.points.iter();
        let points: Vec<_> = points
            .map(|point| (inside(point.0, x), inside(point.1, y)))
            .collect();
        let circle = |&at: &(f64, f64)| Circle::new(at, 3, mark);
        chart.draw_series(points.iter().map(circle))?;
        chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
        let at = 40 + ROW_HEIGHT * n as i32;
        legend.draw(&Rectangle::new(
            [(4, at - 1), (24, at + 1)],
            colour.filled(),
        ))?;
        legend.draw(&Text::new(curve.name.as_str(), (32, at), text.clone()))?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_holds_every_curve_and_point_inside_its_frame() {
        let curves: Vec<Curve> = (0..10)
            .map(|n| Curve {
                name: format!("a<b {n}"),
                points: vec![(0.1 * f64::from(n), 0.55), (1.0, 2.0)],
            })
            .collect();
        let axis = |label| Axis {
            label,
            range: 0.0..1.0,
            most_numbers: 6,
            text: &|value| format!("{value:.1}"),
        };
        let svg = svg("t & u", &axis("over"), &axis("up"), &curves);
        assert_eq!(svg.matches("<polyline").count(), 10);
        assert_eq!(svg.matches("<circle").count(), 20);
        assert!(svg.contains("a&lt;b 9") && svg.contains("t &amp; u") && svg.contains("0.4"));
        let numbers = |name: &str| -> Vec<u32> {
            let parts = svg.split(name).skip(1);
            let number = |part: &str| part.split('"').next().and_then(|x| x.parse().ok());
            parts.map(|part| number(part).expect("a number")).collect()
        };
        let [across, down] = ["cx=\"", "cy=\""].map(numbers);
        assert!(across.iter().all(|x| (50..PLOT_WIDTH).contains(x)));
        assert!(down.iter().all(|y| (20..HEIGHT - 50).contains(y)));
        // The second points lie above the axis and are drawn at its upper end.
        let tops: Vec<u32> = down.iter().skip(1).step_by(2).copied().collect();
        assert!(tops.iter().all(|y| *y == tops[0] && *y < down[0]));
    }
}
