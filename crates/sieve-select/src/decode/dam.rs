//! DAM (arXiv:2506.11104), as its overview describes it: a map per head from a calibration run, extended beyond the
//! calibrated length by its columns and diagonals. The paper leaves details open; results are for this interpretation.
//!
//! Maps of a calibration on other texts come from a file. Without one a text calibrates itself: its first `capture`
//! tokens are read densely, and the map they give is extended over the rest.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::cache::{Cache, LayerShape, RowAttention, ascending};
use crate::error::read_json;
use crate::keep::falling;
use crate::pool::causal_probabilities;
use crate::prelude::*;

settings! {
    /// Settings of the decode method `dam`.
    pub struct DamConfig {
        /// File with the maps of a calibration run; empty: each text calibrates itself, by the settings below.
        pub map: String = String::new(),
        /// The parsed maps of that file.
        #[serde(skip)]
        pub maps: Option<DamMaps> = None,
        /// Longest sequence of the calibration, side of the maps.
        pub capture: usize = 512,
        /// Share of causal pairs that are on.
        pub density: f64 = 0.25,
        /// Exponent of the Box-Cox transform. The transform keeps the order of scores, so it only changes ties.
        pub lambda: f64 = 0.5,
        /// Smallest value of a mean probability; lower means are raised to it.
        pub floor: f64 = 1e-6,
        /// A column or diagonal is extended beyond the map if it is on in at least this share of its rows.
        pub matching: f64 = 0.8,
        /// First keys of the text that are always attended.
        pub sink: usize = 4,
    }
}

/// Maps of all layers and query heads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DamMaps {
    /// A map for each layer and query head, `[layers][query heads]`.
    pub layers: Vec<Vec<DamMap>>,
}

/// The attention map of one query head.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DamMap {
    /// Keys that are on in each row, ascending.
    pub rows: Vec<Vec<u32>>,
    /// Columns that are on beyond the map, ascending.
    pub columns: Vec<u32>,
    /// Distances that are on beyond the map, ascending; 0 is the token itself.
    pub offsets: Vec<u32>,
}

/// Sums of the attention probabilities of calibration sequences, per query head of one layer.
#[derive(Clone, Debug)]
pub struct DamCapture {
    calibration: DamConfig,
    /// Sums of probabilities of each query head, `[heads][capture, capture]`.
    sums: Vec<Vec<f64>>,
    /// Number of sequences that have each row, `[capture]`.
    rows: Vec<usize>,
}

/// Side of the largest map: 128 MiB of sums a head.
const MAX_CAPTURE: usize = 4096;

impl DamCapture {
    /// A capture without sequences.
    ///
    /// # Errors
    /// Values outside their ranges.
    pub fn new(calibration: DamConfig, num_heads: usize) -> Result<Self, SelectError> {
        calibration.check()?;
        let n = calibration.capture;
        Ok(Self { sums: vec![vec![0.0; n * n]; num_heads], rows: vec![0; n], calibration })
    }

    /// Adds a sequence of one layer; tokens past the capture length are left out.
    ///
    /// # Errors
    /// A call with context, or of another number of heads.
    pub fn add(&mut self, call: &Call<'_>) -> Result<(), SelectError> {
        if call.shape.context() > 0 || call.shape.num_heads != self.sums.len() {
            let problem = format!(
                "calibration takes whole sequences of {} heads, got {} heads and a context of {}",
                self.sums.len(),
                call.shape.num_heads,
                call.shape.context()
            );
            let hint = "run one layer's sequences from token 0 through one capture";
            return Err(SelectError::refused(problem, hint));
        }
        let n = call.shape.num_queries.min(self.calibration.capture);
        self.add_rows(call, n);
        self.rows[..n].iter_mut().for_each(|rows| *rows += 1);
        Ok(())
    }

    /// Adds the first `n` rows of all heads; a head with NaN is left out.
    fn add_rows(&mut self, call: &Call<'_>, n: usize) {
        for head in 0..self.sums.len() {
            let Some(p) = causal_probabilities(call, head, 0..n) else {
                continue;
            };
            for (row, p) in p.chunks_exact(n.max(1)).enumerate() {
                self.add_row(head, row, &p[..=row]);
            }
        }
    }

    /// Adds one row of one head: a token's probabilities over the keys up to itself.
    fn add_row(&mut self, head: usize, row: usize, p: &[f32]) {
        let at = row * self.calibration.capture;
        let sums = &mut self.sums[head][at..at + p.len()];
        sums.iter_mut().zip(p).for_each(|(sum, &p)| *sum += f64::from(p));
    }

    /// The calibrated maps of the layer's query heads.
    pub fn maps(&self) -> Vec<DamMap> {
        self.sums.iter().map(|sums| self.map(sums)).collect()
    }

    /// The map of a head with these sums of probabilities, `[capture, capture]`. The pairs with the largest means are
    /// on, as many as `density` says, and so are the sink and each row's own key. Columns and distances that are on in
    /// enough rows are extended.
    fn map(&self, sums: &[f64]) -> DamMap {
        let (side, settings) = (self.calibration.capture, &self.calibration);
        let n = self.rows.iter().take_while(|&&rows| rows > 0).count();
        let box_cox = |x: f64| {
            if settings.lambda == 0.0 { x.ln() } else { (x.powf(settings.lambda) - 1.0) / settings.lambda }
        };
        let pairs: Vec<(usize, usize)> = (0..n).flat_map(|i| (0..=i).map(move |j| (i, j))).collect();
        let transformed: Vec<f64> = pairs
            .iter()
            .map(|&(i, j)| box_cox((sums[i * side + j] / self.rows[i] as f64).max(settings.floor)))
            .collect();
        let (low, high) =
            transformed.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &x| (low.min(x), high.max(x)));
        let scaled: Vec<f32> =
            transformed.iter().map(|x| ((x - low) / (high - low).max(f64::MIN_POSITIVE)) as f32).collect();
        let wanted = (settings.density * scaled.len() as f64).ceil() as usize;
        let mut rows: Vec<Vec<u32>> = vec![Vec::new(); n];
        for at in falling(&scaled).into_iter().take(wanted) {
            let (i, j) = pairs[at];
            rows[i].push(j as u32);
        }
        for (i, row) in rows.iter_mut().enumerate() {
            row.extend(0..settings.sink.min(i) as u32);
            row.push(i as u32);
            row.sort_unstable();
            row.dedup();
        }
        let on = |i: usize, j: usize| rows[i].binary_search(&(j as u32)).is_ok();
        let enough = |on: usize, rows: usize| on as f64 >= settings.matching * rows as f64;
        let columns = (0..n).filter(|&j| enough((j..n).filter(|&i| on(i, j)).count(), n - j));
        let offsets = (0..n).filter(|&o| enough((o..n).filter(|&i| on(i, i - o)).count(), n - o));
        // Columns and distances with at most an eighth of the rows are left out: so few rows are no evidence.
        let limit = n.saturating_sub(n / 8);
        DamMap {
            columns: columns.filter(|&j| j < limit).map(|j| j as u32).collect(),
            offsets: offsets.filter(|&o| o < limit).map(|o| o as u32).collect(),
            rows: rows.clone(),
        }
    }
}

impl DamMap {
    /// Checks a map from a file. An error describes the fault: a key after its row, keys that do not ascend, a column
    /// or distance outside the rows.
    fn check(&self) -> Result<(), String> {
        let ascends = |keys: &[u32]| keys.windows(2).all(|pair| pair[0] < pair[1]);
        for (at, row) in self.rows.iter().enumerate() {
            if !ascends(row) || row.last().is_some_and(|&key| key as usize > at) {
                return Err(format!("row {at} has keys that do not ascend to {at} at most"));
            }
        }
        let rows = self.rows.len();
        for (name, keys) in [("columns", &self.columns), ("offsets", &self.offsets)] {
            if !ascends(keys) || keys.last().is_some_and(|&key| key as usize >= rows) {
                return Err(format!("{name} do not ascend below the number of rows, {rows}"));
            }
        }
        Ok(())
    }

    /// Keys that the token at `position` reads, ascending. `sink`: first keys that are read beyond the map.
    pub fn keys(&self, position: usize, sink: usize) -> Vec<u32> {
        if let Some(row) = self.rows.get(position) {
            return row.clone();
        }
        let columns = self.columns.iter().map(|&j| j as usize);
        let diagonals = self.offsets.iter().map(|&o| position - o as usize);
        ascending(columns.chain(diagonals).chain(0..sink.min(position)).chain([position]))
    }
}

impl DamMaps {
    /// Reads a file written by [`write`](Self::write).
    ///
    /// # Errors
    /// A file that cannot be read or holds something else.
    pub fn read(path: &Path) -> Result<Self, SelectError> {
        let maps: Self = read_json(path, MAPS)?;
        for (layer, heads) in maps.layers.iter().enumerate() {
            for (head, map) in heads.iter().enumerate() {
                map.check().map_err(|fault| {
                    let problem = format!("layer {layer}, head {head}: {fault}");
                    SelectError::file(path, MAPS, problem)
                })?;
            }
        }
        Ok(maps)
    }

    /// Writes the maps as JSON.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), SelectError> {
        let text = serde_json::to_string(self).expect("plain data serialises");
        std::fs::write(path, text).map_err(|error| SelectError::file(path, MAPS, error))
    }
}

/// Hint of errors about a file of maps.
const MAPS: &str = "sieve eval patterns --method dam writes the maps of a calibration run";

impl DamConfig {
    pub(crate) fn check(&self) -> Result<(), SelectError> {
        let rules = Rules("dam");
        rules.positive("capture", self.capture)?;
        if self.capture > MAX_CAPTURE {
            return rules.fail(
                format!("capture={} asks for maps of so many rows squared", self.capture),
                format!("give capture at most {MAX_CAPTURE}"),
            );
        }
        rules.share("density", self.density)?;
        rules.share("matching", self.matching)?;
        rules.above_zero("floor", self.floor, "give a small positive floor")
    }
}

/// State of the decode method `dam` in one layer.
#[derive(Clone, Debug)]
pub(crate) struct Dam {
    sink: usize,
    source: Source,
}

/// Where the maps of the layer come from.
#[derive(Clone, Debug)]
enum Source {
    /// Maps calibrated beforehand, one for each query head.
    Maps(Vec<DamMap>),
    /// The text's own first `capture` tokens, which are still being added.
    Text(DamCapture),
}

impl Dam {
    /// The state before the first token. Maps of another number of heads are refused.
    pub(crate) fn new(config: &DamConfig, shape: LayerShape) -> Result<Self, SelectError> {
        // Without a file the text calibrates itself.
        let Some(maps) = &config.maps else {
            let capture = DamCapture::new(config.clone(), shape.num_heads)?;
            return Ok(Self { sink: config.sink, source: Source::Text(capture) });
        };
        let maps = maps.layers.get(shape.layer).cloned().unwrap_or_default();
        if maps.len() != shape.num_heads {
            return Rules("dam").fail(
                format!(
                    "the maps of layer {} are of {} heads, the model has {}",
                    shape.layer,
                    maps.len(),
                    shape.num_heads
                ),
                "calibrate on this model",
            );
        }
        Ok(Self { sink: config.sink, source: Source::Maps(maps) })
    }

    /// Adds the first rows of a prompt, if the text calibrates itself.
    pub(crate) fn prompt(&mut self, call: &Call<'_>) {
        if let Source::Text(capture) = &mut self.source {
            let n = call.shape.num_queries.min(capture.calibration.capture);
            capture.add_rows(call, n);
        }
    }

    /// The keys that the newest token reads, a list for each query head; all keys while the text calibrates itself.
    pub(crate) fn choose(&mut self, cache: &Cache) -> Vec<Vec<u32>> {
        let position = cache.len - 1;
        if let Source::Text(capture) = &mut self.source
            && position >= capture.calibration.capture
        {
            // The text is the one sequence of its calibration, and has filled every row.
            capture.rows.fill(1);
            self.source = Source::Maps(capture.maps());
        }
        match &self.source {
            Source::Maps(maps) => maps.iter().map(|map| map.keys(position, self.sink)).collect(),
            Source::Text(_) => vec![(0..cache.len as u32).collect(); cache.shape.num_heads],
        }
    }

    /// Adds the newest token's attention, while the text calibrates itself.
    pub(crate) fn after(&mut self, cache: &Cache, rows: &[RowAttention]) {
        if let Source::Text(capture) = &mut self.source {
            for (head, row) in rows.iter().enumerate() {
                capture.add_row(head, cache.len - 1, &row.p);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dam_rows_beyond_the_map_have_columns_distances_sink_and_themselves() {
        let map = DamMap { rows: vec![vec![0], vec![1]], columns: vec![5], offsets: vec![2, 4] };
        assert_eq!(map.keys(1, 3), [1]);
        assert_eq!(map.keys(10, 3), [0, 1, 2, 5, 6, 8, 10]);
    }
}
