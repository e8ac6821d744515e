//! Keys and values of earlier tokens, in buffers that kernels write to in place.
//!
//! A `SelectorCache` keeps all keys of one text, for selectors that evict nothing; `TokenKeys` of sieve-core
//! describes which of them a token reads. Bounds of pages are updated in place.
use super::token_buffer::{RowsOf, TokenBuffer};
use crate::device::row_behind;
use crate::tensors::{primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Int, Tensor};
use burn_flex::Flex;
use sieve_core::{DmaWindow, TokenKeys};
use std::any::Any;

/// The axis of the tokens in `[batch, num_kv_heads, room, ..]`. `room` is what the buffer can hold; the keys of a head
/// are contiguous.
const KEY_AXIS: usize = 2;

/// Keys and values of earlier tokens, of all or of some.
#[derive(Clone, Debug)]
pub struct KeyCache<B: Backend> {
    /// Keys, `[batch, num_kv_heads, room, head_dim]`.
    pub k: TokenBuffer<B, 4>,
    /// Values, `[batch, num_kv_heads, room, head_dim]`.
    pub v: TokenBuffer<B, 4>,
}

/// How many of the last of `len` keys to keep, at least `kept`: keys are dropped in whole stages of 128, so that
/// kernels that go through stages have the same ones in a text's cache as in its whole row.
pub(super) fn aligned(len: usize, kept: usize) -> usize {
    len - len.saturating_sub(kept) / STAGE * STAGE
}

/// How many of the first and of the last of `len` keys to keep where later queries read `kept`
/// ([`AttentionSpec::kept_keys`](crate::AttentionSpec::kept_keys)). `new` of the keys that a query reads are not among
/// these: its own, or none.
pub fn kept_ends(len: usize, kept: Option<[usize; 2]>, new: usize) -> [usize; 2] {
    let Some([first, last]) = kept else { return [0, len] };
    // The keys behind the first ones begin with a stage, too.
    let first = first.next_multiple_of(STAGE).min(len);
    [first, aligned(len - first, last - new)]
}

/// Keys of a stage of the kernels in order.
const STAGE: usize = 128;

impl<B: Backend> KeyCache<B> {
    /// A cache of these tokens with some room for more: k, v `[batch, new, num_kv_heads, head_dim]`.
    pub fn new(k: Tensor<B, 4>, v: Tensor<B, 4>) -> Self {
        Self::with_capacity(k.swap_dims(1, KEY_AXIS), v.swap_dims(1, KEY_AXIS), None)
    }

    /// A cache of the tokens `[batch, num_kv_heads, new, head_dim]` with room for `room` in all; `None`: some room for
    /// more.
    pub fn with_capacity(k: Tensor<B, 4>, v: Tensor<B, 4>, room: Option<usize>) -> Self {
        let [k, v] = [k, v].map(|x| TokenBuffer::new(x, KEY_AXIS, room));
        Self { k, v }
    }

    /// A cache without a key; `shape`, `[batch, num_kv_heads, room, head_dim]`, is the shape of its keys and of its
    /// values.
    pub fn empty(shape: [usize; 4], options: (&B::Device, DType)) -> Self {
        let [k, v] = [(); 2].map(|()| TokenBuffer::empty(shape, KEY_AXIS, options));
        Self { k, v }
    }

    /// Number of tokens in the cache.
    pub fn len(&self) -> usize {
        self.k.len()
    }

    /// Whether the cache holds no token.
    pub fn is_empty(&self) -> bool {
        self.k.is_empty()
    }

    /// Adds tokens; k, v `[batch, new, num_kv_heads, head_dim]`.
    pub fn append(&mut self, k: Tensor<B, 4>, v: Tensor<B, 4>) {
        self.k.append(k.swap_dims(1, KEY_AXIS));
        self.v.append(v.swap_dims(1, KEY_AXIS));
    }

    /// A packed tensor of the `first` and the `last` cached tokens, with queries of zero, followed by the new tokens
    /// `qkv`, `[batch, new, num_heads + 2 * num_kv_heads, head_dim]`.
    pub fn before(&self, qkv: &Tensor<B, 4>, [first, last]: [usize; 2]) -> Tensor<B, 4> {
        let mut row = [self.k.buffer().clone(), self.v.buffer().clone(), qkv.clone()];
        let any: &mut dyn Any = &mut row;
        if let Some([k, v, qkv]) = any.downcast_mut::<[Tensor<Flex, 4>; 3]>()
            && qkv.dtype() == DType::F32
        {
            let keys = [k, v].map(|x| primitive(x.clone()));
            *qkv = tensor(row_behind(keys, self.len(), [first, last], primitive(qkv.clone())));
            let [.., row] = row;
            return row;
        }
        let earlier = first + last;
        let ends = |x: &TokenBuffer<B, 4>| {
            let tokens = x.tokens().swap_dims(1, KEY_AXIS);
            both_ends(tokens, [first, last])
        };
        let [batch, _, heads, head_dim] = qkv.dims();
        let num_heads = heads - 2 * self.k.buffer().dims()[1];
        let queries = Tensor::zeros([batch, earlier, num_heads, head_dim], (&qkv.device(), qkv.dtype()));
        let keys = Tensor::cat(vec![queries, ends(&self.k), ends(&self.v)], 2);
        Tensor::cat(vec![keys, qkv.clone()], 1)
    }

    /// Makes room for `new` more tokens. If that takes another buffer, only the last `kept` tokens are copied to it,
    /// and those before them that [`kept_ends`] keeps.
    pub fn reserve(&mut self, new: usize, kept: usize) {
        let kept = aligned(self.len(), kept);
        self.k.reserve(new, kept);
        self.v.reserve(new, kept);
    }

    /// As [`reserve`](Self::reserve), where later queries read `kept` of the keys
    /// ([`AttentionSpec::kept_keys`](crate::AttentionSpec::kept_keys)), which are copied.
    pub fn make_room(&mut self, new: usize, kept: Option<[usize; 2]>) {
        let own = 1;
        let ends = kept_ends(self.len(), kept, own);
        self.k.reserve_ends(new, ends);
        self.v.reserve_ends(new, ends);
    }

    /// A copy with the rows that `rows` names. `size(tokens)` is the number of entries that a text of `tokens` tokens
    /// has here, and the room for them.
    #[must_use]
    pub fn rows(&self, rows: RowsOf, size: impl Fn(usize) -> [usize; 2]) -> Self {
        let [k, v] = [&self.k, &self.v].map(|x| x.rows(rows, &size));
        Self { k, v }
    }

    /// Copies `text`, a cache of one row, into row `row`, where its last token becomes token `end - 1`.
    pub fn put(&mut self, row: usize, text: &Self, end: usize) {
        self.k.put(row, &text.k, end);
        self.v.put(row, &text.v, end);
    }

    /// As [`put`](Self::put), where `text` holds the keys that `kept` names
    /// ([`AttentionSpec::kept_keys`](crate::AttentionSpec::kept_keys)).
    pub fn put_kept(&mut self, row: usize, text: &Self, kept: Option<[usize; 2]>, end: usize) {
        let [first, _] = kept_ends(text.len(), kept, 0);
        self.k.put_ends(row, &text.k, first, end);
        self.v.put_ends(row, &text.v, first, end);
    }

    /// Counts one token that a kernel has written after the others.
    pub fn count_token(&mut self) {
        self.k.count(1);
        self.v.count(1);
    }

    /// Writes one token, `[batch, num_kv_heads, 1, head_dim]`, to the places where `mask`,
    /// `[batch, num_kv_heads, room]`, is true.
    pub(super) fn replace(&mut self, mask: Tensor<B, 3, Bool>, k: Tensor<B, 4>, v: Tensor<B, 4>) {
        for (all, one) in [(&mut self.k, k), (&mut self.v, v)] {
            let shape = all.buffer().dims();
            let mask = mask.clone().unsqueeze_dim::<4>(3).expand(shape);
            all.write(|all| all.mask_where(mask, one.expand(shape)));
        }
    }
}

/// The `first` and the `last` tokens of `[batch, tokens, heads, head_dim]`.
pub fn both_ends<B: Backend>(x: Tensor<B, 4>, [first, last]: [usize; 2]) -> Tensor<B, 4> {
    let len = x.dims()[1];
    if first + last == len {
        return x;
    }
    if first == 0 {
        return x.narrow(1, len - last, last);
    }
    Tensor::cat(vec![x.clone().narrow(1, 0, first), x.narrow(1, len - last, last)], 1)
}

/// All keys of a text under a decode selector that evicts nothing: each token reads some of them.
#[derive(Clone, Debug)]
pub struct SelectorCache<B: Backend> {
    /// Keys and values of all tokens.
    pub keys: KeyCache<B>,
    /// For each page the smallest value that its keys have in each column, then the largest, f32
    /// `[batch, num_kv_heads, room, 2 * head_dim]`; for [`TokenKeys::Pages`].
    pub bounds: Option<TokenBuffer<B, 4>>,
    /// The keys that the last token read.
    pub reads: TokenKeys,
    /// Whether `reads` holds for every later token.
    pub is_fixed: bool,
}

impl<B: Backend> SelectorCache<B> {
    /// A cache of a prompt's keys and values, `[batch, tokens, num_kv_heads, head_dim]`.
    pub fn new([k, v]: [Tensor<B, 4>; 2], reads: TokenKeys, is_fixed: bool) -> Self {
        let bounds = match reads {
            TokenKeys::Pages { page, .. } => Some(page_bounds(k.clone().swap_dims(1, KEY_AXIS), page)),
            TokenKeys::Ends { .. } | TokenKeys::Largest(_) => None,
        };
        Self { keys: KeyCache::new(k, v), bounds, reads, is_fixed }
    }

    /// Makes room for one more token. Returns how many further tokens fit before a buffer must grow.
    #[cfg(any(feature = "cuda", test))]
    pub(super) fn reserve_token(&mut self) -> usize {
        self.keys.reserve(1, self.keys.len());
        let (len, mut room) = (self.keys.len() + 1, self.keys.k.room());
        if let (Some(bounds), TokenKeys::Pages { page, .. }) = (&mut self.bounds, self.reads) {
            bounds.reserve(1, bounds.len());
            room = room.min(bounds.room() * page);
        }
        room - len
    }

    /// Counts one token that a kernel has added, and the page that begins with it, if any.
    pub fn count_token(&mut self) {
        self.keys.count_token();
        if let (Some(bounds), TokenKeys::Pages { page, .. }) = (&mut self.bounds, self.reads) {
            bounds.count(self.keys.len().div_ceil(page) - bounds.len());
        }
    }
}

/// Bounds of the pages of keys `[batch, num_kv_heads, tokens, head_dim]`; the last page may be short.
fn page_bounds<B: Backend>(k: Tensor<B, 4>, page: usize) -> TokenBuffer<B, 4> {
    let [batch, heads, tokens, width] = k.dims();
    let (pages, rest) = (tokens / page, tokens % page);
    let of = |[first, pages, size]: [usize; 3]| {
        let keys = k.clone().narrow(KEY_AXIS, first, pages * size);
        let keys = keys.reshape([batch, heads, pages, size, width]).cast(DType::F32);
        let ends = Tensor::cat(vec![keys.clone().min_dim(3), keys.max_dim(3)], 3);
        ends.reshape([batch, heads, pages, 2 * width])
    };
    let parts = [[0, pages, page], [pages * page, usize::from(rest > 0), rest]];
    let parts = parts.into_iter().filter(|part| part[1] > 0).map(of);
    let room = None;
    TokenBuffer::new(Tensor::cat(parts.collect(), KEY_AXIS), KEY_AXIS, room)
}

/// The keys that a DMA layer keeps, in `window.keep_window_size` slots. KV heads may keep the keys of different tokens.
///
/// A key that one query no longer sees is seen by no later query, so a new key takes its slot.
#[derive(Clone, Debug)]
pub struct DmaCache<B: Backend> {
    /// Keys and values, one in each slot.
    pub keys: KeyCache<B>,
    /// Ranks of the keys, `[batch, num_kv_heads, keep_window_size]`, by which keys are replaced: [`crate::dma_rank`]'s,
    /// or in [`crate::heavy_decode`] the attention that each key received.
    pub rank: TokenBuffer<B, 3>,
    /// Positions of the keys, `[batch, num_kv_heads, keep_window_size]`.
    pub positions: TokenBuffer<B, 3, Int>,
    /// Number of slots, and how many of the last keys always have one.
    pub window: DmaWindow,
    /// Whether the keys of each head are known to lie by rising position.
    is_in_order: bool,
}

impl<B: Backend> DmaCache<B> {
    /// A cache of these keys: k, v `[batch, num_kv_heads, len, head_dim]`; rank, positions `[batch, num_kv_heads,
    /// len]`.
    ///
    /// Panics on more keys than slots.
    pub fn new([k, v]: [Tensor<B, 4>; 2], rank: Tensor<B, 3>, positions: Tensor<B, 3, Int>, window: DmaWindow) -> Self {
        let room = Some(window.keep_window_size);
        assert!(k.dims()[KEY_AXIS] <= window.keep_window_size, "more keys than slots");
        Self {
            keys: KeyCache::with_capacity(k, v, room),
            rank: TokenBuffer::new(rank, KEY_AXIS, room),
            positions: TokenBuffer::new(positions, KEY_AXIS, room),
            window,
            is_in_order: false,
        }
    }

    /// Number of slots that hold a key.
    pub fn len(&self) -> usize {
        self.rank.len()
    }

    /// Whether no slot holds a key.
    pub fn is_empty(&self) -> bool {
        self.rank.is_empty()
    }

    /// Whether a new key must replace another.
    pub(crate) fn is_full(&self) -> bool {
        self.len() >= self.window.keep_window_size
    }

    /// Sorts the keys by position, unless they are in this order: no key has taken another one's slot since a part of a
    /// prompt was read. A sort waits for the device and sorts on the host.
    pub fn sort(&mut self) {
        if !self.is_in_order {
            *self = self.sorted().in_order();
        }
    }

    /// A copy with the keys sorted by position.
    fn sorted(&self) -> Self {
        let order = self.positions.tokens().argsort(2);
        let [batch, heads, len, width] = self.keys.k.tokens().dims();
        let of_keys = order.clone().unsqueeze_dim::<4>(3).expand([batch, heads, len, width]);
        let keys = [&self.keys.k, &self.keys.v].map(|x| x.tokens().gather(2, of_keys.clone()));
        let rank = self.rank.tokens().gather(2, order.clone());
        let positions = self.positions.tokens().gather(2, order);
        Self::new(keys, rank, positions, self.window)
    }

    /// A copy with the rows of the batch that `rows` names. A text of fewer tokens than the window has slots does not
    /// fill them, but has room for all.
    #[must_use]
    pub fn rows(&self, rows: RowsOf) -> Self {
        let slots = self.window.keep_window_size;
        let used_and_room = |tokens: usize| [tokens.min(slots), slots];
        Self {
            keys: self.keys.rows(rows, used_and_room),
            rank: self.rank.rows(rows, used_and_room),
            positions: self.positions.rows(rows, used_and_room),
            window: self.window,
            is_in_order: matches!(rows, RowsOf::Copies(_)) && self.is_in_order,
        }
    }

    /// Copies `text`, a cache of one row, into row `row`, from the first slot on.
    pub fn put(&mut self, row: usize, text: &Self) {
        self.is_in_order = false;
        self.keys.put(row, &text.keys, text.len());
        self.rank.put(row, &text.rank, text.len());
        self.positions.put(row, &text.positions, text.len());
    }

    /// Counts one token that a kernel has added: the length grows only while slots are free.
    pub fn count_token(&mut self) {
        if self.is_full() {
            self.is_in_order = false;
        } else {
            self.keys.count_token();
            self.rank.count(1);
            self.positions.count(1);
        }
    }

    /// The same cache, whose keys lie by rising position.
    pub(super) fn in_order(self) -> Self {
        Self { is_in_order: true, ..self }
    }

    /// Notes that a new key takes the slot of another one.
    pub(super) fn replaces(&mut self) {
        self.is_in_order = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Distribution;
    use burn_flex::{Flex, FlexDevice};

    #[test]
    fn slots_are_sorted_where_a_key_has_taken_the_slot_of_another_one_and_else_stay_as_they_are() {
        let window = DmaWindow { keep_window_size: 4, local_window_size: 1 };
        let positions = |of: [i32; 4]| Tensor::<Flex, 3, Int>::from_ints([[of, [0, 1, 2, 3]]], &FlexDevice);
        // The key of head 0 at position p is p.
        let keys = |of: [f32; 4]| Tensor::<Flex, 3>::from_floats([[of, [0.0, 1.0, 2.0, 3.0]]], &FlexDevice);
        let cache = |of: [i32; 4]| {
            let k = keys(of.map(|position| position as f32));
            let x = k.clone().unsqueeze_dim::<4>(3);
            DmaCache::new([x.clone(), x], k, positions(of), window)
        };
        let held = |cache: &DmaCache<Flex>| {
            let ints: Vec<i64> = cache.positions.tokens().into_data().iter().collect();
            let [k, v] =
                [&cache.keys.k, &cache.keys.v].map(|x| x.tokens().into_data().iter::<f32>().collect::<Vec<_>>());
            let rank: Vec<f32> = cache.rank.tokens().into_data().iter().collect();
            assert!(k == v && k == rank && k == ints.iter().map(|&p| p as f32).collect::<Vec<_>>());
            ints
        };
        let mut sorted = cache([7, 5, 2, 6]);
        sorted.sort();
        assert_eq!(held(&sorted), [2, 5, 6, 7, 0, 1, 2, 3]);
        // A cache that is known to be in order is left alone, also where this is wrong.
        let mut left = cache([7, 5, 2, 6]).in_order();
        left.sort();
        assert_eq!(held(&left), [7, 5, 2, 6, 0, 1, 2, 3]);
        // A token that a kernel adds to full slots, and a text that is put into the row, may end the order.
        left.count_token();
        left.sort();
        assert_eq!(held(&left), [2, 5, 6, 7, 0, 1, 2, 3]);
        left.put(0, &cache([9, 8, 4, 3]).in_order());
        left.sort();
        assert_eq!(held(&left), [3, 4, 8, 9, 0, 1, 2, 3]);
    }

    #[test]
    fn a_selector_cache_has_bounds_of_every_page_and_counts_pages_as_they_begin() {
        let (page, heads, width) = (4, 2, 3);
        for tokens in [1usize, 4, 11] {
            let shape = [1, tokens, heads, width];
            let k = Tensor::<Flex, 4>::random(shape, Distribution::Default, &FlexDevice);
            let reads = TokenKeys::Pages { page, count: 3 };
            let is_fixed = true;
            let mut cache = SelectorCache::new([k.clone(), k.clone()], reads, is_fixed);
            let k: Vec<f32> = k.into_data().iter::<f32>().collect();
            let bounds = cache.bounds.as_ref().expect("pages").tokens();
            let pages = tokens.div_ceil(page);
            assert_eq!(bounds.dims(), [1, heads, pages, 2 * width]);
            let bounds: Vec<f32> = bounds.into_data().iter::<f32>().collect();
            for (at, &bound) in bounds.iter().enumerate() {
                let (column, page_of_head) = (at % (2 * width), at / (2 * width));
                let (head, first) = (page_of_head / pages, page_of_head % pages * page);
                let keys = (first..(first + page).min(tokens)).map(|t| k[(t * heads + head) * width + column % width]);
                let expected = if column < width {
                    keys.fold(f32::INFINITY, f32::min)
                } else {
                    keys.fold(f32::NEG_INFINITY, f32::max)
                };
                assert_eq!(bound, expected, "{tokens} tokens, entry {at}");
            }
            // Buffers grow before a token needs them: 1200 tokens exceed the spare room for 256 keys and for 256 pages.
            for len in tokens + 1..tokens + 1200 {
                let left = cache.reserve_token();
                cache.count_token();
                let found = cache.bounds.as_ref().map(|bounds| [bounds.len(), bounds.room() * page - len]);
                let [pages, room] = found.expect("pages");
                assert_eq!((cache.keys.len(), pages), (len, len.div_ceil(page)));
                assert_eq!(left, room.min(cache.keys.k.room() - len), "{len}");
            }
        }
    }
}
