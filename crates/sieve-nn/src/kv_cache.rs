//! Caches of earlier tokens: the keys and values that the attention can still see, or (MLA) the latents that they are
//! computed from.
mod blocks;
mod chosen;
mod latents;
mod text_rows;

pub use blocks::BlockCache;
pub use chosen::ChosenCache;
pub use latents::LatentCache;
pub(crate) use latents::NewLatents;
pub use text_rows::TextRows;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_core::DmaWindow;
use sieve_ops::{
    AttentionSpec, DeviceBackend, DmaAttention, DmaCache, DmaLayer, DmaToken, Documents, KeyCache, PositionOrigin,
    Recency, RowsOf, SelectorCache, TokenCache, cached_attention, dma_attention_by_rank, dma_decode, dma_ranks,
    split_heads,
};

/// One cache per layer, and the number of tokens processed. A clone copies the buffers.
#[derive(Clone, Debug)]
pub struct KvCache<B: DeviceBackend> {
    /// Caches in the order of the layers.
    pub layers: Vec<LayerCache<B>>,
    /// Tokens processed so far, which is also the position of the next token.
    pub num_tokens: usize,
    pub(crate) scratch: B::DecodeScratch,
    /// The captured decoding step of the last token, which the next token can repeat. Any other pass drops it.
    pub(crate) graph: B::StepGraph,
    /// Rows of the rotary tables of that step.
    pub(crate) rope_rows: usize,
    /// How many of the last passes had a single token per row.
    pub(crate) single_tokens: usize,
}

impl<B: DeviceBackend> KvCache<B> {
    /// An empty cache for a model of `num_layers` layers.
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

    /// Replaces each row by `rows` copies of it.
    pub fn repeat(&mut self, rows: usize) {
        self.graph = Default::default();
        for layer in &mut self.layers {
            *layer = layer.rows(RowsOf::Copies(rows));
        }
    }

    /// The cache of one layer, for a pass through this layer alone.
    pub fn layer(&mut self, index: usize) -> LayerCaches<'_, B> {
        self.graph = Default::default();
        LayerCaches { caches: vec![&mut self.layers[index]], scratch: &mut self.scratch }
    }
}

/// Cache of one layer. A call may add any number of tokens, and its output equals the rows of one pass over all tokens.
#[derive(Clone, Debug)]
pub enum LayerCache<B: Backend> {
    /// No token was processed yet.
    Empty,
    /// The most recent keys: all keys for dense attention, at least `window_size` for a sliding window.
    Recent {
        /// Keys and values of these tokens.
        cache: KeyCache<B>,
        /// Most keys that a query sees; `None`: all.
        window_size: Option<usize>,
    },
    /// The keys that DMA's mask still shows, at most `keep_window_size` per KV head.
    Selected {
        /// Keys, values and scores of the fixed-size cache.
        cache: DmaCache<B>,
        /// Position of the next token.
        next_position: usize,
    },
    /// Keys and values of NSA's three branches.
    Blocks(BlockCache<B>),
    /// All keys, and the pooled keys or indexer keys by which blocks are chosen.
    Chosen(ChosenCache<B>),
    /// The latents from which MLA computes keys and values.
    Latent(LatentCache<B>),
    /// All keys; for each token a selector chooses which keys it reads.
    Selector(SelectorCache<B>),
}

impl<B: Backend> LayerCache<B> {
    /// Whether no token was processed yet.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Empty)
    }

    /// Earlier keys per head that the next query may see.
    pub fn num_keys(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::Recent { cache, window_size } => window_size.unwrap_or(cache.len()).min(cache.len()),
            Self::Selected { cache, .. } => cache.len(),
            Self::Blocks(cache) => cache.num_tokens(),
            Self::Chosen(cache) => cache.num_tokens(),
            Self::Latent(cache) => cache.len(),
            Self::Selector(cache) => cache.reads.num_read(cache.keys.len()),
        }
    }

    /// The cache as an operand of [`sieve_ops::token_step`]; `None` if it is empty, or a selector reads a share of its
    /// keys.
    pub(crate) fn for_token_step(&mut self) -> Option<TokenCache<'_, B>> {
        match self {
            Self::Recent { cache, .. } => Some(TokenCache::Recent(cache)),
            Self::Selected { cache, .. } => Some(TokenCache::Slots(cache)),
            Self::Chosen(cache) => Some(cache.for_token_step()),
            Self::Blocks(cache) => Some(cache.for_token_step()),
            Self::Latent(cache) => Some(cache.for_token_step()),
            Self::Selector(cache) => cache.is_fixed.then_some(TokenCache::Selector(cache)),
            Self::Empty => None,
        }
    }

    /// Counts the token that [`sieve_ops::token_step`] has written.
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
            Self::Selector(cache) => cache.count_token(),
            Self::Empty => unreachable!("token_step takes no empty cache"),
        }
    }

    /// A copy with the rows that `rows` names: copies of each row, empty rows for texts, or the row of one text. A text
    /// of `tokens` tokens has `tokens` entries in its cache, and room for no more.
    fn rows(&self, rows: RowsOf) -> Self {
        match self {
            Self::Empty => Self::Empty,
            Self::Recent { cache, window_size } => {
                Self::Recent { cache: cache.rows(rows, |tokens| [tokens; 2]), window_size: *window_size }
            }
            Self::Selected { cache, next_position } => Self::Selected {
                cache: cache.rows(rows),
                next_position: match rows {
                    // The text's next token comes after its own tokens, however long the other texts are.
                    RowsOf::Text { tokens, .. } => tokens,
                    _ => *next_position,
                },
            },
            Self::Blocks(cache) => Self::Blocks(cache.rows(rows)),
            Self::Chosen(cache) => Self::Chosen(cache.rows(rows)),
            Self::Latent(cache) => Self::Latent(cache.rows(rows)),
            Self::Selector(_) => panic!("a selector's cache has one row"),
        }
    }

    /// Copies `text`, the one-row cache of a prompt of `tokens` tokens, into row `row`. The key of a token goes to its
    /// position, also where a window keeps only the last tokens. What is not stored per token (DMA's slots, pooled and
    /// compressed keys) begins at index 0 of the row.
    fn put(&mut self, row: usize, text: &Self, tokens: usize) {
        match (self, text) {
            (Self::Recent { cache, .. }, Self::Recent { cache: text, .. }) => cache.put(row, text, tokens),
            (Self::Selected { cache, .. }, Self::Selected { cache: text, .. }) => cache.put(row, text),
            (Self::Blocks(cache), Self::Blocks(text)) => cache.put(row, text, tokens),
            (Self::Chosen(cache), Self::Chosen(text)) => cache.put(row, text, tokens),
            (Self::Latent(cache), Self::Latent(text)) => cache.put(row, text, tokens),
            _ => panic!("both caches must be of one model, without a selector, and filled by a prompt"),
        }
    }

    /// Replaces the cache of a dense or sliding-window layer by the keys of a prompt.
    pub fn keep_recent(&mut self, qkv: &Tensor<B, 4>, spec: AttentionSpec) {
        let window_size = spec.window_size;
        let [_, k, v] = split_heads(qkv.clone(), spec.num_kv_heads);
        let seen = |x: Tensor<B, 4>| last(x, window_size.unwrap_or(usize::MAX));
        let cache = KeyCache::new(seen(k), seen(v));
        *self = Self::Recent { cache, window_size };
    }

    /// Adds new tokens to an MLA layer's cache, which may be empty, and returns it.
    pub(crate) fn extend_latents(&mut self, new: NewLatents<B>) -> &LatentCache<B> {
        match self {
            Self::Latent(cache) => cache.append(new),
            _ => *self = Self::Latent(LatentCache::new(new)),
        }
        let Self::Latent(cache) = self else { unreachable!("just filled") };
        cache
    }
}

/// The cache of the keys in a packed tensor that DMA's mask still shows to the next query. `rank`, `expire` and
/// `positions` are `[batch, num_kv_heads, seq_len]`.
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
    let kv_heads = spec.num_kv_heads;
    let [_, k, v] = split_heads(qkv, kv_heads);
    let kept = seq_len.min(window.keep_window_size);
    let expire: Vec<i64> = expire.into_data().iter::<i64>().collect();
    let mut keys = Vec::with_capacity(batch * kv_heads * kept);
    // The next query sees a key that expires only at `seq_len`; each head has `kept` of these.
    for expire in expire.chunks(seq_len) {
        let alive = expire.iter().enumerate().filter(|(_, end)| **end as usize == seq_len);
        keys.extend(alive.map(|(key, _)| key as i32));
    }
    let keys = Tensor::<B, 3, Int>::from_data(TensorData::new(keys, [batch, kv_heads, kept]), &device);
    let of_heads = keys.clone().unsqueeze_dim::<4>(3).expand([batch, kv_heads, kept, head_dim]);
    let gather = |x: Tensor<B, 4>| x.swap_dims(1, 2).gather(2, of_heads.clone());
    let rank = rank.gather(2, keys.clone());
    DmaCache::new([gather(k), gather(v)], rank, positions.gather(2, keys), window)
}

/// The caches that a pass reads and extends in one layer: one cache of all rows, or one cache per row.
#[derive(Debug)]
pub struct LayerCaches<'a, B: DeviceBackend> {
    caches: Vec<&'a mut LayerCache<B>>,
    scratch: &'a mut B::DecodeScratch,
}

/// A cache, and the rows of the batch that it holds.
pub(crate) struct CachedRows<'a, B: DeviceBackend> {
    /// The first row, and how many there are.
    pub(crate) rows: [usize; 2],
    pub(crate) cache: &'a mut LayerCache<B>,
    pub(crate) scratch: &'a mut B::DecodeScratch,
}

impl<'a, B: DeviceBackend> LayerCaches<'a, B> {
    /// The caches of layer `index`: one cache of all rows, or one cache per row. Drops their captured steps.
    ///
    /// Panics without a cache.
    pub(crate) fn of_layer(caches: &'a mut [&mut KvCache<B>], index: usize) -> Self {
        let mut first_scratch = None;
        let caches = caches.iter_mut().map(|cache| {
            let KvCache { layers, scratch, graph, .. } = &mut **cache;
            *graph = Default::default();
            first_scratch.get_or_insert(scratch);
            &mut layers[index]
        });
        Self { caches: caches.collect(), scratch: first_scratch.expect("at least one cache") }
    }

    /// The one cache of all rows, and the buffers that decoding ops share.
    ///
    /// Panics where each row has its own cache.
    pub(crate) fn single(&mut self) -> (&mut LayerCache<B>, &mut B::DecodeScratch) {
        let [cache] = &mut self.caches[..] else { panic!("each row has its own cache") };
        (cache, self.scratch)
    }

    /// The one cache of all rows, if it is empty: the pass is then a prompt.
    pub(crate) fn empty(&mut self) -> Option<&mut LayerCache<B>> {
        match &mut self.caches[..] {
            [cache] if cache.is_empty() => Some(cache),
            _ => None,
        }
    }

    /// Calls `each` for every cache, and returns its results in the order of the rows.
    pub(crate) fn each<T>(&mut self, batch: usize, mut each: impl FnMut(CachedRows<'_, B>) -> T) -> Vec<T> {
        let rows_per_cache = match self.caches.len() {
            1 => batch,
            _ => 1,
        };
        assert_eq!(rows_per_cache * self.caches.len(), batch, "one cache, or one per row");
        let caches = self.caches.iter_mut().enumerate();
        let rows = caches.map(|(n, cache)| {
            each(CachedRows { rows: [n * rows_per_cache, rows_per_cache], cache, scratch: self.scratch })
        });
        rows.collect()
    }

    /// Calls `attend` for every cache with its rows of the packed tensor, and concatenates the outputs along the batch.
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

/// The last `count` tokens of `[batch, tokens, heads, head_dim]`, or all if there are fewer.
fn last<B: Backend>(x: Tensor<B, 4>, count: usize) -> Tensor<B, 4> {
    let len = x.dims()[1];
    match len > count {
        true => x.narrow(1, len - count, count),
        false => x,
    }
}

impl<B: DeviceBackend> CachedRows<'_, B> {
    /// Dense or sliding-window attention of `new` tokens; returns `[batch, new, num_heads, head_dim]`. Several new
    /// tokens after cached tokens attend in a row of their own: the cached keys that they may see, then the new tokens.
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
        // A window includes the query's own token, so the first new token sees one cached token fewer.
        let earlier = spec.window_size.map_or(cache.len(), |window| cache.len().min(window - 1));
        let row = cache.before(&qkv, earlier);
        let documents = Documents::whole_rows([batch, earlier + new], &qkv.device());
        let o = sieve_ops::attention(row, &documents, spec);
        let [_, k, v] = split_heads(qkv, spec.num_kv_heads);
        cache.reserve(new, earlier);
        cache.append(k, v);
        o.narrow(1, earlier, new)
    }

    /// DMA of `new` tokens; returns `[batch, new, num_heads, head_dim]`. Several new tokens attend in a row of their
    /// own: the keys in the slots, then the new tokens. The mask of this row equals the mask of the whole text, because
    /// a key's rank does not depend on the query and an evicted key never returns.
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
            origin: PositionOrigin::At { position: first, shape: [batch, new], device: device.clone() },
        });
        let rank = dma_ranks(qkv.clone(), &layer, spec, recency).unwrap_or_else(|error| panic!("{error}"));
        if new == 1 {
            let one_token = |x: Tensor<B, 4>| x.squeeze_dim::<3>(1).into_primitive().tensor();
            let [q, k, v] = split_heads(qkv, spec.num_kv_heads).map(one_token);
            let token = DmaToken { q, k, v, rank: rank.squeeze_dim::<2>(2).into_primitive().tensor(), position: first };
            let o = dma_decode(cache, token, spec.softmax_scale, dma.bias, self.scratch);
            let o = o.unwrap_or_else(|error| panic!("{error}"));
            return o.unsqueeze_dim(1);
        }
        let slots = cache.in_order();
        let earlier = slots.len();
        let rank = Tensor::cat(vec![slots.rank.tokens(), rank], 2);
        let row = slots.keys.before(&qkv, earlier);
        let documents = Documents::whole_rows([batch, earlier + new], &device);
        let found = dma_attention_by_rank(row.clone(), rank, &documents, spec, dma);
        let DmaAttention { o, rank, expire } = found.unwrap_or_else(|error| panic!("{error}"));
        let positions = positions(first, [batch, spec.num_kv_heads, new], &device);
        let positions = Tensor::cat(vec![slots.positions.tokens(), positions], 2);
        *cache = still_seen(row, rank, expire, positions, spec, dma.window());
        o.narrow(1, earlier, new)
    }

    /// Replaces an empty cache by the keys of a prompt that DMA's mask still shows to the next query.
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

/// Positions `first..`, the same for each row and head, in a tensor of this shape, `[batch, heads, tokens]`.
fn positions<B: Backend>(first: usize, shape: [usize; 3], device: &B::Device) -> Tensor<B, 3, Int> {
    let first = first as i64;
    let positions = Tensor::<B, 1, Int>::arange(first..first + shape[2] as i64, device);
    positions.unsqueeze::<3>().expand(shape)
}
