//! A line chart with a legend, as an SVG.
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;

/// One line of a chart.
pub struct Curve {
    /// Name of the line in the legend.
    pub name: String,
    /// Points (x, y) from left to right.
    pub points: Vec<(f64, f64)>,
    /// Half the length of an error bar at each point; empty for a line without bars.
    pub errors: Vec<f64>,
}

/// Range and labels of a chart's axis.
pub struct Axis<'a> {
    /// The words beside the axis.
    pub label: &'a str,
    /// The least and the largest number on it.
    pub range: Range<f64>,
    /// Numbers written along the axis, at most.
    pub most_numbers: usize,
    /// Formats a number of this axis.
    pub text: &'a dyn Fn(f64) -> String,
}

impl<'a> Axis<'a> {
    /// The x axis of curves whose x values are exponents of two; the axis shows the powers.
    pub fn powers_of_two(label: &'a str, curves: &[Curve]) -> Self {
        let powers = curves.iter().flat_map(|curve| &curve.points).map(|point| point.0);
        let low = powers.clone().reduce(f64::min).unwrap_or(0.0);
        let high = powers.reduce(f64::max).unwrap_or(1.0).max(low + 1.0);
        Self {
            label,
            range: low..high,
            most_numbers: (high - low) as usize + 1,
            text: &|power| match power.fract() {
                0.0 => format!("{}", 1u64 << power as u32),
                _ => String::new(),
            },
        }
    }

    /// `value`, clamped to the axis's range.
    pub fn inside(&self, value: f64) -> f64 {
        value.clamp(self.range.start, self.range.end)
    }
}

const HEIGHT: u32 = 520;
const PLOT_WIDTH: u32 = 640;
const ROW_HEIGHT: i32 = 18;
/// The font of all words in pictures.
pub const FONT: &str = "sans-serif";

/// Okabe and Ito's palette: its colours differ in most kinds of colour blindness and in grey.
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

/// Corners of the marks, in pixels around a point: a square, a triangle, a diamond, a wide bar, and the triangle
/// downwards. With eight colours no two of forty curves share both.
const MARKS: [&[(i32, i32)]; 5] = [
    &[(-3, -3), (3, -3), (3, 3), (-3, 3)],
    &[(-4, 3), (0, -4), (4, 3)],
    &[(-4, 0), (0, -4), (4, 0), (0, 4)],
    &[(-5, -2), (5, -2), (5, 2), (-5, 2)],
    &[(-4, -3), (0, 4), (4, -3)],
];

/// Lines, axes and titles of a chart.
pub struct Plot<'a> {
    /// The words above the chart.
    pub title: &'a str,
    /// The axis to the right.
    pub x: Axis<'a>,
    /// The axis upwards.
    pub y: Axis<'a>,
    /// The lines, in the legend's order.
    pub curves: Vec<Curve>,
}

/// The SVG's text. Points outside the axes are drawn at the edge. From the ninth curve on the colours repeat, with
/// marks that are not filled.
pub fn svg(plot: &Plot<'_>) -> String {
    let mut svg = String::new();
    // The legend fits the longest name, at 7 pixels a letter.
    let longest = plot.curves.iter().map(|curve| curve.name.len()).max();
    let legend_width = (50 + 7 * longest.unwrap_or(0) as u32).max(200);
    let height = HEIGHT.max(60 + ROW_HEIGHT as u32 * plot.curves.len() as u32);
    let width = PLOT_WIDTH + legend_width;
    let root = SVGBackend::with_string(&mut svg, (width, height)).into_drawing_area();
    draw(root, plot).expect("a string takes every picture");
    svg
}

/// A part of a picture, to draw in.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// What drawing gives: nothing, or why it failed.
pub type Drawn = Result<(), Box<dyn std::error::Error>>;

/// Draws the chart at the left and the legend at the right.
fn draw(root: Area<'_>, plot: &Plot<'_>) -> Drawn {
    root.fill(&WHITE)?;
    let (area, rest) = root.split_horizontally(PLOT_WIDTH);
    draw_plot(&area, plot)?;
    let text = TextStyle::from((FONT, 15).into_font()).pos(Pos::new(HPos::Left, VPos::Center));
    for (n, curve) in plot.curves.iter().enumerate() {
        let (look, at) = (look(n), 40 + ROW_HEIGHT * n as i32);
        let line = [(4, at), (28, at)];
        rest.draw(&PathElement::new(line, look.line()))?;
        rest.draw(&(EmptyElement::at((16, at)) + look.inner() + look.edge()))?;
        rest.draw(&Text::new(&curve.name[..], (36, at), text.clone()))?;
    }
    root.present()?;
    Ok(())
}

/// Colours, width and mark of a line.
struct Look {
    colour: RGBColor,
    width: u32,
    inner: RGBColor,
    mark: &'static [(i32, i32)],
}

impl Look {
    fn line(&self) -> ShapeStyle {
        self.colour.stroke_width(self.width)
    }

    /// The mark's shape without its edge.
    fn inner(&self) -> Polygon<(i32, i32)> {
        Polygon::new(self.mark, self.inner.filled())
    }

    fn edge(&self) -> PathElement<(i32, i32)> {
        let closed = self.mark.iter().chain(self.mark.first()).copied();
        PathElement::new(closed.collect::<Vec<_>>(), self.colour.stroke_width(1))
    }
}

/// The look of the n-th curve.
fn look(n: usize) -> Look {
    let colour = COLOURS[n % COLOURS.len()];
    Look {
        colour,
        // Later curves are thinner, so that an earlier curve under them still shows at both sides.
        width: if n < MARKS.len() { 3 } else { 1 },
        inner: if n < COLOURS.len() { colour } else { WHITE },
        mark: MARKS[n % MARKS.len()],
    }
}

/// Draws axes, lines, error bars and marks; points outside the axes are moved to the edge.
fn draw_plot(area: &Area<'_>, plot: &Plot<'_>) -> Drawn {
    let Plot { title, x, y, curves } = plot;
    let mut chart = ChartBuilder::on(area)
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
    for (n, curve) in curves.iter().enumerate() {
        let (look, points) = (look(n), curve.points.iter());
        let points = points.map(|point| (x.inside(point.0), y.inside(point.1)));
        chart.draw_series(LineSeries::new(points.clone(), look.line()))?;
        let stroke = look.colour.stroke_width(1);
        for ((at, value), error) in points.clone().zip(&curve.errors) {
            let ends = [value - error, value + error].map(|end| (at, y.inside(end)));
            chart.draw_series([PathElement::new(ends, stroke)])?;
            // A cap of eleven pixels at each end.
            let cap = |end| EmptyElement::at(end) + PathElement::new([(-5, 0), (5, 0)], stroke);
            chart.draw_series(ends.map(cap))?;
        }
        chart.draw_series(points.map(|at| EmptyElement::at(at) + look.inner() + look.edge()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First corners of the marks of a picture, in the order drawn.
    fn marks(svg: &str) -> Vec<[u32; 2]> {
        let of_mark = |mark: &str| {
            let points = mark.split("points=\"").nth(1).expect("points");
            let corner = points.split(' ').next().expect("a corner");
            let (x, y) = corner.split_once(',').expect("two numbers");
            [x, y].map(|number| number.parse().expect("a number"))
        };
        svg.split("<polygon").skip(1).map(of_mark).collect()
    }

    #[test]
    fn exponents_of_two_are_written_as_numbers() {
        let line = |name: &str, points| Curve { name: name.to_owned(), points, errors: Vec::new() };
        let curves = vec![line("first", vec![(2.0, 1.0), (5.0, 0.5)]), line("second", vec![])];
        let svg = svg(&Plot {
            title: "a <b> & c",
            x: Axis::powers_of_two("tokens", &curves),
            y: Axis {
                label: "accuracy",
                range: 0.0..1.0,
                most_numbers: 6,
                text: &|value| format!("{:.0} %", 100.0 * value),
            },
            curves,
        });
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("a &lt;b&gt; &amp; c"));
        assert!(svg.contains("first") && svg.contains("second"));
        for number in ["4", "8", "16", "32", "0 %", "100 %"] {
            assert!(svg.contains(&format!("\n{number}\n")), "{number}: {svg}");
        }
        // Full accuracy is at the top of the left end, half in the middle of the right end.
        let [first, second, ..] = marks(&svg)[..] else {
            panic!("two marks: {svg}");
        };
        assert!(first[0] < 80 && first[1] < 50, "{first:?}");
        assert!(second[0] > 600 && (200..300).contains(&second[1]), "{second:?}");
    }

    #[test]
    fn a_picture_holds_every_curve_and_point_inside_its_frame() {
        let curves: Vec<Curve> = (0..10)
            .map(|n| Curve {
                name: format!("a<b {n}"),
                points: vec![(0.1 * f64::from(n), 0.55), (1.0, 2.0)],
                errors: Vec::new(),
            })
            .collect();
        let axis = |label| Axis { label, range: 0.0..1.0, most_numbers: 6, text: &|value| format!("{value:.1}") };
        let plot = Plot { title: "t & u", x: axis("over"), y: axis("up"), curves };
        let svg = svg(&plot);
        assert!(svg.contains("a&lt;b 9") && svg.contains("t &amp; u") && svg.contains("0.4"));
        // A mark is drawn at each point and in the legend; the test looks for its first corner.
        let all = marks(&svg).into_iter();
        let (legend, inside): (Vec<_>, Vec<_>) = all.partition(|mark| mark[0] > PLOT_WIDTH);
        assert_eq!((legend.len(), inside.len()), (10, 20));
        assert!(inside.iter().all(|[x, y]| *x >= 50 && (16..HEIGHT - 50).contains(y)));
        // The second points lie above the axis and are drawn at its upper end.
        let (firsts, seconds) = (inside.iter().step_by(2), inside.iter().skip(1).step_by(2));
        assert!(firsts.zip(seconds).all(|(first, second)| second[1] + 50 < first[1]));
        let colours = svg.matches("fill=\"#0072B2\"").count();
        assert!(colours > 0, "{svg}");
        // Curves of one colour have different marks.
        for (n, m) in (0..8 * MARKS.len()).flat_map(|n| (0..n).map(move |m| (n, m))) {
            assert!(n % COLOURS.len() != m % COLOURS.len() || n % MARKS.len() != m % MARKS.len());
        }
    }
}
