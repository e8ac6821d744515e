//! Pictures, each the text of an SVG. Charts with axes are drawn by `plotters` (the
//! host's `line_chart`); grids and squares of heads are written
//! element by element ([`svg`]), because their cells have tooltips.
pub(crate) mod grid;
pub(crate) mod heads;
pub(crate) mod panels;
pub(crate) mod phases;
mod svg;
