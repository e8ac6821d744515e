//! The operands of one attention call.

use std::ops::Range;

use sieve_core::CallShape;
use sieve_cpu::Matrix;

use crate::error::SelectError;

/// Refuses a call of impossible sizes.
fn check_shape(shape: &CallShape) -> Result<(), SelectError> {
    let problem = if shape.num_heads == 0 || shape.num_kv_heads == 0 || shape.head_dim == 0 {
        format!(
            "num_heads {}, num_kv_heads {} and head_dim {} must not be 0",
            shape.num_heads, shape.num_kv_heads, shape.head_dim
        )
    } else if !shape.num_heads.is_multiple_of(shape.num_kv_heads) {
        format!("num_heads {} is not a multiple of num_kv_heads {}", shape.num_heads, shape.num_kv_heads)
    } else if shape.num_queries > shape.num_keys {
        format!("{} queries but only {} keys", shape.num_queries, shape.num_keys)
    } else if shape.num_keys > i32::MAX as usize / 2 {
        format!("{} keys are more than 2^30", shape.num_keys)
    } else {
        return Ok(());
    };
    let hint = "keys count the context and this call's own tokens; packed documents are separate calls";
    Err(SelectError::refused(problem, hint))
}

/// The operands of one call: q and k after RoPE.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Sizes of q, k and v.
    pub shape: CallShape,
    /// Layer of the model, for settings that differ by layer.
    pub layer: usize,
    /// Layers of the model, 0 when unknown.
    pub num_layers: usize,
    /// Queries, `[num_queries, num_heads, head_dim]`.
    pub q: &'a [f32],
    /// Keys, `[num_keys, num_kv_heads, head_dim]`.
    pub k: &'a [f32],
    /// Values, `[num_keys, num_kv_heads, head_dim]`; empty in a call made by [`Call::without_values`].
    pub v: &'a [f32],
    /// Means of blocks; `None` unless the call was made by [`Call::of_means`].
    pub(crate) means: Option<BlockMeans<'a>>,
}

/// Means of the blocks of a call. The mean of a short last block is over its own tokens.
#[derive(Clone, Copy, Debug)]
pub struct BlockMeans<'a> {
    /// Block size in tokens.
    pub block: usize,
    /// Mean of each query block, counted from the call's first row: `[query blocks, num_heads, head_dim]`.
    pub q: &'a [f32],
    /// Mean of each key block, `[key blocks, num_kv_heads, head_dim]`.
    pub k: &'a [f32],
}

/// Refuses an operand that has another number of elements; `what` names it in the error.
fn check_operand(what: &'static str, got: usize, expected: usize) -> Result<(), SelectError> {
    if got != expected {
        let hint = "q is [num_queries, num_heads, head_dim], k and v are [num_keys, num_kv_heads, head_dim]";
        let problem = format!("{what} has {got} elements, expected {expected}");
        return Err(SelectError::refused(problem, hint));
    }
    Ok(())
}

impl<'a> Call<'a> {
    /// As [`Call::new`] without values, for methods that do not read them
    /// ([`Selector::reads`](crate::Selector::reads)).
    ///
    /// # Errors
    /// As [`Call::new`].
    pub fn without_values(shape: CallShape, q: &'a [f32], k: &'a [f32]) -> Result<Self, SelectError> {
        // k takes the place of v in the checks of `new`.
        Ok(Self { v: &[], ..Self::new(shape, q, k, k)? })
    }

    /// A call without operands, for methods that select by positions alone.
    ///
    /// # Errors
    /// Impossible sizes.
    pub fn of_shape(shape: CallShape) -> Result<Self, SelectError> {
        check_shape(&shape)?;
        Ok(Self { shape, layer: 0, num_layers: 0, q: &[], k: &[], v: &[], means: None })
    }

    /// A call with only the means of its blocks, for methods that select by them.
    ///
    /// # Errors
    /// Impossible sizes; means of another number of blocks.
    pub fn of_means(shape: CallShape, means: BlockMeans<'a>) -> Result<Self, SelectError> {
        let call = Self::of_shape(shape)?;
        let elements = |tokens: usize, heads| tokens.div_ceil(means.block) * heads * shape.head_dim;
        let expected_q = elements(shape.num_queries, shape.num_heads);
        let expected_k = elements(shape.num_keys, shape.num_kv_heads);
        check_operand("q's means", means.q.len(), expected_q)?;
        check_operand("k's means", means.k.len(), expected_k)?;
        Ok(Self { means: Some(means), ..call })
    }

    /// A call of layer 0 of a model whose depth is not known.
    ///
    /// # Errors
    /// Impossible sizes; operands of another size.
    pub fn new(shape: CallShape, q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Result<Self, SelectError> {
        let call = Self::of_shape(shape)?;
        let expected_q = shape.num_queries * shape.num_heads * shape.head_dim;
        let expected_k = shape.num_keys * shape.num_kv_heads * shape.head_dim;
        check_operand("q", q.len(), expected_q)?;
        check_operand("k", k.len(), expected_k)?;
        check_operand("v", v.len(), expected_k)?;
        Ok(Self { q, k, v, ..call })
    }

    /// A copy of the call in another layer of a model of `num_layers`.
    #[must_use]
    pub fn in_layer(self, layer: usize, num_layers: usize) -> Self {
        Self { layer, num_layers, ..self }
    }

    /// A call of some rows only, over the keys up to the last row's position.
    ///
    /// # Panics
    /// When the range leaves the call.
    #[must_use]
    pub fn chunk(&self, rows: Range<usize>) -> Self {
        let (q_len, k_len) =
            (self.shape.num_heads * self.shape.head_dim, self.shape.num_kv_heads * self.shape.head_dim);
        let num_keys = self.shape.context() + rows.end;
        Self {
            shape: CallShape { num_queries: rows.len(), num_keys, ..self.shape },
            q: &self.q[rows.start * q_len..rows.end * q_len],
            k: &self.k[..num_keys * k_len],
            // A call without values has an empty v.
            v: &self.v[..(num_keys * k_len).min(self.v.len())],
            ..*self
        }
    }

    /// Offset in q of a query's vector.
    pub fn query_at(&self, head: usize, row: usize) -> usize {
        (row * self.shape.num_heads + head) * self.shape.head_dim
    }

    /// Offset in k and v of a token's vector.
    pub fn key_at(&self, kv_head: usize, key: usize) -> usize {
        (key * self.shape.num_kv_heads + kv_head) * self.shape.head_dim
    }

    /// The query of a row of the call, `[head_dim]`.
    pub fn query(&self, head: usize, row: usize) -> &'a [f32] {
        let at = self.query_at(head, row);
        &self.q[at..at + self.shape.head_dim]
    }

    /// The key of one token and KV head, `[head_dim]`.
    pub fn key(&self, kv_head: usize, key: usize) -> &'a [f32] {
        let at = self.key_at(kv_head, key);
        &self.k[at..at + self.shape.head_dim]
    }

    /// The value of one token and KV head, `[head_dim]`.
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

    /// The KV head that a query head reads.
    pub fn kv_head(&self, head: usize) -> usize {
        head / self.shape.group_size()
    }

    /// The query heads that read a KV head.
    pub fn group(&self, kv_head: usize) -> Range<usize> {
        let m = self.shape.group_size();
        kv_head * m..(kv_head + 1) * m
    }
}

fn matrix(x: &[f32], head_dim: usize, heads: usize, head: usize, rows: Range<usize>) -> Matrix<'_> {
    let start = ((rows.start * heads + head) * head_dim).min(x.len());
    Matrix::strided(&x[start..], rows.len(), head_dim, heads * head_dim, 1)
}

/// What a selection reads of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// Only the sizes of q, k and v.
    Nothing,
    /// Means of blocks of this many queries, and of as many keys.
    BlockMeans(usize),
    /// All queries and keys.
    Tokens,
    /// Queries, keys and values, for dense outputs of some rows.
    Values,
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::refusal;

    #[test]
    fn impossible_sizes_are_refused_with_the_values() {
        let shape = CallShape::new([3, 2], [2, 1], 4);
        refusal(Call::new(shape, &[], &[], &[]), "3 queries but only 2 keys");
        let shape = CallShape { num_keys: 3, ..shape };
        refusal(Call::new(shape, &[0.0; 24], &[0.0; 12], &[0.0; 11]), "v has 11 elements, expected 12");
        let shape = CallShape { num_heads: 3, num_kv_heads: 2, ..shape };
        assert!(Call::new(shape, &[], &[], &[]).is_err());
    }
}
