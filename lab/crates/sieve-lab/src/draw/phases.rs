//! Scores by phase, as an SVG: a row for each method, a panel for each score.
use plotters::prelude::*;
use sieve_eval::PhaseGap;
use sieve_host::line_chart::{Area, Drawn, FONT};
use std::ops::Range;

/// A score in all rows: a column of panels with one vertical axis.
pub(crate) struct Column {
    /// Name of the score, with its unit.
    pub(crate) name: &'static str,
    /// The least and the largest number that the axis shows at least.
    pub(crate) range: Range<f64>,
    /// A number of the score is multiplied by this where it is shown: 100 for percent.
    pub(crate) factor: f64,
}

/// The panels of one method.
pub(crate) struct Row<'a> {
    /// Name of the method, above the panels.
    pub(crate) name: String,
    /// The score of each column.
    pub(crate) gaps: Vec<&'a PhaseGap>,
    /// What each column's gap says, in a few words.
    pub(crate) says: Vec<String>,
}

const WIDTH: i32 = 520;
const HEIGHT: i32 = 210;
/// Space above a row for its name.
const HEAD: i32 = 34;
const TITLE: i32 = 74;
/// Letters of a name or a verdict that fit above a panel.
const LETTERS: usize = 68;
const LINE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const WORST: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const CHANCE: RGBColor = RGBColor(0xd8, 0xd8, 0xd8);
const WORDS: RGBColor = RGBColor(0x44, 0x44, 0x44);

/// The SVG's text. `rows_of` says what the scores are means of: "needles".
pub(crate) fn svg(title: &str, rows_of: &str, period: usize, columns: &[Column], rows: &[Row<'_>]) -> String {
    let mut svg = String::new();
    let size = (WIDTH * columns.len() as i32, TITLE + (HEAD + HEIGHT) * rows.len() as i32 + 8);
    let root = SVGBackend::with_string(&mut svg, (size.0 as u32, size.1 as u32)).into_drawing_area();
    draw(&root, title, rows_of, period, columns, rows).expect("a string takes every picture");
    drop(root);
    svg
}

fn text<'a>(size: i32) -> TextStyle<'a> {
    TextStyle::from((FONT, size).into_font())
}

/// Draws the whole picture: a row of panels a method, and in it a panel a score.
fn draw(root: &Area<'_>, title: &str, rows_of: &str, period: usize, columns: &[Column], rows: &[Row<'_>]) -> Drawn {
    root.fill(&WHITE)?;
    root.draw_text(title, &text(18), (16, 10))?;
    let about = [
        format!("phase: position modulo {period}; line: mean over {rows_of}, blue: its 95 % interval"),
        "grey: 95 % of rotations have all their phases there; orange: the worst phase".to_owned(),
    ];
    for (about, top) in about.iter().zip([34, 50]) {
        root.draw_text(about, &text(12).color(&WORDS), (16, top))?;
    }
    for (column, n) in columns.iter().zip(0..) {
        let range = shown(column, rows.iter().filter_map(|row| row.gaps.get(n as usize).copied()));
        for (row, top) in rows.iter().zip((TITLE..).step_by((HEAD + HEIGHT) as usize)) {
            let area = root.clone().shrink((WIDTH * n, top), (WIDTH, HEAD + HEIGHT));
            if n == 0 {
                let letters = row.name.chars().count().max(LETTERS);
                area.draw_text(&row.name, &text(15 * LETTERS as i32 / letters as i32), (16, 8))?;
            }
            let panel = area.shrink((0, HEAD), (WIDTH, HEIGHT));
            draw_panel(&panel, column, range.clone(), period, row.gaps[n as usize], &row.says[n as usize])?;
        }
    }
    root.present()?;
    Ok(())
}

/// The range of a column's axis: all that its panels draw.
fn shown<'a>(column: &Column, gaps: impl Iterator<Item = &'a PhaseGap>) -> Range<f64> {
    let of_gap = |gap: &PhaseGap| {
        let intervals = gap.phases.iter().flat_map(|score| score.interval.unwrap_or([score.mean; 2]));
        intervals.chain(gap.chance_band).collect::<Vec<_>>()
    };
    let all = gaps.flat_map(of_gap).chain([column.range.start, column.range.end]);
    let (low, high) = all.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    let margin = 0.04 * (high - low).max(1e-3);
    low - margin..high + margin
}

/// Draws one score of one method against the phase, with its interval and the band of chance. `says`: the line above.
fn draw_panel(area: &Area<'_>, column: &Column, range: Range<f64>, period: usize, gap: &PhaseGap, says: &str) -> Drawn {
    let letters = says.chars().count().max(LETTERS);
    area.draw_text(says, &text(12 * LETTERS as i32 / letters as i32).color(&WORDS), (66, 0))?;
    let last = period.max(2) as f64 - 1.0;
    let height = range.end - range.start;
    // Enough for labels a tenth of the axis apart.
    let digits = (1.0 - (column.factor * height).log10()).ceil().clamp(0.0, 9.0) as usize;
    let mut chart = ChartBuilder::on(area)
        .margin_top(18)
        .margin_left(8)
        .margin_right(16)
        .x_label_area_size(24)
        .y_label_area_size(58)
        .build_cartesian_2d(0.0..last, range)?;
    let [low, high] = gap.chance_band;
    chart.draw_series([Rectangle::new([(0.0, low), (last, high)], CHANCE.filled())])?;
    let ends = |end: usize| gap.phases.iter().filter_map(move |score| Some((score.phase as f64, score.interval?[end])));
    let outline: Vec<(f64, f64)> = ends(0).chain(ends(1).collect::<Vec<_>>().into_iter().rev()).collect();
    if !outline.is_empty() {
        chart.draw_series([Polygon::new(outline, LINE.mix(0.25).filled())])?;
    }
    chart
        .configure_mesh()
        .axis_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .light_line_style(TRANSPARENT)
        .label_style((FONT, 12))
        .axis_desc_style((FONT, 12))
        .y_desc(column.name)
        .x_labels(period.min(17))
        .y_labels(6)
        .x_label_formatter(&|phase| format!("{phase:.0}"))
        .y_label_formatter(&|value| {
            let value = if value.abs() < 1e-6 * height { 0.0 } else { *value };
            format!("{:.*}", digits, column.factor * value)
        })
        .draw()?;
    let points = gap.phases.iter().map(|score| (score.phase as f64, score.mean));
    chart.draw_series(LineSeries::new(points.clone(), LINE.stroke_width(2)))?;
    chart.draw_series(points.map(|(phase, mean)| {
        let is_worst = phase as usize == gap.worst && gap.gap > 0.0;
        Circle::new((phase, mean), if is_worst { 5 } else { 3 }, if is_worst { WORST } else { LINE }.filled())
    }))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_eval::{PhaseScore, PhaseVerdict};

    #[test]
    fn every_phase_is_a_point_and_the_worst_one_is_marked() {
        let score = |phase, mean: f64| PhaseScore { phase, mean, interval: Some([mean - 0.1, mean + 0.1]) };
        let gap = PhaseGap {
            phases: vec![score(0, 0.8), score(1, 0.2), score(2, 0.9)],
            num_rows: 4,
            best: 2,
            worst: 1,
            gap: 0.7,
            gap_interval: None,
            chance_median: 0.2,
            chance_high: 0.3,
            p_gap: 0.01,
            chance_band: [0.4, 0.9],
            wave: 0.3,
            p_wave: 0.01,
            verdict: PhaseVerdict::BeyondChance,
        };
        let column = |name| Column { name, range: 0.0..1.0, factor: 100.0 };
        let row = |name: &str| Row {
            name: name.to_owned(),
            gaps: vec![&gap, &gap],
            says: vec!["gap 70".to_owned(), "wave 30".to_owned()],
        };
        let svg = svg("t & u", "needles", 3, &[column("found"), column("other")], &[row("a<b"), row("c")]);
        for text in ["t &amp; u", "a&lt;b", "gap 70", "wave 30", "position modulo 3", "found"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        let circles = |radius: u32| svg.matches(&format!("r=\"{radius}\"")).count();
        assert_eq!((circles(3), circles(5)), (4 * 2, 4), "{svg}");
        // A band of the intervals in each panel.
        assert_eq!(svg.matches("<polygon").count(), 4, "{svg}");
    }
}
