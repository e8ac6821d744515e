//! How a selector chooses blocks of keys, in steps that a device can take.
use crate::packed_mask::MaskLayout;
use std::ops::Range;

/// How blocks of queries and of keys are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BlockScores {
    /// Product of their means.
    Means,
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
}

/// Which of a row's blocks stay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeepBlocks {
    /// The best, until they hold this share of the mass.
    Mass(f64),
    /// So many of the best.
    Top(usize),
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
    /// Tokens of a block.
    pub block: usize,
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
    /// Blocks of queries and of keys.
    pub fn blocks(&self) -> [usize; 2] {
        self.cut(self.block)
    }

    /// Query tiles and key tiles of the mask.
    pub fn tiles(&self) -> [usize; 2] {
        self.cut(self.tile)
    }

    fn cut(&self, side: usize) -> [usize; 2] {
        let rows = (self.num_queries + self.offset).div_ceil(side);
        [rows, self.num_keys.div_ceil(side)]
    }

    /// Lists of the mask.
    pub fn num_lists(&self) -> usize {
        self.num_heads / self.heads_per_list
    }

    /// Key tiles that start no later than a query tile's last row, over all rows of a list: the most it can keep.
    pub fn admissible_tiles(&self) -> usize {
        let context = self.num_keys - self.num_queries;
        let last = |row: usize| ((row + 1) * self.tile - self.offset).min(self.num_queries) - 1;
        (0..self.tiles()[0])
            .map(|row| (context + last(row)) / self.tile + 1)
            .sum()
    }

    /// The mask, whose buffer has room for every tile that can be kept: a 0, `row_ptr`, `tile_idx`.
    pub fn layout(&self) -> MaskLayout {
        let [query_tiles, _] = self.tiles();
        let rows = self.num_lists() * query_tiles;
        MaskLayout {
            num_queries: self.num_queries,
            num_keys: self.num_keys,
            heads: [self.num_heads, self.num_kv_heads],
            cuts: [self.tile, self.offset, self.tile, query_tiles],
            heads_per: [self.heads_per_list, self.num_heads],
            places: [0, 1, rows + 2, 0, 0, 0, 0, 0],
            words: rows + 2 + self.num_lists() * self.admissible_tiles(),
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
            offset: 0,
            scores: BlockScores::Means,
            keep: KeepBlocks::Top(3),
            counts_own: false,
            heads_per_list: 2,
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
