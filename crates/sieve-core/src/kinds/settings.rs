//! What a kind's keys in a recipe mean: the defaults that follow from other values, the published form, the rules.

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use crate::keys::{Section, choices, value_of};
use crate::recipe::{ModelSection, Rules};

choices! {
    /// Sets several keys of a kind at once.
    #[derive(Hash)]
    pub enum AttentionPreset {
        /// The values of the paper that describes the kind.
        Paper = "paper",
    }
}

/// The default of a window, in words.
pub(crate) const A_QUARTER_OF_THE_ROW: &str = "a quarter of `training.seq_len`";

/// The keys of a kind in a recipe.
pub(crate) trait Settings: Section + Sized {
    /// The published form, for heads of width `head_dim`. A size that the paper does not give has any value; so have
    /// all of a kind without a published form.
    fn example(head_dim: usize) -> Self;

    /// Writes out the keys of a recipe's table that follow from others.
    fn resolve(table: &mut Table, sizes: Sizes);

    /// Checks the rules between the values. `model` is `None` where `[model]` could not be read.
    fn check(&self, _model: Option<&ModelSection>, _rules: &mut Rules<'_>) {}
}

/// The sizes from which the defaults of `[attention]` follow; `None` for a missing or impossible size.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) seq_len: Option<usize>,
    pub(crate) hidden_size: Option<usize>,
    pub(crate) head_dim: Option<usize>,
    pub(crate) num_kv_heads: Option<usize>,
}

/// From this number of tokens on, rows have NSA's published block sizes by default; shorter rows have smaller blocks.
const LONG_ROW: usize = 2048;
// By default, NSA selects as many blocks as hold a quarter of the row, between these numbers.
const FEWEST_BLOCKS: usize = 4;
pub(super) const MOST_DEFAULT_BLOCKS: usize = 16;

impl Sizes {
    /// A fraction 1 / `part` of a row's tokens, at least one token.
    pub(crate) fn part_of_row(self, part: usize) -> Option<i64> {
        whole((self.seq_len? / part).max(1))
    }

    pub(crate) fn is_long(self) -> bool {
        self.seq_len.is_some_and(|seq_len| seq_len >= LONG_ROW)
    }
}

/// A size as a TOML integer; `None` if it is too large.
pub(crate) fn whole(size: usize) -> Option<i64> {
    i64::try_from(size).ok()
}

/// Sets missing sizes of pooled keys and selected blocks: a pooled key covers two strides, a selected block two, or
/// four in long rows.
pub(super) fn pooled_sizes(attention: &mut Table, sizes: Sizes, most_blocks: usize) {
    derived(attention, "compress_stride", || Some(if sizes.is_long() { 16 } else { 8 }));
    let stride = number(attention, "compress_stride");
    derived(attention, "compress_block_size", || stride?.checked_mul(2));
    derived(attention, "select_block_size", || stride?.checked_mul(if sizes.is_long() { 4 } else { 2 }));
    num_blocks(attention, sizes, most_blocks);
}

/// Sets a missing number of selected blocks to as many as hold a quarter of the row, `most` at most.
pub(super) fn num_blocks(attention: &mut Table, sizes: Sizes, most: usize) {
    let block = number(attention, "select_block_size").and_then(|block| usize::try_from(block).ok());
    derived(attention, "num_selected_blocks", || {
        let blocks = sizes.seq_len? / 4 / block?.max(1);
        whole(blocks.clamp(FEWEST_BLOCKS, most))
    });
}

/// A key that holds a whole number.
pub(crate) fn number(table: &Table, key: &str) -> Option<i64> {
    table.get(key).and_then(Value::as_integer)
}

/// The value of a key that is one of some names.
pub(super) fn named<T: DeserializeOwned>(table: &Table, key: &str) -> Option<T> {
    table.get(key)?.clone().try_into().ok()
}

/// Sets a missing key to a name.
pub(super) fn choice<T: Serialize>(table: &mut Table, key: &str, name: T) {
    if let Some(name) = value_of(name).filter(|_| !table.contains_key(key)) {
        table.insert(key.to_owned(), name);
    }
}

/// Sets a missing key to `value()`, unless that is `None`.
pub(crate) fn derived(table: &mut Table, key: &str, value: impl FnOnce() -> Option<i64>) {
    if !table.contains_key(key)
        && let Some(value) = value()
    {
        table.insert(key.to_owned(), Value::Integer(value));
    }
}
