//! Keys and values of earlier tokens, as much of them as the attention can still see.
mod blocks;
mod latents;

pub use blocks::BlockCache;
pub(crate) use blocks::Growing;
pub use latents::LatentCache;
pub(crate) use latents::NewLatents;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};
use sieve_core::DmaShape;
use sieve_ops::{
    AttentionSpec, DmaCache, DmaToken, Documents, KeyCache, PositionOrigin, Recency, SieveBackend, cached_attention,
    dma_decode, dma_ranks,
};

/// One cache per layer, and the number of tokens that went through.
#[derive(Clone, Debug)]
pub struct KvCache<B: Backend> {
    /// In order of the layers.
    pub layers: Vec<LayerCache<B>>,
    /// Tokens seen so far; the position of the next one.
    pub num_tokens: usize,
}

impl<B: Backend> KvCache<B> {
    /// An empty cache.
    pub fn new(num_layers: usize) -> Self {
        Self {
            layers: (0..num_layers).map(|_| LayerCache::Empty).collect(),
            num_tokens: 0,
        }
    }
}

impl<B: SieveBackend> KvCache<B> {
    /// The cache of one row as that of several equal rows.
    pub fn repeat(&mut self, rows: usize) {
        for layer in &mut self.layers {
            layer.repeat(rows);
        }
    }
}

/// What one layer keeps. A prompt goes into an empty cache in one pass; after that tokens come one at a time, MLA's in
/// any number.
#[derive(Clone, Debug)]
pub enum LayerCache<B: Backend> {
    /// Nothing yet.
    Empty,
    /// The most recent keys: all of them for dense attention, at least `window_size` for a sliding window.
    Recent {
        /// The keys.
        cache: KeyCache<B>,
        /// Keys that a query sees at most.
        window_size: Option<usize>,
    },
    /// The keys that DMA still sees, at most `keep_window_size` a head.
    Selected {
        /// The slots.
        cache: DmaCache<B>,
        /// Position of the next token.
        next_position: usize,
    },
    /// What NSA's three branches need.
    Blocks(BlockCache<B>),
    /// What MLA's keys and values are made from.
    Latent(LatentCache<B>),
}

impl<B: Backend> LayerCache<B> {
    /// Whether no token went through yet.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Empty)
    }

    /// Keys per head that the next query may see, its own aside.
    pub fn num_keys(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::Recent { cache, window_size } => {
                let len = float::<B, 4>(cache.k.clone()).dims()[1];
                window_size.unwrap_or(len).min(len)
            }
            Self::Selected { cache, .. } => float::<B, 4>(cache.k.clone()).dims()[1],
            Self::Blocks(cache) => cache.num_tokens(),
            Self::Latent(cache) => cache.len(),
        }
    }
}

/// The caches with their rows of a batch: first row and how many. One cache holds all rows, else each has one.
pub(crate) fn rows_of<'a, B: Backend>(
    caches: &'a mut [&mut LayerCache<B>],
    batch: usize,
) -> impl Iterator<Item = (usize, usize, &'a mut LayerCache<B>)> {
    let rows = match caches.len() {
        1 => batch,
        _ => 1,
    };
    assert_eq!(rows * caches.len(), batch, "one cache, or one a row");
    let caches = caches.iter_mut().enumerate();
    caches.map(move |(n, cache)| (n * rows, rows, &mut **cache))
}

/// Attention of a packed tensor with each cache and its rows.
pub(crate) fn by_row<B: Backend>(
    caches: &mut [&mut LayerCache<B>],
    packed: Tensor<B, 4>,
    mut attend: impl FnMut(&mut LayerCache<B>, Tensor<B, 4>) -> Tensor<B, 4>,
) -> Tensor<B, 4> {
    if let [cache] = caches {
        return attend(cache, packed);
    }
    let batch = packed.dims()[0];
    let parts = rows_of(caches, batch).map(|(row, rows, cache)| attend(cache, packed.clone().narrow(0, row, rows)));
    Tensor::cat(parts.collect(), 0)
}

fn float<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

/// `[q, k, v]` of a packed tensor.
fn split<B: Backend>(qkv: Tensor<B, 4>, spec: AttentionSpec) -> [Tensor<B, 4>; 3] {
    let AttentionSpec {
        num_heads,
        num_kv_heads,
        ..
    } = spec;
    [
        qkv.clone().narrow(2, 0, num_heads),
        qkv.clone().narrow(2, num_heads, num_kv_heads),
        qkv.narrow(2, num_heads + num_kv_heads, num_kv_heads),
    ]
}

impl<B: SieveBackend> LayerCache<B> {
    fn repeat(&mut self, rows: usize) {
        let repeated = |x: &mut FloatTensor<B>| {
            *x = primitive(float::<B, 4>(x.clone()).repeat_dim(0, rows));
        };
        match self {
            Self::Empty => {}
            Self::Recent { cache, .. } => [&mut cache.k, &mut cache.v].into_iter().for_each(repeated),
            Self::Selected { cache, .. } => {
                [&mut cache.k, &mut cache.v].into_iter().for_each(repeated);
                cache.rank = primitive(float::<B, 3>(cache.rank.clone()).repeat_dim(0, rows));
                let positions = Tensor::<B, 3, Int>::from_primitive(cache.positions.clone());
                cache.positions = positions.repeat_dim(0, rows).into_primitive();
            }
            Self::Blocks(cache) => cache.repeat(rows),
            Self::Latent(cache) => cache.repeat(rows),
        }
    }

    /// Dense or sliding-window attention of new tokens; `[batch, new, num_heads, head_dim]`.
    ///
    /// Panics when more than one token meets a cache that is not empty.
    pub(crate) fn attend_recent(
        &mut self,
        qkv: Tensor<B, 4>,
        documents: &Documents<B>,
        spec: AttentionSpec,
    ) -> Tensor<B, 4> {
        let (cache, o) = match std::mem::replace(self, Self::Empty) {
            Self::Recent { cache, .. } => {
                assert_eq!(qkv.dims()[1], 1, "a filled cache takes one token at a time");
                cached_attention(cache, qkv, spec)
            }
            _ => {
                let [_, k, v] = split(qkv.clone(), spec);
                let [k, v] = [k, v].map(|x| primitive(recent(x, spec)));
                (KeyCache { k, v }, sieve_ops::attention(qkv, documents, spec))
            }
        };
        let window_size = spec.window_size;
        *self = Self::Recent { cache, window_size };
        o
    }

    /// Adds what MLA keeps of new tokens and returns the cache.
    pub(crate) fn extend_latents(&mut self, new: NewLatents<B>) -> LatentCache<B> {
        let all = match std::mem::replace(self, Self::Empty) {
            Self::Latent(old) => old.extended(new),
            _ => LatentCache::of(new),
        };
        *self = Self::Latent(all.clone());
        all
    }

    /// Fills an empty cache with the keys that the mask still shows to the next query.
    pub(crate) fn keep_selected(
        &mut self,
        qkv: Tensor<B, 4>,
        rank: Tensor<B, 3>,
        expire: Tensor<B, 3, Int>,
        spec: AttentionSpec,
        dma: DmaShape,
    ) {
        let device = qkv.device();
        let [batch, seq_len, _, head_dim] = qkv.dims();
        let [_, k, v] = split(qkv, spec);
        let kv_heads = spec.num_kv_heads;
        let kept = seq_len.min(dma.keep_window_size);
        let expire: Vec<i64> = expire.into_data().iter::<i64>().collect();
        let mut positions = Vec::with_capacity(batch * kv_heads * kept);
        for expire in expire.chunks(seq_len) {
            let alive = expire.iter().enumerate().filter(|(_, e)| **e as usize == seq_len);
            positions.extend(alive.map(|(j, _)| j as i32));
        }
        let positions = Tensor::<B, 3, Int>::from_data(TensorData::new(positions, [batch, kv_heads, kept]), &device);
        let gather = |x: Tensor<B, 4>| {
            let rows = positions.clone().swap_dims(1, 2).reshape([batch, kept, kv_heads, 1]);
            x.gather(1, rows.expand([batch, kept, kv_heads, head_dim]))
        };
        let cache = DmaCache {
            k: gather(k).into_primitive().tensor(),
            v: gather(v).into_primitive().tensor(),
            rank: rank.gather(2, positions.clone()).into_primitive().tensor(),
            positions: positions.into_primitive(),
            window: dma.window(),
        };
        *self = Self::Selected {
            cache,
            next_position: seq_len,
        };
    }

    /// DMA of one new token; `[batch, 1, num_heads, head_dim]`.
    ///
    /// Panics on an empty cache or more than one token.
    pub(crate) fn attend_selected(
        &mut self,
        qkv: Tensor<B, 4>,
        w_dt: Tensor<B, 2>,
        a: Tensor<B, 1>,
        spec: AttentionSpec,
        dma: DmaShape,
    ) -> Tensor<B, 4> {
        let Self::Selected { cache, next_position } = std::mem::replace(self, Self::Empty) else {
            panic!("a DMA layer decodes after a prompt");
        };
        let [batch, new, _, head_dim] = qkv.dims();
        assert_eq!(new, 1, "a filled cache takes one token at a time");
        let recency = dma.slopes(spec.num_kv_heads).map(|slopes| Recency {
            slopes,
            origin: PositionOrigin::At {
                position: next_position,
                batch,
                device: qkv.device(),
            },
        });
        let rank = dma_ranks(qkv.clone(), w_dt, a, spec, recency);
        let [q, k, v] = split(qkv, spec);
        let token = DmaToken {
            q: q.reshape([batch, spec.num_heads, head_dim]).into_primitive().tensor(),
            k: k.reshape([batch, spec.num_kv_heads, head_dim])
                .into_primitive()
                .tensor(),
            v: v.reshape([batch, spec.num_kv_heads, head_dim])
                .into_primitive()
                .tensor(),
            rank: rank.reshape([batch, spec.num_kv_heads]).into_primitive().tensor(),
            position: next_position,
        };
        let (cache, o) = dma_decode(cache, token, spec.softmax_scale, dma.bias);
        *self = Self::Selected {
            cache,
            next_position: next_position + 1,
        };
        o.reshape([batch, 1, spec.num_heads, head_dim])
    }
}

/// The keys a later query can still see.
fn recent<B: Backend>(x: Tensor<B, 4>, spec: AttentionSpec) -> Tensor<B, 4> {
    let len = x.dims()[1];
    match spec.window_size {
        Some(window_size) if len > window_size => x.narrow(1, len - window_size, window_size),
        _ => x,
    }
}
