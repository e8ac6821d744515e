//! Size of the KV cache of one decoded sequence.

use serde::Serialize;

use crate::Target;
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

/// The cache at `seq_len` tokens on a device of this kind; see [`cache_plan`].
pub fn cache_on(shape: &ModelShape, seq_len: usize, target: &Target) -> CachePlan {
    match target {
        Target::Cpu { .. } => {
            of_kinds(shape, seq_len, |part| part.attention.as_kind().cache_on_host(part, seq_len, target.value_bytes()))
        }
        Target::Gpu(_) => cache_plan(shape, seq_len, target.value_bytes()),
    }
}

/// The cache at `seq_len` tokens on a GPU, with values of `value_bytes`.
///
/// A layer caches, by kind:
/// - dense: K and V of every token; sliding window: K and V of the last w tokens;
/// - MLA: the latent and the rotated key of every token and, if keys are normed, an f32 factor for each head; on a CPU
///   K and V of every token;
/// - DMA: K and V of the kept keys of each KV head, with an f32 score and an i32 position;
/// - NSA: K and V of every token, of every compressed block, and the un-rotated keys of the block that is not full;
/// - kinds with chosen blocks: K and V of every token, and the pooled keys.
pub fn cache_plan(shape: &ModelShape, seq_len: usize, value_bytes: u64) -> CachePlan {
    of_kinds(shape, seq_len, |part| part.attention.as_kind().cache(part, seq_len, value_bytes))
}

/// The cache of all layers. `of_layer` gives the bytes that a token adds to a layer's, and its bytes at `seq_len`
/// tokens.
fn of_kinds(shape: &ModelShape, seq_len: usize, of_layer: impl Fn(&ModelShape) -> [u64; 2]) -> CachePlan {
    let kinds = shape.by_kind();
    let of_kind = |part: &ModelShape| {
        let ([per_token, at_seq_len], layers) = (of_layer(part), part.num_layers as u64);
        CachePlan {
            bytes_per_token: layers * per_token,
            stops_at_tokens: part.attention.as_kind().num_kept(),
            seq_len,
            bytes_at_seq_len: layers * at_seq_len,
        }
    };
    let mut all = kinds.iter().map(of_kind);
    let first = all.next().expect("a model has a kind of attention");
    all.fold(first, |sum, part| CachePlan {
        bytes_per_token: sum.bytes_per_token + part.bytes_per_token,
        // The cache stops growing when its last layer does.
        stops_at_tokens: sum.stops_at_tokens.zip(part.stops_at_tokens).map(|(a, b)| a.max(b)),
        seq_len,
        bytes_at_seq_len: sum.bytes_at_seq_len + part.bytes_at_seq_len,
    })
}
