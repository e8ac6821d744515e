//! A writer of SVG elements.
use std::fmt::{Display, Write};

/// An SVG on a white background, with texts in a sans-serif font of 12 pixels.
pub(super) struct Svg(String);

impl Svg {
    /// A picture without elements, of this size.
    pub(super) fn new(width: impl Display, height: impl Display) -> Self {
        Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        ))
    }

    /// Adds a text at a place, with attributes such as `fill="#444"`.
    pub(super) fn text(&mut self, [x, y]: [f64; 2], attributes: &str, words: impl Display) {
        let words = escape(&words.to_string());
        self.put(&format!("<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{words}</text>"));
    }

    /// Adds a text turned by 90 degrees to the left, centred on a place.
    pub(super) fn upright(&mut self, [x, y]: [f64; 2], attributes: &str, words: impl Display) {
        let turned = format!("text-anchor=\"middle\" transform=\"rotate(-90 {x:.1} {y:.1})\" {attributes}");
        self.text([x, y], &turned, words);
    }

    /// Adds a rectangle by its upper left corner and its sides. `title` is its tooltip.
    pub(super) fn rect(&mut self, [x, y]: [f64; 2], [width, height]: [f64; 2], attributes: &str, title: &str) {
        let title = match title {
            "" => String::new(),
            title => format!("<title>{}</title>", escape(title)),
        };
        self.put(&format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" {attributes}>{title}</rect>"
        ));
    }

    /// Adds an SVG element.
    pub(super) fn put(&mut self, element: &str) {
        let _ = writeln!(self.0, "{element}");
    }

    /// Ends the picture and returns its SVG text.
    pub(super) fn end(self) -> String {
        self.0 + "</svg>\n"
    }
}

/// `text` with XML's special characters escaped.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
