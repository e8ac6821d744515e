//! A square for each head of each layer, queries downwards and keys to the right, with axes and a legend, as an SVG.
use super::svg::Svg;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Contents of an SVG of attention heads.
pub(crate) struct Heads<'a> {
    pub(crate) title: String,
    /// A line in smaller letters below the title.
    pub(crate) about: String,
    /// Tokens along both axes.
    pub(crate) num_tokens: usize,
    /// Each layer's number with its heads. Layers go from top to bottom, heads from left to right.
    pub(crate) layers: Vec<(usize, Vec<Square>)>,
    pub(crate) legend: Legend<'a>,
}

/// A head as an 8-bit grey picture.
pub(crate) struct Square {
    /// Width and height in pixels.
    pub(crate) side: usize,
    /// Grey values, `[side, side]`, one row per query.
    pub(crate) pixels: Vec<u8>,
    /// Short lines that are written where keys are after their query, a dozen letters each.
    pub(crate) notes: Vec<String>,
}

/// What the grey levels mean.
pub(crate) enum Legend<'a> {
    /// A gradient from black to white, with (position from 0 at black to 1 at white, label).
    Scale(&'a [(f64, &'a str)]),
    /// Boxes of one grey each, with (grey, label).
    Boxes(&'a [(u8, &'a str)]),
}

/// Pixels divided among the squares of a layer, before [`SIDES`] bounds a side.
const WIDTH: f64 = 1024.0;
/// Least and largest side of a square, in pixels.
const SIDES: [f64; 2] = [132.0, 480.0];
/// Squares at least this wide also have a number in the middle of each axis.
const MIDDLE: f64 = 200.0;
const LEFT: f64 = 108.0;
const TOP: f64 = 88.0;
const GAP: f64 = 10.0;
/// Space below the squares, for the numbers and the name of the axis.
const FOOT: f64 = 44.0;
const LEGEND_WIDTH: f64 = 150.0;
/// SVG attribute of a centred text.
const CENTRED: &str = "text-anchor=\"middle\"";

impl Heads<'_> {
    /// The picture as SVG text.
    pub(crate) fn svg(&self) -> String {
        let heads = self.layers.iter().map(|(_, heads)| heads.len()).max().unwrap_or(0);
        let side = (WIDTH / heads.max(1) as f64).floor().clamp(SIDES[0], SIDES[1]);
        let place = |n: usize| n as f64 * (side + GAP);
        let right = LEFT + place(heads);
        // No font needs more than 9 pixels a letter for the title and 7 for the smaller line below it.
        let letters = [(&self.title, 9), (&self.about, 7)].map(|(text, width)| width * text.chars().count());
        let width = (right + LEGEND_WIDTH).max(40.0 + letters[0].max(letters[1]) as f64);
        let bottom = TOP + place(self.layers.len());
        let mut svg = Svg::new(width, bottom + FOOT);
        svg.text([20.0, 26.0], "font-size=\"16\"", &self.title);
        svg.text([20.0, 46.0], "fill=\"#444\"", &self.about);
        for head in 0..heads {
            let x = LEFT + place(head);
            svg.text([x + side / 2.0, TOP - 8.0], CENTRED, format!("head {head}"));
            for (share, text) in self.numbers(side) {
                let anchor = ["start", "middle", "end"][(2.0 * share) as usize];
                let attributes = format!("text-anchor=\"{anchor}\" font-size=\"10\"");
                svg.text([x + share * side, bottom - GAP + 14.0], &attributes, text);
            }
            svg.text([x + side / 2.0, bottom - GAP + 30.0], CENTRED, "key, token");
        }
        for (row, (layer, squares)) in self.layers.iter().enumerate() {
            let y = TOP + place(row);
            svg.upright([20.0, y + side / 2.0], "", format!("layer {layer}"));
            svg.upright([44.0, y + side / 2.0], "", "query, token");
            for (share, text) in self.numbers(side) {
                // A text's y is its baseline: 9 pixels lower at the upper end, so that the number stays inside the
                // axis.
                let y = y + share * side + 9.0 * (1.0 - share);
                svg.text([LEFT - 6.0, y], "text-anchor=\"end\" font-size=\"10\"", text);
            }
            for (column, square) in squares.iter().enumerate() {
                draw(&mut svg, square, [LEFT + place(column), y], side);
            }
        }
        self.legend.draw(&mut svg, right + 10.0);
        svg.end()
    }

    /// The numbers on an axis: (position from 0 to 1 along it, token).
    fn numbers(&self, side: f64) -> Vec<(f64, usize)> {
        let all = [(0.0, 0), (0.5, self.num_tokens / 2), (1.0, self.num_tokens)];
        let has_room = |(share, _): &(f64, usize)| *share != 0.5 || side >= MIDDLE;
        all.into_iter().filter(has_room).collect()
    }
}

impl Legend<'_> {
    /// Draws the legend with its left edge at `x`.
    fn draw(&self, svg: &mut Svg, x: f64) {
        const HEIGHT: f64 = 132.0;
        const SMALL: &str = "font-size=\"11\"";
        match self {
            Self::Scale(labels) => {
                svg.put(
                    "<linearGradient id=\"scale\" x1=\"0\" y1=\"0\" x2=\"0\" y2=\"1\"><stop stop-color=\"black\"/>\
                     <stop offset=\"1\" stop-color=\"white\"/></linearGradient>",
                );
                svg.rect([x, TOP], [14.0, HEIGHT], "fill=\"url(#scale)\" stroke=\"#999\"", "");
                for (share, label) in *labels {
                    svg.text([x + 20.0, TOP + share * HEIGHT + 4.0], SMALL, label);
                }
            }
            Self::Boxes(boxes) => {
                for (n, (grey, label)) in boxes.iter().enumerate() {
                    let y = TOP + 22.0 * n as f64;
                    let fill = format!("fill=\"rgb({grey},{grey},{grey})\" stroke=\"#999\"");
                    svg.rect([x, y], [14.0, 14.0], &fill, "");
                    svg.text([x + 20.0, y + 11.0], SMALL, label);
                }
            }
        }
    }
}

/// Draws the square of one head with its notes, its upper left corner at `x`, `y`.
fn draw(svg: &mut Svg, square: &Square, [x, y]: [f64; 2], side: f64) {
    // A picture with fewer pixels than the side is drawn with sharp squares; a larger one is smoothed.
    let style = if (square.side as f64) < side { " style=\"image-rendering:pixelated\"" } else { "" };
    svg.put(&format!(
        "<image x=\"{x}\" y=\"{y}\" width=\"{side}\" height=\"{side}\" preserveAspectRatio=\"none\"{style} \
         href=\"data:image/png;base64,{}\"/>",
        STANDARD.encode(png(square))
    ));
    svg.rect([x, y], [side, side], "fill=\"none\" stroke=\"#999\"", "");
    for (n, note) in square.notes.iter().enumerate() {
        let at = [x + side - 4.0, y + 13.0 + 12.0 * n as f64];
        // A white edge, for squares that are black there.
        let look = "text-anchor=\"end\" font-size=\"10\" stroke=\"white\" stroke-width=\"3\" paint-order=\"stroke\"";
        svg.text(at, look, note);
    }
}

/// A head's picture as a PNG file in 8-bit grey.
fn png(square: &Square) -> Vec<u8> {
    let mut png = Vec::new();
    let mut encoder = png::Encoder::new(&mut png, square.side as u32, square.side as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Eight);
    let written = encoder.write_header().and_then(|mut writer| writer.write_image_data(&square.pixels));
    written.expect("memory takes a picture of at least one pixel");
    png
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The `x` of every text, and how far it reaches at eight pixels a letter.
    fn reach(svg: &str) -> f64 {
        let texts = svg.split("<text ").skip(1).filter(|text| !text.contains("rotate"));
        let ends = texts.map(|text| {
            let x = text.split("x=\"").nth(1).and_then(|rest| rest.split('"').next());
            let x: f64 = x.and_then(|x| x.parse().ok()).expect("a place");
            let words = text.split('>').nth(1).and_then(|rest| rest.split('<').next());
            let width = 8.0 * words.expect("words").chars().count() as f64;
            match text {
                _ if text.contains("\"end\"") => x,
                _ if text.contains("\"middle\"") => x + width / 2.0,
                _ => x + width,
            }
        });
        ends.fold(0.0, f64::max)
    }

    #[test]
    fn nothing_is_cut_off_and_axes_have_names_and_numbers() {
        for (heads, layers, num_tokens) in [(1, 1, 4), (2, 3, 256), (16, 2, 131_072)] {
            let square = |_| Square { side: 2, pixels: vec![0, 255, 0, 0], notes: vec!["reads 9 %".to_owned()] };
            let picture = Heads {
                title: "A title that is longer than one small square is wide".to_owned(),
                about: "and & a line".to_owned(),
                num_tokens,
                layers: (0..layers).map(|layer| (layer, (0..heads).map(square).collect())).collect(),
                legend: Legend::Boxes(&[(0, "kept"), (200, "after the query")]),
            };
            let svg = picture.svg();
            let width = svg.split("width=\"").nth(1).and_then(|rest| rest.split('"').next());
            let width: f64 = width.and_then(|width| width.parse().ok()).expect("a width");
            assert!(reach(&svg) <= width, "{heads} heads: {} of {width}", reach(&svg));
            assert_eq!(svg.matches("<image").count(), heads * layers);
            assert_eq!(svg.matches(">key, token<").count(), heads);
            assert_eq!(svg.matches(">query, token<").count(), layers);
            assert_eq!(svg.matches(&format!(">{num_tokens}<")).count(), heads + layers);
            assert!(svg.contains("and &amp; a line") && svg.contains(">after the query<"));
            assert_eq!(svg.matches(">reads 9 %<").count(), heads * layers);
        }
    }
}
