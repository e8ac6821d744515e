//! How a selector chooses blocks of keys, in steps that a device can take.
use crate::model::DmaWindow;
use crate::packed_mask::MaskLayout;
use std::ops::Range;

/// How blocks of queries and of keys are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BlockScores {
    /// Product of their means.
    Means,
    /// The same, and this many times the product of their variances.
    MeansAndVariances(f32),
    /// The largest product of groups of this many tokens, each read as one long vector.
    LargestOfGroups(usize),
    /// Softmax over cells of `stride` tokens a side, summed over each block.
    Cells {
        /// Tokens of a cell.
        stride: usize,
        /// Whether a cell's queries meet its keys in the opposite order: antidiagonals.
        reversed: bool,
        /// Divides the logits, beside the stride.
        norm: f64,
    },
    /// Single columns and diagonals that the last queries look at; `keep` does not act.
    Lines {
        /// Queries that look.
        rows: usize,
        /// Columns that stay, and how many of the first are among them.
        columns: [usize; 2],
        /// Diagonals that stay, and how many of the first are among them.
        diagonals: [usize; 2],
    },
    /// Blocks of columns and of diagonals that the last block of queries looks at, or a map by products of means where
    /// these say the same; `keep` does not act.
    Patterns {
        /// Share of the mass that columns, diagonals or the map must hold.
        gamma: f64,
        /// Distance below which the map is taken.
        tau: f64,
        /// Fewest and most blocks of columns and of diagonals.
        blocks: [usize; 2],
    },
    /// Log-sum-exps of dense probe rows, of which each chooses blocks; the best of a tile by their mean stay.
    Probes {
        /// One row in `gamma` is a probe.
        gamma: usize,
        /// Blocks that a probe chooses, and how many of them are surely the best.
        chosen: [usize; 2],
    },
    /// Logits of a call of one query, with blocks of one key.
    Logits,
    /// Upper bounds of the products of a call of one query with the keys of each block; bounds of blocks before this
    /// one are known from earlier calls.
    Bounds(usize),
}

/// By what the keys of a segment are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyScores {
    /// The attention that this many last queries of the call give a key, the largest first.
    Attention(usize),
    /// The length of a key's vector, the shortest first.
    Length,
}

/// How tokens move before they are cut into blocks. A row then keeps the blocks of its own segments, and others
/// compete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotOrder {
    /// Tokens of a segment, inside which they move; blocks divide it.
    pub segment: usize,
    /// By what keys move.
    pub keys: KeyScores,
    /// Whether queries move too, by rising length.
    pub moves_queries: bool,
    /// Whether every row keeps the block with the first key.
    pub keeps_first: bool,
}

/// Dense rows that correct the output of the others: one position in `gamma`, and the call's first row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeCorrection {
    /// Positions from one to the next.
    pub gamma: usize,
    /// Whether they replace their own rows alone, and correct no others.
    pub replaces_only: bool,
}

/// Which keys of a prompt stay for the tokens after it, by the attention that they received.
#[derive(Clone, Debug, PartialEq)]
pub struct HeavyKeys {
    /// The queries whose attention counts, in blocks of one token; a top of the keys before the last ones stays.
    pub selection: BlockSelection,
    /// The last keys, which stay whatever they received.
    pub last: usize,
    /// Neighbouring keys over which attention is smoothed, an odd number.
    pub width: usize,
    /// Whether by the largest of them; else by their mean.
    pub by_largest: bool,
    /// Where a later token pushes a key out: keys that are held in all, and the last ones, which stay. A key then goes
    /// on receiving attention.
    pub slots: Option<DmaWindow>,
}

/// Which of a row's blocks stay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeepBlocks {
    /// The best, until they hold this share of the mass.
    Mass(f64),
    /// This number of the best.
    Top(usize),
    /// This share of those that compete, rounded up.
    Share(f64),
}

/// A selection of one call. Blocks that meet a row's own queries always stay.
///
/// Queries are the last `num_queries` of `num_keys` tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSelection {
    /// Query rows of the call.
    pub num_queries: usize,
    /// Keys, the call's own included.
    pub num_keys: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Tokens of a block of keys.
    pub block: usize,
    /// Tokens of a block of queries.
    pub query_block: usize,
    /// How tokens move before they are cut.
    pub order: Option<SlotOrder>,
    /// Rows missing in front of the first block of queries.
    pub offset: usize,
    /// How blocks are compared.
    pub scores: BlockScores,
    /// Which stay.
    pub keep: KeepBlocks,
    /// Whether the first block and those that meet a row's queries count towards `keep`, before all others.
    pub counts_own: bool,
    /// Query heads that share a list, which has what any of them keeps.
    pub heads_per_list: usize,
    /// Whether a row keeps the blocks that meet its queries in any case.
    pub keeps_own: bool,
    /// Tokens of the mask's tiles; divides `block`.
    pub tile: usize,
    /// Tokens before a tile's first row that stay.
    pub local_tokens: usize,
    /// First tiles that stay.
    pub first_tiles: usize,
    /// Factor on `q . k`.
    pub softmax_scale: f32,
    /// Rows of the call that are dense.
    pub dense_rows: Vec<Range<usize>>,
}

impl BlockSelection {
    /// Makes all rows from `first` on dense.
    pub fn add_dense_end(&mut self, first: Option<usize>) {
        let first = self.dense_rows.iter().map(|rows| rows.start).chain(first);
        let first = first.min();
        self.dense_rows = first.map(|first| first..self.num_queries).into_iter().collect();
    }

    /// Blocks of queries and of keys.
    pub fn blocks(&self) -> [usize; 2] {
        self.cut(self.query_block, self.block)
    }

    /// Query tiles and key tiles of the mask.
    pub fn tiles(&self) -> [usize; 2] {
        self.cut(self.tile_rows(), self.tile)
    }

    /// Queries of a tile.
    pub fn tile_rows(&self) -> usize {
        self.query_block / (self.block / self.tile)
    }

    fn cut(&self, rows: usize, keys: usize) -> [usize; 2] {
        [
            (self.num_queries + self.offset).div_ceil(rows),
            self.num_keys.div_ceil(keys),
        ]
    }

    /// Lists of the mask.
    pub fn num_lists(&self) -> usize {
        self.num_heads / self.heads_per_list
    }

    /// Key tiles that start no later than a query tile's last row, over all rows of a list: the most it can keep.
    pub fn admissible_tiles(&self) -> usize {
        self.last_rows().map(|last| last / self.tile + 1).sum()
    }

    /// Positions of the last query of each tile.
    fn last_rows(&self) -> impl Iterator<Item = usize> {
        let context = self.num_keys - self.num_queries;
        let end = |row: usize| (row + 1) * self.tile_rows() - self.offset;
        (0..self.tiles()[0]).map(move |row| context + end(row).min(self.num_queries) - 1)
    }

    /// The most tiles that a list can hold: its own segments' too, where keys move.
    fn most_tiles(&self) -> usize {
        let Some(order) = self.order else {
            return self.admissible_tiles();
        };
        let end = |last: usize| (last / order.segment + 1) * (order.segment / self.tile);
        let all = self.tiles()[1];
        self.last_rows().map(|last| end(last).min(all)).sum()
    }

    /// The most single keys that a list can hold.
    fn most_columns(&self) -> usize {
        match self.scores {
            BlockScores::Lines { columns, .. } => self.last_rows().map(|last| columns[0].min(last + 1)).sum(),
            _ => 0,
        }
    }

    /// The mask, whose buffer has room for every tile and key that can be kept: a 0, then the arrays that there are.
    pub fn layout(&self) -> MaskLayout {
        let [query_tiles, _] = self.tiles();
        let rows = self.num_lists() * query_tiles;
        let single = self.most_columns();
        let mut words = 1;
        let mut place = |size: usize| {
            let at = if size == 0 { 0 } else { words };
            words += size;
            at
        };
        let moved = self.order.map_or([0; 2], |order| {
            [
                self.num_kv_heads * self.num_keys,
                usize::from(order.moves_queries) * self.num_heads * self.num_queries,
            ]
        });
        let places = [
            0,
            place(rows + 1),
            place(self.num_lists() * self.most_tiles()),
            place(if single > 0 { rows + 1 } else { 0 }),
            place(self.num_lists() * single),
            place(moved[0]),
            place(moved[1]),
            0,
        ];
        MaskLayout {
            num_queries: self.num_queries,
            num_keys: self.num_keys,
            heads: [self.num_heads, self.num_kv_heads],
            cuts: [self.tile_rows(), self.offset, self.tile, query_tiles],
            heads_per: [
                self.heads_per_list,
                match self.order {
                    Some(_) => self.num_heads / self.num_kv_heads,
                    None => self.num_heads,
                },
            ],
            query_slots: self.num_queries,
            places,
            words,
            dense_rows: self.dense_rows.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_every_admissible_tile() {
        let selection = BlockSelection {
            num_queries: 70,
            num_keys: 100,
            num_heads: 4,
            num_kv_heads: 2,
            block: 32,
            query_block: 32,
            order: None,
            offset: 0,
            scores: BlockScores::Means,
            keep: KeepBlocks::Top(3),
            counts_own: false,
            heads_per_list: 2,
            keeps_own: true,
            tile: 16,
            local_tokens: 0,
            first_tiles: 0,
            softmax_scale: 1.0,
            dense_rows: Vec::new(),
        };
        assert_eq!(selection.blocks(), [3, 4]);
        // Rows end at 45, 61, 77, 93, 99.
        assert_eq!(selection.admissible_tiles(), 3 + 4 + 5 + 6 + 7);
        let layout = selection.layout();
        assert_eq!(layout.places[1..3], [1, 2 * 5 + 2]);
        assert_eq!(layout.words, 12 + 2 * 25);
    }
}
