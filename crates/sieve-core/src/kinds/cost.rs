//! What a layer of a kind costs: arithmetic, memory, and what processes exchange. Plans ask it, and a model that counts
//! its FLOPs.

use super::sizes::{Activations, BackwardCall, Exchanged, Halo, KeptCall};
use crate::model::ModelShape;

/// Multiply-adds of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerFlops {
    /// Weights that a token is multiplied with.
    pub weights: f64,
    /// Multiply-adds of `Q K^T` and `P V` for a pair of a query and a key, over all heads.
    pub per_pair: f64,
    /// Multiply-adds of an indexer's scores for a key of the document up to the query; 0 without an indexer.
    pub per_scored_key: f64,
    /// The same for the gradient of an indexer's loss, for each key that is seen: also in a layer that has the loss of
    /// an earlier layer's indexer.
    pub per_learned_key: f64,
}

/// What a layer of a kind costs.
pub trait Cost {
    /// Weights that a token meets, and multiply-adds per pair.
    fn flops(&self, layer: &ModelShape) -> LayerFlops;

    /// Values per token that a layer reads and writes, forward and backward, beyond a dense layer's.
    fn extra_traffic(&self, _layer: &ModelShape) -> f64 {
        0.0
    }

    /// What a layer keeps for its backward pass, per token.
    fn activations(&self, call: &KeptCall<'_>) -> Activations;

    /// Width of the packed q, k and v.
    fn packed_width(&self, layer: &ModelShape) -> u64 {
        (layer.q_width() + 2 * layer.kv_width()) as u64
    }

    /// Bytes of f32 sums and other buffers of attention's backward pass on a GPU.
    fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64;

    /// The KV cache of one layer: bytes that one more token adds while it grows, and bytes at `seq_len` tokens.
    fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2];

    /// As [`cache`](Self::cache), on a CPU.
    fn cache_on_host(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        self.cache(layer, seq_len, value_bytes)
    }

    /// Bytes of a text of `tokens` tokens in a cache that several texts share, where a window's keys stay when it has
    /// passed them.
    fn cache_in_row(&self, layer: &ModelShape, tokens: usize, value_bytes: u64) -> u64 {
        self.cache(layer, tokens, value_bytes)[1]
    }

    /// Size of a window if the cache of a single text holds only its keys.
    fn cached_window(&self) -> Option<usize> {
        None
    }

    /// The earlier keys that a query may see, if context parallelism computes attention over a process's own tokens
    /// with these keys before them; `None` if a query may see all keys, so that processes exchange heads instead.
    fn halo(&self) -> Option<Halo> {
        None
    }

    /// What processes that share a row exchange for one layer when they exchange heads.
    fn exchanged(&self, layer: &ModelShape) -> Exchanged {
        Exchanged::packed(layer)
    }
}
