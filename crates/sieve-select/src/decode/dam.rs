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
    num_sequences: Vec<usize>,
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
        Ok(Self { sums: vec![vec![0.0; n * n]; num_heads], num_sequences: vec![0; n], calibration })
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
        self.num_sequences[..n].iter_mut().for_each(|count| *count += 1);
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

    /// The map of a head with these sums of probabilities, `[capture, capture]`, without the rows that no sequence has.
    fn map(&self, sums: &[f64]) -> DamMap {
        let num_rows = self.num_sequences.iter().take_while(|&&count| count > 0).count();
        let rows = self.keys_of_rows(sums, num_rows);
        let [columns, offsets] = self.extended(&rows);
        DamMap { rows, columns, offsets }
    }

    /// The keys that are on in each row: the pairs with the largest mean probabilities, as many as `density` says, the
    /// sink, and each row's own key.
    fn keys_of_rows(&self, sums: &[f64], num_rows: usize) -> Vec<Vec<u32>> {
        let settings = &self.calibration;
        let pairs: Vec<(usize, usize)> = (0..num_rows).flat_map(|row| (0..=row).map(move |key| (row, key))).collect();
        let means = pairs.iter().map(|&(row, key)| {
            let sum = sums[row * settings.capture + key];
            sum / self.num_sequences[row] as f64
        });
        let scores = self.scores(means);
        let num_on = (settings.density * scores.len() as f64).ceil() as usize;
        let mut keys_of_rows = vec![Vec::new(); num_rows];
        for at in falling(&scores).into_iter().take(num_on) {
            let (row, key) = pairs[at];
            keys_of_rows[row].push(key as u32);
        }
        for (row, keys) in keys_of_rows.iter_mut().enumerate() {
            keys.extend(0..settings.sink.min(row) as u32);
            keys.push(row as u32);
            keys.sort_unstable();
            keys.dedup();
        }
        keys_of_rows
    }

    /// Mean probabilities after the Box-Cox transform, scaled to run from 0 to 1.
    fn scores(&self, means: impl Iterator<Item = f64>) -> Vec<f32> {
        let DamConfig { lambda, floor, .. } = self.calibration;
        let box_cox = |x: f64| if lambda == 0.0 { x.ln() } else { (x.powf(lambda) - 1.0) / lambda };
        let transformed: Vec<f64> = means.map(|mean| box_cox(mean.max(floor))).collect();
        let low = transformed.iter().copied().fold(f64::INFINITY, f64::min);
        let high = transformed.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let range = (high - low).max(f64::MIN_POSITIVE);
        transformed.iter().map(|x| ((x - low) / range) as f32).collect()
    }

    /// The columns and the distances that go on beyond the map: those that are on in at least the share `matching` of
    /// their rows.
    fn extended(&self, keys_of_rows: &[Vec<u32>]) -> [Vec<u32>; 2] {
        let num_rows = keys_of_rows.len();
        let is_on = |row: usize, key: usize| keys_of_rows[row].binary_search(&(key as u32)).is_ok();
        // A column begins at the row of its key, and a distance at the row that is so long.
        let extends = |first_row: usize, key_of: &dyn Fn(usize) -> usize| {
            let num_on = (first_row..num_rows).filter(|&row| is_on(row, key_of(row))).count();
            num_on as f64 >= self.calibration.matching * (num_rows - first_row) as f64
        };
        // Columns and distances with at most an eighth of the rows are left out: so few rows are no evidence.
        let enough_rows = 0..num_rows.saturating_sub(num_rows / 8);
        let columns = enough_rows.clone().filter(|&key| extends(key, &|_row| key));
        let offsets = enough_rows.filter(|&distance| extends(distance, &|row| row - distance));
        [columns.map(|key| key as u32).collect(), offsets.map(|distance| distance as u32).collect()]
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
    /// Refuses settings outside their ranges; `capture` is bounded because a map has that many rows squared.
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
            capture.num_sequences.fill(1);
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
