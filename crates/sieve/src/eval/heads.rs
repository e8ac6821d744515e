//! A square for each head of each layer, queries downwards and keys to the right, with axes and a legend, as an SVG.
use crate::eval::output::escape;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::fmt::Write;

/// What is drawn.
pub(super) struct Heads<'a> {
    pub(super) title: String,
    /// In smaller letters below the title.
    pub(super) about: String,
    /// Tokens from end to end of both axes.
    pub(super) num_tokens: usize,
    /// Layers by number, from top to bottom, with their heads from left to right.
    pub(super) layers: Vec<(usize, Vec<Square>)>,
    pub(super) legend: Legend<'a>,
}

/// A head as an 8-bit grey picture.
pub(super) struct Square {
    /// Pixels of a side.
    pub(super) side: usize,
    /// Row by row.
    pub(super) pixels: Vec<u8>,
}

/// What the greys mean.
pub(super) enum Legend<'a> {
    /// From black to white: labels by their share of the way.
    Scale(&'a [(f64, &'a str)]),
    /// Greys that stand for something each.
    Boxes(&'a [(u8, &'a str)]),
}

/// Pixels of all squares of a layer together, where each then has a side between these.
const WIDTH: usize = 1024;
const SIDES: [usize; 2] = [132, 480];
/// Squares with longer sides have a number in the middle of each axis.
const MIDDLE: usize = 200;
const LEFT: usize = 108;
const TOP: usize = 88;
const GAP: usize = 10;
/// Below the squares, for numbers and the name of the axis.
const FOOT: usize = 44;
const LEGEND_WIDTH: usize = 150;

impl Heads<'_> {
    /// The picture.
    pub(super) fn svg(&self) -> String {
        let heads = self.layers.iter().map(|(_, heads)| heads.len()).max().unwrap_or(0);
        let side = (WIDTH / heads.max(1)).clamp(SIDES[0], SIDES[1]);
        let right = LEFT + heads * (side + GAP);
        // Nine pixels a letter of the title and seven of the line below it are enough for every font.
        let letters = [(&self.title, 9), (&self.about, 7)].map(|(text, width)| width * text.chars().count());
        let width = (right + LEGEND_WIDTH).max(40 + letters[0].max(letters[1]));
        let height = TOP + self.layers.len() * (side + GAP) + FOOT;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\
             <text x=\"20\" y=\"26\" font-size=\"16\">{}</text><text x=\"20\" y=\"46\" fill=\"#444\">{}</text>\n",
            escape(&self.title),
            escape(&self.about)
        );
        for head in 0..heads {
            let x = LEFT + head * (side + GAP) + side / 2;
            let y = TOP - 8;
            let _ = writeln!(
                svg,
                "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">head {head}</text>"
            );
        }
        for (row, (layer, squares)) in self.layers.iter().enumerate() {
            let y = TOP + row * (side + GAP);
            upright(&mut svg, [20, y + side / 2], &format!("layer {layer}"));
            upright(&mut svg, [44, y + side / 2], "query, token");
            self.numbers(side, |share, text| {
                // The letters hang from the upper end and stand on the lower one.
                let y = y as f64 + share * side as f64 + 9.0 * (1.0 - share);
                let x = LEFT - 6;
                let _ = writeln!(
                    svg,
                    "<text x=\"{x}\" y=\"{y:.0}\" text-anchor=\"end\" font-size=\"10\">{text}</text>"
                );
            });
            for (column, square) in squares.iter().enumerate() {
                draw(&mut svg, square, [LEFT + column * (side + GAP), y], side);
            }
        }
        let bottom = TOP + self.layers.len() * (side + GAP) - GAP;
        for head in 0..heads {
            let x = LEFT + head * (side + GAP);
            self.numbers(side, |share, text| {
                let anchor = match share {
                    0.0 => "start",
                    1.0 => "end",
                    _ => "middle",
                };
                let (x, y) = (x as f64 + share * side as f64, bottom + 14);
                let _ = writeln!(
                    svg,
                    "<text x=\"{x:.0}\" y=\"{y}\" text-anchor=\"{anchor}\" font-size=\"10\">{text}</text>"
                );
            });
            let (x, y) = (x + side / 2, bottom + 30);
            let _ = writeln!(
                svg,
                "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">key, token</text>"
            );
        }
        self.legend.draw(&mut svg, right + 10);
        svg + "</svg>\n"
    }

    /// The numbers of an axis, by their share of its length.
    fn numbers(&self, side: usize, mut put: impl FnMut(f64, usize)) {
        put(0.0, 0);
        if side >= MIDDLE {
            put(0.5, self.num_tokens / 2);
        }
        put(1.0, self.num_tokens);
    }
}

impl Legend<'_> {
    fn draw(&self, svg: &mut String, x: usize) {
        const HEIGHT: usize = 132;
        match self {
            Self::Scale(labels) => {
                let _ = writeln!(
                    svg,
                    "<linearGradient id=\"scale\" x1=\"0\" y1=\"0\" x2=\"0\" y2=\"1\"><stop stop-color=\"black\"/>\
                     <stop offset=\"1\" stop-color=\"white\"/></linearGradient><rect x=\"{x}\" y=\"{TOP}\" \
                     width=\"14\" height=\"{HEIGHT}\" fill=\"url(#scale)\" stroke=\"#999\"/>"
                );
                for (share, label) in *labels {
                    let (x, y) = (x + 20, TOP as f64 + share * HEIGHT as f64 + 4.0);
                    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y:.0}\" font-size=\"11\">{label}</text>");
                }
            }
            Self::Boxes(boxes) => {
                for (n, (grey, label)) in boxes.iter().enumerate() {
                    let y = TOP + 22 * n;
                    let _ = writeln!(
                        svg,
                        "<rect x=\"{x}\" y=\"{y}\" width=\"14\" height=\"14\" fill=\"rgb({grey},{grey},{grey})\" \
                         stroke=\"#999\"/><text x=\"{}\" y=\"{}\" font-size=\"11\">{label}</text>",
                        x + 20,
                        y + 11
                    );
                }
            }
        }
    }
}

/// Text that is read from below, around its middle.
fn upright(svg: &mut String, [x, y]: [usize; 2], text: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" transform=\"rotate(-90 {x} {y})\">{text}</text>"
    );
}

fn draw(svg: &mut String, square: &Square, [x, y]: [usize; 2], side: usize) {
    // Few pixels stay squares; many are averaged where there is no room for each.
    let style = match square.side < side {
        true => " style=\"image-rendering:pixelated\"",
        false => "",
    };
    let _ = writeln!(
        svg,
        "<image x=\"{x}\" y=\"{y}\" width=\"{side}\" height=\"{side}\" preserveAspectRatio=\"none\"{style} \
         href=\"data:image/png;base64,{}\"/><rect x=\"{x}\" y=\"{y}\" width=\"{side}\" height=\"{side}\" fill=\"none\" \
         stroke=\"#999\"/>",
        STANDARD.encode(png(square))
    );
}

/// An 8-bit grey PNG.
fn png(square: &Square) -> Vec<u8> {
    let mut png = Vec::new();
    let mut encoder = png::Encoder::new(&mut png, square.side as u32, square.side as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Eight);
    let written = encoder
        .write_header()
        .and_then(|mut writer| writer.write_image_data(&square.pixels));
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
            let square = |_| Square {
                side: 2,
                pixels: vec![0, 255, 0, 0],
            };
            let picture = Heads {
                title: "A title that is longer than one small square is wide".to_owned(),
                about: "and & a line".to_owned(),
                num_tokens,
                layers: (0..layers)
                    .map(|layer| (layer, (0..heads).map(square).collect()))
                    .collect(),
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
        }
    }
}
