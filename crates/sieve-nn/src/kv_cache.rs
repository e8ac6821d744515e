//! Keys and values of earlier tokens, as much of them as the attention can still see.
mod blocks;
mod chosen;
mod latents;

pub use blocks::BlockCache;
pub use chosen::ChosenCache;
pub use latents::LatentCache;
pub(crate) use latents::NewLatents;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_core::DmaWindow;
use sieve_ops::{
    AttentionSpec, DeviceBackend, DmaAttention, DmaCache, DmaLayer, DmaToken, Documents, KeyCache, PositionOrigin,
    Recency, TokenBuffer, TokenCache, cached_attention, dma_attention_by_rank, dma_decode, dma_ranks,
};

/// One cache per layer, and the number of tokens that went through. Its buffers are its own: a clone copies them.
#[derive(Clone, Debug)]
pub struct KvCache<B: DeviceBackend> {
    /// In order of the layers.
    pub layers: Vec<LayerCache<B>>,
    /// Tokens seen so far; the position of the next one.
    pub num_tokens: usize,
    pub(crate) scratch: B::DecodeScratch,
    /// The step of the last token, kept for the next one. Any other pass drops it.
    pub(crate) graph: B::StepGraph,
    /// Rows of the rotary tables of that step.
    pub(crate) rope_rows: usize,
    /// Tokens that came alone, one after another.
    pub(crate) single_tokens: usize,
}

impl<B: DeviceBackend> KvCache<B> {
    /// An empty cache.
    pub fn new(num_layers: usize) -> Self {
        Self {
            layers: (0..num_layers).map(|_| LayerCache::Empty).collect(),
            num_tokens: 0,
            scratch: Default::default(),
            graph: Default::default(),
            rope_rows: 0,
            single_tokens: 0,
        }
    }

    /// Repeats the cache of one row for several equal rows.
    pub fn repeat(&mut self, rows: usize) {
        self.graph = Default::default();
        for layer in &mut self.layers {
            layer.repeat(rows);
        }
    }

    /// The cache of one layer.
    pub fn layer(&mut self, index: usize) -> LayerCaches<'_, B> {
        self.graph = Default::default();
        LayerCaches {
            caches: vec![&mut self.layers[index]],
            scratch: &mut self.scratch,
        }
    }
}

/// What one layer keeps. A call adds any number of tokens, and gives the rows that one pass over all tokens gives.
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
    /// All keys, and those that blocks are chosen by.
    Chosen(ChosenCache<B>),
    /// What MLA's keys and values are made from.
    Latent(LatentCache<B>),
    /// Everything of every token, for a selector that chooses keys anew for each token.
    Packed(PackedCache<B>),
}

/// Queries, keys and values of all tokens of one row.
#[derive(Clone, Debug)]
pub struct PackedCache<B: Backend> {
    /// `[1, room, num_heads + 2 * num_kv_heads, head_dim]`.
    pub qkv: TokenBuffer<B, 4>,
    /// Bounds of the keys of whole pages, f32 `[num_kv_heads, room, 2, head_dim]`, for selectors that compare those.
    pub bounds: Option<TokenBuffer<B, 4>>,
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
            Self::Recent { cache, window_size } => window_size.unwrap_or(cache.len()).min(cache.len()),
            Self::Selected { cache, .. } => cache.len(),
            Self::Blocks(cache) => cache.num_tokens(),
            Self::Chosen(cache) => cache.num_tokens(),
            Self::Latent(cache) => cache.len(),
            Self::Packed(cache) => cache.qkv.len(),
        }
    }

    /// The cache as a step of one token takes it, where it is not empty and of a kind that such a step takes.
    pub(crate) fn for_token_step(&mut self) -> Option<TokenCache<'_, B>> {
        match self {
            Self::Recent { cache, .. } => Some(TokenCache::Recent(cache)),
            Self::Selected { cache, .. } => Some(TokenCache::Slots(cache)),
            Self::Chosen(cache) => Some(cache.for_token_step()),
            Self::Blocks(cache) => Some(cache.for_token_step()),
            Self::Latent(cache) => Some(cache.for_token_step()),
            Self::Empty | Self::Packed(_) => None,
        }
    }

    /// Counts the token that such a step has written.
    pub(crate) fn count_token(&mut self) {
        match self {
            Self::Recent { cache, .. } => cache.count_token(),
            Self::Selected { cache, next_position } => {
                cache.count_token();
                *next_position += 1;
            }
            Self::Chosen(cache) => cache.count_token(),
            Self::Blocks(cache) => cache.count_token(),
            Self::Latent(cache) => cache.count_token(),
            Self::Empty | Self::Packed(_) => unreachable!("no step takes these"),
        }
    }

    fn repeat(&mut self, rows: usize) {
        match self {
            Self::Empty => {}
            Self::Recent { cache, .. } => cache.repeat(rows),
            Self::Selected { cache, .. } => cache.repeat(rows),
            Self::Blocks(cache) => cache.repeat(rows),
            Self::Chosen(cache) => cache.repeat(rows),
            Self::Latent(cache) => cache.repeat(rows),
            Self::Packed(_) => panic!("selectors read one text"),
        }
    }

    /// Fills the cache of a dense layer, or one with a window, with a prompt's keys.
    pub fn keep_recent(&mut self, qkv: &Tensor<B, 4>, spec: AttentionSpec) {
        let window_size = spec.window_size;
        let [_, k, v] = split(qkv.clone(), spec);
        let seen = |x: Tensor<B, 4>| last(x, window_size.unwrap_or(usize::MAX));
        let cache = KeyCache::new(seen(k), seen(v));
        *self = Self::Recent { cache, window_size };
    }

    /// Adds what MLA keeps of new tokens and returns the cache.
    pub(crate) fn extend_latents(&mut self, new: NewLatents<B>) -> &LatentCache<B> {
        match self {
            Self::Latent(cache) => cache.append(new),
            _ => *self = Self::Latent(LatentCache::new(new)),
        }
        let Self::Latent(cache) = self else {
            unreachable!("just filled")
        };
        cache
    }
}

/// The keys of a packed row that DMA's mask still shows to the next query, for each KV head; rank, expire and positions
/// are `[batch, num_kv_heads, seq_len]`.
fn still_seen<B: Backend>(
    qkv: Tensor<B, 4>,
    rank: Tensor<B, 3>,
    expire: Tensor<B, 3, Int>,
    positions: Tensor<B, 3, Int>,
    spec: AttentionSpec,
    window: DmaWindow,
) -> DmaCache<B> {
    let device = qkv.device();
    let [batch, seq_len, _, head_dim] = qkv.dims();
    let [_, k, v] = split(qkv, spec);
    let kv_heads = spec.num_kv_heads;
    let kept = seq_len.min(window.keep_window_size);
    let expire: Vec<i64> = expire.into_data().iter::<i64>().collect();
    let mut keys = Vec::with_capacity(batch * kv_heads * kept);
    for expire in expire.chunks(seq_len) {
        let alive = expire.iter().enumerate().filter(|(_, e)| **e as usize == seq_len);
        keys.extend(alive.map(|(j, _)| j as i32));
    }
    let keys = Tensor::<B, 3, Int>::from_data(TensorData::new(keys, [batch, kv_heads, kept]), &device);
    let of_heads = keys
        .clone()
        .unsqueeze_dim::<4>(3)
        .expand([batch, kv_heads, kept, head_dim]);
    let gather = |x: Tensor<B, 4>| x.swap_dims(1, 2).gather(2, of_heads.clone());
    let rank = rank.gather(2, keys.clone());
    DmaCache::new([gather(k), gather(v)], rank, positions.gather(2, keys), window)
}

/// What a pass reads and extends in one layer: one cache of all rows, or one of each row.
#[derive(Debug)]
pub struct LayerCaches<'a, B: DeviceBackend> {
    caches: Vec<&'a mut LayerCache<B>>,
    scratch: &'a mut B::DecodeScratch,
}

/// Some rows of a batch, and their cache.
pub(crate) struct CachedRows<'a, B: DeviceBackend> {
    /// The first row, and how many there are.
    pub(crate) rows: [usize; 2],
    pub(crate) cache: &'a mut LayerCache<B>,
    pub(crate) scratch: &'a mut B::DecodeScratch,
}

impl<'a, B: DeviceBackend> LayerCaches<'a, B> {
    /// One layer of a cache that all rows share, or of the caches of single rows.
    ///
    /// Panics without a cache.
    pub(crate) fn of_layer(caches: &'a mut [&mut KvCache<B>], index: usize) -> Self {
        let mut first = None;
        let caches = caches.iter_mut().map(|cache| {
            let KvCache {
                layers, scratch, graph, ..
            } = &mut **cache;
            *graph = Default::default();
            first.get_or_insert(scratch);
            &mut layers[index]
        });
        Self {
            caches: caches.collect(),
            scratch: first.expect("at least one cache"),
        }
    }

    /// The one cache of all rows, and what decoding ops share.
    ///
    /// Panics where each row has a cache.
    pub(crate) fn single(&mut self) -> (&mut LayerCache<B>, &mut B::DecodeScratch) {
        let [cache] = &mut self.caches[..] else {
            panic!("one cache of all rows")
        };
        (cache, self.scratch)
    }

    /// The one cache of all rows, while it is empty.
    pub(crate) fn empty(&mut self) -> Option<&mut LayerCache<B>> {
        match &mut self.caches[..] {
            [cache] if cache.is_empty() => Some(cache),
            _ => None,
        }
    }

    /// Calls `each` with the rows of each cache.
    pub(crate) fn each<T>(&mut self, batch: usize, mut each: impl FnMut(CachedRows<'_, B>) -> T) -> Vec<T> {
        let count = match self.caches.len() {
            1 => batch,
            _ => 1,
        };
        assert_eq!(count * self.caches.len(), batch, "one cache, or one a row");
        let caches = self.caches.iter_mut().enumerate();
        let rows = caches.map(|(n, cache)| {
            each(CachedRows {
                rows: [n * count, count],
                cache,
                scratch: self.scratch,
            })
        });
        rows.collect()
    }

    /// Attention of a packed tensor with each cache and its rows.
    pub(crate) fn attend(
        &mut self,
        packed: Tensor<B, 4>,
        mut attend: impl FnMut(CachedRows<'_, B>, Tensor<B, 4>) -> Tensor<B, 4>,
    ) -> Tensor<B, 4> {
        let batch = packed.dims()[0];
        if let [cache] = &mut self.caches[..] {
            let (rows, scratch) = ([0, batch], &mut *self.scratch);
            return attend(CachedRows { rows, cache, scratch }, packed);
        }
        let parts = self.each(batch, |cached| {
            let [row, rows] = cached.rows;
            attend(cached, packed.clone().narrow(0, row, rows))
        });
        Tensor::cat(parts, 0)
    }
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

/// The last `count` tokens, or all.
fn last<B: Backend>(x: Tensor<B, 4>, count: usize) -> Tensor<B, 4> {
    let len = x.dims()[1];
    match len > count {
        true => x.narrow(1, len - count, count),
        false => x,
    }
}

impl<B: DeviceBackend> CachedRows<'_, B> {
    /// Dense or sliding-window attention of new tokens; `[batch, new, num_heads, head_dim]`. Several new tokens after
    /// cached ones attend as one row: the keys that they may see, then the tokens.
    pub(crate) fn attend_recent(
        self,
        qkv: Tensor<B, 4>,
        documents: &Documents<B>,
        spec: AttentionSpec,
    ) -> Tensor<B, 4> {
        let LayerCache::Recent { cache, .. } = self.cache else {
            self.cache.keep_recent(&qkv, spec);
            return sieve_ops::attention(qkv, documents, spec);
        };
        let [batch, new, _, _] = qkv.dims();
        if new == 1 {
            return cached_attention(cache, qkv, spec, self.scratch);
        }
        let earlier = spec
            .window_size
            .map_or(cache.len(), |window| cache.len().min(window - 1));
        let row = cache.before(&qkv, earlier);
        let documents = Documents::whole_rows([batch, earlier + new], &qkv.device());
        let o = sieve_ops::attention(row, &documents, spec);
        let [_, k, v] = split(qkv, spec);
        cache.reserve(new, earlier);
        cache.append(k, v);
        o.narrow(1, earlier, new)
    }

    /// DMA of new tokens; `[batch, new, num_heads, head_dim]`. Several new tokens after cached ones attend as one row:
    /// the keys in the slots, then the tokens. A key's rank does not depend on the query and an evicted key never
    /// returns, so that row's mask equals the whole text's.
    pub(crate) fn attend_selected(self, qkv: Tensor<B, 4>, layer: DmaLayer<B>, spec: AttentionSpec) -> Tensor<B, 4> {
        let dma = layer.spec;
        let LayerCache::Selected { cache, next_position } = self.cache else {
            panic!("a DMA layer decodes after a prompt");
        };
        let [batch, new, _, _] = qkv.dims();
        let (first, device) = (*next_position, qkv.device());
        *next_position += new;
        let recency = dma.slopes(spec.num_kv_heads).map(|slopes| Recency {
            slopes,
            origin: PositionOrigin::At {
                position: first,
                shape: [batch, new],
                device: device.clone(),
            },
        });
        let rank = dma_ranks(qkv.clone(), &layer, spec, recency);
        if new == 1 {
            let [q, k, v] = split(qkv, spec).map(|x| x.squeeze_dim::<3>(1).into_primitive().tensor());
            let token = DmaToken {
                q,
                k,
                v,
                rank: rank.squeeze_dim::<2>(2).into_primitive().tensor(),
                position: first,
            };
            let o = dma_decode(cache, token, spec.softmax_scale, dma.bias, self.scratch);
            return o.unsqueeze_dim(1);
        }
        let slots = cache.in_order();
        let earlier = slots.len();
        let rank = Tensor::cat(vec![slots.rank.tokens(), rank], 2);
        let row = slots.keys.before(&qkv, earlier);
        let documents = Documents::whole_rows([batch, earlier + new], &device);
        let DmaAttention { o, rank, expire } = dma_attention_by_rank(row.clone(), rank, &documents, spec, dma);
        let positions = positions(first, [batch, spec.num_kv_heads, new], &device);
        let positions = Tensor::cat(vec![slots.positions.tokens(), positions], 2);
        *cache = still_seen(row, rank, expire, positions, spec, dma.window());
        o.narrow(1, earlier, new)
    }

    /// Fills an empty cache with the keys of a prompt that the mask still shows to the next query.
    pub(crate) fn keep_selected(
        self,
        qkv: Tensor<B, 4>,
        rank: Tensor<B, 3>,
        expire: Tensor<B, 3, Int>,
        spec: AttentionSpec,
        window: DmaWindow,
    ) {
        let positions = positions(0, rank.dims(), &qkv.device());
        *self.cache = LayerCache::Selected {
            next_position: qkv.dims()[1],
            cache: still_seen(qkv, rank, expire, positions, spec, window),
        };
    }
}

/// The positions of tokens from one on, the same for each row and head.
fn positions<B: Backend>(first: usize, shape: [usize; 3], device: &B::Device) -> Tensor<B, 3, Int> {
    let first = first as i64;
    let positions = Tensor::<B, 1, Int>::arange(first..first + shape[2] as i64, device);
    positions.unsqueeze::<3>().expand(shape)
}
