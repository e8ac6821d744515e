//! Texts of different lengths in the rows of one cache, for devices that take a token of all rows in one call.
//!
//! Kernels read each row's length, and a token lies at its position in the text. A text is copied into a free row in
//! place, so a captured graph stays valid. The cache begins small and grows when a text has no row or no room, and
//! shrinks when it is told to; the graph is then captured anew. Where no step takes the model, each text gets its own
//! cache back.
//!
//! A text that has ended may be kept in its row. A step takes the row as free, so that the text costs no time, and
//! writes its first entries over: these are copied before, and put back when the text goes on.
use super::KvCache;
use crate::LayerCache;
use sieve_ops::{DeviceBackend, RowsOf};

/// Rows and tokens of each that a cache begins with, or fewer where fewer are asked for. With four rows and more a step
/// multiplies by the kernels that whole rows take, so that more rows change no bit of a text.
const FIRST_SIZE: [usize; 2] = [8, 1024];

/// One cache with a row for each of several texts. Texts come and leave while the others are decoded.
#[derive(Debug)]
pub struct TextRows<B: DeviceBackend> {
    /// Its buffers have the rows of [`RowsOf::Texts`]; it has no layers before the first text.
    pub(crate) cache: KvCache<B>,
    rows: Vec<Row<B>>,
    /// Tokens that each row has room for.
    room: usize,
    /// Rows and tokens of each to begin with, and at most.
    least: [usize; 2],
    most: [usize; 2],
    device: B::Device,
}

/// What a row holds.
#[derive(Debug)]
enum Row<B: DeviceBackend> {
    Free,
    /// A text of so many tokens, which each step makes longer by one.
    Open(usize),
    /// A text of so many tokens that no step changes, and what steps overwrite of it, by layer.
    Kept(usize, Vec<LayerCache<B>>),
}

impl<B: DeviceBackend> Row<B> {
    /// Tokens of the row's text; 0 without one.
    fn tokens(&self) -> usize {
        match self {
            Self::Free => 0,
            Self::Open(tokens) | Self::Kept(tokens, _) => *tokens,
        }
    }
}

impl<B: DeviceBackend> TextRows<B> {
    /// Free rows for at most `num_rows` texts of at most `room` tokens each.
    pub fn new(num_rows: usize, room: usize, device: &B::Device) -> Self {
        let most = [num_rows, room];
        Self::beginning_with(FIRST_SIZE, most, device)
    }

    /// As [`new`](Self::new) for `most` texts and tokens, with another size to begin with.
    pub fn beginning_with(first: [usize; 2], most: [usize; 2], device: &B::Device) -> Self {
        let [num_rows, room] = [first[0].min(most[0]), first[1].min(most[1])];
        let (rows, least) = ((0..num_rows).map(|_| Row::Free).collect(), [num_rows, room]);
        Self { cache: KvCache::new(0), rows, room, least, most, device: device.clone() }
    }

    /// Number of rows that there are now.
    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// Tokens that each row has room for now.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Tokens of all rows that memory is held for.
    pub fn tokens_held(&self) -> usize {
        if self.cache.layers.is_empty() { 0 } else { self.rows.len() * self.room }
    }

    /// Whether one more text may be [put](Self::put) in.
    pub fn has_free(&self) -> bool {
        self.free_row().is_some() || self.rows.len() < self.most[0]
    }

    fn free_row(&self) -> Option<usize> {
        self.rows.iter().position(|row| matches!(row, Row::Free))
    }

    /// Moves a text into a free row and returns the row. `text` keeps only its number of tokens.
    ///
    /// Panics where [no row is left](Self::has_free), and for a text that is empty, that has a selector's cache or that
    /// has more tokens than a text may have.
    pub fn put(&mut self, text: &mut KvCache<B>) -> usize {
        let tokens = text.num_tokens;
        assert!((1..=self.most[1]).contains(&tokens), "a text has room in its row");
        let num_rows = match self.free_row() {
            Some(_) => self.rows.len(),
            None => (2 * self.rows.len()).min(self.most[0]),
        };
        assert!(self.has_free(), "a free row");
        self.grow(num_rows, tokens);
        let row = self.free_row().expect("a free row");
        if self.cache.layers.is_empty() {
            let texts = RowsOf::Texts { rows: self.rows.len(), tokens: self.room };
            self.cache.layers = text.layers.iter().map(|layer| layer.rows(texts)).collect();
        }
        for (rows, text) in self.cache.layers.iter_mut().zip(&text.layers) {
            put(rows, row, text, tokens);
        }
        self.rows[row] = Row::Open(tokens);
        *text = KvCache { num_tokens: tokens, ..KvCache::new(text.layers.len()) };
        row
    }

    /// Frees a row whose text has ended.
    pub fn free(&mut self, row: usize) {
        self.rows[row] = Row::Free;
    }

    /// Keeps the text of a row as it is: steps go on without it.
    ///
    /// Panics for a row without a text.
    pub fn keep(&mut self, row: usize) {
        let tokens = self.rows[row].tokens();
        assert!(tokens > 0, "a row with a text");
        let first = self.cache.layers.iter().map(|layer| layer.rows(RowsOf::First { row })).collect();
        self.rows[row] = Row::Kept(tokens, first);
    }

    /// Moves a row's text into a cache of its own.
    pub fn take(&mut self, row: usize) -> KvCache<B> {
        let held = std::mem::replace(&mut self.rows[row], Row::Free);
        let tokens = held.tokens();
        if let Row::Kept(_, first) = held {
            for (rows, first) in self.cache.layers.iter_mut().zip(&first) {
                put(rows, row, first, 1);
            }
        }
        let of_row = RowsOf::Text { row, tokens };
        let layers = self.cache.layers.iter().map(|layer| layer.rows(of_row)).collect();
        KvCache { layers, num_tokens: tokens, ..KvCache::new(0) }
    }

    /// Tokens of each row's text; 0 where a step takes the row as a text without earlier tokens: it is free, or its
    /// text is kept.
    pub(crate) fn lengths(&self) -> Vec<usize> {
        let length = |row: &Row<B>| match row {
            Row::Open(tokens) => *tokens,
            Row::Free | Row::Kept(..) => 0,
        };
        self.rows.iter().map(length).collect()
    }

    /// Counts the token that a step has written to each text.
    pub(crate) fn count_tokens(&mut self) {
        for row in &mut self.rows {
            if let Row::Open(tokens) = row {
                *tokens += 1;
            }
        }
    }

    /// Makes room for one more token of each text.
    ///
    /// Panics if a text has as many tokens as a text may have.
    pub(crate) fn make_room(&mut self) {
        let longest = self.lengths().into_iter().max().unwrap_or(0);
        assert!(longest < self.most[1], "a text fits in its row");
        self.grow(self.rows.len(), longest + 1);
    }

    /// Whether the texts would do with a quarter of the memory or less.
    pub fn is_roomy(&self) -> bool {
        let [num_rows, room] = self.needed();
        !self.cache.layers.is_empty() && 4 * num_rows * room <= self.rows.len() * self.room
    }

    /// The rows, and tokens of each, to which a cache grows for these texts.
    fn needed(&self) -> [usize; 2] {
        let texts = self.rows.iter().filter(|row| row.tokens() > 0);
        let tokens = texts.clone().map(|row| row.tokens() + 1).max().unwrap_or(0);
        [self.doubled(0, self.least[0], texts.count()), self.doubled(1, self.least[1], tokens)]
    }

    /// Twice the number of rows (`axis` 0) or tokens (1) until there are `wanted`, but not above the most.
    fn doubled(&self, axis: usize, mut size: usize, wanted: usize) -> usize {
        let most = self.most[axis];
        while size < wanted.min(most) {
            size = (2 * size).min(most);
        }
        size
    }

    /// Gives memory back that the texts do not need, all of it where there is no text. Returns the row that each row's
    /// text has now.
    pub fn shrink(&mut self) -> Vec<usize> {
        let used = self.rows.iter().map(|row| usize::from(row.tokens() > 0));
        let before = used.clone().scan(0, |before, used| {
            Some({
                let now = *before;
                *before += used;
                now
            })
        });
        let (now, size): (Vec<usize>, _) = (before.collect(), self.needed());
        if used.sum::<usize>() == 0 {
            *self = Self::beginning_with(self.least, self.most, &self.device);
            give_back::<B>(&self.device);
        } else {
            self.resize(size, &now);
        }
        now
    }

    /// Grows to `num_rows` rows, and to twice the room until `tokens` fit, but not above the most.
    fn grow(&mut self, num_rows: usize, tokens: usize) {
        let room = self.doubled(1, self.room, tokens);
        if (num_rows, room) != (self.rows.len(), self.room) {
            let same: Vec<usize> = (0..self.rows.len()).collect();
            self.resize([num_rows, room], &same);
        }
    }

    /// Gives the cache another size, in which the text of each row has row `now[row]`, in the same order. The memory of
    /// a layer's old rows is given back before the next layer follows.
    fn resize(&mut self, [num_rows, room]: [usize; 2], now: &[usize]) {
        // A captured step holds the buffers.
        self.cache.graph = Default::default();
        self.cache.scratch = Default::default();
        let size = RowsOf::Texts { rows: num_rows, tokens: room };
        let texts = self.rows.iter().map(Row::tokens).enumerate().filter(|(_, tokens)| *tokens > 0);
        let texts: Vec<_> = texts.collect();
        for layer in &mut self.cache.layers {
            let mut other = layer.rows(size);
            for &(row, tokens) in &texts {
                put(&mut other, now[row], &layer.rows(RowsOf::Text { row, tokens }), tokens);
            }
            *layer = other;
            give_back::<B>(&self.device);
        }
        let old = std::mem::take(&mut self.rows);
        self.rows.resize_with(num_rows, || Row::Free);
        for (row, &now) in old.into_iter().zip(now).filter(|(row, _)| row.tokens() > 0) {
            self.rows[now] = row;
        }
        self.room = room;
    }
}

/// Gives the memory of dropped buffers back.
fn give_back<B: DeviceBackend>(device: &B::Device) {
    // Copies that were begun may still read them.
    B::sync(device).unwrap_or_else(|error| panic!("{error}"));
    B::memory_cleanup(device);
}

/// Copies `text`, a cache of one row of `tokens` tokens, into row `row`.
fn put<B: DeviceBackend>(rows: &mut LayerCache<B>, row: usize, text: &LayerCache<B>, tokens: usize) {
    rows.as_cache_mut().expect("a text fills every cache").put(row, text, tokens);
}

#[cfg(test)]
mod tests;
