//! One attention call: sizes, operands, and how its rows and keys are cut into tiles.

use std::ops::Range;

use sieve_cpu::Matrix;

use crate::error::SelectError;

/// Sizes of one call for one request. Query row `t` has position `context() + t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallShape {
    /// Query rows of this call.
    pub num_queries: usize,
    /// Keys so far, this call's included.
    pub num_keys: usize,
    /// Query heads, a multiple of `num_kv_heads`; head p reads KV head `p / group_size()`.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl CallShape {
    /// Query heads that share a KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Keys before the first query of the call.
    pub fn context(&self) -> usize {
        self.num_keys - self.num_queries
    }

    /// Factor on `q . k`.
    pub fn softmax_scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Pairs of a query and a key not after it, of one head.
    pub fn causal_pairs(&self) -> u64 {
        let (queries, context) = (self.num_queries as u64, self.context() as u64);
        queries * context + queries * (queries + 1) / 2
    }

    fn check(&self) -> Result<(), SelectError> {
        let problem = if self.num_heads == 0 || self.num_kv_heads == 0 || self.head_dim == 0 {
            format!(
                "num_heads {}, num_kv_heads {} and head_dim {} must not be 0",
                self.num_heads, self.num_kv_heads, self.head_dim
            )
        } else if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            format!(
                "num_heads {} is no multiple of num_kv_heads {}",
                self.num_heads, self.num_kv_heads
            )
        } else if self.num_queries > self.num_keys {
            format!("{} queries but only {} keys", self.num_queries, self.num_keys)
        } else if self.num_keys > i32::MAX as usize / 2 {
            format!("{} keys are more than 2^30", self.num_keys)
        } else {
            return Ok(());
        };
        Err(SelectError::Shape {
            problem,
            hint: "keys count the context and this call's own tokens; packed documents are separate calls",
        })
    }
}

/// The operands of one call: q and k after RoPE.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The sizes.
    pub shape: CallShape,
    /// Layer of the model, for settings that differ by layer.
    pub layer: usize,
    /// Layers of the model, 0 when unknown.
    pub num_layers: usize,
    /// `[num_queries, num_heads, head_dim]`.
    pub q: &'a [f32],
    /// `[num_keys, num_kv_heads, head_dim]`.
    pub k: &'a [f32],
    /// `[num_keys, num_kv_heads, head_dim]`; empty in a call made by [`Call::without_values`].
    pub v: &'a [f32],
    /// Means of blocks, where they came in place of q and k.
    pub(crate) means: Option<BlockMeans<'a>>,
}

/// Means of the blocks of a call, a short last block's over its own tokens.
#[derive(Clone, Copy, Debug)]
pub struct BlockMeans<'a> {
    /// Tokens of a block.
    pub block: usize,
    /// Blocks count from the call's first row: `[query blocks, num_heads, head_dim]`.
    pub q: &'a [f32],
    /// `[key blocks, num_kv_heads, head_dim]`.
    pub k: &'a [f32],
}

fn check_operand(what: &'static str, got: usize, expected: usize) -> Result<(), SelectError> {
    match got == expected {
        true => Ok(()),
        false => Err(SelectError::Operand { what, got, expected }),
    }
}

impl<'a> Call<'a> {
    /// As [`Call::new`] without values: enough to select, for methods that do not read them
    /// ([`Selector::reads`](crate::Selector::reads)).
    ///
    /// # Errors
    /// As [`Call::new`].
    pub fn without_values(shape: CallShape, q: &'a [f32], k: &'a [f32]) -> Result<Self, SelectError> {
        Ok(Self {
            v: &[],
            ..Self::new(shape, q, k, k)?
        })
    }

    /// A call without operands, for methods that select by positions alone.
    ///
    /// # Errors
    /// Sizes that cannot be.
    pub fn of_shape(shape: CallShape) -> Result<Self, SelectError> {
        shape.check()?;
        Ok(Self {
            shape,
            layer: 0,
            num_layers: 0,
            q: &[],
            k: &[],
            v: &[],
            means: None,
        })
    }

    /// A call of which only the means of blocks are known, for methods that select by them.
    ///
    /// # Errors
    /// Sizes that cannot be; means of another number of blocks.
    pub fn of_means(shape: CallShape, means: BlockMeans<'a>) -> Result<Self, SelectError> {
        let call = Self::of_shape(shape)?;
        let width = |tokens: usize, heads| tokens.div_ceil(means.block) * heads * shape.head_dim;
        let expected_q = width(shape.num_queries, shape.num_heads);
        let expected_k = width(shape.num_keys, shape.num_kv_heads);
        check_operand("q's means", means.q.len(), expected_q)?;
        check_operand("k's means", means.k.len(), expected_k)?;
        Ok(Self {
            means: Some(means),
            ..call
        })
    }

    /// A call of layer 0 of a model whose depth is not known.
    ///
    /// # Errors
    /// Sizes that cannot be; operands of another size.
    pub fn new(shape: CallShape, q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Result<Self, SelectError> {
        let call = Self::of_shape(shape)?;
        let expected_q = shape.num_queries * shape.num_heads * shape.head_dim;
        let expected_k = shape.num_keys * shape.num_kv_heads * shape.head_dim;
        check_operand("q", q.len(), expected_q)?;
        check_operand("k", k.len(), expected_k)?;
        check_operand("v", v.len(), expected_k)?;
        Ok(Self { q, k, v, ..call })
    }

    /// The same call in another layer of a model of `num_layers`.
    #[must_use]
    pub fn in_layer(self, layer: usize, num_layers: usize) -> Self {
        Self {
            layer,
            num_layers,
            ..self
        }
    }

    /// Some rows as a call of their own, over the keys up to the last of them.
    ///
    /// # Panics
    /// When the range leaves the call.
    #[must_use]
    pub fn chunk(&self, rows: Range<usize>) -> Self {
        let (q_len, k_len) = (
            self.shape.num_heads * self.shape.head_dim,
            self.shape.num_kv_heads * self.shape.head_dim,
        );
        let num_keys = self.shape.context() + rows.end;
        Self {
            shape: CallShape {
                num_queries: rows.len(),
                num_keys,
                ..self.shape
            },
            q: &self.q[rows.start * q_len..rows.end * q_len],
            k: &self.k[..num_keys * k_len],
            v: &self.v[..(num_keys * k_len).min(self.v.len())],
            ..*self
        }
    }

    /// Where the vector of a query starts in q.
    pub fn query_at(&self, head: usize, row: usize) -> usize {
        (row * self.shape.num_heads + head) * self.shape.head_dim
    }

    /// Where the vector of a key starts in k and v.
    pub fn key_at(&self, kv_head: usize, key: usize) -> usize {
        (key * self.shape.num_kv_heads + kv_head) * self.shape.head_dim
    }

    /// One query.
    pub fn query(&self, head: usize, row: usize) -> &'a [f32] {
        let at = self.query_at(head, row);
        &self.q[at..at + self.shape.head_dim]
    }

    /// One key.
    pub fn key(&self, kv_head: usize, key: usize) -> &'a [f32] {
        let at = self.key_at(kv_head, key);
        &self.k[at..at + self.shape.head_dim]
    }

    /// One value.
    pub fn value(&self, kv_head: usize, key: usize) -> &'a [f32] {
        let at = self.key_at(kv_head, key);
        &self.v[at..at + self.shape.head_dim]
    }

    /// Consecutive queries of a head, `[rows, head_dim]`.
    pub(crate) fn queries(&self, head: usize, rows: Range<usize>) -> Matrix<'a> {
        let (d, heads) = (self.shape.head_dim, self.shape.num_heads);
        matrix(self.q, d, heads, head, rows)
    }

    /// Consecutive keys of a KV head, `[keys, head_dim]`.
    pub(crate) fn keys(&self, kv_head: usize, keys: Range<usize>) -> Matrix<'a> {
        matrix(self.k, self.shape.head_dim, self.shape.num_kv_heads, kv_head, keys)
    }

    /// Consecutive values of a KV head, `[keys, head_dim]`.
    pub(crate) fn values(&self, kv_head: usize, keys: Range<usize>) -> Matrix<'a> {
        matrix(self.v, self.shape.head_dim, self.shape.num_kv_heads, kv_head, keys)
    }

    /// KV head of a query head.
    pub fn kv_head(&self, head: usize) -> usize {
        head / self.shape.group_size()
    }

    /// Query heads of a KV head.
    pub fn group(&self, kv_head: usize) -> Range<usize> {
        let m = self.shape.group_size();
        kv_head * m..(kv_head + 1) * m
    }
}

fn matrix(x: &[f32], head_dim: usize, heads: usize, head: usize, rows: Range<usize>) -> Matrix<'_> {
    let start = ((rows.start * heads + head) * head_dim).min(x.len());
    Matrix::strided(&x[start..], rows.len(), head_dim, heads * head_dim, 1)
}

/// How the rows of a call and the keys are cut: query tiles count from the call's first row, key tiles from key 0.
///
/// With `query_offset` the first query tile is that many rows shorter, so that tiles end where key tiles do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Query rows of the call.
    pub num_queries: usize,
    /// Keys so far.
    pub num_keys: usize,
    /// Rows of a query tile.
    pub query_tile: usize,
    /// Keys of a key tile.
    pub key_tile: usize,
    /// Rows missing in front of the first query tile, less than `query_tile`.
    pub query_offset: usize,
}

impl Tiles {
    /// Tiles of a call.
    pub fn new(shape: CallShape, query_tile: usize, key_tile: usize) -> Self {
        Self {
            num_queries: shape.num_queries,
            num_keys: shape.num_keys,
            query_tile,
            key_tile,
            query_offset: 0,
        }
    }

    /// Square tiles whose query tiles end at multiples of the tile in absolute positions.
    pub fn aligned(shape: CallShape, tile: usize) -> Self {
        Self {
            query_offset: shape.context() % tile,
            ..Self::new(shape, tile, tile)
        }
    }

    /// Keys before the first query.
    pub fn context(&self) -> usize {
        self.num_keys - self.num_queries
    }

    /// Query tiles of the call.
    pub fn num_query_tiles(&self) -> usize {
        match self.num_queries {
            0 => 0,
            rows => (rows + self.query_offset).div_ceil(self.query_tile),
        }
    }

    /// Key tiles.
    pub fn num_key_tiles(&self) -> usize {
        self.num_keys.div_ceil(self.key_tile)
    }

    /// Rows of a query tile, within the call.
    pub fn rows(&self, query_tile: usize) -> Range<usize> {
        let end = (query_tile + 1) * self.query_tile - self.query_offset;
        end.saturating_sub(self.query_tile)..end.min(self.num_queries)
    }

    /// Query tile of a row, or of a query slot.
    pub fn tile_of_row(&self, row: usize) -> usize {
        (row + self.query_offset) / self.query_tile
    }

    /// Keys of a key tile.
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

    /// Key tiles that start no later than the last row: tiles `0..admissible`.
    pub fn admissible(&self, query_tile: usize) -> usize {
        self.last(query_tile) / self.key_tile + 1
    }

    /// Key tiles that meet the positions of a query tile.
    pub fn diagonal(&self, query_tile: usize) -> Range<usize> {
        self.first(query_tile) / self.key_tile..self.admissible(query_tile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::refusal;

    #[test]
    fn a_misaligned_tile_straddles_two_key_tiles() {
        let tiles = Tiles {
            num_queries: 300,
            num_keys: 400,
            query_tile: 128,
            key_tile: 128,
            query_offset: 0,
        };
        assert_eq!(tiles.num_query_tiles(), 3);
        assert_eq!((tiles.first(0), tiles.last(0)), (100, 227));
        assert_eq!(tiles.diagonal(0), 0..2);
        assert_eq!((tiles.first(2), tiles.last(2)), (356, 399));
        assert_eq!(tiles.diagonal(2), 2..4);
        assert_eq!(tiles.admissible(1), 3);
        assert_eq!(tiles.keys(3), 384..400);
        let tiles = Tiles {
            query_offset: 100,
            ..tiles
        };
        assert_eq!(tiles.num_query_tiles(), 4);
        let rows: Vec<_> = (0..4).map(|i| tiles.rows(i)).collect();
        assert_eq!(rows, [0..28, 28..156, 156..284, 284..300]);
        assert_eq!((tiles.tile_of_row(27), tiles.tile_of_row(28)), (0, 1));
        assert!((0..4).all(|i| tiles.diagonal(i).len() == 1));
    }

    #[test]
    fn impossible_sizes_are_refused_with_the_values() {
        let shape = crate::test_data::shape([3, 2], [2, 1], 4);
        refusal(Call::new(shape, &[], &[], &[]), "3 queries but only 2 keys");
        let shape = CallShape { num_keys: 3, ..shape };
        refusal(
            Call::new(shape, &[0.0; 24], &[0.0; 12], &[0.0; 11]),
            "v has 11 elements, expected 12",
        );
        let shape = CallShape {
            num_heads: 3,
            num_kv_heads: 2,
            ..shape
        };
        assert!(Call::new(shape, &[], &[], &[]).is_err());
    }
}
