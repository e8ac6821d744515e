//! Attention of one new query in plain Burn operations.
use super::{DmaCache, DmaToken, KeyCache};
use crate::attention::AttentionSpec;
use crate::backend::DeviceBackend;
use crate::dma::dma_bias;
use crate::tensors::{Float, primitive, split_heads, tensor, upcast};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};
use sieve_core::{DmaBias, DmaWindow};

/// One query per sequence over all keys; see [`crate::attention_decode`].
pub fn attention_decode<B: Backend>(
    q: Float<B>,
    k: Float<B>,
    v: Float<B>,
    delta: Option<Float<B>>,
    softmax_scale: f64,
) -> Float<B> {
    let (q, dtype) = upcast::<B, 3>(q);
    let (k, _) = upcast::<B, 4>(k);
    let (v, _) = upcast::<B, 4>(v);
    let [batch, num_heads, head_dim] = q.dims();
    let [_, kv_len, num_kv_heads, _] = k.dims();
    let group_size = num_heads / num_kv_heads;
    let q = q.reshape([batch, num_kv_heads, group_size, head_dim]);
    let mut logits = q.matmul(k.permute([0, 2, 3, 1])) * softmax_scale;
    if let Some(delta) = delta {
        let delta = tensor::<B, 3>(delta).cast(logits.dtype());
        let delta = delta.reshape([batch, num_kv_heads, 1, kv_len]);
        // Less the largest: beside a large bias q . k would lose its digits.
        logits = logits + (delta.clone() - delta.max_dim(3));
    }
    let p = burn::tensor::activation::softmax(logits, 3);
    let o = p.matmul(v.swap_dims(1, 2));
    primitive(o.reshape([batch, num_heads, head_dim]).cast(dtype))
}

/// See [`crate::cached_attention`]: the keys that the window shows, each time in a new tensor.
pub(crate) fn cached_attention<B: DeviceBackend>(
    cache: KeyCache<B>,
    qkv: Float<B>,
    spec: AttentionSpec,
) -> (KeyCache<B>, Float<B>) {
    let [q, k, v] = split_heads(tensor::<B, 4>(qkv), spec.num_kv_heads);
    let [batch, _, num_heads, head_dim] = q.dims();
    let [k, v] = [(cache.k, k), (cache.v, v)].map(|(old, new)| {
        let all = Tensor::cat(vec![tensor::<B, 4>(old), new], 1);
        let len = all.dims()[1];
        let seen = spec.window_size.unwrap_or(len).min(len);
        primitive(all.narrow(1, len - seen, seen))
    });
    let q = primitive(q.reshape([batch, num_heads, head_dim]));
    let o = B::attention_decode(q, k.clone(), v.clone(), None, spec.softmax_scale);
    let o = tensor::<B, 3>(o).reshape([batch, 1, num_heads, head_dim]);
    (KeyCache { k, v }, primitive(o))
}

/// See [`crate::mla_decode`]: each token alone.
pub fn mla_decode<B: Backend>(
    q: Float<B>,
    latents: Float<B>,
    key_scale: Option<Float<B>>,
    rank: usize,
    softmax_scale: f64,
) -> Float<B> {
    let (q, dtype) = upcast::<B, 4>(q);
    let (latents, _) = upcast::<B, 3>(latents);
    let key_scale = key_scale.map(|scale| tensor::<B, 3>(scale).cast(q.dtype()));
    let [batch, new, num_heads, width] = q.dims();
    let len = latents.dims()[1];
    let rows = (0..new).map(|at| {
        let seen = len - new + at + 1;
        let q = q.clone().narrow(1, at, 1).reshape([batch, num_heads, width]);
        let keys = latents.clone().narrow(1, 0, seen);
        let mut logits = q.matmul(keys.clone().swap_dims(1, 2)) * softmax_scale;
        if let Some(scale) = &key_scale {
            logits = logits * scale.clone().narrow(1, 0, seen).swap_dims(1, 2);
        }
        let p = burn::tensor::activation::softmax(logits, 2);
        let o = p.matmul(keys.narrow(2, 0, rank));
        o.reshape([batch, 1, num_heads, rank])
    });
    primitive(Tensor::cat(rows.collect(), 1).cast(dtype))
}

/// See [`crate::dma_decode`]: the slots in plain Burn operations around [`DeviceBackend::attention_decode`].
pub(crate) fn dma_decode<B: DeviceBackend>(
    cache: DmaCache<B>,
    token: DmaToken<B>,
    softmax_scale: f64,
    bias: DmaBias,
) -> (DmaCache<B>, Float<B>) {
    let window = cache.window;
    let slots = Slots {
        k: tensor(cache.k),
        v: tensor(cache.v),
        rank: tensor(cache.rank),
        positions: Tensor::from_primitive(cache.positions),
    };
    let slots = slots.offer(
        tensor::<B, 3>(token.k),
        tensor::<B, 3>(token.v),
        tensor::<B, 2>(token.rank),
        token.position,
        window,
    );
    let delta = dma_bias(slots.rank.clone(), bias);
    let k = primitive(slots.k.clone());
    let v = primitive(slots.v.clone());
    let delta = primitive(delta);
    let o = B::attention_decode(token.q, k.clone(), v.clone(), Some(delta), softmax_scale);
    let cache = DmaCache {
        k,
        v,
        rank: primitive(slots.rank),
        positions: slots.positions.into_primitive(),
        window,
    };
    (cache, o)
}

struct Slots<B: Backend> {
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    rank: Tensor<B, 3>,
    positions: Tensor<B, 3, Int>,
}

impl<B: Backend> Slots<B> {
    fn offer(self, k: Tensor<B, 3>, v: Tensor<B, 3>, rank: Tensor<B, 2>, position: usize, window: DmaWindow) -> Self {
        let [batch, len, kv_heads, head_dim] = self.k.dims();
        let k = k.reshape([batch, 1, kv_heads, head_dim]);
        let v = v.reshape([batch, 1, kv_heads, head_dim]);
        let rank = rank.reshape([batch, kv_heads, 1]);
        let here = |shape: [usize; 3]| Tensor::<B, 3, Int>::full(shape, position as i64, &self.rank.device());
        if len < window.keep_window_size {
            let here = here([batch, kv_heads, 1]);
            return Self {
                k: Tensor::cat(vec![self.k, k], 1),
                v: Tensor::cat(vec![self.v, v], 1),
                rank: Tensor::cat(vec![self.rank, rank], 2),
                positions: Tensor::cat(vec![self.positions, here], 2),
            };
        }
        let replaced = self.replaced_slot(rank.clone(), position, window.local_window_size);
        let all = [batch, kv_heads, len];
        let wide = [batch, len, kv_heads, head_dim];
        let per_row = replaced
            .clone()
            .swap_dims(1, 2)
            .reshape([batch, len, kv_heads, 1])
            .expand(wide);
        let here = here(all);
        Self {
            k: self.k.mask_where(per_row.clone(), k.expand(wide)),
            v: self.v.mask_where(per_row, v.expand(wide)),
            rank: self.rank.mask_where(replaced.clone(), rank.expand(all)),
            positions: self.positions.mask_where(replaced, here),
        }
    }

    /// True at the slot that the key at `position` takes, `[batch, num_kv_heads, len]`; false everywhere when it takes
    /// none.
    fn replaced_slot(&self, rank: Tensor<B, 3>, position: usize, local: usize) -> Tensor<B, 3, Bool> {
        let all = self.rank.dims();
        // With the new key, the last `local` keys are those after this position.
        let last_candidate = position as i64 - local as i64;
        let in_local_window = self.positions.clone().greater_elem(last_candidate);
        let ranks = (self.rank.clone()).mask_fill(in_local_window.clone(), f64::INFINITY);
        let smallest = ranks.clone().min_dim(2).expand(all);
        // Of equal ranks the lower position leaves first.
        let no_candidate = (ranks.equal(smallest.clone()).bool_not()).bool_or(in_local_window);
        let later = (self.positions.clone()).mask_fill(no_candidate.clone(), i32::MAX);
        let first = later.min_dim(2).expand(all);
        let slot = (self.positions.clone().equal(first)).bool_and(no_candidate.bool_not());
        if local > 0 {
            return slot;
        }
        // The new key is the most recent, so a tie keeps it.
        slot.bool_and(rank.expand(all).greater_equal(smallest))
    }
}
