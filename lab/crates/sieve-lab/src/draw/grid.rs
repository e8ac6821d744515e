//! Heat maps of answers by length and a second axis (depth or task), as an SVG. Each method or task has one row of two
//! panels: the score and the rank.
use super::svg::Svg;
use sieve_eval::NUM_DISTRACTORS;

/// Contents of an SVG of heat maps.
pub(crate) struct Picture {
    /// Heading above all maps.
    pub(crate) title: String,
    /// Tokens of a training row, where they are known. A dashed line marks it between the lengths.
    pub(crate) trained_len: Option<usize>,
    /// A heat map for each method or task.
    pub(crate) maps: Vec<Map>,
}

/// A row of two panels, which show the same cells by score and by rank.
pub(crate) struct Map {
    /// Name of the method or task, left above the panels.
    pub(crate) name: String,
    /// Overall numbers of the method or task, right above the panels.
    pub(crate) summary: String,
    /// Columns from left to right, in tokens.
    pub(crate) lengths: Vec<usize>,
    /// Labels of the rows from top to bottom.
    pub(crate) rows: Vec<String>,
    /// Label of the vertical axis.
    pub(crate) about_rows: &'static str,
    /// The measured cells; the others stay white.
    pub(crate) cells: Vec<MapCell>,
}

/// A measured length and depth, or length and task.
pub(crate) struct MapCell {
    /// Column of the cell, an index into [`Map::lengths`].
    pub(crate) column: usize,
    /// Row of the cell, an index into [`Map::rows`].
    pub(crate) row: usize,
    /// Share of the answer found, from 0 to 1.
    pub(crate) score: f64,
    /// Rank of the answer's likelihood, from 1 to `NUM_DISTRACTORS + 1`.
    pub(crate) mean_rank: f64,
    /// Tooltip: the cell's numbers in words.
    pub(crate) title: String,
}

// Left margin; all sizes are in pixels.
const LEFT: f64 = 130.0;
const TOP: f64 = 34.0;
const PANEL_WIDTH: f64 = 350.0;
const PANEL_HEIGHT: f64 = 210.0;
/// Space between the panels and at the right end.
const GAP: f64 = 34.0;
/// Space above a row of panels, for its name.
const HEAD: f64 = 54.0;
/// Space below a row of panels, for the lengths.
const FOOT: f64 = 34.0;
const LEGEND_HEIGHT: f64 = 58.0;

/// A cell shows its number only if it is at least this wide and this high.
const MIN_TEXT_WIDTH: f64 = 26.0;
const MIN_TEXT_HEIGHT: f64 = 14.0;
/// Most labels on an axis.
const MAX_LABELS: usize = 11;

/// RGB: blue is good, grey is the score of a guess, orange is worse. The three differ in most kinds of colour
/// blindness.
const GOOD: [f64; 3] = [8.0, 81.0, 156.0];
const NEUTRAL: [f64; 3] = [238.0, 238.0, 238.0];
const BAD: [f64; 3] = [179.0, 88.0, 6.0];

/// The number that colours a panel's cells.
#[derive(Clone, Copy)]
enum Score {
    Found,
    Rank,
}

impl Score {
    fn name(self) -> String {
        match self {
            Self::Found => "share of the answer in the generated text".to_owned(),
            Self::Rank => format!("rank of its likelihood among {}", NUM_DISTRACTORS + 1),
        }
    }

    /// The colour's value: -1 is worst, 0 is a guess, 1 is best.
    fn value(self, cell: &MapCell) -> f64 {
        match self {
            Self::Found => cell.score,
            Self::Rank => {
                let middle = NUM_DISTRACTORS as f64 / 2.0;
                (middle + 1.0 - cell.mean_rank) / middle
            }
        }
    }

    fn text(self, cell: &MapCell) -> String {
        match self {
            Self::Found => format!("{:.0}", 100.0 * self.value(cell)),
            Self::Rank => format!("{:.1}", cell.mean_rank),
        }
    }

    /// The value at the worst end of the legend, and the labels at its worst end, middle and best end.
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

// SVG attributes of grey text.
const GREY: &str = "fill=\"#444\"";
const MIDDLE: &str = "text-anchor=\"middle\"";
const MIDDLE_GREY: &str = "text-anchor=\"middle\" fill=\"#444\"";
const END_GREY: &str = "text-anchor=\"end\" fill=\"#444\"";

impl Picture {
    /// The picture as SVG text.
    pub(crate) fn svg(&self) -> String {
        let row_height = HEAD + PANEL_HEIGHT + FOOT;
        let width = LEFT + 2.0 * (PANEL_WIDTH + GAP);
        let height = TOP + row_height * self.maps.len() as f64 + LEGEND_HEIGHT;
        let mut svg = Svg::new(width, height);
        svg.text([LEFT, 24.0], "font-size=\"15\"", &self.title);
        let scores = [(Score::Found, LEFT), (Score::Rank, LEFT + PANEL_WIDTH + GAP)];
        for (n, map) in self.maps.iter().enumerate() {
            let top = TOP + row_height * n as f64;
            svg.text([LEFT, top + 28.0], "font-weight=\"bold\"", shortened(&map.name));
            svg.text([width - GAP, top + 28.0], END_GREY, &map.summary);
            for (score, left) in scores {
                self.panel(&mut svg, map, score, left, top + HEAD);
            }
        }
        for (score, left) in scores {
            legend(&mut svg, score, left, height - LEGEND_HEIGHT + 14.0);
        }
        svg.end()
    }

    /// Draws a panel of `map`, coloured by `score`, with its upper left corner at `left`, `top`.
    fn panel(&self, svg: &mut Svg, map: &Map, score: Score, left: f64, top: f64) {
        let (lengths, num_rows) = (&map.lengths, map.rows.len());
        let cell_width = PANEL_WIDTH / lengths.len() as f64;
        let cell_height = PANEL_HEIGHT / num_rows as f64;
        svg.text([left, top - 8.0], GREY, score.name());
        for cell in &map.cells {
            let x = left + cell.column as f64 * cell_width;
            let y = top + cell.row as f64 * cell_height;
            let value = score.value(cell);
            let fill = format!("fill=\"{}\"", colour(value));
            // Neighbouring cells overlap by 0.2 pixels, so that no line shows between them.
            svg.rect([x, y], [cell_width + 0.2, cell_height + 0.2], &fill, &cell.title);
            if cell_width >= MIN_TEXT_WIDTH && cell_height >= MIN_TEXT_HEIGHT {
                // Text is white on dark cells. A text's y is its baseline, 3.5 pixels below its middle.
                let fill = if value.abs() > 0.55 { "white" } else { "#222" };
                let attributes = format!("{MIDDLE} font-size=\"10\" fill=\"{fill}\"");
                let middle = [x + cell_width / 2.0, y + cell_height / 2.0 + 3.5];
                svg.text(middle, &attributes, score.text(cell));
            }
        }
        // Numbers of the lengths are wide, so fewer of them fit.
        let every = lengths.len().div_ceil(MAX_LABELS - 3);
        for (n, length) in lengths.iter().enumerate().step_by(every.max(1)) {
            let x = left + (n as f64 + 0.5) * cell_width;
            svg.text([x, top + PANEL_HEIGHT + 16.0], MIDDLE, length);
        }
        if matches!(score, Score::Found) {
            let every = num_rows.div_ceil(MAX_LABELS).max(1);
            for (n, row) in map.rows.iter().enumerate().step_by(every) {
                let y = top + (n as f64 + 0.5) * cell_height + 4.0;
                svg.text([left - 6.0, y], "text-anchor=\"end\"", row);
            }
            svg.upright([left - LEFT + 14.0, top + PANEL_HEIGHT / 2.0], GREY, map.about_rows);
        }
        self.trained_mark(svg, lengths, [left, top, cell_width]);
    }

    /// Draws a dashed line between the lengths up to `trained_len` and the longer ones, and the label of the length
    /// axis.
    fn trained_mark(&self, svg: &mut Svg, lengths: &[usize], [left, top, cell_width]: [f64; 3]) {
        let trained = self.trained_len.unwrap_or(usize::MAX);
        let within = lengths.partition_point(|&length| length <= trained);
        let text = match within {
            _ if lengths.is_empty() => return,
            _ if self.trained_len.is_none() => "tokens".to_owned(),
            0 => format!("all longer than the {trained} tokens of training"),
            n if n == lengths.len() => format!("none longer than the {trained} tokens of training"),
            _ => {
                let (x, bottom) = (left + within as f64 * cell_width, top + PANEL_HEIGHT + 4.0);
                svg.put(&format!(
                    "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{bottom:.1}\" stroke=\"black\" \
                     stroke-width=\"1.5\" stroke-dasharray=\"5 3\"/>",
                    top - 4.0,
                ));
                format!("tokens; dashed: trained up to {trained}")
            }
        };
        svg.text([left + PANEL_WIDTH / 2.0, top + PANEL_HEIGHT + 31.0], MIDDLE_GREY, text);
    }
}

/// Draws a bar of the colours with labels at its ends and in the middle.
fn legend(svg: &mut Svg, score: Score, left: f64, top: f64) {
    const STEPS: usize = 40;
    const WIDTH: f64 = 220.0;
    let (worst, labels) = score.legend();
    for step in 0..STEPS {
        let share = (step as f64 + 0.5) / STEPS as f64;
        let fill = format!("fill=\"{}\"", colour(worst + share * (1.0 - worst)));
        let x = left + WIDTH * step as f64 / STEPS as f64;
        svg.rect([x, top], [WIDTH / STEPS as f64 + 0.2, 12.0], &fill, "");
    }
    for (n, (label, anchor)) in labels.iter().zip(["start", "middle", "end"]).enumerate() {
        let x = left + WIDTH * n as f64 / 2.0;
        svg.text([x, top + 27.0], &format!("text-anchor=\"{anchor}\""), label);
    }
}

/// `#rrggbb` of a value from -1 (bad) over 0 (neutral) to 1 (good).
fn colour(value: f64) -> String {
    let end = if value < 0.0 { BAD } else { GOOD };
    let share = value.abs().min(1.0);
    let [r, g, b] = [0, 1, 2].map(|c| NEUTRAL[c] + share * (end[c] - NEUTRAL[c]));
    format!("#{:02x}{:02x}{:02x}", r as u8, g as u8, b as u8)
}

/// `name`, cut to the width of the two panels: a selector's settings can be longer.
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
    /// A map of equal scores, with a cell for each length and depth.
    fn map(name: &str, lengths: &[usize], depths: &[f64]) -> Map {
        let columns = 0..lengths.len();
        let cells = columns.flat_map(|column| {
            depths.iter().enumerate().map(move |(row, &depth)| MapCell {
                column,
                row,
                score: 0.5,
                mean_rank: 1.0 + depth / 10.0,
                title: "a cell".to_owned(),
            })
        });
        Map {
            name: name.to_owned(),
            summary: String::new(),
            lengths: lengths.to_vec(),
            rows: depths.iter().map(|depth| format!("{depth:.0} %")).collect(),
            about_rows: "depth",
            cells: cells.collect(),
        }
    }

    fn svg(maps: Vec<Map>, trained_len: impl Into<Option<usize>>) -> String {
        let trained_len = trained_len.into();
        Picture { title: "a & b".to_owned(), trained_len, maps }.svg()
    }

    #[test]
    fn every_cell_of_every_method_is_drawn_in_both_maps() {
        let (lengths, depths) = ([256, 512, 1024], [0.0, 50.0, 100.0, 30.0]);
        let maps = vec![map("mha", &lengths, &depths), map("x<y", &lengths, &depths)];
        let svg = svg(maps, 512);
        assert_eq!(svg.matches("<title>").count(), 2 * 2 * 12);
        assert!(svg.contains("a &amp; b") && svg.contains("x&lt;y") && svg.contains(">mha<"));
        // Each panel has a dashed line, between 512 and 1024.
        assert_eq!(svg.matches("stroke-dasharray").count(), 4);
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn a_line_shows_only_where_training_ended_between_two_lengths() {
        let drawn = |trained| svg(vec![map("mha", &[256, 512], &[0.0])], trained);
        assert!(drawn(100).contains("all longer than the 100 tokens"));
        assert!(drawn(512).contains("none longer than the 512 tokens"));
        assert!(!drawn(512).contains("dasharray"));
        let unknown = svg(vec![map("mha", &[256, 512], &[0.0])], None);
        assert!(!unknown.contains("of training") && !unknown.contains("dasharray") && unknown.contains(">tokens<"));
        let many: Vec<usize> = (1..=35).map(|n| 100 * n).collect();
        let depths: Vec<f64> = (0..35).map(|n| f64::from(n) * 100.0 / 34.0).collect();
        let large = svg(vec![map("mha", &many, &depths)], 1000);
        // Small cells have no numbers, and the axes few labels.
        assert!(!large.contains("fill=\"#222\"") && !large.contains("fill=\"white\">"));
        assert!(large.matches("<text").count() < 60);
    }

    #[test]
    fn colours_go_from_bad_over_neutral_to_good() {
        assert_eq!(colour(0.0), "#eeeeee");
        assert_eq!(colour(1.0), "#08519c");
        assert_eq!(colour(-1.0), "#b35806");
        assert_eq!(colour(2.0), colour(1.0));
        let cell = |mean_rank| MapCell { column: 0, row: 0, score: 0.0, mean_rank, title: String::new() };
        let values = [1.0, 6.0, 11.0].map(|rank| Score::Rank.value(&cell(rank)));
        assert_eq!(values, [1.0, 0.0, -1.0]);
    }
}
