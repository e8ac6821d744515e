//! The cache of one decoded sequence.

use serde::Serialize;

use sieve_core::model::{AttentionForm, ModelShape, NUM_NSA_BRANCHES};

/// Bytes a decoded sequence holds, all layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CachePlan {
    /// Bytes that one more token adds while the cache still grows.
    pub bytes_per_token: u64,
    /// Tokens after which the cache stops growing; `None` when it never does.
    pub stops_at_tokens: Option<usize>,
    /// Length the next number is for, in tokens.
    pub seq_len: usize,
    /// Bytes at that length.
    pub bytes_at_seq_len: u64,
}

/// The cache at `seq_len` tokens, with values of `value_bytes`.
///
/// Dense attention holds K and V of every token, a window those of the last w, MLA the latent, the rotated key and,
/// where keys are normed, a factor (f32) for each head, DMA the kept keys of each KV head with their score (f32)
/// and position (i32), NSA K and V of every token, the compressed ones, and the un-rotated keys of the block that is
/// not full yet, kinds of chosen blocks K and V of every token and the pooled keys.
pub fn cache_plan(shape: &ModelShape, seq_len: usize, value_bytes: u64) -> CachePlan {
    let kinds = shape.by_kind();
    let mut all = kinds.iter().map(|part| of_kind(part, seq_len, value_bytes));
    let first = all.next().expect("a model has a kind of attention");
    all.fold(first, |sum, part| CachePlan {
        bytes_per_token: sum.bytes_per_token + part.bytes_per_token,
        // The cache stops growing when the last of its layers does.
        stops_at_tokens: sum.stops_at_tokens.zip(part.stops_at_tokens).map(|(a, b)| a.max(b)),
        seq_len,
        bytes_at_seq_len: sum.bytes_at_seq_len + part.bytes_at_seq_len,
    })
}

fn of_kind(shape: &ModelShape, seq_len: usize, value_bytes: u64) -> CachePlan {
    let layers = shape.num_layers as u64;
    let kv = 2 * shape.kv_width() as u64 * value_bytes;
    let held = |window: usize| window.min(seq_len) as u64;
    let (form, kept) = (shape.attention.form(), shape.attention.form().num_kept());
    let (per_token, stops_at_tokens, at_seq_len) = match form {
        AttentionForm::Grouped { .. } => (kv, kept, kv * held(kept.unwrap_or(seq_len))),
        AttentionForm::Latent(mla) => {
            let latent = (mla.kv_lora_rank + mla.qk_rope_head_dim) as u64 * value_bytes;
            let factors = if mla.qk_norm { 4 * shape.num_heads as u64 } else { 0 };
            let token = latent + factors;
            (token, None, token * seq_len as u64)
        }
        AttentionForm::Branches(nsa) => {
            let copies = nsa.num_kv_copies() as u64;
            // Copies of the compressed and selected branches grow; the window's own does not.
            let growing = if nsa.shared_kv { 1 } else { NUM_NSA_BRANCHES as u64 - 1 };
            let blocks = nsa.blocks().num_compressed_blocks(seq_len) as u64;
            let open_block = kv / 2 * nsa.compress_block_size as u64;
            let own_window = (copies - growing) * kv * held(nsa.window_size);
            let at = growing * kv * seq_len as u64 + own_window + blocks * kv + open_block;
            let per_token = growing * kv + kv / nsa.compress_stride as u64;
            (per_token, None, at)
        }
        // Nothing is chosen by keys of its own.
        AttentionForm::Blocks(_) if shape.is_shared_layer(0) => (kv, None, kv * seq_len as u64),
        AttentionForm::Blocks(choice) => {
            // An indexer has one key head, and its cache the key of each token.
            let stride = if choice.has_indexer() {
                1
            } else {
                choice.blocks.compress_stride as u64
            };
            let pooled = match choice.has_indexer() {
                true => seq_len as u64,
                false => choice.blocks.num_compressed_blocks(seq_len) as u64,
            };
            let [_, heads] = choice.scored_heads([shape.num_heads, shape.num_kv_heads]);
            let key = (heads * shape.head_dim) as u64 * value_bytes;
            let per_token = kv + key / stride;
            (per_token, None, kv * seq_len as u64 + pooled * key)
        }
        AttentionForm::Ranked(_) => {
            let slot = kv + 8 * shape.num_kv_heads as u64;
            (slot, kept, slot * held(kept.unwrap_or(seq_len)))
        }
    };
    CachePlan {
        bytes_per_token: layers * per_token,
        stops_at_tokens,
        seq_len,
        bytes_at_seq_len: layers * at_seq_len,
    }
}
