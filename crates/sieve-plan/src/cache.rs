//! Size of the KV cache of one decoded sequence.

use serde::Serialize;

use sieve_core::model::ModelShape;

/// Size of a decoded sequence's KV cache, over all layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CachePlan {
    /// Bytes that one more token adds while the cache still grows.
    pub bytes_per_token: u64,
    /// Number of tokens after which the cache stops growing; `None` if it never does.
    pub stops_at_tokens: Option<usize>,
    /// Number of tokens for which `bytes_at_seq_len` is given.
    pub seq_len: usize,
    /// Bytes of the cache at `seq_len` tokens.
    pub bytes_at_seq_len: u64,
}

/// The cache at `seq_len` tokens, with values of `value_bytes`.
///
/// A layer caches, by kind:
/// - dense: K and V of every token; sliding window: K and V of the last w tokens;
/// - MLA: the latent and the rotated key of every token and, if keys are normed, an f32 factor for each head;
/// - DMA: K and V of the kept keys of each KV head, with an f32 score and an i32 position;
/// - NSA: K and V of every token, of every compressed block, and the un-rotated keys of the block that is not full;
/// - kinds with chosen blocks: K and V of every token, and the pooled keys.
pub fn cache_plan(shape: &ModelShape, seq_len: usize, value_bytes: u64) -> CachePlan {
    let kinds = shape.by_kind();
    let mut all = kinds.iter().map(|part| of_kind(part, seq_len, value_bytes));
    let first = all.next().expect("a model has a kind of attention");
    all.fold(first, |sum, part| CachePlan {
        bytes_per_token: sum.bytes_per_token + part.bytes_per_token,
        // The cache stops growing when its last layer does.
        stops_at_tokens: sum.stops_at_tokens.zip(part.stops_at_tokens).map(|(a, b)| a.max(b)),
        seq_len,
        bytes_at_seq_len: sum.bytes_at_seq_len + part.bytes_at_seq_len,
    })
}

/// The cache of the layers of a part, which all have the same attention.
fn of_kind(part: &ModelShape, seq_len: usize, value_bytes: u64) -> CachePlan {
    let kind = part.attention.as_kind();
    let [per_token, at_seq_len] = kind.cache(part, seq_len, value_bytes);
    let layers = part.num_layers as u64;
    CachePlan {
        bytes_per_token: layers * per_token,
        stops_at_tokens: kind.num_kept(),
        seq_len,
        bytes_at_seq_len: layers * at_seq_len,
    }
}
