//! The elements of an SVG, written one after the other.
use std::fmt::{Display, Write};

/// A picture on white in a sans-serif of 12 pixels.
pub(super) struct Svg(String);

impl Svg {
    /// Nothing but the white.
    pub(super) fn new(width: impl Display, height: impl Display) -> Self {
        Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        ))
    }

    /// Words at a place, with attributes such as `fill="#444"`.
    pub(super) fn text(&mut self, [x, y]: [f64; 2], attributes: &str, words: impl Display) {
        let words = escape(&words.to_string());
        self.put(&format!("<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{words}</text>"));
    }

    /// Words that are read from below, around their middle.
    pub(super) fn upright(&mut self, [x, y]: [f64; 2], attributes: &str, words: impl Display) {
        let turned = format!("text-anchor=\"middle\" transform=\"rotate(-90 {x:.1} {y:.1})\" {attributes}");
        self.text([x, y], &turned, words);
    }

    /// A rectangle from its corner, with its sides; `title` is shown to who points at it.
    pub(super) fn rect(&mut self, [x, y]: [f64; 2], [width, height]: [f64; 2], attributes: &str, title: &str) {
        let title = match title {
            "" => String::new(),
            title => format!("<title>{}</title>", escape(title)),
        };
        self.put(&format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" {attributes}>{title}</rect>"
        ));
    }

    /// Any element.
    pub(super) fn put(&mut self, element: &str) {
        let _ = writeln!(self.0, "{element}");
    }

    /// The whole picture.
    pub(super) fn end(self) -> String {
        self.0 + "</svg>\n"
    }
}

/// Text without the characters that XML gives a meaning.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
