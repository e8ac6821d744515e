//! Attention of new queries over the keys of a cache: dense, DMA, latent; without gradient.
pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use crate::SieveBackend;
use crate::attention::AttentionSpec;
use crate::backend::DeviceBackend;
use crate::tensors::{Float, Ints, primitive, tensor, untracked};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::{DmaBias, DmaWindow};

/// One query per sequence over all `kv_len` given keys, with an optional additive bias per key.
///
/// # Shapes
/// - q: `[batch, num_heads, head_dim]`
/// - k, v: `[batch, kv_len, num_kv_heads, head_dim]`
/// - delta: `[batch, num_kv_heads, kv_len]`
/// - returns: `[batch, num_heads, head_dim]`
pub fn attention_decode<B: SieveBackend>(
    q: Tensor<B, 3>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    delta: Option<Tensor<B, 3>>,
    softmax_scale: f64,
) -> Tensor<B, 3> {
    let value = untracked::<B>("attention_decode");
    let (q, k, v) = (value(primitive(q)), value(primitive(k)), value(primitive(v)));
    let delta = delta.map(|delta| value(primitive(delta)));
    tensor(B::constant(B::Inner::attention_decode(q, k, v, delta, softmax_scale)))
}

/// Adds the keys and values of one token a sequence to the cache, then attends with its queries over all of them, or
/// the last `spec.window_size`. A device may leave room behind the keys, and keys that the window no longer shows, so
/// that most tokens copy none of the others.
///
/// # Shapes
/// - qkv: `[batch, 1, num_heads + 2 * num_kv_heads, head_dim]`
/// - returns: `[batch, 1, num_heads, head_dim]`
pub fn cached_attention<B: SieveBackend>(
    cache: KeyCache<B>,
    qkv: Tensor<B, 4>,
    spec: AttentionSpec,
) -> (KeyCache<B>, Tensor<B, 4>) {
    let value = untracked::<B>("cached_attention");
    let (cache, o) = B::Inner::cached_attention(cache.on(&value), value(primitive(qkv)), spec);
    (cache.on(B::constant), tensor(B::constant(o)))
}

/// Latent attention of the last `new` tokens over the cached latents, each over those up to its own. A latent is the
/// key of every head and, in its first `rank` numbers, the value of every head: `W_UK` is in the queries already,
/// `W_UV` comes behind the sum (arXiv:2405.04434, section 2.1.2). Where keys are normed, `key_scale` multiplies
/// `q·k` key by key and head by head; the weight of the norm is in the queries and in the rotated keys then.
///
/// # Shapes
/// - q: `[batch, new, num_heads, rank + rope_dim]`
/// - latents: `[batch, len, rank + rope_dim]`
/// - key_scale: `[batch, len, num_heads]`, f32
/// - returns: `[batch, new, num_heads, rank]`
pub fn mla_decode<B: SieveBackend>(
    q: Tensor<B, 4>,
    latents: Tensor<B, 3>,
    key_scale: Option<Tensor<B, 3>>,
    rank: usize,
    softmax_scale: f64,
) -> Tensor<B, 4> {
    let value = untracked::<B>("mla_decode");
    let (q, latents) = (value(primitive(q)), value(primitive(latents)));
    let key_scale = key_scale.map(|scale| value(primitive(scale)));
    tensor(B::constant(B::Inner::mla_decode(
        q,
        latents,
        key_scale,
        rank,
        softmax_scale,
    )))
}

/// Offers the token's key to the cache, then attends with its query: exactly the row that the full forward pass
/// computes.
///
/// While slots are free the key is appended. After that it takes the slot of the smallest (rank, position) among the
/// keys outside the local window. Without a local window it is a candidate itself: if it is the smallest, no query ever
/// sees it.
pub fn dma_decode<B: SieveBackend>(
    cache: DmaCache<B>,
    token: DmaToken<B>,
    softmax_scale: f64,
    bias: DmaBias,
) -> (DmaCache<B>, Tensor<B, 3>) {
    let value = untracked::<B>("dma_decode");
    let (cache, o) = B::Inner::dma_decode(cache.on(&value), token.on(&value), softmax_scale, bias);
    (cache.on(B::constant), tensor(B::constant(o)))
}

/// The slots a DMA layer keeps: `len` of them in use, each KV head with keys of its own choice.
///
/// A key that leaves the mask never returns, so its slot is free for the key that pushed it out.
#[derive(Clone, Debug)]
pub struct DmaCache<B: Backend> {
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub k: Float<B>,
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub v: Float<B>,
    /// What ranks the keys, `[batch, num_kv_heads, len]`; see [`crate::dma_rank`].
    pub rank: Float<B>,
    /// Positions of the keys, `[batch, num_kv_heads, len]`.
    pub positions: Ints<B>,
    /// Slots at most, and how many of them hold the last keys.
    pub window: DmaWindow,
}

/// Keys and values that a dense layer or one with a window keeps: `len` of them, of which a window shows the last.
#[derive(Clone, Debug)]
pub struct KeyCache<B: Backend> {
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub k: Float<B>,
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub v: Float<B>,
}

/// One new token of every sequence.
#[derive(Clone, Debug)]
pub struct DmaToken<B: Backend> {
    /// `[batch, num_heads, head_dim]`.
    pub q: Float<B>,
    /// `[batch, num_kv_heads, head_dim]`.
    pub k: Float<B>,
    /// `[batch, num_kv_heads, head_dim]`.
    pub v: Float<B>,
    /// Ranks, `[batch, num_kv_heads]`.
    pub rank: Float<B>,
    /// Position of the token, larger than any in the cache.
    pub position: usize,
}

impl<B: Backend> DmaCache<B> {
    /// The same cache above or below a graph: `to` moves each tensor.
    pub(crate) fn on<T>(self, to: impl Fn(Float<B>) -> Float<T>) -> DmaCache<T>
    where
        T: Backend<IntTensorPrimitive = B::IntTensorPrimitive>,
    {
        DmaCache {
            k: to(self.k),
            v: to(self.v),
            rank: to(self.rank),
            positions: self.positions,
            window: self.window,
        }
    }
}

impl<B: Backend> KeyCache<B> {
    fn on<T: Backend>(self, to: impl Fn(Float<B>) -> Float<T>) -> KeyCache<T> {
        KeyCache {
            k: to(self.k),
            v: to(self.v),
        }
    }
}

impl<B: Backend> DmaToken<B> {
    fn on<T: Backend>(self, to: impl Fn(Float<B>) -> Float<T>) -> DmaToken<T> {
        DmaToken {
            q: to(self.q),
            k: to(self.k),
            v: to(self.v),
            rank: to(self.rank),
            position: self.position,
        }
    }
}
