//! How a selector chooses blocks of keys, in steps that a device can take.
use crate::call_shape::{CallShape, Tiles};
use crate::key_mask::{KeyMask, MaskPlaces};
use crate::model::DmaWindow;
use std::ops::Range;

/// How blocks of queries and of keys are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BlockScores {
    /// Product of their means, and this many times the product of their variances.
    Means {
        /// 0 where variances are not computed.
        variances: f32,
    },
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
    /// FlexPrefill: block columns and diagonals that the last block of queries attends to, or, where block means
    /// predict them well, a map by products of means; `keep` is ignored.
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
    /// Quest: upper bounds of `q . k` of one query with the keys of each block; the bounds of earlier blocks are kept
    /// from earlier calls.
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

/// How tokens are permuted before they are cut into blocks. A row always keeps the blocks of its own segment; the
/// others compete.
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
    /// The observation window (SnapKV, H2O), in blocks of one token: its queries' attention ranks the keys before
    /// `last`, and the best of these are kept.
    pub selection: BlockSelection,
    /// The last keys, which stay whatever they received.
    pub last: usize,
    /// Neighbouring keys over which attention is smoothed, an odd number.
    pub width: usize,
    /// Whether by the largest of them; else by their mean.
    pub by_largest: bool,
    /// H2O: number of keys held in all, and of recent keys that are never evicted, where later tokens evict keys. A
    /// kept key goes on accumulating attention.
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

/// How blocks are cut and compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredBlocks {
    /// Tokens of a block of keys.
    pub block: usize,
    /// Tokens of a block of queries.
    pub query_block: usize,
    /// Rows missing in front of the first block of queries.
    pub offset: usize,
    /// Factor on `q . k`.
    pub softmax_scale: f32,
    /// How they are compared.
    pub by: BlockScores,
}

/// What a row keeps, and the lists that it goes to.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptBlocks {
    /// Which of the compared blocks stay.
    pub by: KeepBlocks,
    /// Whether the first block and those that meet a row's queries count towards `by`, before all others.
    pub counts_own: bool,
    /// Whether a row keeps the blocks that meet its queries in any case.
    pub keeps_own: bool,
    /// Query heads that share a list, which has what any of them keeps.
    pub heads_per_list: usize,
    /// Tokens of the mask's tiles; divides the block.
    pub tile: usize,
    /// Tokens before a tile's first row that stay.
    pub local_tokens: usize,
    /// First tiles that stay.
    pub first_tiles: usize,
    /// Rows of the call that are dense.
    pub dense_rows: Vec<Range<usize>>,
}

/// A selection of one call. Queries are the last `shape.num_queries` of `shape.num_keys` tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSelection {
    /// The call's sizes.
    pub shape: CallShape,
    /// How blocks are cut and compared.
    pub scores: ScoredBlocks,
    /// What stays.
    pub keep: KeptBlocks,
    /// How tokens move before they are cut.
    pub order: Option<SlotOrder>,
}

impl BlockSelection {
    /// Blocks of `block` queries and keys, a list for each query head, which keeps its own block.
    pub fn new(shape: CallShape, block: usize, scores: BlockScores, keep: KeepBlocks) -> Self {
        Self {
            shape,
            scores: ScoredBlocks {
                block,
                query_block: block,
                offset: 0,
                softmax_scale: shape.softmax_scale(),
                by: scores,
            },
            keep: KeptBlocks {
                by: keep,
                counts_own: false,
                keeps_own: true,
                heads_per_list: 1,
                tile: block,
                local_tokens: 0,
                first_tiles: 0,
                dense_rows: Vec::new(),
            },
            order: None,
        }
    }

    /// Makes all rows from `first` on dense.
    pub fn add_dense_end(&mut self, first: Option<usize>) {
        let first = self.keep.dense_rows.iter().map(|rows| rows.start).chain(first);
        let first = first.min();
        self.keep.dense_rows = first.map(|first| first..self.shape.num_queries).into_iter().collect();
    }

    /// Blocks of queries and of keys.
    pub fn blocks(&self) -> [usize; 2] {
        let blocks = self.cut(self.scores.query_block, self.scores.block);
        [blocks.num_query_tiles(), blocks.num_key_tiles()]
    }

    /// The mask's tiles.
    pub fn tiles(&self) -> Tiles {
        let per_block = self.scores.block / self.keep.tile;
        self.cut(self.scores.query_block / per_block, self.keep.tile)
    }

    fn cut(&self, query_tile: usize, key_tile: usize) -> Tiles {
        Tiles {
            query_offset: self.scores.offset,
            ..Tiles::new(self.shape, query_tile, key_tile)
        }
    }

    /// Lists of the mask.
    pub fn num_lists(&self) -> usize {
        self.shape.num_heads / self.keep.heads_per_list
    }

    /// Key tiles that start no later than a query tile's last row, over all rows of a list: the most it can keep.
    pub fn admissible_tiles(&self) -> usize {
        let tiles = self.tiles();
        (0..tiles.num_query_tiles()).map(|i| tiles.admissible(i)).sum()
    }

    /// The most tiles that a list can hold: its own segments' too, where keys move.
    fn most_tiles(&self) -> usize {
        let Some(order) = self.order else {
            return self.admissible_tiles();
        };
        let tiles = self.tiles();
        let end = |i: usize| (tiles.last(i) / order.segment + 1) * (order.segment / self.keep.tile);
        let of_row = |i| end(i).min(tiles.num_key_tiles());
        (0..tiles.num_query_tiles()).map(of_row).sum()
    }

    /// The most single keys that a list can hold.
    fn most_columns(&self) -> usize {
        let tiles = self.tiles();
        match self.scores.by {
            BlockScores::Lines { columns, .. } => {
                let of_row = |i| columns[0].min(tiles.last(i) + 1);
                (0..tiles.num_query_tiles()).map(of_row).sum()
            }
            _ => 0,
        }
    }

    /// The mask, with room for every tile and key that can be kept: a 0, then the arrays that there are.
    pub fn layout(&self) -> KeyMask<()> {
        let tiles = self.tiles();
        let rows = self.num_lists() * tiles.num_query_tiles();
        let single = self.num_lists() * self.most_columns();
        let mut words = 1;
        let mut place = |size: usize| {
            let first = if size == 0 { 0 } else { words };
            words += size;
            first..first + size
        };
        let CallShape {
            num_queries,
            num_keys,
            num_heads,
            num_kv_heads,
            ..
        } = self.shape;
        let moves_queries = self.order.is_some_and(|order| order.moves_queries);
        KeyMask {
            shape: self.shape,
            tiles,
            heads_per_list: self.keep.heads_per_list,
            heads_per_order: match self.order {
                Some(_) => num_heads / num_kv_heads,
                None => num_heads,
            },
            causal: true,
            dense_rows: self.keep.dense_rows.clone(),
            places: MaskPlaces {
                row_ptr: place(rows + 1),
                tile_idx: place(self.num_lists() * self.most_tiles()),
                col_ptr: place(if single > 0 { rows + 1 } else { 0 }),
                col_idx: place(single),
                key_order: place(self.order.map_or(0, |_| num_kv_heads * num_keys)),
                query_order: place(usize::from(moves_queries) * num_heads * num_queries),
                ..MaskPlaces::default()
            },
            words: (),
            counts: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_every_admissible_tile() {
        let shape = CallShape::new([70, 100], [4, 2], 8);
        let means = BlockScores::Means { variances: 0.0 };
        let mut selection = BlockSelection::new(shape, 32, means, KeepBlocks::Top(3));
        (selection.keep.heads_per_list, selection.keep.tile) = (2, 16);
        assert_eq!(selection.blocks(), [3, 4]);
        // Rows end at 45, 61, 77, 93, 99.
        assert_eq!(selection.admissible_tiles(), 3 + 4 + 5 + 6 + 7);
        let places = selection.layout().places;
        assert_eq!([places.row_ptr.start, places.tile_idx.start], [1, 2 * 5 + 2]);
        assert_eq!(places.num_words(), 12 + 2 * 25);
    }
}
