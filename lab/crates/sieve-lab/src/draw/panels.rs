//! An SVG of curves, one panel for each. A panel also shows the points of all other curves in grey.
use plotters::prelude::*;
use sieve_host::line_chart::{Area, Axis, Drawn, FONT};

/// Panels with the same axes, below a heading.
pub(crate) struct Section<'a> {
    pub(crate) heading: &'a str,
    pub(crate) x: Axis<'a>,
    pub(crate) y: Axis<'a>,
    /// The point of dense attention: a cross in every panel.
    pub(crate) dense: (f64, f64),
    pub(crate) panels: Vec<Panel>,
}

/// One chart of a picture with several.
pub(crate) struct Panel {
    pub(crate) name: String,
    /// The key that differs among its points and the key's values, from left to right.
    pub(crate) says: String,
    /// Points from left to right. Points outside the axes are drawn at the edge.
    pub(crate) points: Vec<(f64, f64)>,
}

const COLUMNS: usize = 4;
const WIDTH: i32 = 300;
const HEIGHT: i32 = 200;
const HEADING: i32 = 44;
/// Letters of a name that fit above a panel.
const LETTERS: usize = 48;
const GREY: RGBColor = RGBColor(0xc4, 0xc4, 0xc4);
const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);

/// The SVG's text: the sections, one below the other.
pub(crate) fn svg(title: &str, sections: &[Section<'_>]) -> String {
    let mut svg = String::new();
    let rows = |section: &Section<'_>| section.panels.len().div_ceil(COLUMNS) as i32;
    let heights: Vec<i32> = (sections.iter()).map(|section| HEADING + HEIGHT * rows(section)).collect();
    let size = (WIDTH * COLUMNS as i32, HEADING + heights.iter().sum::<i32>());
    let root = SVGBackend::with_string(&mut svg, (size.0 as u32, size.1 as u32));
    let root = root.into_drawing_area();
    draw(&root, title, sections, &heights).expect("a string takes every picture");
    drop(root);
    svg
}

/// Draws the title, then each section of this height: its heading and its panels in rows.
fn draw(root: &Area<'_>, title: &str, sections: &[Section<'_>], heights: &[i32]) -> Drawn {
    root.fill(&WHITE)?;
    let text = |size: i32| TextStyle::from((FONT, size).into_font());
    root.draw_text(title, &text(19), (16, 14))?;
    let mut top = HEADING;
    for (section, height) in sections.iter().zip(heights) {
        root.draw_text(section.heading, &text(15), (16, top + 14))?;
        for (at, panel) in section.panels.iter().enumerate() {
            let [row, column] = [at / COLUMNS, at % COLUMNS].map(|x| x as i32);
            let corner = (WIDTH * column, top + HEADING + HEIGHT * row);
            let area = root.clone().shrink(corner, (WIDTH, HEIGHT));
            // A name longer than LETTERS is drawn smaller, so that it ends before the next panel.
            let letters = panel.name.chars().count().max(LETTERS);
            area.draw_text(&panel.name, &text(14 * LETTERS as i32 / letters as i32), (44, 2))?;
            area.draw_text(&panel.says, &text(12).color(&RGBColor(0x55, 0x55, 0x55)), (44, 19))?;
            draw_panel(&area, section, panel)?;
        }
        top += height;
    }
    root.present()?;
    Ok(())
}

/// Draws the points of all panels in grey, dense attention as a cross, and the panel's own points in blue.
fn draw_panel(area: &Area<'_>, section: &Section<'_>, panel: &Panel) -> Drawn {
    let (x, y) = (&section.x, &section.y);
    let mut chart = ChartBuilder::on(area)
        .margin_top(36)
        .margin_right(16)
        .x_label_area_size(22)
        .y_label_area_size(44)
        .build_cartesian_2d(x.range.clone(), y.range.clone())?;
    chart
        .configure_mesh()
        .axis_style(TRANSPARENT)
        .bold_line_style(RGBColor(0xe2, 0xe2, 0xe2))
        .light_line_style(TRANSPARENT)
        .label_style((FONT, 12))
        .x_labels(x.most_numbers)
        .y_labels(y.most_numbers)
        .x_label_formatter(&|value| (x.text)(*value))
        .y_label_formatter(&|value| (y.text)(*value))
        .draw()?;
    let inside = |&point: &(f64, f64)| (x.inside(point.0), y.inside(point.1));
    let all = section.panels.iter().flat_map(|panel| &panel.points);
    chart.draw_series(all.map(|point| Circle::new(inside(point), 2, GREY.filled())))?;
    chart.draw_series([Cross::new(inside(&section.dense), 4, BLACK.stroke_width(2))])?;
    let points = panel.points.iter().map(inside);
    chart.draw_series(LineSeries::new(points.clone(), BLUE.stroke_width(2)))?;
    chart.draw_series(points.map(|point| Circle::new(point, 4, BLUE.filled())))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_panel_has_its_own_points_over_those_of_all_panels() {
        let axis = |label| Axis { label, range: 0.0..1.0, most_numbers: 3, text: &|value| format!("{value:.1}") };
        let panel = |name: &str, points: &[(f64, f64)]| Panel {
            name: name.to_owned(),
            says: format!("says {name}"),
            points: points.to_vec(),
        };
        let section = |heading| Section {
            heading,
            x: axis("x"),
            y: axis("y"),
            dense: (1.0, 0.0),
            panels: vec![
                panel("a<b", &[(0.1, 0.2), (0.4, 0.1)]),
                panel("c", &[(0.5, 7.0)]),
                panel("d", &[(0.2, 0.3)]),
                panel("e", &[(0.9, 0.9)]),
                panel("f", &[(0.3, 0.4)]),
            ],
        };
        let svg = svg("t & u", &[section("first"), section("second")]);
        for text in ["t &amp; u", "first", "second", "a&lt;b", "says c"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        // There are two sections of five panels. Each panel has the six points of all panels in grey (radius 2), and
        // its own again (radius 4).
        let circles = |radius: u32| svg.matches(&format!("r=\"{radius}\"")).count();
        assert_eq!((circles(2), circles(4)), (2 * 5 * 6, 2 * 6), "{svg}");
        // Two headings and the title, and two rows of panels in each section.
        let height = 3 * HEADING + 4 * HEIGHT;
        assert!(svg.contains(&format!("height=\"{height}\"")), "{svg}");
        // Names do not meet: each begins where its panel does.
        let names = svg.matches(&format!("x=\"{}\"", WIDTH + 44)).count();
        assert!(names >= 2 * 2, "{svg}");
    }
}
