//! Texts of different lengths in the rows of one cache, for devices that take a token of all rows in one call.
//!
//! The cache has a fixed size. Kernels read each row's length, and a token lies at its position in the text. A text
//! is copied into a free row in place, so a captured graph stays valid. Where no step takes the model, each text
//! gets its own cache back.
use super::KvCache;
use sieve_ops::{DeviceBackend, RowsOf};

/// One cache with a row for each of several texts. Texts come and leave while the others are decoded: the buffers have
/// room for every text from the beginning, so that a captured step stays valid.
#[derive(Debug)]
pub struct TextRows<B: DeviceBackend> {
    /// Its buffers have the rows of [`RowsOf::Texts`]; it has no layers before the first text.
    pub(crate) cache: KvCache<B>,
    /// Tokens of each row's text; 0: the row is free, and a step takes it as a text without earlier tokens.
    pub(crate) lengths: Vec<usize>,
    room: usize,
}

impl<B: DeviceBackend> TextRows<B> {
    /// Free rows for `num_rows` texts of at most `room` tokens each.
    pub fn new(num_rows: usize, room: usize) -> Self {
        Self { cache: KvCache::new(0), lengths: vec![0; num_rows], room }
    }

    /// Number of rows, one for each text.
    pub fn num_rows(&self) -> usize {
        self.lengths.len()
    }

    /// Moves a text into a free row and returns the row. `text` keeps only its number of tokens.
    ///
    /// Panics without a free row, and for a text that is empty, that has a selector's cache or that has no room left.
    pub fn put(&mut self, text: &mut KvCache<B>) -> usize {
        let tokens = text.num_tokens;
        assert!((1..=self.room).contains(&tokens), "a text has room in its row");
        let row = self.lengths.iter().position(|&length| length == 0);
        let row = row.expect("a free row");
        let (rows, room) = (self.num_rows(), self.room);
        if self.cache.layers.is_empty() {
            let texts = RowsOf::Texts { rows, tokens: room };
            self.cache.layers = text.layers.iter().map(|layer| layer.rows(texts)).collect();
        }
        for (rows, text) in self.cache.layers.iter_mut().zip(&text.layers) {
            let rows = rows.as_cache_mut().expect("a text fills every cache");
            rows.put(row, text, tokens);
        }
        self.lengths[row] = tokens;
        *text = KvCache { num_tokens: tokens, ..KvCache::new(text.layers.len()) };
        row
    }

    /// Frees a row whose text has ended.
    pub fn free(&mut self, row: usize) {
        self.lengths[row] = 0;
    }

    /// Moves a row's text into a cache of its own.
    pub fn take(&mut self, row: usize) -> KvCache<B> {
        let tokens = std::mem::take(&mut self.lengths[row]);
        let of_row = RowsOf::Text { row, tokens };
        let layers = self.cache.layers.iter().map(|layer| layer.rows(of_row)).collect();
        KvCache { layers, num_tokens: tokens, ..KvCache::new(0) }
    }

    /// Counts the token that a step has written to each text.
    pub(crate) fn count_tokens(&mut self) {
        for length in self.lengths.iter_mut().filter(|length| **length > 0) {
            *length += 1;
        }
    }

    /// Whether each text has room for one more token.
    pub(crate) fn have_room(&self) -> bool {
        self.lengths.iter().all(|&length| length < self.room)
    }
}
