//! Attention of one new query over the keys of a cache, dense and DMA.
use crate::{DmaBias, SieveBackend, dma_bias};
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{Bool, Int, Tensor, TensorPrimitive};

/// One query per sequence over all `kv_len` given keys, with an optional additive bias per key.
///
/// # Shapes
/// - q: `[batch, num_heads, head_dim]`
/// - k, v: `[batch, kv_len, num_kv_heads, head_dim]`
/// - delta: `[batch, num_kv_heads, kv_len]`
/// - returns: `[batch, num_heads, head_dim]`
pub fn decode_attention<B: SieveBackend>(
    q: Tensor<B, 3>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    delta: Option<Tensor<B, 3>>,
    softmax_scale: f64,
) -> Tensor<B, 3> {
    let o = B::decode_attention(
        q.into_primitive().tensor(),
        k.into_primitive().tensor(),
        v.into_primitive().tensor(),
        delta.map(|delta| delta.into_primitive().tensor()),
        softmax_scale,
    );
    float(o)
}

/// The slots a DMA layer keeps: `len` of them in use, each KV head with keys of its own choice.
///
/// A key that leaves the mask never returns, so its slot is free for the key that pushed it out.
#[derive(Clone, Debug)]
pub struct DmaCache<B: Backend> {
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub k: FloatTensor<B>,
    /// `[batch, len, num_kv_heads, head_dim]`.
    pub v: FloatTensor<B>,
    /// Scores, `[batch, num_kv_heads, len]`.
    pub z: FloatTensor<B>,
    /// Positions of the keys, `[batch, num_kv_heads, len]`.
    pub positions: IntTensor<B>,
    /// Slots at most.
    pub keep_window_size: usize,
}

/// One new token of every sequence.
#[derive(Clone, Debug)]
pub struct DmaToken<B: Backend> {
    /// `[batch, num_heads, head_dim]`.
    pub q: FloatTensor<B>,
    /// `[batch, num_kv_heads, head_dim]`.
    pub k: FloatTensor<B>,
    /// `[batch, num_kv_heads, head_dim]`.
    pub v: FloatTensor<B>,
    /// Scores, `[batch, num_kv_heads]`.
    pub z: FloatTensor<B>,
    /// Position of the token, larger than any in the cache.
    pub position: usize,
}

/// Offers the token's key to the cache, then attends with its query: exactly the row that the full forward pass computes.
///
/// While slots are free the key is appended. After that it takes the slot of the smallest (score, position), unless it is
/// itself the smallest: then no query ever sees it.
pub fn dma_decode<B: SieveBackend>(
    cache: DmaCache<B>,
    token: DmaToken<B>,
    softmax_scale: f64,
    bias: DmaBias,
) -> (DmaCache<B>, Tensor<B, 3>) {
    let (cache, o) = B::dma_decode_step(cache, token, softmax_scale, bias);
    (cache, float(o))
}

fn float<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

pub(crate) fn dma_decode_reference<B: SieveBackend>(
    cache: DmaCache<B>,
    token: DmaToken<B>,
    softmax_scale: f64,
    bias: DmaBias,
) -> (DmaCache<B>, FloatTensor<B>) {
    let keep_window_size = cache.keep_window_size;
    let slots = Slots {
        k: float(cache.k),
        v: float(cache.v),
        z: float(cache.z),
        positions: Tensor::from_primitive(cache.positions),
    };
    let slots = slots.offer(
        float::<B, 3>(token.k),
        float::<B, 3>(token.v),
        float::<B, 2>(token.z),
        token.position,
        keep_window_size,
    );
    let delta = dma_bias(slots.z.clone(), bias);
    let k = slots.k.clone().into_primitive().tensor();
    let v = slots.v.clone().into_primitive().tensor();
    let delta = delta.into_primitive().tensor();
    let o = B::decode_attention(token.q, k.clone(), v.clone(), Some(delta), softmax_scale);
    let cache = DmaCache {
        k,
        v,
        z: slots.z.into_primitive().tensor(),
        positions: slots.positions.into_primitive(),
        keep_window_size,
    };
    (cache, o)
}

struct Slots<B: Backend> {
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    z: Tensor<B, 3>,
    positions: Tensor<B, 3, Int>,
}

impl<B: Backend> Slots<B> {
    fn offer(
        self,
        k: Tensor<B, 3>,
        v: Tensor<B, 3>,
        z: Tensor<B, 2>,
        position: usize,
        keep_window_size: usize,
    ) -> Self {
        let [batch, len, kv_heads, head_dim] = self.k.dims();
        let k = k.reshape([batch, 1, kv_heads, head_dim]);
        let v = v.reshape([batch, 1, kv_heads, head_dim]);
        let z = z.reshape([batch, kv_heads, 1]);
        if len < keep_window_size {
            let here =
                Tensor::<B, 3, Int>::full([batch, kv_heads, 1], position as i64, &z.device());
            return Self {
                k: Tensor::cat(vec![self.k, k], 1),
                v: Tensor::cat(vec![self.v, v], 1),
                z: Tensor::cat(vec![self.z, z], 2),
                positions: Tensor::cat(vec![self.positions, here], 2),
            };
        }
        let replaced = self.replaced_slot(z.clone());
        let all = [batch, kv_heads, len];
        let wide = [batch, len, kv_heads, head_dim];
        let per_row = replaced
            .clone()
            .swap_dims(1, 2)
            .reshape([batch, len, kv_heads, 1])
            .expand(wide);
        let here = Tensor::<B, 3, Int>::full(all, position as i64, &z.device());
        Self {
            k: self.k.mask_where(per_row.clone(), k.expand(wide)),
            v: self.v.mask_where(per_row, v.expand(wide)),
            z: self.z.mask_where(replaced.clone(), z.expand(all)),
            positions: self.positions.mask_where(replaced, here),
        }
    }

    /// True at the slot that the new score takes, `[batch, num_kv_heads, len]`; false everywhere when it takes none.
    fn replaced_slot(&self, z: Tensor<B, 3>) -> Tensor<B, 3, Bool> {
        let all = self.z.dims();
        let smallest = self.z.clone().min_dim(2).expand(all);
        // Of equal scores the lower position leaves first.
        let candidates = self.z.clone().equal(smallest.clone());
        let later = self
            .positions
            .clone()
            .mask_fill(candidates.clone().bool_not(), i32::MAX);
        let first = later.min_dim(2).expand(all);
        let slot = candidates.bool_and(self.positions.clone().equal(first));
        // The new key is the most recent, so a tie keeps it.
        slot.bool_and(z.expand(all).greater_equal(smallest))
    }
}

#[cfg(test)]
mod tests;
