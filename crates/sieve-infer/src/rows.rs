//! Packs parts of several texts into the rows of one forward pass. Document bounds keep attention within each part.
//!
//! A prompt with several endings is processed once: `SharedPrompts` of sieve-nn repeats it only for the attention.
//! Decoding uses one cache for all rows, or one for each row.
use sieve_ops::IGNORE_LABEL;
use std::ops::Range;

/// Rows of one forward pass. `P` describes a prediction, for the caller that sums up the losses.
#[derive(Debug)]
pub struct Rows<P> {
    row_len: usize,
    max_rows: usize,
    /// Each row by itself, without padding.
    rows: Vec<PackedRows<P>>,
}

/// The rows, padded to equal length and concatenated.
#[derive(Debug, PartialEq, Eq)]
pub struct PackedRows<P> {
    /// Shape of the batch, `[rows, tokens of a row]`.
    pub shape: [usize; 2],
    /// Token ids of all rows.
    pub tokens: Vec<u32>,
    /// The token to predict after each input, or `IGNORE_LABEL`.
    pub labels: Vec<i32>,
    /// First position of the text that each token belongs to, within its row.
    pub start: Vec<u32>,
    /// Position after the text that each token belongs to, within its row.
    pub end: Vec<u32>,
    /// The description of each prediction, in the order of the labels that are not ignored.
    pub places: Vec<P>,
}

impl<P> PackedRows<P> {
    fn empty(shape: [usize; 2]) -> Self {
        Self { shape, tokens: Vec::new(), labels: Vec::new(), start: Vec::new(), end: Vec::new(), places: Vec::new() }
    }
}

impl<P: Copy> Rows<P> {
    /// No rows yet: at most `max_rows` of at most `row_len` tokens.
    pub fn new(row_len: usize, max_rows: usize) -> Self {
        Self { row_len, max_rows, rows: Vec::new() }
    }

    /// Adds the part `input` of the text `tokens` to the first row with enough room, or to a new row. `places`
    /// describes the prediction after each input from the position `first_scored` on; where it has none, nothing is
    /// predicted.
    /// Returns false if no row has room.
    pub fn push(
        &mut self,
        tokens: &[u32],
        input: Range<usize>,
        first_scored: usize,
        places: impl Iterator<Item = Option<P>>,
    ) -> bool {
        let len = input.len();
        let fits = |row: &PackedRows<P>| row.shape[1] + len <= self.row_len;
        let place = self.rows.iter().position(fits);
        if place.is_none() {
            // No row has room: the caller runs these rows first.
            if self.rows.len() == self.max_rows || len > self.row_len {
                return false;
            }
            self.rows.push(PackedRows::empty([1, 0]));
        }
        let place = place.unwrap_or(self.rows.len() - 1);
        let row = &mut self.rows[place];
        let start = row.shape[1] as u32;
        let end = start + len as u32;
        row.shape[1] += len;
        row.tokens.extend_from_slice(&tokens[input.clone()]);
        let mut places = places.fuse();
        for position in input {
            let place = (position >= first_scored).then(|| places.next()).flatten().flatten();
            row.labels.push(place.map_or(IGNORE_LABEL, |_| tokens[position + 1] as i32));
            row.places.extend(place);
        }
        row.start.extend(std::iter::repeat_n(start, len));
        row.end.extend(std::iter::repeat_n(end, len));
        true
    }

    /// Removes all rows.
    pub fn clear(&mut self) {
        self.rows.clear();
    }

    /// All rows, padded to the longest one; `None` without rows. Padding is a document of its own without labels.
    pub fn batch(&self) -> Option<PackedRows<P>> {
        let row_len = self.rows.iter().map(|row| row.shape[1]).max()?;
        let mut batch = PackedRows::empty([self.rows.len(), row_len]);
        for row in &self.rows {
            let filled = row.shape[1];
            let padding = row_len - filled;
            let pad = |values: &mut Vec<u32>, row: &[u32], value: u32| {
                values.extend_from_slice(row);
                values.extend(std::iter::repeat_n(value, padding));
            };
            pad(&mut batch.tokens, &row.tokens, 0);
            pad(&mut batch.start, &row.start, filled as u32);
            pad(&mut batch.end, &row.end, row_len as u32);
            batch.places.extend_from_slice(&row.places);
            batch.labels.extend_from_slice(&row.labels);
            batch.labels.extend(std::iter::repeat_n(IGNORE_LABEL, padding));
        }
        Some(batch)
    }
}
