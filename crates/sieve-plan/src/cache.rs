//! Size of the KV cache of one decoded sequence.

use serde::Serialize;

use sieve_core::model::{AttentionForm, ModelShape, NUM_NSA_BRANCHES};

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
    let (form, tokens) = (part.attention.form(), seq_len as u64);
    let stops_at_tokens = form.num_kept();
    let held_tokens = stops_at_tokens.map_or(tokens, |kept| kept.min(seq_len) as u64);
    // Bytes of a token's K and V in one layer. Below: `[bytes that one more token adds, bytes at seq_len]`.
    let kv = 2 * part.kv_width() as u64 * value_bytes;
    let [per_token, at_seq_len] = match form {
        AttentionForm::Grouped { .. } => [kv, kv * held_tokens],
        AttentionForm::Ranked(_) => {
            // For each KV head an f32 score and an i32 position: 8 bytes.
            let key = kv + 8 * part.num_kv_heads as u64;
            [key, key * held_tokens]
        }
        AttentionForm::Latent(mla) => {
            let latent = (mla.kv_lora_rank + mla.qk_rope_head_dim) as u64 * value_bytes;
            let key_factors = if mla.qk_norm { 4 * part.num_heads as u64 } else { 0 };
            [latent + key_factors, (latent + key_factors) * tokens]
        }
        AttentionForm::Branches(nsa) => {
            // K and V of the compressed and selected branches grow; the window branch's own copy does not.
            let growing_copies = if nsa.shared_kv { 1 } else { NUM_NSA_BRANCHES as u64 - 1 };
            let window_copies = nsa.num_kv_copies() as u64 - growing_copies;
            let window = window_copies * kv * nsa.window_size.min(seq_len) as u64;
            let blocks = nsa.blocks().num_compressed_blocks(seq_len) as u64 * kv;
            // Only keys, half of `kv`.
            let open_block = kv / 2 * nsa.compress_block_size as u64;
            let growing = growing_copies * kv;
            [growing + kv / nsa.compress_stride as u64, growing * tokens + window + blocks + open_block]
        }
        // This layer uses an earlier layer's choice, so it has no pooled keys.
        AttentionForm::Blocks(_) if part.is_shared_layer(0) => [kv, kv * tokens],
        AttentionForm::Blocks(choice) => {
            // An indexer caches a key for each token instead of each pooled block.
            let (stride, num_pooled) = match choice.has_indexer() {
                true => (1, seq_len),
                false => (choice.blocks.compress_stride, choice.blocks.num_compressed_blocks(seq_len)),
            };
            let [_query_heads, key_heads] = choice.scored_heads([part.num_heads, part.num_kv_heads]);
            let pooled_key = (key_heads * part.head_dim) as u64 * value_bytes;
            [kv + pooled_key / stride as u64, kv * tokens + num_pooled as u64 * pooled_key]
        }
    };
    let layers = part.num_layers as u64;
    CachePlan { bytes_per_token: layers * per_token, stops_at_tokens, seq_len, bytes_at_seq_len: layers * at_seq_len }
}
