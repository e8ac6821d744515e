//! The row that a part of a prompt is read in: cached keys and values, then the part's own tokens.

use rayon::prelude::*;

use crate::zeros::zeros;

/// Fewest tokens that a thread copies.
const LEAST_TOKENS: usize = 32;

/// Sizes of a row behind a cache.
#[derive(Clone, Copy, Debug)]
pub struct CachedRow {
    /// Texts.
    pub batch: usize,
    /// Heads of a token of the row: those of queries, of keys and of values.
    pub num_heads: usize,
    /// Heads of keys, and as many of values.
    pub num_kv_heads: usize,
    /// Width of every head.
    pub head_dim: usize,
    /// Tokens that a buffer of the cache has room for.
    pub room: usize,
    /// Tokens in the cache.
    pub len: usize,
    /// How many of the cache's first tokens are read, and how many of its last.
    pub ends: [usize; 2],
}

/// The cache's tokens with queries of zero, followed by the tokens of `new`, `[batch, tokens, num_heads, head_dim]`.
///
/// Concatenating such tensors takes one thread: it was a quarter of the time in which a server reads a long prompt by
/// parts.
///
/// # Shapes
/// - keys: keys and values, `[batch, num_kv_heads, room, head_dim]` each
/// - new: `[batch, new tokens, num_heads, head_dim]`
///
/// # Panics
/// When lengths do not fit.
pub fn row_behind_cache(sizes: CachedRow, keys: [&[f32]; 2], new: &[f32]) -> Vec<f32> {
    let CachedRow { batch, num_heads, num_kv_heads, head_dim, room, len, ends: [first, last] } = sizes;
    let (earlier, token_len) = (first + last, num_heads * head_dim);
    let cache_len = batch * num_kv_heads * room * head_dim;
    assert!(keys.iter().all(|x| x.len() == cache_len), "row_behind_cache: keys or values have the wrong size");
    assert!(2 * num_kv_heads <= num_heads && earlier <= len && len <= room, "row_behind_cache: {sizes:?}");
    assert!(token_len > 0 && new.len().is_multiple_of(batch * token_len), "row_behind_cache: new has the wrong size");
    let added = new.len() / (batch * token_len);
    let mut row = zeros(batch * (earlier + added) * token_len);
    row.par_chunks_exact_mut(token_len).with_min_len(LEAST_TOKENS).enumerate().for_each(|(token, to)| {
        let (text, token) = (token / (earlier + added), token % (earlier + added));
        if let Some(token) = token.checked_sub(earlier) {
            return to.copy_from_slice(&new[(text * added + token) * token_len..][..token_len]);
        }
        let slot = if token < first { token } else { len - last + token - first };
        let heads = to.chunks_exact_mut(head_dim).skip(num_heads - 2 * num_kv_heads).enumerate();
        heads.for_each(|(head, to)| {
            let (tensor, head) = (head / num_kv_heads, text * num_kv_heads + head % num_kv_heads);
            to.copy_from_slice(&keys[tensor][(head * room + slot) * head_dim..][..head_dim]);
        });
    });
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::Random;

    #[test]
    fn a_row_has_both_ends_of_the_cache_and_then_the_new_tokens() {
        let mut random = Random(5);
        for case in 0..40 {
            let [batch, queries, num_kv_heads, head_dim] = [3, 4, 3, 5].map(|most| 1 + random.below(most));
            let (len, added) = (random.below(150), 1 + random.below(3));
            let room = len + random.below(4);
            let first = random.below(len + 1);
            let ends = [first, random.below(len - first + 1)];
            let num_heads = queries + 2 * num_kv_heads;
            let sizes = CachedRow { batch, num_heads, num_kv_heads, head_dim, room, len, ends };
            let keys = [(); 2].map(|()| random.vector(batch * num_kv_heads * room * head_dim));
            let new = random.vector(batch * added * num_heads * head_dim);
            let row = row_behind_cache(sizes, keys.each_ref().map(Vec::as_slice), &new);
            let tokens = ends[0] + ends[1] + added;
            assert_eq!(row.len(), batch * tokens * num_heads * head_dim, "case {case}");
            for (at, &found) in row.iter().enumerate() {
                let (column, head) = (at % head_dim, at / head_dim % num_heads);
                let (token, text) = (at / head_dim / num_heads % tokens, at / head_dim / num_heads / tokens);
                let slot = if token < ends[0] { token } else { len + token - ends[0] - ends[1] };
                let cached =
                    |keys: &[f32], head| keys[((text * num_kv_heads + head) * room + slot) * head_dim + column];
                let expected = match (token.checked_sub(ends[0] + ends[1]), head.checked_sub(queries)) {
                    (Some(token), _) => new[((text * added + token) * num_heads + head) * head_dim + column],
                    (None, None) => 0.0,
                    (None, Some(head)) if head < num_kv_heads => cached(&keys[0], head),
                    (None, Some(head)) => cached(&keys[1], head - num_kv_heads),
                };
                assert!(found == expected, "case {case}, {sizes:?}: text {text}, token {token}, head {head}");
            }
        }
    }
}
