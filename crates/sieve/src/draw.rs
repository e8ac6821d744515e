//! Pictures, each the text of an SVG. Charts with axes are drawn by `plotters`; grids and squares of heads are written
//! element by element ([`svg`]), because their cells have tooltips.
pub(crate) mod grid;
pub(crate) mod heads;
pub(crate) mod line_chart;
pub(crate) mod panels;
mod svg;
