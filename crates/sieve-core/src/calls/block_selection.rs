//! How a selector chooses blocks of keys, described as data, so that one set of GPU kernels can run every method.
use super::call_shape::{CallShape, Tiles};
use super::key_mask::{KeyMask, MaskPlaces};
use crate::model::DmaWindow;
use std::ops::Range;

/// How blocks of queries and of keys are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BlockScores {
    /// `q . k` of the blocks' means, plus `variances` times the product of their variances.
    Means {
        /// Factor on the products of variances; 0 does not compute them.
        variances: f32,
    },
    /// The largest `q . k` of groups of this many tokens, with the vectors of a group concatenated to one.
    LargestOfGroups(usize),
    /// Softmax over cells of `stride` queries and `stride` keys, summed over each block.
    Cells {
        /// Queries of a cell, and keys of a cell.
        stride: usize,
        /// Whether query i of a cell meets key `stride - 1 - i`, as on an antidiagonal, instead of key i.
        reversed: bool,
        /// Divides the logits, in addition to the stride.
        norm: f64,
    },
    /// Single columns and diagonals with the most attention of the last queries; [`KeptBlocks::by`] is ignored.
    Lines {
        /// Number of last queries whose attention is computed.
        rows: usize,
        /// Number of kept columns, and how many of these are the first columns of the prompt.
        columns: [usize; 2],
        /// Number of kept diagonals, and how many of these are the nearest to the query.
        diagonals: [usize; 2],
    },
    /// FlexPrefill: block columns and diagonals that the last block of queries attends to; or, where block means
    /// predict these well, blocks by the product of their means. [`KeptBlocks::by`] is ignored.
    Patterns {
        /// Share of the attention probability that the kept blocks must hold.
        gamma: f64,
        /// Blocks are chosen by their means if the prediction's Jensen-Shannon distance is below this.
        tau: f64,
        /// Fewest and most blocks that a row keeps.
        blocks: [usize; 2],
    },
    /// MOMO: the log-sum-exp of a block's logits in dense probe rows. Each probe row chooses blocks, and a tile of
    /// queries keeps the best of these by the mean over its probes.
    Probes {
        /// Distance between two probe rows.
        gamma: usize,
        /// Most blocks that a probe chooses, and how many of these are exactly its best; an estimate chooses the
        /// others.
        chosen: [usize; 2],
    },
    /// The attention that each key received, in blocks of one key; [`HeavyKeys`] keeps the keys that received most.
    Logits,
}

/// The scores by which keys are sorted inside a segment of a [`SlotOrder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyScores {
    /// By the attention from this many last queries of the call, the largest first.
    Attention(usize),
    /// By the Euclidean norm of the keys, the smallest first.
    Length,
}

/// How tokens are permuted before they are divided into blocks, if at all. A query row always keeps the blocks of its
/// own segment; the blocks of earlier segments compete by their scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotOrder {
    /// Tokens of a segment, a multiple of the block. Tokens move only inside their segment.
    pub segment: usize,
    /// The scores by which keys are sorted; `None`: keys keep their order.
    pub keys: Option<KeyScores>,
    /// Whether queries are sorted, by rising Euclidean norm.
    pub moves_queries: bool,
    /// Whether every query row keeps the block with the first key.
    pub keeps_first: bool,
}

/// Dense probe rows that correct the output of the other rows. Probes are the call's first row and every row whose
/// position is a multiple of `gamma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeCorrection {
    /// Distance between two probes, in positions.
    pub gamma: usize,
    /// Whether the probes replace their own rows and leave the other rows as they are.
    pub replaces_only: bool,
}

/// Which keys of a prompt are kept for the tokens after it, by the attention that the keys received.
#[derive(Clone, Debug, PartialEq)]
pub struct HeavyKeys {
    /// How attention is observed (SnapKV, H2O), in blocks of one token. It ranks the keys before the `last` ones, and
    /// the best of these are kept.
    pub selection: BlockSelection,
    /// Number of last keys, which are kept whatever attention they received.
    pub last: usize,
    /// Number of neighbouring keys over which attention is smoothed, odd.
    pub width: usize,
    /// Whether smoothing takes the largest value of the neighbours instead of their mean.
    pub by_largest: bool,
    /// H2O, where later tokens evict keys: the number of keys held in all, and of recent keys that are never evicted. A
    /// kept key accumulates the attention of later tokens.
    pub slots: Option<DmaWindow>,
}

/// The keys that a decoded token reads under a decode selector which evicts nothing: the cache holds all keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKeys {
    /// The first `first` keys and the last `last`, the token's own included (StreamingLLM, arXiv:2309.17453).
    Ends {
        /// Number of first keys.
        first: usize,
        /// Number of last keys.
        last: usize,
    },
    /// Pages of `page` consecutive keys: the token's own page and those with the largest upper bounds of `q . k`,
    /// summed over the query heads of a KV head (Quest, arXiv:2406.10774). Of equal bounds the later page is read.
    Pages {
        /// Number of keys of a page.
        page: usize,
        /// Number of pages that a KV head reads, the token's own included.
        count: usize,
    },
    /// For each query head this many keys with the largest `q . k`, of equal ones the later.
    Largest(usize),
}

impl TokenKeys {
    /// Number of keys that a head of the last of `num_keys` tokens reads.
    pub fn num_read(self, num_keys: usize) -> usize {
        match self {
            Self::Ends { first, last } => (first + last).min(num_keys),
            Self::Pages { page, count } => {
                let before = num_keys.saturating_sub(1) / page;
                num_keys - (before - before.min(count - 1)) * page
            }
            Self::Largest(count) => count.min(num_keys),
        }
    }
}

/// Which of a row's competing blocks are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeepBlocks {
    /// The best blocks, until they hold this share of the attention probability.
    Mass(f64),
    /// This number of blocks with the highest scores.
    Top(usize),
    /// This share of the competing blocks, rounded up.
    Share(f64),
}

/// Which dropped tiles a row keeps after all (BFLA): those where `131 row + 17 column + seed` is a multiple of
/// `stride`, and those whose hash of list, row, column and seed is below `limit`. The default keeps none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rescue {
    /// One dropped tile in this many stays; 0: none.
    pub stride: u64,
    /// Hashes below this stay: of 2^24, or with `is_linear` of a million.
    pub limit: u64,
    /// Enters both rules, so that another seed keeps other tiles.
    pub seed: u64,
    /// Whether the hash is a linear congruence instead of splitmix64.
    pub is_linear: bool,
    /// Whether rows and columns count blocks instead of tiles.
    pub by_block: bool,
}

/// Sizes of the blocks, and how they are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredBlocks {
    /// Size of a block of keys, in tokens.
    pub block: usize,
    /// Size of a block of queries, in tokens.
    pub query_block: usize,
    /// Number of rows by which the first block of queries is shorter.
    pub offset: usize,
    /// Factor on the dot products `q . k`.
    pub softmax_scale: f32,
    /// How the score of two blocks is computed.
    pub by: BlockScores,
}

/// The blocks that a row keeps, and the lists that store them.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptBlocks {
    /// Which of the competing blocks are kept.
    pub by: KeepBlocks,
    /// Whether the first block and the blocks with the row's own positions count towards `by`, before all others.
    pub counts_own: bool,
    /// Number of query heads that share a list. The list holds every block that one of them keeps.
    pub heads_per_list: usize,
    /// Tokens of the mask's tiles; divides the block.
    pub tile: usize,
    /// Number of tokens before a tile's first row that are kept whatever their scores.
    pub local_tokens: usize,
    /// Number of first key tiles that are kept whatever their scores.
    pub first_tiles: usize,
    /// Dropped tiles that are kept after all.
    pub rescue: Rescue,
    /// Rows of the call that are dense.
    pub dense_rows: Vec<Range<usize>>,
}

/// Query heads that choose by a rule of their own.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadRule {
    /// The query heads.
    pub heads: Range<usize>,
    /// How their blocks are compared.
    pub scores: BlockScores,
    /// Which of the competing blocks are kept.
    pub keep: KeepBlocks,
}

/// A selection of one call. Queries are the last `shape.num_queries` of `shape.num_keys` tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSelection {
    /// Sizes of the attention call.
    pub shape: CallShape,
    /// Sizes of the blocks, and how they are compared.
    pub scores: ScoredBlocks,
    /// The blocks that each row keeps.
    pub keep: KeptBlocks,
    /// The segments inside which tokens are permuted; `None`: there are none.
    pub order: Option<SlotOrder>,
    /// Rules in place of [`ScoredBlocks::by`] and [`KeptBlocks::by`] where heads differ (MInference): each head has
    /// one, [`BlockScores::Lines`] or [`BlockScores::Means`]. Empty: there are none.
    pub head_rules: Vec<HeadRule>,
}

impl BlockSelection {
    /// A selection with blocks of `block` queries and keys and a list for each query head; every row keeps its own
    /// block.
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
                heads_per_list: 1,
                tile: block,
                local_tokens: 0,
                first_tiles: 0,
                rescue: Rescue::default(),
                dense_rows: Vec::new(),
            },
            order: None,
            head_rules: Vec::new(),
        }
    }

    /// The rules of all heads.
    pub fn rules(&self) -> Vec<HeadRule> {
        if !self.head_rules.is_empty() {
            return self.head_rules.clone();
        }
        vec![HeadRule { heads: 0..self.shape.num_heads, scores: self.scores.by, keep: self.keep.by }]
    }

    /// Makes rows dense to the call's end, from `first` or the first row that is dense already, the earlier of the two.
    pub fn add_dense_end(&mut self, first: Option<usize>) {
        let first = self.keep.dense_rows.iter().map(|rows| rows.start).chain(first);
        let first = first.min();
        self.keep.dense_rows = first.map(|first| first..self.shape.num_queries).into_iter().collect();
    }

    /// Number of blocks of queries, and of keys.
    pub fn blocks(&self) -> [usize; 2] {
        let blocks = self.cut(self.scores.query_block, self.scores.block);
        [blocks.num_query_tiles(), blocks.num_key_tiles()]
    }

    /// How the mask divides queries and keys into tiles.
    pub fn tiles(&self) -> Tiles {
        let per_block = self.scores.block / self.keep.tile;
        self.cut(self.scores.query_block / per_block, self.keep.tile)
    }

    /// Divides the call into tiles of these sizes, the first query tile shorter by `offset` rows.
    fn cut(&self, query_tile: usize, key_tile: usize) -> Tiles {
        Tiles { query_offset: self.scores.offset, ..Tiles::new(self.shape, query_tile, key_tile) }
    }

    /// Number of the mask's lists of key tiles.
    pub fn num_lists(&self) -> usize {
        self.shape.num_heads / self.keep.heads_per_list
    }

    /// Number of key tiles that start no later than a query tile's last row, summed over the query tiles: the most
    /// tiles of a list if tokens are not permuted.
    pub fn admissible_tiles(&self) -> usize {
        let tiles = self.tiles();
        (0..tiles.num_query_tiles()).map(|i| tiles.admissible(i)).sum()
    }

    /// The most tiles that a list can hold. If keys are permuted, that includes tiles of a row's own segment that start
    /// after the row.
    fn most_tiles(&self) -> usize {
        let Some(order) = self.order else {
            return self.admissible_tiles();
        };
        let tiles = self.tiles();
        // The key tiles up to the end of the segment with the query tile's last row.
        let end = |i: usize| (tiles.last(i) / order.segment + 1) * (order.segment / self.keep.tile);
        let of_row = |i| end(i).min(tiles.num_key_tiles());
        (0..tiles.num_query_tiles()).map(of_row).sum()
    }

    /// The most single keys that a list can hold.
    fn most_columns(&self) -> usize {
        let tiles = self.tiles();
        let of_rule = |rule: HeadRule| match rule.scores {
            BlockScores::Lines { columns, .. } => columns[0],
            _ => 0,
        };
        let most = self.rules().into_iter().map(of_rule).max().unwrap_or(0);
        // A query tile has `last + 1` keys up to its last row.
        (0..tiles.num_query_tiles()).map(|i| most.min(tiles.last(i) + 1)).sum()
    }

    /// The layout of the mask's buffer, with room for every tile and key that can be kept. Word 0 is unused.
    pub fn layout(&self) -> KeyMask<()> {
        let tiles = self.tiles();
        let rows = self.num_lists() * tiles.num_query_tiles();
        let num_columns = self.num_lists() * self.most_columns();
        let mut num_words = 1;
        // The words of the next array; an empty array gets 0..0.
        let mut place = |size: usize| {
            let first = if size == 0 { 0 } else { num_words };
            num_words += size;
            first..first + size
        };
        let CallShape { num_queries, num_keys, num_heads, num_kv_heads, .. } = self.shape;
        let moves_keys = self.order.is_some_and(|order| order.keys.is_some());
        let moves_queries = self.order.is_some_and(|order| order.moves_queries);
        KeyMask {
            shape: self.shape,
            tiles,
            heads_per_list: self.keep.heads_per_list,
            heads_per_order: if moves_keys { num_heads / num_kv_heads } else { num_heads },
            causal: true,
            dense_rows: self.keep.dense_rows.clone(),
            places: MaskPlaces {
                row_ptr: place(rows + 1),
                tile_idx: place(self.num_lists() * self.most_tiles()),
                col_ptr: place(if num_columns > 0 { rows + 1 } else { 0 }),
                col_idx: place(num_columns),
                key_order: place(usize::from(moves_keys) * num_kv_heads * num_keys),
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
        // The first query is at position 30. The query tiles' last rows are at positions 45, 61, 77, 93 and 99, and key
        // tiles have 16 keys.
        assert_eq!(selection.admissible_tiles(), 3 + 4 + 5 + 6 + 7);
        let places = selection.layout().places;
        assert_eq!([places.row_ptr.start, places.tile_idx.start], [1, 2 * 5 + 2]);
        assert_eq!(places.num_words(), 12 + 2 * 25);
    }
}
