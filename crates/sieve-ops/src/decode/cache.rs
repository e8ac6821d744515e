//! Keys and values of earlier tokens, in buffers that a device writes to.
use super::token_buffer::TokenBuffer;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};
use sieve_core::DmaWindow;

/// Keys lie in `[batch, num_kv_heads, room, head_dim]`, so that the keys of a head are contiguous.
const KEY_AXIS: usize = 2;

/// Keys and values that a layer keeps of earlier tokens, or some of them.
#[derive(Clone, Debug)]
pub struct KeyCache<B: Backend> {
    /// `[batch, num_kv_heads, room, head_dim]`.
    pub k: TokenBuffer<B, 4>,
    /// `[batch, num_kv_heads, room, head_dim]`.
    pub v: TokenBuffer<B, 4>,
}

impl<B: Backend> KeyCache<B> {
    /// A cache of these tokens with some room behind them: k, v `[batch, new, num_kv_heads, head_dim]`.
    pub fn new(k: Tensor<B, 4>, v: Tensor<B, 4>) -> Self {
        Self::with_capacity(k.swap_dims(1, KEY_AXIS), v.swap_dims(1, KEY_AXIS), None)
    }

    /// As [`new`](Self::new) from `[batch, num_kv_heads, new, head_dim]`, with this much room for all tokens.
    pub fn with_capacity(k: Tensor<B, 4>, v: Tensor<B, 4>, room: Option<usize>) -> Self {
        let [k, v] = [k, v].map(|x| TokenBuffer::new(x, KEY_AXIS, room));
        Self { k, v }
    }

    /// A cache without a key, `[batch, num_kv_heads, room, head_dim]` of keys and of values.
    pub fn empty(shape: [usize; 4], options: (&B::Device, DType)) -> Self {
        let [k, v] = [(); 2].map(|()| TokenBuffer::empty(shape, KEY_AXIS, options));
        Self { k, v }
    }

    /// Keys in the cache.
    pub fn len(&self) -> usize {
        self.k.len()
    }

    /// Whether the cache holds no key.
    pub fn is_empty(&self) -> bool {
        self.k.is_empty()
    }

    /// Adds tokens; k, v `[batch, new, num_kv_heads, head_dim]`.
    pub fn append(&mut self, k: Tensor<B, 4>, v: Tensor<B, 4>) {
        self.k.append(k.swap_dims(1, KEY_AXIS));
        self.v.append(v.swap_dims(1, KEY_AXIS));
    }

    /// A packed row of the last `earlier` keys, with queries of zero, and then new tokens, `qkv`
    /// `[batch, new, num_heads + 2 * num_kv_heads, head_dim]`.
    pub fn before(&self, qkv: &Tensor<B, 4>, earlier: usize) -> Tensor<B, 4> {
        let last = |x: &TokenBuffer<B, 4>| {
            let tokens = x.tokens().narrow(KEY_AXIS, self.len() - earlier, earlier);
            tokens.swap_dims(1, KEY_AXIS)
        };
        let [batch, _, heads, head_dim] = qkv.dims();
        let num_heads = heads - 2 * self.k.buffer().dims()[1];
        let queries = Tensor::zeros([batch, earlier, num_heads, head_dim], (&qkv.device(), qkv.dtype()));
        let keys = Tensor::cat(vec![queries, last(&self.k), last(&self.v)], 2);
        Tensor::cat(vec![keys, qkv.clone()], 1)
    }

    /// Makes room for `new` more tokens, after which only the last `kept` of the others may be there.
    pub fn reserve(&mut self, new: usize, kept: usize) {
        self.k.reserve(new, kept);
        self.v.reserve(new, kept);
    }

    /// Makes each row several equal ones.
    pub fn repeat(&mut self, rows: usize) {
        self.k.repeat(rows);
        self.v.repeat(rows);
    }

    /// Counts a token that a kernel wrote behind the others.
    pub fn count_token(&mut self) {
        self.k.count(1);
        self.v.count(1);
    }

    /// Writes one token, `[batch, num_kv_heads, 1, head_dim]`, into the slots where `is_there`,
    /// `[batch, num_kv_heads, room]`, is true.
    pub(super) fn replace(&mut self, is_there: Tensor<B, 3, burn::tensor::Bool>, k: Tensor<B, 4>, v: Tensor<B, 4>) {
        for (all, one) in [(&mut self.k, k), (&mut self.v, v)] {
            let shape = all.buffer().dims();
            let is_there = is_there.clone().unsqueeze_dim::<4>(3).expand(shape);
            all.write(|all| all.mask_where(is_there, one.expand(shape)));
        }
    }
}

/// The slots a DMA layer keeps, `window.keep_window_size` of them, each KV head with keys of its own choice.
///
/// A key that leaves the mask never returns, so its slot is free for the key that pushed it out.
#[derive(Clone, Debug)]
pub struct DmaCache<B: Backend> {
    /// The slots.
    pub keys: KeyCache<B>,
    /// What ranks the keys, `[batch, num_kv_heads, keep_window_size]`; see [`crate::dma_rank`].
    pub rank: TokenBuffer<B, 3>,
    /// Positions of the keys, `[batch, num_kv_heads, keep_window_size]`.
    pub positions: TokenBuffer<B, 3, Int>,
    /// Slots at most, and how many of them hold the last keys.
    pub window: DmaWindow,
}

impl<B: Backend> DmaCache<B> {
    /// The slots with these keys: k, v `[batch, num_kv_heads, len, head_dim]`; rank, positions
    /// `[batch, num_kv_heads, len]`.
    ///
    /// Panics on more keys than slots.
    pub fn new([k, v]: [Tensor<B, 4>; 2], rank: Tensor<B, 3>, positions: Tensor<B, 3, Int>, window: DmaWindow) -> Self {
        let room = Some(window.keep_window_size);
        assert!(k.dims()[KEY_AXIS] <= window.keep_window_size, "more keys than slots");
        Self {
            keys: KeyCache::with_capacity(k, v, room),
            rank: TokenBuffer::new(rank, 2, room),
            positions: TokenBuffer::new(positions, 2, room),
            window,
        }
    }

    /// Keys in the slots.
    pub fn len(&self) -> usize {
        self.rank.len()
    }

    /// Whether no slot is taken.
    pub fn is_empty(&self) -> bool {
        self.rank.is_empty()
    }

    /// Whether a new key takes another one's slot.
    pub(crate) fn is_full(&self) -> bool {
        self.len() >= self.window.keep_window_size
    }

    /// The same keys by rising position.
    pub fn in_order(&self) -> Self {
        let order = self.positions.tokens().argsort(2);
        let [batch, heads, len, width] = self.keys.k.tokens().dims();
        let of_keys = order.clone().unsqueeze_dim::<4>(3).expand([batch, heads, len, width]);
        let keys = [&self.keys.k, &self.keys.v].map(|x| x.tokens().gather(2, of_keys.clone()));
        let rank = self.rank.tokens().gather(2, order.clone());
        let positions = self.positions.tokens().gather(2, order);
        Self::new(keys, rank, positions, self.window)
    }

    /// Makes each row several equal ones.
    pub fn repeat(&mut self, rows: usize) {
        self.keys.repeat(rows);
        self.rank.repeat(rows);
        self.positions.repeat(rows);
    }

    /// Counts a token that a kernel offered to the slots.
    pub fn count_token(&mut self) {
        if !self.is_full() {
            self.keys.count_token();
            self.rank.count(1);
            self.positions.count(1);
        }
    }
}
