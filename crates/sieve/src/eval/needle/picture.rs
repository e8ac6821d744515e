//! Needles by length and depth as heat maps: two scores side by side, one row for each method.
use crate::eval::output::escape;
use crate::selector;
use sieve_eval::{NUM_DISTRACTORS, NeedleCell, NeedleReport};
use std::fmt::Write;

/// What is drawn.
pub(super) struct Picture<'a> {
    /// Over everything.
    pub(super) title: String,
    /// Tokens of a training row; marked where it lies inside the lengths.
    pub(super) trained_len: usize,
    /// Name of the model's own attention.
    pub(super) own: String,
    /// One for each method, all over the same grid.
    pub(super) reports: &'a [NeedleReport],
}

const LEFT: f64 = 64.0;
const TOP: f64 = 34.0;
const PANEL_WIDTH: f64 = 350.0;
const PANEL_HEIGHT: f64 = 210.0;
/// Between the panels, and at the right end.
const GAP: f64 = 34.0;
/// Above a row of panels, for its name.
const HEAD: f64 = 54.0;
/// Below a row of panels, for the lengths.
const FOOT: f64 = 34.0;
const LEGEND_HEIGHT: f64 = 58.0;

/// Numbers are written into cells that are at least so large.
const MIN_TEXT_WIDTH: f64 = 26.0;
const MIN_TEXT_HEIGHT: f64 = 14.0;
/// Labels on an axis, at most.
const MAX_LABELS: usize = 11;

/// Blue is good, grey is what a guess gets, orange is worse; told apart in most kinds of colour blindness.
const GOOD: [f64; 3] = [8.0, 81.0, 156.0];
const NEUTRAL: [f64; 3] = [238.0, 238.0, 238.0];
const BAD: [f64; 3] = [179.0, 88.0, 6.0];

/// One of the two scores.
#[derive(Clone, Copy)]
enum Score {
    Found,
    Rank,
}

impl Score {
    fn name(self) -> String {
        match self {
            Self::Found => "number in the greedy continuation".to_owned(),
            Self::Rank => format!("rank of its likelihood among {}", NUM_DISTRACTORS + 1),
        }
    }

    /// From -1 (worst) over 0 (a guess) to 1 (best).
    fn value(self, cell: &NeedleCell) -> f64 {
        match self {
            Self::Found => cell.num_found as f64 / cell.num_needles as f64,
            Self::Rank => {
                let middle = NUM_DISTRACTORS as f64 / 2.0;
                (middle + 1.0 - cell.mean_rank) / middle
            }
        }
    }

    fn text(self, cell: &NeedleCell) -> String {
        match self {
            Self::Found => format!("{:.0}", 100.0 * self.value(cell)),
            Self::Rank => format!("{:.1}", cell.mean_rank),
        }
    }

    /// Labels of the worst, the middle and the best end of the colours.
    fn legend(self) -> (f64, [String; 3]) {
        match self {
            Self::Found => (0.0, ["0 %", "50 %", "100 %"].map(String::from)),
            Self::Rank => {
                let worst = NUM_DISTRACTORS + 1;
                let guess = format!("{} (a guess)", NUM_DISTRACTORS / 2 + 1);
                (-1.0, [worst.to_string(), guess, "1".to_owned()])
            }
        }
    }
}

impl Picture<'_> {
    /// The picture.
    pub(super) fn svg(&self) -> String {
        let row_height = HEAD + PANEL_HEIGHT + FOOT;
        let width = LEFT + 2.0 * (PANEL_WIDTH + GAP);
        let height = TOP + row_height * self.reports.len() as f64 + LEGEND_HEIGHT;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"24\" font-size=\"15\">Needle in a haystack: {}</text>\n",
            escape(&self.title)
        );
        for (n, report) in self.reports.iter().enumerate() {
            let top = TOP + row_height * n as f64;
            let name = match &report.selector {
                Some(selector) => selector::short(selector),
                None => self.own.clone(),
            };
            let _ = writeln!(
                svg,
                "<text x=\"{LEFT}\" y=\"{:.1}\" font-weight=\"bold\">{}</text>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#444\">{:.1} % found, mean rank {:.2}</text>",
                top + 28.0,
                escape(&shortened(&name)),
                width - GAP,
                top + 28.0,
                100.0 * report.found,
                report.mean_rank
            );
            for (score, left) in [
                (Score::Found, LEFT),
                (Score::Rank, LEFT + PANEL_WIDTH + GAP),
            ] {
                self.panel(&mut svg, report, score, left, top + HEAD);
            }
        }
        let at = height - LEGEND_HEIGHT + 14.0;
        legend(&mut svg, Score::Found, LEFT, at);
        legend(&mut svg, Score::Rank, LEFT + PANEL_WIDTH + GAP, at);
        svg + "</svg>\n"
    }

    fn panel(&self, svg: &mut String, report: &NeedleReport, score: Score, left: f64, top: f64) {
        let mut lengths: Vec<usize> = report.cells.iter().map(|cell| cell.length).collect();
        lengths.dedup();
        let num_depths = report.cells.len() / lengths.len().max(1);
        let cell_width = PANEL_WIDTH / lengths.len() as f64;
        let cell_height = PANEL_HEIGHT / num_depths as f64;
        let _ = writeln!(
            svg,
            "<text x=\"{left:.1}\" y=\"{:.1}\" fill=\"#444\">{}</text>",
            top - 8.0,
            score.name()
        );
        svg.push_str("<g text-anchor=\"middle\" font-size=\"10\">\n");
        for (n, cell) in report.cells.iter().enumerate() {
            let x = left + (n / num_depths) as f64 * cell_width;
            let y = top + (n % num_depths) as f64 * cell_height;
            let value = score.value(cell);
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{} tokens, {:.0} %: {} of {} found, \
                 mean rank {:.2}</title></rect>",
                // Neighbours overlap by a hair, so that no line shows between them.
                cell_width + 0.2,
                cell_height + 0.2,
                colour(value),
                cell.length,
                cell.depth,
                cell.num_found,
                cell.num_needles,
                cell.mean_rank
            );
            if cell_width >= MIN_TEXT_WIDTH && cell_height >= MIN_TEXT_HEIGHT {
                let _ = writeln!(
                    svg,
                    "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{}\">{}</text>",
                    x + cell_width / 2.0,
                    y + cell_height / 2.0 + 3.5,
                    if value.abs() > 0.55 { "white" } else { "#222" },
                    score.text(cell)
                );
            }
        }
        svg.push_str("</g>\n");
        let every = lengths.len().div_ceil(MAX_LABELS - 3);
        for (n, length) in lengths.iter().enumerate().step_by(every.max(1)) {
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{length}</text>",
                left + (n as f64 + 0.5) * cell_width,
                top + PANEL_HEIGHT + 16.0
            );
        }
        let every = num_depths.div_ceil(MAX_LABELS);
        if matches!(score, Score::Found) {
            for (n, cell) in report.cells[..num_depths]
                .iter()
                .enumerate()
                .step_by(every.max(1))
            {
                let _ = writeln!(
                    svg,
                    "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.0} %</text>",
                    left - 6.0,
                    top + (n as f64 + 0.5) * cell_height + 4.0,
                    cell.depth
                );
            }
            let (x, y) = (left - 50.0, top + PANEL_HEIGHT / 2.0);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" fill=\"#444\" transform=\"rotate(-90 {x:.1} {y:.1})\">depth of \
                 the needle</text>"
            );
        }
        self.trained_mark(svg, &lengths, [left, top, cell_width]);
    }

    /// A line between the lengths that the model was trained on and those beyond.
    fn trained_mark(&self, svg: &mut String, lengths: &[usize], [left, top, cell_width]: [f64; 3]) {
        let within = lengths.partition_point(|&length| length <= self.trained_len);
        let text = match within {
            _ if lengths.is_empty() => return,
            0 => format!(
                "all longer than the {} tokens of training",
                self.trained_len
            ),
            n if n == lengths.len() => {
                format!(
                    "none longer than the {} tokens of training",
                    self.trained_len
                )
            }
            _ => {
                let x = left + within as f64 * cell_width;
                let _ = writeln!(
                    svg,
                    "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"black\" stroke-width=\"1.5\" \
                     stroke-dasharray=\"5 3\"/>",
                    top - 4.0,
                    top + PANEL_HEIGHT + 4.0
                );
                format!("tokens; dashed: trained up to {}", self.trained_len)
            }
        };
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#444\">{text}</text>",
            left + PANEL_WIDTH / 2.0,
            top + PANEL_HEIGHT + 31.0
        );
    }
}

/// A bar of colours with its ends and middle named.
fn legend(svg: &mut String, score: Score, left: f64, top: f64) {
    const STEPS: usize = 40;
    const WIDTH: f64 = 220.0;
    let (worst, labels) = score.legend();
    for step in 0..STEPS {
        let share = (step as f64 + 0.5) / STEPS as f64;
        let _ = writeln!(
            svg,
            "<rect x=\"{:.2}\" y=\"{top:.1}\" width=\"{:.2}\" height=\"12\" fill=\"{}\"/>",
            left + WIDTH * step as f64 / STEPS as f64,
            WIDTH / STEPS as f64 + 0.2,
            colour(worst + share * (1.0 - worst))
        );
    }
    for (n, (label, anchor)) in labels.iter().zip(["start", "middle", "end"]).enumerate() {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{label}</text>",
            left + WIDTH * n as f64 / 2.0,
            top + 27.0
        );
    }
}

/// From -1 (bad) over 0 (neutral) to 1 (good).
fn colour(value: f64) -> String {
    let end = if value < 0.0 { BAD } else { GOOD };
    let share = value.abs().min(1.0);
    let [r, g, b] = [0, 1, 2].map(|c| NEUTRAL[c] + share * (end[c] - NEUTRAL[c]));
    format!("#{:02x}{:02x}{:02x}", r as u8, g as u8, b as u8)
}

/// A selector's settings can be many.
fn shortened(name: &str) -> String {
    const MAX: usize = 66;
    match name.char_indices().nth(MAX) {
        Some((at, _)) => format!("{} …", &name[..at]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_eval::NeedleExample;

    fn report(selector: Option<&str>, lengths: &[usize], depths: &[f64]) -> NeedleReport {
        let cells = lengths.iter().flat_map(|&length| {
            depths.iter().map(move |&depth| NeedleCell {
                length,
                depth,
                num_needles: 2,
                num_found: 1,
                mean_rank: 1.0 + depth / 10.0,
            })
        });
        NeedleReport {
            selector: selector.map(String::from),
            num_needles: 2 * lengths.len() * depths.len(),
            found: 0.5,
            mean_rank: 6.0,
            first: 0.0,
            chance_rank: 6.0,
            sigmas: 0.0,
            density: None,
            cells: cells.collect(),
            example: NeedleExample {
                statement: String::new(),
                question: String::new(),
                answer: String::new(),
            },
        }
    }

    fn svg(reports: &[NeedleReport], trained_len: usize) -> String {
        Picture {
            title: "a & b".to_owned(),
            trained_len,
            own: "mha".to_owned(),
            reports,
        }
        .svg()
    }

    #[test]
    fn every_cell_of_every_method_is_drawn_in_both_maps() {
        let (lengths, depths) = ([256, 512, 1024], [0.0, 50.0, 100.0, 30.0]);
        let reports = [
            report(None, &lengths, &depths),
            report(Some("x<y"), &lengths, &depths),
        ];
        let svg = svg(&reports, 512);
        assert_eq!(svg.matches("<title>").count(), 2 * 2 * 12);
        assert!(svg.contains("a &amp; b") && svg.contains("x&lt;y") && svg.contains(">mha<"));
        // Between 512 and 1024, in each panel.
        assert_eq!(svg.matches("stroke-dasharray").count(), 4);
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn a_line_shows_only_where_training_ended_between_two_lengths() {
        let reports = [report(None, &[256, 512], &[0.0])];
        assert!(svg(&reports, 100).contains("all longer than the 100 tokens"));
        assert!(svg(&reports, 512).contains("none longer than the 512 tokens"));
        assert!(!svg(&reports, 512).contains("dasharray"));
        let many: Vec<usize> = (1..=35).map(|n| 100 * n).collect();
        let depths: Vec<f64> = (0..35).map(|n| f64::from(n) * 100.0 / 34.0).collect();
        let large = svg(&[report(None, &many, &depths)], 1000);
        // No room for numbers inside, few labels outside.
        assert!(!large.contains("fill=\"#222\"") && !large.contains("fill=\"white\">"));
        assert!(large.matches("<text").count() < 60);
    }

    #[test]
    fn colours_go_from_bad_over_neutral_to_good() {
        assert_eq!(colour(0.0), "#eeeeee");
        assert_eq!(colour(1.0), "#08519c");
        assert_eq!(colour(-1.0), "#b35806");
        assert_eq!(colour(2.0), colour(1.0));
        let cell = |mean_rank| NeedleCell {
            length: 1,
            depth: 0.0,
            num_needles: 1,
            num_found: 0,
            mean_rank,
        };
        let values = [1.0, 6.0, 11.0].map(|rank| Score::Rank.value(&cell(rank)));
        assert_eq!(values, [1.0, 0.0, -1.0]);
    }
}
