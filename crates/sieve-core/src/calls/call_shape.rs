//! Sizes of one attention call, and how its rows and keys are divided into tiles.
use std::ops::Range;

/// Sizes of one call for one request. Query row `t` has position `context() + t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallShape {
    /// Number of query rows of this call.
    pub num_queries: usize,
    /// Number of keys so far, this call's included.
    pub num_keys: usize,
    /// Query heads, a multiple of `num_kv_heads`; head p reads KV head `p / group_size()`.
    pub num_heads: usize,
    /// Number of key and value heads.
    pub num_kv_heads: usize,
    /// Columns of a head.
    pub head_dim: usize,
}

impl CallShape {
    /// The sizes of a call, in the order of the fields.
    pub const fn new(
        [num_queries, num_keys]: [usize; 2],
        [num_heads, num_kv_heads]: [usize; 2],
        head_dim: usize,
    ) -> Self {
        Self { num_queries, num_keys, num_heads, num_kv_heads, head_dim }
    }

    /// Query heads that share a KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Keys before the first query of the call.
    pub fn context(&self) -> usize {
        self.num_keys - self.num_queries
    }

    /// The usual factor on `q . k`: one over the root of `head_dim`.
    pub fn softmax_scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Number of (query, key) pairs of one head in which the key is not after the query.
    pub fn causal_pairs(&self) -> u64 {
        let (queries, context) = (self.num_queries as u64, self.context() as u64);
        queries * context + queries * (queries + 1) / 2
    }
}

/// How the rows of a call and the keys are divided into tiles. Query tiles count from the call's first row, key tiles
/// from key 0.
///
/// The first query tile is `query_offset` rows shorter than the others, so that query tiles can end where key tiles do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Number of query rows of the call.
    pub num_queries: usize,
    /// Number of keys so far, this call's included.
    pub num_keys: usize,
    /// Rows of a query tile.
    pub query_tile: usize,
    /// Keys of a key tile.
    pub key_tile: usize,
    /// Number of rows by which the first query tile is shorter, less than `query_tile`.
    pub query_offset: usize,
}

impl Tiles {
    /// Divides the queries and keys of a call into tiles.
    pub fn new(shape: CallShape, query_tile: usize, key_tile: usize) -> Self {
        Self { num_queries: shape.num_queries, num_keys: shape.num_keys, query_tile, key_tile, query_offset: 0 }
    }

    /// Square tiles whose query tiles end at multiples of the tile in absolute positions.
    pub fn aligned(shape: CallShape, tile: usize) -> Self {
        Self { query_offset: shape.context() % tile, ..Self::new(shape, tile, tile) }
    }

    /// Number of keys before the first query.
    pub fn context(&self) -> usize {
        self.num_keys - self.num_queries
    }

    /// Number of query tiles of the call.
    pub fn num_query_tiles(&self) -> usize {
        match self.num_queries {
            0 => 0,
            rows => (rows + self.query_offset).div_ceil(self.query_tile),
        }
    }

    /// Number of key tiles.
    pub fn num_key_tiles(&self) -> usize {
        self.num_keys.div_ceil(self.key_tile)
    }

    /// Rows of a query tile, within the call.
    pub fn rows(&self, query_tile: usize) -> Range<usize> {
        let end = (query_tile + 1) * self.query_tile - self.query_offset;
        end.saturating_sub(self.query_tile)..end.min(self.num_queries)
    }

    /// Query tile of a row or query slot.
    pub fn tile_of_row(&self, row: usize) -> usize {
        (row + self.query_offset) / self.query_tile
    }

    /// The keys of one key tile.
    pub fn keys(&self, key_tile: usize) -> Range<usize> {
        let first = key_tile * self.key_tile;
        first..(first + self.key_tile).min(self.num_keys)
    }

    /// Position of the first row of a query tile.
    pub fn first(&self, query_tile: usize) -> usize {
        self.context() + self.rows(query_tile).start
    }

    /// Position of the last row of a query tile.
    pub fn last(&self, query_tile: usize) -> usize {
        self.context() + self.rows(query_tile).end - 1
    }

    /// Number of key tiles that start no later than the query tile's last row: tiles `0..admissible`.
    pub fn admissible(&self, query_tile: usize) -> usize {
        self.last(query_tile) / self.key_tile + 1
    }

    /// Key tiles that hold positions of a query tile.
    pub fn diagonal(&self, query_tile: usize) -> Range<usize> {
        self.first(query_tile) / self.key_tile..self.admissible(query_tile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misaligned_tile_straddles_two_key_tiles() {
        let tiles = Tiles { num_queries: 300, num_keys: 400, query_tile: 128, key_tile: 128, query_offset: 0 };
        assert_eq!(tiles.num_query_tiles(), 3);
        assert_eq!((tiles.first(0), tiles.last(0)), (100, 227));
        assert_eq!(tiles.diagonal(0), 0..2);
        assert_eq!((tiles.first(2), tiles.last(2)), (356, 399));
        assert_eq!(tiles.diagonal(2), 2..4);
        assert_eq!(tiles.admissible(1), 3);
        assert_eq!(tiles.keys(3), 384..400);
        let tiles = Tiles { query_offset: 100, ..tiles };
        assert_eq!(tiles.num_query_tiles(), 4);
        let rows: Vec<_> = (0..4).map(|i| tiles.rows(i)).collect();
        assert_eq!(rows, [0..28, 28..156, 156..284, 284..300]);
        assert_eq!((tiles.tile_of_row(27), tiles.tile_of_row(28)), (0, 1));
        assert!((0..4).all(|i| tiles.diagonal(i).len() == 1));
    }
}
