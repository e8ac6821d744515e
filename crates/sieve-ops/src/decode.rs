//! Attention of new queries over the keys of a cache: dense, DMA, latent. No function here has a gradient.
mod cache;
mod call;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "cuda")]
mod cuda_step;
pub(crate) mod reference;
#[cfg(feature = "cuda")]
mod scratch;
#[cfg(test)]
mod tests;
mod token_buffer;
mod token_step;

pub use cache::{DmaCache, KeyCache, SelectorCache, both_ends, kept_ends};
pub use call::{DmaToken, TokenAttention, TokenBranches, TokenCache, TokenExtra, TokenLayer, TokenStep, TokensBefore};
pub use sieve_cpu::{draw as draw_on_host, first_of_largest, token_loss as token_loss_on_host};
pub use token_buffer::{RowsOf, TokenBuffer};
pub use token_step::{repeat_token_step, token_step};

use crate::dma::checks;
use crate::operands::Operands;
use crate::tensors::{primitive, tensor};
use crate::{AttentionSpec, DeviceBackend, OperandError};
use burn::tensor::{DType, Int, Tensor, TensorData};
use sieve_core::{DmaBias, DmaWindow, Draw};

/// One query per sequence over all keys of a cache, with an optional additive bias per key.
///
/// # Shapes
/// - q: `[batch, num_heads, head_dim]`
/// - delta: `[batch, num_kv_heads, keys]`
/// - returns: `[batch, num_heads, head_dim]`
pub fn attention_decode<B: DeviceBackend>(
    q: Tensor<B, 3>,
    keys: &KeyCache<B>,
    delta: Option<Tensor<B, 3>>,
    softmax_scale: f64,
    scratch: &mut B::DecodeScratch,
) -> Tensor<B, 3> {
    let delta = delta.map(primitive);
    tensor(B::attention_decode(primitive(q), keys, delta, softmax_scale, scratch))
}

/// Adds the keys and values of one token a sequence to the cache, then attends with the token's queries over all cached
/// keys, or the last `spec.window_size` and those of `spec.far`. Keys that no later token reads are dropped only when
/// the buffer is full.
///
/// # Shapes
/// - qkv: `[batch, 1, num_heads + 2 * num_kv_heads, head_dim]`
/// - sinks: `[num_heads]`, as in [`attention_with_sinks`](crate::attention_with_sinks); `None`: no sinks
/// - returns: `[batch, 1, num_heads, head_dim]`
pub fn cached_attention<B: DeviceBackend>(
    cache: &mut KeyCache<B>,
    qkv: Tensor<B, 4>,
    sinks: Option<Tensor<B, 1>>,
    spec: AttentionSpec,
    scratch: &mut B::DecodeScratch,
) -> Tensor<B, 4> {
    // A larger buffer, if the token needs one, gets only the keys that this and later tokens may read.
    cache.make_room(1, spec.kept_keys());
    tensor(B::cached_attention(cache, primitive(qkv), sinks.map(primitive), spec, scratch))
}

/// Latent attention of the last `new` tokens, each over the cached latents up to its own. A latent serves as the key of
/// every head and, in its first `rank` numbers, as the value of every head: the caller has multiplied `W_UK` into the
/// queries, and applies `W_UV` to the output (arXiv:2405.04434, section 2.1.2). Where keys are normed, `key_scale`
/// multiplies `q·k` for each key and head, and the caller has multiplied the norm's weight into the queries and the
/// rotated keys.
///
/// # Shapes
/// - q: `[batch, new, num_heads, rank + rope_dim]`
/// - latents: `[batch, len, rank + rope_dim]`
/// - key_scale: `[batch, len, num_heads]`, f32
/// - returns: `[batch, new, num_heads, rank]`
pub fn mla_decode<B: DeviceBackend>(
    q: Tensor<B, 4>,
    latents: Tensor<B, 3>,
    key_scale: Option<Tensor<B, 3>>,
    rank: usize,
    softmax_scale: f64,
) -> Tensor<B, 4> {
    let (q, latents, key_scale) = (primitive(q), primitive(latents), key_scale.map(primitive));
    tensor(B::mla_decode(q, latents, key_scale, rank, softmax_scale))
}

/// Adds the token's key to the cache, then attends with its query. The output equals the query's row of
/// [`dynamic_mask_attention`](crate::dynamic_mask_attention) over all tokens.
///
/// A key that finds no free slot replaces the key with the smallest (rank, position) outside the local window. Without
/// a local window the new key is compared, too: if it is the smallest, no query ever sees it.
///
/// # Errors
/// A part of the token of a shape that the cache does not ask for; a cache of 0 slots.
pub fn dma_decode<B: DeviceBackend>(
    cache: &mut DmaCache<B>,
    token: DmaToken<B>,
    softmax_scale: f64,
    bias: DmaBias,
    scratch: &mut B::DecodeScratch,
) -> Result<Tensor<B, 3>, OperandError> {
    checks::token(Operands("dma_decode"), &token, cache)?;
    Ok(tensor(B::dma_decode(cache, token, softmax_scale, bias, scratch)))
}

/// The cache of the keys that the last query of a row sees: of `qkv`, `[batch, tokens, num_heads + 2 * num_kv_heads,
/// head_dim]`, by `rank` and `expire`, `[batch, num_kv_heads, tokens]`, as [`DmaAttention`](crate::DmaAttention) holds
/// them. `positions`, of the same shape, are those of the row's tokens; `None`: 0, 1, 2, … The host does not wait for
/// the device.
pub fn dma_cache<B: DeviceBackend>(
    qkv: Tensor<B, 4>,
    (rank, expire): (Tensor<B, 3>, Tensor<B, 3, Int>),
    positions: Option<Tensor<B, 3, Int>>,
    spec: AttentionSpec,
    window: DmaWindow,
) -> DmaCache<B> {
    let slots = expire.dims()[2].min(window.keep_window_size);
    let kept = B::dma_kept_keys(expire.into_primitive(), slots);
    let [keys, rank] = B::dma_halo_keys(primitive(qkv), primitive(rank), kept.clone(), spec);
    let (keys, kept) = (tensor::<B, 4>(keys).swap_dims(1, 2), Tensor::from_primitive(kept));
    let [k, v] = [0, 1].map(|part| keys.clone().narrow(1, part * spec.num_kv_heads, spec.num_kv_heads));
    let positions = match positions {
        Some(positions) => positions.gather(2, kept),
        None => kept,
    };
    DmaCache::new([k, v], tensor(rank), positions, window).in_order()
}

/// A token of each row of `[rows, vocab_size]`, drawn on the device among the first `num_tokens` as the row's [`Draw`]
/// says; equal logits and draws give equal tokens on every device. `None` where one of these logits is NaN or infinite.
///
/// # Panics
/// Where there is not one draw for each row.
pub fn draw<B: DeviceBackend>(logits: Tensor<B, 2>, draws: &[Draw], num_tokens: usize) -> Vec<Option<u32>> {
    let [rows, _] = logits.dims();
    assert_eq!(draws.len(), rows, "one draw for each row");
    if draws.iter().all(|draw| *draw == Draw::LIKELIEST) {
        return tokens::<B>(Tensor::from_primitive(B::likeliest(primitive(logits), num_tokens)));
    }
    let words: Vec<i32> = draws.iter().flat_map(Draw::words).collect();
    let draws = TensorData::new(words, [rows, Draw::WORDS]);
    let draws = Tensor::<B, 2, Int>::from_data(draws, (&logits.device(), DType::I32));
    let ids = B::draw(primitive(logits), draws.into_primitive(), num_tokens);
    tokens::<B>(Tensor::from_primitive(ids))
}

/// The loss in nats of one token of each row of logits, `[rows, vocab_size]`: the bits of
/// [`token_losses`](crate::token_losses), which computes these logits.
///
/// # Panics
/// Where there is not one token for each row.
pub fn losses_of_logits<B: DeviceBackend>(logits: Tensor<B, 2>, tokens: &[u32]) -> Vec<f64> {
    let [rows, _] = logits.dims();
    assert_eq!(tokens.len(), rows, "one token for each row");
    let labels: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
    let labels = Tensor::<B, 1, Int>::from_data(TensorData::new(labels, [rows]), (&logits.device(), DType::I32));
    let losses = tensor::<B, 1>(B::losses_of_logits(primitive(logits), labels.into_primitive()));
    losses.into_data().iter::<f64>().collect()
}

/// The ids that a device chose, -1 standing for none.
fn tokens<B: DeviceBackend>(ids: Tensor<B, 2, Int>) -> Vec<Option<u32>> {
    ids.into_data().iter::<i64>().map(|id| u32::try_from(id).ok()).collect()
}
